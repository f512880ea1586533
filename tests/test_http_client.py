from __future__ import annotations

import asyncio
import pickle
import sys
from contextlib import closing

import numpy as np
import pytest

from tests.engines.completions_server import CompletionsServer
from tests.faulty_server import after, dripping, half, nothing, running, silent, status, success
from tests.idle_clock import LIMIT, Loop
from tests.refusals import check_refused, refused
from tests.tiers import slow
from tests.waiting import PATIENCE, in_thread, until, wait_until
from torchrl_mt.http_client import HttpClient, HttpError, TryAgainError

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server():
    with running(CompletionsServer()) as server:
        yield server


def client(server, **kwargs):
    return HttpClient(server.url + PATH, **{"backoff": 0.01, "timeout": PATIENCE, **kwargs})


def ask(client, body=BODY, parse=lambda answer: answer, **kwargs):
    return asyncio.run(client.post(body, parse, **kwargs))


def test_an_answer_is_what_was_made_of_it(server):
    assert ask(client(server), parse=lambda answer: answer["model"]) == "tiny"
    assert server.seen == [BODY]
    assert server.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("fault", [dripping, silent])
def test_an_attempt_has_a_limit_in_all_and_hangs_up(server, fault):
    with closing(Loop()) as loop:
        server.faults = [after(loop.jump, fault)] * 2
        asked = client(server, timeout=LIMIT, max_retries=1)
        with pytest.raises(HttpError, match=f"2 attempts: no reply within {LIMIT}") as caught:
            loop.run_until_complete(asked.post(BODY, dict))
    assert isinstance(caught.value.__cause__, asyncio.TimeoutError)
    assert server.disconnected.wait(PATIENCE)
    wait_until(lambda: server.open == 0)


def test_waiting_for_a_connection_is_not_the_attempts_time(server):
    """Forty requests through one connection, each of which takes half its time."""
    asked = client(server, timeout=LIMIT, max_retries=0, max_connections=1)

    async def run():
        return await asyncio.gather(*(asked.post(BODY, dict) for _ in range(40)))

    with closing(Loop()) as loop:
        server.faults = [after(lambda: loop.jump(LIMIT / 2), success({}))] * 40
        assert loop.run_until_complete(run()) == [{}] * 40
    assert server.most_open == 1


async def test_a_pause_keeps_no_connection_from_others(server):
    server.faults = [status(503, Retry_After=str(PATIENCE))]
    asked = client(server, max_connections=1)
    first = asyncio.create_task(asked.post(BODY, dict))
    await until(lambda: server.seen)
    await asyncio.gather(*(asked.post(BODY, dict) for _ in range(5)))
    assert not first.done()
    first.cancel()


@pytest.mark.parametrize("count", [100, slow(1000)])
def test_many_requests_at_once_share_the_connections(server, count):
    asked = client(server, max_connections=16)

    async def run():
        posts = (asked.post({**BODY, "prompt": [i]}, lambda a: a["model"]) for i in range(count))
        tasks = [asyncio.create_task(post) for post in posts]
        await asyncio.sleep(0.05)
        for task in tasks[::10]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(run())
    assert sum(answer == "tiny" for answer in got) >= 0.9 * count
    for i, answer in enumerate(got):
        assert answer == "tiny" or (isinstance(answer, asyncio.CancelledError) and i % 10 == 0)
    assert server.most_open <= 16
    wait_until(lambda: server.open == 0)
    assert not asked._by_loop


def again(left):
    def parse(answer):
        if left:
            raise TryAgainError(left.pop())
        return "done"

    return parse


def test_an_answer_may_ask_to_be_asked_for_again(server):
    assert ask(client(server), parse=again(["busy", "busy"])) == "done"
    assert len(server.seen) == 3
    with pytest.raises(HttpError, match="failed after 4 attempts: busy"):
        ask(client(server), parse=again(["busy"] * 9))


def raising(error):
    def parse(answer):
        raise error

    return parse


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (raising(ValueError("no score")), "no score"),
        (raising(RecursionError("maximum recursion depth exceeded")), "maximum recursion depth"),
        (lambda answer: answer["rewards"], ".* lacks .*KeyError.'rewards'"),
        (lambda answer: answer + 1, ".* lacks .*TypeError"),
    ],
)
def test_an_answer_of_no_use_is_a_failure(server, parse, message):
    with pytest.raises(HttpError, match=f"failed after 1 attempt: {message}"):
        ask(client(server), parse=parse)
    assert len(server.seen) == 1


@pytest.mark.parametrize("code", [301, 400, 401, 404, 422])
def test_a_refusal_is_final(server, code):
    server.faults = [status(code, "never")]
    with pytest.raises(HttpError, match=f"failed after 1 attempt: status {code}: never"):
        ask(client(server))
    assert len(server.seen) == 1


@pytest.mark.parametrize("code", [408, 425, 429, 500, 503])
def test_what_may_pass_is_tried_again(server, code):
    server.faults = [status(code), nothing, half]
    assert ask(client(server))["model"] == "tiny"
    assert server.seen == [BODY] * 4


