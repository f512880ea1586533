"""The objective sft is the cross-entropy of the trained tokens, however rows are cut or packed."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from tests.objectives.conftest import make_model, make_rows
from tests.objectives.helpers import gradients
from tests.tiers import examples
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes

READ = ("tokens", "masks", "group")
"""All that a supervised row needs, and what the other aggregations read."""
MODEL = make_model()


def supervised(seed, **options):
    """Rows without log-probabilities, rewards and advantages; some have weights."""
    rows = make_rows(seed, **options).select(*READ)
    if seed % 2:
        g = torch.Generator().manual_seed(seed)
        rows["weights", "full"] = 2 * torch.rand(rows["tokens", "full"].shape, generator=g)
    return rows


def reference(model, rows):
    """Token by token: -log pi times the weight, over the number of tokens."""
    total, number = 0.0, 0
    weights = rows.get(("weights", "full"), torch.ones(rows["tokens", "full"].shape))
    for n, row in enumerate(rows):
        attended = row["masks", "all_attention_mask"].nonzero().flatten().tolist()
        tokens = row["tokens", "full"][attended]
        logits = model(input_ids=tokens[None]).logits[0]
        for k, place in enumerate(attended):
            if k and row["masks", "all_assistant_mask"][place]:
                total = total + weights[n, place] * cross_entropy(logits[k - 1], tokens[k])
                number += 1
    return total / max(number, 1)


@examples(12)
@given(seed=st.integers(0, 999), suffix=st.booleans(), packed=st.booleans())
def test_value_and_gradient_are_the_references(seed, suffix, packed):
    rows = supervised(seed, n=3, s=8, suffix_padding=suffix or packed)
    loss = MultiTurnLoss(MODEL, objective="sft", passes=Passes(packed=packed))(rows)[
        "loss_objective"
    ]
    expected = reference(MODEL, rows)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    got = gradients(MODEL, loss)
    torch.testing.assert_close(got, gradients(MODEL, expected), atol=1e-5, rtol=1e-4)


def test_rows_need_tokens_and_masks_alone_and_nothing_is_said(caplog):
    loss = MultiTurnLoss(MODEL, objective="sft")
    assert loss.in_keys == [
        ("tokens", "full"),
        ("masks", "all_attention_mask"),
        ("masks", "all_assistant_mask"),
    ]
    with caplog.at_level(logging.INFO, "torchrl_mt"):
        out = loss(supervised(0).exclude("group"))
    assert not caplog.records
    assert sorted(out.keys()) == sorted(loss.out_keys)
    assert set(loss.out_keys) == {"loss_objective", "trained_tokens", "entropy"}


def test_kl_and_entropy_are_those_of_other_objectives():
    other = make_model(1)
    rows = ExperienceMaker(MODEL, ref=other)(make_rows(0))
    both = {
        name: MultiTurnLoss(MODEL, objective=name, kl_coef=0.1, entropy_coef=0.2)(rows)
        for name in ("sft", "reinforce")
    }
    for key in ("loss_kl", "kl_to_ref", "loss_entropy", "entropy", "trained_tokens"):
        torch.testing.assert_close(both["sft"][key], both["reinforce"][key])
    assert both["sft"]["kl_to_ref"] > 0


@pytest.mark.parametrize(
    ("weight", "message"), [(-0.5, "be 0 or more .*'sft'"), (torch.nan, "be finite")]
)
def test_wrong_weights_are_refused_by_name(weight, message):
    rows = supervised(1)
    mask = rows["masks", "all_assistant_mask"]
    row, token = mask[:, 1:].nonzero()[-1].tolist()
    rows["weights", "full"][~mask] = weight  # Not read.
    MultiTurnLoss(MODEL, objective="sft")(rows)
    rows["weights", "full"][row, token + 1] = weight
    with pytest.raises(
        ValueError, match=rf"\('weights', 'full'\) must {message}.*row {row} at token {token + 1}"
    ):
        MultiTurnLoss(MODEL, objective="sft")(rows)


NO_BATCH = r"a batch, \[N, S\].*shape \(8,\): .* collate\(\[row\]\)"


def test_one_row_is_no_batch():
    loss, row = MultiTurnLoss(MODEL, objective="sft"), supervised(0, s=8)[0]
    for call in (loss, loss.total):
        with pytest.raises(ValueError, match=NO_BATCH):
            call(row)
