"""Computer use on the servers of cua-bench, and its pull-style dataloader."""

from torchrl_mt.bridges.cua_bench.actions import Action, ActionError, parse_actions
from torchrl_mt.bridges.cua_bench.computer import ComputerError
from torchrl_mt.bridges.cua_bench.computer_env import ComputerEnv
from torchrl_mt.bridges.cua_bench.loader import MultiTurnDataLoader

__all__ = [
    "Action",
    "ActionError",
    "ComputerEnv",
    "ComputerError",
    "MultiTurnDataLoader",
    "parse_actions",
]
