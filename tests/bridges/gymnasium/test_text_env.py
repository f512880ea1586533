"""Gymnasium's environments in text: what they are given, what they return, and what is refused."""

from __future__ import annotations

import copy
import pickle
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bridges.collecting import collect
from tests.tiers import examples
from tests.waiting import in_thread
from torchrl_mt.bridges.gymnasium import GymTextEnv
from torchrl_mt.collectors import CollectorOptions, Limits

gym = pytest.importorskip("gymnasium", reason="gymnasium is not installed")


def shown(observation, info):
    return f"at {observation}"


def integer(response):
    return int(response)


def env_of(make="FrozenLake-v1", render=shown, parse=integer, **kwargs):
    return GymTextEnv(make, render=render, parse=parse, **kwargs)


class Scripted:
    """An environment that returns what the test says and remembers what it was asked."""

    def __init__(self, *returned, space=None, opening=("start", {})):
        self.returned, self.opening = list(returned), opening
        self.asked = []
        if space is not None:
            self.action_space = space

    def reset(self, **kwargs):
        self.asked.append(kwargs)
        return self.opening

    def step(self, action):
        self.asked.append(action)
        return self.returned.pop(0)

    def close(self):
        self.asked.append("close")


def text_env(inner, **kwargs):
    return env_of(lambda: inner, lambda seen, info: f"{seen}", **kwargs)


@examples()
@given(seed=st.integers(0, 2**31), actions=st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_an_episode_is_that_of_gymnasium(seed, actions):
    env, reference = env_of(), gym.make("FrozenLake-v1")
    observation, info = reference.reset(seed=seed)
    assert env.reset({"seed": seed}) == [{"role": "user", "content": shown(observation, info)}]
    for action in actions:
        observation, reward, terminated, truncated, info = reference.step(action)
        step = env.step(str(action))
        assert step.messages == [{"role": "user", "content": shown(observation, info)}]
        assert (step.reward, step.terminated, step.info) == (reward, terminated, info)
        assert step.truncated == (truncated and not terminated)
        if step.done:
            break


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_both_kinds_of_ends(terminated, truncated):
    inner = Scripted(("there", np.float32(0.5), np.bool_(terminated), truncated, {}))
    env = text_env(inner, parse=str.upper)
    env.reset()
    step = env.step("left")
    assert inner.asked[-1] == "LEFT"  # It has no action space.
    assert (step.done, step.terminated) == (terminated or truncated, terminated)
    assert (type(step.reward), step.reward, step.info) == (float, 0.5, None)


def test_infos_are_copies_of_what_the_environment_changes():
    lock = threading.Lock()
    info = {"t": 0, "seen": [0], "array": np.zeros(2), "lock": lock}
    env = text_env(Scripted(("there", 0, False, False, info), ("there", 0, True, False, info)))
    env.reset()
    first = env.step("0").info
    info["t"] = 1
    info["seen"].append(1)
    info["array"][0] = 1.0
    second = env.step("0").info
    assert (first["t"], first["seen"], first["array"].tolist()) == (0, [0], [0.0, 0.0])
    assert (second["t"], second["seen"], second["array"].tolist()) == (1, [0, 1], [1.0, 0.0])
    assert first["lock"] is lock  # It cannot be copied.


def test_the_time_limit_truncates_in_a_collector():
    env = env_of(lambda: gym.wrappers.TimeLimit(gym.make("CliffWalking-v1"), 3))
    (episode,) = collect(
        env, lambda prompt: "0" if prompt.count("user") > 1 else "1", [{"seed": 1}]
    )
    assert episode.truncated
    assert episode.rewards == [-100.0, -1.0, -1.0]


def test_seeds_reproduce_episodes_however_many_are_played_at_once():
    def answer(prompt):
        return str(zlib.crc32(prompt.encode()) % 5)  # 4 is no action

    def played(**options):
        return collect(env_of(), answer, number=8, limits=Limits(max_turns=4), **options)

    at_once = played()
    assert at_once == played(max_concurrency=1)
    assert len({episode.text for episode in at_once}) > 3
    assert played(options=CollectorOptions(seed=1)) != at_once


def test_options_and_seeds_arrive():
    inner = Scripted()
    env = text_env(inner)
    for data in (None, {"seed": np.int64(3), "label": 1}, {"seed": 4, "options": {"low": 1}}):
        env.reset(data)
    assert inner.asked == [{}, {"seed": 3}, {"seed": 4, "options": {"low": 1}}]
    assert type(inner.asked[1]["seed"]) is int


def test_data_without_a_seed_determines_one():
    inner = Scripted()
    env = text_env(inner)
    options = [{"options": {"low": low}} for low in (1, 2, 1)]
    for data in ({"label": 1}, {"label": 2}, {"label": 1}, *options):
        env.reset(data)
    seeds = [asked["seed"] for asked in inner.asked]
    assert seeds[0] == seeds[2] != seeds[1]
    assert seeds[3] == seeds[5] != seeds[4]
    assert [asked.get("options") for asked in inner.asked[3:]] == [
        each["options"] for each in options
    ]


def test_a_group_of_an_item_without_a_seed_begins_alike():
    env, items = env_of("CartPole-v1"), [{"label": k} for k in range(4)]  # Seeds begin differently.
    settings = {"number": 8, "group_size": 2, "limits": Limits(max_turns=1)}
    texts = [episode.text for episode in collect(env, lambda _: "0", items, **settings)]
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        (None, [("user", "start")]),
        ("Go.", [("user", "Go.\n\nstart")]),
        (lambda data: data["text"], [("user", "Hi.\n\nstart")]),
        ([{"role": "system", "content": "Go."}], [("system", "Go."), ("user", "start")]),
        (lambda data: [], [("user", "start")]),
        (lambda data: None, [("user", "start")]),
    ],
)
def test_prompts(prompt, opening):
    messages = text_env(Scripted(), prompt=prompt).reset({"text": "Hi."})
    assert [(message["role"], message["content"]) for message in messages] == opening


