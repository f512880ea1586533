"""Agents: programs that speak to an OpenAI endpoint."""

from torchrl_mt.agents.program import AgentProgram, ProgramTimeoutError

__all__ = ["AgentProgram", "ProgramTimeoutError"]
