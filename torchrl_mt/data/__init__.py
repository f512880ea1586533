"""Replay by whole episodes: storage, writer and samplers for TorchRL's replay buffers."""

from torchrl_mt.data.clip_sampler import ClipSampler
from torchrl_mt.data.episode_sampler import EpisodeSampler
from torchrl_mt.data.prioritized_clip_sampler import PrioritizedClipSampler
from torchrl_mt.data.storage import EpisodeStorage
from torchrl_mt.data.writer import EpisodeWriter

__all__ = [
    "ClipSampler",
    "EpisodeSampler",
    "EpisodeStorage",
    "EpisodeWriter",
    "PrioritizedClipSampler",
]
