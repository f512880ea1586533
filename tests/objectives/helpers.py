"""What the tests of objectives share: completed rows, their scores, and calls that change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import Qwen2ForSequenceClassification

from tests.objectives.conftest import make_model, make_rows
from tests.scoring.helpers import entries
from tests.settings import grouped
from torchrl_mt.objectives import ValueModel, row_log_probs

MASK = ("masks", "all_assistant_mask")
WORDS = ["guess", "to", "higher", "lower", "correct", "invalid", *map(str, range(1, 9))]
"""What is said in games of numbers up to 8."""


@torch.no_grad()
def log_probs(model: nn.Module, rows: TensorDict, **options: Any) -> Tensor:
    """Log-probabilities of the rows' sampled tokens, ``[N, S]``."""
    return row_log_probs(model, *entries(rows), **grouped(**options))[0]


def objective_of(losses: TensorDict) -> Tensor:
    """The sum that is minimised."""
    return sum(value for key, value in losses.items() if key.startswith("loss_"))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a model has, by the names of the parameters."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradients of a loss by the names of the parameters."""
    model.zero_grad()
    loss.backward()
    return gradients_of(model)


def first_sampled(rows: TensorDict, n: int) -> int:
    """The place of the first sampled token of a row."""
    return int(rows[MASK][n].nonzero()[0])


def rejecting(rows: TensorDict, *numbers: int) -> TensorDict:
    """The same rows with the episodes of some rejected, whatever those hold."""
    rows["valid"] = ~torch.isin(rows["episode"], rows["episode"][list(numbers)])
    return rows


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


def reward_model(model: nn.Module) -> Qwen2ForSequenceClassification:
    """A classifier with one label and the sizes of a model; the same each time."""
    torch.manual_seed(3)
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    return Qwen2ForSequenceClassification(config)


class TokenCritic(nn.Module):
    """One value per token, of the token alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(24, 1)

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None
    ) -> Tensor:
        return self.embedding(input_ids)


class Spoiled(nn.Module):
    """A model or critic that gives no number at some tokens, by default from token 5 on."""

    def __init__(self, model: nn.Module, where: Any = None, bad: float = torch.nan) -> None:
        super().__init__()
        self.model, self.bad = model, bad
        self.where = where or (lambda ids: (ids == 5).cummax(-1).values)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        out = getattr(out, "logits", out)
        return torch.where(self.where(input_ids).unsqueeze(-1), self.bad, out)


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
