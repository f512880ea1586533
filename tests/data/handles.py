"""What handles are made of: no public name tells it, and tests compare the values of handles."""

from torchrl_mt.data._store.handles import HANDLES, PADDING, numbers_of

__all__ = ["HANDLES", "PADDING", "numbers_of"]
