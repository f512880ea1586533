from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from email.utils import formatdate
from functools import partial
from pathlib import Path

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer

from tests.engines.completions_server import (
    STOP,
    VOCABULARY,
    CompletionsServer,
    completion,
    sampled,
)
from tests.engines.helpers import ask, completions, edited, generate_all, outcomes
from tests.faulty_server import half, running, silent, status, success
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.chat.encoding import decode as decode_with
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.engines.completions.api import max_model_len
from torchrl_mt.engines.completions.engine import CompletionsError
from torchrl_mt.engines.stop_strings import find_stop
from torchrl_mt.envs import GuessNumber

httpx = pytest.importorskip("httpx")
pytest.importorskip("tenacity")


@pytest.fixture
def server():
    with running(CompletionsServer()) as server:
        yield server


@pytest.fixture
def make(server, tokenizer):
    def make(base_url=None, **kwargs):
        return completions(base_url or server.url, tokenizer, **{"max_new_tokens": 256, **kwargs})

    return make


@pytest.fixture
def engine(make):
    return make()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 26) for _ in range(rng.randint(1, 9))] for _ in range(count)]


# Answers


def test_answers_are_what_the_server_sampled(engine, server):
    requests = prompts(100)
    answers = generate_all(engine, requests, max_new_tokens=6)
    for prompt, answer in zip(requests, answers, strict=True):
        tokens, log_probs, reason = sampled(prompt, 6)
        assert answer.token_ids == tokens
        assert answer.log_probs == log_probs
        assert answer.finish_reason == reason
        assert answer.versions == [0] * len(tokens)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert sorted(body["prompt"] for body in server.seen) == sorted(requests)


