"""Which samplers work with an :class:`EpisodeStorage`."""

from __future__ import annotations

from torchrl.data import HERReplayBuffer, PrioritizedSampler, PromptGroupSampler
from torchrl.data.replay_buffers.samplers import StreamingSliceSampler

from torchrl_mt._hosts.torchrl import buffers_on, sampler_of
from torchrl_mt.data.samplers.clip import ClipSampler
from torchrl_mt.data.samplers.episode import EpisodeSampler
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["check_samplers"]


def check_samplers(storage: EpisodeStorage) -> None:
    """Refuse samplers that remember steps by position (``TypeError``): positions shift."""
    for buffer in buffers_on(storage):
        sampler = sampler_of(buffer)
        if isinstance(buffer, HERReplayBuffer) and isinstance(
            sampler, (ClipSampler, EpisodeSampler)
        ):
            raise TypeError(
                f"HERReplayBuffer gives new goals to single steps: use TorchRL's RandomSampler or "
                f"SamplerWithoutReplacement, got {type(sampler).__name__}."
            )
        if isinstance(sampler, ClipSampler):
            continue
        if isinstance(sampler, (PrioritizedSampler, StreamingSliceSampler)):
            raise TypeError(
                f"{type(sampler).__name__} remembers steps by their place in the storage, and places "
                "in an EpisodeStorage change when older episodes leave: use ClipSampler, "
                "PrioritizedClipSampler or EpisodeSampler."
            )
        by_recency = isinstance(sampler, PromptGroupSampler) and sampler.strategy == "recency"
        if by_recency:
            raise TypeError(
                'PromptGroupSampler(strategy="recency") keeps an entry for every storage index up to '
                "the last one written, and those of an EpisodeStorage are handles, from 2**52 on: use "
                "another strategy, or EpisodeSampler(group_key=...)."
            )
