"""Text environments for language-model agents."""

from torchrl_mt.envs.games.arithmetic import Arithmetic
from torchrl_mt.envs.games.calculator import calculate
from torchrl_mt.envs.games.game import Game
from torchrl_mt.envs.games.guess_number import GuessNumber, optimal_return, play_guess_number
from torchrl_mt.envs.mcp_tools import MCPTools
from torchrl_mt.envs.remote import (
    EnvServer,
    OpenEnvConnectionError,
    OpenEnvEnv,
    OpenEnvError,
    OpenEnvProtocolError,
    OpenEnvTimeoutError,
    Worker,
    Workers,
    create_workers,
)
from torchrl_mt.envs.serve import serve
from torchrl_mt.envs.text_env import Message, TextEnv, TextStep
from torchrl_mt.envs.tool_env import ToolEnv
from torchrl_mt.envs.tools import Tool
from torchrl_mt.envs.torchrl_env import ChatEnvAdapter

__all__ = [
    "Arithmetic",
    "ChatEnvAdapter",
    "EnvServer",
    "Game",
    "GuessNumber",
    "MCPTools",
    "Message",
    "OpenEnvConnectionError",
    "OpenEnvEnv",
    "OpenEnvError",
    "OpenEnvProtocolError",
    "OpenEnvTimeoutError",
    "TextEnv",
    "TextStep",
    "Tool",
    "ToolEnv",
    "Worker",
    "Workers",
    "calculate",
    "create_workers",
    "optimal_return",
    "play_guess_number",
    "serve",
]
