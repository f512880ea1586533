"""Which steps an index stood for when a sampler gave it out.

An index tensor, and every view of it, stands for the steps as they were then, whatever left in
between, for as long as its memory lives. A copy does if it equals a whole index of the last draws.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchrl_mt.data.ring import runs

__all__ = ["Draw", "DrawLog"]

_MAX_DRAWS = 256


@dataclass(frozen=True)
class Draw:
    """The steps that an index stood for."""

    numbers: Tensor
    """int64 ``[n]``: number of the first step of each clip."""
    spans: int | Tensor
    """Entries of the index per clip: one for all, or int64 ``[n]``."""
    stride: int
    """Stored steps from one entry to the next."""
    first: int
    """Number of the oldest stored step at that time: the index counts from there."""

    def __len__(self) -> int:
        spans = self.spans
        return self.numbers.shape[0] * spans if isinstance(spans, int) else int(spans.sum())

    def starts(self) -> Tensor:
        """The index of each clip's first step, as it was: int64 ``[n]``."""
        return self.numbers - self.first

    def index(self) -> Tensor:
        """The index as it was, flat: int64 ``[N]``."""
        if isinstance(self.spans, int):
            within = torch.arange(self.spans, device="cpu") * self.stride
            return (self.starts()[:, None] + within).flatten()
        within = runs(torch.zeros_like(self.spans), self.spans) * self.stride
        return torch.repeat_interleave(self.starts(), self.spans) + within

    def clips_at(self, positions: Tensor) -> Tensor:
        """Numbers of the clips that entries of the index belong to: int64 as ``positions``."""
        if isinstance(self.spans, int):
            return self.numbers[positions // self.spans]
        return self.numbers[torch.searchsorted(self.spans.cumsum(0), positions, right=True)]


@dataclass(frozen=True)
class _Record:
    """A draw whose index tensor may still live."""

    memory: StorageWeakRef
    offset: int
    draw: Draw | None
    """None once the numbers mean other steps."""


class DrawLog:
    """Remembers what the indices given out stood for.

    Examples:
        >>> log, index = DrawLog(), torch.tensor([3, 4, 7, 8])
        >>> log.record(index, Draw(torch.tensor([13, 17]), spans=2, stride=1, first=10))
        >>> log.clips_of(index[1:3])
        tensor([13, 17])
        >>> log.clips_of(index.clone())
        tensor([13, 13, 17, 17])
        >>> log.clips_of(torch.tensor([3, 4])) is None
        True
    """

    def __init__(self) -> None:
        self._alive: dict[int, _Record] = {}
        self._recent: deque[tuple[Draw, bool]] = deque(maxlen=_MAX_DRAWS)
        """Draws and whether their numbers still mean the same steps, the last one last."""
        self._purge_at = 2 * _MAX_DRAWS

    def record(self, index: Tensor, draw: Draw, *, recent: bool = True) -> None:
        """Remember what an index stands for.

        Args:
            index: int64, contiguous.
            draw: the steps.
            recent: whether copies of the index stand for them, too.
        """
        if len(self._alive) >= self._purge_at:
            live = {key: r for key, r in self._alive.items() if not r.memory.expired()}
            self._alive, self._purge_at = live, 2 * max(len(live), _MAX_DRAWS)
        memory = StorageWeakRef(index.untyped_storage())
        self._alive[memory.cdata] = _Record(memory, int(index.storage_offset()), draw)
        if recent:
            self._recent.append((draw, True))

    def clips_of(self, index: Tensor) -> Tensor | None:
        """The numbers of the clips that an index stands for.

        Args:
            index: int64, any shape.

        Returns:
            int64 ``[index.numel()]``, -1 where the numbers have been forgotten; None if the index
            is not known.
        """
        values = index.detach().flatten().cpu()
        record = self._alive.get(index.untyped_storage()._cdata)
        if record is not None:
            positions = _positions(index) - record.offset
            if record.draw is None:
                return torch.full_like(values, -1)
            inside = (positions >= 0) & (positions < len(record.draw))
            if bool(inside.all()) and torch.equal(record.draw.index()[positions], values):
                return record.draw.clips_at(positions)
        if values.shape[0] < 2:
            return None
        for draw, known in reversed(self._recent):
            clips = _copied(draw, values)
            if clips is not None:
                return clips if known else torch.full_like(values, -1)
        return None

    def forget(self) -> None:
        """The numbers mean other steps from now on: no index so far stands for any of these."""
        self._alive = {
            key: _Record(record.memory, record.offset, None) for key, record in self._alive.items()
        }
        self._recent = deque(((draw, False) for draw, _ in self._recent), maxlen=_MAX_DRAWS)

    def state(self) -> list[Draw]:
        """The last draws, as far as copies of their indices are known."""
        return [draw for draw, known in self._recent if known]

    def restore(self, draws: list[Draw]) -> None:
        """Know what :meth:`state` gave as the last draws."""
        self._recent.extend((draw, True) for draw in draws)

    def __getstate__(self) -> list[Draw]:
        return self.state()

    def __setstate__(self, draws: list[Draw]) -> None:
        DrawLog.__init__(self)
        self.restore(draws)


def _positions(index: Tensor) -> Tensor:
    """Where each entry of a view lies in the memory that it shares: int64 ``[n]``."""
    positions = torch.tensor(index.storage_offset(), device="cpu")
    for size, stride in zip(index.shape, index.stride(), strict=True):
        positions = positions[..., None] + torch.arange(size, device="cpu") * stride
    return positions.flatten()


def _copied(draw: Draw, values: Tensor) -> Tensor | None:
    """The clips of ``values``, if they are the whole index of a draw or the starts of its clips."""
    num, first = values.shape[0], int(values[0])
    if int(draw.numbers[0]) - draw.first != first:
        return None
    if num == len(draw) and torch.equal(draw.index(), values):
        return draw.clips_at(torch.arange(num, device="cpu"))
    if num == draw.numbers.shape[0] and torch.equal(draw.starts(), values):
        return draw.numbers
    return None
