"""What is no batch of rows, and misspelt arguments, are named at once."""

from __future__ import annotations

import pytest

from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss


@pytest.mark.parametrize("make", [ExperienceMaker, MultiTurnLoss])
def test_rows_must_be_a_tensordict(model, make):
    with pytest.raises(TypeError, match=r"rows must be a TensorDict, got list\."):
        make(model)([{"tokens": [1]}])
    with pytest.raises(
        TypeError, match="got NoneType: a collector with a replay_buffer yields None"
    ):
        make(model)(None)


@pytest.mark.parametrize(
    ("make", "misspelt", "meant"),
    [
        (ExperienceMaker, {"advantage": "trun"}, "turn"),
        (ExperienceMaker, {"process": "top_entopy"}, "top_entropy"),
        (MultiTurnLoss, {"objective": "pppo"}, "ppo"),
    ],
)
def test_the_right_name_is_suggested(model, make, misspelt, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        make(model, **misspelt)