NO_TIMES = ["nan", "-3", "soon", "", "Mon, 99 Foo 2020 00:00:00 GMT"]
NO_TIMES += ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT"]
NO_TIMES += ["Mon, 01 Jan 2020 00:00:00 +9999999999999999999"]


@pytest.mark.parametrize("header", NO_TIMES)
def test_a_retry_after_that_says_nothing_is_none(server, header):
    server.faults = [status(429, Retry_After=header)]
    assert ask(client(server))["model"] == "tiny"


@pytest.mark.parametrize("header", ["3600", "inf", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_retry_after_that_is_too_long_is_final(server, header):
    server.faults = [status(429, Retry_After=header)]
    seconds = r"\d+" if "Jan" in header else header
    text = rf"1 attempt: status 429: .*asks to wait {seconds} seconds"
    with pytest.raises(HttpError, match=text):
        ask(client(server))


@pytest.mark.parametrize("code", [200, 400, 503])
@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"error": ' * 50_000, b"[" * 900 + b"]" * 900])
def test_an_answer_that_is_nested_too_deep_is_a_failure(server, code, deep):
    def parse(answer):
        raise ValueError(str(answer))

    server.faults = [lambda handler: handler.send(code, deep)] * 2
    with pytest.raises(HttpError, match=r"failed after \d attempts?: "):
        ask(client(server, max_retries=1), parse=parse)


class MineError(HttpError):
    """A caller's own."""


def test_errors_are_of_the_kind_that_is_asked_for(server):
    server.faults = [status(400, "bad")]
    with pytest.raises(MineError) as caught:
        ask(client(server, error=MineError))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (MineError, str(caught.value))


async def test_closing_names_what_is_closed(server):
    server.faults = [silent] * 3
    asked = client(server, name="reward server")
    tasks = [asyncio.create_task(asked.post(BODY, dict)) for _ in range(3)]
    await until(lambda: len(server.seen) == 3)
    await asyncio.to_thread(asked.close)
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        assert str(failure) == "the reward server is closed: make a new one."
    await until(lambda: server.open == 0)
    assert asked.closed


async def test_a_request_that_is_cancelled_twice_leaves_no_socket(server):
    server.faults = [silent]
    asked = client(server)
    task = asyncio.create_task(asked.post(BODY, dict))
    await until(lambda: server.seen)
    await asyncio.gather(*(asked.post(BODY, dict) for _ in range(5)))
    assert server.open > 2
    for _ in range(20):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await until(lambda: not server.open)
    assert not asked._by_loop


def test_a_client_serves_several_loops_at_once(server):
    asked = client(server, max_connections=2)

    async def run():
        return await asyncio.gather(*(asked.post(BODY, dict) for _ in range(20)))

    results = [in_thread(asyncio.run, run()) for _ in range(3)]
    assert [len(result()) for result in results] == [20] * 3
    assert server.most_open <= 6


ADDRESS = "url must begin with http…a host and…a port up to 65535"
BAD_ADDRESSES = ["localhost:80", "http://127.0.0.1:99999/score", "http://127.0.0.1:-1"]
BAD_ADDRESSES += ["http://127.0.0.1:port", "http://[::1/", "http:///score", "https://"]
BAD_ADDRESSES += ["http://:80/score", "http://a\nb/"]
NAMES = ("timeout", "max_connections", "max_retries", "backoff")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("timeout must be positive, got 0", HttpClient, "http://a", timeout=0),
        refused("max_connections must be positive", HttpClient, "http://a", max_connections=0),
        refused("max_retries must not be negative, got -1", HttpClient, "http://a", max_retries=-1),
        refused("backoff must not be negative", HttpClient, "http://a", backoff=-1),
        *(
            refused(
                f"{name} must be a number, got None",
                *(HttpClient, "http://a"),
                error=TypeError,
                **{name: None},
            )
            for name in NAMES
        ),
        *(refused(ADDRESS, HttpClient, url) for url in BAD_ADDRESSES),
    ],
)
def test_bad_clients_are_refused(call, error, text):
    check_refused(call, error, text)


def test_addresses_and_numbers_of_every_kind_are_taken():
    for url in ("http://[::1]:80/", "https://user:word@host.example/a?b=c", "http://h:1"):
        assert HttpClient(url).url == url
    for name in NAMES:
        HttpClient("http://localhost", **{name: np.float32(3)})


@pytest.mark.parametrize("missing", ["httpx", "tenacity"])
def test_what_is_not_installed_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=f"{missing}: pip install .torchrl-mt.server"):
        HttpClient("http://localhost")


@pytest.mark.parametrize("body", [{"prompt": {3}}, {"prompt": float("nan")}])
def test_what_json_cannot_say_is_not_sent(server, body):
    with pytest.raises(TypeError, match="must be fit for JSON"):
        ask(client(server), body)
    assert not server.seen


async def test_a_request_that_is_cancelled_while_it_hangs_up_leaves_no_socket(server):
    asked = client(server)
    tasks = [asyncio.create_task(asked.post(BODY, dict)) for _ in range(5)]
    while asked._by_loop or not server.seen:  # the last one has gone, and hangs up
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not server.open)
