"""Each objective is its paper's formula, value and gradient, whatever the mask; always finite."""

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.objectives.functional._batches import batches, dirty
from torchrl_mt.objectives.functional import (
    cispo,
    clip_cov,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    gspo_token,
    kl_cov,
    ppo,
    reinforce,
    sapo,
    sft,
    vespo,
)
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES, clip_bounds, takes

CLIP = (0.1, 0.3)


def sequences(mask, turns):
    """Index pairs of each sequence's sampled tokens."""
    found = {}
    for n, row in enumerate(mask.tolist()):
        for t, sampled in enumerate(row):
            if sampled:
                key = n if turns is None else (n, int(turns[n, t]))
                found.setdefault(key, []).append((n, t))
    return list(found.values())


def surrogate(ratio, a, low=1 - CLIP[0], high=1 + CLIP[1]):
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def token_reference(formula):
    """Apply a formula to float64 scalars, token by token."""

    def loss(b, turns):
        out = torch.zeros_like(b.new)
        for tokens in sequences(b.mask, turns):
            for i in tokens:
                out[i] = formula(b.new[i], b.old[i], b.sampler[i], b.advantage[i])
        return out

    return loss


@token_reference
def ref_dual(new, old, _, a):
    gain = -surrogate((new - old).exp(), a)
    return -(torch.maximum(gain, 1.5 * a) if a < 0 else gain)


@token_reference
def ref_cispo(new, old, _, a):
    return -(new - old).exp().clamp(1 - CLIP[0], 1 + CLIP[1]).detach() * a * new


def ref_decoupled(cap):
    @token_reference
    def loss(new, old, sampler, a):
        weight = (old - sampler).exp()
        return (weight if weight <= cap else 0.0) * surrogate((new - old).exp(), a)

    return loss


@token_reference
def ref_sapo(new, old, _, a):
    tau = 1.0 if a > 0 else 2.0
    return -a * 4 / tau / (1 + torch.exp(-tau * ((new - old).exp() - 1)))


def means(b, turns, detached=False):
    """Each sequence's tokens, and the root of the product of their ratios."""
    for tokens in sequences(b.mask, turns):
        s = torch.stack([b.new[i] - b.old[i] for i in tokens]).mean().exp()
        yield from ((i, s.detach() if detached else s) for i in tokens)


def ref_gspo(b, turns):
    out = torch.zeros_like(b.new)
    for i, s in means(b, turns):
        out[i] = surrogate(s, b.advantage[i])
    return out


def ref_gspo_token(b, turns):
    out = torch.zeros_like(b.new)
    for i, s in means(b, turns, detached=True):
        out[i] = surrogate(s * b.new[i].exp() / b.new[i].exp().detach(), b.advantage[i])
    return out


def ref_gmpo(b, turns):
    """The product of (min of sign * ratio, sign * clipped) ** (1 / length), as in eq. 4."""
    out = torch.zeros_like(b.new)
    low, high = math.exp(-CLIP[0]), math.exp(CLIP[1])
    for tokens in sequences(b.mask, turns):
        product = torch.ones((), dtype=torch.float64)
        for i in tokens:
            sign = 1.0 if b.advantage[i] > 0 else -1.0
            ratio = (b.new[i] - b.old[i]).exp()
            product = product * torch.minimum(sign * ratio, sign * ratio.clamp(low, high)).abs()
        for i in tokens:
            out[i] = -b.advantage[i] * product ** (1 / len(tokens))
    return out


def tv(new, old):
    return (new.exp() - old.exp()).abs()


def binary_kl(new, old):
    rest_new, rest_old = ((1 - x.exp()).clamp(min=1e-8) for x in (new, old))
    return old.exp() * (old - new) + rest_old * (rest_old / rest_new).log()


def dppo_side(divergence, new, old):
    """Side of the bounds that a token is on."""
    d = float(divergence(new, old).detach())
    return int(new > old and d > CLIP[1]) - int(new < old and d > CLIP[0])