def test_a_request_says_what_it_must(make, server):
    engine = make(
        api_key="secret",
        temperature=0.5,
        extra_body={"top_p": 0.9},
        max_new_tokens=7,
        logprobs_mode="processed_logprobs",
    )
    ask(engine, [5, 6], seed=3)
    assert server.seen == [
        {
            "model": "tiny",
            "prompt": [5, 6],
            "max_tokens": 7,
            "temperature": 0.5,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "top_p": 0.9,
            "seed": 3,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(engine)


def choice_of(answer):
    return answer["choices"][0]


def only_names(answer):
    del choice_of(answer)["token_ids"]


def only_ids(answer):
    choice_of(answer)["logprobs"]["tokens"] = ["guess"] * len(choice_of(answer)["token_ids"])


def one_odd_name(answer):
    choice_of(answer)["logprobs"]["tokens"][-1] = "token_id:"


@pytest.mark.parametrize("change", [only_names, only_ids, one_odd_name])
def test_token_ids_are_taken_from_either_field(engine, server, change):
    server.change = lambda answer: change(answer) or answer
    assert ask(engine).token_ids == sampled([5, 6], 256)[0]


def test_a_stop_that_is_not_among_the_token_ids_is_not_made_up(engine, server):
    def change(answer):
        choice = choice_of(answer)
        for values in (choice["token_ids"], *list(choice["logprobs"].values())[:2]):
            del values[-1]
        return answer

    server.change = change
    answer = ask(engine)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == sampled([5, 6], 256)[0][:-1]


@pytest.mark.parametrize(
    ("named", "expected", "ends"),
    [
        ({"stop_reason": " guess"}, " guess", False),  # vLLM: a string
        ({"stop_reason": 7}, None, True),  # a stop token
        ({"stop_reason": None}, "guess", False),  # an end-of-sequence token, but there is none
        ({"matched_stop": "guess"}, "guess", False),  # SGLang
        ({"matched_stop": 7}, None, True),
        ({}, "guess", False),
        ({"stop_reason": None, "finish_reason": "length"}, None, False),
    ],
)
def test_a_stop_string_is_the_one_that_the_server_names_or_that_is_found(
    make, server, tokenizer, named, expected, ends
):
    def change(answer):
        choice = choice_of(answer)
        del choice["stop_reason"]
        choice |= {"finish_reason": "stop"} | named
        return answer

    server.decode, server.change = tokenizer.decode, change
    for engine, own in ((make(), {"stop": "guess"}), (make(extra_body={"stop": ["guess"]}), {})):
        answer = ask(engine, max_new_tokens=250, **own)
        assert server.seen[-1]["stop"] == ["guess"]
        assert answer.token_ids == sampled([5, 6], 250, ["guess"], tokenizer.decode)[0]
        assert answer.token_ids[-1] == tokenizer("guess")["input_ids"][0]
        assert answer.stop_string == expected
        assert answer.stop_token == (answer.token_ids[-1] if ends else None)
        ask(engine, stop=None)
        assert "stop" not in server.seen[-1]


def test_more_stop_strings_than_the_server_takes_end_an_answer_too(engine, server, tokenizer):
    server.decode = decode = partial(decode_with, tokenizer)
    vocabulary = [decode([token]) for token in range(4, VOCABULARY)]
    rng = random.Random(0)
    for k in range(60):
        prompt, count = [5, 4 + k % 20, k % 7], rng.randrange(5, 12)
        strings = rng.sample([text for text in vocabulary if text.strip()], count)
        answer = ask(engine, prompt, max_new_tokens=60, stop=strings)
        tokens, log_probs, reason = sampled(prompt, 60, strings, decode)
        assert len(server.seen[-1]["stop"]) <= 4
        assert (answer.token_ids, answer.log_probs) == (tokens, log_probs)
        assert answer.finish_reason == reason
        assert len(answer.versions) == len(tokens)
        ended = reason == "stop" and tokens[-1] != STOP
        assert answer.stop_string == (find_stop(decode(tokens), strings) if ended else None)
        assert answer.stop_string is not None or not ended


def test_an_end_of_sequence_token_is_no_stop_string(engine, server, tokenizer):
    end = tokenizer.eos_token
    server.change = set_in(["stop_reason"], None)
    answer = ask(engine, stop=[end])
    assert (answer.stop_string, answer.stop_token) == (None, tokenizer.eos_token_id)


def set_in(path, value):
    """A change of one field of an answer's choice; ``None`` as value is JSON's null."""
    return edited(["choices", 0, *path], value)


def of_length(size, token=5):
    """An answer of so many tokens."""
    logprobs = {"tokens": [f"token_id:{token}"] * size, "token_logprobs": [-1.0] * size}
    choice = {"finish_reason": "stop", "token_ids": [token] * size, "logprobs": logprobs}
    return lambda answer: {"choices": [choice]}


def with_score(score, at=0):
    def change(scores):
        scores[at] = score
        return scores

    return set_in(["logprobs", "token_logprobs"], change)


SCORES = ["logprobs", "token_logprobs"]
BROKEN = [
    (lambda answer: [], "must be a JSON object"),
    (lambda answer: {}, "choices must be a list of one completion, got None"),
    (lambda answer: {"choices": []}, "choices must be a list of one completion"),
    (lambda answer: {"choices": answer["choices"] * 2}, "choices must be a list of one completion"),
    (lambda answer: only_ids(answer) or only_names(answer) or answer, "text alone.*return_token_"),
    (of_length(0), "at least one sampled token"),
    (of_length(257), "at most max_tokens=256 tokens, got 257"),
    (set_in(["finish_reason"], None), "finish_reason must be .* got None"),
    (set_in(["finish_reason"], "content_filter"), "finish_reason must be .* 'content_filter'"),
    (set_in(["finish_reason"], "tool_calls"), "finish_reason must be .* got 'tool_calls'"),
    (set_in(["token_ids"], lambda ids: [2**40, *ids[1:]]), "must be those of|must be in 0"),
    (set_in(["token_ids"], ["5"]), "token_ids must be a list of token ids"),
    (set_in(["token_ids"], [True]), "token_ids must be a list of token ids"),
    (set_in(["token_ids"], lambda ids: [*ids[:-1], 25]), "be those of choices.0..logprobs.tokens"),
    (set_in(["prompt_token_ids"], [5]), "must be the 2 tokens that were sent, .5, 6., got .5."),
    (set_in(["logprobs"], None), "logprobs must be an object"),
    (set_in(SCORES, lambda scores: scores[:-1]), "token_logprobs must be a list of .* numbers"),
    (set_in(SCORES, None), "token_logprobs must be a list .* got None"),
    (with_score(None), r"token_logprobs\[0\] .* None"),
    (with_score("x"), "a log-probability, got 'x'"),
    (with_score(-9999.0), "a log-probability, got -9999.0"),
    (with_score(0.5, -1), "a log-probability, got 0.5"),
    (with_score(float("nan")), "a log-probability, got nan"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_an_answer_that_is_none_names_the_field(engine, server, change, message):
    server.change = change
    with pytest.raises(CompletionsError, match=message) as caught:
        ask(engine)
    assert isinstance(caught.value, RuntimeError)
    assert f"POST {server.url}/v1/completions failed after 1 attempt" in str(caught.value)
    assert len(server.seen) == 1


# Failures


@pytest.mark.parametrize(
    ("fault", "kwargs", "message", "cause"),
    [
        (status(500, "out of memory"), {}, "status 500: out of memory", None),
        (half, {}, "RemoteProtocolError: ", httpx.RemoteProtocolError),
        (silent, {"timeout": 0.1}, "no reply within 0.1 seconds", asyncio.TimeoutError),
    ],
)
def test_in_the_end_it_fails_and_says_why(make, server, fault, kwargs, message, cause):
    engine = make(max_retries=2, **kwargs)
    server.faults = [fault] * 3
    with pytest.raises(CompletionsError, match=f"failed after 3 attempts: {message}") as caught:
        ask(engine)
    assert (caught.value.url, caught.value.attempts) == (f"{server.url}/v1/completions", 3)
    assert cause is None or isinstance(caught.value.__cause__, cause)
    assert len(server.seen) == 3


@pytest.mark.parametrize("data", [b"<html>", b"", b'{"choices": [', b"\xff\xfe"])
def test_garbage_is_no_answer(engine, server, data):
    server.faults = [success(data)]
    with pytest.raises(CompletionsError, match="the reply is no JSON"):
        ask(engine)


def test_a_server_is_left_alone_for_as_long_as_it_asks(engine, server):
    server.faults = [status(429, Retry_After="0.4"), status(503, Retry_After="nonsense")]
    ask(engine)
    assert server.times[1] - server.times[0] >= 0.4
    begin = int(time.time()) + 2  # dates have whole seconds
    server.faults = [status(503, Retry_After=formatdate(begin, usegmt=True))]
    ask(engine)
    assert time.time() >= begin


def test_pauses_grow(make, server):
    engine = make(backoff=0.1, max_retries=3)
    server.faults = [status(500)] * 3
    ask(engine)
    pauses = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    for pause, least in zip(pauses, (0.05, 0.1, 0.2), strict=True):
        assert pause >= least


def test_one_failure_is_nobody_elses(make, server):
    server.faults = [status(500)] * 7
    results = outcomes(make(max_retries=0), prompts(40))
    assert sum(isinstance(result, CompletionsError) for result in results) == 7


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_asked_for_again(make, server, reason):
    engine = make(max_retries=2)
    left = [reason, reason]
    server.change = lambda answer: set_in(["finish_reason"], left.pop())(answer) if left else answer
    assert ask(engine).token_ids == sampled([5, 6], 256)[0]
    assert len(server.seen) == 3
    left += [reason] * 3
    message = f"after 3 attempts: .*gave its reply up: finish_reason '{reason}'"
    with pytest.raises(CompletionsError, match=message):
        ask(engine)


def test_tokens_of_another_model_are_refused(make, server):
    server.change = of_length(1, token=26)
    with pytest.raises(CompletionsError, match=r"must be in 0..25, got 26"):
        ask(make(vocab_size=26))
    assert ask(make()).token_ids == [26]


# What was sampled from


@pytest.mark.parametrize("per_call", [False, True])
@pytest.mark.parametrize(
    ("asked", "record"),
    [
        ({}, {}),
        ({"temperature": 1, "top_k": 0, "top_p": 1.0, "seed": 3}, {}),
        ({"temperature": 0.2, "top_p": 0.1}, {"temperature": 0.2, "top_p": 0.1}),
        ({"top_k": 5, "min_p": 0.2}, {"top_k": 5, "min_p": 0.2}),
        ({"temperature": 0, "top_k": 5}, {"temperature": 0}),
        ({"logit_bias": {"3": 9}}, {"logit_bias": {"3": 9}}),
    ],
)
def test_a_completion_says_what_it_was_sampled_from(make, server, asked, record, per_call):
    engine = make(extra_body={} if per_call else asked, logprobs_mode="processed_logprobs")
    answer = ask(engine, **(asked if per_call else {}))
    assert answer.sampling == record
    plain = {"temperature": 1, "top_k": -1, "top_p": 1}
    own = {name: asked[name] or plain[name] * (name == "top_k") for name in plain & asked.keys()}
    assert {name: server.seen[0][name] for name in plain} == plain | own


@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"seed": 3}])
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *((None, kind) for kind in ("raw", "processed", "refuses")),
        *((f"{kind}_logprobs", kind) for kind in ("raw", "processed")),
    ],
)
def test_what_log_probs_are_of_is_given_or_told_by_one_probe_and_said_once(
    make, server, caplog, mode, kind, asked
):
    def answer(path, body):
        sure = body["top_k"] == 1 or body["temperature"] < 0.1
        if sure and kind == "refuses":
            return 400, {"error": {"message": "no"}}
        said = completion(body)
        if sure and kind == "processed":
            set_in(SCORES, [0.0] * len(choice_of(said)["token_ids"]))(said)
        return 200, said

    server.answer = answer
    engine = make(logprobs_mode=mode)
    assert ask(engine).sampling == {}
    assert not caplog.records
    plain = asked.keys() == {"seed"}
    record = {} if plain else asked
    marked = {"logprobs_mode": "raw_logprobs"} if kind == "raw" and not plain else {}
    answers = [*generate_all(engine, prompts(5), **asked), ask(engine, **asked)]
    assert [answer.sampling for answer in answers] == [{**record, **marked}] * 6
    assert len(server.seen) == 7 + (mode is None and not plain)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    truncated = [text for text in said if f"{record} is truncated" in text]
    assert len(truncated) == (kind != "raw" and bool(record.keys() & {"top_p", "top_k"}))
    doubts = {
        "raw": "are not those of what was sampled from",
        "refuses": "must be those of what is",
    }
    found = [doubts[kind] in text for text in said if text not in truncated]
    assert found == [True] * (kind != "processed" and not plain)


