"""Rows from rows, from whole episodes, or from the next batch of a collector or replay buffer."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase

from torchrl_mt.transforms import MergeTurns

_TURN: NestedKey = ("tokens", "response")


def rows_of(batch: Any, action: NestedKey) -> TensorDictBase:
    """Get rows ``[N]`` that may be written to; tensors are shared, and the batch is not changed.

    Args:
        batch: Rows; or whole episodes in TED, flat ``[ΣT]``; or a collector or replay buffer of
            either, whose next batch is taken.
        action: Key of the rows' tokens.

    Raises:
        TypeError: If the batch is none of these.
        ValueError: If there is no next batch.
    """
    # By its method: importing TorchRL's collectors takes half a second.
    if not isinstance(batch, TensorDictBase) and hasattr(batch, "next"):
        batch = batch.next()
        if batch is None:
            raise ValueError(
                "batch: the collector gave none: its data is at its end, or it writes to its "
                "replay_buffer, and a sample of that is the batch."
            )
    if not isinstance(batch, TensorDictBase):
        raise TypeError(
            "batch must be a TensorDict of rows or episodes, a collector or a replay buffer, got "
            f"{type(batch).__name__}; a collector takes items as its data."
        )
    # By their keys: ragged entries cannot be read as one tensor.
    entries = batch.keys(True)
    if action not in entries and _TURN in entries:
        return MergeTurns()(batch)
    return batch.copy()
