"""Replay by whole episodes: storage, writer and samplers for TorchRL's replay buffers."""

from torchrl_mt.data.samplers.clip import ClipSampler
from torchrl_mt.data.samplers.episode import EpisodeSampler
from torchrl_mt.data.samplers.prioritized import PrioritizedClipSampler
from torchrl_mt.data.samplers.selectors import linear_mix, recent, uniform
from torchrl_mt.data.storage import EpisodeStorage
from torchrl_mt.data.writer import EpisodeWriter

__all__ = [
    "ClipSampler",
    "EpisodeSampler",
    "EpisodeStorage",
    "EpisodeWriter",
    "PrioritizedClipSampler",
    "linear_mix",
    "recent",
    "uniform",
]
