"""Each correction is its source's formula, whatever the mask; a constant, finite, and reported."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.functional._batches import batches, dirty
from torchrl_mt.objectives.functional import (
    correct,
    geometric,
    icepop,
    m2po,
    off_policy_mask,
    sequence_mis,
    sequence_tis,
    token_tis,
)
from torchrl_mt.objectives.functional.corrections import CORRECTIONS, correction_metrics
from torchrl_mt.objectives.functional.importance import effective_sample_size
from torchrl_mt.objectives.functional.policy.objectives import takes


def cap(w):
    return min(w, 1.5)


def keep(low, high):
    return lambda w: w if low <= w <= high else 0.0


def inside(low, high=math.inf):
    return lambda w: float(low <= w <= high)


# Name: (correction, weight of a token by its ratio, by its sequence's product, by its root).
CASES = {
    "token_tis": (partial(token_tis, cap=1.5), cap, None, None),
    "icepop": (partial(icepop, bounds=(0.5, 1.5)), keep(0.5, 1.5), None, None),
    "sequence_tis": (partial(sequence_tis, cap=1.5), None, cap, None),
    "sequence_mis": (partial(sequence_mis, bounds=(0.2, 1.5)), None, keep(0.2, 1.5), None),
    "geometric": (partial(geometric, bounds=(0.7, 1.4)), None, None, inside(0.7, 1.4)),
    "off_policy_mask": (partial(off_policy_mask, delta=-math.log(0.7)), None, None, inside(0.7)),
    "m2po": (partial(m2po, threshold=0.1), None, None, None),
}


def second_moment(b):
    """Drop the largest square, one after the other, until the mean of the rest is below 0.1."""
    squares = ((b.old.double() - b.sampler.double()) ** 2)[b.mask].tolist()
    left, near = sorted(squares), False
    while left and sum(left) / len(left) >= 0.1:
        near |= abs(sum(left) / len(left) - 0.1) < 1e-6
        left.pop()
    kept = [float(x in left) for x in squares]
    out = torch.zeros(b.mask.shape, dtype=torch.float64)
    return out.masked_scatter(b.mask, torch.tensor(kept, dtype=torch.float64)), near


def reference(case, b, by_turn):
    """Token by token in float64; also whether a bound is too near to tell."""
    _, of_token, of_product, of_root = CASES[case]
    out, near = torch.zeros(b.mask.shape, dtype=torch.float64), False
    if case == "m2po":
        return second_moment(b)
    for n, row in enumerate(b.mask.tolist()):
        for t, sampled in enumerate(row):
            if not sampled:
                continue
            d = [
                float(b.old[n, u].double() - b.sampler[n, u].double())
                for u in range(len(row))
                if row[u] and (not by_turn or b.turns[n, u] == b.turns[n, t])
            ]
            own = math.exp(float(b.old[n, t].double() - b.sampler[n, t].double()))
            product, root = math.exp(sum(d)), math.exp(sum(d) / len(d))
            rule, w = next(
                (f, x) for f, x in ((of_token, own), (of_product, product), (of_root, root)) if f
            )
            out[n, t] = rule(w)
            if case == "off_policy_mask" and b.advantage[n, t] >= 0:
                out[n, t] = 1.0
            near |= min(abs(w - bound) for bound in (0.2, 0.5, 0.7, 1.4, 1.5)) < 1e-4
    return out, near


def evaluate(case, b, by_turn=False):
    correction = CASES[case][0]
    options = {"turns": b.turns} if by_turn and takes(correction, "turns") else {}
    options |= {"advantage": b.advantage} if takes(correction, "advantage") else {}
    return correction(b.old, b.sampler, b.mask, **options)


def test_every_correction_has_a_reference():
    assert {case[0].func for case in CASES.values()} == set(CORRECTIONS.values())


@pytest.mark.parametrize("case", CASES)
@given(batch=batches(spread=0.5), by_turn=st.booleans())
def test_weights_are_the_formulas(case, batch, by_turn):
    weight, metrics = evaluate(case, dirty(batch), by_turn)
    expected, near = reference(case, batch, by_turn)
    if near:
        return
    torch.testing.assert_close(weight.double(), expected, atol=1e-5, rtol=1e-4)
    count = max(1, int(batch.mask.sum()))
    w = expected[batch.mask]
    ess = float(w.sum() ** 2 / (w**2).sum() / count) if w.any() else 0.0
    assert float(metrics["ess"]) == pytest.approx(ess, abs=1e-4)
    assert float(metrics["mask_fraction"]) == pytest.approx(int((w == 0).sum()) / count)
    cut = int((w == 1.5).sum()) if case.endswith("tis") else 0
    assert float(metrics["clip_fraction"]) == pytest.approx(cut / count)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("far", [30.0, 1e30])
@pytest.mark.parametrize("mask", [[True] * 4, [False] * 4, [True, False, False, False]])
def test_weights_are_finite_constants(case, far, mask):
    old = torch.tensor([[-far, 0.0, -1.0, -far]], requires_grad=True)
    mask = torch.tensor([mask])
    options = {"advantage": -torch.ones(1, 4)} if case == "off_policy_mask" else {}
    weight, metrics = CASES[case][0](old, torch.tensor([[0.0, -far, -1.0, 0.0]]), mask, **options)
    assert not weight.requires_grad
    assert weight.isfinite().all()
    assert not weight[~mask].any()
    assert all(x.isfinite() and not x.requires_grad for x in metrics.values())
    assert metrics.keys() >= {"ess", "clip_fraction", "mask_fraction"}


@pytest.mark.parametrize("case", CASES)
def test_a_sampler_that_is_the_old_policy_needs_no_correction(case):
    old = -torch.rand(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    options = {"advantage": -torch.ones(3, 4)} if case == "off_policy_mask" else {}
    weight, metrics = CORRECTIONS[case](old, old, mask, **options)
    assert torch.equal(weight, torch.ones(3, 4))
    assert [float(metrics[k]) for k in ("ess", "clip_fraction", "mask_fraction")] == [1, 0, 0]


@pytest.mark.parametrize("correction", [icepop, sequence_mis])
def test_both_bounds_are_kept(correction):
    old, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    for bounds in ((1.0, 5.0), (0.5, 1.0), (1.0, 1.0)):
        assert correction(old, old, mask, bounds=bounds)[0] == 1
    for bounds in ((1.0001, 5.0), (0.5, 0.9999)):
        assert correction(old, old, mask, bounds=bounds)[0] == 0


@given(batch=batches(spread=0.5), by_turn=st.booleans())
def test_several_multiply(batch, by_turn):
    turns = batch.turns if by_turn else None
    parts = [CASES["geometric"][0], CASES["token_tis"][0]]
    weight, metrics = correct(parts, batch.old, batch.sampler, batch.mask, turns=turns)
    a = evaluate("geometric", batch, by_turn)
    b = evaluate("token_tis", batch, by_turn)
    torch.testing.assert_close(weight, a[0] * b[0])
    expected = correction_metrics(a[0] * b[0], batch.mask, torch.zeros_like(batch.mask))
    torch.testing.assert_close(metrics, expected | {"clip_fraction": b[1]["clip_fraction"]})


def test_effective_sample_size_does_not_depend_on_the_scale():
    weight, mask = torch.rand(2, 5), torch.ones(2, 5, dtype=torch.bool)
    expected = effective_sample_size(weight, mask)
    for scale in (1e-30, 1e30):
        torch.testing.assert_close(effective_sample_size(scale * weight, mask), expected)


def test_bounds_are_those_of_the_ratio_however_far_it_is_from_one():
    mask, zero = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    far = torch.tensor([[-50.0, 50.0]])
    for bounds in ((1e-9, 2.0), (0.0, 1e9)):
        weight, metrics = icepop(far, zero, mask, bounds=bounds)
        assert (weight[0, 1], metrics["mask_fraction"] >= 0.5) == (0, True)
        assert bool(weight[0, 0] > 0) == (bounds[0] == 0)
    for correction in (sequence_mis, geometric):
        weight, _ = correction(far[:, :1], zero[:, :1], mask[:, :1], bounds=(1e-9, 2.0))
        assert not weight.any()
    weight, metrics = token_tis(far, zero, mask, cap=math.inf)
    assert weight.isfinite().all()
    weight, metrics = token_tis(zero, zero, mask, cap=1.0)
    assert (weight == 1).all()
    assert metrics["clip_fraction"] == 0


PEERS = torch.tensor([[-0.3, -0.5, -2.5, -0.4], [-1.0, -0.4, -2.2, -0.1], [-0.2, -0.9, -1.1, -3.0]])
PEERS_SAMPLER = torch.tensor(
    [[-0.1, -0.4, -0.5, -0.3], [-0.2, -0.5, -1.0, -0.4], [-0.3, -0.6, -1.2, -1.0]]
)
PEERS_MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 1, 1]]).bool()
PEERS_ADVANTAGE = torch.tensor([[-1.0], [-1.0], [1.0]]).expand(3, 4)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        # AReaL, trainer/ppo/actor.py.
        (partial(m2po, threshold=0.1), [[1, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]]),
        # TRL f2cd57710, trainer/grpo_trainer.py.
        (
            partial(off_policy_mask, delta=0.4, advantage=PEERS_ADVANTAGE),
            [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]],
        ),
    ],
)
def test_weights_are_the_peers(correction, expected):
    weight, _ = correction(PEERS, PEERS_SAMPLER, PEERS_MASK)
    assert weight.tolist() == expected
