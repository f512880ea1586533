from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.modules.llm import LLMWrapperBase, TransformersWrapper, vLLMWrapper

from tests.waiting import PATIENCE
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.engines import Completion, PolicyEngine
from torchrl_mt.engines.policy import log_probs
from torchrl_mt.engines.policy.log_probs import LogProbError, agrees, reports_wrong
from torchrl_mt.engines.policy.micro_batching import MicroBatcher
from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.envs import GuessNumber
from torchrl_mt.testing import tiny_chat_model


def wrapper(model, tokenizer, input_mode="tokens", **generate_kwargs):
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode=input_mode,
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 8, **generate_kwargs},
    )


def prompts(count: int, low: int = 1, high: int = 12) -> list[list[int]]:
    """Prompts of different lengths, padding tokens among them."""
    rng = random.Random(0)
    return [
        [rng.choice([0, *range(4, 26)]) for _ in range(rng.randint(low, high))]
        for _ in range(count)
    ]


def generate_all(engine, requests, limits=None, **kwargs):
    async def run():
        asked = [
            engine.generate(prompt, max_new_tokens=limits[i] if limits else None, **kwargs)
            for i, prompt in enumerate(requests)
        ]
        return await asyncio.wait_for(asyncio.gather(*asked), PATIENCE)

    return asyncio.run(run())


