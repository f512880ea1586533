"""Engines: what turns prompt tokens into sampled tokens."""

from torchrl_mt.engines.completions_engine import CompletionsEngine, CompletionsError
from torchrl_mt.engines.engine import Completion, Engine
from torchrl_mt.engines.policy_engine import PolicyEngine, as_engine
from torchrl_mt.engines.transformers_engine import TransformersEngine

__all__ = [
    "Completion",
    "CompletionsEngine",
    "CompletionsError",
    "Engine",
    "PolicyEngine",
    "TransformersEngine",
    "as_engine",
]
