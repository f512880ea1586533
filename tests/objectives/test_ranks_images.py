"""Ranks with and without images make the gradient and the scores of one process with all rows."""

from __future__ import annotations

import copy
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
from torchrl_mt.objectives import Advantage, ExperienceMaker, MultiTurnLoss, Passes, row_log_probs
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
    """Of gradients, scores and advantages, for each family of models and kind of ranks."""
    found, world = {}, distributed.group.WORLD
    for number, family in enumerate(FAMILIES):
        model, _ = vl_model(family)
        critic = value_model(model)
        rows, _ = completed(family, COUNTS)
        mine = rows[:2] if rank == 0 else rows[2:]
        # LLaVA's last layers of vision are never used.
        unused = {"find_unused_parameters": family == "llava"}
        wrappers = {"ddp": partial(DistributedDataParallel, **unused), "fsdp": sharded}
        for name, packed in zip(wrappers, (number % 2 == 0, number % 2 == 1), strict=True):
            divided = [wrappers[name](copy.deepcopy(m)) for m in (model, critic)]

            def gradient(models, rows, factor, group, packed=packed):
                passes = Passes(packed=packed)
                loss = MultiTurnLoss(models[0], critic=models[1], entropy_coef=0.1, passes=passes)
                loss.zero_grad()
                total = loss.total(rows, process_group=group)
                (factor * objective_of(loss(rows, total=total))).backward()
                return gradients(*models)

            expected = gradient((model, critic), rows, 1, None)
            found[family, name] = distance(gradient(divided, mine, 2, world), expected)
        passes = Passes(packed=number % 2 == 0, micro_batch_size=1)
        given = {"images": RowImages.of(mine), "passes": passes}
        with torch.no_grad():
            one, many = (row_log_probs(m, *entries(mine), **given)[0] for m in (model, divided[0]))
            reshard(divided[0])
        found[family, "scores"] = distance(many, one)
        options = {"old_log_probs": "actor", "advantage": Advantage("gae", whiten=True)}
        make = partial(ExperienceMaker, passes=passes, **options)
        expected = make(model, critic=critic)(rows.copy())["advantage"]
        expected = expected[:2] if rank == 0 else expected[2:]
        own = make(divided[0], critic=divided[1], process_group=world)(mine)
        found[family, "experience"] = distance(own["advantage"], expected)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return play("tests.objectives.test_ranks_images", tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("name", ["ddp", "fsdp", "scores", "experience"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_without_images_runs_the_vision_tower(found, family, name):
    assert all(of_rank[family, name] < 1e-5 for of_rank in found)


if __name__ == "__main__":
    take_part(errors)
