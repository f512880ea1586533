"""Rewards of lengths: all rows of an episode count, wherever they lie, and no prompt does."""

import pytest
import torch
from tensordict import NonTensorStack

from tests.objectives.helpers import MASK
from torchrl_mt.objectives import ExperienceMaker, LengthPenalty, OverlongPenalty


@pytest.mark.parametrize(
    ("source", "penalty"),
    [
        (OverlongPenalty(5, 3), lambda n: -min(1.0, max(0.0, (n - 2) / 3))),
        (LengthPenalty(), lambda n: -n),
        (LengthPenalty(4), lambda n: -abs(n - 4)),
        (LengthPenalty("wanted"), lambda n: -abs(n - 3.5)),
    ],
    ids=["overlong", "each token", "target", "target of each item"],
)
def test_sources_of_a_mix(rows, model, source, penalty):
    batch = rows(n=9)[torch.randperm(9, generator=torch.Generator().manual_seed(0))]
    batch["wanted"] = [3.5] * 9
    maker = ExperienceMaker(model, reward=[("episode", 1.0), (source, 0.25)], advantage="batch")
    out = maker(batch)
    for episode in batch["episode"].unique().tolist():
        here = batch["episode"] == episode
        length = int(batch[MASK][here].sum())
        expected = float(batch["rewards", "full"][here].sum())
        expected += 0.25 * penalty(length) if length else 0.0
        assert float(out["rewards", "shaped"][here].sum()) == pytest.approx(expected, abs=1e-5)
    assert f"reward/default/{source.name}/mean" in maker.metrics


def test_bad_arguments_are_named(rows):
    with pytest.raises(ValueError, match="buffer must be positive, got 0"):
        OverlongPenalty(4, 0)
    with pytest.raises(ValueError, match=r"buffer must be at most max_length \(4\), got 5"):
        OverlongPenalty(4, 5)
    with pytest.raises(ValueError, match="target must be at least 0, got -1"):
        LengthPenalty(-1)
    with pytest.raises(TypeError, match=r"target must be an integer or the key .* got 1.5"):
        LengthPenalty(1.5)
    with pytest.raises(KeyError, match=r"lack the entry 'wanted'; bring it with MergeTurns"):
        LengthPenalty("wanted")(rows())
    batch = rows()
    batch["wanted"] = NonTensorStack(*["long"] * 6)
    with pytest.raises(TypeError, match="the entry 'wanted' of rows must be a tensor or numbers"):
        LengthPenalty("wanted")(batch)
