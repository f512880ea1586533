"""What is known of an episode at its end reaches each of its rows, from the turns or from the items."""

import logging

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, lazy_stack

from tests.data.conversations import turns_of
from torchrl_mt.transforms import MergeTurns


def episodes():
    """Two turns that fork, then one turn."""
    first, second = ([[1, 2], [7]], [[3], [5]]), ([[6]], [[7]])
    turns = [turns_of(*([*map(torch.tensor, x)] for x in talk)) for talk in (first, second)]
    return lazy_stack([*turns[0], *turns[1]])


def column(*values):
    return NonTensorStack(*map(NonTensorData, values))


def test_items_of_data_reach_all_rows_of_their_episode():
    batch = episodes()
    first, second = {"label": "maths", "reference": [4]}, {"label": "chat"}
    batch["data"] = column(first, first, second)
    rows = MergeTurns()(batch)
    assert rows["label"] == ["maths", "maths", "chat"]
    assert rows.get("reference").tolist() == [[4], [4], None]
    shuffled = rows[torch.tensor([2, 0])]
    assert shuffled["label"] == ["chat", "maths"]
    assert not {"label", "reference"} & set(MergeTurns(carry=())(batch).keys())


def test_entries_of_turns_come_before_items_and_may_be_tensors():
    batch = episodes()
    batch["data"] = column({"label": "no", "level": 1}, {"label": "no"}, {"label": "no"})
    batch["label"] = column("yes", "yes", "too")
    batch["level"] = torch.tensor([[1.0], [1.0], [2.0]])
    rows = MergeTurns(carry=("label", "level"))(batch)
    assert rows["label"] == ["yes", "yes", "too"]
    assert torch.equal(rows["level"], torch.tensor([[1.0], [1.0], [2.0]]))


def test_one_object_for_all_turns_and_items_that_are_no_mappings():
    batch = episodes()
    batch["data"] = column(3, None, "x")
    assert "label" not in MergeTurns()(batch)
    batch["label"] = NonTensorData("only", batch_size=[3])
    assert MergeTurns()(batch).get("label").tolist() == ["only"] * 3


@pytest.mark.parametrize("key", ["stop_raeson", ("next", "rewrad"), ("data", "lable")])
@pytest.mark.parametrize("items", [None, (3, None, "x")])
def test_a_key_that_nothing_can_have_is_an_error_that_says_what_there_is(key, items):
    batch = episodes()
    batch["stop_reason"] = column("", "done", "done")
    if items:
        batch["data"] = column(*items)
    with pytest.raises(KeyError) as error:
        MergeTurns(carry=("stop_reason", key))(batch)
    for part in (f"carry names {key!r}, which", "('next', 'done')", "'stop_reason'", "have []"):
        assert part in str(error.value)


@pytest.mark.parametrize("key", [("next", "rewrad"), ("data", "lable")])
def test_a_nested_key_is_none_of_an_item(key):
    batch = episodes()
    batch["data"] = column({"lable": 1}, {"lable": 1}, {"answer": 2, 3: 4})
    with pytest.raises(KeyError, match=r"items have \[3, 'answer', 'lable'\]"):
        MergeTurns(carry=(key,))(batch)


@pytest.mark.parametrize("key", ["difficulty", ("difficulty",)])
def test_a_batch_in_which_by_chance_no_item_has_a_key_has_none_and_is_warned_of_once(key, caplog):
    batch, other = episodes(), episodes()
    batch["data"] = column({"answer": 2}, {"answer": 2}, {3: 4})
    other["data"] = column({}, {}, None)
    merge = MergeTurns(carry=(key, "other"))
    with caplog.at_level(logging.WARNING, logger="torchrl_mt"):
        for each in (batch, other, batch):
            rows = merge(each)
            assert rows.get("difficulty").tolist() == rows.get("other").tolist() == [None] * 3
    first, second = (record.getMessage() for record in caplog.records)
    assert "carry names 'difficulty', which" in first
    assert "data have [3, 'answer']" in first
    assert "carry names 'other', which" in second
    batch["data"] = column({"difficulty": 1}, {"difficulty": 1}, {"difficulty": 2})
    assert merge(batch).get("difficulty").tolist() == [1, 1, 2]


def test_the_usual_keys_are_usual_however_they_are_written(caplog):
    batch = episodes()
    for items in (None, column({"answer": 2}, None, None)):
        if items is not None:
            batch["data"] = items
        assert "label" not in MergeTurns(carry=[("label",), ("reference",)])(batch)
    assert not caplog.records


def test_the_usual_keys_may_lack_beside_others_and_items_may_have_nothing_under_a_key():
    batch = episodes()
    batch["data"] = column({"hint": None, "label": "a"}, {"hint": None}, None)
    rows = MergeTurns(carry=("reference", "hint", "label"))(batch)
    assert rows.get("hint").tolist() == [None] * 3
    # The first turn's item has a label, the last turns' have not.
    assert not {"label", "reference"} & set(rows.keys())
    batch["data"] = column(None, None, {"rare": 7})
    assert MergeTurns(carry=("rare",))(batch).get("rare").tolist() == [None, None, 7]


def test_a_string_is_no_sequence_of_keys():
    with pytest.raises(ValueError, match=r"got 'label': write \('label',\)"):
        MergeTurns(carry="label")


def test_rows_have_what_the_last_turn_of_their_episode_has():
    batch = episodes()
    batch["stop_reason"] = column("", "done", "max_turns")
    batch["info"] = column({"score": 1}, None, {"score": 3})
    batch["progress"] = torch.tensor([0.25, 1.0, 0.5])
    rows = MergeTurns(carry=("stop_reason", "info", "progress"))(batch)
    assert rows["fork"].tolist() == [0, 1, 0]
    assert rows["stop_reason"] == ["done", "done", "max_turns"]
    assert rows.get("info").tolist() == [None, None, {"score": 3}]
    assert rows["progress"].tolist() == [1.0, 1.0, 0.5]


def test_copies_of_an_episode_each_have_their_own_last_turn():
    batch = lazy_stack([*episodes()[:2], *episodes()[:2]])
    batch["collector", "traj_ids"] = torch.zeros(4, dtype=torch.int64)
    batch["stop_reason"] = column("", "done", "", "done")
    rows = MergeTurns(carry=("stop_reason",))(batch)
    assert rows["stop_reason"] == ["done"] * 4