def law_log_probs(
    model, prompt, token_ids, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> torch.Tensor:
    """The slow and obvious reference: token by token, the distribution that it was sampled from."""
    logits = (plain_log_probs(model, prompt, token_ids, rows=True) / temperature).double()
    found = []
    for row, token in zip(logits, token_ids, strict=True):
        order = row.argsort(descending=True).tolist()
        order = order[: top_k or len(order)]
        kept, total, left = [], 0.0, row[order].softmax(-1).tolist()
        for name, share in zip(order, left, strict=True):
            if total < top_p and (row[name] - row.max()).exp() >= min_p:
                kept.append(name)
                total += share
        assert token in kept
        found.append(row[token] - row[kept].logsumexp(-1))
    return torch.stack(found).float()


def plain_log_probs(model, prompt, token_ids, temperature=1.0, rows=False) -> torch.Tensor:
    """The slow and obvious reference: one plain forward pass over prompt and answer."""
    ids = torch.tensor([[*prompt, *token_ids]])
    was_training = model.training
    with torch.no_grad():
        scores = (model.eval()(ids).logits[0] / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    model.train(was_training)
    return scores if rows else scores.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


def assert_sampled_by(model, prompt, answer, temperature=1.0) -> None:
    expected = plain_log_probs(model, prompt, list(answer.token_ids), temperature)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


class Fake(LLMWrapperBase):
    """A policy of few lines that samples with a model, one prompt at a time."""

    input_mode = "tokens"

    def __init__(self, model, tokenizer, report=None, pad_output=True):
        super().__init__()
        self.model, self.tokenizer, self.report = model, tokenizer, report
        self.in_keys, self.out_keys = [("tokens", "prompt")], ["tokens", "log_probs"]
        self.pad_output = pad_output
        self.sizes, self.calls = [], []
        self.hold = None

    def forward(self, td):
        self.sizes.append(td.batch_size[0])
        if self.hold is not None:
            assert self.hold.wait(PATIENCE)
        assert not self.training
        tokens, mask = td["tokens", "prompt"], td["masks", "all_attention_mask"]
        rows = [ids[keep].tolist() for ids, keep in zip(tokens, mask, strict=True)]
        self.calls.append(rows)
        answers = [self.sample(row) for row in rows]
        scores = [
            self.report(plain_log_probs(self.model, row, answer))
            for row, answer in zip(rows, answers, strict=True)
        ]
        width = max(map(len, answers))
        response = torch.zeros(len(rows), width, dtype=torch.long)
        log_probs = torch.zeros(len(rows), width)
        for i, (answer, score) in enumerate(zip(answers, scores, strict=True)):
            response[i, : len(answer)] = torch.tensor(answer)
            log_probs[i, : len(answer)] = score
        out = {"tokens": {"response": response}, "log_probs": {"response": log_probs}}
        return td.update(TensorDict(out, batch_size=td.batch_size))

    def sample(self, prompt):
        answer = []
        for _ in range(6):
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
            answer.append(int(torch.distributions.Categorical(logits=logits).sample()))
            if answer[-1] == self.tokenizer.eos_token_id:
                break
        return answer


def fake_engine(model, tokenizer, report=lambda plain: plain, **kwargs):
    policy = Fake(model, tokenizer, report)
    return PolicyEngine(policy, **kwargs), policy


# Log-probabilities


def test_the_wrapper_is_wrong_about_first_tokens_and_about_padding(model, tokenizer):
    """The reason for ``reports_wrong``; once this fails, less of it is needed."""
    policy = wrapper(model, tokenizer, do_sample=True, top_k=26)
    prompt = torch.tensor([[5, 6, 7]] * 64)
    out = policy(TensorDict({"tokens": {"prompt": prompt}}, batch_size=[64]))
    sizes = []
    for row in out.unbind(0):
        answer = row["tokens", "response"]
        sizes.append(len(answer))
        if len(answer):
            assert 0 not in answer  # id 0, the padding token, was sampled and left out
            if len(answer) == 8:
                assert plain_log_probs(model, [5, 6, 7], answer.tolist())[0] < -0.5
                assert row["log_probs", "response"][0] == 0
    assert min(sizes) < 8


@pytest.mark.parametrize("input_mode", ["tokens", "text", "history"])
def test_a_wrapper_may_have_any_input_mode(model, tokenizer, input_mode):
    engine = PolicyEngine(wrapper(model, tokenizer, input_mode))
    requests = prompts(20)
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        assert_sampled_by(model, prompt, answer)
    engine.close()


LAWS = [
    pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
    pytest.param({"top_k": 3}, marks=pytest.mark.slow),
    {"top_p": 0.6},
    {"temperature": 0.5, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.3},
]


@pytest.mark.parametrize("per_call", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_log_probs_and_record_are_those_of_what_was_sampled_from(
    model, tokenizer, law, per_call, caplog
):
    if "min_p" in law and not per_call:
        pytest.skip("TorchRL's wrapper drops min_p from its generate_kwargs")
    engine = PolicyEngine(wrapper(model, tokenizer, **({} if per_call else law)))
    requests = prompts(30)
    for _ in range(2):
        answers = generate_all(engine, requests, **(law if per_call else {}))
        for prompt, answer in zip(requests, answers, strict=True):
            expected = law_log_probs(model, prompt, answer.token_ids, **law)
            torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)
            assert answer.sampling == law
    engine.close()
    said = [record.getMessage() for record in caplog.records if "truncated" in record.getMessage()]
    assert len(said) == (law.keys() != {"temperature"})


def test_requests_of_different_laws_are_answered_by_their_own(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer, temperature=0.9))
    laws = [{}, {"top_k": 2}, {"temperature": 0, "top_p": 0.5}, {"temperature": 1.0}, {"top_k": 99}]
    requests = prompts(50)

    async def run():
        asked = [engine.generate(prompt, **laws[i % 5]) for i, prompt in enumerate(requests)]
        return await asyncio.wait_for(asyncio.gather(*asked), PATIENCE)

    answers = asyncio.run(run())
    engine.close()
    for i, (prompt, answer) in enumerate(zip(requests, answers, strict=True)):
        law = {"temperature": 0.9, **laws[i % 5]}
        if i % 5 == 2:
            assert answer.sampling == {"temperature": 0}
            assert set(answer.log_probs) == {0.0}
            logits = plain_log_probs(model, prompt, answer.token_ids, rows=True)
            assert logits.argmax(-1).tolist() == answer.token_ids
            continue
        plain = {"temperature": 1.0, "top_k": 99}  # there are 26 tokens
        assert answer.sampling == {k: v for k, v in law.items() if plain.get(k) != v}
        expected = law_log_probs(model, prompt, answer.token_ids, **law)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


def test_different_laws_do_not_break_batches_up(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer))
    sizes, sampler = [], engine._answerer._sampler
    engine._answerer._sampler = lambda *batch: sizes.append(len(batch[0])) or sampler(*batch)

    async def run():
        asked = [engine.generate([5], temperature=0.5 + i % 2) for i in range(40)]
        await asyncio.wait_for(asyncio.gather(*asked), PATIENCE)

    asyncio.run(run())
    engine.close()
    assert sum(sizes) == 40
    assert len(sizes) <= 4


