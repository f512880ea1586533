"""Workflows: what plays an episode by itself, and what it may return."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.llm import ChatEnv

from tests.collectors.runs import balanced, collecting, failed_run, first_batch, lists
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import Limits, context
from torchrl_mt.collectors.playing.env_factory import resolve
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.transforms import MergeTurns


@pytest.fixture
def engine(tokenizer):
    return ScriptedEngine(tokenizer, lambda prompt: [prompt[-1] + 1, tokenizer.eos_token_id])


class Play:
    """Calls the engine ``calls`` times, each prompt going on from the last, and returns a result."""

    def __init__(self, result=1.0, calls=3):
        self.result, self.calls = result, calls

    async def arun_episode(self, engine, data):
        prompt = [5, 6]
        for _ in range(self.calls):
            answer = await engine.generate(prompt)
            prompt = [*prompt, *answer.token_ids, 7]
        return self.result(data) if callable(self.result) else self.result


def played_with(**entries):
    """What a workflow returns of one turn."""
    return TensorDict({"next": {"reward": torch.ones(1, 1)}, **entries}, [1])


def rewarded(rewards):
    """What a workflow returns as TED."""
    return TensorDict({"next": {"reward": torch.tensor(rewards)[:, None]}}, [len(rewards)])


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        (2.0, [0, 0, 2]),
        (True, [0, 0, 1]),
        (torch.tensor(2.0), [0, 0, 2]),
        ([1, 2, 3], [1, 2, 3]),
        (torch.tensor([1.0, 2.0, 3.0]), [1, 2, 3]),
        (rewarded([1.0, 2.0, 3.0]), [1, 2, 3]),
    ],
)
def test_results_are_rewards(engine, result, rewards):
    batch, stats = first_batch(Play(result), engine, n=2)
    assert batch["next", "reward"].flatten().tolist() == rewards * 2
    assert batch["next", "terminated"].flatten().tolist() == [False, False, True] * 2
    assert batch["stop_reason"][2] == "done"
    assert stats["forks"] == 0
    # The ledger is the engine's.
    assert sorted(lists(batch, "tokens", "prompt")) == sorted(p for p, _ in engine.calls)


def test_entries_of_a_tensordict_are_kept(engine):
    following = {"reward": torch.ones(3, 1), "done": torch.ones(3, 1)}
    extra = TensorDict({"score": torch.arange(3.0), "next": following}, [3])
    batch, _ = first_batch(Play(extra), engine, n=2)
    assert batch["score"].tolist() == [0, 1, 2] * 2
    assert batch["next", "done"].flatten().tolist() == [False, False, True] * 2


FINITE = "a workflow must return finite rewards, as float32, got"


@pytest.mark.parametrize(
    ("result", "cause", "message"),
    [
        ([1.0, 2.0], "ValueError", "one reward for each turn: 3 were played, got 2"),
        ("good", "TypeError", "None, a number, a list of numbers or a TensorDict, got str"),
        ([1.0, "x", 2.0], "TypeError", "got str"),
        (TensorDict({}, [2]), "ValueError", r"batch size \[3\], got \[2\]"),
        (TensorDict({}, [3]), "ValueError", r'must have \("next", "reward"\)'),
        (float("nan"), "ValueError", f"{FINITE} nan for turn 2"),
        (torch.tensor(float("inf")), "ValueError", f"{FINITE} inf for turn 2"),
        ([0.0, float("-inf"), 1.0], "ValueError", f"{FINITE} -inf for turn 1"),
        ([0.0, 1e39, 1.0], "ValueError", f"{FINITE} 1e.39 for turn 1"),
        (rewarded([float("nan"), 0.0, 1.0]), "ValueError", f"{FINITE} nan for turn 0"),
    ],
)
def test_other_results_are_failures(engine, result, cause, message):
    _, stats = failed_run(message, Play(result), engine, max_consecutive_failures=1)
    assert stats[f"rejected/{cause}"] == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("guess", "got str: tokenize it first"),
        ({"input_ids": [1]}, r"got dict: of a tokenizer's output take \['input_ids'\]"),
        (torch.ones(1, 3, dtype=torch.int64), "got Tensor"),
    ],
)
def test_a_prompt_that_is_no_token_ids_is_named_as_it_was_given(engine, prompt, message):
    class Asks:
        async def arun_episode(self, engine, data):
            await engine.generate(prompt)

    cause, _ = failed_run(message, Asks(), engine)
    assert isinstance(cause, TypeError)


@pytest.mark.parametrize("kind", [tuple, torch.tensor])
def test_token_ids_may_come_in_any_sequence(engine, kind):
    class Asks:
        async def arun_episode(self, engine, data):
            await engine.generate(kind([1, 2]))
            return 1.0

    batch, _ = first_batch(Asks(), engine)
    assert lists(batch, "tokens", "prompt")[0] == [1, 2]
    assert [type(token) for token in engine.calls[0][0]] == [int, int]


def test_a_workflow_may_decline(engine):
    env = Play(lambda data: None if data["k"] % 2 else 1.0)
    batch, stats = first_batch(
        env, engine, n=4, data=[{"k": k} for k in range(8)], max_concurrency=1
    )
    assert [data["k"] for data in batch["data"][::3]] == [0, 2, 4, 6]
    assert stats["rejected/declined"] == stats["rejected"] == 3
    assert balanced(stats)


def test_prompts_that_do_not_go_on_are_forks(engine):
    class Agents:
        async def arun_episode(self, engine, data):
            first = await engine.generate([1, 2])
            await engine.generate([8, 9])  # a sub-agent
            await engine.generate([1, 2, *first.token_ids, 3])
            return [0.0, 0.0, 1.0]

    batch, stats = first_batch(Agents(), engine)
    assert [p[:2] for p in lists(batch, "tokens", "prompt")] == [[1, 2], [8, 9], [1, 2]]
    assert stats["forks"] == len(MergeTurns()(batch)) - 1 == 1


def test_calls_at_once_are_turns_in_the_order_they_began(tokenizer):
    class Slowest(ScriptedEngine):
        async def generate(self, prompt_ids, **kwargs):
            await asyncio.sleep(0.05 / prompt_ids[0])
            return await super().generate(prompt_ids, **kwargs)

    class AtOnce:
        async def arun_episode(self, engine, data):
            await asyncio.gather(*(engine.generate([k, 1]) for k in (1, 2, 3)))
            return [1.0, 2.0, 3.0]

    batch, _ = first_batch(AtOnce(), Slowest(tokenizer, lambda prompt: [prompt[0], 4]))
    assert lists(batch, "tokens", "prompt") == [[1, 1], [2, 1], [3, 1]]
    assert lists(batch, "tokens", "response") == [[1, 4], [2, 4], [3, 4]]


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(max_turns=2), "max_turns", 2),
        (Limits(max_episode_tokens=8), "max_episode_tokens", 2),
    ],
)
def test_limits_end_a_workflow(engine, limits, reason, turns):
    batch, _ = first_batch(Play(calls=99), engine, limits=limits)
    assert len(batch) == turns
    assert batch["stop_reason"][-1] == reason
    assert batch["next", "truncated"].flatten().tolist() == [False] * (turns - 1) + [True]
    assert not batch["next", "terminated"].any()


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        (Play, None),
        (Play, {"calls": 2}),
        (f"{__name__}.Play", {"calls": 2}),
        (f"{__name__}:Play", None),
    ],
)
def test_names_and_classes_are_resolved(engine, env, kwargs):
    batch, _ = first_batch(env, engine, workflow_kwargs=kwargs)
    assert len(batch) == (kwargs or {"calls": 3})["calls"]


class Room(TextEnv):
    """Has arguments, and holds what cannot be copied."""

    def __init__(self, size, *, doors=1):
        self.lock = threading.Lock()

    def reset(self, data=None):
        return [{"role": "user", "content": "guess"}]

    def step(self, response):
        return TextStep(done=True)


NOT_ASYNC = type("Plain", (), {"arun_episode": lambda *_: 1})


@pytest.mark.parametrize(
    ("env", "kwargs", "error", "message"),
    [
        ("Play", None, ImportError, r'"package.module.Class", got \'Play\''),
        ("no_such.module.Play", None, ImportError, "importing the module 'no_such.module' failed"),
        (
            "torchrl_mt.envs.No",
            None,
            ImportError,
            r"has no 'No'; its classes are \[.*'GuessNumber'",
        ),
        (Play(), {"calls": 2}, TypeError, "workflow_kwargs are for a class"),
        (object, None, TypeError, "got the class object"),
        (3, None, TypeError, "got int"),
        (NOT_ASYNC, None, TypeError, "must be an async method"),
        (Room, {}, TypeError, r"Room\(size, \*, doors=1\).*missing a required argument: 'size'"),
        (Room, {"size": 1, "door": 2}, TypeError, "unexpected keyword argument 'door'"),
        (f"{__name__}.Room", {"size": 1, "door": 2}, TypeError, "unexpected keyword .* 'door'"),
        (Play, {"call": 2}, TypeError, "unexpected keyword argument 'call'"),
        (ChatEnv, {"batchsize": 2}, TypeError, "unexpected keyword argument 'batchsize'"),
        (TextEnv, {}, TypeError, r"TextEnv has no \['reset', 'step'\]"),
        (lambda size: Room(size), None, TypeError, "must be called without arguments: .*'size'"),
        (Room(1), None, TypeError, r"Room.*cannot pickle.*lambda: Room\(\.\.\.\)"),
    ],
)
def test_what_cannot_play_or_be_made_is_refused_before_play(env, kwargs, error, message):
    with pytest.raises(error, match=message) as caught:
        resolve(env, kwargs)
    assert "cannot pickle" not in message or isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("code", ["undefined", "1 / 0", "import no_such_module", "def"])
def test_a_module_that_fails_is_named(tmp_path, monkeypatch, code):
    (tmp_path / "broken_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    match = r"env 'broken_module\.Env': importing .* failed"
    with pytest.raises(ImportError, match=match) as caught:
        resolve("broken_module.Env")
    assert type(caught.value.__cause__).__name__ in caught.value.args[0]


def test_each_episode_has_its_own_context(engine):
    seen = []

    class Looks(Play):
        async def arun_episode(self, engine, data):
            before = context.get()
            reward = await super().arun_episode(engine, data)
            await asyncio.sleep(0.001 * (3 - data["task_id"] % 3))
            assert context.get() is before
            seen.append((data["task_id"], before))
            return reward

    data = [{"task_id": k} for k in range(6)]
    with collecting(Looks(), engine, data, n=12, group_size=2) as collector:
        engine.version = 4
        next(iter(collector))
        collector.evaluate(data[:2])
    trained, evaluated = seen[:12], seen[12:]
    assert all(ctx.task_id == k and ctx.group % 1_000_000 == k for k, ctx in trained)
    assert {(ctx.is_eval, ctx.version) for _, ctx in trained} == {(False, 4)}
    assert sorted((k, ctx.is_eval) for k, ctx in evaluated) == [(0, True), (1, True)]
    with pytest.raises(LookupError, match="no episode is being played"):
        context.get()


def test_members_are_told_apart_by_the_names_that_a_dump_has_for_them(engine, tmp_path):
    seen = {}

    class Looks(Play):
        """The second member of a group fails once."""

        async def arun_episode(self, engine, data):
            ctx = context.get()
            seen[ctx.is_eval, ctx.traj_id] = ctx
            if ctx.sample_idx == 1 and data["task_id"] not in retried:
                retried.add(data["task_id"])
                raise OSError("no tool")
            return await super().arun_episode(engine, data)

    data, retried = [{"task_id": k} for k in range(3)], set()
    options = {"group_size": 2, "max_retries": 1, "dump_dir": tmp_path}
    with collecting(Looks(), engine, data, n=6, **options) as collector:
        batch = next(iter(collector))
        retried.clear()
        evaluated = collector.evaluate(data, 2)
    for is_eval, got, folder in ((False, batch, tmp_path), (True, evaluated, tmp_path / "eval")):
        (path,) = folder.glob("*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == 6
        for line in lines:
            ctx = seen[is_eval, line["traj_id"]]
            names = ("task_id", "group", "sample_idx", "traj_id")
            assert {name: line[name] for name in names} == {n: getattr(ctx, n) for n in names}
        delivered = set(got["collector", "traj_ids"].tolist())
        assert delivered == {line["traj_id"] for line in lines}
        # Episodes that failed had ids of their own, and the place of those that were played instead.
        failed = [ctx for (of, k), ctx in seen.items() if of is is_eval and k not in delivered]
        places = sorted((ctx.group % 1_000_000, ctx.sample_idx) for ctx in failed)
        assert places == [(k, 1) for k in range(3)]


@pytest.mark.parametrize(
    "others",
    [
        1.0,
        played_with(rank=torch.ones(1)),
        played_with(score=torch.ones(1, 2)),
        played_with(score=torch.ones(1).long()),
        played_with(score=torch.ones(1), stop_reason=torch.ones(1)),
        played_with(score=torch.ones(1), sampling={"temperature": torch.ones(1)}),
    ],
)
def test_entries_unlike_the_first_episode_s_reject_that_episode_alone(engine, others):
    env = Play(lambda data: others if data["k"] % 2 else played_with(score=torch.ones(1)), calls=1)
    data = [{"k": k} for k in range(8)]
    batch, stats = first_batch(env, engine, n=4, data=data, max_concurrency=1)
    assert [item["k"] for item in batch["data"]] == [0, 2, 4, 6]
    assert batch["score"].tolist() == [1] * 4
    assert stats["rejected/ValueError"] == stats["rejected"] == 3


def test_evaluation_has_entries_of_its_own(engine):
    env = Play(lambda data: played_with(**data), calls=1)
    scored, ranked = {"score": torch.ones(1)}, {"rank": torch.ones(1)}
    options = {"max_consecutive_failures": 2, "max_concurrency": 1}
    with collecting(env, engine, [scored], **options) as collector:
        assert next(iter(collector))["score"].tolist() == [1]
        batch = collector.evaluate([ranked, scored])
        assert batch["rank"].tolist() == [1]
        assert collector.stats()["eval/rejected/ValueError"] == 1


def test_episodes_without_tokens_are_not_stale(engine):
    class Silent(ScriptedEngine):
        async def generate(self, prompt_ids, **kwargs):
            return Completion([], [], [], "stop")

    silent = Silent(engine.tokenizer, engine.rule)
    silent.version = 500
    _, stats = first_batch(Play(), silent)
    assert stats["staleness/max"] == 0
