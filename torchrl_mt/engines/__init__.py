"""Engines sample tokens that continue a prompt."""

from torchrl_mt.engines.adapters import adapter_weights, merged_weights, save_adapter
from torchrl_mt.engines.completions.engine import CompletionsEngine
from torchrl_mt.engines.engine import Completion, Engine
from torchrl_mt.engines.policy.engine import PolicyEngine
from torchrl_mt.engines.server_weights import SGLangWeights, VLLMWeights, WeightUpdateError
from torchrl_mt.engines.transformers.engine import TransformersEngine

__all__ = [
    "Completion",
    "CompletionsEngine",
    "Engine",
    "PolicyEngine",
    "SGLangWeights",
    "TransformersEngine",
    "VLLMWeights",
    "WeightUpdateError",
    "adapter_weights",
    "merged_weights",
    "save_adapter",
]