# ---- actions -------------------------------------------------------------------------------------


def test_what_cannot_be_parsed_is_told_and_costs_a_turn():
    inner = Scripted(("there", 1.0, True, False, {"a": 1}))
    env = text_env(inner)
    env.reset()
    step = env.step("left")
    error = "invalid literal for int() with base 10: 'left'"
    assert step.messages == [{"role": "user", "content": f"error: {error}"}]
    assert (step.reward, step.done, step.info) == (0.0, False, {"error": error})
    assert env.step("1").terminated
    assert inner.asked == [{}, 1]


SPACES = [
    (gym.spaces.Discrete(3), [0, np.int64(2)], [3, -1, 1.0, "1", None, [1]]),
    (gym.spaces.Discrete(3, start=1), [3], [0]),
    (
        gym.spaces.Box(-1, 1, (2,), np.float32),
        [[0.5, -0.5], (1, -1), np.array([0.1, 0.2])],
        [[0.5], [0.5, 1.5], [0.5, np.nan], 0.5, "up", None, {}, [[0.5, 0.5]], [10**400, 0]],
    ),
    (gym.spaces.MultiDiscrete([2, 3]), [[1, 2]], [[2, 2], [1], [-1, 0]]),
    (gym.spaces.Text(3), ["abc"], ["abcd", 3]),
]


@pytest.mark.parametrize(
    ("space", "inside", "outside"), SPACES, ids=[type(case[0]).__name__ for case in SPACES]
)
def test_only_actions_of_the_space_are_executed(space, inside, outside):
    for action in [*inside, *outside]:
        inner = Scripted(("there", 0, False, False, {}), space=space)
        env = text_env(inner, parse=lambda response, action=action: action)
        env.reset()
        said = env.step("").messages[0]["content"]
        if any(action is each for each in inside):
            assert said == "there"
            executed = inner.asked[-1]
            assert space.contains(executed)
            assert np.array_equal(executed, np.asarray(action, np.asarray(executed).dtype))
        else:
            assert said.startswith("error: ")
            assert said.endswith(f" is not in the action space {space}") or "convert" in said
            assert inner.asked == [{}]


# ---- what is refused -----------------------------------------------------------------------------


class Vector(gym.vector.VectorEnv):
    num_envs = 2


def reset_of(make, **kwargs):
    return env_of(make, **kwargs).reset()


def step_of(inner, said="0", **kwargs):
    env = text_env(inner, **kwargs)
    env.reset()
    return env.step(said)


