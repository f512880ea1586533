"""Requests that are taken back, and engines that close under way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from torchrl_mt.engines.transformers import generation

from .helpers import assert_sampled_by, endless, generate_all, held, idle, prompts, started, until


async def test_a_cancelled_request_gives_its_cache_back(tokenizer, model):
    engine = endless(model, tokenizer)
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


async def test_what_is_complete_is_answered_though_the_step_fails(tokenizer, model, monkeypatch):
    """A prompt's first token may be its last, in a step of which a later pass fails."""
    engine = endless(model, tokenizer)
    plain, failing = engine._model.forward, threading.Event()

    def forward(input_ids, **kwargs):
        if failing.is_set() and input_ids.shape[1] == 1:
            raise ArithmeticError("out of everything")
        return plain(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(engine._model, "forward", forward)
    long, short = prompts(2)
    task = asyncio.create_task(engine.generate(long, max_new_tokens=900))
    await until(lambda: engine.stats()["generated_tokens"] > 5)
    with held(engine):
        brief = asyncio.create_task(engine.generate(short, max_new_tokens=1))
        await until(lambda: engine.stats()["waiting"] == 1)
        failing.set()
    failed, answer = await asyncio.gather(task, brief, return_exceptions=True)
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


async def test_a_request_whose_coroutine_is_closed_is_taken_back(tokenizer, model):
    engine = endless(model, tokenizer)
    asked = engine.generate([5], max_new_tokens=1000)
    asked.send(None)
    await until(lambda: engine.stats()["generated_tokens"] >= 5)
    asked.close()
    await until(lambda: idle(engine))
    assert engine.stats()["generated_tokens"] < 1000


async def test_nothing_is_computed_in_a_pause_that_begins_while_prompts_are_awaited(
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
    engine._generation._num_answered = 5
    tasks = [asyncio.create_task(engine.generate(prompts(1)[0], max_new_tokens=2))]
    await until(gathering.is_set)
    with held(engine):
        tasks += [asyncio.create_task(engine.generate(p, max_new_tokens=2)) for p in prompts(4)]
        await asyncio.sleep(0.05)  # time enough for what must not happen
    await asyncio.gather(*tasks)
    assert in_pauses
    assert not any(in_pauses)
