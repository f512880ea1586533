"""Environments of Gymnasium, as texts."""

from torchrl_mt.bridges.gymnasium.text_env import GymTextEnv

__all__ = ["GymTextEnv"]
