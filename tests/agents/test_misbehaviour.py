"""A thousand episodes, of which a third misbehave in every way we know, and nothing of which leaks."""

from __future__ import annotations

import asyncio
import gc
import http.client
import itertools
import json
import socket
import sys
import threading
from collections import Counter, deque
from typing import Any, ClassVar
from urllib.parse import urlsplit

import psutil
import pytest

pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.collectors.runs import beside, collecting
from tests.idle_clock import LIMIT, Loop
from tests.tiers import slow
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits
from torchrl_mt.engines import Completion
from torchrl_mt.testing import tiny_chat_tokenizer

from .helpers import user

MAX_TURNS = 5
SLOW = "slow"
"""A prompt with this word is answered never."""

EXPECTED = {
    "raises": "KeyError",
    "exits": "SystemExit",
    "sends garbage": "accepted",
    "has a wrong key": "PermissionError",
    "disconnects in a stream": "accepted",
    "abandons a call": "accepted",
    "returns text": "TypeError",
    "returns no finite number": "ValueError",
    "returns ids of others": "ValueError",
    "asks beyond the limits": "accepted",
    "deals with the limits": "accepted",
    "has a key that has ended": "accepted",
    "repeats its calls": "accepted",
    "declines": "declined",
    "asks nothing": "ValueError",
}
"""What becomes of the episodes that misbehave; those that hang are rejected for their time."""


class Engine:
    """Answers with the number of the episode, which is in its prompt, and numbers its calls."""

    def __init__(self, numbers):
        words = [*numbers, SLOW, "one", "two"]
        self.tokenizer = tiny_chat_tokenizer(words)
        self.numbers = {self.tokenizer(word)["input_ids"][0]: word for word in numbers}
        self.slow = self.tokenizer(SLOW)["input_ids"][0]
        self.version = self.waiting = 0
        self.calls = []

    async def generate(self, prompt_ids, *, max_new_tokens=None, **sampling):
        prompt = list(prompt_ids)
        await asyncio.sleep(0)
        if self.slow in prompt:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        ids = [next(i for i in prompt if i in self.numbers), self.tokenizer.eos_token_id]
        log_probs = [-float(len(self.calls)), -0.5]
        self.calls.append((prompt, Completion(ids, log_probs, [self.version] * 2, "stop")))
        return self.calls[-1][1]

    def update_weights(self, source):
        raise AssertionError

    def close(self):
        pass


def raw_request(base_url, key, body):
    content = json.dumps(body).encode()
    head = f"POST {urlsplit(base_url).path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


class Script:
    """What an agent does, as a generator of requests that is sent the responses.

    Requests are ``(content, headers)`` to send, ``(bytes,)`` to send raw and leave, or ``"hang"``.
    """

    ended: ClassVar[deque[Any]] = deque(maxlen=200)
    lock = threading.Lock()
    num_over = 0
    """Number of episodes that are over, of those that do not hang."""

    def play(self, data, base_url, key, session):
        try:
            return (yield from self.play_on(data, base_url, key, session))
        finally:
            if data["kind"] != "hangs":
                with self.lock:
                    Script.num_over += 1

    def play_on(self, data, base_url, key, session):
        word, kind = data["word"], data["kind"]
        self.ended.append(session)
        if kind == "hangs":
            return (yield "hang")
        if kind == "asks nothing":
            return 1.0
        if kind == "sends garbage":
            for content in (b"{", b"\xff", b'{"messages":[{"role":3}]}', b'{"messages":NaN}'):
                status, body = yield content, {}
                assert status == 400, body
            yield (b"\x00" * 10,)
        if kind == "has a wrong key":
            forged = f"{key[:-1]}{'0' if key[-1] != '0' else '1'}"
            status, _ = yield self.body(word), {"Authorization": f"Bearer {forged}"}
            if status == 401:
                raise PermissionError
        if kind == "has a key that has ended":
            for other in [session for session in self.ended if session.is_closed][:1]:
                status, body = yield self.body(word), {"Authorization": f"Bearer {other.api_key}"}
                assert status == 409, body
        if kind == "disconnects in a stream":
            body = {"messages": [user(f"{word} two")], "stream": True}
            yield (raw_request(base_url, key, body),)
        if kind == "abandons a call":
            yield (raw_request(base_url, key, {"messages": [user(f"{word} {SLOW}")]}),)
        messages, ids = [user(word)], []
        asks = 2 * MAX_TURNS if kind.endswith("limits") else 3
        for turn in range(asks):
            content = json.dumps({"messages": messages}).encode()
            status, body = yield content, {}
            if kind.endswith("limits") and status == 400:
                assert "max_turns" in body["error"]["message"]
                if kind == "deals with the limits":
                    return 0.5
                raise ValueError("the limits")
            assert status == 200, body
            ids.append(body["id"])
            if kind == "repeats its calls":
                status, again = yield content, {"x-stainless-retry-count": "1"}
                assert again == body
            if kind == "raises" and turn == 1:
                raise KeyError("answer")
            if kind == "exits":
                sys.exit(3)
            said = body["choices"][0]["message"]
            assert said["content"].split() == [word]
            messages += [{"role": "assistant", "content": said["content"]}, user("two")]
        return {
            "returns text": "good",
            "returns no finite number": float("nan"),
            "returns ids of others": {f"{ids[0]}x": 1.0},
            "declines": None,
        }.get(kind, dict.fromkeys(ids, 1.0))

    def body(self, word):
        return json.dumps({"messages": [user(word)]}).encode()


