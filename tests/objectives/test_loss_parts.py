"""A loss in parts has the values and gradients of one pass, and one part's activations in memory."""

from functools import partial
from typing import get_args

import pytest
import torch
from tensordict import TensorDict
from torch.autograd.graph import saved_tensors_hooks

from tests.objectives import helpers
from tests.objectives.conftest import make_model
from tests.objectives.helpers import gradients_of, objective_of, value_model
from tests.objectives.test_images import completed, vl_model
from tests.scoring.test_actor_output import Checkpointed
from tests.settings import OF_SINGLE_ROWS, grouped
from tests.tiers import pairs, some_fast
from torchrl_mt.objectives import MultiTurnLoss, Passes
from torchrl_mt.objectives.functional.aggregation import Aggregation
from torchrl_mt.objectives.loss_parts import kept_bytes

AGGREGATIONS = get_args(Aggregation)
LIMITS = [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_tokens": 17}]


completed_rows = partial(helpers.completed_rows, weighted=True, n=7)


def gradients(loss, out, weights):
    loss.zero_grad(set_to_none=True)
    total = sum(weights.get(key, 1.0) * x for key, x in out.items() if key.startswith("loss_"))
    total.backward()
    return gradients_of(loss)


def assert_same(models, batch, options, limits, weights=None, atol=1e-5):
    """Compare parts with one pass: outputs, and gradients to ``atol`` of each's largest entry."""
    weights = weights or {}
    whole = MultiTurnLoss(*models, **grouped(**{**options, "micro_batch_tokens": None}))
    parts = MultiTurnLoss(*models, **grouped(**options, **limits))
    expected, got = whole(batch), parts(batch)
    assert not any(x.requires_grad for key, x in got.items() if not key.startswith("loss_"))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    reference = gradients(whole, expected, weights)
    found = gradients(parts, got, weights)
    assert found.keys() == reference.keys()
    for name, gradient in reference.items():
        deviation = (found[name] - gradient).abs().max()
        assert deviation <= atol * gradient.abs().max().clamp(min=1.0), name


@pytest.mark.parametrize(("objective", "aggregation"), pairs(OF_SINGLE_ROWS, AGGREGATIONS))
@pytest.mark.parametrize("seed", some_fast([0], range(3)))
def test_parts_have_the_losses_and_gradients_of_one_pass(objective, aggregation, seed):
    model, limits = make_model(), LIMITS[(seed + len(objective)) % 3]
    correction = None if objective in ("sft", "decoupled_ppo") else "sequence_tis"
    options = {"objective": objective, "aggregation": aggregation, "correction": correction}
    assert_same([model], completed_rows(model, seed), options, limits)


@pytest.mark.parametrize("weights", [{}, {"loss_kl": 0.0}, {"loss_entropy": 3.0, "loss_kl": -1.0}])
@pytest.mark.parametrize("packed", [False, True, "tree"])
def test_losses_may_be_weighed_in_their_sum(weights, packed):
    model = make_model()
    options = {"kl_coef": 0.1, "entropy_coef": 0.01, "critic": value_model(model), "packed": packed}
    limits = {"micro_batch_tokens": 24}
    assert_same([model], completed_rows(model), options, limits, weights)


def test_images_go_with_their_rows():
    model, _ = vl_model("qwen2_5_vl")
    rows, _ = completed("qwen2_5_vl")
    options = {"critic": value_model(model), "entropy_coef": 0.1}
    assert_same([model], rows, options, {"micro_batch_size": 1}, atol=1e-4)


@pytest.mark.parametrize("total", [40, 1000])
def test_a_total_counts_in_parts_as_in_one_pass(total):
    model = make_model()
    batch = completed_rows(model)
    one, parts = (
        MultiTurnLoss(model, passes=Passes(micro_batch_size=size))(batch, total=total)
        for size in (None, 2)
    )
    torch.testing.assert_close(parts["loss_objective"], one["loss_objective"])


def watched():
    """A model, and the number of tokens of each pass that it makes."""
    model, passes = make_model(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return model, passes


def most_kept(loss, batch):
    """The most bytes that tensors saved for a backward pass have at a time."""
    alive, most = 0, 0

    class Saved:
        def __init__(self, x):
            nonlocal alive, most
            self.x = x
            alive += x.nbytes
            most = max(most, alive)

        def __del__(self):
            nonlocal alive
            alive -= self.x.nbytes

    with saved_tensors_hooks(Saved, lambda saved: saved.x):
        objective_of(loss(batch)).backward()
    return most


def test_auto_bounds_what_is_kept_and_small_batches_are_one_pass(monkeypatch):
    actor, passes = watched()
    batch = completed_rows(actor, n=16)
    passes.clear()
    one_pass = MultiTurnLoss(actor)
    whole, most_of_whole = kept_bytes(lambda: one_pass(batch), [actor]), most_kept(one_pass, batch)
    assert passes == [16 * 12] * 2

    budget = whole // 4
    monkeypatch.setattr("torchrl_mt.objectives.loss.activation_budget", lambda device: budget)
    passes.clear()
    loss = MultiTurnLoss(actor)
    loss(batch)
    measured, *parts = passes
    assert measured == 12
    assert 4 <= len(parts) <= 8
    passes.clear()
    assert most_kept(loss, batch) <= 0.3 * most_of_whole
    assert passes == parts  # a row is measured once


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float16}], ids=["without a graph", "float16"]
)
def test_one_pass_where_parts_help_nobody(options):
    actor, passes = watched()
    batch = completed_rows(actor)
    passes.clear()
    with torch.set_grad_enabled(bool(options)):
        out = MultiTurnLoss(actor, **grouped(micro_batch_size=1, **options))(batch)
    assert len(passes) == 1
    assert out["loss_objective"].isfinite()