def ref_dppo(divergence):
    def loss(new, old, _, a):
        side = dppo_side(divergence, new, old)
        return 0.0 * new if side == (1 if a > 0 else -1) else -a * (new - old).exp()

    return token_reference(loss)


def ref_vespo(b, turns):
    out = torch.zeros_like(b.new)
    for tokens in sequences(b.mask, turns):
        w = torch.stack([b.new[i] - b.old[i] for i in tokens]).sum().exp().detach()
        for i in tokens:
            k, rate = (2.0, 3.0) if b.advantage[i] >= 0 else (3.0, 2.0)
            out[i] = -(w**k) * torch.exp(rate * (1 - w)) * b.advantage[i] * b.new[i]
    return out


def covariances(b):
    tokens = [tuple(i) for i in b.mask.nonzero().tolist()]
    mean_a, mean_x = (float(x.detach()[b.mask].mean()) for x in (b.advantage, b.new))
    return {
        i: (float(b.advantage[i]) - mean_a) * (float(b.new.detach()[i]) - mean_x) for i in tokens
    }


def ref_clip_cov(b, _):
    """With the whole share: all tokens between the bounds are dropped, if PPO does not clip them."""
    out = torch.zeros_like(b.new)
    for i, covariance in covariances(b).items() if b.mask.any() else ():
        ratio = (b.new[i] - b.old[i]).exp()
        clipped = ratio > 1 + CLIP[1] if b.advantage[i] > 0 else ratio < 1 - CLIP[0]
        if clipped or not 0.2 < covariance < 1.0:
            out[i] = surrogate(ratio, b.advantage[i])
    return out


def ref_kl_cov(b, _):
    out = torch.zeros_like(b.new)
    found = covariances(b) if b.mask.any() else {}
    held = sorted(found, key=found.get)[-max(1, int(0.3 * len(found))) :]
    others = [found[i] for i in found if i not in held]
    assume(not others or found[held[0]] - max(others) > 1e-5)
    for i in found:
        d = b.new[i] - b.old[i]
        out[i] = -d.exp() * b.advantage[i] + (0.7 * d.abs() if i in held else 0.0)
    return out


CASES = {
    "dppo_tv": (dppo_tv, ref_dppo(tv)),
    "dppo_kl": (dppo_kl, ref_dppo(binary_kl)),
    "vespo": (vespo, ref_vespo),
    "clip_cov": (partial(clip_cov, share=1.0, bounds=(0.2, 1.0)), ref_clip_cov),
    "kl_cov": (partial(kl_cov, share=0.3, coef=0.7), ref_kl_cov),
    "sft": (sft, token_reference(lambda new, old, _, a: -new)),
    "reinforce": (reinforce, token_reference(lambda new, old, _, a: -a * new)),
    "ppo": (ppo, token_reference(lambda new, old, _, a: surrogate((new - old).exp(), a))),
    "dual_clip": (partial(ppo, dual_clip=1.5), ref_dual),
    "cispo": (cispo, ref_cispo),
    "sapo": (partial(sapo, tau_neg=2.0), ref_sapo),
    "gspo": (gspo, ref_gspo),
    "gspo_token": (gspo_token, ref_gspo_token),
    "gmpo": (gmpo, ref_gmpo),
    "decoupled_ppo": (decoupled_ppo, ref_decoupled(math.inf)),
    "decoupled_ppo_capped": (partial(decoupled_ppo, weight_cap=2.0), ref_decoupled(2.0)),
}


def evaluate(objective, b, turns=None, clip=CLIP):
    options = {"sampler_log_prob": b.sampler} if takes(objective, "sampler_log_prob") else {}
    if takes(objective, "turns"):
        options["turns"] = turns
    new = b.new.clone().requires_grad_()
    loss, clipped = objective(new, b.old, b.advantage, b.mask, clip, **options)
    # Weights make the gradient tell which token's loss it came through.
    weight = torch.linspace(0.5, 2.0, b.mask.shape[0])[:, None]
    (slope,) = torch.autograd.grad((weight * loss).sum(), new)
    return loss.detach(), slope, clipped


