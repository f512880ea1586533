"""A penalty that grows before the limit of length is reached, instead of at it."""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.checks import check_positive


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment: what to add to the reward of a response of each length.

    DAPO, eq. 13 (https://arxiv.org/abs/2503.14476)::

        0                                          length <= max_length - buffer
        (max_length - buffer - length) / buffer    in between
        -1                                         length >= max_length

    Args:
        lengths: Sampled tokens of each response or episode, any shape (``mask.sum(-1)`` of rows).
        max_length: Length from which on the penalty is -1, in tokens.
        buffer: Over how many tokens before that it grows.

    Returns:
        In [-1, 0], float32, the shape of ``lengths``.

    Raises:
        ValueError: If ``buffer`` is not in (0, ``max_length``].

    Examples:
        >>> import torch
        >>> overlong_penalty(torch.tensor([60, 80, 90, 100, 140]), max_length=100, buffer=20)
        tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    check_positive("buffer", buffer)
    if buffer > max_length:
        raise ValueError(f"buffer must be at most max_length ({max_length}), got {buffer}.")
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()
