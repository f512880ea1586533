"""TorchRL's chat environments, played as text environments and by the collector."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import threading
from contextlib import closing
from functools import partial

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset
from torchrl.data import Unbounded
from torchrl.data.llm import History
from torchrl.envs import StepCounter, TicTacToeEnv, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.datasets import CountdownEnv
from torchrl.envs.llm.reward import GSM8KRewardParser
from torchrl.envs.llm.transforms import (
    AddThinkingPrompt,
    DataLoadingPrimer,
    ExecuteToolsInOrder,
    KLComputation,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)
from torchrl.envs.utils import check_env_specs

from tests.envs.speaking import collected, speaker
from tests.refusals import check_refused, refused
from tests.waiting import PATIENCE, in_thread
from torchrl_mt.collectors import Limits
from torchrl_mt.envs import ChatEnvAdapter, calculate
from torchrl_mt.envs.torchrl_data import with_entries
from torchrl_mt.testing import tiny_chat_tokenizer

ITEMS = [{"query": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(5)]
SUM = "```python\nprint({} + 1)\n```"


class ByteRatio(Transform):
    """Pays two numbers a step and says what share of the data's budget the response took."""

    def _step(self, tensordict, next_tensordict):
        (response,) = tensordict["history"].full[..., -1].content
        budget = next_tensordict["budget"]
        share = torch.tensor([[len(response)]]) / budget
        next_tensordict["reward"] = torch.cat([share, torch.ones(1, 1)], -1)
        next_tensordict["stats"] = TensorDict(share=share, many=torch.zeros(1, 2), batch_size=[1])
        next_tensordict["truncated"] = share > 1
        next_tensordict["done"] = next_tensordict["done"] | (share > 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 2))
        return reward_spec


def tutor(**interpreter):
    env = ChatEnv(system_prompt="Use python.")
    return env.append_transform(PythonInterpreter(**interpreter)).append_transform(
        GSM8KRewardParser()
    )


def children():
    return psutil.Process().children(recursive=True)


def plain(messages):
    return [dict(message) for message in messages]


