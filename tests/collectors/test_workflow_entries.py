"""Entries of workflows: all that was returned is in the batch, or the episode is refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from torchrl_mt.collectors import Episode, StopReason, Turn, episodes_to_tensordict
from torchrl_mt.collectors.workflow_entries import COLLECTOR_KEYS, check_entries, join_entries
from torchrl_mt.engines import Completion


def episode(extra=None, turns: int = 2) -> Episode:
    played = [Turn([1, k], Completion([k], [-0.5], [0], "stop")) for k in range(turns)]
    return Episode(None, 0, 0, played, StopReason.DONE, entries=extra)


def entries(turns: int = 2, **leaves) -> TensorDict:
    return TensorDict(leaves, [turns])


def test_all_entries_of_all_episodes_are_in_the_batch():
    def extra(turns, start):
        return entries(
            turns,
            score=torch.arange(start, start + turns),
            why=NonTensorStack(*(f"{start + k}" for k in range(turns))),
            judge={"grade": torch.full((turns, 2), float(start))},
            next={"seen": torch.ones(turns, 1, requires_grad=True)},
        )

    batch = episodes_to_tensordict([episode(extra(2, 0)), episode(extra(1, 7), turns=1)])
    assert batch["score"].tolist() == [0, 1, 7]
    assert list(batch["why"]) == ["0", "1", "7"]
    assert batch["judge", "grade"].tolist() == [[0, 0], [0, 0], [7, 7]]
    assert batch["next", "seen"].shape == (3, 1)
    assert not batch["next", "seen"].requires_grad
    assert batch["next", "done"].flatten().tolist() == [False, True, True]


SCORE = {"score": torch.zeros(2)}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "'score' is missing"),
        (entries(), "'score' is missing"),
        (entries(rank=torch.zeros(2)), "'score' is missing, 'rank' is new"),
        (entries(**SCORE, next={"rank": torch.zeros(2)}), r"\('next', 'rank'\) is new"),
        (entries(score=torch.zeros(2, 2)), r"'score' is torch.float32 \[2\] rather than .* \[\]"),
        (entries(score=torch.zeros(2).long()), r"'score' is torch.int64 \[\] rather than"),
        (entries(score=NonTensorStack("a", "b")), "'score' is not a tensor rather than"),
        (entries(score={"x": torch.zeros(2)}), r"'score' is missing, \('score', 'x'\) is new"),
    ],
)
def test_entries_that_differ_are_refused(other, message):
    expected = check_entries(entries(**SCORE))
    assert check_entries(entries(3, score=torch.ones(3)), expected) == expected
    with pytest.raises(ValueError, match=message):
        check_entries(other, expected)
    with pytest.raises(ValueError, match=message):
        episodes_to_tensordict([episode(entries(**SCORE)), episode(other)])


def test_entries_where_the_first_had_none_are_refused():
    assert join_entries([None, entries(), None], [0, 0, 0]) is None
    with pytest.raises(ValueError, match="'score' is new"):
        check_entries(entries(**SCORE), check_entries(None))


@pytest.mark.parametrize("second", [{"score": torch.zeros(2)}, {"rank": torch.zeros(1)}, {}])
def test_entries_that_change_from_turn_to_turn_are_refused(second):
    steps = [TensorDict({"score": torch.zeros(1)}), TensorDict(second)]
    with pytest.raises(ValueError, match="unlike the first in turn 1: 'score' is"):
        check_entries(lazy_stack(steps))


@pytest.mark.parametrize("key", COLLECTOR_KEYS)
def test_what_the_collector_writes_is_refused_by_name(key):
    extra = entries().set(key, torch.zeros(2))
    with pytest.raises(ValueError, match=f"must not have .*'{key[-1]}'"):
        check_entries(extra)
    with pytest.raises(ValueError, match="must not have"):
        check_entries(entries().set((*key, "below"), torch.zeros(2)))


def test_the_list_of_what_the_collector_writes_is_whole():
    played = episode()
    played.valid = played.shows_images = True
    batch = episodes_to_tensordict([played])
    parts = ("next", "images")
    written = {(key,) for key in batch.keys() if key not in parts}  # noqa: SIM118
    written |= {(part, key) for part in parts for key in batch[part].keys()}  # noqa: SIM118
    assert written == set(COLLECTOR_KEYS)