class Lawful(Fake):
    """Samples by its ``generate_kwargs`` and reports log-probabilities of that, or of the model."""

    def __init__(self, model, tokenizer, law, raw=False):
        super().__init__(model, tokenizer)
        self.generate_kwargs, self.reported = law, []
        self.raw = raw

    def forward(self, td):
        rows, found = [ids.tolist() for ids in td["tokens", "prompt"]], []
        width = len(td["masks", "all_attention_mask"][0])
        for row, keep in zip(rows, td["masks", "all_attention_mask"], strict=True):
            prompt, answer = row[width - int(keep.sum()) :], []
            for _ in range(4):
                logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
                logits = logits / self.generate_kwargs.get("temperature", 1)
                kept = logits.topk(self.generate_kwargs.get("top_k", 26))
                draw = torch.distributions.Categorical(logits=kept.values).sample()
                answer.append(int(kept.indices[draw]))
                if answer[-1] == self.tokenizer.eos_token_id:
                    break
            law = {} if self.raw else self.generate_kwargs
            scores = law_log_probs(self.model, prompt, answer, **law)
            found.append((answer, scores))
            self.reported.append(scores.tolist())
        response = torch.full((len(rows), 4), self.tokenizer.eos_token_id)
        log_probs = torch.zeros(len(rows), 4)
        for i, (answer, scores) in enumerate(found):
            response[i, : len(answer)] = torch.tensor(answer)
            log_probs[i, : len(answer)] = scores
        out = {"tokens": {"response": response}, "log_probs": {"response": log_probs}}
        return td.update(TensorDict(out, batch_size=td.batch_size))


@pytest.mark.parametrize("law", [{"temperature": 0.3}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("raw", [False, True])
def test_right_numbers_of_a_law_are_handed_on_and_raw_ones_are_refused(model, tokenizer, law, raw):
    if "temperature" in law:
        with torch.no_grad():  # neither uniform nor certain: the temperature tells
            model.lm_head.weight.div_(model.eval()(torch.tensor([[5, 6, 7, 8]])).logits.std())
    policy = Lawful(model, tokenizer, law, raw)
    engine = PolicyEngine(policy)
    if raw:
        with pytest.raises(RuntimeError, match="not its model's"):
            generate_all(engine, prompts(10))
        engine.close()
        return
    generate_all(engine, prompts(10))
    policy.reported.clear()
    answers = generate_all(engine, prompts(10))
    engine.close()
    assert {answer.sampling[name] for answer in answers for name in law} == set(law.values())
    for prompt, answer in zip(prompts(10), answers, strict=True):
        expected = law_log_probs(model, prompt, answer.token_ids, **law)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-3, rtol=0)
    assert sorted(answer.log_probs for answer in answers) == sorted(policy.reported)


def test_a_temperature_is_the_policys_own(model, tokenizer):
    policy = Lawful(model, tokenizer, {"temperature": 0.3})
    with pytest.raises(ValueError, match=r"the policy's own, which is 0.3, got 0.7"):
        PolicyEngine(policy, temperature=0.7)


def test_what_cannot_be_checked_is_recorded_all_the_same(model, tokenizer, caplog):
    policy = wrapper(model, tokenizer, repetition_penalty=1.5, top_k=2)
    engine = PolicyEngine(policy, check=False)
    answers = generate_all(engine, prompts(5))
    engine.close()
    assert [a.sampling for a in answers] == [{"top_k": 2, "repetition_penalty": 1.5}] * 5
    assert sum("truncated" in record.getMessage() for record in caplog.records) == 1


def test_a_collector_records_the_law(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer, temperature=0.7))
    collector = MultiTurnCollector(
        GuessNumber(16, turns=2), engine, episodes_per_batch=2, sampling={"top_k": 3}
    )
    with collector:
        batch = next(iter(collector))
    engine.close()
    assert set(batch["sampling", "top_k"].tolist()) == {3}
    torch.testing.assert_close(batch["sampling", "temperature"], torch.full((len(batch),), 0.7))


