"""Ranks with and without images make the gradient and the scores of one process with all rows."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.objectives.helpers import objective_of, value_model
from tests.objectives.test_images import completed
from tests.objectives.test_ranks import distance, gradients
from tests.rank_processes import needs_gloo, play, take_part
from tests.scoring.vision_rows import FAMILIES, entries, vl_model
from tests.settings import grouped
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, row_log_probs
from torchrl_mt.ranks import reshard
from torchrl_mt.scoring.row_vision import vision_towers
from torchrl_mt.vision import RowImages

COUNTS = (1, 2, 0, 0, 0)
"""Images of the rows; the first two are on rank 0, the others on rank 1."""


def sharded(model):
    for tower in vision_towers(model):
        # transformers finds the hidden states of LLaVA's tower by its class, which FSDP changes.
        if not type(tower).__name__.startswith("CLIP"):
            fully_shard(tower)
    return fully_shard(model)


def errors(rank):
    found = {}
    for family in FAMILIES:
        model, _ = vl_model(family)
        critic = value_model(model)
        rows, _ = completed(family, COUNTS)
        mine = rows[:2] if rank == 0 else rows[2:]
        for name, packed in itertools.product(("ddp", "fsdp"), (False, True)):
            # LLaVA's last layers of vision are never used.
            unused = {"find_unused_parameters": family == "llava"}
            wrap = partial(DistributedDataParallel, **unused) if name == "ddp" else sharded
            divided = [wrap(copy.deepcopy(m)) for m in (model, critic)]

            def gradient(models, rows, factor, group, packed=packed):
                loss = MultiTurnLoss(
                    models[0], critic=models[1], entropy_coef=0.1, passes=Passes(packed=packed)
                )
                loss.zero_grad()
                total = loss.total(rows, process_group=group)
                (factor * objective_of(loss(rows, total=total))).backward()
                return gradients(*models)

            expected = gradient((model, critic), rows, 1, None)
            got = gradient(divided, mine, 2, distributed.group.WORLD)
            found[family, name, packed] = distance(got, expected)
        for packed in (False, True):
            with torch.no_grad():
                options = {"packed": packed, "micro_batch_size": 1}
                one = row_log_probs(
                    model, *entries(mine), images=RowImages.of(mine), **grouped(**options)
                )[0]
                many = row_log_probs(
                    divided[0], *entries(mine), images=RowImages.of(mine), **grouped(**options)
                )[0]
                reshard(divided[0])
            found[family, "scores", packed] = distance(many, one)
            found[family, "experience", packed] = experience_error(
                rank, rows, (model, critic), divided, packed
            )
    return found


def experience_error(rank, rows, models, divided, packed):
    """The distance of the ranks' advantages from one process's."""
    options = {"old_log_probs": "actor", "advantage": "gae", "whiten": True, "packed": packed}
    make = partial(ExperienceMaker, **grouped(micro_batch_size=1, **options))
    expected = make(models[0], critic=models[1])(rows.copy())["advantage"]
    own = make(divided[0], critic=divided[1], process_group=distributed.group.WORLD)
    mine, expected = (rows[:2], expected[:2]) if rank == 0 else (rows[2:], expected[2:])
    return distance(own(mine)["advantage"], expected)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return play("tests.objectives.test_ranks_images", tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("name", ["ddp", "fsdp", "scores", "experience"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_without_images_runs_the_vision_tower(found, family, name):
    for of_rank in found:
        for packed in (False, True):
            assert of_rank[family, name, packed] < 1e-5, packed


if __name__ == "__main__":
    take_part(errors)
