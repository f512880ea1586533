"""Functions between rewards and advantages, and lists of experience for training loops."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

from tests.objectives.conftest import make_model, make_rows
from tests.objectives.helpers import MASK, refused
from tests.objectives.rewards.test_text import turns_of
from torchrl_mt.bridges.lightrft import Experience, make_experience_list
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.objectives.functional import merge_totals
from torchrl_mt.transforms import MergeTurns

SHAPED, SCORE = ("rewards", "shaped"), ("rewards", "episode")
MODEL = make_model()


def best_episodes(rows):
    """Drop episodes below the mean, and give the rest back in another order."""
    return rows[rows[SCORE] >= rows[SCORE].mean()].flip(0)


def doubled(rows):
    rows[SHAPED] *= 2
    return rows


def shown_and_weighted(rows):
    rows["weights", "full"] = torch.where(rows["episode"] % 2 == 0, 2.0, 1.0)
    rows["seen"] = rows["episode"] * 10
    return rows


def halved(rows):
    rows["weights", "full"] = rows["weights", "full"] * 0.5
    return rows


def reject_odd(rows):
    rows["valid"] = rows["episode"] % 2 == 0
    return rows


def assert_rows_equal(one, other, but=()):
    left, right = set(one.keys(True, True)) - set(but), set(other.keys(True, True)) - set(but)
    assert left == right
    for key in left:
        a, b = one[key], other[key]
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key


@pytest.mark.parametrize("advantage", ["turn", "batch", "grpo"])
def test_what_is_left_is_completed_as_if_it_had_come_alone(model, other_model, rows, advantage):
    given = rows(n=9)
    given["label"] = [f"row {i}" for i in range(9)]
    before = given.clone()
    options = {"ref": other_model, "old_log_probs": "actor", "advantage": advantage}
    maker = ExperienceMaker(model, process=[best_episodes, doubled], **options)
    out = maker(given)
    assert_rows_equal(given, before)
    score = torch.zeros(9).index_add(0, given["episode"], given["rewards", "full"].sum(-1))
    keep = score[given["episode"]] >= score[given["episode"]].mean()
    assert 0 < len(out) < 9
    alone = before[keep]
    alone["rewards", "full"] = 2 * alone["rewards", "full"]
    expected = ExperienceMaker(model, **options)(alone)
    assert_rows_equal(out, expected, but=[SHAPED, ("rewards", "full")])
    assert torch.equal(out["rewards", "full"], before[keep]["rewards", "full"])
    assert torch.equal(out[SHAPED], expected["rewards", "full"])
    assert maker.metrics["process/best_episodes/dropped_rows"] == 9 - len(out)
    assert maker.metrics["process/doubled/dropped_rows"] == 0


@settings(max_examples=6, deadline=None)
@drawn(kept=st.sets(st.integers(0, 5), min_size=1), seed=st.integers(0, 99))
def test_any_episodes_may_be_dropped_in_any_order(kept, seed):
    given = make_rows(n=9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))

    def keep(shown):
        shown = shown[order]
        return shown[torch.isin(shown["episode"], shown["episode"].unique()[sorted(kept)])]

    out = ExperienceMaker(MODEL, process=keep, advantage="batch")(given)
    alone = given[torch.isin(given["episode"], out["episode"])]
    expected = ExperienceMaker(MODEL, advantage="batch")(alone)
    assert_rows_equal(out, expected, but=[SHAPED])


def test_rows_may_be_weighted_and_rejected(model, rows):
    maker = ExperienceMaker(model, process=[shown_and_weighted, reject_odd, halved])
    out = maker(rows())
    odd = out["episode"] % 2 == 1
    assert torch.equal(out["seen"], out["episode"] * 10)
    assert torch.equal(out["valid"], ~odd)
    weight = torch.where(out[MASK] & ~odd[:, None], 1.0, 0.0)
    assert torch.equal(out["weights", "full"], weight)
    assert not out[SHAPED][odd].any()
    assert maker.metrics["process/reject_odd/rejected_rows"] == int(odd.sum())
    expected = rows()
    expected["valid"] = out["valid"]
    expected = ExperienceMaker(model)(expected)
    torch.testing.assert_close(out["advantage"], expected["advantage"])


def test_keys_of_ones_own_are_kept(model, rows):
    names = {"episode": "traj", "valid": "fine", "assistant_mask": ("m", "sampled")}
    moved = rows()
    moved.rename_key_("episode", "traj")
    moved.rename_key_(MASK, ("m", "sampled"))
    maker = ExperienceMaker(model, process=reject_odd)
    maker.set_keys(**names)
    out, expected = maker(moved), ExperienceMaker(model, process=reject_odd)(rows())
    assert torch.equal(out["fine"], expected["valid"])
    assert "valid" not in out
    torch.testing.assert_close(out["advantage"], expected["advantage"])


class Mark:
    """Copies of it are not equal."""


def test_python_objects_are_kept_and_may_be_added(model, rows):
    def turned(rows):
        return rows.flip(0)  # TensorDict drops objects here

    given = rows()
    labels = [f"label {k}" for k in given["episode"].tolist()]
    given["label"], given["marks"] = labels, NonTensorStack(*(Mark() for _ in labels))
    given["table"] = NonTensorData({"a": torch.ones(2)}, batch_size=given.batch_size)
    out = ExperienceMaker(model, process=[turned, best_episodes, doubled])(given)
    assert list(out["label"]) == [f"label {k}" for k in out["episode"].tolist()]
    out = ExperienceMaker(model, process=[lambda rows: put(rows, "note", labels), doubled])(given)
    assert list(out["note"]) == labels
    with pytest.raises(ValueError, match="process/<lambda> must not change 'label'"):
        ExperienceMaker(model, process=lambda rows: put(rows, "label", labels[::-1]))(given)


def put(rows, key, value):
    rows[key] = value
    return rows


ONES = torch.ones(6)


def spoilt(name, function):
    return lambda rows: put(rows, ("rewards", name), function(rows["rewards", name]))


def of_rows(reward):
    return reward[:, 0]


def weighted(weight):
    return lambda rows: put(rows, ("weights", "full"), weight)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("return the rows, .* got NoneType", lambda rows: None),
        (r"\('tokens', 'full'\)\] are missing", lambda rows: rows.exclude(("tokens", "full"))),
        ("not change 'group'", lambda rows: put(rows, "group", rows["group"] + 1)),
        (r"not change \('rewards', 'full'\): it may change", spoilt("full", lambda x: x + 1)),
        ("return rows that it was given, each once", lambda rows: torch.cat([rows, rows])),
        ("dropped all 6 rows", lambda rows: rows[:0]),
        ("keep or drop all rows of an episode, .* some of episode 0", lambda rows: rows[1:]),
        (r"leave \('rewards', 'shaped'\) finite", spoilt("shaped", lambda x: x / 0)),
        ("sampled tokens only", spoilt("shaped", lambda x: x + 1)),
        (r"floating of shape \(6, 12\), got torch.float32 \(6,\)", spoilt("shaped", of_rows)),
        ("leave 'valid' false where it is", lambda rows: put(rows, "valid", ONES.bool())),
        (r"'full'\) the shape \(6,\) or \(6, 12\), got \(6, 1\)", weighted(ONES[:, None])),
        ("give finite weights of 0 or more", weighted(-ONES)),
        (": valid must be a bool tensor", lambda rows: put(rows, "valid", ONES)),
    ],
)
def test_mistakes_are_named_and_change_nothing(model, rows, message, wrong):
    given = rows()
    given["valid"] = given["episode"] > 0
    maker = ExperienceMaker(model, process=[doubled, wrong])
    refused(maker, given, f"process/<lambda>.*{message}", (TypeError, ValueError))


def summed(loss_module, parts, total):
    loss_module.zero_grad()
    for part in parts:
        loss_module(part, total=total)["loss_objective"].backward()
    return torch.cat([p.grad.flatten() for p in loss_module.parameters()])


def test_a_list_of_experience_is_the_completed_batch(model, rows):
    maker, loss = ExperienceMaker(model, process=best_episodes), MultiTurnLoss(model)
    given = rows(n=9)
    before = given.clone()
    parts = make_experience_list(maker, given, micro_batch_size=2)
    assert_rows_equal(given, before)
    assert all(isinstance(part, Experience) for part in parts)
    whole = maker(given)
    assert [len(part) for part in parts] == [2] * (len(whole) // 2) + [1] * (len(whole) % 2)
    assert_rows_equal(torch.cat([part.to_rows() for part in parts]), whole)
    rows_of_parts = [part.to_rows() for part in parts]
    total = merge_totals(*map(loss.total, rows_of_parts))
    torch.testing.assert_close(
        summed(loss, rows_of_parts, total), summed(loss, [whole], loss.total(whole))
    )
    assert len(make_experience_list(maker, given)) == 1
    with pytest.raises(ValueError, match="micro_batch_size must be a positive integer"):
        make_experience_list(maker, given, micro_batch_size=0)


def turns():
    """Two episodes in TED, of two turns and of one."""
    batch = turns_of([[([3, 4], [5, 6]), ([3, 4, 5, 6, 7], [8])], [([3, 9], [10, 11])]])
    batch["next", "reward"] = torch.tensor([[0.5], [1.0], [-1.0]])
    batch["group"] = torch.zeros(3, dtype=torch.long)
    return batch


class Collector:
    """What matters of a TorchRL collector."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def next(self):
        return self.batches.pop(0) if self.batches else None


def test_episodes_and_collectors_give_experience(model):
    maker = ExperienceMaker(model, old_log_probs="actor")
    expected = maker(MergeTurns()(turns()))
    (of_episodes,) = make_experience_list(maker, turns())
    collector = Collector(turns())
    (of_collector,) = make_experience_list(maker, collector)
    assert_rows_equal(of_episodes.to_rows(), expected)
    assert_rows_equal(of_collector.to_rows(), expected)
    with pytest.raises(ValueError, match="the collector gave none"):
        make_experience_list(maker, collector)
    with pytest.raises(TypeError, match=r"got list; a collector takes items as its data"):
        make_experience_list(maker, ["What is 2 + 2?"])
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(2), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2
    )
    buffer.extend(MergeTurns()(turns()))
    (of_buffer,) = make_experience_list(maker, buffer)
    torch.testing.assert_close(of_buffer.advantages, expected["advantage"].squeeze(-1))
