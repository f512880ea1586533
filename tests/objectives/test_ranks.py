"""Several ranks, with uneven rows or none, learn what one process learns from all rows."""

from __future__ import annotations

import copy
import itertools
import re
from functools import partial
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrl.data import AdaptiveKLController
from transformers import Qwen2ForCausalLM

from tests.objectives import helpers
from tests.objectives.conftest import make_model, make_rows
from tests.objectives.helpers import objective_of, value_model
from tests.rank_processes import needs_gloo, play, take_part
from tests.scoring.helpers import tiny
from tests.settings import grouped
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, RewardError, micro_batches
from torchrl_mt.objectives.functional import RewardNormalizer
from torchrl_mt.objectives.functional.aggregation import Aggregation
from torchrl_mt.ranks import is_dtensor, most
from torchrl_mt.scoring import output_head

AGGREGATIONS = get_args(Aggregation)
ADVANTAGES = "turn grpo rloo batch reinforce++ gigpo otb gae turn_gae bilevel_gae"
LOSSES = list(zip(AGGREGATIONS, itertools.cycle((False, True, "tree")), strict=False))
SPLITS = ("uneven", "rank without rows")
CLOSE = 1e-6
"""Relative to the norm: losses are float32, and ranks add up in another order than one process."""


# ---- the ranks ------------------------------------------------------------------------------------


def sharded(model):
    for layer in getattr(model, "backbone", model.base_model).layers:
        fully_shard(layer)
    return fully_shard(model)


def whole_rows(rows, split):
    """The rows of each of two ranks."""
    return [rows[:5], rows[5:]] if split == "uneven" else [rows, rows[:0]]


def parts_of(rows, split):
    """The same, as narrow as they can be."""
    return [narrow(part) for part in whole_rows(rows, split)]


def narrow(rows):
    attended = rows["masks", "all_attention_mask"]
    width = int(attended.any(0).nonzero().max()) + 1 if len(rows) else 1
    return rows.apply(lambda x: x[:, :width] if x.ndim > 1 else x)


def completed_rows():
    rows = helpers.completed_rows(make_model(), n=8, s=14)
    rows["group"] = torch.tensor([0, 0, 0, 1, 1, 1, 0, 2])
    return rows


def gradients(*models):
    named = [p for model in models for p in model.parameters()]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in named]
    return torch.cat([(g.full_tensor() if is_dtensor(g) else g).flatten() for g in grads])


def distance(one, other):
    return float((one - other).norm() / other.norm())


def gradient_errors(rank):
    """The distance of the ranks' gradient from one process's, for each kind of loss and ranks."""
    world, rows, found = distributed.group.WORLD, completed_rows(), {}
    models = {"one": (make_model(), value_model(make_model(2)))}
    models["ddp"] = tuple(map(DistributedDataParallel, (make_model(), value_model(make_model(2)))))
    models["fsdp"] = tuple(map(sharded, (make_model(), value_model(make_model(2)))))
    for kind, packed in LOSSES:
        options = {"aggregation": kind, "kl_coef": 0.1, "entropy_coef": 0.1, "packed": packed}

        def gradient(name, run, options=options):
            actor, critic = models[name]
            loss = MultiTurnLoss(actor, **grouped(critic=critic, **options))
            loss.zero_grad()
            run(loss)
            return gradients(actor, critic)

        expected = gradient("one", lambda loss: objective_of(loss(rows)).backward())
        assert expected.any()
        for name, split in itertools.product(("ddp", "fsdp"), SPLITS):
            mine = parts_of(rows, split)[rank]

            def run(loss, mine=mine, packed=packed):
                total = loss.total(mine, process_group=world)
                for part in micro_batches(
                    mine, passes=Passes(micro_batch_tokens=30, packed=packed), process_group=world
                ):
                    (2 * objective_of(loss(part, total=total))).backward()

            found[name, split, kind] = distance(gradient(name, run), expected)
    return found


def last_token_reward(rows):
    return rows["tokens", "full"].sum(-1) % 5


def where_it_applies(rows):
    """``None``, and hence no reward, for some episodes."""
    score = rows["tokens", "full"].sum(-1)
    return [None if each % 3 == 0 else each % 5 for each in score.tolist()]


def less_mean(rows):
    mask = rows["masks", "all_assistant_mask"]
    return rows["returns"] - rows["returns"].sum() / mask.sum()


def above_the_mean(rows):
    """Reject what is below the mean of all ranks, weight the rest by the score, double rewards."""
    score = rows["rewards", "episode"]
    rows["valid"] = score >= score.mean()
    rows["weights", "full"] = score.abs()
    rows["rewards", "shaped"] *= 2
    rows["rank"] = score.argsort()
    return rows