def test_sampling_is_from_the_models_own_distribution():
    """The host's defaults are greedy, or the best 50, or what the model's generation config says."""
    model, tokenizer = tiny_chat_model(map(str, range(80)), hidden_size=16, intermediate_size=16)
    model.generation_config.top_k = 2
    model.generation_config.repetition_penalty = 3.0
    engine = PolicyEngine(wrapper(model, tokenizer), max_batch_size=500)
    prompt = list(range(10, 30))
    answers = generate_all(engine, [prompt] * 2000, [1] * 2000)
    engine.close()
    counts = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=84) / 2000
    expected = model.eval()(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert (counts - expected).abs().sum() < 0.25
    assert model.generation_config.top_k == 2


def test_numbers_that_are_right_are_handed_on(model, tokenizer, monkeypatch):
    engine, _ = fake_engine(model, tokenizer)
    requests = prompts(5)
    generate_all(engine, requests)  # compared here
    monkeypatch.setattr(engine._model, "forward", lambda **kwargs: pytest.fail("not needed"))
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        assert_sampled_by(model, prompt, answer)
    engine.close()


def first_is(value):
    return lambda plain: torch.cat([torch.tensor([value]), plain[1:]])


WRONG = {
    "first is 0": first_is(0.0),
    "first is NaN": first_is(torch.nan),
    "all are 0": torch.zeros_like,
    "off by one": lambda plain: plain - 1,
    "twice": lambda plain: plain * 2,
}


@pytest.mark.parametrize("report", WRONG.values(), ids=WRONG)
def test_numbers_that_a_plain_forward_pass_contradicts_are_refused(model, tokenizer, report):
    engine, policy = fake_engine(model, tokenizer, report)
    with pytest.raises(RuntimeError, match=r"not its model's: reported \[.*plain forward.*\[-"):
        generate_all(engine, prompts(10))
    policy.report = lambda plain: plain.bfloat16().float()  # rounding passes
    (answer,) = generate_all(engine, [[5, 6]])  # the engine goes on
    assert torch.tensor(answer.log_probs).bfloat16().float().tolist() == answer.log_probs
    engine.close()


def test_a_zero_that_may_be_right_is_compared_again(model, tokenizer, monkeypatch):
    """Where a model is sure of its first token, a 0.0 that stands for "none" looks right."""
    engine, _ = fake_engine(model, tokenizer, first_is(0.0))
    plain = log_probs.plain_log_probs

    def sure(*args, **kwargs):
        return [[-1e-9, *row[1:]] for row in plain(*args, **kwargs)]

    with monkeypatch.context() as patch:
        patch.setattr(log_probs, "plain_log_probs", sure)
        generate_all(engine, prompts(5))
    with pytest.raises(RuntimeError, match="not its model's"):
        generate_all(engine, prompts(5))
    engine.close()


def test_vllm_is_not_asked_for_log_probs_of_what_it_truncates(model, tokenizer):
    """Unless it is started otherwise, it reports those of the model's own distribution."""
    vllm = vLLMWrapper.__new__(vLLMWrapper)
    assert reports_wrong(vllm, Sampling(top_k=2))
    assert reports_wrong(vllm, Sampling(temperature=0.5))
    assert not reports_wrong(vllm, Sampling())
    assert not reports_wrong(lambda td: td, Sampling(top_k=2))


def test_without_a_model_to_check_with_nothing_is_handed_on(model, tokenizer):
    policy = Fake(model, tokenizer, lambda plain: plain)
    blind = PolicyEngine(lambda td: policy.eval()(td), tokenizer=tokenizer)
    with pytest.raises(RuntimeError, match=r"reports \[-\d.*no model to check them with") as caught:
        generate_all(blind, [[5, 6]])
    assert isinstance(caught.value.__cause__, LogProbError)
    blind.close()
    for kwargs in ({"check": False}, {"model": model}):
        engine = PolicyEngine(lambda td: policy.eval()(td), tokenizer=tokenizer, **kwargs)
        (answer,) = generate_all(engine, [[5, 6]])
        assert_sampled_by(model, [5, 6], answer)
        engine.close()


def test_what_is_not_checked_is_handed_on_as_it_is(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer), check=False)
    assert {answer.log_probs[0] for answer in generate_all(engine, prompts(5))} == {0.0}
    engine.close()


