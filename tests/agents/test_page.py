"""The code of the page on agents runs as it stands, and does what the page says."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading

import pytest

openai = pytest.importorskip("openai", reason="agents need the extra [agents]")
pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.pages import DOCS, code_of  # noqa: E402
from tests.tiers import slow  # noqa: E402
from torchrl_mt.agents import AgentProgram, AgentServer, export_interactions, requests  # noqa: E402
from torchrl_mt.collectors import Limits, MultiTurnCollector  # noqa: E402

from .helpers import counting_engine, user  # noqa: E402
from .test_collecting import TalksInAThread  # noqa: E402

SAYS = {"question": "one", "answer": "two", "hint": "three"}


def code(section, number=0, **options):
    return code_of("agents.rst", section, number, **options)


def few(*args, **options):
    """A collector of as few episodes as a test needs."""
    options.pop("group_size", None)
    options["episodes_per_batch"] = 1
    return MultiTurnCollector(*args, max_consecutive_failures=1, **options)


def saying(word):
    """An engine that always says the same."""
    engine = counting_engine()
    ids = engine.tokenizer(word)["input_ids"]
    engine.rule = lambda prompt: [*ids, engine.tokenizer.eos_token_id]
    return engine


def names(engine, item):
    """What the page's code takes for granted."""
    found = {}
    exec(code("======").split("\n\n")[0], found)
    return found | {"MultiTurnCollector": few, "engine": engine, "data": [item]}


def played(run):
    with run["collector"] as collector:
        return next(iter(collector)), collector.stats()


@pytest.mark.parametrize(("answer", "reward"), [("two", 1.0), ("no such word", 0.0)])
def test_the_first_agent(answer, reward):
    run = names(saying("two"), {**SAYS, "answer": answer})
    exec(code("A first agent"), run)
    batch, stats = played(run)
    assert batch["next", "reward"].sum() == reward
    assert len(batch) == (1 if reward else 3)
    assert stats["forks"] == 0


@pytest.mark.parametrize(
    ("limits", "length", "reward"), [(Limits(max_turns=2), 2, -0.5), (None, 3, 0.0)]
)
def test_an_agent_that_catches_the_limit(limits, length, reward):
    run = names(counting_engine(), {**SAYS, "answer": "no such word"})
    exec(code("A first agent"), run)
    run["collector"].shutdown()
    exec(code("Limits"), run)
    run["collector"] = few(run["Careful"](), run["engine"], run["data"], limits=limits)
    batch, _ = played(run)
    assert len(batch) == length
    assert batch["next", "reward"][-1] == reward


def test_an_agent_that_goes_on_with_a_shorter_dialogue_ends_as_usual():
    class Shortens:
        async def run(self, data, *, base_url, api_key, http_client):
            for length in (90, 1):
                body = {"messages": [user("one " * length)]}
                reply = await http_client.post("/chat/completions", json=body)
            return float(reply.status_code == 200)

    limits = Limits(max_episode_tokens=40)
    with few(Shortens(), counting_engine(), [{}], limits=limits) as collector:
        batch = next(iter(collector))
    assert batch["next", "reward"].flatten().tolist() == [1.0]
    assert not batch["next", "truncated"].any()


def test_a_judge_makes_no_turns():
    judge = saying("two")
    run = {**names(counting_engine(), SAYS), "judge_engine": judge}
    source = code("Several models")
    assert '"good"' in source
    exec(source.replace('"good"', '"two"'), run)
    batch, _ = played(run)
    assert len(batch) == len(judge.calls) == 1
    assert batch["next", "reward"].item() == 1.0


