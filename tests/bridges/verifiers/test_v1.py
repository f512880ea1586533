"""Environments of verifiers.v1, played by the real library in a collector."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

WHY = "needs verifiers>=0.4, which pins older releases of mcp and openai than the tests have"
vf = pytest.importorskip("verifiers.v1", reason=WHY)
if not hasattr(vf.Taskset, "bounded"):
    pytest.skip(WHY, allow_module_level=True)

from tests.agents.helpers import counting_engine, session_of  # noqa: E402
from tests.bridges.verifiers.playing import (  # noqa: E402
    NUMBERS,
    TOKENIZER,
    adds_one,
    engine_that,
    engine_that_fails,
    play,
    rejected,
    rewards,
    searches,
)
from tests.collectors.conftest import idle_clock, time_to_close  # noqa: E402, F401
from tests.envs.speaking import adds, call, says, speaker  # noqa: E402
from tests.idle_clock import hang  # noqa: E402
from tests.waiting import wait_until  # noqa: E402
from torchrl_mt.bridges.verifiers import VerifiersEnv  # noqa: E402
from torchrl_mt.bridges.verifiers.v1 import V1Env, _Calls  # noqa: E402
from torchrl_mt.collectors import AgentOptions, CollectorOptions, Limits  # noqa: E402
from torchrl_mt.transforms import MergeTurns  # noqa: E402

# ---- the environments ---------------------------------------------------------------------------


class SumData(vf.TaskData):
    answer: str
    info: dict


class Sum(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def is_right(self, task, trace):
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def num_replies(self, trace):
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum]):
    """What is ``k`` plus one?"""

    task_class: type = Sum

    def load(self):
        for k in range(8):
            asked = {"prompt": f"{NUMBERS[k]} plus one", "answer": NUMBERS[k + 1]}
            data = SumData(**asked, system_prompt="brief", info={"k": k})
            yield self.task_class(data, self.config.task)


class EndlessSums(Sums):
    INFINITE = True

    def load(self):
        while True:
            yield from super().load()


def sums_with(**methods):
    """A taskset whose tasks have these methods, too."""
    task = type("Sum", (Sum,), methods)
    return type("Sums", (Sums,), {"task_class": task})(vf.TasksetConfig())


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[GuessConfig]):
    """The player guesses the answer, and hears whether it is higher or lower."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            segment, heard = await game.turn(), []
            while not segment.terminated and segment.last_reply != task.data.answer:
                off = NUMBERS.index(task.data.answer) - NUMBERS.index(segment.last_reply)
                heard.append("higher" if off > 0 else "lower")
                segment = await game.turn(heard[-1])
        game.trace.record_reward("tries", -float(len(heard)))
        game.trace.info["heard"] = heard


class TalkConfig(vf.EnvConfig):
    student: vf.AgentConfig = vf.AgentConfig()
    teacher: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class Talk(vf.Env[TalkConfig]):
    """A teacher asks, a student answers."""

    async def setup(self, agents):
        agents.teacher.trainable = False

    async def run(self, task, agents):
        asked = await agents.teacher.run(vf.Task(vf.TaskData(prompt="three plus one")))
        student = type(task)(task.data.model_copy(update={"prompt": asked.last_reply}))
        await agents.student.run(student)


class Crashes(Guess):
    async def run(self, task, agents):
        await agents.player.run(task)
        raise OSError("the board is gone")


@pytest.fixture
def installed(monkeypatch):
    """Installs a package with a taskset and an environment, and returns its id."""

    def install(*classes):
        module = ModuleType("sums_for_tests")
        for cls in classes:
            setattr(module, cls.__name__, cls)
        module.__all__ = [cls.__name__ for cls in classes]
        monkeypatch.setitem(sys.modules, "sums_for_tests", module)
        return "sums-for-tests"

    return install


# ---- rewards and data ---------------------------------------------------------------------------


def test_an_episode_has_the_librarys_reward_and_all_that_it_says_of_it():
    env = VerifiersEnv(Sums(vf.TasksetConfig()))
    assert env.items()[3] == {
        "idx": 3,
        "prompt": "three plus one",
        "answer": "four",
        "system_prompt": "brief",
        "info": {"k": 3},
    }
    engine = engine_that(lambda words: "four" if "three" in words else "nine")
    batch, stats = play(env, engine, env.items()[2:4], episodes=4, group_size=2)
    of_groups = sorted(zip(batch["group"].tolist(), rewards(batch), strict=True))
    assert [reward for _, reward in of_groups] == [0.0, 0.0, 2.0, 2.0]
    assert stats["accepted"] == stats["turns"] == 4
    for step in batch:
        assert step["info"]["rewards"] == {"is_right": float(step["next", "reward"]) / 2}
        assert step["info"]["metrics"] == {"num_replies": 1.0}
        assert step["info"]["stop_condition"] == "agent_completed"
        assert [message["role"] for message in step["text"]] == ["system", "user", "assistant"]
        assert step["data"] == env.items()[step["data"]["idx"]]