def test_weights_that_did_not_reach_the_policy_are_noticed(model, tokenizer):
    other = copy.deepcopy(model)
    engine = PolicyEngine(Fake(other, tokenizer, lambda plain: plain), model=model)
    generate_all(engine, prompts(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    engine.update_weights()
    with pytest.raises(RuntimeError, match="not its model's"):
        generate_all(engine, prompts(5))
    engine.close()


def test_agreement_is_about_the_mean_and_about_every_number():
    plain = -torch.rand(1000).double() - 1
    noise = torch.randn(1000)
    assert agrees(plain + 0.03 * noise, plain, 0.05)
    assert not agrees(plain + 0.1 * noise, plain, 0.05)
    for position in (0, 500, 999):
        one_off = plain.clone()
        one_off[position] -= 0.3
        assert not agrees(one_off, plain, 0.05)
    assert agrees(torch.zeros(1), torch.tensor([-1e-8]), 0.05)
    assert not agrees(torch.zeros(1), torch.tensor([-0.01]), 0.05)


# Answers


@pytest.mark.parametrize("pad_is_stop", [False, True])
def test_no_sampled_token_is_lost(model, tokenizer, pad_is_stop):
    """Neither a padding token within an answer nor a stop token that is also the padding."""
    tokenizer = copy.deepcopy(tokenizer)
    if pad_is_stop:
        tokenizer.pad_token = tokenizer.eos_token
    engine = PolicyEngine(wrapper(model, tokenizer), max_new_tokens=20)
    answers = generate_all(engine, prompts(150))
    engine.close()
    for answer in answers:
        stopped = answer.token_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in answer.token_ids[:-1]
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(answer.token_ids) == 20
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert any(0 in answer.token_ids for answer in answers)


def test_requests_share_a_batch_only_where_the_models_positions_allow(model, tokenizer):
    """A long prompt with a small limit and a short prompt with a large one do not fit together."""
    engine, policy = fake_engine(model, tokenizer)
    policy.hold = threading.Event()
    requests = [[5], [5] * 1020, [6] * 1021, [7], [8]]
    limits = [4, 4, 3, 1000, 1000]

    async def run():
        tasks = []
        for prompt, limit in zip(requests, limits, strict=True):
            tasks.append(asyncio.create_task(engine.generate(prompt, max_new_tokens=limit)))
            await asyncio.sleep(0)
            while not policy.sizes:
                await asyncio.sleep(0.001)
        policy.hold.set()
        return await asyncio.gather(*tasks)

    asyncio.run(run())
    engine.close()
    batches = [set(map(len, rows)) for rows in policy.calls]
    assert not any({1020, 1} <= lengths or {1021, 1} <= lengths for lengths in batches)
    assert sum(policy.sizes) == 5


def test_a_policy_that_changes_the_prompt_is_found_out(model, tokenizer):
    policy = Fake(model, tokenizer, lambda plain: plain)

    def drops_padding(td):
        out = policy.eval()(td)
        return out.set(("tokens", "prompt"), out["tokens", "prompt"][:, 1:])

    engine = PolicyEngine(drops_padding, tokenizer=tokenizer, model=model)
    with pytest.raises(RuntimeError, match="another prompt than it was given: 3 tokens"):
        generate_all(engine, [[5, 0, 6]])
    engine.close()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({}, "must return .'tokens', 'response'."),
        (
            {"tokens": {"response": torch.ones(1, 2)}, "log_probs": {"response": torch.ones(1, 1)}},
            "1 for 2",
        ),
        ({"tokens": {"response": torch.ones(1, 0)}}, "without a token"),
    ],
)
def test_what_is_no_answer_is_refused(model, tokenizer, out, message):
    engine = PolicyEngine(
        lambda td: TensorDict(out, batch_size=[1]), tokenizer=tokenizer, model=model
    )
    with pytest.raises(RuntimeError, match=message):
        generate_all(engine, [[5, 6]])
    engine.close()


# Batches, threads, loops


def test_requests_that_wait_are_one_batch(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer, max_batch_size=8)
    policy.hold = threading.Event()

    async def run():
        first = asyncio.create_task(engine.generate([5]))
        while not policy.sizes:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(engine.generate(prompt)) for prompt in prompts(20)]
        await asyncio.sleep(0)
        policy.hold.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    engine.close()
    assert policy.sizes == [1, 8, 8, 4]