@pytest.fixture
def adapter():
    """Makes adapters and closes them."""
    made = []

    def make(factory, **settings):
        made.append(ChatEnvAdapter(factory, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


# Opening


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?", "tool_calls": [{"name": "f"}]},
    {"role": "user", "content": "2 + 2?"},
]
HELLO = [{"role": "user", "content": "hello"}]


DATA = {"query": "hello", "answer": None, "n": 3, "x": torch.zeros(2, 2), "meta": {"a": [1]}}
OF_HELLO = ["hello", {"query": "hello"}, {"query": "hello", "messages": CHAT, "seed": 3}]
OF_HELLO += [History.from_chats(HELLO), DATA]
OF_CHAT = [CHAT, {"messages": CHAT}, {"query": CHAT}, {"query": History.from_chats(CHAT)}]


@pytest.mark.parametrize(
    ("data", "opening"), [*((x, HELLO) for x in OF_HELLO), *((x, CHAT) for x in OF_CHAT)]
)
def test_the_prompt_comes_from_the_data(adapter, data, opening):
    env = adapter(ChatEnv)
    assert plain(env.reset(data)) == opening
    assert not env.step("4").done
    assert env.step("5").messages == ()
    assert plain(env.reset(data)) == opening


def test_the_environments_system_prompt_goes_first(adapter):
    env = adapter(lambda: ChatEnv(system_prompt="Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert plain(env.reset(CHAT[::2])) == [system, *CHAT[::2]]


def test_the_prompt_is_found_under_the_environments_name_for_it(adapter):
    env = adapter(lambda: ChatEnv(data_key="question"))
    assert plain(env.reset({"question": "hello", "query": "no"})) == HELLO


# Stepping


def test_tools_and_rewards_of_a_whole_episode(adapter):
    env = adapter(tutor)
    env.reset(ITEMS[3])
    step = env.step(SUM.format(3))
    (message,) = step.messages
    assert message == {"role": "tool", "content": "Code block 1 executed successfully:\n4\n"}
    assert (step.reward, step.done) == (0.0, False)
    step = env.step("<think>easy</think><answer>4</answer>")
    assert step.messages == ()
    assert (step.reward, step.terminated) == (1.0, True)
    parts = dict.fromkeys(["reward_answer", "reward_think", "reward_right"], 1.0)
    assert step.info == {**parts, "success": True}
    with pytest.raises(RuntimeError, match="reset"):
        env.step("again")


def test_a_step_limit_truncates(adapter):
    env = adapter(lambda: tutor().append_transform(StepCounter(2)))
    env.reset(ITEMS[0])
    assert not env.step("hm").done
    step = env.step(SUM.format(0))
    assert (step.done, step.truncated, len(step.messages)) == (True, True, 1)
    assert step.info["step_count"] == 2
    env.reset(ITEMS[0])
    env.step("hm")
    assert env.step("<answer>1</answer>").terminated


@pytest.mark.parametrize(
    ("flags", "done", "truncated"),
    [
        ("done", True, False),
        ("terminated", True, False),
        ("truncated", True, True),
        ("done truncated", True, True),
        ("done terminated truncated", True, False),
        ("", False, False),
    ],
)
def test_flags_that_a_transform_may_set(adapter, flags, done, truncated):
    class Flags(Transform):
        def _step(self, tensordict, next_tensordict):
            ones = torch.ones(1, 1, dtype=torch.bool)
            return next_tensordict.update(dict.fromkeys(flags.split(), ones))

    env = adapter(lambda: ChatEnv().append_transform(Flags()))
    env.reset("hello")
    step = env.step("hm")
    assert (step.done, step.truncated) == (done, truncated)


def test_numbers_of_the_data_are_tensors_and_rewards_are_summed(adapter):
    env = adapter(lambda: ChatEnv().append_transform(ByteRatio()))
    env.reset({"query": "hello", "budget": 4})
    step = env.step("abc")
    assert (step.reward, step.done) == (1.75, False)
    assert step.info == {"stats/share": 0.75}
    step = env.step("abcdef")
    assert (step.reward, step.done, step.truncated) == (2.5, True, True)
    env = adapter(lambda: ChatEnv().append_transform(ByteRatio()), reward_key=("stats", "many"))
    env.reset({"query": "hello", "budget": 4})
    step = env.step("abc")
    assert (step.reward, step.info) == (0.0, {"stats/share": 0.75})


def test_the_conversation_is_that_of_torchrl(adapter):
    """The same responses put into the same environment by hand give the same conversation."""
    responses = [SUM.format(3), "hm", SUM.format("x") + " and " + SUM.format(7)]
    env = adapter(tutor)
    ours = plain(env.reset(ITEMS[3]))
    for response in responses:
        ours += [{"role": "assistant", "content": response}, *plain(env.step(response).messages)]
    by_hand = ChatEnv(system_prompt="Use python.").append_transform(PythonInterpreter())
    root = by_hand.reset(TensorDict({"query": ITEMS[3]["query"]}, batch_size=(1,)))
    for response in responses:
        said = History.from_chats([[{"role": "assistant", "content": response}]])
        root["history"].full = root["history"].prompt.extend(said, inplace=False, dim=-1)
        root = by_hand.step_mdp(by_hand.step(root))
    history = root["history"].prompt[0]
    expected = zip(history.role, history.content, strict=True)
    assert len(ours) == 8
    # A traceback names its temporary file.
    assert [(m["role"], m["content"][:30]) for m in ours] == [(r, c[:30]) for r, c in expected]


@settings(max_examples=15)
@given(st.lists(st.text(), min_size=1, max_size=2))
def test_any_response_is_taken_as_it_is(responses):
    env = ChatEnvAdapter(lambda: ChatEnv().append_transform(SimpleToolTransform({})))
    env.reset("hello")
    for response in responses:
        assert env.step(response).messages == ()
        assert env._shown[-1] == {"role": "assistant", "content": response}
    env.close()


def test_messages_may_be_added_in_any_role(adapter):
    def factory(**settings):
        return ChatEnv().append_transform(AddThinkingPrompt(cond=lambda td: True, **settings))

    env = adapter(lambda: factory(edit_last_turn=False, role="user", prompt="Sure?"))
    env.reset("hello")
    for _ in range(2):
        assert plain(env.step("4").messages) == [{"role": "user", "content": "Sure?"}]
    env = adapter(lambda: factory(edit_last_turn=True))
    env.reset("hello")
    with pytest.raises(RuntimeError, match="only adds messages"):
        env.step("<answer>4</answer>")


class Search:
    name = "search"

    def __call__(self, what, **state):
        return {"found": what.upper()}


TOOLS = {
    "Tool add executed successfully:\n3": lambda: SimpleToolTransform(
        {"add": lambda a, b: a + b}, tool_name="user"
    ),
    "Tool add failed:\nTool add not found": lambda: SimpleToolTransform({}, tool_name="user"),
    '<tool_results>\nTool search (call 1) succeeded:\n  Result: {\n  "found": "X"\n}\n'
    "</tool_results>": lambda: ExecuteToolsInOrder(ToolRegistry([Search()]), XMLBlockParser()),
}


@pytest.mark.parametrize("result", TOOLS)
def test_tool_transforms(adapter, result):
    env = adapter(lambda: ChatEnv().append_transform(TOOLS[result]()))
    env.reset("hello")
    asked = ['<tool>add\n{"a": 1, "b": 2}</tool>', '<tool name="search">{"what": "x"}</tool>']
    (message,) = env.step(asked["search" in result]).messages
    assert message["content"] == result
    assert message["role"] in ("user", "tool")


def test_transforms_in_environments_within_environments(adapter):
    def factory():
        inner = TransformedEnv(ChatEnv(), GSM8KRewardParser(), auto_unwrap=False)
        return TransformedEnv(inner, StepCounter(3), auto_unwrap=False)

    env = adapter(factory)
    env.reset(ITEMS[2])
    assert env.step("hm").info["step_count"] == 1
    assert env.step("<answer>3</answer>").reward == 1.0


# Data loaders


def loading(loader):
    """A data loader as a transform of the user."""
    primer = DataLoadingPrimer(loader, batch_size=(1,), repeats=3)
    return ChatEnv(batch_size=(1,), system_prompt="Add.").append_transform(primer)


def from_loader(make, loader):
    return make(loader, batch_size=(1,), repeats=3, system_prompt="Add.")


@pytest.mark.parametrize(
    "make",
    [*(partial(from_loader, each.from_dataloader) for each in (ChatEnv, DatasetChatEnv)), loading],
)
def test_a_seed_is_an_item_of_the_environments_data_set(adapter, make):
    loader = DataLoader(ITEMS, batch_size=2, shuffle=True)
    env = adapter(lambda: make(loader).append_transform(GSM8KRewardParser()))
    for seed in (2, 2, 7, 0, 4):
        messages = env.reset({"seed": seed})
        assert plain(messages)[-1] == {"role": "user", "content": ITEMS[seed % 5]["query"]}
        assert env.step(f"<answer>{seed % 5 + 1}</answer>").reward == 1.0


def from_items():
    return ChatEnv.from_dataloader(DataLoader(ITEMS), batch_size=(1,))


def test_data_goes_before_the_environments_data_set(adapter):
    assert plain(adapter(from_items).reset({"query": "hello", "answer": "#### 9"})) == HELLO


class Counting(IterableDataset):
    """Counts on from iterator to iterator, so that no item comes twice."""

    def __init__(self):
        self.count = itertools.count()

    def __iter__(self):
        for k in self.count:
            yield {"query": f"{k}?", "answer": f"#### {k}"}


def test_a_loader_that_only_iterates_is_shared_and_gives_each_seed_an_item(adapter):
    env = adapter(lambda: ChatEnv.from_dataloader(DataLoader(Counting()), batch_size=(1,)))

    def question(seed, env):
        (message,) = env.reset({"seed": seed} if seed is not None else None)
        env.close()
        return message["content"]

    copies = [copy.deepcopy(env) for _ in range(3)]
    asked = [question(seed, other) for seed in (7, 1, 10**9) for other in copies]
    assert asked == [question for question in asked[::3] for _ in range(3)]
    assert len(set(asked)) == 3
    asked += [question(None, other) for other in copies]
    assert len(set(asked)) == 6
    assert question(1, env) == asked[3]


def test_countdown(adapter):
    env = adapter(lambda: CountdownEnv(max_steps=3, num_count=2, seed=0))
    others = [copy.deepcopy(env) for _ in range(4)]
    messages = [other.reset({"seed": 5}) for other in others]
    assert all(opening == messages[0] for opening in messages)
    assert [message["role"] for message in messages[0]] == ["system", "user"]
    assert others[0].reset({"seed": 6}) != messages[0]
    numbers, target = re.findall(r"\[(.*?)\].*?([0-9]+)", messages[0][1]["content"], re.DOTALL)[0]
    sums = [
        f"{x} {symbol} {y}"
        for x, y in itertools.permutations(numbers.split(", "))
        for symbol in "+-*/"
    ]
    right = [text for text in sums if calculate(text) == int(target)]
    step = others[1].step(f"<answer>{right[0]}</answer>")
    assert (step.reward, step.terminated) == (1.0, True)
    for other in others:
        other.close()


@pytest.mark.parametrize("collate", ["default", "tensordict"])
def test_collated_items_come_back_as_they_were(adapter, collate):
    items = [{"query": f"{k}?", "n": k, "x": torch.arange(2) + k} for k in range(4)]

    def stack(batch):
        return torch.stack([TensorDict.from_dict(item) for item in batch])

    loader = DataLoader(items, batch_size=2, collate_fn=None if collate == "default" else stack)
    seen = []

    class Look(Transform):
        def _step(self, tensordict, next_tensordict):
            seen.append((next_tensordict["query"], next_tensordict["n"], next_tensordict["x"]))
            return next_tensordict

    env = adapter(lambda: ChatEnv.from_dataloader(loader, batch_size=(1,)).append_transform(Look()))
    env.reset({"seed": 6})
    env.step("hm")
    ((query, n, x),) = seen
    assert (query, n.tolist(), x.tolist()) == (["2?"], [2], [[2, 3]])


def test_data_is_not_written_into(adapter):
    class Write(Transform):
        def _reset(self, tensordict, tensordict_reset):
            tensordict["x"].mul_(3)
            return tensordict_reset

        def _step(self, tensordict, next_tensordict):
            next_tensordict["x"].zero_()
            return next_tensordict

    data = {"query": "hello", "x": torch.ones(2)}
    env = adapter(lambda: ChatEnv().append_transform(Write()))
    env.reset(data)
    env.step("hm")
    assert data["x"].tolist() == [1.0, 1.0]


# What is refused


class NeedsLogProbs(Transform):
    def __init__(self):
        super().__init__(in_keys=[("log_probs", "full")], out_keys=["reward"])


def with_transform(kind):
    return lambda: ChatEnv().append_transform(kind())


def reset(factory, data="hello"):
    with closing(ChatEnvAdapter(factory)) as env:
        env.reset(data)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(
            refused('data["query"]…no data loader', reset, ChatEnv, data)
            for data in (None, {}, {"seed": 3}, {"query": None})
        ),
        *(
            refused("data must be a mapping", reset, ChatEnv, data, error=TypeError)
            for data in (3, [], ["hello"])
        ),
        refused('data["question"]', reset, lambda: ChatEnv(data_key="question"), {"query": "a"}),
        refused("data loader would, got no ['answer']", reset, from_items),
        refused("batch size [1]…got [2]", reset, lambda: ChatEnv(batch_size=(2,))),
        refused("input_mode='history', got 'text'", reset, lambda: text_mode()),
        refused("input_mode='history', got None", reset, TicTacToeEnv),
        refused("KLComputation needs tokens or log-prob", reset, with_transform(KLComputation)),
        refused("NeedsLogProbs needs tokens or log-prob", reset, with_transform(NeedsLogProbs)),
        refused("must make a TorchRL environment, got str", reset, lambda: "env", error=TypeError),
        refused("factory must be a callable", reset, 3, error=TypeError),
        refused("factory must be a callable", reset, "ChatEnv", error=TypeError),
        refused("got ChatEnv: pass lambda", reset, ChatEnv(), error=TypeError),
    ],
)
def test_what_text_cannot_play_in_is_refused(call, error, text):
    check_refused(call, error, text)


class Closing(Transform):
    closed = 0

    def close(self):
        self.closed += 1


def test_a_refused_reset_changes_nothing_and_leaves_no_environment(adapter):
    made = []

    def factory():
        made.append(tutor().append_transform(Closing()))
        return made[-1]

    env = adapter(factory)
    env.reset(ITEMS[0])
    for data in (None, 3):
        with pytest.raises((ValueError, TypeError)):
            env.reset(data)
    assert [environment.transform[-1].closed for environment in made] == [0, 1, 1]
    assert env.step("<answer>1</answer>").reward == 1.0
    env.reset(ITEMS[1])
    assert [environment.transform[-1].closed for environment in made] == [1, 1, 1, 0]
    env.close()
    env.close()
    assert [environment.transform[-1].closed for environment in made] == [1, 1, 1, 1]


# Life and death


def test_close_leaves_no_subprocess():
    before = set(children())
    held = []  # so that none is closed for being collected

    def factory():
        held.append(tutor(persistent=True))
        return held[-1]

    env = ChatEnvAdapter(factory)
    env.reset(ITEMS[0])
    env.step("```python\nx = 41\n```")
    (message,) = env.step("```python\nprint(x + 1)\n```").messages
    assert message["content"].endswith("42\n")
    (first,) = set(children()) - before
    env.reset(ITEMS[1])
    assert not first.is_running()
    assert "NameError" in env.step("```python\nprint(x + 1)\n```").messages[0]["content"]
    assert len(set(children()) - before) == 1
    env.close()
    env.close()
    assert set(children()) <= before
    with pytest.raises(RuntimeError, match="reset"):
        env.step("hello")


@pytest.fixture
def slow_step():
    """An adapter that was closed during a step, the calls to end and await it, and how often its
    environments were closed."""
    entered, go_on, made = threading.Event(), threading.Event(), []

    def slow():
        entered.set()
        assert go_on.wait(PATIENCE)
        return "done"

    def factory():
        env = ChatEnv().append_transform(SimpleToolTransform({"slow": slow}))
        made.append(env.append_transform(Closing()))
        return made[-1]

    env = ChatEnvAdapter(factory)
    env.reset("hello")
    stepped = in_thread(env.step, "<tool>slow\n</tool>")
    assert entered.wait(PATIENCE)
    env.close()
    return env, go_on.set, stepped, lambda: [each.transform[-1].closed for each in made]


def test_close_does_not_wait_for_the_step_under_way_which_closes_itself(slow_step):
    env, go_on, stepped, closed = slow_step
    env.close()
    assert closed() == [0]
    go_on()
    assert stepped().messages[0]["content"].endswith("done")
    assert closed() == [1]
    with pytest.raises(RuntimeError, match="reset"):
        env.step("hi")


def test_a_reset_after_a_close_during_a_step_has_an_environment(slow_step):
    env, go_on, stepped, closed = slow_step
    reset = in_thread(env.reset, "again")
    go_on()
    stepped()
    reset()
    assert closed() == [1, 0]
    assert not env.step("hi").done
    env.close()
    assert closed() == [1, 1]


def test_a_close_during_a_reset_closes_what_it_makes():
    entered, go_on = threading.Event(), threading.Event()
    made = []

    def factory():
        entered.set()
        assert go_on.wait(PATIENCE)
        made.append(ChatEnv().append_transform(Closing()))
        return made[-1]

    env = ChatEnvAdapter(factory)
    reset = in_thread(env.reset, "hello")
    assert entered.wait(PATIENCE)
    env.close()
    go_on.set()
    reset()
    assert made[0].transform[-1].closed == 1


@given(st.lists(st.sampled_from(["step", "close", "reset"]), min_size=2, max_size=12))
@settings(max_examples=8)
def test_whatever_meets_in_an_adapter_every_environment_is_closed_once(calls):
    made = []

    def factory():
        made.append(ChatEnv().append_transform(Closing()))
        return made[-1]

    env = ChatEnvAdapter(factory)
    env.reset("hello")

    def call(name):
        with contextlib.suppress(RuntimeError):  # no episode under way
            getattr(env, name)(*([] if name == "close" else ["hello"]))

    for called in [in_thread(call, name) for name in calls]:
        assert called() is None
    env.close()
    assert [environment.transform[-1].closed for environment in made] == [1] * len(made)


def test_a_copy_shares_the_factory_and_nothing_else(adapter):
    class Factory:
        def __call__(self):
            return ChatEnv()

        def __deepcopy__(self, memo):
            raise AssertionError("a factory may hold what must not be copied.")

    env = adapter(Factory(), reward_key="score")
    env.reset("hello")
    other = copy.deepcopy(env)
    assert (other.factory, other.reward_key) == (env.factory, "score")
    with pytest.raises(RuntimeError, match="reset"):
        other.step("hi")
    assert not env.step("hi").done


# TorchRL's own check


def text_mode(transform=None):
    """In history mode, TorchRL's ChatEnv does not itself pass the check (its spec has unset keys)."""
    env = ChatEnv(input_mode="text", tokenizer=tiny_chat_tokenizer("a b"))
    return env if transform is None else env.append_transform(transform)


@pytest.mark.parametrize("transform", [None, GSM8KRewardParser, StepCounter])
def test_what_carries_the_data_keeps_to_the_specs(transform):
    env = text_mode(None if transform is None else transform())
    data = {"query": "a", "answer": "#### 1", "n": 3, "x": torch.zeros(2)}
    check_env_specs(with_entries(env, data))


# The collector


def compute_then_answer(prompt):
    """Run the sum once, then answer what the interpreter printed, or wrongly about 3."""
    printed = prompt.partition("successfully:\n")[2].partition("\n")[0]
    asked = prompt.partition("user\n")[2].partition(" ")[0]
    if not printed:
        return SUM.format(asked)
    return f"<answer>{9 if asked == '3' else printed}</answer>"


def test_the_collectors_ledger_of_a_chat_environment():
    before = set(children())
    engine = speaker(compute_then_answer)
    env = ChatEnvAdapter(lambda: tutor(persistent=True))
    limits = Limits(max_turns=5)
    batch, _ = collected(env, engine, ITEMS[2:4], 4, group_size=2, limits=limits)
    assert batch.batch_size == (8,)
    assert batch["next", "reward"].flatten().tolist() == pytest.approx([0, 1, 0, 1, 0, 0.1, 0, 0.1])
    assert batch["next", "done"].flatten().tolist() == [False, True] * 4
    assert batch["next", "terminated"].flatten().tolist() == [False, True] * 4
    assert (batch["group"] % 1_000_000).tolist() == [0] * 4 + [1] * 4
    prompts = batch.get(("tokens", "prompt"), as_list=True)
    responses = batch.get(("tokens", "response"), as_list=True)
    seen = sorted((prompt, answer.token_ids) for prompt, answer in engine.calls)
    written = zip(prompts, responses, strict=True)
    assert sorted((p.tolist(), r.tolist()) for p, r in written) == seen
    assert engine.tokenizer.decode(torch.cat([prompts[1], responses[1]])) == (
        "<|im_start|>system\nUse python.<|im_end|>\n<|im_start|>user\n2 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n```python\nprint(2 + 1)\n```<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nCode block 1 executed successfully:\n3\n\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<answer>3</answer><|im_end|>"
    )
    infos = [info["success"] for info in batch.get("info").tolist()]
    assert infos == [False, True, False, True, False, False, False, False]
    assert set(children()) <= before


def test_the_collector_without_data_goes_through_the_environments_data_set():
    def factory():
        env = ChatEnv.from_dataloader(DataLoader(ITEMS, shuffle=True), batch_size=(1,))
        return env.append_transform(PythonInterpreter()).append_transform(GSM8KRewardParser())

    engine = speaker(compute_then_answer)
    batch, _ = collected(ChatEnvAdapter(factory), engine, number=10, group_size=2)
    ended = batch["next", "done"].flatten()
    rewards = batch["next", "reward"].flatten()[ended]
    assert rewards.tolist() == pytest.approx([1, 1, 1, 1, 1, 1, 0.1, 0.1, 1, 1])
