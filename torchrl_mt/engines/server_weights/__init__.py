"""New weights for sampling servers, from disk or over a process group."""

from torchrl_mt.engines.server_weights.base import ServerWeights, WeightUpdateError
from torchrl_mt.engines.server_weights.sglang import SGLangWeights
from torchrl_mt.engines.server_weights.vllm import VLLMWeights

__all__ = ["SGLangWeights", "ServerWeights", "VLLMWeights", "WeightUpdateError"]
