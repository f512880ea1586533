"""Environments of the ``verifiers`` library."""

from torchrl_mt.bridges.verifiers.env import VerifiersEnv

__all__ = ["VerifiersEnv"]
