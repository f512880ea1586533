"""From an environment's pixels to the loss: what was sampled is what is scored and trained on."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Compose

from tests.collectors.pictures import Screens
from tests.tiers import first_fast
from tests.vision.episodes import FAMILIES
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.transforms import MergeTurns, VisionInputs

EPISODES = 6


@pytest.mark.parametrize("packed", first_fast([False, True]))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_sampled_is_scored_and_trained(family, packed):
    torch.manual_seed(0)
    model, processor = tiny_vl_model(family)
    buffer = ReplayBuffer(
        storage=EpisodeStorage(100),
        writer=EpisodeWriter(),
        sampler=EpisodeSampler(replacement=False),
        transform=Compose(MergeTurns(), VisionInputs(processor)),
        batch_size=EPISODES,
    )
    engine = TransformersEngine(model, processor, seed=0)
    with MultiTurnCollector(
        lambda: Screens(turns=3),
        engine,
        [{"first": k} for k in range(EPISODES // 2)],
        processor=processor,
        group_size=2,
        episodes_per_batch=EPISODES,
        total_episodes=EPISODES,
        limits=Limits(max_response_tokens=40),
        sampling={"stop": ["go", "up", "red", "white", "yes"]},
        replay_buffer=buffer,
    ) as collector:
        for _ in collector:
            pass
    engine.close()
    rows = buffer.sample()
    assert int(rows["images", "count"].max()) == 3
    sampled = rows["masks", "all_assistant_mask"]
    tokens = rows["tokens", "full"]
    assert not (tokens[sampled] == processor.image_token_id).any()

    rows = ExperienceMaker(model, passes=Passes(packed=packed))(rows)
    gap = rows["log_probs", "old"] - rows["log_probs", "full"]
    assert gap[sampled].abs().max() <= 1e-4

    # Micro-batches have the images of their rows, in whatever order.
    rows["advantage"] = torch.randn_like(rows["advantage"])
    loss = MultiTurnLoss(model, passes=Passes(packed=packed))
    total = loss.total(rows)

    def gradient(parts):
        model.zero_grad()
        for part in parts:
            loss(part, total=total)["loss_objective"].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient([rows])
    assert whole.abs().sum() > 0
    parts = rows[torch.randperm(len(rows))].split(2)
    torch.testing.assert_close(gradient(parts), whole, rtol=1e-3, atol=1e-5)