def test_many_at_once_do_not_mix(installed):
    engine = engine_that(adds_one)
    env = VerifiersEnv(installed(Sums))
    batch, stats = play(env, engine, episodes=32, max_concurrency=16)
    assert rewards(batch) == [2.0] * 32
    assert stats["rejected"] == 0
    assert engine.most_running > 1


def test_a_dialogue_is_one_row_of_what_was_sampled(installed):
    engine = engine_that(searches)
    batch, stats = play(VerifiersEnv(installed(Sums, Guess)), engine, episodes=8, group_size=8)
    assert stats["forks"] == 0
    assert rewards(batch) == [0.0, 1.0] * 8
    rows = MergeTurns(pad_token_id=TOKENIZER.pad_token_id)(batch)
    assert len(rows) == 8
    assert int(rows["masks", "all_assistant_mask"].sum()) == 8 * 2 * 2
    assert batch["info"][1]["info"] == {"heard": ["higher"]}
    texts = [message["content"] for turn in batch["text"][:2] for message in turn]
    assert texts == ["brief", "zero plus one", "zero", "higher", "one"]


@pytest.mark.parametrize("form", ["id", "configuration", "environment", "taskset"])
def test_forms_of_an_environment(form, installed):
    id = installed(Sums, Guess)
    config = vf.resolve_env_config({"taskset": {"id": id}})
    env = {
        "id": lambda: id,
        "configuration": lambda: config,
        "environment": lambda: Guess(config),
        "taskset": lambda: Sums(vf.TasksetConfig(id=id)).skip(2),
    }[form]()
    env = VerifiersEnv(env)
    first = env.items()[0]["idx"]
    assert first == (2 if form == "taskset" else 0)
    batch, _ = play(env, engine_that(searches), env.items()[:1], episodes=1)
    assert rewards(batch) == [0.0] * (first + 1) + [1.0 - first]


def test_rewards_by_turn_are_the_users(installed):
    def by_turn(episode):
        (trace,) = episode.traces
        return [0.5] * len(trace.info["heard"]) + [1.0]

    env = VerifiersEnv(installed(Sums, Guess), reward=by_turn)
    batch, _ = play(env, engine_that(searches), env.items()[1:2], episodes=1)
    assert rewards(batch) == [0.5, 0.5, 1.0]


def test_seeds_choose_tasks(installed):
    env = VerifiersEnv(installed(Sums), num_tasks=3)
    assert len(env.items()) == 3
    batch, _ = play(env, data=None, episodes=6)
    asked = [turn[1]["content"] for turn in batch["text"]]
    assert asked == [f"{NUMBERS[k % 3]} plus one" for k in range(6)]
    assert rewards(batch) == [2.0] * 6


def test_a_taskset_without_end_needs_a_number(installed):
    id = installed(EndlessSums)
    with pytest.raises(ValueError, match="num_tasks must be given"):
        VerifiersEnv(id).items()
    assert [item["idx"] for item in VerifiersEnv(id, num_tasks=10).items()] == list(range(10))


def test_a_copy_for_another_process_plays_the_same(installed):
    env = pickle.loads(pickle.dumps(VerifiersEnv(installed(Sums), num_tasks=2)))
    assert rewards(play(env)[0]) == [2.0] * 4


# ---- several agents -----------------------------------------------------------------------------


def test_an_agent_that_is_not_trained_has_a_model_of_its_own(installed):
    teacher = engine_that(lambda words: "one plus one")
    env = VerifiersEnv(installed(Sums, Talk))
    options = CollectorOptions(agents=AgentOptions(models={"teacher": teacher}))
    batch, stats = play(env, data=env.items()[1:2], episodes=1, options=options)
    assert stats["turns"] == len(teacher.calls) == 1
    assert rewards(batch) == [2.0]
    assert batch["info"][0]["agent"] == "student"


def test_an_agent_that_is_not_trained_never_plays_as_the_policy(installed):
    env = VerifiersEnv(installed(Sums, Talk))
    rejected(env, "ProviderError", r"agent 'teacher' is not trained.*models={'teacher': engine}")


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    """A solver answers. The judge, which is trained as well, is given no chance to speak."""

    async def run(self, task, agents):
        await agents.solver.run(task)
        async with agents.judge.interaction(task) as silent:
            pass
        silent.trace.record_reward("idle", 8.0)


def test_an_agent_without_a_turn_gives_its_reward_to_no_other(installed):
    env = VerifiersEnv(installed(Sums, Pair))
    batch, _ = play(env, data=env.items()[1:2], episodes=1)
    assert rewards(batch) == [2.0]
    (info,) = batch["info"]
    assert (info["agent"], info["rewards"]) == ("solver", {"is_right": 1.0})
    assert info["rewards_without_turns"]["judge"] >= 8.0


