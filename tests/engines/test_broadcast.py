"""Weights over process groups, from this process to servers in others."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

from tests.engines.receiving_servers import ReceivingSGLang, ReceivingVLLM, in_processes
from tests.engines.sampling_servers import version_of
from torchrl_mt.engines import CompletionsEngine, SGLangWeights, VLLMWeights, WeightUpdateError
from torchrl_mt.engines.server_weights import sglang
from torchrl_mt.engines.server_weights.process_group import open_torch_group

httpx = pytest.importorskip("httpx")
pytest.importorskip("tenacity")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(3, 5).T,  # not contiguous
        "version": torch.tensor([float(version)], dtype=torch.bfloat16),
        "b": torch.arange(7),
    }


def versions_of(engine, count=4):
    async def run():
        return await asyncio.gather(*(engine.generate([5, 6 + k]) for k in range(count)))

    for answer in (answers := asyncio.run(run())):
        assert list(answer.versions) == [version_of(value) for value in answer.log_probs]
    return {version for answer in answers for version in answer.versions}


def test_sglang_receives_weights(tokenizer, monkeypatch):
    monkeypatch.setattr(sglang, "_BUCKET_BYTES", 64)
    with in_processes(ReceivingSGLang, 2) as urls:
        on_update = SGLangWeights(urls, transport="gloo")
        engine = CompletionsEngine(urls, "tiny", tokenizer, api="sglang", on_update=on_update)
        assert versions_of(engine) == {0}
        for version in (1, 2):
            assert engine.update_weights(weights(version)) == version
            assert versions_of(engine) == {version}
        httpx.post(urls[1] + "/fail", json={"times": 1})
        with pytest.raises(WeightUpdateError, match=r"1 of 2 servers.*no room"):
            engine.update_weights(weights(3))
        assert versions_of(engine) == {3}
        assert engine.stats()["servers/live"] == 1
        engine.update_weights(weights(4))
        assert versions_of(engine, 8) == {4}
        assert engine.stats()["servers/live"] == 2


def test_vllm_receives_weights(tokenizer, monkeypatch):
    # vLLM's own communicator needs GPUs.
    monkeypatch.setattr(
        VLLMWeights,
        "_open_group",
        staticmethod(partial(open_torch_group, backend="gloo", group_name="vllm")),
    )
    with in_processes(ReceivingVLLM, 1) as urls:
        on_update = VLLMWeights(urls, transport="nccl")
        engine = CompletionsEngine(urls, "tiny", tokenizer, api="vllm", on_update=on_update)
        for version in (1, 2):
            assert engine.update_weights(weights(version)) == version
            assert versions_of(engine) == {version}
