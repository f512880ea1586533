"""Copies of models to score with while the models themselves are trained.

A copy has exactly the weights of one moment, never some of before and some of after an update. Memory is
taken for trained parameters only; frozen ones are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Copies of models, of which some may share layers.

    Args:
        models: The models, without wrappers such as ``DistributedDataParallel``.

    Raises:
        ValueError: If a trained parameter is sharded.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> snapshot = Snapshot([model])
        >>> before, weights = model.weight.item(), snapshot.weights()
        >>> _ = nn.init.constant_(model.weight, 9.0)
        >>> snapshot.load(weights)
        >>> snapshot.models[0].weight.item() == before
        True
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._originals = nn.ModuleList(models)
        self._trained = _trained(self._originals)
        memo: dict[int, Any] = {id(p): p for p in self._originals.parameters()}
        for name, p in self._originals.named_parameters():
            if p.requires_grad and type(p.data) is not Tensor:
                raise ValueError(
                    "actor and critic must have whole parameters to be copied, but "
                    f"{name.partition('.')[2]} is a {type(p.data).__name__}, a shard: score such models "
                    "between training steps, with maker(rows)."
                )
            if p.requires_grad:
                memo[id(p)] = nn.Parameter(p.detach().new_empty(0))  # Until load().
        self._copies = [memo[id(p)] for p in self._trained]
        self.models: list[nn.Module] = list(copy.deepcopy(self._originals, memo))
        """The copies, in the models' order; without weights until :meth:`load`."""

    def weights(self) -> list[Tensor]:
        """Copy the trained parameters. No other thread may train meanwhile."""
        weights = [p.detach().clone() for p in self._trained]
        if any(weight.is_cuda for weight in weights):
            torch.cuda.synchronize()  # They are read on another thread's stream.
        return weights

    def load(self, weights: Sequence[Tensor]) -> None:
        """Give the copies these weights, without copying them."""
        for p, weight in zip(self._copies, weights, strict=True):
            p.data = weight

    def is_of(self, models: Sequence[nn.Module]) -> bool:
        """Whether these are the models, and still the same parameters of them are trained."""
        now = _trained(self._originals)
        same = len(now) == len(self._trained) and all(map(is_, now, self._trained))
        return list(self._originals) == list(models) and same


def _trained(models: nn.Module) -> list[nn.Parameter]:
    return [p for p in models.parameters() if p.requires_grad]