# The server: how much it takes, when it comes, and when the engine goes


@pytest.mark.parametrize("where", ["property", "generate", "collector"])
def test_how_many_tokens_the_model_takes_is_asked_of_the_server(make, server, where):
    others = {"id": "other", "max_model_len": 3}
    server.models = {"data": [others, {"id": "tiny", "max_model_len": 8}]}
    engine = make(max_new_tokens=100)
    if where == "generate":
        with pytest.raises(ValueError, match="max_total_tokens=8"):
            ask(engine, [5] * 8)
    elif where == "collector":
        game = GuessNumber(16, turns=4)
        with MultiTurnCollector(game, engine, episodes_per_batch=2) as collector:
            batch = next(iter(collector))
        lengths = [len(x) for x in batch.get(("tokens", "prompt"), as_list=True)]
        sizes = [len(x) for x in batch.get(("tokens", "response"), as_list=True)]
        assert max(map(sum, zip(lengths, sizes, strict=True))) <= 8
    assert engine.max_total_tokens == 8
    assert make(max_total_tokens=5).max_total_tokens == 5
    assert server.asked_for_models == 1


def test_an_adapter_has_the_limit_of_its_base_model():
    base = {"id": "base", "max_model_len": 8, "parent": None}
    adapter = {"id": "policy", "max_model_len": None, "parent": "base"}
    other = {"id": "other", "max_model_len": 9}
    assert max_model_len({"data": [other, base, adapter]}, "policy") == 8
    assert max_model_len({"data": [base]}, "policy") == 8  # before it is loaded
    assert max_model_len({"data": [other, base]}, "policy") is None
    assert max_model_len({"data": [base, {**adapter, "parent": None}]}, "policy") is None


