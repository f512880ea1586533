from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.modules.llm import LLMWrapperBase, TransformersWrapper, vLLMWrapper

from tests.waiting import PATIENCE, in_thread
from torchrl_mt.engines import Completion, PolicyEngine
from torchrl_mt.engines.policy import log_probs
from torchrl_mt.engines.policy.log_probs import LogProbError, agrees, reports_wrong
from torchrl_mt.engines.policy.micro_batching import MicroBatcher
from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.testing import tiny_chat_model

from .helpers import (
    assert_all_sampled_by,
    assert_sampled_by,
    changed_copy,
    generate_all,
    plain_logits,
    started,
    until,
)


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


def law_log_probs(
    model, prompt, token_ids, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> torch.Tensor:
    """The slow and obvious reference: token by token, the distribution that it was sampled from."""
    logits = (
        plain_logits(model, prompt, SimpleNamespace(token_ids=token_ids)).double() / temperature
    )
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


def assert_of_law(model, requests, answers, law, atol=1e-4) -> None:
    for prompt, answer in zip(requests, answers, strict=True):
        expected = law_log_probs(model, prompt, answer.token_ids, **law)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=atol, rtol=0)


class Fake(LLMWrapperBase):
    """A policy of few lines that samples by its law, one prompt at a time, and reports what it says."""

    input_mode, pad_output = "tokens", True

    def __init__(self, model, tokenizer, report=lambda plain: plain, law=None, raw=False):
        super().__init__()
        self.model, self.tokenizer, self.report = model, tokenizer, report
        self.in_keys, self.out_keys = [("tokens", "prompt")], ["tokens", "log_probs"]
        self.law, self.raw = law or {}, raw
        if law:
            self.generate_kwargs = law
        self.sizes, self.calls, self.reported, self.hold = [], [], [], None

    def forward(self, td):
        self.sizes.append(td.batch_size[0])
        if self.hold is not None:
            assert self.hold.wait(PATIENCE)
        assert not self.training
        tokens, mask = td["tokens", "prompt"], td["masks", "all_attention_mask"]
        rows = [ids[keep].tolist() for ids, keep in zip(tokens, mask, strict=True)]
        self.calls.append(rows)
        answers = [self.sample(row) for row in rows]
        width = max(map(len, answers))
        response = torch.zeros(len(rows), width, dtype=torch.long)
        log_probs = torch.zeros(len(rows), width)
        law = {} if self.raw else self.law
        for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            scores = self.report(law_log_probs(self.model, row, answer, **law))
            self.reported.append(scores.tolist())
            response[i, : len(answer)], log_probs[i, : len(answer)] = torch.tensor(answer), scores
        out = {"tokens": {"response": response}, "log_probs": {"response": log_probs}}
        return td.update(TensorDict(out, batch_size=td.batch_size))

    def sample(self, prompt):
        answer = []
        for _ in range(6):
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
            kept = logits.topk(self.law.get("top_k", len(logits)))
            scores = kept.values / self.law.get("temperature", 1)
            answer.append(
                int(kept.indices[torch.distributions.Categorical(logits=scores).sample()])
            )
            if answer[-1] == self.tokenizer.eos_token_id:
                break
        return answer


def fake_engine(model, tokenizer, *report, **kwargs):
    policy = Fake(model, tokenizer, *report)
    return PolicyEngine(policy, **kwargs), policy


async def begun(engine, policy, prompt=(5,)):
    """A request that the policy is held up with."""
    policy.hold = threading.Event()
    task = asyncio.create_task(engine.generate(list(prompt)))
    await until(lambda: policy.sizes)
    return task


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
                assert law_log_probs(model, [5, 6, 7], answer.tolist())[0] < -0.5
                assert row["log_probs", "response"][0] == 0
    assert min(sizes) < 8


@pytest.mark.parametrize("input_mode", ["tokens", "text", "history"])
def test_a_wrapper_may_have_any_input_mode(model, tokenizer, input_mode):
    engine = PolicyEngine(wrapper(model, tokenizer, input_mode))
    answers = generate_all(engine, prompts(20))
    assert_all_sampled_by(model, prompts(20), answers, atol=1e-4)


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
        assert_of_law(model, requests, answers, law)
        assert all(answer.sampling == law for answer in answers)
    said = [record.getMessage() for record in caplog.records if "truncated" in record.getMessage()]
    assert len(said) == (law.keys() != {"temperature"})


