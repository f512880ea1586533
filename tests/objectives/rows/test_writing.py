"""A call that fails leaves the rows as they were, wherever it fails and whatever holds the rows."""

import copy

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from torchrl_mt.objectives import ExperienceMaker, RewardMix
from torchrl_mt.objectives.functional import RewardNormalizer


def entries(rows):
    """Every entry of rows, and of the parts of a stack, as it is now."""
    if isinstance(rows, LazyStackedTensorDict):
        return [entries(part) for part in rows.tensordicts]
    return {key: value.clone() for key, value in rows.items(True, True)}


def same(one, other):
    if isinstance(one, list):
        return all(map(same, one, other))
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)


def stacked(rows):
    return lazy_stack([row.clone() for row in rows.unbind(0)], 0)


def locked(rows, name, element):
    """The same rows, locked in part: within an entry, an element of their stack, or both."""
    rows = rows if element is None else stacked(rows)
    part = rows if element is None else rows.tensordicts[element]
    if name is not None:
        part = part.set((name, "mine"), torch.zeros(part.batch_size))[name]
    part.lock_()
    return rows


@pytest.fixture
def make(model, other_model):
    def make():
        reward = RewardMix("episode", transform=RewardNormalizer())
        return ExperienceMaker(model, ref=other_model, reward=reward)

    return make


@pytest.mark.parametrize(
    ("name", "element"),
    [("log_probs", None), ("rewards", None), (None, 2), ("log_probs", 4), ("rewards", 4)],
)
def test_rows_that_are_locked_in_part_are_refused_before_anything_runs(
    make, other_model, rows, name, element
):
    batch, maker = locked(rows(), name, element), make()
    before = entries(batch)
    with (
        other_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran")),
        pytest.raises(ValueError, match=r"cannot be given the entry .* is locked.*rows.copy\(\)"),
    ):
        maker(batch)
    assert same(entries(batch), before)
    assert not maker.reward.transform.count
    out, expected = maker(batch.copy()), make()(rows())
    torch.testing.assert_close(out["advantage"], expected["advantage"])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_write_that_fails_midway_is_taken_back(make, rows, monkeypatch, lazy, again):
    maker = make()
    maker.set_keys(kl=("new", "kl"))
    batch = maker(rows()) if again else rows()
    batch["rewards", "full"].mul_(3.0)
    batch = stacked(batch) if lazy else batch
    before, statistics = entries(batch), copy.deepcopy(maker.state_dict())
    there = {} if lazy else dict(batch.items(True, True))
    metrics = dict(maker.metrics)
    kind = LazyStackedTensorDict if lazy else TensorDict
    plain = kind.set

    def fails(self, key, item, *args, **kwargs):
        if key == "returns" and item.ndim == 2:
            raise KeyboardInterrupt
        return plain(self, key, item, *args, **kwargs)

    monkeypatch.setattr(kind, "set", fails)
    with pytest.raises(KeyboardInterrupt):
        maker(batch)
    monkeypatch.undo()
    assert same(entries(batch), before)
    assert all(batch[key] is value for key, value in there.items())
    assert ("new" in batch.keys()) == again  # noqa: SIM118
    assert maker.metrics == metrics
    for key, value in maker.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, statistics[key]), key


def test_parts_that_nothing_is_written_to_may_be_locked(model, rows):
    batch = rows()
    batch["tokens"].lock_()
    assert "advantage" in ExperienceMaker(model)(batch)
