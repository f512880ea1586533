"""Agents: any program that speaks to an OpenAI endpoint is an episode of a collector."""

try:
    import httpx as _httpx  # noqa: F401
    import sse_starlette as _sse_starlette  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"torchrl_mt.agents needs the package {error.name}: pip install 'torchrl-mt[agents]'."
    ) from error

from torchrl_mt.agents.agent import Agent
from torchrl_mt.agents.export import Interaction, export_interactions
from torchrl_mt.agents.openai_client import openai_client
from torchrl_mt.agents.program import AgentProgram
from torchrl_mt.agents.server import AgentServer
from torchrl_mt.agents.session import Session

__all__ = [
    "Agent",
    "AgentProgram",
    "AgentServer",
    "Interaction",
    "Session",
    "export_interactions",
    "openai_client",
]
