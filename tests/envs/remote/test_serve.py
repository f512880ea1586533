"""The server: who may enter, what is executed, what ends a session; seen by a client of plain JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.remote.served_envs import END, Asynchronous, Echo, Shop, Threaded
from tests.idle_clock import LIMIT, Loop
from tests.tiers import examples
from tests.waiting import wait_until
from torchrl_mt.envs import TextEnv, TextStep, serve
from torchrl_mt.envs.remote import protocol
from torchrl_mt.envs.remote import server as server_module
from torchrl_mt.envs.remote.protocol import item_of, reset_data, write
from torchrl_mt.strict_json import read_json

websockets = pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import connect  # noqa: E402


def a_step(response, *, step_id=..., **data):
    number = {} if step_id is ... else {"step_id": step_id}
    return {"type": "step", "data": {"response": response, **data}, **number}


class Client:
    """Sends and reads messages of the protocol, one at a time."""

    def __init__(self, server, path="/ws", **options):
        url = server.url.replace("http", "ws", 1) + path
        self.socket = connect(url, proxy=None, ping_interval=None, **options)
        self.close = self.socket.close

    def send(self, message):
        self.socket.send(message if isinstance(message, (str, bytes)) else json.dumps(message))

    def read(self):
        return json.loads(self.socket.recv())

    def ask(self, message):
        self.send(message)
        return self.read()

    def reset(self, **data):
        return self.ask({"type": "reset", "data": data})

    def step(self, response, **more):
        return self.ask(a_step(response, **more))

    def code(self, message):
        """Code of the error that answers a message."""
        answer = self.ask(message)
        assert answer["type"] == "error"
        assert set(answer["data"]) >= {"message", "code"}
        return answer["data"]["code"]


@pytest.fixture(scope="module")
def shared():
    """A server of ``Echo`` for tests that leave it as it was."""
    with serve(Echo, max_sessions=8) as server:
        yield server


@pytest.fixture
def client(shared):
    with closing(Client(shared)) as client:
        yield client


def status_of(server, path="/health", **headers):
    """Status and body of a request by HTTP."""
    request = urllib.request.Request(server.url + path, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refused(server, **options):
    """Status with which a session is refused."""
    with pytest.raises(InvalidStatus) as caught:
        Client(server, **options)
    return caught.value.response.status_code


def ending(client):
    """Code and reason with which the server ends a session."""
    with pytest.raises(ConnectionClosed) as caught:
        client.read()
    return caught.value.rcvd.code, caught.value.rcvd.reason


# ---- sessions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Echo, Threaded, Asynchronous])
def test_a_session_plays_episodes(env):
    def observation(text):
        return {"messages": [{"role": "user", "content": text}]}

    with serve(env) as server, closing(Client(server)) as client:
        first = {"observation": observation("item: {'word': 'hi'}"), "reward": None, "done": False}
        assert client.reset(word="hi") == {"type": "observation", "data": first}
        answer = {"observation": observation("so"), "reward": 0.5, "done": False}
        assert client.step("so")["data"] == {**answer, "metadata": {"heard": 1}}
        assert client.step(END)["data"]["done"] is True
        assert client.reset()["data"]["observation"]["messages"][0]["content"] == "item: None"
        assert client.ask({"type": "state"})["data"]["step_count"] == 0


def test_an_environment_tells_what_it_needs():
    with serve(Shop) as server, closing(Client(server)) as client:
        told = client.reset()["data"]["observation"]["text_env"]
        assert told["tool_schemas"][0]["function"]["name"] == "buy"
        assert told["whole_text"] is told["takes_message"] is True
        said = {"content": "no thoughts", "tool_calls": [{}]}
        answer = client.ask(a_step("text", message=said))["data"]
        assert answer["observation"]["messages"][0]["content"] == "text/no thoughts/1"
        assert answer["truncated"] is True


leaves = st.none() | st.booleans() | st.integers() | st.text()
leaves |= st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.just("data"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(item=values)
@examples(100)
def test_an_item_arrives_as_it_was_given(item):
    sent = write({"type": "reset", "data": reset_data(item)})
    assert item_of(read_json(sent)["data"]) == item


def test_a_step_with_the_same_id_is_executed_once(client):
    client.reset()
    first = client.step("a", step_id="one")
    assert client.step("a", step_id="one") == first
    assert client.step("anything else", step_id="one") == first
    assert client.step("b", step_id=2)["data"]["metadata"] == {"heard": 2}
    assert client.code(a_step("a", step_id="one")) == "VALIDATION_ERROR"
    last = client.step(END, step_id=3)
    assert client.step(END, step_id=3) == last
    client.reset()
    assert client.step("a", step_id="one")["data"]["metadata"] == {"heard": 1}


class Gate(TextEnv):
    """Waits in ``step`` until it is let through."""

    def __init__(self, gate, calls):
        self.gate, self.calls = gate, calls

    def reset(self, data=None):
        return [{"role": "user", "content": "wait"}]

    def step(self, response):
        self.calls.append(response)
        assert self.gate.wait(1800)
        return TextStep(reward=float(len(self.calls)), done=True)

    def close(self):
        self.calls.append("closed")


@pytest.fixture
def gate():
    return threading.Event()


def test_a_step_is_executed_once_also_while_it_runs(gate):
    calls = []
    with serve(lambda: Gate(gate, calls)) as server, closing(Client(server)) as client:
        client.reset()
        for _ in range(3):
            client.send(a_step("a", step_id=1))
        wait_until(lambda: calls)
        gate.set()
        assert [client.read()["data"]["reward"] for _ in range(3)] == [1.0] * 3
    assert calls == ["a", "closed"]


def test_steps_run_in_order_and_one_at_a_time(client):
    client.reset()
    for k in range(10):
        client.send(a_step(str(k)))
    said = [client.read()["data"]["observation"]["messages"][0]["content"] for _ in range(10)]
    assert said == [str(k) for k in range(10)]


def test_an_environment_that_hangs_delays_no_other_session(gate):
    calls = []
    with serve(lambda: Gate(gate, calls)) as server:
        with closing(Client(server)) as hanging, closing(Client(server)) as other:
            hanging.reset()
            hanging.send(a_step("a"))
            wait_until(lambda: calls)
            assert other.reset()["type"] == "observation"
        wait_until(lambda: server.sessions == 0)  # also the one that hangs
        assert calls == ["a", "closed", "closed"]
        gate.set()


# ---- what is wrong ------------------------------------------------------------------------------

BIG = '{"type": "reset", "data": {"x": %s}}'
WRONG = {
    "INVALID_JSON": [
        *("not json", "", b'{"type": "reset"}', "[" * 100_000, '{"a":' * 100_000),
        *(BIG % "NaN", BIG % "1e999", BIG % ("9" * 5000)),
    ],
    "UNKNOWN_TYPE": [{}, {"type": "mcp", "data": {}}, {"type": ["reset"]}],
    "VALIDATION_ERROR": [
        *("[]", "3", "null", {"type": "step"}, {"type": "step", "data": {}}),
        *({"type": "reset", "data": data} for data in ([], None)),
        {"type": "reset", "data": {}, "more": 1},
        *(a_step(3), a_step("a", code="b"), a_step("a", message="b")),
        *(a_step("a", step_id=wrong) for wrong in (True, None, {}, "a" * 256)),
    ],
}


@pytest.mark.parametrize(
    ("code", "message"), [(code, message) for code in WRONG for message in WRONG[code]]
)
def test_wrong_messages_are_answered_by_errors_and_change_nothing(client, message, code):
    client.reset()
    client.step("a")
    assert client.code(message) == code
    assert client.step("b")["data"]["metadata"] == {"heard": 2}


@given(
    raw=st.text()
    | values.map(json.dumps)
    | st.dictionaries(
        st.sampled_from(["type", "data", "step_id"]), values | st.sampled_from(["reset", "step"])
    ).map(json.dumps)
)
@examples(250, few=20)
def test_no_text_ends_a_session(shared, raw):
    with closing(Client(shared)) as client:
        answer = client.ask(raw)
        assert answer["type"] in ("error", "observation", "state")
        assert client.reset()["type"] == "observation"


def test_a_step_needs_an_episode(client):
    assert client.code(a_step("a")) == "EXECUTION_ERROR"
    client.reset()
    client.step(END)
    assert client.code(a_step("a")) == "EXECUTION_ERROR"


TOO_LARGE = b" " * (protocol.MAX_REQUEST_BYTES + 1)


@pytest.mark.parametrize(("sent", "code"), [(TOO_LARGE, 1009), (b"\xff", 1007)])
def test_what_is_too_large_or_no_text_ends_its_session_only(shared, sent, code):
    with closing(Client(shared)) as client, closing(Client(shared)) as other:
        with pytest.raises(ConnectionClosed) as caught:
            client.socket.send(sent, text=True) or client.read()
        assert caught.value.rcvd.code == code
        assert other.reset()["type"] == "observation"


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Broken(TextEnv):
    """Breaks as the response says."""

    def reset(self, data=None):
        if data == "text":
            return "text"
        if data == "raise":
            raise KeyError("this")
        return [{"role": "user", "content": "break"}]

    def step(self, response):
        if response == "exit":
            raise SystemExit(3)
        if response == "mute":
            raise Mute
        if response == "stop":
            raise StopIteration
        if response == "cancel":
            raise asyncio.CancelledError
        values = {"none": None, "nan": TextStep(reward=float("nan"))}
        values |= {"text": TextStep(reward="1.0")}
        values |= {"info": TextStep(info={"x": object()}), "list": TextStep(info={"x": {1, 2}})}
        values |= {"messages": TextStep(messages=["a"]), "inf": TextStep(info={"x": float("inf")})}
        return values[response]

    def close(self):
        raise SystemExit(4)


class BrokenInline(Broken):
    inline = True


class BrokenAsync(Broken):
    async def reset(self, data=None):
        return Broken.reset(self, data)

    async def step(self, response):
        return Broken.step(self, response)

    async def close(self):
        raise SystemExit(4)


@pytest.mark.parametrize("env", [Broken, BrokenInline, BrokenAsync])
def test_an_environment_that_breaks_is_an_error_of_its_session(env, caplog):
    with serve(env) as server:
        with closing(Client(server)) as client:
            for item in ("text", "raise"):
                assert client.code({"type": "reset", "data": {"data": item}}) == "EXECUTION_ERROR"
            client.reset()
            names = "exit stop cancel none nan text info list messages inf"
            codes = dict.fromkeys(names.split(), "EXECUTION_ERROR")
            client.code(a_step("exit"))
            for response, code in {**codes, "mute": "SESSION_ERROR"}.items():
                assert client.code(a_step(response)) == code
            assert client.reset()["type"] == "observation"
        wait_until(lambda: server.sessions == 0)
        assert "close raised SystemExit" in caplog.text
        assert caplog.text.count(".step raised SystemExit") == 1
        assert status_of(server)[0] == 200


def test_a_factory_that_fails_is_told_and_logged(caplog):
    def fail():
        raise OSError("no game here")

    for make_env, why in ((fail, "no game here"), (dict, "must make a TextEnv, got dict")):
        with serve(make_env) as server, closing(Client(server)) as client:
            answer = client.reset()
            assert answer["data"]["code"] == "FACTORY_ERROR"
            assert why in answer["data"]["message"]
            with pytest.raises(ConnectionClosed):
                client.read()
        assert why in caplog.text


# ---- who may enter ------------------------------------------------------------------------------


def test_a_foreign_address_gets_403_before_anything_else():
    with serve(Echo, allowed_ips=["10.0.0.0/8", "::1"], token="secret") as server:
        assert status_of(server)[0] == 403
        assert refused(server) == 403
        assert refused(server, path="/nowhere") == 403
        assert refused(server, additional_headers={"Authorization": "Bearer secret"}) == 403


def test_a_token_of_bytes_that_are_no_text_is_wrong():
    with serve(Echo, token="secret") as server:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            head = "GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            client.sendall(head.encode() + b"Authorization: Bearer \xff\xe9\r\n\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 401")


def test_only_the_token_opens_a_session():
    with serve(Echo, token="secret") as server:
        assert status_of(server) == (200, '{"status": "healthy", "sessions": 0}')
        wrong = ("Bearer secre", "Bearer secret2", "bearer", "secret", "Basic secret", "Bearer ")
        for given_token in wrong:
            assert refused(server, additional_headers={"Authorization": given_token}) == 401
        twice = [("Authorization", "Bearer secret"), ("Authorization", "Bearer other")]
        assert refused(server, additional_headers=twice) == 401
        assert refused(server) == 401
        right = {"Authorization": "Bearer secret"}
        with closing(Client(server, additional_headers=right)) as client:
            assert client.reset()["type"] == "observation"


def test_web_pages_and_other_paths_are_refused(shared):
    assert status_of(shared, "/nowhere")[0] == 404
    assert refused(shared, path="/") == 404
    assert refused(shared, origin="http://evil.example") == 403
    assert status_of(shared, "/ws")[0] == 426  # a request that is no WebSocket


TEN = ["10.0.0.0/8"]


@pytest.mark.parametrize(
    ("allowed", "enter", "others"),
    [
        (["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2"]),
        (TEN, ["10.1.2.3", "::ffff:10.1.2.3"], ["11.1.2.3"]),
        ([*TEN, "::1"], ["::1"], ["::ffff:11.1.2.3", "::2"]),
        (["fe80::/10"], ["fe80::1%eth0"], []),
        ([], [], ["10.1.2.3"]),
    ],
)
def test_networks_and_mapped_addresses(allowed, enter, others):
    with serve(Echo, allowed_ips=allowed) as server:
        assert all(server._allows((address, 1)) for address in enter)
        assert not any(server._allows((address, 1)) for address in others)
        assert not server._allows(None)


def test_it_listens_to_ipv6():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        server = serve(Echo, host="::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with server, closing(Client(server)) as client:
        assert server.url.startswith("http://[::1]:")
        assert client.reset()["type"] == "observation"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"host": "0.0.0.0"}, ValueError, "token must be given"),
        ({"host": "::"}, ValueError, "token must be given"),
        ({"token": ""}, ValueError, "token must have"),
        ({"token": "a b"}, ValueError, "token must have"),
        ({"token": "ä"}, ValueError, "token must have"),
        ({"token": 3}, TypeError, "token must be a string"),
        ({"allowed_ips": "127.0.0.1"}, TypeError, "allowed_ips must be a list"),
        ({"allowed_ips": [1]}, TypeError, "allowed_ips must be a list"),
        ({"allowed_ips": ["10.0.0.1/8"]}, ValueError, "allowed_ips must be a list"),
        ({"port": -1}, ValueError, "port must be"),
        ({"host": 3}, TypeError, "host must be"),
        ({"max_sessions": 0}, ValueError, "max_sessions must be"),
        ({"idle_timeout": 0.0}, ValueError, "idle_timeout must be"),
        ({"make_env": Echo()}, TypeError, "make_env must be the class"),
        ({"make_env": lambda x: Echo()}, TypeError, "called without arguments"),
        ({"make_env": TextEnv}, TypeError, "all methods"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, match):
    threads = threading.active_count()
    with pytest.raises(error, match=match):
        serve(**{"make_env": Echo, **arguments})
    assert threading.active_count() == threads


def test_a_port_in_use_is_an_error(shared):
    with pytest.raises(OSError):
        serve(Echo, port=int(shared.url.rpartition(":")[2]))


# ---- what ends a session ------------------------------------------------------------------------


class Counted(Echo):
    """Counts its instances that are open."""

    lock = threading.Lock()

    def __init__(self, opened):
        self.opened = opened
        opened.append(self)

    def close(self):
        self.opened.remove(self)


def test_the_environment_is_closed_whatever_ends_the_session():
    opened = []
    with serve(lambda: Counted(opened)) as server:
        Client(server)  # without a word
        polite, rude, last = Client(server), Client(server), Client(server)
        polite.reset()
        wait_until(lambda: len(opened) == 4)
        polite.send({"type": "close"})
        wait_until(lambda: len(opened) == 3)
        rude.socket.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: len(opened) == 2)
        assert server.sessions == 2
    assert not opened
    assert ending(last)[0] == 1001


@pytest.fixture
def idle_clock(monkeypatch):
    """Loops whose time the test lets pass."""
    monkeypatch.setattr(asyncio, "new_event_loop", Loop)


def test_an_idle_session_ends_by_itself(idle_clock):
    opened = []
    with serve(lambda: Counted(opened), idle_timeout=LIMIT) as server:
        client = Client(server)
        client.reset()
        server._loop.jump()
        assert ending(client) == (protocol.IDLE_CLOSE_CODE, "idle for 36000 seconds")
        wait_until(lambda: server.sessions == 0)
        assert not opened


def test_a_session_is_not_idle_while_a_step_runs(idle_clock, gate):
    calls = []
    make_env = lambda: Gate(gate, calls)  # noqa: E731
    with serve(make_env, idle_timeout=LIMIT) as server, closing(Client(server)) as client:
        client.reset()
        client.send(a_step("a"))
        wait_until(lambda: calls)
        server._loop.jump()
        client.socket.ping().wait()  # the jump is over
        gate.set()
        assert client.read()["data"]["reward"] == 1.0


def test_more_sessions_than_allowed_are_refused():
    with serve(Echo, max_sessions=1) as server:
        with closing(Client(server)) as first:
            first.reset()
            second = Client(server)
            answer = second.reset()["data"]
            assert (answer["code"], answer["active_sessions"]) == ("CAPACITY_REACHED", 1)
            assert ending(second)[0] == 1013
            assert first.step("a")["type"] == "observation"
        wait_until(lambda: server.sessions == 0)
        with closing(Client(server)) as third:
            assert third.reset()["type"] == "observation"


def test_nothing_is_left_after_stop(monkeypatch, gate):
    monkeypatch.setattr(server_module, "CLOSE_SECONDS", 0.05)
    calls, before = [], set(threading.enumerate())
    server = serve(lambda: Gate(gate, calls))
    port = int(server.url.rpartition(":")[2])
    client = Client(server)
    client.reset()
    client.send(a_step("a"))
    silent = socket.create_connection(("127.0.0.1", port))  # never says what it wants
    wait_until(lambda: calls)
    server.stop()
    server.stop()
    assert calls == ["a", "closed"]
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port))
    gate.set()  # the call that hung
    silent.close()
    wait_until(lambda: not set(threading.enumerate()) - before - {client.socket.recv_events_thread})


def test_an_environment_made_too_late_is_closed(gate):
    opened, made = [], []

    def slow():
        made.append(1)
        assert gate.wait(1800)
        return Counted(opened)

    with serve(slow) as server:
        client = Client(server)
        wait_until(lambda: made)
        client.socket.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: server.sessions == 0)
        gate.set()
        wait_until(lambda: not opened)
