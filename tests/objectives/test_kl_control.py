"""The KL's coefficient: told what counts, and where it was when a run goes on."""

import copy
import io
import pickle

import pytest
import torch
from torchrl.data import AdaptiveKLController, ConstantKLController

from torchrl_mt.objectives import ExperienceMaker
from torchrl_mt.objectives.functional import kl_estimate

STATE = "_extra_state"


def adaptive(start=0.1, **options):
    return AdaptiveKLController(init_kl_coef=start, target=0.01, horizon=10, **options)


def saved(maker):
    """What comes back of a maker's state from a file that may hold tensors and numbers alone."""
    file = io.BytesIO()
    torch.save(maker.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_run_goes_on_with_the_coefficient_that_it_had(model, other_model, rows):
    through = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(), kl_kind="k3")
    first = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(), kl_kind="k3")
    for maker in (through, first):
        maker(rows(0))
        maker(rows(1))
    resumed = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(), kl_kind="k3")
    resumed.load_state_dict(saved(first))
    assert resumed.kl_coef.coef == first.kl_coef.coef != 0.1
    for seed in (2, 3):
        got, expected = resumed(rows(seed)), through(rows(seed))
        assert torch.equal(got["advantage"], expected["advantage"])
        assert resumed.metrics["kl_coef"] == through.metrics["kl_coef"]


def test_the_model_that_a_controller_keeps_up_to_date_is(model, other_model):
    holder = torch.nn.Module()
    holder.kl_coef = None
    maker = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(0.4, model=holder))
    maker.load_state_dict(ExperienceMaker(model, ref=other_model, kl_coef=adaptive()).state_dict())
    assert holder.kl_coef == maker.kl_coef.coef == 0.1


@pytest.mark.parametrize("given", [0.3, ConstantKLController(kl_coef=0.3)])
def test_a_coefficient_that_is_given_fixed_stays_as_it_is_given(model, other_model, rows, given):
    fixed = ExperienceMaker(model, ref=other_model, kl_coef=given)
    assert fixed.state_dict()[STATE] == {"kl_coef": None}
    for other in (adaptive(), 0.2, ConstantKLController(kl_coef=0.2)):
        fixed.load_state_dict(ExperienceMaker(model, ref=other_model, kl_coef=other).state_dict())
        fixed(rows())
        assert fixed.metrics["kl_coef"] == 0.3
    started = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(0.7))
    started.load_state_dict(saved(fixed))
    assert started.kl_coef.coef == 0.7


def test_a_state_without_the_coefficient_is_refused_unless_asked_for(model, other_model):
    maker = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(0.7))
    state = maker.state_dict()
    del state[STATE]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{STATE}"'):
        maker.load_state_dict(state)
    maker.load_state_dict(state, strict=False)
    assert maker.kl_coef.coef == 0.7


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), "0.1", True, [0.1]])
def test_a_coefficient_that_is_none_is_refused(model, other_model, bad):
    maker = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(0.7))
    state = {**maker.state_dict(), STATE: {"kl_coef": bad}}
    with pytest.raises((ValueError, TypeError), match="kl_coef must be"):
        maker.load_state_dict(state)
    with pytest.raises(ValueError, match=r"state must be \{'kl_coef': a number or None\}, got"):
        maker.load_state_dict({**state, STATE: {"coef": 0.1}})
    assert maker.kl_coef.coef == 0.7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_the_coefficient(model, other_model, rows, copied):
    maker = ExperienceMaker(model, ref=other_model, kl_coef=adaptive(), kl_kind="k3")
    maker(rows())
    assert copied(maker).kl_coef.coef == maker.kl_coef.coef != 0.1


def test_a_rows_first_token_has_no_part_in_the_kl(model, other_model, rows, spread):
    """Nothing predicts it: the reference has no log-probability of it, whatever the sampler had."""
    batch = rows()
    batch["masks", "all_assistant_mask"][:, 0] = True
    batch["log_probs", "full"][:, 0] = -50.0
    mask = batch["masks", "all_assistant_mask"]
    maker = ExperienceMaker(
        model, ref=other_model, kl_coef=adaptive(), kl_kind="k3", advantage="turn", gamma=0.0
    )
    wide = spread(batch)
    wide_out = maker(wide)
    assert wide_out["kl"].any()
    maker.kl_coef.coef = 0.1
    out = maker(batch)
    assert not out["kl"][:, 0].any()
    for key in ("kl", "returns", "advantage"):
        got = wide_out[key][wide["masks", "all_assistant_mask"]]
        torch.testing.assert_close(got, out[key][mask], atol=1e-4, rtol=1e-4)
    kl = kl_estimate(out["log_probs", "old"], out["log_probs", "ref"], "k3")[:, 1:][mask[:, 1:]]
    assert maker.metrics["kl/mean"] == pytest.approx(float(kl.mean()), rel=1e-5)
    assert maker.metrics["kl/count"] == len(kl)
    # Each turn's return, which discounts all later turns away, in a loop.
    turns, expected = batch["turns", "full"], torch.zeros(mask.shape)
    for n, t in mask.nonzero().tolist():
        turn = (turns[n] == turns[n, t]) & mask[n]
        shaped = batch["rewards", "full"][n] - 0.1 * out["kl"][n]
        expected[n, t] = shaped[turn].sum()
    assert torch.isfinite(out["returns"]).all()
    torch.testing.assert_close(out["returns"], expected, atol=1e-4, rtol=1e-4)


def test_the_kl_is_no_reward_of_rejected_rows(model, other_model, rows):
    batch = rows()
    batch["valid"] = batch["episode"] != batch["episode"][2]
    out = ExperienceMaker(model, ref=other_model, kl_coef=0.5)(batch)
    assert out["kl"][2].any()
    assert not out["returns"][2].any()