@pytest.mark.parametrize("models", [None, {}, {"data": [{"id": "tiny"}]}, b"<html>", {"data": 3}])
def test_a_server_that_does_not_say_takes_what_it_takes(make, server, models):
    server.models = models
    engine = make()
    assert ask(engine, [5] * 50).token_ids
    assert engine.max_total_tokens is None


async def test_requests_wait_for_a_server_that_starts_and_starts_again(
    make, monkeypatch, tokenizer
):
    monkeypatch.setattr("torchrl_mt.http_client._AWAY_PAUSE", 0.02)
    monkeypatch.setattr("torchrl_mt.engines.completions.model_limit._AWAY_PAUSE", 0.02)
    with running(CompletionsServer()) as first:
        port = first.server_port
    engine = make(f"http://127.0.0.1:{port}", wait_ready=PATIENCE, max_retries=0)
    for _ in range(2):
        asked = [asyncio.ensure_future(engine.generate(prompt)) for prompt in prompts(5)]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in asked)
        with running(CompletionsServer(port)) as server:
            server.models = {"data": [{"id": "tiny", "max_model_len": 99}]}
            server.faults = [status(503), status(502, Retry_After="9999")]
            await asyncio.gather(*asked)
    assert engine.max_total_tokens == 99


def test_a_server_that_never_comes_is_waited_for_so_long(make):
    with running(CompletionsServer()) as server:
        port = server.server_port
    engine = make(f"http://127.0.0.1:{port}", wait_ready=0.1, max_retries=0)
    with pytest.raises(CompletionsError, match="failed after 1 attempt: ConnectError") as caught:
        ask(engine)
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_a_field_that_is_none_is_left_to_the_server(make, server):
    ask(make(extra_body={"top_k": None, "min_p": None}), repetition_penalty=None)
    assert not server.seen[0].keys() & {"top_k", "min_p", "repetition_penalty"}


