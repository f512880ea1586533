"""Long rows and small discounts: blocks of the running sum join without loss or overflow."""

import pytest
import torch

from torchrl_mt.objectives.functional import masked_gae
from torchrl_mt.objectives.functional.time.recurrence import sampled_recurrence


def loop(x, mask, decay):
    """The recurrence word for word, in float64; what is not sampled goes to its owner."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for n, row in enumerate(mask.tolist()):
        positions = [t for t, sampled in enumerate(row) if sampled]
        own = dict.fromkeys(positions, 0.0)
        for t, value in enumerate(x[n].double().tolist()):
            before = [p for p in positions if p <= t] or positions[:1]
            if before:
                own[before[-1]] += value
        y = 0.0
        for p in reversed(positions):
            out[n, p] = y = own[p] + decay * y
    return out


@pytest.mark.parametrize("decay", [0.0, 1e-200, 1e-30, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("size", [1, 2, 700])
def test_any_decay_on_long_rows(decay, size):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, size, generator=g)
    mask = torch.rand(4, size, generator=g) < torch.tensor([[0.0], [0.02], [0.5], [1.0]])
    got = sampled_recurrence(x, mask, decay)
    torch.testing.assert_close(got.double(), loop(x, mask, decay), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_value_reaches_no_later_token(decay, bad):
    x = torch.zeros(1, 900)
    x[0, 450] = bad
    got = sampled_recurrence(x, torch.ones(1, 900, dtype=torch.bool), decay)[0]
    assert got[451:].isfinite().all()
    assert not got[450].isfinite()


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
def test_any_number_of_leading_dimensions(shape):
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(shape, generator=g), torch.rand(shape, generator=g) < 0.6
    rows = loop(x.reshape(-1, 5), mask.reshape(-1, 5), 0.7).reshape(shape)
    torch.testing.assert_close(sampled_recurrence(x, mask, 0.7).double(), rows)


def test_gradients_are_those_of_the_formula():
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 9, generator=g) < 0.6
    reward = torch.randn(3, 9, generator=g, dtype=torch.float64, requires_grad=True)
    value = torch.randn(3, 9, generator=g, dtype=torch.float64, requires_grad=True)
    advantage, returns = masked_gae(reward, value, mask, 0.9, 0.8)
    seed = torch.randn(3, 9, generator=g)
    gradients = torch.autograd.grad(((advantage + 2 * returns) * seed).sum(), [reward, value])
    for tensor, gradient in zip([reward, value], gradients, strict=True):
        step = 0.25  # The function is linear: any step is exact.
        for n, t in [(0, 0), (1, 4), (2, 8), (0, 5)]:
            moved = tensor.detach().clone()
            moved[n, t] += step
            args = (moved, value) if tensor is reward else (reward, moved)
            a, r = masked_gae(*args, mask, 0.9, 0.8)
            change = (((a + 2 * r) - (advantage + 2 * returns)) * seed).sum() / step
            torch.testing.assert_close(change.double(), gradient[n, t], atol=1e-4, rtol=1e-4)


def test_strided_and_expanded_input():
    mask = torch.tensor([True, False, True]).expand(4, 3)
    x = torch.arange(12.0).reshape(3, 4).t()
    got = sampled_recurrence(x, mask, 0.5)
    torch.testing.assert_close(got, sampled_recurrence(x.contiguous(), mask.contiguous(), 0.5))


def test_gradients_cross_blocks():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 90, generator=g, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 90, generator=g) < 0.7
    seed = torch.randn(2, 90, generator=g)
    (got,) = torch.autograd.grad((sampled_recurrence(x, mask, 1e-12) * seed).sum(), x)
    (near,) = torch.autograd.grad((sampled_recurrence(x, mask, 0.0) * seed).sum(), x)
    torch.testing.assert_close(got, near)
    (got,) = torch.autograd.grad((sampled_recurrence(x, mask, 0.01) * seed).sum(), x)
    moved = x.detach().clone()
    moved[1, 50] += 1.0
    change = ((sampled_recurrence(moved, mask, 0.01) - loop(x.detach(), mask, 0.01)) * seed).sum()
    assert float(change) == pytest.approx(float(got[1, 50]), abs=1e-4)


def test_the_input_is_left_as_it_was():
    x, mask = torch.randn(3, 8, dtype=torch.float64), torch.ones(3, 8, dtype=torch.bool)
    before = x.clone()
    sampled_recurrence(x, mask, 0.9)
    masked_gae(x, x, mask, 0.9, 0.8)
    assert torch.equal(x, before)
