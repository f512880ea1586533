"""New weights between two steps: what is sampled before and after, and what is refused."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from tests.conftest import WORDS
from tests.tiers import few_or_many
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.testing import tiny_chat_model

from .helpers import (
    ask,
    assert_sampled_by,
    changed_copy,
    check,
    each_version_is_its_own,
    endless,
    plain_log_probs,
    prompts,
    scripts,
    started,
    until,
)


class Words:
    """Models whose weights differ, which the engine takes in turn, and prompts of words alone."""

    def __init__(self, tokenizer):
        torch.manual_seed(0)
        model = tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)[0]
        self.tokenizer, self.versions = tokenizer, [model, *(changed_copy(model) for _ in "abc")]

    def endless(self, **kwargs):
        return endless(self.versions[0], self.tokenizer, **kwargs)

    def message(self, shown):
        return prompts(4, length=30)[sum(shown) % 4]

    def given(self, shown):
        return {}

    def log_probs(self, model, prompt, shown, answer):
        return plain_log_probs(model, prompt, answer)


@pytest.fixture(scope="module")
def words(tokenizer):
    return Words(tokenizer)


@few_or_many(3, 12)
@pytest.mark.parametrize(
    "sizes", [{"cache_tokens": 4096}, {"cache_tokens": 512, "max_batch_tokens": 48}]
)
def test_every_log_prob_is_that_of_its_versions_weights_alone(sizes, words, examples):
    openings = st.lists(st.integers(0, 3), max_size=1)
    check(each_version_is_its_own, examples, script=scripts(openings, 60), family=words, **sizes)


async def test_a_kept_cache_goes_on_and_versions_stay_exact(tokenizer, model):
    engine = endless(model, tokenizer, share_weights=False)
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.lm_head.weight.zero_()  # every token is as likely: plain to see in log-probs
    requests = prompts(6, length=40)
    uniform = -torch.tensor(26.0).log()
    tasks = started(engine, requests, max_new_tokens=200)
    await until(lambda: engine.stats()["generated_tokens"] >= 120)
    await asyncio.to_thread(engine.update_weights, zeroed, keep_cache=True)
    assert not any(task.done() for task in tasks)
    answers = await asyncio.gather(*tasks)
    stats = engine.stats()
    assert stats["prefill_tokens"] == 6 * 40  # nothing was computed again
    for answer in answers:
        assert set(answer.versions) == {0, 1}
        log_probs, stamps = torch.tensor(answer.log_probs), torch.tensor(answer.versions)
        assert (((log_probs - uniform).abs() < 1e-5) == (stamps == 1)).all()
    # The prefixes are still there for the next prompts, unless they are dropped.
    await engine.generate(requests[0], max_new_tokens=1)
    assert engine.stats()["prefill_tokens"] == stats["prefill_tokens"] + 1
    engine.update_weights(zeroed)
    await engine.generate(requests[0], max_new_tokens=1)
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
    assert engine.version == 0


def test_an_update_that_fails_half_way_leaves_nothing_stale(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, share_weights=False, max_new_tokens=4)
    (prompt,) = prompts(1, length=30)
    ask(engine, prompt)
    weights = dict(changed_copy(model).state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].to("meta")
    with pytest.raises(NotImplementedError):
        engine.update_weights(weights)
    answer = ask(engine, prompt)
    assert set(answer.versions) == {1}
    assert_sampled_by(engine._model, prompt, answer)


def test_a_model_that_gives_no_numbers_fails_the_request(model, tokenizer):
    engine = TransformersEngine(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    engine.update_weights()
    with pytest.raises(RuntimeError, match="the model's logits must be finite"):
        ask(engine)
    with pytest.raises(ValueError, match="its logits are not numbers"):
        TransformersEngine(model, tokenizer)
