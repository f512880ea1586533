"""What every engine promises, whatever stands behind it."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from functools import partial

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper

from tests.engines.completions_server import STOP, CompletionsServer, weights_after
from tests.engines.helpers import changed_copy, generate_all, plain_logits, prompts, started, until
from tests.faulty_server import running, silent
from tests.waiting import PATIENCE, in_thread, wait_until
from torchrl_mt.chat.encoding import decode
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import (
    Completion,
    CompletionsEngine,
    Engine,
    PolicyEngine,
    TransformersEngine,
)
from torchrl_mt.engines.stop_strings import find_stop
from torchrl_mt.envs import GuessNumber

THREADS = ("torchrl_mt-generation", "torchrl_mt-policy")


class OnModel:
    """An engine that samples with a model of this process."""

    own_temperature = None

    def __init__(self, kind, model, tokenizer):
        self.kind, self.model, self.tokenizer = kind, model, tokenizer
        self.source = changed_copy(model)
        self.passes = 0

    def make(self, **kwargs):
        kwargs = {"max_new_tokens": 8, **kwargs}
        if self.kind == "transformers":
            return TransformersEngine(self.model, self.tokenizer, **kwargs)
        policy = TransformersWrapper(self.model, tokenizer=self.tokenizer, input_mode="tokens")
        return PolicyEngine(policy, **kwargs)

    def make_slow(self):
        """An engine whose answers take about a thousand passes, and whether it has begun."""

        def count(*_):
            self.passes += 1

        engine = self.make(max_new_tokens=1000)
        if self.kind == "transformers":
            engine._stop_ids = frozenset()
        else:
            engine._answerer._sampler._policy.generate_kwargs["eos_token_id"] = None
        engine._model.register_forward_hook(count)
        return engine, lambda: self.passes > 2

    def log_probs(self, prompt, answer, temperature=1.0):
        rows = (plain_logits(self.model, prompt, answer) / temperature).log_softmax(-1)
        return rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]

    def assert_updated(self):
        own = self.model.state_dict()
        assert all(torch.equal(own[name], x) for name, x in self.source.state_dict().items())


class OnServer:
    """An engine that asks a server, whose distribution depends on the token before alone."""

    own_temperature = 1.0
    """The server reports the same log-probabilities whatever it is asked for."""

    def __init__(self, server, tokenizer):
        self.server, self.tokenizer = server, tokenizer
        server.decode = partial(decode, tokenizer)
        self.source, self.taken = "checkpoint-1", []

    def make(self, **kwargs):
        kwargs = {"max_new_tokens": 8, "max_total_tokens": 1024, "vocab_size": 26, **kwargs}
        return CompletionsEngine(
            self.server.url,
            "tiny",
            self.tokenizer,
            timeout=PATIENCE,
            logprobs_mode="processed_logprobs",
            on_update=self.taken.append,
            **kwargs,
        )

    def make_slow(self):
        self.server.faults = [silent] * 100
        return self.make(), lambda: self.server.seen

    def log_probs(self, prompt, answer, temperature=1.0):
        tokens = [prompt[-1], *answer.token_ids]
        rows = torch.tensor([weights_after(token) for token in tokens[:-1]]).log()
        rows = (rows / temperature).log_softmax(-1)
        return rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]

    def assert_updated(self):
        assert self.taken == [self.source]


@pytest.fixture(params=["transformers", "policy", "completions"])
def kit(request, model, tokenizer):
    if request.param != "completions":
        yield OnModel(request.param, model, tokenizer)
        return
    pytest.importorskip("httpx")
    pytest.importorskip("tenacity")
    with running(CompletionsServer()) as server:
        yield OnServer(server, tokenizer)


@pytest.fixture
def engine(kit):
    return kit.make()


def assert_sampled(kit, prompt, answer, temperature=1.0):
    expected = kit.log_probs(prompt, answer, temperature)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


def assert_all_sampled(kit, requests, answers, temperature=1.0):
    for prompt, answer in zip(requests, answers, strict=True):
        assert_sampled(kit, prompt, answer, temperature)


def test_it_is_an_engine(engine):
    assert isinstance(engine, Engine)
    assert engine.version == 0


def test_every_token_has_its_log_prob_and_its_version(kit, engine):
    requests = prompts(40)
    answers = generate_all(engine, requests)
    for prompt, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, Completion)
        assert_sampled(kit, prompt, answer)
        assert list(answer.versions) == [0] * len(answer.token_ids)
        assert all(isinstance(token, int) for token in answer.token_ids)
        assert answer.sampling == {}
    assert len({tuple(answer.token_ids) for answer in answers}) > 20


def test_an_answer_ends_with_a_stop_token_or_at_its_limit(engine):
    requests = prompts(60)
    limits = [1 + i % 9 for i in range(60)]

    answers = generate_all(engine, requests, [{"max_new_tokens": limit} for limit in limits])
    for answer, limit in zip(answers, limits, strict=True):
        stopped = answer.token_ids[-1] == STOP
        assert STOP not in answer.token_ids[:-1]
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert len(answer.token_ids) <= limit
        assert stopped or len(answer.token_ids) == limit
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


@pytest.mark.parametrize("stop", ["guess", ["higher 1", "r c", "> <", "2 3"]])
def test_an_answer_ends_where_its_text_first_contains_a_stop_string(kit, engine, tokenizer, stop):
    strings = [stop] if isinstance(stop, str) else stop
    requests = prompts(60)
    limits = [1 + i % 20 for i in range(60)]

    asked = [
        {"max_new_tokens": limit, "stop": stop if i % 4 else (None, [])[i % 8 // 4]}
        for i, limit in enumerate(limits)
    ]
    answers = generate_all(engine, requests, asked)
    reasons = set()
    for i, (prompt, limit, answer) in enumerate(zip(requests, limits, answers, strict=True)):
        tokens = answer.token_ids
        ends = [find_stop(decode(tokenizer, tokens[: n + 1]), strings) for n in range(len(tokens))]
        asked, stopped = i % 4 > 0, tokens[-1] == STOP
        found = ends[-1] if asked and not stopped else None
        assert answer.stop_string == found
        assert not asked or not any(ends[:-1])
        assert STOP not in tokens[:-1]
        assert answer.finish_reason == ("stop" if stopped or found else "length")
        assert len(tokens) == limit or stopped or found
        assert answer.stop_token == (STOP if stopped else None)
        assert_sampled(kit, prompt, answer)
        assert answer.sampling == {}
        reasons.add((answer.finish_reason, found is not None, len(tokens) < limit))
    assert reasons >= {("stop", True, True), ("stop", False, True), ("length", False, False)}


def test_without_a_limit_of_its_own_an_answer_has_the_engines_and_what_room_there_is(kit):
    engine = kit.make(max_new_tokens=3)
    answers = generate_all(engine, [*prompts(30), [5] * 1022])
    assert max(len(answer.token_ids) for answer in answers[:30]) == 3
    assert len(answers[30].token_ids) <= 2


@pytest.mark.parametrize("per_request", [False, True])
def test_a_temperature_is_sampled_with_and_recorded(kit, per_request):
    engine = kit.make(**({} if per_request else {"temperature": 0.5}))
    requests = prompts(10)
    answers = generate_all(engine, requests, **({"temperature": 0.5} if per_request else {}))
    assert_all_sampled(kit, requests, answers, kit.own_temperature or 0.5)
    assert all(answer.sampling == {"temperature": 0.5} for answer in answers)


def test_the_models_own_mode_and_attention_are_left_alone(kit, model):
    if isinstance(kit, OnServer):
        pytest.skip("no model here")
    model.train()
    model.config.attention_dropout = 0.5
    before = model.config._attn_implementation
    (answer,) = generate_all(kit.make(), prompts(1))
    assert model.training
    assert model.config._attn_implementation == before
    assert_sampled(kit, prompts(1)[0], answer)  # dropout did not act while sampling


def test_truncation_is_recorded_and_warned_of_once(engine, caplog):
    generate_all(engine, prompts(1), temperature=0.5)
    generate_all(engine, prompts(1), temperature=0, top_p=0.5)
    assert not caplog.records
    answers = generate_all(engine, prompts(3), top_p=0.5)
    answers += generate_all(engine, prompts(1), top_k=3)
    (record,) = caplog.records
    assert "{'top_p': 0.5} is truncated" in record.getMessage()
    assert [answer.sampling for answer in answers] == [{"top_p": 0.5}] * 3 + [{"top_k": 3}]


STOPS = "stop must be a string or a list of strings"


@pytest.mark.parametrize(
    ("prompt", "kwargs", "error", "message"),
    [
        ([], {}, ValueError, "at least one token"),
        ([5.0], {}, TypeError, "flat sequence of token ids, got list"),
        ("guess", {}, TypeError, "token ids, got str: tokenize it first"),
        ([5, 26], {}, ValueError, "token ids in 0..25, got 26"),
        ([-1, 5], {}, ValueError, "token ids in 0..25, got -1"),
        (
            [5],
            {"max_new_tokens": 0},
            ValueError,
            "max_new_tokens must be an integer in .1, .*got 0",
        ),
        *(
            ([5], {"stop": 7}, TypeError, f"{STOPS}, got 7."),
            ([5], {"stop": b"a"}, TypeError, STOPS),
        ),
        ([5], {"stop": ["a", 7]}, TypeError, f"{STOPS}, got 7 in it."),
        ([5], {"stop": ""}, ValueError, "stop must hold no empty string"),
        ([5], {"stop": ["a", ""]}, ValueError, "stop must hold no empty string"),
        ([5] * 1020, {"max_new_tokens": 5}, ValueError, "1020 tokens and max_new_tokens=5 exceed"),
        ([5] * 1024, {}, ValueError, "1024 tokens and .* exceed .*1024"),
        ([5], {"temperature": -1.0}, ValueError, "temperature must be a number in .0, .*got -1.0"),
        ([5], {"top_p": "all"}, TypeError, "top_p must be a number, got 'all'"),
        ([5], {"top_k": -5}, ValueError, "top_k must be an integer in .*, got -5"),
    ],
)
def test_a_bad_request_is_refused_by_name(engine, prompt, kwargs, error, message):
    with pytest.raises(error, match=message):
        generate_all(engine, [prompt], **kwargs)


EXTREMES = [
    ("temperature", [-1, 5e-324, 1e-46, 1e6, 1e39, 10**400, math.inf, math.nan, True, "1", [1]]),
    ("top_k", [-2, -1, 10**6, 2**31, 10**30, -(10**30), 1.5, math.inf, True, "1"]),
    ("top_p", [5e-324, 1e-46, 1 - 1e-16, 0, -1, 1.1, 10**400, math.nan, True, "1"]),
    ("min_p", [0, 5e-324, 1, 1.1, -1, 10**400, math.nan, True, "1"]),
    ("max_new_tokens", [0, -1, 10**30, 1.5, math.nan, True, "1"]),
    ("stop", ["", [""], 1, [1], [None], {"a": 1}, b"a", ["x"] * 10**4, "x" * 10**4, "\ud800"]),
    ("seed", [10**30, -(2**63), 2**63 - 1, 0.5, math.nan, True, "1"]),
    ("presence_penalty", [-2.1, math.inf, math.nan, "1", True]),
    ("frequency_penalty", [2.1, math.inf, math.nan, "1", True]),
    ("repetition_penalty", [0, -1, math.inf, math.nan, "1", True]),
    ("logit_bias", [7, [5], "5", math.nan]),
    ("n", [0, 2, 10**9, -1, math.nan, "1"]),
]


@pytest.mark.parametrize(("name", "values"), EXTREMES, ids=[name for name, _ in EXTREMES])
async def test_an_extreme_parameter_is_refused_by_name_or_obeyed_and_hurts_no_other(
    kit, engine, name, values
):
    others = [asyncio.ensure_future(engine.generate(prompt)) for prompt in prompts(4)]
    bad = [engine.generate([5, 6], **{name: value}) for value in values]
    found = await asyncio.gather(*bad, return_exceptions=True)
    others, found = await asyncio.gather(*others), found
    assert_all_sampled(kit, prompts(4), others)
    for value, outcome in zip(values, found, strict=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, (TypeError, ValueError)), (value, outcome)
            assert name in str(outcome)
        else:
            assert all(log_prob <= 0 for log_prob in outcome.log_probs)
    assert any(isinstance(outcome, (TypeError, ValueError)) for outcome in found)


def test_a_bad_size_is_refused_by_name(kit):
    with pytest.raises(ValueError, match="max_new_tokens must be positive, got 0"):
        kit.make(max_new_tokens=0)


async def test_requests_that_are_cancelled_hurt_no_other(kit, engine):
    requests = prompts(20)
    tasks = started(engine, requests)
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for i, (prompt, answer) in enumerate(zip(requests, answers, strict=True)):
        if i % 3 == 0:
            assert isinstance(answer, asyncio.CancelledError)
        else:
            assert_sampled(kit, prompt, answer)


def test_event_loops_of_several_threads_share_an_engine(kit, engine):
    requests = prompts(10)
    for wait in [in_thread(generate_all, engine, requests) for _ in range(3)]:
        assert_all_sampled(kit, requests, wait())


def test_an_update_is_counted_and_what_is_sampled_next_is_stamped_with_it(kit, engine):
    requests = prompts(6, length=40)  # a prefix that was computed under the old weights would show
    assert {v for answer in generate_all(engine, requests) for v in answer.versions} == {0}
    assert engine.update_weights(kit.source) == engine.version == 1
    kit.assert_updated()
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        assert set(answer.versions) == {1}
        assert_sampled(kit, prompt, answer)


def test_an_update_that_is_refused_is_not_counted(kit, model):
    if isinstance(kit, OnServer):
        engine = CompletionsEngine(kit.server.url, "tiny", kit.tokenizer)
        with pytest.raises(NotImplementedError, match="pass on_update="):
            engine.update_weights("checkpoint-1")
    else:
        engine = kit.make()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        good = {name: value + 1 for name, value in before.items()}
        last = "model.norm.weight"
        with pytest.raises(ValueError, match="1 missing"):
            engine.update_weights({name: good[name] for name in good if name != last})
        with pytest.raises(ValueError, match="must have shape"):
            engine.update_weights({**good, last: torch.zeros(3)})
        with pytest.raises(TypeError, match="source must be a model, a state dict or"):
            engine.update_weights(3)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert engine.version == 0


@pytest.mark.parametrize("inside", [True, False])
def test_closing_fails_what_is_under_way_and_leaves_nothing(kit, inside):
    engine, begun = kit.make_slow()

    async def run():
        tasks = started(engine, prompts(8))
        await until(begun)
        if inside:
            engine.close()
        else:
            await asyncio.to_thread(engine.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    assert {str(result) for result in results} == {"the engine is closed: make a new one."}
    assert all(isinstance(result, RuntimeError) for result in results)
    assert not [thread for thread in threading.enumerate() if thread.name in THREADS]
    if isinstance(kit, OnServer):
        wait_until(lambda: kit.server.open == 0)
    else:
        assert kit.passes < 500
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        generate_all(engine, prompts(1))
    with pytest.raises(RuntimeError, match="closed"):
        engine.update_weights(kit.source)
    assert engine.version == 0


def test_an_engine_that_is_forgotten_leaves_nothing(kit):
    engine = kit.make()
    generate_all(engine, prompts(2))
    threads = [thread for thread in threading.enumerate() if thread.name in THREADS]
    del engine
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if isinstance(kit, OnServer):
        wait_until(lambda: kit.server.open == 0)


def test_a_collector_plays_whole_games_with_it(kit, engine):
    collector = MultiTurnCollector(
        GuessNumber(16, turns=3),
        engine,
        episodes_per_batch=8,
        limits=Limits(max_turns=3),
        sampling={"temperature": 0.5},
    )
    with collector:
        batch = next(iter(collector))
    assert len(set(batch["collector", "traj_ids"].tolist())) == 8
    assert set(batch["sampling", "temperature"].tolist()) == {0.5}
    for turn in batch.unbind(0):
        tokens, log_probs = turn["tokens", "response"], turn["log_probs", "response"]
        answer = Completion(tokens.tolist(), log_probs.tolist(), tokens.tolist(), "stop")
        assert_sampled(kit, turn["tokens", "prompt"].tolist(), answer, kit.own_temperature or 0.5)
