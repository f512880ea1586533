"""Actors with LoRA on several ranks: the gradient of one process, and the base model as reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.adapters import lora
from tests.objectives.conftest import make_model, make_rows
from tests.objectives.helpers import objective_of
from tests.objectives.test_ranks import distance, gradients, parts_of, whole_logits_counted
from tests.rank_processes import needs_gloo, play, take_part
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, micro_batches

pytest.importorskip("peft")

KINDS = {"layers": {}, "dora": {"use_dora": True}, "head": {"target_modules": ["lm_head"]}}
"""Options of LoRA; whole logits are needed for an adapter on the output layer only."""


def sharded(actor):
    for layer in actor.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(actor)


WRAPPERS = {"ddp": DistributedDataParallel, "fsdp": sharded, "fsdp, one module": fully_shard}
RUNS = [
    *(("layers", name) for name in WRAPPERS),
    *(("dora", "fsdp"), ("head", "ddp"), ("head", "fsdp, one module")),
]


def errors(rank):
    """Errors of experience and gradient over two steps, and this rank's passes with whole logits."""
    found, world, cut = {}, distributed.group.WORLD, Passes(micro_batch_size=2)
    for kind, name in RUNS:
        plain = lora(make_model(), **KINDS[kind])
        many = WRAPPERS[name](copy.deepcopy(plain))
        optimizers = [
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
            for model in (plain, many)
        ]
        options = {"ref": "base", "advantage": "batch", "kl_coef": 0.1, "passes": cut}
        worst, passes = [], 0
        for _ in range(2):
            rows = ExperienceMaker(plain, **options)(make_rows(n=9, s=14))
            objective_of(MultiTurnLoss(plain, kl_coef=0.1)(rows)).backward()
            mine = parts_of(make_rows(n=9, s=14), "uneven")[rank]
            with whole_logits_counted() as counted:
                mine = ExperienceMaker(many, process_group=world, **options)(mine)
                loss = MultiTurnLoss(many, kl_coef=0.1)
                total = loss.total(mine, process_group=world)
                for part in micro_batches(mine, passes=cut, process_group=world):
                    (2 * objective_of(loss(part, total=total))).backward()
            passes += counted.call_count
            rows = rows[:5] if rank == 0 else rows[5:]
            for key in (("log_probs", "ref"), "kl", "advantage"):
                expected = rows[key][:, : mine[key].shape[1]]
                worst.append(float((mine[key] - expected).abs().max()))
            worst.append(distance(gradients(many), gradients(plain)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[kind, name] = max(worst), passes
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return play("tests.objectives.test_ranks_lora", tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_ranks_learn_an_adapter_as_one_process(found, kind, name):
    for of_rank in found:
        error, passes = of_rank[kind, name]
        assert error < 1e-5
        assert bool(passes) == (kind == "head")


if __name__ == "__main__":
    take_part(errors)
