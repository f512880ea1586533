"""Scoring of training rows by models: log-probabilities and values, padded or packed."""

from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.values import ValueModel, row_values

__all__ = ["Passes", "ValueModel", "row_log_probs", "row_values"]