def test_every_objective_has_a_reference():
    assert {getattr(f, "func", f) for f, _ in CASES.values()} == set(OBJECTIVES.values())


@pytest.mark.parametrize("name", CASES)
@given(batch=batches(), by_turn=st.booleans())
def test_value_and_gradient_are_the_formulas(name, batch, by_turn):
    objective, reference = CASES[name]
    turns = batch.turns if by_turn else None
    loss, slope, clipped = evaluate(objective, dirty(batch), turns)
    exact = batch.map(lambda x: x.double() if x.is_floating_point() else x)
    exact.new.requires_grad_()
    by_sequence = turns if takes(objective, "turns") else None
    expected = reference(exact, by_sequence)
    weight = torch.linspace(0.5, 2.0, batch.mask.shape[0], dtype=torch.float64)[:, None]
    if expected.requires_grad:
        (expected_slope,) = torch.autograd.grad((weight * expected).sum(), exact.new)
    else:  # Every token is masked or dropped.
        expected_slope = torch.zeros_like(expected)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(slope.double(), expected_slope, atol=1e-5, rtol=1e-4)
    assert clipped.dtype is torch.int8
    assert not clipped[~batch.mask].any()
    low, high = (-CLIP[0], CLIP[1]) if name == "gmpo" else (math.log(0.9), math.log(1.3))
    for tokens in sequences(batch.mask, by_sequence):
        d = [float(batch.new[i] - batch.old[i]) for i in tokens]
        if name.startswith("dppo"):
            divergence = tv if name == "dppo_tv" else binary_kl
            assert all(
                int(clipped[i]) == dppo_side(divergence, exact.new[i], exact.old[i]) for i in tokens
            )
            continue
        if name.startswith("gspo"):
            d = [sum(d) / len(d)] * len(d)
        for i, x in zip(tokens, d, strict=True):
            if clip_bounds(objective) is None:
                assert clipped[i] == 0
            elif min(abs(x - low), abs(x - high)) > 1e-4:
                assert int(clipped[i]) == (x > high) - (x < low)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("far", [30.0, 1000.0, 1e30])
@pytest.mark.parametrize("mask", [[True] * 4, [False] * 4, [True, False, False, False]])
def test_absurd_ratios_and_empty_masks_stay_finite(name, far, mask):
    mask = torch.tensor([mask])
    new = torch.tensor([[-far, 0.0, -1.0, -far]], requires_grad=True)
    old = torch.tensor([[0.0, -far, -1.0, 0.0]])
    advantage = torch.tensor([[1.0, -1.0, 0.0, -1.0]])
    objective = CASES[name][0]
    options = {"sampler_log_prob": old.flip(-1)} if takes(objective, "sampler_log_prob") else {}
    loss, _ = objective(new, old, advantage, mask, CLIP, **options)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad.isfinite().all()
    assert not loss[~mask].any()
    assert not new.grad[~mask].any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_type_inside_is_float32(name, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, generator=g).to(dtype)
    objective = CASES[name][0]
    options = {"sampler_log_prob": x[1]} if takes(objective, "sampler_log_prob") else {}
    mask = torch.ones(2, 4, dtype=torch.bool)
    options32 = {key: value.float() for key, value in options.items()}
    expected = objective(x[0].float(), x[1].float(), x[2].float(), mask, CLIP, **options32)[0]
    got = objective(x[0], x[1], x[2], mask, CLIP, **options)[0]
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, expected)


def test_weights_of_the_sampler_are_capped_and_carry_no_gradient():
    old = torch.tensor([[0.0, 25.0]], requires_grad=True)
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    new = torch.tensor([[0.0, 25.0]], requires_grad=True)
    loss, _ = decoupled_ppo(new, old, torch.ones(1, 2), mask, sampler_log_prob=zero, weight_cap=1e9)
    assert loss.tolist() == [[-1.0, 0.0]]
    loss, _ = decoupled_ppo(new, old, torch.ones(1, 2), mask, sampler_log_prob=zero, weight_cap=1.0)
    assert loss.tolist() == [[-1.0, 0.0]]
    near = torch.tensor([[0.1, 0.2]], requires_grad=True)
    loss, _ = decoupled_ppo(zero, near, torch.ones(1, 2), mask, sampler_log_prob=zero)
    loss.sum().backward()
    # By the proximal policy only through the ratio: d/dx of -v exp(-x) with v constant.
    torch.testing.assert_close(near.grad, torch.ones(1, 2))


