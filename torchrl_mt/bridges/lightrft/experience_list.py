"""Experience making in one call, as LightRFT's experience maker offers it."""

from __future__ import annotations

from typing import Any

from torchrl_mt.bridges.lightrft.experience import Experience
from torchrl_mt.checks import check_positive_integer
from torchrl_mt.objectives import ExperienceMaker

__all__ = ["make_experience_list"]


def make_experience_list(
    maker: ExperienceMaker, batch: Any, micro_batch_size: int | None = None
) -> list[Experience]:
    """Complete a batch and cut it into micro-batches, as LightRFT's method of this name does.

    Statistics are those of the whole batch. For the gradient of the whole batch, give the loss the
    total of all parts (:func:`~torchrl_mt.objectives.functional.merge_totals`).

    Args:
        maker: Makes the experience.
        batch: What ``maker.rows_of`` takes: rows, whole episodes, a collector or a replay buffer. Rows
            and episodes are not changed.
        micro_batch_size: Maximum number of rows of a part; one part by default.

    Returns:
        The parts, in order.

    Raises:
        ValueError: If ``micro_batch_size`` is below 1; else as ``maker.rows_of`` and calling the maker.

    Examples:
        >>> for part in make_experience_list(maker, collector, 8):  # doctest: +SKIP
        ...     loss_module(part.to_rows())["loss_objective"].backward()
    """
    if micro_batch_size is not None:
        micro_batch_size = check_positive_integer("micro_batch_size", micro_batch_size)
    rows = maker(maker.rows_of(batch))
    parts = rows.split(micro_batch_size or len(rows))
    return [Experience.from_rows(part, maker.tensor_keys) for part in parts]