# Connections and loops


def sockets() -> int:
    """How many sockets this process holds."""
    fds = Path("/proc/self/fd")
    if not fds.exists():
        pytest.skip("needs /proc")
    found = 0
    for fd in os.listdir(fds):
        try:
            found += os.readlink(fds / fd).startswith("socket:")
        except OSError:
            continue
    return found


# Weights


@pytest.mark.parametrize("asynchronous", [False, True])
def test_updates_are_handed_on_and_counted(make, asynchronous):
    got = []

    async def later(source):
        await asyncio.sleep(0.01)
        got.append(source)

    engine = make(on_update=later if asynchronous else got.append)
    assert engine.update_weights("checkpoint-1") == engine.version == 1
    assert got == ["checkpoint-1"]
    assert set(ask(engine).versions) == {1}

    async def run():  # where a loop is running already
        return engine.update_weights("checkpoint-2")

    assert asyncio.run(run()) == 2


def test_an_update_that_fails_is_not_counted(make):
    def fail(source):
        raise OSError("disk full")

    engine = make(on_update=fail)
    with pytest.raises(OSError, match="disk full"):
        engine.update_weights()
    assert engine.version == 0


async def test_an_answer_never_claims_newer_weights_than_it_began_with(make, server):
    engine = make(on_update=lambda source: None)
    reached = threading.Event()

    def slow(handler):
        reached.set()
        wait_until(lambda: engine.version == 1)
        handler.send(500, {})

    def during(answer):
        if engine.version == 1:
            engine.update_weights()
        return answer

    server.faults, server.change = [slow], during
    task = asyncio.create_task(engine.generate([5, 6]))
    await asyncio.to_thread(reached.wait, PATIENCE)
    engine.update_weights()
    found = await task
    assert set(found.versions) == {1}
    assert engine.version == 2