def test_a_ratio_far_below_one_is_cut_off():
    new, mask = torch.tensor([[-1000.0]]), torch.ones(1, 1, dtype=torch.bool)
    loss, _ = ppo(new, torch.zeros(1, 1), torch.ones(1, 1), mask)
    assert -loss.item() == pytest.approx(math.exp(-20))


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo", "gspo_token", "gmpo"])
def test_bounds_may_be_one_number(name):
    new, old = torch.tensor([[0.5, -0.7]]), torch.zeros(1, 2)
    given = new, old, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    objective = OBJECTIVES[name]
    got = objective(*given, clip_epsilon=0.2)
    torch.testing.assert_close(got, objective(*given, (0.2, 0.2)))


NEW = torch.tensor([[-0.05, -0.9, -2.0, -0.4], [-1.5, -0.02, -3.0, -0.7]])
OLD = torch.tensor([[-0.30, -0.5, -2.5, -0.4], [-1.0, -0.40, -2.2, -0.1]])
ADVANTAGE = torch.tensor([[1.0, -0.5, 2.0, 0.3], [-1.0, 1.5, 0.7, -0.2]])
SAMPLED = torch.tensor([[True, True, False, True], [True, True, True, True]])


@pytest.mark.parametrize(
    ("objective", "slopes"),
    [
        (dppo_tv, [[0, 0, 0, -0.3], [0.606531, 0, -0.314530, 0]]),
        (dppo_kl, [[0, 0, 0, -0.3], [0, 0, -0.314530, 0]]),
        (partial(clip_cov, share=1.0, bounds=(0.2, 5.0)), [[0, 0, 0, -0.3], [0, 0, -0.314530, 0]]),
        (
            partial(kl_cov, share=0.3, coef=0.7),
            [[-1.284025, 0.335160, 0, -0.3], [-0.093469, -1.493427, -0.314530, 0.109762]],
        ),
    ],
)
def test_gradients_are_verls(objective, slopes):
    """Of verl 1dda039b9, ``core_algos.py``, on this input, with the same settings."""
    new = NEW.clone().requires_grad_()
    objective(new, OLD, ADVANTAGE, SAMPLED)[0].sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor(slopes), atol=2e-6, rtol=0)


def test_the_gradient_of_vespo_is_its_authors():
    """Of FloyedShen/VESPO aa1f3045, ``recipe/vespo/code/core_algos.py``."""
    new = NEW.clone().requires_grad_()
    advantage = torch.tensor([[1.0], [-0.5]]).expand(2, 4)
    vespo(new, OLD, advantage, SAMPLED)[0].sum().backward()
    expected = SAMPLED * torch.tensor([[-1.125105], [0.024958]])
    torch.testing.assert_close(new.grad, expected, atol=2e-6, rtol=0)


def test_clip_cov_drops_a_share_of_the_tokens_between_the_bounds_at_random():
    g = torch.Generator().manual_seed(0)
    new, advantage = torch.randn(2, 20, 50, generator=g)
    mask = torch.rand(20, 50, generator=g) < 0.7
    everyone = clip_cov(new, new, advantage, mask, share=1.0)[0]
    few, other = (clip_cov(new, new, advantage, mask, share=0.02)[0] for _ in range(2))
    assert int((few == 0)[mask].sum()) == int(0.02 * int(mask.sum()))
    assert not everyone[few == 0].any()
    assert not torch.equal(few, other)
    kept = few != 0
    torch.testing.assert_close(few[kept], -advantage[kept])
