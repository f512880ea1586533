"""Models run on training rows: log-probabilities and values, padded or packed, without a trace."""

from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.value_model import ValueModel
from torchrl_mt.scoring.values import row_values

__all__ = ["ValueModel", "row_log_probs", "row_values"]
