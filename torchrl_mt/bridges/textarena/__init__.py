"""Games of TextArena."""

from torchrl_mt.bridges.textarena.env import TextArenaEnv

__all__ = ["TextArenaEnv"]
