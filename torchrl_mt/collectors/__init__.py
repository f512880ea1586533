"""Collectors: whole episodes of many conversations at once, as TED."""

from torchrl_mt.chat.tokens import Answer, ChatTokens
from torchrl_mt.collectors import context
from torchrl_mt.collectors.collector import MultiTurnCollector
from torchrl_mt.collectors.context import EpisodeContext
from torchrl_mt.collectors.episode import Episode, Turn, episodes_to_tensordict
from torchrl_mt.collectors.items.curriculum import (
    Curriculum,
    SuccessRateCurriculum,
    WeightedCurriculum,
)
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.openai_client import openai_client
from torchrl_mt.collectors.recorder import LimitReached
from torchrl_mt.collectors.scheduling.group_filters import has_spread
from torchrl_mt.collectors.settings import ChatOptions, FailurePolicy, ItemOrder
from torchrl_mt.collectors.workflow import Workflow

__all__ = [
    "Answer",
    "ChatOptions",
    "ChatTokens",
    "Curriculum",
    "Episode",
    "EpisodeContext",
    "FailurePolicy",
    "ItemOrder",
    "LimitReached",
    "Limits",
    "MultiTurnCollector",
    "StopReason",
    "SuccessRateCurriculum",
    "Turn",
    "WeightedCurriculum",
    "Workflow",
    "context",
    "episodes_to_tensordict",
    "has_spread",
    "openai_client",
]
