"""Collectors: whole episodes of many conversations at once, as TED."""

from torchrl_mt.collectors.chat import ChatTokens
from torchrl_mt.collectors.episode import Episode, Turn, episodes_to_tensordict
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.multi_turn import MultiTurnCollector

__all__ = [
    "ChatTokens",
    "Episode",
    "Limits",
    "MultiTurnCollector",
    "StopReason",
    "Turn",
    "episodes_to_tensordict",
]
