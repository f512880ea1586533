"""A call that fails leaves the rows as they were, wherever it fails and whatever holds the rows."""

import copy

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from torchrl_mt.objectives import ExperienceMaker, RewardMix
from torchrl_mt.objectives.functional import RewardNormalizer
from torchrl_mt.objectives.rows.writing import check_writable


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


def lock_element(rows):
    rows = stacked(rows)
    rows.tensordicts[2].lock_()
    return rows


def lock_in_element(name):
    def lock(rows):
        rows = stacked(rows)
        rows.tensordicts[4][name].lock_()
        return rows

    return lock


def lock_in(name):
    def lock(rows):
        rows[name, "mine"] = torch.zeros(len(rows))
        rows[name].lock_()
        return rows

    return lock


LOCKED = {
    **{f"{name} locked": lock_in(name) for name in ("log_probs", "rewards")},
    "an element locked": lock_element,
    "log_probs of an element locked": lock_in_element("log_probs"),
    "rewards of an element locked": lock_in_element("rewards"),
}


@pytest.mark.parametrize("lock", LOCKED.values(), ids=LOCKED)
def test_rows_that_are_locked_in_part_are_refused_before_anything_runs(
    model, other_model, rows, lock
):
    def never(*args, **kwargs):
        raise AssertionError("the model ran")

    batch = lock(rows())
    before = entries(batch)
    normalizer = RewardNormalizer()
    maker = ExperienceMaker(
        model, ref=other_model, reward=RewardMix("episode", transform=normalizer)
    )
    handle = other_model.register_forward_pre_hook(never, with_kwargs=True)
    with pytest.raises(ValueError, match=r"cannot be given the entry .* is locked.*rows.copy\(\)"):
        maker(batch)
    assert same(entries(batch), before)
    assert not normalizer.count
    handle.remove()
    out = maker(batch.copy())
    expected = ExperienceMaker(
        model, ref=other_model, reward=RewardMix("episode", transform=RewardNormalizer())
    )(rows())
    torch.testing.assert_close(out["advantage"], expected["advantage"])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_write_that_fails_midway_is_taken_back(
    model, other_model, rows, monkeypatch, lazy, again
):
    maker = ExperienceMaker(
        model, ref=other_model, reward=RewardMix("episode", transform=RewardNormalizer())
    )
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
    check_writable(batch, ["kl", ("weights", "full")])
