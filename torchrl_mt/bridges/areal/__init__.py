"""Workflows written for AReaL, which return tensors of padded sequences."""

from torchrl_mt.bridges.areal.result import read_result

__all__ = ["read_result"]
