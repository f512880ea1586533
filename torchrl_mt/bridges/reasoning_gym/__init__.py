"""Tasks of Reasoning Gym."""

from torchrl_mt.bridges.reasoning_gym.env import ReasoningGymEnv

__all__ = ["ReasoningGymEnv"]