def test_requests_of_different_laws_are_answered_by_their_own(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer, temperature=0.9))
    laws = [{}, {"top_k": 2}, {"temperature": 0, "top_p": 0.5}, {"temperature": 1.0}, {"top_k": 99}]
    requests = prompts(50)

    answers = generate_all(engine, requests, laws * 10)
    for i, (prompt, answer) in enumerate(zip(requests, answers, strict=True)):
        law = {"temperature": 0.9, **laws[i % 5]}
        if i % 5 == 2:
            assert answer.sampling == {"temperature": 0}
            assert set(answer.log_probs) == {0.0}
            assert plain_logits(model, prompt, answer).argmax(-1).tolist() == answer.token_ids
            continue
        plain = {"temperature": 1.0, "top_k": 99}  # there are 26 tokens
        assert answer.sampling == {k: v for k, v in law.items() if plain.get(k) != v}
        assert_of_law(model, [prompt], [answer], law)


def test_different_laws_do_not_break_batches_up(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer))
    sizes, sampler = [], engine._answerer._sampler
    engine._answerer._sampler = lambda *batch: sizes.append(len(batch[0])) or sampler(*batch)

    generate_all(engine, [[5]] * 40, [{"temperature": 0.5 + i % 2} for i in range(40)])
    assert sum(sizes) == 40
    assert len(sizes) <= 4