def test_an_episode_without_a_reply_is_named(installed):
    class Silent(Guess):
        async def run(self, task, agents):
            async with agents.player.interaction(task):
                pass

    rejected(VerifiersEnv(installed(Sums, Silent)), "RuntimeError", "ended without a reply")


# ---- errors and limits --------------------------------------------------------------------------


async def fails(self, trace):
    raise KeyError("answer")


async def fails_when_asked(self, trace: vf.Trace):
    raise KeyError("answer")


@pytest.mark.parametrize(
    "method",
    [{"is_right": vf.reward(fails)}, {"setup": fails}, {"stops": vf.stop(fails_when_asked)}],
)
def test_an_error_of_a_task_is_the_cause(method):
    rejected(VerifiersEnv(sums_with(**method)), "TaskError", "KeyError: 'answer'")


def test_an_error_of_an_environment_is_the_cause(installed):
    rejected(VerifiersEnv(installed(Sums, Crashes)), "EnvError", "OSError: the board is gone")


def test_an_error_of_the_engine_is_the_cause(installed):
    env = VerifiersEnv(installed(Sums))
    rejected(env, "OSError", "the cable is out", engine=engine_that_fails())


def test_a_server_that_does_not_start_is_the_cause(installed):
    class Broken(Guess):
        async def start(self):
            raise OSError("no board")

    rejected(VerifiersEnv(installed(Sums, Broken)), "RuntimeError", "OSError: no board")


def test_others_go_on_when_one_fails():
    async def fails_once(self, task, trace):
        return 1 / task.info["k"]

    env = VerifiersEnv(sums_with(fails_once=vf.reward(fails_once)))
    batch, stats = play(env, episodes=14, max_consecutive_failures=None)
    assert stats["rejected/TaskError"] >= 1
    assert stats["accepted"] + stats["rejected"] == stats["started"]
    assert min(rewards(batch)) > 2.0


def test_a_time_limit_of_the_task_is_no_reward(idle_clock):  # noqa: F811
    async def is_slow(self, trace):
        await hang()

    task = type("Sum", (Sum,), {"is_slow": vf.reward(is_slow)})

    class Slow(Sums):
        def load(self):
            data = {"prompt": "one plus one", "answer": "two", "info": {}}
            yield task(SumData(**data, timeout={"scoring": 36_000.0}), self.config.task)

    rejected(VerifiersEnv(Slow(vf.TasksetConfig())), "TimeoutError", "scoring_timeout")


def test_a_time_limit_of_the_collector_ends_the_rollout(idle_clock):  # noqa: F811
    ended = []

    async def is_slow(self, trace):
        try:
            await hang()
        finally:
            ended.append(trace.id)

    env = VerifiersEnv(sums_with(is_slow=vf.reward(is_slow)))
    rejected(env, "Rejected", "episode_timeout", limits=Limits(episode_timeout=36_000.0))
    assert ended


def test_a_limit_ends_the_game_and_what_was_played_counts(installed):
    env = VerifiersEnv(installed(Sums, Guess))
    limits = Limits(max_turns=3)
    batch, stats = play(env, engine_that(searches), env.items()[6:7], episodes=1, limits=limits)
    assert rewards(batch) == [0.0, 0.0, -3.0]
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True]
    assert stats["stop/max_turns"] == 1


def test_a_limit_before_the_first_reply_is_the_cause(installed):
    env = VerifiersEnv(installed(Sums))
    rejected(env, ".*", "", limits=Limits(max_episode_tokens=5))


