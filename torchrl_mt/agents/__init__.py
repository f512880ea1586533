"""Agents: any program that speaks to an OpenAI endpoint is an episode of a collector."""

from torchrl_mt.agents.export import Interaction, export_interactions

__all__ = ["Interaction", "export_interactions"]
