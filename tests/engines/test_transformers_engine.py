from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from torchrl_mt.engines import Completion, Engine, TransformersEngine


@pytest.fixture
def engine(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, page_size=8, max_new_tokens=8)
    yield engine
    engine.close()


def prompts(count: int, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, 26, (count, length), generator=generator).tolist()


def generate_all(engine, requests, **kwargs):
    async def run():
        return await asyncio.gather(*(engine.generate(prompt, **kwargs) for prompt in requests))

    return asyncio.run(run())


def plain_log_probs(model, prompt, answer) -> torch.Tensor:
    """The slow and obvious reference: one plain forward pass over prompt and answer."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(ids).logits.log_softmax(-1)[0]
    model.train(was_training)
    positions = range(len(prompt) - 1, ids.shape[1] - 1)
    return torch.stack([logits[i, ids[0, i + 1]] for i in positions])


def test_is_an_engine(engine):
    assert isinstance(engine, Engine)


def test_log_probs_are_those_of_a_plain_forward_pass(engine, model):
    requests = prompts(40)
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        torch.testing.assert_close(
            torch.tensor(answer.log_probs),
            plain_log_probs(model, prompt, answer),
            atol=1e-5,
            rtol=0,
        )


def test_an_answer_stops_at_the_stop_token_or_at_its_limit(engine, tokenizer):
    answers = generate_all(engine, prompts(64), max_new_tokens=5)
    for answer in answers:
        stopped = answer.token_ids[-1] == tokenizer.eos_token_id
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert tokenizer.eos_token_id not in answer.token_ids[:-1]
        assert len(answer.token_ids) == 5 or stopped
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_the_models_own_mode_and_attention_are_left_alone(model, tokenizer):
    model.train()
    model.config.attention_dropout = 0.5
    before = model.config._attn_implementation
    engine = TransformersEngine(model, tokenizer)
    (answer,) = generate_all(engine, prompts(1))
    assert model.training
    assert model.config._attn_implementation == before
    engine.close()
    torch.testing.assert_close(  # dropout did not act while sampling
        torch.tensor(answer.log_probs),
        plain_log_probs(model, prompts(1)[0], answer),
        atol=1e-5,
        rtol=0,
    )


def test_shared_weights_are_the_models_own(engine, model):
    own = dict(engine._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert own[name] is parameter


def test_updated_weights_are_used_and_counted(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, share_weights=False, page_size=8)
    requests = prompts(4, length=40)
    assert {v for a in generate_all(engine, requests) for v in a.versions} == {0}
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert engine.update_weights(changed) == engine.version == 1
    # The same prompts again: a prefix cached under the old weights would show here.
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        assert set(answer.versions) == {1}
        torch.testing.assert_close(
            torch.tensor(answer.log_probs),
            plain_log_probs(changed, prompt, answer),
            atol=1e-5,
            rtol=0,
        )
    engine.close()


def test_weights_changed_in_place_take_effect_with_an_update(engine, model):
    requests = prompts(3, length=40)
    generate_all(engine, requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(model)
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        torch.testing.assert_close(
            torch.tensor(answer.log_probs),
            plain_log_probs(model, prompt, answer),
            atol=1e-5,
            rtol=0,
        )


def test_an_update_splits_answers_under_way(tokenizer, model):
    model.generation_config.eos_token_id = None
    engine = TransformersEngine(model, tokenizer, share_weights=False, page_size=8)
    engine._stop_ids = frozenset()  # long answers, so that the update falls inside them
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    requests = prompts(8, length=30)

    async def run():
        tasks = [asyncio.create_task(engine.generate(p, max_new_tokens=150)) for p in requests]
        while not engine._manager.batch_processor or engine._manager.current_batch < 20:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.update_weights, changed)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    engine.close()
    for prompt, answer in zip(requests, answers, strict=True):
        versions = torch.tensor(answer.versions)
        assert len(answer.token_ids) == 150
        assert set(answer.versions) == {0, 1}
        assert versions.diff().min() >= 0
        expected = torch.where(
            versions == 0,
            plain_log_probs(model, prompt, answer),
            plain_log_probs(changed, prompt, answer),
        )
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-5, rtol=0)


def test_refused_weights_change_nothing(engine, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    good = {name: value + 1 for name, value in before.items()}
    last = list(good)[-1]
    with pytest.raises(ValueError, match="1 missing"):
        engine.update_weights({name: good[name] for name in good if name != last})
    with pytest.raises(ValueError, match="must have shape"):
        engine.update_weights({**good, last: torch.zeros(3)})
    assert engine.version == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_temperature_scales_the_log_probs(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, temperature=0.5)
    (prompt,) = prompts(1)
    (answer,) = generate_all(engine, [prompt])
    engine.close()
    logits = model.eval()(torch.tensor([[*prompt, *answer.token_ids]])).logits[0] / 0.5
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0].detach()
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-5, rtol=0)


def test_a_cancelled_request_hurts_no_other(engine):
    async def run():
        tasks = [asyncio.create_task(engine.generate(prompt)) for prompt in prompts(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    assert isinstance(results[3], asyncio.CancelledError)
    assert all(isinstance(r, Completion) for i, r in enumerate(results) if i != 3)
    assert not engine._in_flight


def test_two_event_loops_may_share_an_engine(engine):
    answers: dict[int, list[Completion]] = {}

    def work(index: int) -> None:
        answers[index] = generate_all(engine, prompts(20))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {len(answers[0]), len(answers[1])} == {20}


@pytest.mark.parametrize(
    ("prompt", "kwargs", "error", "message"),
    [
        ([], {}, ValueError, "at least one token"),
        ([5], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ([5] * 70_000, {}, ValueError, "raise cache_tokens"),
        ([5, 26], {}, ValueError, "token ids in 0..25, got 26"),
        ([-1, 5], {}, ValueError, "token ids in 0..25, got -1"),
        ([5], {"top_k": 3}, TypeError, "top_k"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, kwargs, error, message):
    with pytest.raises(error, match=message):
        generate_all(engine, [prompt], **kwargs)


def test_a_dead_generation_thread_is_reported(engine, monkeypatch):
    def die(*args, **kwargs):
        raise ArithmeticError("out of everything")

    monkeypatch.setattr(engine._model, "forward", die)
    with pytest.raises(RuntimeError, match="generation failed: out of everything"):
        generate_all(engine, prompts(5))
    engine._manager._generation_thread.join()
    with pytest.raises(RuntimeError, match="generation thread died") as caught:
        generate_all(engine, prompts(1))
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_no_request_is_left_without_an_answer_when_the_thread_ends(engine, monkeypatch):
    """Requests keep coming while the thread dies: each must fail, none may wait for ever."""
    generate_all(engine, prompts(1))
    monkeypatch.setattr(engine._model, "forward", lambda **kwargs: 1 / 0)

    async def run():
        tasks = []
        for prompt in prompts(400):
            tasks.append(asyncio.create_task(engine.generate(prompt)))
            await asyncio.sleep(0.0002)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    assert all(isinstance(result, RuntimeError) for result in asyncio.run(run()))
    assert not engine._in_flight


def test_bad_engines_are_refused(model, tokenizer):
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        TransformersEngine(torch.nn.Linear(1, 1), tokenizer)
    with pytest.raises(ValueError, match="page_size must be positive, got 0"):
        TransformersEngine(model, tokenizer, page_size=0)
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="end-of-turn token"):
        TransformersEngine(model, endless)


def test_a_closed_engine_leaves_no_thread_and_says_so(model, tokenizer):
    engine = TransformersEngine(model, tokenizer)
    generate_all(engine, prompts(2))
    engine.close()
    engine.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_mt")]
    with pytest.raises(RuntimeError, match="closed"):
        generate_all(engine, prompts(1))


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
    done = subprocess.run([sys.executable, str(script)], timeout=120, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()


def test_a_completion_has_one_entry_per_token():
    with pytest.raises(ValueError, match="2, 1 and 2"):
        Completion([1, 2], [0.0], [0, 0], "stop")