def test_turns_of_the_agents_own_limit(installed):
    env = VerifiersEnv(installed(Sums, Guess), config={"player": {"max_turns": 2}})
    batch, stats = play(env, engine_that(searches), env.items()[6:7], episodes=1)
    assert rewards(batch) == [0.0, -2.0]
    assert stats["stop/done"] == 1
    assert batch["info"][1]["stop_condition"] == "max_turns"


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"env": 7}, TypeError, "env must be the id.*got int"),
        ({"env": "no-such-package"}, ImportError, "no-such-package"),
        ({"env": vf.SingleAgentEnvConfig()}, ValueError, "env must name a taskset"),
        ({"env": Sums(vf.TasksetConfig()), "config": {"a": 1}}, TypeError, "config must be given"),
        ({"env": Sums(vf.TasksetConfig()), "num_tasks": 0}, ValueError, "num_tasks"),
        ({"env": Sums(vf.TasksetConfig()), "reward": 1.0}, TypeError, "reward must be a function"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        VerifiersEnv(**arguments)


def test_a_package_of_the_classic_api_says_what_to_install(installed):
    with pytest.raises(ImportError, match=r"pip install 'verifiers<0\.4'"):
        VerifiersEnv(installed())


@pytest.mark.parametrize("data", [{"idx": 99}, {"prompt": "one"}, "one"])
def test_an_item_that_names_no_task_is_refused(data, installed):
    rejected(VerifiersEnv(installed(Sums)), "ValueError", "data must be an item", data=[data])


def test_a_harness_that_was_chosen_stays(installed):
    def agent_of(**agent):
        config = {"agent": agent} if agent else {}
        return VerifiersEnv(installed(Sums), config=config)._player._config.agent

    assert agent_of().harness.id == "torchrl_mt_chat"
    assert agent_of(max_turns=3).max_turns == 3
    assert agent_of(harness={"id": "null"}).harness.id == "torchrl_mt_chat"
    for chosen in ({"harness": {"id": "bash"}}, {"runtime": {"type": "docker"}}):
        agent = agent_of(**chosen)
        assert agent.harness is None or agent.harness.id == "bash"
        assert agent.runtime.type != "subprocess"  # The model's commands never run on the host.
    assert agent_of(retries={"max_retries": 3}).retries.max_retries == 0


# ---- tools --------------------------------------------------------------------------------------


TOOLS = '''
import verifiers.v1 as vf

class Adds(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calc"

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

if __name__ == "__main__":
    Adds.run()
'''
"""A module that the library runs as a tool server."""


class Calculations(vf.Taskset[Sum]):
    @classmethod
    def toolsets(cls, config):
        return [importlib.import_module("tools_for_tests").Adds(vf.ToolsetConfig())]

    def load(self):
        yield Sum(SumData(prompt="3 + 4?", answer="7", info={}), self.config.task)


@pytest.mark.slow
def test_tools_are_called(tmp_path, monkeypatch):
    """The library serves the tools of all episodes in one process."""
    (tmp_path / "tools_for_tests.py").write_text(TOOLS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    prompts = []

    def answer(prompt):
        prompts.append(prompt)
        said = adds(prompt)
        return said if isinstance(said, str) else says("", call("calc_add", a=3, b=4))

    env = VerifiersEnv(Calculations(vf.TasksetConfig()))
    batch, stats = play(env, speaker(answer), episodes=2)
    assert rewards(batch) == [0.0, 2.0] * 2
    assert stats["forks"] == 0
    assert "Add two numbers." in prompts[0]
    # All episodes had one server, which went with the collector.
    assert psutil.Process().children(recursive=True) == []


# ---- what is left -------------------------------------------------------------------------------


def test_nothing_is_left_when_a_collector_is_closed(installed):
    def left():
        sockets = [
            connection
            for connection in psutil.Process().net_connections()
            if connection.status in ("LISTEN", "ESTABLISHED")
        ]
        return len(sockets), len(psutil.Process().children()), _folders()

    before = left()
    env = VerifiersEnv(installed(Sums, Guess))
    for _ in range(2):  # Each collector has a loop of its own.
        play(env, engine_that(searches), env.items()[:4], episodes=8)
        wait_until(lambda: left() == before)
    assert all(server.has_ended for server in env._player._servers.values())
    wait_until(lambda: not [t for t in threading.enumerate() if "asyncio" in t.name])


def _folders():
    """The folders of running rollouts."""
    from verifiers.v1.utils.paths import CACHE_DIR

    folder = Path(CACHE_DIR) / "runtimes" / "subprocess"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_known_by_its_id(stream):
    async def main():
        async with session_of(counting_engine()) as session:
            calls = _Calls(session.http_client)
            calls.traces["a"] = SimpleNamespace(agent=SimpleNamespace(trainable=True))
            messages = [{"role": "user", "content": "one"}]
            body = json.dumps({"messages": messages, "stream": stream}).encode()
            for _ in range(2):
                await calls.answer("a", "/chat/completions", body, {})
            return calls.completions, session.completion_ids

    completions, ids = asyncio.run(main())
    assert completions == {"a": ids}


def test_the_relay_answers_no_stranger(installed):
    seen = SimpleNamespace(status=None)

    class Asks(Guess):
        async def run(self, task, agents):
            import httpx

            (server,) = player._servers.values()
            _, relay = await server.get()
            async with httpx.AsyncClient() as client:
                for path, headers in (("", {}), ("", {"X-Session-ID": "00"})):
                    url = f"{relay.url}/chat/completions{path}"
                    seen.status = (await client.post(url, headers=headers)).status_code
                    assert seen.status == 409
            await super().run(task, agents)

    env = VerifiersEnv(installed(Sums, Asks))
    player = env._player
    assert isinstance(player, V1Env)
    play(env, engine_that(searches), env.items()[:1], episodes=1)
    assert seen.status == 409
