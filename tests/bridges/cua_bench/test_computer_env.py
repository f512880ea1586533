"""Episodes on servers of computers: what is executed, what the model is shown, and how episodes end."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bridges.cua_bench.fake_worker import FakeWorker, acting, png
from tests.bridges.cua_bench.held_servers import taken
from tests.faulty_server import running, status, success
from tests.tiers import examples
from torchrl_mt.bridges.cua_bench import ComputerEnv, ComputerError, leases
from torchrl_mt.envs import TextStep

TASKS = [{"env_path": "./task", "task_index": i, "split": "train"} for i in range(3)]
SIZE = (200, 100)


@pytest.fixture
def server():
    with running(FakeWorker()) as made:
        yield made


def env_on(*servers, tasks=TASKS, **kwargs):
    return ComputerEnv([server.url for server in servers], tasks, **{"timeout": 60.0, **kwargs})


def play(env, responses, data=0, close=True):
    """The opening and the steps of an episode."""

    async def main():
        opening = await env.reset(data)
        steps = [await env.step(response) for response in responses]
        if close:
            await env.close()
        return opening, steps

    return asyncio.run(main())


def wait(env):
    """A step of an episode that has begun, or not."""
    return asyncio.run(env.step(acting("wait()")))


def executed(server):
    return [body["action"] for path, body in server.asked if path == "/step"]


# ---- actions ------------------------------------------------------------------------------------


def test_actions_are_executed_in_order_and_the_last_screen_is_shown(server):
    env = env_on(server)
    opening, (one, two) = play(env, [acting("key(a)", "type('b, c')"), acting("done()")])
    assert opening[0]["content"].startswith("task0\n\nWrite one or several actions between")
    assert opening[0]["content"].endswith("\n\nscreen0")
    info = {"actions": ['key("a")', 'type("b, c")'], "invalid": 0}
    assert one == TextStep([{"role": "user", "content": "screen2"}], info=info)
    assert two == TextStep(reward=3.0, done=True, info={"actions": ["done()"], "invalid": 0})
    assert executed(server) == [
        {"type": "KeyAction", "key": "a"},
        {"type": "TypeAction", "text": "b, c"},
        {"type": "DoneAction"},
    ]
    assert server.played == [(("./task", 0, "train"), executed(server))]
    assert server.asked[-1][0] == "/step"  # The server releases the computer by itself.


def test_screenshots_are_shown_as_images_and_give_the_size():
    screens = [png(*SIZE), png(1000, 1000), png(10, 10)]
    with running(FakeWorker(lambda steps: {"screenshot": screens[min(steps, 2)]})) as server:
        opening, (step, _) = play(env_on(server), [acting("click(0.5, 0.5)")] * 2)
    images = [{"type": "image", "image": f"data:image/png;base64,{each}"} for each in screens]
    text, image = opening[0]["content"]
    assert text["type"] == "text"
    assert text["text"].startswith("task0")
    assert image == images[0]
    assert step.messages[0]["content"] == [images[1]]
    assert [(each["x"], each["y"]) for each in executed(server)] == [(100, 50), (500, 500)]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("I click.", "there is no action between"),
        (acting("key(a)", "clik(0.5, 0.5)"), "there is no action 'clik'"),
        (acting("done()", "key(a)"), "done() must be the last action."),
        (acting("scroll(left)"), "direction must be up or down"),
    ],
)
def test_what_is_no_action_is_said_to_the_model_and_never_executed(server, response, reason):
    _, (step, after) = play(env_on(server), [response, acting("wait()")])
    assert [form["type"] for form in executed(server)] == ["WaitAction"]
    assert (step.reward, step.done, step.info) == (0.0, False, {"actions": [], "invalid": 1})
    (message,) = step.messages
    assert message["role"] == "user"
    assert reason in message["content"]
    assert "click(0.5, 0.5): left click" in message["content"]
    assert message["content"].endswith("\n\nscreen0")
    assert after.info["invalid"] == 1


def test_a_user_who_is_called_is_not_there(server):
    _, (step,) = play(env_on(server), [acting("key(a)", "call_user()")])
    assert [form["type"] for form in executed(server)] == ["KeyAction"]
    assert "There is no user" in step.messages[0]["content"]
    assert step.info == {"actions": ['key("a")', "call_user()"], "invalid": 0}


def test_the_other_format(server):
    response = "<think>It is <action>done()</action>?</think><action>key(a)</action>"
    opening, (step,) = play(env_on(server, action_format="think"), [response])
    assert "<think>...</think>" in opening[0]["content"]
    assert step.info["actions"] == ['key("a")']


# ---- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "keys"), [(acting("key(a)"), 2), ("nothing", 1), (acting("call_user()"), 1)]
)
def test_the_step_that_reaches_max_step_is_evaluated(server, last, keys):
    _, steps = play(env_on(server, max_step=3), [acting("key(a)"), "nothing", last])
    assert [step.done for step in steps] == [False, False, True]
    assert steps[2].truncated
    assert [step.reward for step in steps] == [0.0, 0.0, keys + 1.0]
    assert [form["type"] for form in executed(server)] == ["KeyAction"] * keys + ["DoneAction"]
    assert len(server.played) == 1


def test_done_in_the_last_step_is_no_truncation(server):
    _, (step,) = play(env_on(server, max_step=1), [acting("key(a)", "done()")])
    assert (step.reward, step.done, step.truncated) == (2.0, True, False)


def test_an_end_by_the_server_leaves_out_the_rest(server):
    end = {"reward": 0.5, "done": True, "text": "crash"}
    server.faults = [lambda handler: handler.send(*server.answer("/reset", server.seen[-1]))]
    server.faults += [lambda handler: handler.send(200, end)]
    _, (step,) = play(env_on(server), [acting("key(a)", "key(b)", "done()")])
    assert (step.reward, step.done, step.truncated) == (0.5, True, False)
    assert step.info["actions"] == ['key("a")']
    assert [path for path, _ in server.asked] == ["/reset", "/shutdown"]


def test_a_server_is_free_when_its_episode_is_over_or_forgotten(server):
    env = env_on(server)
    play(env, [acting("done()")], close=False)
    assert taken() == set()
    play(env, [acting("wait()")], close=False)
    assert taken() == {server.url}
    del env
    gc.collect()
    assert taken() == set()


def test_no_step_without_an_episode_or_after_one_that_failed(server):
    env = env_on(server)
    with pytest.raises(RuntimeError, match="call reset first"):
        wait(env)
    play(env, [acting("done()")])
    with pytest.raises(RuntimeError, match="call reset first"):
        wait(env)
    server.faults = [success({**server.observe(0), "instruction": "a", "env_id": 0}), status(500)]
    with pytest.raises(ComputerError):
        play(env, [acting("key(a)")], close=False)
    with pytest.raises(RuntimeError, match="call reset first"):
        wait(env)
    asyncio.run(env.close())
    leases._loads.clear()


# ---- tasks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "task"),
    [
        ({"task": 2}, ("./task", 2, "train")),
        (1, ("./task", 1, "train")),
        ({"seed": 4}, ("./task", 1, "train")),
        ({"env_path": "./own", "more": object()}, ("./own", 0, "train")),
        ({"env_path": "./own", "task_index": 7, "split": "test", "seed": 1}, ("./own", 7, "test")),
    ],
)
def test_the_data_names_the_task(server, data, task):
    play(env_on(server), [acting("done()")], data)
    assert server.played[0][0] == task


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        ("0", TypeError, "data must name a task"),
        ({}, TypeError, "data must name a task"),
        (True, TypeError, "data must name a task"),
        ({"task": 3}, ValueError, "one of the 3 tasks"),
        (-1, ValueError, "one of the 3 tasks"),
        ({"env_path": 3}, ValueError, r"data\['env_path'\] must be a string, got 3"),
        ({"env_path": "a", "task_index": -1}, ValueError, "must be an integer, 0 or more, got -1"),
    ],
)
def test_data_that_names_no_task_is_refused_before_a_server_is_asked(server, data, error, reason):
    with pytest.raises(error, match=reason):
        play(env_on(server), [], data)
    assert server.asked == []


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"server_url": "localhost:1"}, ValueError, "server_url must be .*, got 'localhost:1'"),
        ({"server_url": None}, TypeError, r"server_url must be .*, got NoneType \(None\)"),
        ({"server_url": 8001}, TypeError, "server_url must be an address"),
        ({"server_url": b"http://a"}, ValueError, "server_url must be an address"),
        ({"server_url": [None]}, ValueError, "server_url must be an address"),
        ({"task_configs": None}, TypeError, "task_configs must be a list of tasks"),
        ({"server_url": []}, ValueError, "server_url must be an address"),
        ({"task_configs": []}, ValueError, "task_configs must have at least one task"),
        ({"task_configs": TASKS[0]}, TypeError, "task_configs must be a list of tasks"),
        ({"task_configs": ["./task"]}, TypeError, r"task_configs\[0\] must be a mapping"),
        (
            {"task_configs": [*TASKS, {}]},
            ValueError,
            r"_configs\[3\]\['env_path'\] must be a s.*None",
        ),
        ({"task_configs": [{"env_path": "a", "split": 3}]}, ValueError, r"\['split'\] must be"),
        ({"max_step": 0}, ValueError, "max_step must be a positive integer"),
        ({"max_hist": 0}, ValueError, "max_hist must be a positive integer"),
        ({"timeout": 0}, ValueError, "timeout must be positive"),
        ({"action_format": "json"}, ValueError, "action_format must be one of"),
    ],
)
def test_arguments_are_checked(kwargs, error, reason):
    given = {"server_url": "http://localhost:1", "task_configs": TASKS, **kwargs}
    with pytest.raises(error, match=reason):
        ComputerEnv(**given)


# ---- what the model is shown --------------------------------------------------------------------


SHOWN = {"key(a)": 'key("a")', "key(b) wait()": 'key("b"); wait()', "oh": "(no valid action)"}
"""What is written between tags, and the line that becomes of it."""


@given(st.integers(1, 3), st.lists(st.sampled_from([*SHOWN]), max_size=11))
@examples(20, few=3)
def test_old_pairs_become_lines(max_hist, written):
    """The reference keeps everything, and says what each prompt must have."""
    with running(FakeWorker()) as server:
        responses = [acting(one) for one in written]
        opening, steps = play(env_on(server, max_hist=max_hist), responses)
    dialogue = list(opening)
    prompt = opening[0]["content"].removesuffix("screen0")
    shown, forks = ["screen0"], 0
    for n, (response, step) in enumerate(zip(responses, steps, strict=True), start=1):
        dialogue.append({"role": "assistant", "content": response})
        if step.history is not None:
            dialogue, forks = list(step.history), forks + 1
        dialogue += step.messages
        shown.append(step.messages[0]["content"])
        whole = n  # Grows by one a step, to at most 2 * max_hist - 1, and falls back to max_hist.
        while whole >= 2 * max_hist:
            whole -= max_hist
        assert whole >= min(n, max_hist)
        first = prompt
        if n > whole:
            lines = [f"{i + 1}. {SHOWN[written[i]]}" for i in range(n - whole)]
            first += "\n".join(["Your first steps were:", *lines]) + "\n\n"
        expected = [{"role": "user", "content": first + shown[n - whole]}]
        for i in range(n - whole, n):
            expected.append({"role": "assistant", "content": responses[i]})
            expected.append({"role": "user", "content": shown[i + 1]})
        assert dialogue == expected
    assert forks == max(0, len(written) // max_hist - 1)


async def test_thoughts_stay_in_the_pairs_that_stay_whole(server):
    env = env_on(server, max_hist=1)
    await env.reset(0)
    said = {"role": "assistant", "content": acting("wait()"), "reasoning_content": "so"}
    await env.step(said["content"], said)
    step = await env.step(said["content"], said)
    assert step.history[1] is said
    await env.close()


# ---- copies -------------------------------------------------------------------------------------


def test_copies_play_episodes_of_their_own(server):
    class Own(ComputerEnv):
        notes = None

    env = Own(server.url + "/", TASKS, timeout=60.0)
    env.notes = ["a"]
    play(env, [acting("wait()")], close=False)
    for copied in (copy.deepcopy(env), pickle.loads(pickle.dumps(ComputerEnv(server.url, TASKS)))):
        with pytest.raises(RuntimeError, match="call reset first"):
            wait(copied)
    copied = copy.deepcopy(env)
    assert copied.notes == ["a"]
    assert copied.notes is not env.notes
    wait(env)
    asyncio.run(env.close())
    play(copied, [acting("done()")])
    assert server.ended_by_reset == 0
