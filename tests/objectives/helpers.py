"""What the tests of objectives share: completed rows, their scores, and calls that change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tests.objectives.conftest import make_model, make_rows
from tests.scoring.helpers import entries
from tests.settings import grouped
from torchrl_mt.objectives import ValueModel, row_log_probs

MASK = ("masks", "all_assistant_mask")


@torch.no_grad()
def log_probs(model: nn.Module, rows: TensorDict, **options: Any) -> Tensor:
    """Log-probabilities of the rows' sampled tokens, ``[N, S]``."""
    return row_log_probs(model, *entries(rows), **grouped(**options))[0]


def objective_of(losses: TensorDict) -> Tensor:
    """The sum that is minimised."""
    return sum(value for key, value in losses.items() if key.startswith("loss_"))


def completed_rows(
    model: nn.Module, seed: int = 0, *, weighted: bool = False, **options: Any
) -> TensorDict:
    """Rows as a maker completes them, with random advantages and targets, and policies that moved."""
    rows = make_rows(seed, **options)
    mask = rows[MASK]
    g = torch.Generator().manual_seed(seed)
    noise, drift, advantage, values, returns = torch.randn(5, *mask.shape, generator=g)
    old = log_probs(model, rows) + 0.3 * noise
    rows["log_probs", "old"] = torch.where(mask, old, 0.0)
    rows["log_probs", "full"] = torch.where(mask, old + 0.3 * drift, 0.0)
    rows["log_probs", "ref"] = log_probs(make_model(1), rows)
    rows["advantage"] = torch.where(mask, advantage, 0.0)[..., None]
    rows["values"], rows["returns"] = values, returns
    rows["group"] = torch.arange(len(rows)) // 3
    if weighted:
        rows["weights", "full"] = torch.rand(mask.shape, generator=g)
    return rows


def value_model(model: nn.Module) -> ValueModel:
    """A critic on a copy of a model, with a head that is not zero; the same each time."""
    critic = ValueModel.from_model(copy.deepcopy(model))
    nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    return critic


class TokenCritic(nn.Module):
    """One value per token, of the token alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(24, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.embedding(input_ids)


def refused(
    maker: Any, rows: TensorDict, message: str, error: type[Exception] = ValueError
) -> None:
    """The call is refused and changes nothing in the rows."""
    before, metrics = rows.clone(), dict(maker.metrics)
    with pytest.raises(error, match=message):
        maker(rows)
    assert set(rows.keys(True)) == set(before.keys(True))
    for key in before.keys(True, True):
        if isinstance(before[key], Tensor):
            torch.testing.assert_close(rows[key], before[key], rtol=0, atol=0, equal_nan=True)
    assert maker.metrics == metrics
