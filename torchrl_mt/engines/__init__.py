"""Engines: what turns prompt tokens into sampled tokens."""

from torchrl_mt.engines.engine import Completion, Engine
from torchrl_mt.engines.transformers_engine import TransformersEngine

__all__ = ["Completion", "Engine", "TransformersEngine"]