VECTOR = "must be a single environment, got the vector environment"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: env_of().reset(7), TypeError, r"data.*\.$"),
        (lambda: env_of().reset({"seed": "a"}), TypeError, r"data.*\.$"),
        (lambda: env_of().reset({"sead": 3}), ValueError, r"data.*\.$"),
        (lambda: reset_of(Scripted, prompt=7), TypeError, "prompt must be a text, a list of mes"),
        (lambda: reset_of(Vector), TypeError, VECTOR),
        (lambda: reset_of(lambda: Vector()), TypeError, VECTOR),
        (lambda: reset_of(lambda: gym.make_vec("CartPole-v1", 2)), TypeError, VECTOR),
        (lambda: env_of(gym.make("FrozenLake-v1")), TypeError, "make must be .* got TimeLimit"),
        (lambda: reset_of(lambda: 7), TypeError, "must make an environment with reset and step"),
        (lambda: env_of("NoSuchLake-v1"), gym.error.Error, "NoSuchLake"),
        (lambda: env_of(render=3), TypeError, "render must be a function"),
        (lambda: env_of(parse=3), TypeError, "parse must be a function"),
        (lambda: reset_of(Scripted, render=lambda *_: 3), TypeError, "must return a text, got int"),
        (lambda: reset_of(lambda: Scripted(opening=3)), TypeError, r"reset of Scr.* older gym\.$"),
        (lambda: step_of(Scripted(("a", 0, True, {}))), TypeError, r"step of Scr.* of 4 .* gym\.$"),
        (lambda: step_of(Scripted(), "left", parse={"up": 0}.__getitem__), KeyError, "left"),
    ],
)
def test_wrong_calls_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("again", [lambda env: env, lambda env: gym.wrappers.TimeLimit(env, 3)])
def test_an_environment_that_is_made_twice_is_refused(again):
    shared = gym.make("FrozenLake-v1")
    env = env_of(lambda: again(shared))
    other, said = copy.deepcopy(env), r"make must make a new .* same FrozenLakeEnv again.*\.$"
    env.reset({"seed": 1})
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            other.reset({"seed": 1})
    assert not env.step("1").done
    env.close()


def test_a_step_without_an_episode_is_refused():
    env = text_env(Scripted(("there", 0.0, True, False, {})))
    for is_over in (False, True):
        with pytest.raises(
            RuntimeError, match=r"step was called with no episode .* reset first\.$"
        ):
            env.step("0")
        if not is_over:
            env.reset()
            env.step("0")


# ---- copies and closing --------------------------------------------------------------------------


def test_copies_make_their_own_environment():
    env = env_of(prompt="Go.")
    env.reset({"seed": 1})
    for copied in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        with pytest.raises(RuntimeError, match="reset first"):
            copied.step("1")
        assert copied.reset({"seed": 1})[0]["content"] == "Go.\n\nat 0"
    assert not env.step("1").done


def test_an_instance_makes_one_environment_and_closes_it():
    made = []

    def make():
        made.append(Scripted(("there", 0.0, True, False, {})))
        return made[-1]

    env = env_of(make)
    env.close()
    assert made == []
    env = copy.deepcopy(env)
    env.reset()
    env.step("0")
    env.reset()
    env.close()
    env.close()
    assert [inner.asked for inner in made] == [[{}, 0, {}, "close"]]
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


def test_an_environment_that_is_made_too_late_is_closed():
    inner, closing, going_on = Scripted(), threading.Event(), threading.Event()

    def make():
        closing.set()
        going_on.wait()
        return inner

    env = env_of(make)
    reset = in_thread(env.reset)
    closing.wait()
    env.close()
    going_on.set()
    error = reset()
    assert isinstance(error, RuntimeError)
    assert "closed" in str(error)
    assert inner.asked == ["close"]


def test_a_collector_closes_every_environment():
    made, lock = [], threading.Lock()

    class Noted(Scripted):
        def __init__(self):
            super().__init__(("there", 1.0, True, False, {"k": 1}))
            with lock:
                made.append(self)

    episodes = collect(env_of(Noted), lambda _: "1", number=5)
    assert [(played.rewards, played.infos) for played in episodes] == [([1.0], [{"k": 1}])] * 5
    assert [inner.asked[-2:] for inner in made] == [[1, "close"]] * len(made)
    assert len(made) >= 5