@pytest.mark.parametrize(("said", "expected"), [(7, 7), ("7", 7), ("default", None), (None, None)])
def test_a_server_that_says_its_version_is_believed(make, server, said, expected):
    engine = make(version_key="metadata.weight_version")
    server.change = lambda answer: {**answer, "metadata": {"weight_version": said}}
    if expected is None:
        with pytest.raises(CompletionsError, match=r"weight_version \(version_key\) must be"):
            ask(engine)
    else:
        assert set(ask(engine).versions) == {expected}


def test_a_server_may_say_the_version_of_every_token(make, server):
    server.change = lambda answer: set_in(["versions"], [3, 4])(of_length(2)(answer))
    assert ask(make(version_key="versions")).versions == [3, 4]
    server.change = lambda answer: set_in(["versions"], [3])(of_length(2)(answer))
    with pytest.raises(CompletionsError, match="one for each of 2 tokens"):
        ask(make(version_key="versions"))


# Refusals and the rest


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"stream": True}, ValueError, r"that the engine sets, got \['stream'\]"),
        ({"stop_token_ids": {3}}, TypeError, "must be fit for JSON: .*set"),
    ],
)
def test_bad_requests_are_refused(engine, server, kwargs, error, message):
    with pytest.raises(error, match=message):
        ask(engine, **kwargs)
    assert not server.seen


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"timeout": 0}, "timeout must be positive, got 0"),
        ({"max_retries": -1}, "max_retries must not be negative, got -1"),
        ({"max_connections": 0}, "max_connections must be positive"),
        ({"extra_body": {"n": 2}}, r"extra_body must leave out .* got \['n'\]"),
        ({"extra_body": {"top_k": -5}}, "top_k must be an integer in"),
        ({"extra_body": {"stop": ""}}, "stop must hold no empty string"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
        ({"logprobs_mode": "raw"}, "logprobs_mode must be .* got 'raw'"),
        ({"base_url": "localhost:8000"}, "base_url must begin with http"),
        ({"base_url": ["http://a", "http://a/v1"]}, "at least one server, each once"),
        ({"base_url": ["http://a", "http://a/v1/completions"]}, "at least one server, each once"),
        ({"base_url": ["http://a/", "http://a"]}, "at least one server, each once"),
        ({"base_url": ["http://a", 3]}, "must be a string or a list of strings, got 3"),
        ({"api": "tgi"}, "api must be.*openai.*got 'tgi'"),
        ({"api": "vllm", "image_api": "sglang"}, "image_api must be None or api='vllm', got 'sgl"),
    ],
)
def test_bad_engines_are_refused(make, kwargs, message):
    with pytest.raises(TypeError if "got 3" in message else ValueError, match=message):
        make(**kwargs)


@pytest.mark.parametrize("how", ["shutdown", "async_shutdown"])
def test_no_socket_is_left_when_a_collector_ends_with_requests_under_way(make, server, how):
    gc.collect()
    before, threads = sockets(), set(threading.enumerate())
    server.faults = [silent] * 1000
    collector = MultiTurnCollector(
        GuessNumber(16, turns=3),
        engine := make(timeout=600.0),
        episodes_per_batch=8,
        max_concurrency=8,
        replay_buffer=ReplayBuffer(storage=LazyStackStorage(100)),
    )
    collector.start()
    wait_until(lambda: len(server.seen) == 8)
    assert server.open == 8
    getattr(collector, how)()
    wait_until(lambda: server.open == 0)
    wait_until(lambda: sockets() == before)
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert not engine._client._by_loop
