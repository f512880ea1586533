"""New weights between two steps: what is sampled before and after, and what is refused."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from tests.tiers import few_or_many
from torchrl_mt.engines import TransformersEngine

from .helpers import (
    assert_sampled_by,
    changed_copy,
    check,
    endless,
    idle,
    plain_log_probs,
    prompts,
    started,
    until,
)

actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 60)),
        st.tuples(st.just("update"), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(1, 8)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("converse"), st.integers(0, 20), st.integers(1, 30)),
    ),
    min_size=4,
    max_size=25,
)


@pytest.fixture(scope="module")
def versions(module_model):
    """Models whose weights differ; the engine takes them in turn."""
    torch.manual_seed(1)
    return [module_model, *(changed_copy(module_model) for _ in range(3))]


@pytest.fixture(scope="module")
def module_model(tokenizer):
    from tests.conftest import WORDS
    from torchrl_mt.testing import tiny_chat_model

    torch.manual_seed(0)
    return tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)[0]


@few_or_many(3, 12)
@pytest.mark.parametrize("sizes", [{}, {"cache_tokens": 512, "max_batch_tokens": 48}])
def test_every_log_prob_is_that_of_its_versions_weights_alone(sizes, versions, tokenizer, examples):
    given = {"sizes": sizes, "versions": versions, "tokenizer": tokenizer}
    check(each_version_is_its_own, examples, script=actions, **given)


def each_version_is_its_own(sizes, script, versions, tokenizer):
    """Whatever happens when, on the whole prefix: prompts shared, caches full, answers interrupted."""
    model = copy.deepcopy(versions[0])
    sizes = {"cache_tokens": 4096, **sizes}
    engine = endless(model, tokenizer, share_weights=False, **sizes)
    roots = prompts(4, length=30)
    asked: list[tuple[list[int], asyncio.Task]] = []

    def ask(prompt, length):
        task = asyncio.create_task(engine.generate(prompt, max_new_tokens=length))
        asked.append((prompt, task))

    async def run():
        for name, which, amount in script:
            if name == "ask":
                ask(roots[which], amount)
            elif name == "update":
                source = versions[(engine.version + 1) % len(versions)]
                await asyncio.to_thread(engine.update_weights, source)
            elif name == "wait":
                await asyncio.sleep(amount * 0.002)
            elif asked:
                prompt, task = asked[which % len(asked)]
                if name == "cancel":
                    task.cancel()
                elif task.done() and not task.cancelled() and len(prompt) < 200:
                    ask([*prompt, *task.result().token_ids, 5], amount)
        await asyncio.gather(*(task for _, task in asked), return_exceptions=True)
        await until(lambda: idle(engine))

    asyncio.run(run())
    engine.close()
    for prompt, task in asked:
        if task.cancelled():
            continue
        answer = task.result()
        stamps = torch.tensor(answer.versions)
        assert (stamps.diff() >= 0).all()
        assert stamps.max() <= engine.version
        under = torch.stack([plain_log_probs(m, prompt, answer) for m in versions])
        expected = under.gather(0, (stamps % len(versions))[None])[0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


def test_a_kept_cache_goes_on_and_versions_stay_exact(tokenizer, model):
    engine = endless(model, tokenizer, share_weights=False)
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.lm_head.weight.zero_()  # every token is as likely: plain to see in log-probs
    requests = prompts(6, length=40)
    uniform = -torch.tensor(26.0).log()

    async def run():
        tasks = started(engine, requests, max_new_tokens=200)
        await until(lambda: engine.stats()["generated_tokens"] >= 120)
        await asyncio.to_thread(engine.update_weights, zeroed, keep_cache=True)
        assert not any(task.done() for task in tasks)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    stats = engine.stats()
    assert stats["prefill_tokens"] == 6 * 40  # nothing was computed again
    for answer in answers:
        assert set(answer.versions) == {0, 1}
        log_probs, stamps = torch.tensor(answer.log_probs), torch.tensor(answer.versions)
        assert (((log_probs - uniform).abs() < 1e-5) == (stamps == 1)).all()
    # The prefixes are still there for the next prompts, unless they are dropped.
    asyncio.run(engine.generate(requests[0], max_new_tokens=1))
    assert engine.stats()["prefill_tokens"] == stats["prefill_tokens"] + 1
    engine.update_weights(zeroed)
    asyncio.run(engine.generate(requests[0], max_new_tokens=1))
    assert engine.stats()["prefill_tokens"] == stats["prefill_tokens"] + 1 + 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype_are_converted(tokenizer, model, dtype):
    engine = TransformersEngine(model, tokenizer, share_weights=False)
    changed = changed_copy(model).to(dtype)
    engine.update_weights(changed)
    given = dict(changed.named_parameters())
    for name, own in engine._model.named_parameters():
        assert own.dtype == torch.float32
        assert torch.equal(own, given[name].to(torch.float32))


def test_names_that_begin_otherwise_are_explained(engine, model):
    weights = model.state_dict()
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    with pytest.raises(ValueError, match=r"its names lack 'model\.' in front"):
        engine.update_weights(bare)
    with pytest.raises(ValueError, match=r"its names have 'module\.' in front, which must go"):
        engine.update_weights(nn.DataParallel(model).state_dict())
    with pytest.raises(TypeError, match=r"source must be a model, a state dict or .* got list"):
        engine.update_weights(list(weights.values()))
    assert engine.version == 0


def test_an_update_that_fails_half_way_leaves_nothing_stale(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, share_weights=False, max_new_tokens=4)
    (prompt,) = prompts(1, length=30)
    asyncio.run(engine.generate(prompt))
    weights = dict(changed_copy(model).state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].to("meta")
    with pytest.raises(NotImplementedError):
        engine.update_weights(weights)
    answer = asyncio.run(engine.generate(prompt))
    assert set(answer.versions) == {1}
    assert_sampled_by(engine._model, prompt, answer)


def test_a_model_that_gives_no_numbers_fails_the_request(model, tokenizer):
    engine = TransformersEngine(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    engine.update_weights()
    with pytest.raises(RuntimeError, match="the model's logits must be finite"):
        asyncio.run(engine.generate([5]))
    with pytest.raises(ValueError, match="its logits are not numbers"):
        TransformersEngine(model, tokenizer)