class InProcess(Script):
    """Plays in the event loop, without a socket but where it misbehaves on the wire."""

    async def run(self, data, *, base_url, api_key, http_client, session):
        play, sent = self.play(data, base_url, api_key, session), None
        try:
            while True:
                asked = play.send(sent)
                if asked == "hang":
                    await asyncio.Event().wait()
                elif len(asked) == 1:
                    where = urlsplit(base_url)
                    reader, writer = await asyncio.open_connection(where.hostname, where.port)
                    writer.write(asked[0])
                    if b"stream" in asked[0]:
                        await reader.readexactly(20)
                    writer.close()
                else:
                    content, headers = asked
                    reply = await http_client.post(
                        "/chat/completions", content=content, headers=headers
                    )
                    sent = reply.status_code, reply.json()
        except StopIteration as end:
            return end.value


class InAThread(Script):
    """Plays in a thread, over a socket."""

    def run(self, data, *, base_url, api_key, http_client, session):
        where = urlsplit(base_url)
        play, sent = self.play(data, base_url, api_key, session), None
        connection = http.client.HTTPConnection(where.hostname, where.port)
        try:
            while True:
                asked = play.send(sent)
                if asked == "hang":
                    asked = json.dumps({"messages": [user(f"{data['word']} {SLOW}")]}).encode(), {}
                if len(asked) == 1:
                    with socket.create_connection((where.hostname, where.port)) as raw:
                        raw.sendall(asked[0])
                        if b"stream" in asked[0]:
                            raw.recv(20)
                else:
                    content, headers = asked
                    headers = {"Authorization": f"Bearer {api_key}", **headers}
                    connection.request("POST", f"{where.path}/chat/completions", content, headers)
                    reply = connection.getresponse()
                    sent = reply.status, json.load(reply)
        except StopIteration as end:
            return end.value
        finally:
            connection.close()


def items_of(number, number_that_hang):
    kinds = itertools.cycle(EXPECTED)
    items = [
        {"word": f"n{k}", "kind": next(kinds) if k % 10 in (2, 5, 9) else "behaves"}
        for k in range(number)
    ]
    # The last ones, so that they alone are left when their time is up.
    return [
        *items[:-number_that_hang],
        *({**i, "kind": "hangs"} for i in items[-number_that_hang:]),
    ]


def left_over():
    gc.collect()
    process = psutil.Process()
    connections = [c for c in process.net_connections() if c.status in ("LISTEN", "ESTABLISHED")]
    threads = {t for t in threading.enumerate() if "torchrl_mt" in t.name}
    return connections, threads, process.children(recursive=True)


@pytest.mark.parametrize("number", [60, slow(1000)])
def test_misbehaviour_stays_in_its_episode(number, monkeypatch):
    loops = []

    def new_loop():
        loops.append(Loop())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", new_loop)
    Script.num_over = 0
    Script.ended.clear()
    before = left_over()
    num_hang = 6
    items = items_of(number, num_hang)
    engine = Engine([item["word"] for item in items])
    kinds = itertools.cycle([InProcess, InAThread])
    options = {"n": 20, "cycle": False, "max_concurrency": 32, "max_staleness": 10**6}
    options["limits"] = Limits(max_turns=MAX_TURNS, episode_timeout=LIMIT)
    options["max_consecutive_failures"] = number
    collector = collecting(lambda: next(kinds)(), engine, items, **options)
    accepted, known = {}, set()

    def let_time_pass():
        wait_until(lambda: Script.num_over == number - num_hang)
        for _ in range(100):  # What is over is noted in the loop.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result()
        loops[0].jump()

    with beside(let_time_pass), collector:
        for batch in collector:
            for step in batch.unbind(0):
                item = step["data"]
                accepted[item["word"]] = item["kind"]
                log_probs = step["log_probs", "response"].tolist()
                call = -int(log_probs[0])
                assert call not in known
                known.add(call)
                prompt, answer = engine.calls[call]
                assert step["tokens", "prompt"].tolist() == prompt
                assert step["tokens", "response"].tolist() == answer.token_ids
                assert step["versions", "response"].tolist() == answer.versions
                found = {
                    engine.numbers[i] for i in prompt + answer.token_ids if i in engine.numbers
                }
                assert found == {item["word"]}
        stats = collector.stats()
    assert stats["started"] == stats["accepted"] + stats["rejected"] == number
    given, accepted = Counter(item["kind"] for item in items), Counter(accepted.values())
    causes = Counter({"episode_timeout": num_hang})
    for kind, cause in EXPECTED.items():
        assert accepted[kind] == (given[kind] if cause == "accepted" else 0), kind
        if cause != "accepted":
            causes[cause] += given[kind]
    assert accepted["behaves"] == given["behaves"]
    assert {cause: stats[f"rejected/{cause}"] for cause in causes} == causes
    assert engine.waiting == 0
    wait_until(lambda: left_over()[1] <= before[1])
    assert left_over()[0] == before[0]
    assert left_over()[2] == before[2]
    assert all(loop.is_closed() for loop in loops)
