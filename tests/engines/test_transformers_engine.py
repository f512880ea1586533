from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from torchrl_mt.engines import Completion, TransformersEngine
from torchrl_mt.testing import tiny_chat_model

from .helpers import changed_copy, endless, generate_all, idle, prompts, sampled, started, until


def test_shared_weights_are_the_models_own(engine, model):
    own = dict(engine._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert own[name] is parameter


async def test_an_answer_that_waits_to_be_read_keeps_its_version(tokenizer, model):
    engine = TransformersEngine(model, tokenizer, share_weights=False)
    changed = changed_copy(model)
    tasks = started(engine, prompts(5), max_new_tokens=4)
    await asyncio.sleep(0)
    while not idle(engine):
        time.sleep(0.001)  # without the loop: answers arrive and are not read
    engine.update_weights(changed)
    results = await asyncio.gather(*tasks)
    assert {v for answer in results for v in answer.versions} == {0}


def test_weights_are_taken_in_every_form_that_has_them(tokenizer):
    model = tiny_chat_model("a b", hidden_size=32)[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied
    changed = changed_copy(model)
    named, state = dict(changed.named_parameters()), changed.state_dict()
    for source in (changed, state, named, TensorDict.from_module(changed), None):
        engine = TransformersEngine(model, tokenizer, share_weights=False)
        if source is None:  # the weights of the model that the engine was made of
            model.load_state_dict(state)
            assert not torch.equal(engine._model.lm_head.weight, model.lm_head.weight)
        engine.update_weights(source)
        assert all(map(torch.equal, engine._model.parameters(), changed.parameters()))


def test_answers_to_a_closed_loop_are_dropped(tokenizer, model):
    engine = endless(model, tokenizer)

    async def leave():
        task = asyncio.create_task(engine.generate([5], max_new_tokens=100))
        await until(lambda: engine.stats()["generated_tokens"] >= 5)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(leave())
    loop.close()
    assert not task.done()
    asyncio.run(until(lambda: idle(engine)))
    sampled(engine, model, prompts(1))


def test_an_update_holds_up_only_what_needs_the_engine(engine, monkeypatch):
    generate_all(engine, prompts(1))
    begun, going_on = threading.Event(), threading.Event()

    def forget_slowly():
        begun.set()
        going_on.wait()

    monkeypatch.setattr(engine._scheduler, "forget_cache", forget_slowly)

    async def run():
        update = asyncio.create_task(asyncio.to_thread(engine.update_weights))
        await until(begun.is_set)
        answer = asyncio.create_task(engine.generate([5]))
        await until(lambda: engine.stats()["waiting"])  # the loop goes on; the update does not
        assert not update.done()
        going_on.set()
        await update
        return await answer

    assert set(asyncio.run(run()).versions) == {1}


def test_a_step_that_fails_is_reported_and_the_next_is_taken(engine, model, monkeypatch):
    def die(*args, **kwargs):
        raise ArithmeticError("out of everything")

    monkeypatch.setattr(engine._model, "forward", die)
    message = "generation failed: ArithmeticError: out of everything"
    with pytest.raises(RuntimeError, match=message) as caught:
        generate_all(engine, prompts(5))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    asyncio.run(until(lambda: idle(engine)))
    monkeypatch.undo()
    sampled(engine, model, prompts(5))


def test_no_request_is_left_without_an_answer_when_steps_fail(engine, monkeypatch):
    """Requests keep coming while steps fail: each must fail, none may wait for ever."""
    generate_all(engine, prompts(1))
    monkeypatch.setattr(engine._model, "forward", lambda **kwargs: 1 / 0)

    async def run():
        tasks = []
        for prompt in prompts(100):
            tasks.append(asyncio.create_task(engine.generate(prompt)))
            await asyncio.sleep(0.0002)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(result, RuntimeError) for result in asyncio.run(run()))
    asyncio.run(until(lambda: idle(engine)))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"typical_p": 0.1}, TypeError, r"takes no \['typical_p'\]: .* one may set .*min_p"),
        ({"top_k": 0.5}, TypeError, "top_k must be an integer, got 0.5"),
        ({"top_p": 0.0}, ValueError, r"top_p must be a number in \(0, 1\], got 0.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a number in .*got nan"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"stop_token_ids": ["<end>"]}, TypeError, "stop_token_ids must be a flat sequence"),
    ],
)
def test_bad_requests_are_refused(engine, kwargs, error, message):
    with pytest.raises(error, match=message):
        generate_all(engine, [[5]], **kwargs)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "PreTrainedModel, got Linear"),
        ({"cache_tokens": 0}, ValueError, "cache_tokens must be positive, got 0"),
        ({"tokenizer": SimpleNamespace(eos_token_id=None)}, ValueError, "end-of-turn token"),
        ({"tokenizer": None}, TypeError, r"tokenizer must be .* got None"),
        ({"top_p": 2.0}, ValueError, r"top_p must be .* got 2.0"),
        ({"top_k": -2}, ValueError, "top_k must be .* got -2"),
        ({"temperature": math.inf}, ValueError, "temperature must be .* got inf"),
    ],
)
def test_bad_engines_are_refused(model, tokenizer, wrong, error, message):
    model.generation_config.eos_token_id = None
    with pytest.raises(error, match=message):
        TransformersEngine(**{"model": model, "tokenizer": tokenizer, **wrong})


@pytest.mark.slow
def test_a_script_that_dies_without_closing_ends(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio
            from transformers import Qwen2Config, Qwen2ForCausalLM
            from torchrl_mt.engines import TransformersEngine

            class Tokenizer:
                eos_token_id, pad_token_id = 1, 0

            model = Qwen2ForCausalLM(Qwen2Config(
                vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                num_attention_heads=1, num_key_value_heads=1))
            engine = TransformersEngine(model, Tokenizer())
            asyncio.run(engine.generate([2, 3], max_new_tokens=2))
            raise SystemExit(7)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True)
    assert done.returncode == 7, done.stderr.decode()


def test_a_completion_has_one_entry_per_token():
    with pytest.raises(ValueError, match="2, 1 and 2"):
        Completion([1, 2], [0.0], [0, 0], "stop")
