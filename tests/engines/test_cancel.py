"""Requests that are taken back, and engines that close under way."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from torchrl_mt.engines import Completion
from torchrl_mt.engines.transformers import generation

from .helpers import assert_sampled_by, endless, generate_all, held, idle, prompts, started, until


def test_a_cancelled_request_gives_its_cache_back(tokenizer, model):
    engine = endless(model, tokenizer)

    async def run():
        tasks = started(engine, prompts(4, length=60), max_new_tokens=900)
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


@pytest.mark.parametrize("cache_tokens", [pytest.param(65_536, marks=pytest.mark.slow), 1024])
def test_of_many_requests_those_that_are_not_cancelled_complete(tokenizer, model, cache_tokens):
    engine = endless(model, tokenizer, cache_tokens=cache_tokens)
    generator = random.Random(0)
    requests = prompts(100, length=20)

    async def run():
        tasks = started(engine, requests, max_new_tokens=20)
        doomed = generator.sample(range(100), 50)
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


def test_what_is_complete_is_answered_though_the_step_fails(tokenizer, model, monkeypatch):
    """A prompt's first token may be its last, in a step of which a later pass fails."""
    engine = endless(model, tokenizer)
    plain, failing = engine._model.forward, threading.Event()

    def forward(input_ids, **kwargs):
        if failing.is_set() and input_ids.shape[1] == 1:
            raise ArithmeticError("out of everything")
        return plain(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(engine._model, "forward", forward)
    long, short = prompts(2)

    async def run():
        task = asyncio.create_task(engine.generate(long, max_new_tokens=900))
        await until(lambda: engine.stats()["generated_tokens"] > 5)
        with held(engine):
            brief = asyncio.create_task(engine.generate(short, max_new_tokens=1))
            await until(lambda: engine.stats()["waiting"] == 1)
            failing.set()
        return await asyncio.gather(task, brief, return_exceptions=True)

    failed, answer = asyncio.run(run())
    assert "generation failed: ArithmeticError: out of everything" in str(failed)
    assert_sampled_by(model, short, answer)
    assert idle(engine)


def test_an_engine_that_is_closed_by_its_own_thread_fails_what_is_under_way(
    tokenizer, model, monkeypatch
):
    """As when what a step frees was the last to hold it."""
    engine = endless(model, tokenizer)
    plain = engine._model.forward

    def forward(**kwargs):
        engine.close()
        return plain(**kwargs)

    monkeypatch.setattr(engine._model, "forward", forward)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        generate_all(engine, prompts(1))
    engine._generation._thread.join()


def test_a_request_whose_coroutine_is_closed_is_taken_back(tokenizer, model):
    engine = endless(model, tokenizer)

    async def run():
        asked = engine.generate([5], max_new_tokens=1000)
        asked.send(None)
        await until(lambda: engine.stats()["generated_tokens"] >= 5)
        asked.close()
        await until(lambda: idle(engine))

    asyncio.run(run())
    assert engine.stats()["generated_tokens"] < 1000


def test_nothing_is_computed_in_a_pause_that_begins_while_prompts_are_awaited(
    tokenizer, model, monkeypatch
):
    engine = endless(model, tokenizer)
    monkeypatch.setattr(generation, "_MAX_GAP", 1000.0)
    plain, in_pauses = engine._model.forward, []
    gather, gathering = engine._generation._gather, threading.Event()

    def note_and_gather():
        gathering.set()
        gather()

    def forward(**kwargs):
        in_pauses.append(engine._generation._paused)
        return plain(**kwargs)

    monkeypatch.setattr(engine._model, "forward", forward)
    monkeypatch.setattr(engine._generation, "_gather", note_and_gather)

    async def run():
        engine._generation._num_answered = 5
        tasks = [asyncio.create_task(engine.generate(prompts(1)[0], max_new_tokens=2))]
        await until(gathering.is_set)
        with held(engine):
            tasks += [asyncio.create_task(engine.generate(p, max_new_tokens=2)) for p in prompts(4)]
            await asyncio.sleep(0.05)  # time enough for what must not happen
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert in_pauses
    assert not any(in_pauses)
