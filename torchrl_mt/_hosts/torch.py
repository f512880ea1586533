"""Private names of torch."""

from __future__ import annotations

from torch import Tensor

# ---- tensors that may be changed in place -------------------------------------------------------


def times_changed(tensor: Tensor) -> int:
    """How often torch saw a tensor change in place; 0 in inference mode, where it does not count."""
    return 0 if tensor.is_inference() else tensor._version