def test_a_batch_is_waited_for_and_no_longer(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer, max_batch_size=4, max_wait=0.3)

    async def run():
        tasks = []
        for prompt in prompts(4):
            tasks.append(asyncio.create_task(engine.generate(prompt)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        await engine.generate([5])

    asyncio.run(run())
    engine.close()
    assert policy.sizes == [4, 1]


def test_a_cancelled_request_is_taken_back(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer)
    policy.hold = threading.Event()

    async def run():
        first = asyncio.create_task(engine.generate([5]))
        while not policy.sizes:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(engine.generate([token])) for token in (6, 7, 8)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        first.cancel()  # being answered: the answer is thrown away
        await asyncio.sleep(0)
        policy.hold.set()
        return await asyncio.gather(first, *waiting, return_exceptions=True)

    results = asyncio.run(run())
    engine.close()
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [1, 0, 1, 0]
    assert policy.calls == [[[5]], [[6], [8]]]


def test_a_failure_is_its_own_batchs_only(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer, max_batch_size=2)
    sample = policy.sample
    policy.sample = lambda prompt: 1 / 0 if prompt == [7] else sample(prompt)
    policy.hold = threading.Event()

    async def run():
        tasks = []
        for token in (5, 6, 7, 8, 9, 10):
            tasks.append(asyncio.create_task(engine.generate([token])))
            await asyncio.sleep(0)
            while not policy.sizes:
                await asyncio.sleep(0.001)
        policy.hold.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    engine.close()
    failed = [i for i, result in enumerate(results) if isinstance(result, RuntimeError)]
    assert failed == [1, 2]
    for i in failed:
        assert "ZeroDivisionError" in str(results[i])
        assert isinstance(results[i].__cause__, ZeroDivisionError)
    assert sum(isinstance(result, Completion) for result in results) == 4


def test_closing_fails_what_has_no_answer_and_leaves_no_thread(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer)
    policy.hold = threading.Event()

    async def run():
        tasks = [asyncio.create_task(engine.generate([5]))]
        while not policy.sizes:
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(engine.generate([6])) for _ in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.wait(tasks[1:], timeout=PATIENCE)  # these need not wait for the batch
        policy.hold.set()
        await closing
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all("closed" in str(result) for result in asyncio.run(run()))
    engine.close()
    assert not engine._batcher._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        generate_all(engine, [[5]])
    with pytest.raises(RuntimeError, match="closed"):
        engine.update_weights()


@pytest.mark.parametrize("checked", [True, False])
def test_an_engine_may_be_closed_from_anywhere_while_everything_runs(model, tokenizer, checked):
    """Requests of two loops are under way, and weights are being updated."""
    engine = PolicyEngine(wrapper(model, tokenizer), max_new_tokens=30, check=checked)
    results, updated, begun = [], [], threading.Event()

    async def ask():
        answers = 0
        try:
            while True:
                await asyncio.gather(*(engine.generate(prompt) for prompt in prompts(9)))
                answers += 1
                begun.set()
        except RuntimeError as error:
            results.append((answers, str(error)))

    def update():
        try:
            while True:
                updated.append(engine.update_weights())
        except RuntimeError as error:
            results.append((len(updated), str(error)))

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(2)]
    threads.append(threading.Thread(target=update))
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE)
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in [*closers, *closers]:
        thread.start() if thread.ident is None else thread.join(PATIENCE)
    assert not engine._batcher._thread.is_alive()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert [message for _, message in results] == ["the engine is closed: make a new one."] * 3