MAKERS = {
    **{kind: {"advantage": kind, "whiten": kind in ("grpo", "gae")} for kind in ADVANTAGES.split()},
    "filters": {"advantage": "grpo", "process": ["clip_filter", "top_entropy"]},
    "processed": {"advantage": "batch", "process": [above_the_mean, "top_entropy"]},
    "normalised": {
        "advantage": "batch",
        "reward": [("episode", 0.5), (last_token_reward, 1.0)],
        "reward_transform": RewardNormalizer(center=True),
    },
    "one by one": {
        "advantage": "gdpo",
        "reward": [("episode", 0.5), (last_token_reward, 1.0)],
        "process": "clip_filter",
        "kl_coef": 0.0,
    },
    "rejected": {"advantage": "grpo", "reward": where_it_applies},
    "own function": {"advantage": less_mean},
    "under DDP": {"advantage": "grpo"},
    "without passes": {
        "advantage": "grpo",
        "old_log_probs": "sampler",
        "ref": None,
        "critic": None,
    },
}


def experience_errors(rank):
    """The largest difference of the ranks' experience from one process's, for each maker."""
    found = {}
    plain = {"actor": make_model(), "ref": make_model(1), "critic": value_model(make_model(2))}
    divided = {name: sharded(copy.deepcopy(model)) for name, model in plain.items()}
    parallel = {name: DistributedDataParallel(model) for name, model in plain.items()}
    runs = itertools.product(MAKERS.items(), SPLITS)
    for number, ((name, options), split) in enumerate(runs):
        rows = make_rows(n=9, s=14)
        rows["group"] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
        # Each maker is packed once, in one split or the other.
        maker = partial(make, name, options, number % 4 in (0, 3))
        one = maker(plain)
        expected = whole_rows(one(rows.clone()), split)[rank]
        own = maker(
            parallel if name == "under DDP" else divided, process_group=distributed.group.WORLD
        )
        mine = own(parts_of(rows, split)[rank])
        errors, width = [0.0], mine["tokens", "full"].shape[1]
        for key in one.out_keys:
            assert mine[key].shape == expected[key][:, :width].shape
            if mine[key].numel():
                errors.append(float((mine[key] - expected[key][:, :width]).abs().max()))
        assert own.metrics.keys() == one.metrics.keys()
        errors += [
            abs(value - one.metrics[key]) / max(1.0, abs(value))
            for key, value in own.metrics.items()
        ]
        if isinstance(one.kl_coef, AdaptiveKLController):
            assert one.kl_coef.coef != 0.1
            errors.append(abs(float(one.kl_coef.coef) - float(own.kl_coef.coef)))
        sharded_still = all(map(is_dtensor, divided["actor"].parameters()))
        found[name, split] = max(errors) if sharded_still else float("inf")
    return found


def make(name, options, packed, models, process_group=None):
    models = dict(models)
    options = {
        "old_log_probs": "actor",
        "with_entropy": True,
        "kl_coef": AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10),
        "micro_batch_size": 1,
        "packed": packed,
        **models,
        **copy.deepcopy(options),
    }
    if options["ref"] is None:
        options |= {"kl_coef": 0.0, "with_entropy": False}
    return ExperienceMaker(process_group=process_group, **grouped(**options))


def whole(model):
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def own_head(model):
    fully_shard(model.lm_head)
    return sharded(model)


def make_gemma():
    return tiny("Gemma2", 4, head_dim=8, initializer_range=0.5, final_logit_softcapping=2.0)


