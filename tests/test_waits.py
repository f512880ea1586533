"""How often hot paths wait for the GPU at most, counted on a simulated CUDA device."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import TensorDictReplayBuffer

from tests.objectives.conftest import make_model, make_rows
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter, PrioritizedClipSampler
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, ValueModel
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns

simcuda: Any = sys.modules.get("simcuda")  # It must be imported before torch.
if simcuda is None:
    pytest.skip("no simulated CUDA device", allow_module_level=True)


def model(seed: int) -> torch.nn.Module:
    return make_model(seed).cuda()


def critic() -> torch.nn.Module:
    return ValueModel.from_model(make_model(2)).cuda()


def making(*, ref: bool = False, valued: bool = False, **keywords: Any) -> Callable[[], Any]:
    models: dict[str, Any] = {"ref": model(1)} if ref else {}
    models |= {"critic": critic(), "advantage": "gae"} if valued else {}
    maker = ExperienceMaker(model(0), **models, **keywords)
    return lambda: maker(make_rows(n=16).to("cuda", non_blocking=True))


def training(
    *, with_total: bool = False, valued: bool = False, **keywords: Any
) -> Callable[[], Any]:
    rows = making(ref=True, valued=True, old_log_probs="actor")()
    loss = MultiTurnLoss(model(0), critic=critic() if valued else None, **keywords)
    total = loss.total(rows) if with_total else None
    return lambda: loss(rows, total=total)


def transforming(transform: Callable[[TensorDict], Any]) -> Callable[[], Any]:
    def turn(k: int) -> TensorDict:
        tokens = {"prompt": torch.arange(5 * k + 2), "response": torch.ones(k + 1).long()}
        ends = {"reward": torch.ones(1), "done": torch.tensor([k == 2])}
        return TensorDict({"tokens": tokens, "next": ends})

    turns = lazy_stack([turn(k) for k in (0, 1, 2)] * 8).to("cuda")
    return lambda: transform(turns)


def sampling(**keywords: Any) -> Callable[[], Any]:
    language_model, tokenizer = tiny_chat_model(["guess"])
    engine = TransformersEngine(language_model.cuda(), tokenizer)
    keywords |= {"max_new_tokens": 20, "stop_token_ids": ()}

    async def play() -> None:
        await asyncio.gather(*(engine.generate([2, 3, 4], **keywords) for _ in range(16)))

    return lambda: asyncio.run(play())


def replaying(sampler: Any, use: Callable[[Any], Any]) -> Callable[[], Any]:
    buffer = TensorDictReplayBuffer(
        storage=EpisodeStorage(1000, device="cuda"),
        writer=EpisodeWriter(),
        sampler=sampler,
        batch_size=128,
        priority_key="priority",
    )
    buffer.extend(episode())
    return lambda: use(buffer)


def episode() -> TensorDict:
    done = torch.arange(40)[:, None] == 39
    ends = {"observation": torch.rand(40, 3), "reward": torch.rand(40, 1), "done": done}
    return TensorDict({"observation": torch.rand(40, 3), "next": ends}, [40])


def update(buffer: Any) -> None:
    sample = buffer.sample()
    sample["priority"] = torch.ones(sample.shape, device="cuda")
    buffer.update_tensordict_priority(sample)


PATHS: dict[str, tuple[Callable[[], Callable[[], Any]], int]] = {
    # transformers asks once in each pass whether rows are packed.
    "maker, sampler": (partial(making, old_log_probs="sampler"), 1),
    "maker, actor": (partial(making, old_log_probs="actor"), 4),
    "maker, actor, packed": (partial(making, old_log_probs="actor", passes=Passes(packed=True)), 4),
    "maker, actor, ref": (partial(making, old_log_probs="actor", ref=True), 7),
    "maker, actor, critic": (partial(making, old_log_probs="actor", valued=True), 6),
    "loss": (training, 4),
    "loss, total": (partial(training, with_total=True), 4),
    "loss, packed": (partial(training, passes=Passes(packed=True)), 4),
    "loss, critic": (partial(training, valued=True), 5),
    "loss, prompt_mean": (partial(training, aggregation="prompt_mean"), 6),
    "MergeTurns": (partial(transforming, MergeTurns()), 1),
    # Of each step transformers' question and the copy of what was drawn; of prompts five uploads.
    "engine, 20 steps": (sampling, 45),
    "engine, 20 truncated steps": (
        partial(sampling, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
        45,
    ),
    "sample": (lambda: replaying(ClipSampler(slice_len=8), lambda rb: rb.sample()), 0),
    "update priorities": (lambda: replaying(PrioritizedClipSampler(slice_len=8), update), 1),
    "extend": (lambda: replaying(ClipSampler(slice_len=8), lambda rb: rb.extend(episode())), 0),
    # The flags, the first steps' entries, and TorchRL's upload of the index.
    "extend on the device": (
        lambda: replaying(ClipSampler(slice_len=8), lambda rb: rb.extend(episode().to("cuda"))),
        3,
    ),
    "DiscountedReturn": (partial(transforming, DiscountedReturn(0.9)), 1),
}
"""For each path what makes its call, and the most waits."""


@pytest.mark.parametrize("path", PATHS)
def test_waits(path: str) -> None:
    make, most = PATHS[path]
    call = make()
    call()
    call()
    with simcuda.waits(deep=2) as waits:
        call()
    found = [f"{count} {kind} {where}" for (kind, _, where), count in sorted(waits.items())]
    assert sum(waits.values()) <= most, "\n".join(found)
