"""Text environments: what answers a language-model agent, turn by turn."""

from torchrl_mt.envs.guess_number import Game, GuessNumber, optimal_return, play_guess_number
from torchrl_mt.envs.text_env import Message, TextEnv, TextStep

__all__ = [
    "Game",
    "GuessNumber",
    "Message",
    "TextEnv",
    "TextStep",
    "optimal_return",
    "play_guess_number",
]
