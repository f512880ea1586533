"""What the engine counts, and that it computes no token of a prompt twice."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import pytest
from hypothesis import strategies as st

from tests.tiers import few_or_many
from torchrl_mt.engines import TransformersEngine

from .helpers import (
    assert_all_sampled_by,
    assert_sampled_by,
    check,
    endless,
    generate_all,
    held,
    idle,
    prompts,
    sampled,
    until,
)

BRANCH = 16
"""Prompts that have so many tokens more in common wait for each other."""


@pytest.mark.parametrize("budget", [1024, 32])
def test_a_group_computes_its_prompt_once(tokenizer, model, budget):
    engine = endless(model, tokenizer, max_batch_tokens=budget)
    prompt = prompts(1, length=100)[0]
    answers = generate_all(engine, [prompt] * 16, max_new_tokens=3)
    stats = engine.stats()
    # Who comes while the prompt is being computed needs none of it; who comes later its last token.
    assert 100 <= stats["prefill_tokens"] <= 100 + 15
    assert stats["shared_tokens"] + stats["prefill_tokens"] == 16 * 100
    assert stats["new_tokens"] <= stats["prefill_tokens"]
    for answer in answers:
        assert_sampled_by(model, prompt, answer)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1


async def test_a_group_goes_on_when_its_first_is_cancelled(tokenizer, model):
    engine = endless(model, tokenizer, max_batch_tokens=16)
    prompt = prompts(1, length=400)[0]
    tasks = [asyncio.create_task(engine.generate(prompt, max_new_tokens=2)) for _ in range(4)]
    await until(lambda: engine.stats()["prefill_tokens"] > 50)
    tasks[0].cancel()
    answers = await asyncio.gather(*tasks[1:])
    for answer in answers:
        assert_sampled_by(model, prompt, answer)
    assert engine.stats()["prefill_tokens"] < 2 * 400


async def test_what_a_cancelled_prompt_computed_is_not_lost(tokenizer, model):
    engine = endless(model, tokenizer, max_batch_tokens=16)
    prompt = prompts(1, length=400)[0]
    task = asyncio.create_task(engine.generate(prompt, max_new_tokens=2))
    await until(lambda: engine.stats()["prefill_tokens"] > 50)
    task.cancel()
    await until(lambda: idle(engine))
    computed = engine.stats()["prefill_tokens"]
    answer = await engine.generate(prompt, max_new_tokens=2)
    assert engine.stats()["prefill_tokens"] == max(400, computed + 1)
    found = answer
    assert_sampled_by(model, prompt, found)


@few_or_many(3, 15)
def test_conversations_compute_every_token_once(tokenizer, model, examples):
    turn = st.tuples(st.integers(1, 20), st.integers(1, 20))
    turns, start = st.lists(turn, min_size=1, max_size=6), st.integers(1, 20)
    check(once_each, examples, tokenizer=tokenizer, model=model, turns=turns, start=start)


def once_each(tokenizer, model, turns, start):
    """However long turns are, and with others going on at the same time."""
    engine = endless(model, tokenizer)
    # They begin otherwise from the first token on: nothing can be found of another.
    conversations = [[4 + i, *prompt[1:]] for i, prompt in enumerate(prompts(5, length=start))]
    new, asked, generated = 5 * start, 0, 0
    for index, (length, said) in enumerate(turns):
        answers = generate_all(engine, conversations, max_new_tokens=length)
        assert_all_sampled_by(model, conversations, answers)
        stats = engine.stats()
        assert stats["prefill_tokens"] == stats["new_tokens"] == new
        asked, generated = asked + sum(map(len, conversations)), generated + 5 * length
        assert (stats["shared_tokens"], stats["generated_tokens"]) == (asked - new, generated)
        conversations = [
            [*prompt, *answer.token_ids, *[4 + index] * said]
            for prompt, answer in zip(conversations, answers, strict=True)
        ]
        new += 5 * (1 + said)  # the last token of an answer never went through the model
    assert idle(engine)
    engine.close()


def test_all_that_go_on_with_one_answer_find_it(tokenizer, model):
    engine = endless(model, tokenizer)
    prompt = prompts(1, length=20)[0]
    (answer,) = generate_all(engine, [prompt], max_new_tokens=7)
    branches = [[*prompt, *answer.token_ids, *[said] * 9] for said in (5, 6, 7)]
    before = engine.stats()
    sampled(engine, model, branches, max_new_tokens=20)
    found = engine.stats()["shared_tokens"] - before["shared_tokens"]
    assert found == 3 * (20 + 7 - 1)
    asyncio.run(until(lambda: idle(engine)))


def test_what_is_kept_leaves_with_an_update(tokenizer, model):
    engine = endless(model, tokenizer)
    prompt = prompts(1, length=5)[0]
    (answer,) = generate_all(engine, [prompt], max_new_tokens=2)
    assert engine.stats()["kept_tokens"] == 5 + 2 - 1
    engine.update_weights()
    assert engine.stats()["kept_tokens"] == 0
    before = engine.stats()
    generate_all(engine, [[*prompt, *answer.token_ids, 4]], max_new_tokens=1)
    stats = engine.stats()
    assert stats["shared_tokens"] == 0
    # The answer's last token and the next; the rest was computed under the weights before.
    assert stats["new_tokens"] - before["new_tokens"] == 2
    assert stats["prefill_tokens"] - before["prefill_tokens"] == 8


def test_what_is_kept_leaves_if_asked_and_the_version_stays(tokenizer, model):
    engine = endless(model, tokenizer)
    prompt = prompts(1, length=50)[0]
    answers = [generate_all(engine, [prompt], max_new_tokens=3, seed=1)]
    assert engine.stats()["kept_tokens"] > 0
    engine.forget_cache()
    assert engine.stats()["kept_tokens"] == 0
    assert engine.version == 0
    answers.append(generate_all(engine, [prompt], max_new_tokens=3, seed=1))
    assert answers[0] == answers[1]
    assert engine.stats()["prefill_tokens"] == 100
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.forget_cache()


@few_or_many(5, 15)
def test_trees_of_prompts_are_computed_as_trees(tokenizer, model, examples):
    paths = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12)
    check(as_trees, examples, tokenizer=tokenizer, model=model, paths=paths)


def as_trees(tokenizer, model, paths):
    """Prompts that begin alike, all at once: each node of their tree is computed once."""
    parts = [[4 + i] * BRANCH for i in range(3)]
    requests = [[token for i in path for token in parts[i]] + [20] for path in paths]
    engine = TransformersEngine(model, tokenizer, cache_tokens=4096)
    answers = generate_all(engine, requests, max_new_tokens=2)
    nodes = {tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    least = len(nodes) * BRANCH + len({tuple(path) for path in paths})
    # Of a prompt that came again, its last token may be computed again.
    assert least <= engine.stats()["prefill_tokens"] <= len(nodes) * BRANCH + len(requests)
    engine.close()
    assert_all_sampled_by(model, requests, answers)


def test_without_prefix_sharing_every_prompt_is_computed(tokenizer, model):
    engine = endless(model, tokenizer, prefix_sharing=False)
    generate_all(engine, prompts(1, length=40) * 3, max_new_tokens=2)
    stats = engine.stats()
    assert stats["prefill_tokens"] == 3 * 40
    assert stats["shared_tokens"] == stats["kept_tokens"] == 0


def test_an_idle_engine_counts_nothing(engine):
    assert set(engine.stats().values()) == {0}


def test_what_was_used_longest_ago_leaves_first(tokenizer, model):
    engine = endless(model, tokenizer, cache_tokens=512)
    old, hot, *others = prompts(9, length=81)
    generate_all(engine, [old], max_new_tokens=1)
    for prompt in others:
        for request in (hot, prompt):
            generate_all(engine, [request], max_new_tokens=1)
    stats = engine.stats()
    assert stats["shared_tokens"] == 6 * 80  # the hot prompt stayed through it all
    generate_all(engine, [others[-1]], max_new_tokens=1)
    assert engine.stats()["shared_tokens"] == 7 * 80
    generate_all(engine, [old], max_new_tokens=1)
    assert engine.stats()["shared_tokens"] == 7 * 80


@few_or_many(15, 30)
@pytest.mark.parametrize("sharing", [True, False])
def test_no_pass_and_no_cache_is_larger_than_it_may_be(
    tokenizer, model, monkeypatch, sharing, examples
):
    engine = endless(
        model, tokenizer, cache_tokens=300, max_batch_tokens=24, prefix_sharing=sharing
    )
    plain = engine._model.forward

    def forward(input_ids, **kwargs):
        assert input_ids.numel() <= 24
        stats = engine.stats()
        assert stats["running"] <= 24
        assert stats["cache_tokens"] + stats["kept_tokens"] <= 300
        return plain(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(engine._model, "forward", forward)
    requests = [p[: 1 + 3 * (i % 20)] for i, p in enumerate(prompts(examples, length=60))] * 2
    sampled(engine, model, requests, max_new_tokens=30)


async def test_of_a_full_cache_who_came_last_leaves_first(tokenizer, model):
    engine = endless(model, tokenizer, cache_tokens=128, max_new_tokens=80)
    order = []

    async def ask(number: int, prompt: list[int]) -> None:
        await engine.generate(prompt)
        order.append(number)

    with held(engine):
        tasks = [
            asyncio.create_task(ask(number, prompt))
            for number, prompt in enumerate(prompts(3, length=20))
        ]
        await until(lambda: engine.stats()["waiting"] == 3)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert engine.stats()["prefill_tokens"] > 60  # Some left, and were computed again.


async def test_a_long_prompt_is_not_held_up_by_short_ones_that_keep_coming(tokenizer, model):
    engine = endless(model, tokenizer, max_batch_tokens=64)
    long, answered = asyncio.Event(), []

    async def ask():
        answer = await engine.generate(prompts(1, length=900)[0], max_new_tokens=2)
        long.set()
        return answer

    async def chatter(number: int) -> None:
        generator = random.Random(number)
        for _ in range(60):
            if long.is_set():
                return
            prompt = generator.choices(range(4, 26), k=generator.randrange(30, 60))
            await engine.generate(prompt, max_new_tokens=1)
            answered.append(number)

    task = asyncio.create_task(ask())
    await until(lambda: engine.stats()["running"] == 1)
    await asyncio.gather(*(chatter(number) for number in range(64)))
    found = await task
    assert_sampled_by(model, prompts(1, length=900)[0], found)
    # It needs 29 steps, of half the budget each; a step answers one short prompt or two.
    assert len(answered) < 1000


def test_memory_is_free_as_soon_as_it_is_dropped(tokenizer, model):
    engine = endless(model, tokenizer)
    generate_all(engine, prompts(4, length=40), max_new_tokens=4)
    (batch,) = engine._scheduler._batches
    memory = weakref.ref(batch.cache.layers[0].keys)
    del batch
    gc.collect()
    gc.disable()
    try:
        assert memory() is not None
        engine.update_weights()
        assert memory() is None
    finally:
        gc.enable()
