"""What is known of an episode reaches each of its rows, from the turns or from the items of data."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from torchrl_mt.transforms import MergeTurns


def episodes():
    """Two turns that fork, then one turn."""
    turns = [([1, 2], [3], False), ([7], [5], True), ([6], [7], True)]
    return lazy_stack(
        [
            TensorDict(
                {
                    ("tokens", "prompt"): torch.tensor(prompt),
                    ("tokens", "response"): torch.tensor(response),
                    ("next", "done"): torch.tensor([done]),
                }
            )
            for prompt, response, done in turns
        ]
    )


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
    rows = MergeTurns(carry=("label", "level", "absent"))(batch)
    assert rows["label"] == ["yes", "yes", "too"]
    assert torch.equal(rows["level"], torch.tensor([[1.0], [1.0], [2.0]]))
    assert "absent" not in rows


def test_one_object_for_all_turns_and_items_that_are_no_mappings():
    batch = episodes()
    batch["data"] = column(3, None, "x")
    assert "label" not in MergeTurns()(batch)
    batch["label"] = NonTensorData("only", batch_size=[3])
    assert MergeTurns()(batch).get("label").tolist() == ["only"] * 3


def test_a_string_is_no_sequence_of_keys():
    with pytest.raises(ValueError, match=r"got 'label': write \('label',\)"):
        MergeTurns(carry="label")