def test_no_request_is_lost_at_random(tokenizer):
    """Loops ask, cancel and pause at random; every request that is not cancelled is answered once."""
    rng = random.Random(1)
    seen: list[int] = []
    busy = threading.Lock()

    def answer(requests):
        assert busy.acquire(blocking=False)
        seen.extend(requests)
        time.sleep(rng.random() * 0.002)
        busy.release()
        return [-request for request in requests]

    batcher = MicroBatcher(
        answer, lambda requests: sum(requests) % 7 != 0, max_batch_size=5, max_wait=0.001, name="t"
    )

    async def run(base):
        tasks = []
        for i in range(100):
            tasks.append(asyncio.create_task(batcher.ask(base + i)))
            await asyncio.sleep(rng.random() * 0.001)
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
        return base, await asyncio.gather(*tasks, return_exceptions=True)

    results: list[tuple[int, list]] = []
    threads = [
        threading.Thread(target=lambda base=base: results.append(asyncio.run(run(base))))
        for base in (1000, 2000, 3000)
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with batcher.paused():
            assert busy.acquire(blocking=False)
            time.sleep(0.001)
            busy.release()
    for thread in threads:
        thread.join(PATIENCE)
    batcher.close()
    assert len(results) == 3
    assert len(seen) == len(set(seen))
    for base, outcomes in results:
        for i, outcome in enumerate(outcomes):
            assert isinstance(outcome, asyncio.CancelledError) or outcome == -(base + i)


# Weights


def changed_copy(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return changed


def test_an_update_waits_for_the_batch_and_goes_before_the_next(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer)
    policy.hold = threading.Event()
    changed = changed_copy(model)
    before = copy.deepcopy(model)

    async def run():
        first = asyncio.create_task(engine.generate([5]))
        while not policy.sizes:
            await asyncio.sleep(0.001)
        update = asyncio.create_task(asyncio.to_thread(engine.update_weights, changed))
        second = asyncio.create_task(engine.generate([6]))
        await asyncio.sleep(0.05)
        assert engine.version == 0
        policy.hold.set()
        return await asyncio.gather(first, second, update)

    first, second, version = asyncio.run(run())
    engine.close()
    assert (set(first.versions), set(second.versions), version) == ({0}, {1}, 1)
    assert_sampled_by(before, [5], first)
    assert_sampled_by(changed, [6], second)


def test_weights_that_lie_elsewhere_are_handed_on(model, tokenizer):
    policy = Fake(model, tokenizer, lambda plain: plain).eval()
    engine = PolicyEngine(lambda td: policy(td), tokenizer=tokenizer, check=False)
    with pytest.raises(NotImplementedError, match="on_update="):
        engine.update_weights(model)
    assert engine.update_weights() == 1
    engine.close()
    got = []
    engine = PolicyEngine(
        lambda td: policy(td), tokenizer=tokenizer, check=False, on_update=got.append
    )
    assert engine.update_weights("a checkpoint") == 1
    assert got == ["a checkpoint"]
    engine.close()


def test_the_models_own_mode_is_left_alone(model, tokenizer):
    model.train()
    model.config.attention_dropout = 0.5
    for policy in (wrapper(model, tokenizer), Fake(model, tokenizer, lambda plain: plain)):
        engine = PolicyEngine(policy)
        (answer,) = generate_all(engine, [[5, 6]])
        engine.close()
        assert model.training
        assert_sampled_by(model, [5, 6], answer)  # dropout did not act while sampling


# Refusals


def test_stop_strings_are_refused_where_nothing_can_look_for_them(model, tokenizer):
    engine = PolicyEngine(Fake(model, tokenizer, lambda plain: plain))
    with pytest.raises(TypeError, match=r"takes no \['stop'\]"):
        generate_all(engine, [[5]], stop="guess")
    engine.close()
    engine = PolicyEngine(wrapper(model, tokenizer))
    engine.tokenizer = None
    with pytest.raises(TypeError, match=r"stop=\['guess'\] needs a tokenizer"):
        generate_all(engine, [[5]], stop="guess")
    engine.close()


def test_other_arguments_of_a_request_are_refused(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer))
    with pytest.raises(TypeError, match=r"takes no \['seed', 'typical_p'\]"):
        generate_all(engine, [[5]], typical_p=0.1, seed=3)
    engine.close()


@pytest.mark.parametrize(
    "generate_kwargs",
    [
        {"repetition_penalty": 1.2},
        {"num_beams": 2},
        {"bad_words_ids": [[5]]},
    ],
)
def test_another_distribution_is_refused(model, tokenizer, generate_kwargs):
    policy = wrapper(model, tokenizer, **generate_kwargs)
    with pytest.raises(ValueError, match=f"own distribution, got .*{next(iter(generate_kwargs))}"):
        PolicyEngine(policy)


def test_vllms_sampling_parameters_count_as_well(model, tokenizer):
    policy = Fake(model, tokenizer, lambda plain: plain)
    policy.sampling_params = SimpleNamespace(
        temperature=0.5, top_k=-1, top_p=1.0, max_tokens=3, n=1
    )
    engine = PolicyEngine(policy)
    assert engine.max_new_tokens == 3
    with pytest.raises(RuntimeError, match=r"with {'temperature': 0.5}"):  # reported at 1
        generate_all(engine, [[5, 6]])
    engine.close()
    policy.sampling_params.presence_penalty = 0.2
    with pytest.raises(ValueError, match="presence_penalty"):
        PolicyEngine(policy)


def test_vllms_stop_tokens_end_answers_as_well(model, tokenizer):
    policy = Fake(model, tokenizer, lambda plain: plain)
    policy.sampling_params = SimpleNamespace(stop_token_ids=list(range(4, 26)))
    engine = PolicyEngine(policy)
    answers = generate_all(engine, prompts(20))
    engine.close()
    for answer in answers:
        stops = [token >= 4 or token == tokenizer.eos_token_id for token in answer.token_ids]
        assert not any(stops[:-1])
        assert answer.finish_reason == ("stop" if stops[-1] else "length")
    assert "stop" in {answer.finish_reason for answer in answers}


@pytest.mark.parametrize("check", [False, True])
def test_greedy_answers_are_the_likeliest(model, tokenizer, check):
    engine = PolicyEngine(wrapper(model, tokenizer, do_sample=False), check=check)
    got = generate_all(engine, [[5, 6]] * 4)
    engine.close()
    assert all(answer.sampling == {"temperature": 0} for answer in got)
    assert not check or {p for answer in got for p in answer.log_probs} == {0.0}
    (answer,) = {tuple(answer.token_ids) for answer in got}
    best = model.eval()(torch.tensor([[5, 6]])).logits[0, -1].argmax()
    assert answer[0] == best


def test_bad_engines_are_refused(model, tokenizer):
    policy = wrapper(model, tokenizer)
    for value, message in (
        (model, "got the model LlamaForCausalLM: wrap it"),
        (3, "must be a TorchRL LLM policy .*, got int"),
        (Fake, "must be a TorchRL LLM policy"),
    ):
        with pytest.raises(TypeError, match=message):
            PolicyEngine(value, tokenizer=tokenizer)
    for kwargs, message in (
        ({"max_batch_size": 0}, "max_batch_size must be positive, got 0"),
        ({"max_wait": -1.0}, "max_wait must not be negative"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyEngine(policy, **kwargs)
    with pytest.raises(ValueError, match="generate=False"):
        PolicyEngine(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
    with pytest.raises(ValueError, match="num_samples=2"):
        PolicyEngine(wrapper(model, tokenizer, num_return_sequences=2, do_sample=True))
    chat = Fake(model, tokenizer)
    chat.input_mode = "history"
    with pytest.raises(ValueError, match="got 'history'"):
        PolicyEngine(chat)
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(ValueError, match="end-of-turn token"):
        PolicyEngine(lambda td: td, tokenizer=endless)


def test_a_module_between_tensordicts_is_a_policy(model, tokenizer):
    class Plain(TensorDictModuleBase):
        in_keys, out_keys = [("tokens", "prompt")], [("tokens", "response")]

        def forward(self, td):
            size = td.batch_size[0]
            return td.set(("tokens", "response"), torch.tensor([[5, 1, 0, 0]] * size))

    engine = PolicyEngine(Plain(), tokenizer=tokenizer, model=model)
    (answer,) = generate_all(engine, [[5, 6]])
    engine.close()
    assert (answer.token_ids, answer.finish_reason) == ([5, 1], "stop")
    assert_sampled_by(model, [5, 6], answer)


def test_vllm_is_given_prompts_without_padding(model, tokenizer):
    class Scripted(vLLMWrapper):
        input_mode, pad_output, generate = "tokens", False, True

        def __init__(self):
            LLMWrapperBase.__init__(self)
            self.tokens_key, self.log_probs_key = "tokens", "log_probs"

        def forward(self, td):
            self.rows = [row.tolist() for row in td.get(("tokens", "prompt"), as_list=True)]
            answers = [torch.tensor([5] * (2 + i)) for i in range(len(self.rows))]
            out = [
                {"tokens": {"response": answer}, "log_probs": {"response": -answer / 5.0}}
                for answer in answers
            ]
            return lazy_stack([TensorDict(row) for row in out])

    policy = Scripted()
    engine = PolicyEngine(policy, tokenizer=tokenizer, check=False, max_wait=0.5, max_batch_size=2)
    answers = generate_all(engine, [[5, 6, 7], [8]])
    engine.close()
    assert policy.rows == [[5, 6, 7], [8]]
    assert [answer.token_ids for answer in answers] == [[5, 5], [5, 5, 5]]
    assert [answer.log_probs for answer in answers] == [[-1, -1], [-1, -1, -1]]
