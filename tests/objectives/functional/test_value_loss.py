"""The value loss is its formula, value and gradient, blind to masked tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.functional._batches import batches, dirty
from torchrl_mt.objectives.functional import value_loss


@given(batch=batches(), clip=st.sampled_from([None, 0.3, 1.0]))
def test_it_is_the_formula(batch, clip):
    b = dirty(batch)
    value = b.new.clone().requires_grad_()
    loss, cut = value_loss(value, b.sampler, b.mask, old_value=b.old, clip_value=clip)
    (slope,) = torch.autograd.grad(loss.sum(), value)
    for n, row in enumerate(batch.mask.tolist()):
        for t, sampled in enumerate(row):
            if not sampled:
                assert loss[n, t] == slope[n, t] == 0
                assert not cut[n, t]
                continue
            v, old, target = (float(x[n, t]) for x in (batch.new, batch.old, batch.sampler))
            bounded = v if clip is None else min(max(v, old - clip), old + clip)
            errors = (v - target) ** 2, (bounded - target) ** 2
            assert float(loss[n, t].detach()) == pytest.approx(max(errors) / 2, abs=1e-4)
            if abs(abs(v - old) - (clip or 0)) > 1e-4:
                assert bool(cut[n, t]) == (v != bounded)
                if abs(errors[0] - errors[1]) > 1e-4 or v == bounded:
                    expected = v - target if errors[0] >= errors[1] else 0.0
                    assert float(slope[n, t]) == pytest.approx(expected, abs=1e-4)