class Doubled(Qwen2ForCausalLM):
    """Changes its logits by a factor that its configuration does not have."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output


def hybrid(model):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


HEADS = {
    "root alone": (make_model, fully_shard, False),
    "root and layers": (make_model, sharded, False),
    "resharded after forward": (make_model, whole, False),
    "hybrid": (make_model, hybrid, False),
    "tied": (partial(make_model, tie_word_embeddings=True), sharded, False),
    "soft-capped": (make_gemma, sharded, False),
    "head divided by itself": (make_model, own_head, True),
    "unknown factor": (lambda: Doubled(make_model().config).eval(), sharded, True),
}
"""Models, how they are divided, and whether they need whole logits."""


def whole_logits_counted():
    return patch.object(output_head, "whole_logits", wraps=output_head.whole_logits)


def head_errors(rank):
    """The distance of the gradient over two steps, and passes with whole logits on this rank."""
    rows, found = completed_rows(), {}
    for name, (build, divide, _) in HEADS.items():
        torch.manual_seed(7)
        plain = build()
        divided = divide(copy.deepcopy(plain))
        mine = parts_of(rows, "rank without rows")[rank]
        errors, passes = [], 0
        for _ in range(2):
            one = MultiTurnLoss(plain, entropy_coef=0.1)
            one.zero_grad()
            objective_of(one(rows)).backward()
            many = MultiTurnLoss(divided, entropy_coef=0.1)
            many.zero_grad()
            total = many.total(mine, process_group=distributed.group.WORLD)
            with whole_logits_counted() as counted:
                (2 * objective_of(many(mine, total=total))).backward()
            passes += counted.call_count
            for model in (plain, divided):
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            errors.append(distance(gradients(divided), gradients(plain)))
        found[name] = max(errors), passes
    return found


def refusals(rank):
    """What each kind of bad rows on one rank raises on this one, and whether the rows are left alone."""
    found = {}
    model, world = sharded(make_model()), distributed.group.WORLD
    for name, (bad_rank, spoil, options) in BAD.items():
        rows = make_rows(n=9, s=14)
        mine = parts_of(rows, "uneven")[rank]
        if rank == bad_rank:
            mine, options = spoil(mine, dict(options))
        maker = ExperienceMaker(model, advantage="batch", process_group=world, **options)
        before = mine.clone()
        try:
            maker(mine)
        except Exception as error:
            one, other = (dict(each.items(True, True)) for each in (mine, before))
            same = one.keys() == other.keys()
            same &= all(torch.equal(one[k].nan_to_num(), other[k].nan_to_num()) for k in one)
            found[name] = type(error).__name__, str(error), same
    loss, rows = MultiTurnLoss(model, objective="sft"), make_rows()
    rows = rows.exclude("masks") if rank == 1 else rows
    for name, call in (("total", loss.total), ("micro-batches", micro_batches)):
        try:
            call(rows, process_group=world)
        except Exception as error:
            found[name] = type(error).__name__, str(error), True
    return found


def spoil_log_probs(rows, options):
    rows["log_probs", "full"] = torch.full_like(rows["log_probs", "full"], torch.nan)
    return rows, options


def spoil_reward(rows, options):
    def fail(rows):
        raise RewardError("judge", 3, "the server is down")

    return rows, options | {"reward": fail}


def spoil_episode(rows, options):
    rows["episode"] = rows["episode"] * 0
    rows["turns", "full"] = rows["turns", "full"] + 100 * torch.arange(1, len(rows) + 1)[:, None]
    return rows, options


BAD = {
    "NaN": (0, spoil_log_probs, {}),
    "no mask": (0, lambda rows, options: (rows.exclude("masks"), options), {}),
    "reward": (1, spoil_reward, {"reward": last_token_reward}),
    "another entry": (1, lambda rows, options: (rows.set("other", rows["group"]), options), {}),
    "torn": (1, spoil_episode, {}),
}
"""Which rank has bad rows, what spoils them, and the maker's options."""


def most_of_own_ranks(rank):
    """The largest count on the ranks of a model that is divided among this one alone."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("models", "ranks"))["ranks"]
    model = fully_shard(make_model(), mesh=mesh)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    gathered = not any(map(is_dtensor, model.parameters()))
    return gathered, most(10 + rank, model)


def work(rank):
    return {
        "most": most_of_own_ranks(rank),
        "gradients": gradient_errors(rank),
        "experience": experience_errors(rank),
        "heads": head_errors(rank),
        "refusals": refusals(rank),
    }


# ---- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return play("tests.objectives.test_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize(("kind", "packed"), LOSSES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_make_the_gradient_of_one_process(found, name, split, kind, packed):
    # Other rows lie beside a tree's on another rank.
    close = 1e-5 if packed == "tree" else CLOSE
    assert all(of_rank["gradients"][name, split, kind] < close for of_rank in found)


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", MAKERS)
def test_sharded_models_make_the_experience_of_one_process(found, name, split):
    assert all(of_rank["experience"][name, split] < 1e-5 for of_rank in found)


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("name", HEADS)
def test_a_divided_output_layer_computes_no_whole_logits(found, name):
    for of_rank in found:
        error, passes = of_rank["heads"][name]
        assert error < CLOSE
        assert bool(passes) == HEADS[name][-1]


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize(
    ("name", "said", "elsewhere"),
    [
        ("NaN", "ValueError: .*finite", "RuntimeError: rank 0 failed.*finite"),
        ("no mask", "KeyError: .*masks", "RuntimeError: rank 0 failed.*masks"),
        ("reward", "RewardError: .*the server is down", "RuntimeError: rank 1 failed.*is down"),
        ("another entry", "ValueError: .*same entries.*other", "ValueError: .*same entries.*other"),
        ("torn", "ValueError: .*whole episodes.*0 and 1", "ValueError: .*whole episodes.*0 and 1"),
        ("total", "KeyError: .*masks", "RuntimeError: rank 1 failed.*masks"),
        ("micro-batches", "KeyError: .*masks", "RuntimeError: rank 1 failed.*masks"),
    ],
)
def test_bad_rows_on_one_rank_stop_all_and_change_nothing(found, name, said, elsewhere):
    for rank, of_rank in enumerate(found):
        kind, message, same = of_rank["refusals"][name]
        expected = said if rank == BAD.get(name, (1,))[0] else elsewhere
        assert re.match(expected, f"{kind}: {message}", re.DOTALL)
        assert same


@pytest.mark.slow
@needs_gloo
def test_ranks_that_hold_another_model_are_not_asked(found):
    assert [of_rank["most"] for of_rank in found] == [(True, 10), (True, 11)]


if __name__ == "__main__":
    take_part(work)