def test_a_command_of_the_shell(tmp_path, monkeypatch):
    if shutil.which("curl") is None or shutil.which("sh") is None:
        pytest.skip("the script needs sh and curl")
    engine = counting_engine()
    (tmp_path / "ask.sh").write_text(code("Frameworks", language="sh"))
    monkeypatch.chdir(tmp_path)
    run = {"ANSWERS": {"one": "two"}, "AgentProgram": AgentProgram}
    exec(code("Frameworks", number=2), run)
    with few(run["agent"], engine, ["one"]) as collector:
        batch = next(iter(collector))
    ((prompt, answer),) = engine.calls
    assert "one" in engine.tokenizer.decode(prompt)
    said = engine.tokenizer.decode(answer.token_ids[:-1])
    assert batch["next", "reward"].item() == float(said == "two")
    transcript = [{"response": {"choices": [{"message": {"content": "two"}}]}}]
    assert [run["reward"]("one", transcript, code, "") for code in (0, 1)] == [1.0, None]


def test_the_server_without_a_collector(engine, capsys):
    def program(base_url, api_key):
        TalksInAThread().run({"turns": 2}, base_url=base_url, api_key=api_key, http_client=None)

    run = {"asyncio": asyncio, "AgentServer": AgentServer, "Limits": Limits, "engine": engine}
    run |= {"program": program, "export_interactions": export_interactions}
    section = "The server without a collector"
    exec(code(section), run)
    said = capsys.readouterr().out.splitlines()
    ((first, one), (second, two)) = engine.calls
    assert said[:2] == [f"-1 {len(first)} {one.token_ids}", f"0 {len(second)} {two.token_ids}"]
    assert "prompt_tokens" in said[2]
    exec(code(section, 1), run)
    assert "tensor(4)" in capsys.readouterr().out
    assert len(run["calls"]) == 2
    assert len(run["branches"]) == 1


@pytest.mark.parametrize("kind", ["go to the engine", "change nothing", "status 400"])
def test_the_fields_of_the_page_are_those_of_requests(kind):
    text = (DOCS / "agents.rst").read_text(encoding="utf-8").split("What requests may have\n---")[1]
    cell = text.split(f"* - {kind}\n")[1].split("* - ")[0].split("\n\n")[0]
    fields = set(re.findall(r"``(\w+)", cell)) - {"null", "sampling"}
    assert fields
    if kind == "go to the engine":
        known = {*requests._SAMPLING, "max_tokens", "max_completion_tokens"}
        assert fields == known
    elif kind == "change nothing":
        assert fields - {"n"} <= requests._IGNORED
    else:
        assert fields <= set(requests._NEUTRAL)


@pytest.mark.parametrize(
    ("changed", "forks"),
    [
        ({}, 0),
        ({"content": [{"type": "text", "text": "two"}]}, 0),
        ({"reasoning_content": "hm", "name": "a", "refusal": None}, 0),
        ({"content": "three"}, 1),
    ],
)
def test_what_goes_on_and_what_forks(changed, forks):
    engine, echo = saying("two"), {"role": "assistant", "content": "two", **changed}

    class Echoes:
        async def run(self, data, *, base_url, api_key, http_client):
            for messages in ([user("one")], [user("one"), echo, user("one")]):
                reply = await http_client.post("/chat/completions", json={"messages": messages})
                assert reply.status_code == 200, reply.text
            return 1.0

    with few(Echoes(), engine, [{}]) as collector:
        batch = next(iter(collector))
        assert collector.stats()["forks"] == forks
    assert batch["turn", "parent"].tolist() == [-1, 0 if not forks else -1]


@slow
def test_a_thread_whose_time_is_up_is_refused():
    done, codes = threading.Event(), []

    class Slow(TalksInAThread):
        def run(self, data, *, session, **connection):
            while not session.is_closed:
                done.wait(0.01)
            try:
                return super().run({"turns": 1}, **connection)
            except Exception as error:
                codes.append(error.code)
                done.set()
                raise

    with few(Slow(), counting_engine(), [{}], limits=Limits(episode_timeout=0.2)) as collector:
        with pytest.raises(RuntimeError, match="episode_timeout"):
            next(iter(collector))
        assert done.wait(60)
    assert codes == [409]
