"""Requests that are taken back, and engines that close under way."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from torchrl_mt.engines import Completion

from .helpers import assert_sampled_by, endless, generate_all, idle, prompts, until


def test_a_cancelled_request_gives_its_cache_back(tokenizer, model):
    engine = endless(model, tokenizer)

    async def run():
        tasks = [
            asyncio.create_task(engine.generate(p, max_new_tokens=900))
            for p in prompts(4, length=60)
        ]
        await until(lambda: engine.stats()["generated_tokens"] >= 40)
        assert engine.stats()["running"] == 4
        held = engine.stats()["cache_tokens"]
        assert held >= 4 * 60
        for task in tasks[1:]:
            task.cancel()
        await until(lambda: engine.stats()["running"] == 1)
        assert engine.stats()["cache_tokens"] < held
        tasks[0].cancel()
        await until(lambda: idle(engine))

    asyncio.run(run())
    engine.close()


@pytest.mark.parametrize("cache_tokens", [65_536, 1024])
def test_of_many_requests_those_that_are_not_cancelled_complete(tokenizer, model, cache_tokens):
    engine = endless(model, tokenizer, cache_tokens=cache_tokens)
    generator = random.Random(0)
    requests = prompts(200, length=20)

    async def run():
        tasks = [asyncio.create_task(engine.generate(p, max_new_tokens=20)) for p in requests]
        doomed = generator.sample(range(200), 100)
        for number in doomed:
            await asyncio.sleep(0.001 * generator.random())
            tasks[number].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True), doomed

    results, doomed = asyncio.run(run())
    for number, (prompt, result) in enumerate(zip(requests, results, strict=True)):
        if isinstance(result, Completion):
            assert len(result.token_ids) == 20
            assert_sampled_by(model, prompt, result)
        else:
            assert isinstance(result, asyncio.CancelledError)
            assert number in doomed
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    asyncio.run(until(lambda: idle(engine)))
    engine.close()


@pytest.mark.parametrize("inside", [True, False])
def test_closing_fails_what_is_under_way(tokenizer, model, inside):
    engine = endless(model, tokenizer)

    async def run():
        tasks = [asyncio.create_task(engine.generate(p, max_new_tokens=900)) for p in prompts(40)]
        await until(lambda: engine.stats()["generated_tokens"] > 100)
        if inside:
            engine.close()
        else:
            await asyncio.to_thread(engine.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    assert all(isinstance(result, RuntimeError) for result in results)
    assert "the engine is closed" in str(results[0])
    assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_mt")]
    assert idle(engine)
    with pytest.raises(RuntimeError, match="closed"):
        generate_all(engine, prompts(1))
