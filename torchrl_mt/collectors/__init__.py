"""Collectors: whole episodes of many conversations at once, as TED."""

from torchrl_mt.collectors import context
from torchrl_mt.collectors.collector import MultiTurnCollector
from torchrl_mt.collectors.context import EpisodeContext
from torchrl_mt.collectors.distributed.collector import (
    MultiProcessCollector,
    RayMultiTurnCollector,
)
from torchrl_mt.collectors.episode import Episode, Turn, episodes_to_tensordict
from torchrl_mt.collectors.items.curriculum import (
    Curriculum,
    SuccessRateCurriculum,
    WeightedCurriculum,
)
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.prompt import Prompt
from torchrl_mt.collectors.recorder import LimitReached, Recorder
from torchrl_mt.collectors.scheduling.group_filters import has_spread
from torchrl_mt.collectors.scheduling.sample_ratio import CollectionEndedError, SampleRatio
from torchrl_mt.collectors.scheduling.unique_ids import UniqueTrajIds
from torchrl_mt.collectors.settings import AgentOptions, ChatOptions, CollectorOptions
from torchrl_mt.collectors.workflow import Rejected, Workflow

__all__ = [
    "AgentOptions",
    "ChatOptions",
    "CollectionEndedError",
    "CollectorOptions",
    "Curriculum",
    "Episode",
    "EpisodeContext",
    "LimitReached",
    "Limits",
    "MultiProcessCollector",
    "MultiTurnCollector",
    "Prompt",
    "RayMultiTurnCollector",
    "Recorder",
    "Rejected",
    "SampleRatio",
    "StopReason",
    "SuccessRateCurriculum",
    "Turn",
    "UniqueTrajIds",
    "WeightedCurriculum",
    "Workflow",
    "context",
    "episodes_to_tensordict",
    "has_spread",
]