@pytest.mark.parametrize("law", [{"temperature": 0.3}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("raw", [False, True])
def test_right_numbers_of_a_law_are_handed_on_and_raw_ones_are_refused(model, tokenizer, law, raw):
    if "temperature" in law:
        with torch.no_grad():  # neither uniform nor certain: the temperature tells
            model.lm_head.weight.div_(model.eval()(torch.tensor([[5, 6, 7, 8]])).logits.std())
    policy = Fake(model, tokenizer, law=law, raw=raw)
    engine = PolicyEngine(policy)
    if raw:
        with pytest.raises(RuntimeError, match="not its model's"):
            generate_all(engine, prompts(10))
        return
    generate_all(engine, prompts(10))
    policy.reported.clear()
    answers = generate_all(engine, prompts(10))
    assert {answer.sampling[name] for answer in answers for name in law} == set(law.values())
    assert_of_law(model, prompts(10), answers, law, atol=1e-3)
    assert sorted(answer.log_probs for answer in answers) == sorted(policy.reported)


def test_what_is_not_checked_is_handed_on_and_recorded_as_it_is(model, tokenizer, caplog):
    policy = wrapper(model, tokenizer, repetition_penalty=1.5, top_k=2)
    engine = PolicyEngine(policy, check=False)
    answers = generate_all(engine, prompts(5))
    assert {answer.log_probs[0] for answer in answers} == {0.0}  # the wrapper is wrong about them
    assert [a.sampling for a in answers] == [{"top_k": 2, "repetition_penalty": 1.5}] * 5
    assert sum("truncated" in record.getMessage() for record in caplog.records) == 1


def test_sampling_is_from_the_models_own_distribution():
    """The host's defaults are greedy, or the best 50, or what the model's generation config says."""
    model, tokenizer = tiny_chat_model(map(str, range(80)), hidden_size=16, intermediate_size=16)
    model.generation_config.top_k = 2
    model.generation_config.repetition_penalty = 3.0
    engine = PolicyEngine(wrapper(model, tokenizer), max_batch_size=500)
    prompt = list(range(10, 30))
    answers = generate_all(engine, [prompt] * 2000, max_new_tokens=1)
    counts = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=84) / 2000
    expected = model.eval()(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert (counts - expected).abs().sum() < 0.25
    assert model.generation_config.top_k == 2


def test_numbers_that_are_right_are_handed_on(model, tokenizer, monkeypatch):
    engine, _ = fake_engine(model, tokenizer)
    requests = prompts(5)
    generate_all(engine, requests)  # compared here
    monkeypatch.setattr(engine._model, "forward", lambda **kwargs: pytest.fail("not needed"))
    assert_all_sampled_by(model, requests, generate_all(engine, requests), atol=1e-4)


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


def test_without_a_model_to_check_with_nothing_is_handed_on(model, tokenizer):
    policy = Fake(model, tokenizer)
    blind = PolicyEngine(lambda td: policy.eval()(td), tokenizer=tokenizer)
    with pytest.raises(RuntimeError, match=r"reports \[-\d.*no model to check them with") as caught:
        generate_all(blind, [[5, 6]])
    assert isinstance(caught.value.__cause__, LogProbError)
    for kwargs in ({"check": False}, {"model": model}):
        engine = PolicyEngine(lambda td: policy.eval()(td), tokenizer=tokenizer, **kwargs)
        (answer,) = generate_all(engine, [[5, 6]])
        assert_sampled_by(model, [5, 6], answer, atol=1e-4)


def test_weights_that_did_not_reach_the_policy_are_noticed(model, tokenizer):
    other = copy.deepcopy(model)
    engine = PolicyEngine(Fake(other, tokenizer), model=model)
    generate_all(engine, prompts(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    engine.update_weights()
    with pytest.raises(RuntimeError, match="not its model's"):
        generate_all(engine, prompts(5))


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


def test_vllm_is_not_asked_for_log_probs_of_what_it_truncates():
    """Unless it is started otherwise, it reports those of the model's own distribution."""
    vllm = vLLMWrapper.__new__(vLLMWrapper)
    assert reports_wrong(vllm, Sampling(top_k=2))
    assert reports_wrong(vllm, Sampling(temperature=0.5))
    assert not reports_wrong(vllm, Sampling())
    assert not reports_wrong(lambda td: td, Sampling(top_k=2))


# Answers


@pytest.mark.parametrize("pad_is_stop", [False, True])
def test_no_sampled_token_is_lost(model, tokenizer, pad_is_stop):
    """Neither a padding token within an answer nor a stop token that is also the padding."""
    tokenizer = copy.deepcopy(tokenizer)
    if pad_is_stop:
        tokenizer.pad_token = tokenizer.eos_token
    engine = PolicyEngine(wrapper(model, tokenizer), max_new_tokens=20)
    answers = generate_all(engine, prompts(150))
    for answer in answers:
        stopped = answer.token_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in answer.token_ids[:-1]
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(answer.token_ids) == 20
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert any(0 in answer.token_ids for answer in answers)


async def test_requests_share_a_batch_only_where_the_models_positions_allow(model, tokenizer):
    """A long prompt with a small limit and a short prompt with a large one do not fit together."""
    engine, policy = fake_engine(model, tokenizer)
    limits = [([5] * 1020, 4), ([6] * 1021, 3), ([7], 1000), ([8], 1000)]
    tasks = [await begun(engine, policy)]
    for prompt, limit in limits:
        tasks += started(engine, [prompt], max_new_tokens=limit)
        await asyncio.sleep(0)
    policy.hold.set()
    await asyncio.gather(*tasks)
    batches = [set(map(len, rows)) for rows in policy.calls]
    assert not any({1020, 1} <= lengths or {1021, 1} <= lengths for lengths in batches)
    assert sum(policy.sizes) == 5


def test_a_policy_that_changes_the_prompt_is_found_out(model, tokenizer):
    policy = Fake(model, tokenizer)

    def drops_padding(td):
        out = policy.eval()(td)
        return out.set(("tokens", "prompt"), out["tokens", "prompt"][:, 1:])

    engine = PolicyEngine(drops_padding, tokenizer=tokenizer, model=model)
    with pytest.raises(RuntimeError, match="another prompt than it was given: 3 tokens"):
        generate_all(engine, [[5, 0, 6]])


# Batches, threads, loops


async def test_requests_that_wait_are_one_batch(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer, max_batch_size=8)
    first = await begun(engine, policy)
    others = started(engine, prompts(20))
    await asyncio.sleep(0)
    policy.hold.set()
    await asyncio.gather(first, *others)
    assert policy.sizes == [1, 8, 8, 4]


async def test_a_batch_is_waited_for_and_no_longer(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer, max_batch_size=4, max_wait=0.3)
    tasks = []
    for prompt in prompts(4):
        tasks += started(engine, [prompt])
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    await engine.generate([5])
    assert policy.sizes == [4, 1]


async def test_a_cancelled_request_is_taken_back(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer)
    first = await begun(engine, policy)
    waiting = started(engine, [[6], [7], [8]])
    await asyncio.sleep(0)
    waiting[1].cancel()
    first.cancel()  # being answered: the answer is thrown away
    await asyncio.sleep(0)
    policy.hold.set()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [1, 0, 1, 0]
    assert policy.calls == [[[5]], [[6], [8]]]


async def test_a_failure_is_its_own_batchs_only(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer, max_batch_size=2)
    sample = policy.sample
    policy.sample = lambda prompt: 1 / 0 if prompt == [7] else sample(prompt)
    tasks = [await begun(engine, policy)]
    tasks += started(engine, [[token] for token in (6, 7, 8, 9, 10)])
    await asyncio.sleep(0)
    policy.hold.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [i for i, result in enumerate(results) if isinstance(result, RuntimeError)]
    assert failed == [1, 2]
    for i in failed:
        assert "ZeroDivisionError" in str(results[i])
        assert isinstance(results[i].__cause__, ZeroDivisionError)
    assert sum(isinstance(result, Completion) for result in results) == 4


async def test_closing_fails_what_has_no_answer_and_leaves_no_thread(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer)
    tasks = [await begun(engine, policy), *started(engine, [[6]] * 3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    await asyncio.wait(tasks[1:], timeout=PATIENCE)  # these need not wait for the batch
    policy.hold.set()
    await closing
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all("closed" in str(result) for result in answers)
    assert not engine._batcher._thread.is_alive()


@pytest.mark.parametrize("checked", [True, False])
def test_an_engine_may_be_closed_from_anywhere_while_everything_runs(model, tokenizer, checked):
    """Requests of two loops are under way, and weights are being updated."""
    engine = PolicyEngine(wrapper(model, tokenizer), max_new_tokens=30, check=checked)
    begun = threading.Event()

    async def ask():
        while True:
            await asyncio.gather(*(engine.generate(prompt) for prompt in prompts(9)))
            begun.set()

    def update():
        while True:
            engine.update_weights()

    working = [in_thread(work) for work in (lambda: asyncio.run(ask()),) * 2 + (update,)]
    assert begun.wait(PATIENCE)
    for closed in [in_thread(engine.close) for _ in range(3)]:
        closed()
    assert not engine._batcher._thread.is_alive()
    assert [str(wait()) for wait in working] == ["the engine is closed: make a new one."] * 3


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

    running = [in_thread(lambda base=base: asyncio.run(run(base))) for base in (1000, 2000, 3000)]
    for _ in range(20):
        with batcher.paused():
            assert busy.acquire(blocking=False)
            time.sleep(0.001)
            busy.release()
    results = [wait() for wait in running]
    batcher.close()
    assert len(seen) == len(set(seen))
    for base, outcomes in results:
        for i, outcome in enumerate(outcomes):
            assert isinstance(outcome, asyncio.CancelledError) or outcome == -(base + i)


# Weights


async def test_an_update_waits_for_the_batch_and_goes_before_the_next(model, tokenizer):
    engine, policy = fake_engine(model, tokenizer)
    changed, before = changed_copy(model), copy.deepcopy(model)
    first = await begun(engine, policy)
    update = asyncio.create_task(asyncio.to_thread(engine.update_weights, changed))
    second = asyncio.create_task(engine.generate([6]))
    await asyncio.sleep(0.05)
    assert engine.version == 0
    policy.hold.set()
    first, second, version = await asyncio.gather(first, second, update)
    assert (set(first.versions), set(second.versions), version) == ({0}, {1}, 1)
    assert_sampled_by(before, [5], first, atol=1e-4)
    assert_sampled_by(changed, [6], second, atol=1e-4)


def test_weights_that_lie_elsewhere_are_handed_on(model, tokenizer):
    policy = Fake(model, tokenizer).eval()
    engine = PolicyEngine(lambda td: policy(td), tokenizer=tokenizer, check=False)
    with pytest.raises(NotImplementedError, match="on_update="):
        engine.update_weights(model)
    assert engine.update_weights() == 1
    got = []
    engine = PolicyEngine(policy, tokenizer=tokenizer, check=False, on_update=got.append)
    assert engine.update_weights("a checkpoint") == 1
    assert got == ["a checkpoint"]


# Refusals


def test_vllms_sampling_parameters_count_as_well(model, tokenizer):
    policy = Fake(model, tokenizer)
    given = {"temperature": 0.5, "top_k": -1, "top_p": 1.0, "max_tokens": 3, "n": 1}
    policy.sampling_params = SimpleNamespace(**given)
    engine = PolicyEngine(policy)
    assert engine.max_new_tokens == 3
    with pytest.raises(RuntimeError, match=r"with {'temperature': 0.5}"):  # reported at 1
        generate_all(engine, [[5, 6]])
    policy.sampling_params.presence_penalty = 0.2
    with pytest.raises(ValueError, match="presence_penalty"):
        PolicyEngine(policy)


def test_vllms_stop_tokens_end_answers_as_well(model, tokenizer):
    policy = Fake(model, tokenizer)
    policy.sampling_params = SimpleNamespace(stop_token_ids=list(range(4, 26)))
    engine = PolicyEngine(policy)
    answers = generate_all(engine, prompts(20))
    for answer in answers:
        stops = [token >= 4 or token == tokenizer.eos_token_id for token in answer.token_ids]
        assert not any(stops[:-1])
        assert answer.finish_reason == ("stop" if stops[-1] else "length")
    assert "stop" in {answer.finish_reason for answer in answers}


def answering(*log_probs, **response):
    """A policy whose answers to one prompt are these."""
    out = {"tokens": response, "log_probs": {"response": torch.zeros(1, *log_probs)}}
    return lambda *_: lambda td: TensorDict(out, [1])


@pytest.mark.parametrize(
    ("make", "kwargs", "error", "message"),
    [
        (wrapper, {"typical_p": 0.1, "seed": 3}, TypeError, r"takes no \['seed', 'typical_p'\]"),
        (Fake, {"stop": "guess"}, TypeError, r"takes no \['stop'\]"),
        (answering(1), {}, RuntimeError, "must return .*response"),
        (answering(1, response=torch.ones(1, 2)), {}, RuntimeError, "1 for 2"),
        (answering(0, response=torch.ones(1, 0)), {}, RuntimeError, "without a token"),
    ],
)
def test_what_cannot_be_asked_or_answered_is_refused(
    model, tokenizer, make, kwargs, error, message
):
    engine = PolicyEngine(make(model, tokenizer), tokenizer=tokenizer, model=model)
    with pytest.raises(error, match=message):
        generate_all(engine, [[5, 6]], **kwargs)


def test_stop_strings_need_a_tokenizer(model, tokenizer):
    engine = PolicyEngine(wrapper(model, tokenizer))
    engine.tokenizer = None
    with pytest.raises(TypeError, match=r"stop=\['guess'\] needs a tokenizer"):
        generate_all(engine, [[5]], stop="guess")


ENDLESS = SimpleNamespace(eos_token_id=None)
COLD = partial(Fake, law={"temperature": 0.3})


def bent(**generate_kwargs):
    return partial(wrapper, **generate_kwargs)


def history(model, tokenizer):
    chat = Fake(model, tokenizer)
    chat.input_mode = "history"
    return chat


@pytest.mark.parametrize(
    ("make", "kwargs", "error", "message"),
    [
        (lambda model, tokenizer: model, {}, TypeError, "the model LlamaForCausalLM: wrap it"),
        (lambda *_, **__: 3, {}, TypeError, "must be a TorchRL LLM policy .*, got int"),
        (lambda *_, **__: Fake, {}, TypeError, "must be a TorchRL LLM policy"),
        (wrapper, {"max_batch_size": 0}, ValueError, "max_batch_size must be positive, got 0"),
        (wrapper, {"max_wait": -1.0}, ValueError, "max_wait must not be negative"),
        (wrapper, {"tolerance": 0.0}, ValueError, "tolerance must be positive"),
        (partial(TransformersWrapper, generate=False), {}, ValueError, "generate=False"),
        (bent(num_return_sequences=2, do_sample=True), {}, ValueError, "num_samples=2"),
        (bent(repetition_penalty=1.2), {}, ValueError, "own distribution, .*repetition_penalty"),
        (bent(num_beams=2), {}, ValueError, "own distribution, got .*num_beams"),
        (bent(bad_words_ids=[[5]]), {}, ValueError, "own distribution, got .*bad_words_ids"),
        (COLD, {"temperature": 0.7}, ValueError, "the policy's own, which is 0.3, got 0.7"),
        (history, {}, ValueError, "got 'history'"),
        (lambda *_, **__: print, {"tokenizer": ENDLESS}, ValueError, "end-of-turn token"),
    ],
)
def test_bad_engines_are_refused(model, tokenizer, make, kwargs, error, message):
    with pytest.raises(error, match=message):
        PolicyEngine(make(model, tokenizer=tokenizer), **{"tokenizer": tokenizer, **kwargs})


@pytest.mark.parametrize("check", [False, True])
def test_greedy_answers_are_the_likeliest(model, tokenizer, check):
    engine = PolicyEngine(wrapper(model, tokenizer, do_sample=False), check=check)
    for answer in generate_all(engine, [[5, 6]] * 4):
        assert answer.sampling == {"temperature": 0}
        assert not check or set(answer.log_probs) == {0.0}
        assert plain_logits(model, [5, 6], answer).argmax(-1).tolist() == answer.token_ids


def test_a_module_between_tensordicts_is_a_policy(model, tokenizer):
    class Plain(TensorDictModuleBase):
        in_keys, out_keys = [("tokens", "prompt")], [("tokens", "response")]

        def forward(self, td):
            size = td.batch_size[0]
            return td.set(("tokens", "response"), torch.tensor([[5, 1, 0, 0]] * size))

    engine = PolicyEngine(Plain(), tokenizer=tokenizer, model=model)
    (answer,) = generate_all(engine, [[5, 6]])
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
    assert policy.rows == [[5, 6, 7], [8]]
    assert [answer.token_ids for answer in answers] == [[5, 5], [5, 5, 5]]
    assert [answer.log_probs for answer in answers] == [[-1, -1], [-1, -1, -1]]
