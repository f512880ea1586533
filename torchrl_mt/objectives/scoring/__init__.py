"""Models run on training rows: log-probabilities and values, padded or packed, without a trace."""
