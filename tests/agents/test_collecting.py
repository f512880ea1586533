"""Agents as episodes of a collector: rewards, limits, failures, and what is left when it is over."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import pytest

openai = pytest.importorskip("openai", reason="agents need the extra [agents]")
pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.collectors.runs import first_batch  # noqa: E402
from torchrl_mt.agents import Agent  # noqa: E402
from torchrl_mt.collectors import Limits  # noqa: E402
from torchrl_mt.transforms import MergeTurns  # noqa: E402

from .helpers import counting_engine, failing, gated_engine, user  # noqa: E402


class Talks:
    """Asks ``data["turns"]`` times with the SDK, and returns what ``reward`` makes of it."""

    def __init__(self, reward=lambda completions: 1.0):
        self.reward = reward

    async def run(self, data, *, base_url, api_key, http_client):
        client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        )
        messages, completions = [user("one")], []
        for _ in range(data["turns"]):
            completions.append(
                await client.chat.completions.create(model="policy", messages=messages)
            )
            messages += [completions[-1].choices[0].message, user("two")]
        return self.reward(completions)


class TalksInAThread:
    """A plain program over a socket, with nothing but the standard library."""

    def run(self, data, *, base_url, api_key, http_client):
        messages = [user("one")]
        for _ in range(data["turns"]):
            request = urllib.request.Request(
                f"{base_url}/chat/completions",
                json.dumps({"messages": messages}).encode(),
                {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as reply:
                body = json.load(reply)
            messages += [body["choices"][0]["message"], user("two")]
        return len(messages)


def batch_of(agent, turns=3, *, engine=None, episodes=2, **options):
    engine = engine or counting_engine()
    options.setdefault("max_consecutive_failures", 1)
    return first_batch(agent, engine, [{"turns": turns}], n=episodes, **options)


def rewards(batch):
    return batch["next", "reward"].flatten().tolist()


@pytest.mark.parametrize("agent", [Talks(), TalksInAThread(), Talks, f"{__name__}.TalksInAThread"])
def test_an_episode_is_one_row_of_what_was_sampled(engine, agent):
    batch, stats = batch_of(agent, engine=engine)
    assert len(batch) == 6
    assert stats["forks"] == 0
    rows = MergeTurns(pad_token_id=engine.tokenizer.pad_token_id)(batch)
    assert len(rows) == 2
    lines = sorted([*prompt, *answer.token_ids] for prompt, answer in engine.calls)
    for row in rows["tokens", "full"].tolist():
        assert row in lines
    assert int(rows["masks", "all_assistant_mask"].sum()) == 2 * 3 * 2
    said = [message["role"] for turn in batch["text"][:3] for message in turn]
    assert said == ["user", "assistant"] * 3


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (lambda completions: 2.5, [0, 0, 2.5]),
        (lambda completions: [1, 2, 3], [1, 2, 3]),
        (lambda completions: {completions[1].id: 4.0}, [0, 4, 0]),
        (lambda completions: {}, [0, 0, 0]),
    ],
)
def test_forms_of_rewards(reward, expected):
    batch, _ = batch_of(Talks(reward), episodes=1)
    assert rewards(batch) == expected


UNFIT = {
    r"ids of this episode's completions.*chatcmpl-x": {"chatcmpl-x": 1.0},
    "one reward for each turn: 3 were played, got 1": [1.0],
    "finite rewards": float("nan"),
    "must return None, a number": "good",
}


@pytest.mark.parametrize("match", UNFIT)
def test_rewards_that_fit_nothing_are_named(match):
    with pytest.raises(RuntimeError, match=match):
        batch_of(Talks(lambda completions: UNFIT[match]), episodes=1)


def test_an_agent_may_decline():
    declined = iter([True, False, False])

    def reward(completions):
        return None if next(declined) else 1.0

    batch, stats = batch_of(Talks(reward), max_retries=3)
    assert stats["rejected/declined"] == 1
    assert len(batch) == 6


@pytest.mark.parametrize("agent", [Talks(), TalksInAThread()])
def test_a_limit_that_is_let_through_truncates_the_episode(agent):
    batch, stats = batch_of(agent, turns=5, episodes=1, limits=Limits(max_turns=2))
    assert len(batch) == 2
    assert batch["next", "truncated"].flatten().tolist() == [False, True]
    assert rewards(batch) == [0, 0]
    assert stats["stop/max_turns"] == 1


@pytest.mark.parametrize("whose", ["engine", "agent"])
def test_an_error_is_the_cause(engine, whose):
    def reward(completions):
        raise OSError("the cable is out")

    if whose == "engine":
        engine.generate = failing(OSError("the cable is out"))
    with pytest.raises(RuntimeError, match="OSError: the cable is out"):
        batch_of(Talks(reward), engine=engine)


class TakesAll(TalksInAThread):
    def run(self, data, **connection):
        assert connection.keys() == {"base_url", "api_key", "http_client"}
        return super().run(data, **connection)


class TakesTwo(TalksInAThread):
    def run(self, data, base_url, api_key):
        return super().run(data, base_url=base_url, api_key=api_key, http_client=None)


@pytest.mark.parametrize("agent", [TakesAll, TakesTwo])
def test_an_agent_has_the_parameters_that_it_needs(agent):
    batch, _ = batch_of(agent)
    assert batch["next", "reward"].sum() == 2 * 7


def test_an_agent_may_have_the_session():
    class Looks:
        async def run(self, data, *, base_url, api_key, http_client, session):
            await http_client.post("/chat/completions", json={"messages": [user("one")]})
            (entry,) = session.transcript
            assert entry["request"]["messages"] == [user("one")]
            return {session.completion_ids[0]: len(session.turns()[0].completion.token_ids)}

    batch, _ = batch_of(Looks(), episodes=1)
    assert rewards(batch) == [2]
    assert isinstance(Looks(), Agent)


def test_calls_that_are_still_running_at_the_end_are_cancelled():
    engine = gated_engine()

    class LeavesEarly:
        async def run(self, data, *, base_url, api_key, http_client):
            body = {"messages": [user("one")]}
            engine.gate.set()
            await http_client.post("/chat/completions", json=body)
            engine.gate.clear()
            engine.asked.clear()
            self.task = asyncio.ensure_future(http_client.post("/chat/completions", json=body))
            await engine.asked.wait()
            return 1.0

    agent = LeavesEarly()
    batch, _ = batch_of(agent, engine=engine, episodes=1)
    assert len(batch) == 1
    assert engine.cancelled == 1
