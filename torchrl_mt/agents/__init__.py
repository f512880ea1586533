"""Agents: any program that speaks to an OpenAI endpoint is an episode of a collector."""

from torchrl_mt.agents.agent import Agent
from torchrl_mt.agents.export import Interaction, export_interactions
from torchrl_mt.agents.openai_client import openai_client
from torchrl_mt.agents.server import AgentServer
from torchrl_mt.agents.session import Session

__all__ = [
    "Agent",
    "AgentServer",
    "Interaction",
    "Session",
    "export_interactions",
    "openai_client",
]