def test_an_optimizer_in_the_backward_pass_steps_once_an_update():
    loss = MultiTurnLoss(make_model(), passes=Passes(micro_batch_size=1))
    batch, steps = completed_rows(loss.actor_network), []
    loss.actor_network.lm_head.weight.register_post_accumulate_grad_hook(steps.append)
    out = loss(batch)
    assert not steps
    out["loss_objective"].backward()
    assert len(steps) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_are_trained_whole(reentrant):
    model = make_model()
    batch = completed_rows(model)
    expected = MultiTurnLoss(model)
    plain = gradients(expected, expected(batch), {})
    loss = MultiTurnLoss(Checkpointed(model, reentrant), passes=Passes(micro_batch_size=1))
    got = gradients(loss, loss(batch), {})
    for a, b in zip(got.values(), plain.values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_gradients_are_added_to_those_that_are_there(weight):
    model = make_model()
    batch = completed_rows(model)
    loss = MultiTurnLoss(model, kl_coef=0.1, passes=Passes(micro_batch_size=2))
    once = gradients(loss, loss(batch), {"loss_kl": weight})
    out = loss(batch)
    total = out["loss_objective"] + weight * out["loss_kl"]
    total.backward(retain_graph=True)
    total.backward()
    for name, p in loss.named_parameters():
        torch.testing.assert_close(p.grad, 3 * once[name])


def test_no_row_and_frozen_models_are_no_error():
    model = make_model()
    batch = completed_rows(model)
    loss = MultiTurnLoss(model, passes=Passes(micro_batch_size=1))
    gradients(loss, loss(batch[:0]), {})
    model.requires_grad_(False)
    loss = MultiTurnLoss(model, passes=Passes(micro_batch_size=1))
    assert not loss(batch)["loss_objective"].requires_grad


# Updates on regularisers alone


def idle_rows(model):
    return completed_rows(model).set("advantage", torch.zeros(7, 12, 1))


def update(loss, batch, micro_batches=1):
    optimizer = torch.optim.SGD(loss.parameters(), 1e-3)
    total = loss.total(batch)
    for part in batch.split(-(-len(batch) // micro_batches)):
        objective_of(loss(part, total=total)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_updates_on_regularisers_alone_end_in_an_error(options, micro_batches):
    loss = MultiTurnLoss(make_model(), **options)
    loss.max_idle_updates = 3
    batch = idle_rows(loss.actor_network)
    for _ in range(3):
        update(loss, batch, micro_batches)
    with pytest.raises(
        RuntimeError, match=r"3 updates in a row.*max_response_tokens.*max_idle_updates"
    ):
        update(loss, batch, micro_batches)


def test_an_update_that_learns_begins_the_count_anew():
    loss = MultiTurnLoss(make_model(), entropy_coef=0.1)
    loss.max_idle_updates = 3
    idle, learning = idle_rows(loss.actor_network), completed_rows(loss.actor_network)
    for batch in (idle, idle, TensorDict.cat([idle, learning]), idle, idle, learning, idle):
        update(loss, batch, micro_batches=2)


@pytest.mark.parametrize(
    "options", [{}, {"entropy_coef": 0.0}, {"kl_coef": 0.0}, {"entropy_coef": 0.1, "most": None}]
)
def test_without_a_regulariser_or_limit_idle_updates_go_on(options):
    most = options.pop("most", 2)
    loss = MultiTurnLoss(make_model(), **options)
    loss.max_idle_updates = most
    batch = idle_rows(loss.actor_network)
    for _ in range(4):
        update(loss, batch)
