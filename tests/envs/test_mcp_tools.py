"""Tools of real MCP servers, in this process and in others."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from tests.envs.some_tools import look, says_seven
from tests.envs.speaking import adds, call, collected, says, speaker
from tests.envs.test_tool_env import run
from tests.idle_clock import LIMIT
from tests.tiers import first_fast
from tests.waiting import in_thread, until, wait_until
from torchrl_mt.collectors import CollectorOptions, MultiTurnCollector
from torchrl_mt.envs import MCPTools, ToolEnv, mcp_tools

mcp = pytest.importorskip("mcp")
from mcp import Client, ClientSession, StdioServerParameters, stdio_client  # noqa: E402

from tests.envs.mcp_server import PHOTOGRAPH, Opened, make_server  # noqa: E402

ITEM = {"messages": [{"role": "user", "content": "3 + 4?"}], "answer": "7"}
PROGRAM = StdioServerParameters(
    command=sys.executable, args=["-m", "tests.envs.mcp_server"], cwd=Path(__file__).parents[2]
)
MODES = ["auto", "legacy"]
"""How a client talks to a server in its process: directly, or by messages over streams."""


@pytest.fixture
def opened():
    return Opened()


@pytest.fixture(params=first_fast(MODES))
def opens(request, opened):
    """A callable that opens a session."""
    server = make_server(opened)
    return lambda: Client(server, mode=request.param)


def env_with(*tools, **settings):
    return ToolEnv(tools, reward=says_seven, **settings)


async def closing(env, *responses):
    """The steps of an episode, and the end of it."""
    try:
        await env.reset(ITEM)
        return [await env.step(message["content"], message) for message in responses]
    finally:
        await env.close()


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call("add", a=3, b=4), "7"),
        (call("several"), "one\ntwo"),
        (call("draw"), "[image]"),
        (call("look", q="x"), '{"found": ["x"]}'),
        (call("divide", a=1, b=0), "error: Error executing tool divide"),
        (call("add", a=3), "error: Error executing tool add: 1 validation error"),
        (call("find"), "error: there is no tool 'find'; the tools are add, divide, several, draw"),
    ],
)
def test_a_call_is_answered_by_the_server(opens, opened, asked, told):
    env = env_with(MCPTools(opens), look)
    step, last = run(closing(env, says("", asked), says("7")))
    (message,) = step.messages
    assert message["content"].startswith(told)
    assert message["name"] == asked["function"]["name"]
    assert last.info == {"calls": 1, "errors": int(told.startswith("error"))}
    assert (opened.now, opened.ever) == (0, 1)


def test_images_of_a_server_are_named_or_shown(opens):
    for images, seen in (
        (False, "seen:\n[image]"),
        (True, [{"type": "text", "text": "seen:"}, {"type": "image", "image": PHOTOGRAPH}]),
    ):
        env = env_with(MCPTools(opens, images=images))
        photographed, drawn = run(
            closing(env, says("", call("photograph")), says("", call("draw")))
        )
        assert photographed.messages[0]["content"] == seen
        (message,) = drawn.messages
        broken = "error: draw returned no image: ValueError"
        assert message["content"].startswith(broken if images else "[image]")


def test_the_schemas_are_the_servers(opens):
    env = env_with(look, MCPTools(opens))
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["look"]
    run(closing(env))
    assert [s["function"]["name"] for s in env.tool_schemas][:3] == ["look", "add", "divide"]
    function = env.tool_schemas[1]["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"


class Pages:
    """A session whose list of tools has pages; ``by`` is what a page is asked for with."""

    def __init__(self, by):
        self.by = by
        if by == "cursor":
            self.list_tools = lambda cursor=None: self.page(cursor)
        else:
            self.list_tools = lambda *, params=None: self.page(params and params.cursor)

    async def page(self, cursor):
        number = int(cursor or 0)
        tool = SimpleNamespace(name=f"t{number}", description=None, inputSchema={"type": "object"})
        return SimpleNamespace(tools=[tool], nextCursor=str(number + 1) if number < 2 else None)

    async def call_tool(self, name, arguments):
        linked = SimpleNamespace(type="resource_link", uri="file:///a", name="a")
        inside = SimpleNamespace(type="resource", resource=SimpleNamespace(uri="b", text="whole"))
        structured = {"n": 1} if name == "t0" else None
        content = [] if name == "t0" else [linked, inside]
        return SimpleNamespace(content=content, isError=False, structuredContent=structured)


@pytest.mark.parametrize("by", ["cursor", "params"])
async def test_all_pages_of_a_list_are_read(by):
    """The names of fields are those of mcp 1."""
    (step,) = await closing(env_with(Pages(by)), says("", call("t0"), call("t2", id="2")))
    assert [m["content"] for m in step.messages] == ['{"n": 1}', "file:///a\nwhole"]


def test_a_tool_may_not_have_two_meanings(opens, opened):
    def add():
        """Add."""

    with pytest.raises(ValueError, match=r"different names, got several that are named 'add'\.$"):
        run(closing(env_with(add, MCPTools(opens))))
    assert opened.now == 0


@pytest.mark.parametrize("own", [None, LIMIT / 4])
def test_a_call_that_takes_too_long_is_told(opens, opened, own):
    env = env_with(MCPTools(opens, timeout=own), tool_timeout=LIMIT / 2)
    step, last = run(closing(env, says("", call("stuck")), says("7")))
    seconds = LIMIT / 2 if own is None else own
    assert step.messages[0]["content"] == f"error: stuck did not answer within {seconds:g} seconds"
    assert last.reward == 1.0
    assert opened.now == 0


# ---- connections --------------------------------------------------------------------------------


def collect(env, episodes=4, **collector):
    """Episodes of a call and an answer in a collector."""
    engine = speaker(adds)
    batch, stats = collected(env, engine, [ITEM], episodes, **collector)
    return batch["next", "reward"].flatten().tolist(), stats, engine


def collect_all(env, episodes=4, **collector):
    """Episodes of which none is rejected; the engine that played them."""
    rewards, stats, engine = collect(env, episodes, **collector)
    assert rewards == [0.0, 1.0] * episodes
    assert stats["rejected"] == 0
    return engine


def test_every_episode_has_a_session_that_is_closed_at_its_end(opens, opened, caplog):
    with caplog.at_level(logging.WARNING):
        engine = collect_all(env_with(MCPTools(opens)))
    assert (opened.now, opened.ever) == (0, 4)
    assert not caplog.records
    assert '"name": "divide"' in engine.tokenizer.decode(engine.calls[0][0])


class Tells:
    """A session that tells in which loop it is used."""

    def __init__(self, session):
        self.session, self.loops = session, []

    async def list_tools(self):
        self.loops.append(asyncio.get_running_loop())
        return await self.session.list_tools()

    async def call_tool(self, name, arguments):
        self.loops.append(asyncio.get_running_loop())
        return await self.session.call_tool(name, arguments)


async def test_the_next_episode_closes_the_session_of_one_without_an_end(opens, opened):
    env = env_with(MCPTools(opens))
    for k in range(3):
        await env.reset(ITEM)
        assert (opened.now, opened.ever) == (1, k + 1)
    await env.close()
    assert opened.now == 0


def test_an_open_session_is_shared_and_used_where_it_was_opened(opens, opened):
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opens()) as session:
        session = Tells(session)
        collect_all(portal.call(lambda: env_with(session)))
        assert set(session.loops) == {portal.call(asyncio.get_running_loop)}
        assert len(session.loops) >= 5
    assert (opened.now, opened.ever) == (0, 1)


async def test_a_session_is_used_directly_in_its_own_loop(opens):
    async with opens() as session:
        (step,) = await closing(env_with(MCPTools(session)), says("", call("add", a=3, b=4)))
        assert step.messages[0]["content"] == "7"


def test_an_open_session_without_its_loop_is_refused(opens):
    async def open_session():
        async with opens() as session:
            return session

    session = asyncio.run(open_session())
    with pytest.raises(RuntimeError, match=r"^an open MCP connection must be .*event loop.*\.$"):
        env_with(session)
    with pytest.raises(TypeError, match=r"^session must be an open MCP con.*, or .* got str .*\.$"):
        MCPTools("http://localhost")
    with pytest.raises(ValueError, match=r"timeout must be positive, got 0\."):
        MCPTools(opens, timeout=0)


@asynccontextmanager
async def gives_streams():
    yield (1, 2)


NO_SESSIONS = {
    r"makes an async context manager, got int from it\.$": lambda: 3,
    r"one that gives tuple: use mcp\.Client, or enter mcp\.ClientSession\.$": gives_streams,
}


@pytest.mark.parametrize("match", NO_SESSIONS)
def test_what_opens_no_session_is_named(match):
    with pytest.raises(TypeError, match=match):
        run(closing(env_with(MCPTools(NO_SESSIONS[match]))))


def test_a_loop_that_is_gone_or_blocked_is_named(opens, monkeypatch):
    async def make():
        async with opens() as session:
            return env_with(session)

    env = asyncio.run(make())
    with pytest.raises(RuntimeError, match=r"^the event loop of the .* has ended; it must run"):
        run(env.reset(ITEM))

    monkeypatch.setattr(mcp_tools, "_LOOP_SECONDS", 0.01)

    async def collect_in_the_loop():
        async with opens() as session:
            blocked = r"did nothing for 0\.01 seconds, so it is blocked; it must"
            with pytest.raises(RuntimeError, match=blocked):
                collect(env_with(session), max_consecutive_failures=1)

    asyncio.run(collect_in_the_loop())


def test_a_server_that_cannot_be_reached_rejects_the_episode(opens, opened):
    tries = []

    @asynccontextmanager
    async def connect():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no server")
        async with opens() as session:
            yield session

    settings = {"episodes": 1, "max_retries": 1, "max_consecutive_failures": None}
    rewards, stats, _ = collect(env_with(MCPTools(connect)), **settings)
    assert rewards == [0.0, 1.0]
    assert stats["rejected/OSError"] == stats["rejected"] == 1


def test_a_session_that_fails_to_close_leaves_no_other_open(opens, opened):
    @asynccontextmanager
    async def fails():
        yield Pages("cursor")
        raise OSError("cannot close")

    for tools in ([fails, opens], [opens, fails]):
        with pytest.raises(OSError, match="cannot close"):
            run(closing(env_with(*map(MCPTools, tools))))
        assert opened.now == 0


async def test_opening_is_given_up_with_the_episode(opens, opened):
    entered, left = threading.Event(), threading.Event()

    @asynccontextmanager
    async def never():
        async with opens():
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
        yield

    env = env_with(MCPTools(never))
    reset = asyncio.ensure_future(env.reset(ITEM))
    await until(entered.is_set)
    reset.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reset
    await env.close()
    assert left.is_set()
    assert opened.now == 0


def test_a_shutdown_closes_the_connections_of_running_episodes(opens, opened, caplog):
    asked = []
    engine = speaker(lambda prompt: asked.append(1) or says("", call("stuck")))
    with caplog.at_level(logging.WARNING):
        collector = MultiTurnCollector(
            env_with(MCPTools(opens)), engine, [ITEM], episodes_per_batch=3, max_staleness=1
        )
        with collector:
            run = in_thread(lambda: next(iter(collector)))
            wait_until(lambda: len(asked) >= 3 and opened.now >= 3)
        error = run()
    assert isinstance(error, RuntimeError)
    assert "shut down" in str(error)
    assert opened.now == 0
    assert opened.ever >= 3
    assert not [record for record in caplog.records if record.name == "asyncio"]


# ---- servers that are programs ------------------------------------------------------------------


def servers():
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "tests.envs.mcp_server" in " ".join(process.cmdline())
    ]


def opens_program():
    return Client(PROGRAM)


@asynccontextmanager
async def session_of_program():
    async with stdio_client(PROGRAM) as streams, ClientSession(*streams) as session:
        await session.initialize()
        yield session


@pytest.mark.slow
@pytest.mark.parametrize("opener", [opens_program, session_of_program])
def test_a_program_for_every_episode(opener):
    collect_all(env_with(MCPTools(opener)), episodes=3)
    wait_until(lambda: not servers())


@pytest.mark.slow
async def test_a_program_that_dies_is_told():
    env = env_with(MCPTools(lambda: Client(PROGRAM)))
    asked = [says("", call(name)) for name in ("whereabouts", "die", "whereabouts")]
    *out, last = await closing(env, *asked, says("7"))
    told = [step.messages[0]["content"] for step in out]
    assert int(told[0]) != os.getpid()
    assert told[1].startswith("error: die raised ")
    assert told[2].startswith("error: whereabouts raised ")
    assert last.reward == 1.0
    assert last.info == {"calls": 3, "errors": 2}
    wait_until(lambda: not servers())


class ProgramEnv(ToolEnv):
    def __init__(self):
        super().__init__([MCPTools(opens_program)], reward=says_seven)


@pytest.mark.slow
def test_programs_of_environments_in_other_processes():
    collect_all(ProgramEnv, episodes=2, options=CollectorOptions(env_workers=1))
    wait_until(lambda: not servers())
