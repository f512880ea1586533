"""Functions of text as rewards: texts, tokens and columns arrive, rewards land on their turns."""

import random

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tests.collectors.scripted import ScriptedEngine
from tests.objectives.conftest import make_model
from tests.objectives.rewards import test_mix
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.objectives import ExperienceMaker, TextReward
from torchrl_mt.testing import tiny_chat_tokenizer
from torchrl_mt.transforms import MergeTurns


class Numbers:
    """A tokenizer whose words are the ids; those below 2 are special."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return " ".join(str(token) for token in token_ids if not skip_special_tokens or token > 1)


def mixed(source, rows):
    return test_mix.mixed(source, rows)[0]


def turns_of(episodes):
    """The turns of episodes, each a list of (prompt, response)."""
    return lazy_stack(
        [
            TensorDict(
                {
                    ("tokens", "prompt"): torch.tensor(prompt),
                    ("tokens", "response"): torch.tensor(response, dtype=torch.int64),
                    ("next", "done"): torch.tensor([turn == len(episode) - 1]),
                    ("collector", "traj_ids"): torch.tensor(number),
                }
            )
            for number, episode in enumerate(episodes)
            for turn, (prompt, response) in enumerate(episode)
        ]
    )


def rows_of(episodes, **items):
    """Rows of episodes, with an item for each."""
    batch = turns_of(episodes)
    for name, values in items.items():
        batch[name] = NonTensorStack(
            *(value for value, episode in zip(values, episodes, strict=True) for _ in episode)
        )
    return MergeTurns(carry=("label", "reference", *items))(batch)


ONE = [([5, 6], [7]), ([5, 6, 7, 0, 8], [9, 1])]
FORKED = [([5], [6]), ([5, 6, 4], [3]), ([5, 2], [8, 9])]


def test_texts_and_columns_arrive():
    seen = {}

    def fn(prompts, completions, *, messages=None, **columns):
        seen.update(columns, prompts=prompts, completions=completions, messages=messages)
        return [1.0, 2.0]

    rows = rows_of([ONE, FORKED], reference=["a", "b"], level=[1, 2])
    reward = mixed(TextReward(fn, Numbers()), rows)
    assert seen == {
        "prompts": ["5 6", "5 2"],
        "completions": ["7 8 9", "8 9"],
        "completion_ids": [[7, 0, 8, 9, 1], [8, 9]],
        "messages": None,
        "reference": ["a", "b"],
        "level": [1, 2],
    }
    assert reward.nonzero().tolist() == [[0, 6], [2, 3]]
    assert reward[0, 6] == 1.0
    assert reward[2, 3] == 2.0
    mixed(TextReward(fn, Numbers(), skip_special_tokens=False), rows)
    assert seen["completions"] == ["7 0 8 9 1", "8 9"]


def test_only_columns_with_a_parameter_are_passed():
    rows = rows_of([ONE], reference=["a"], level=[1])
    source = TextReward(lambda completions, level: [level[0]], Numbers())
    assert mixed(source, rows).sum() == 1
    source = TextReward(lambda prompts, completions, level, other=3: [level[0] + other], Numbers())
    assert mixed(source, rows).sum() == 4
    source = TextReward(lambda prompts, completions, hint: [0], Numbers(), name="judge")
    with pytest.raises(
        KeyError, match=r"'judge' has the parameters \['hint'\], but gets .*'level'"
    ):
        source(rows)


@pytest.mark.parametrize("seed", range(20))
def test_rewards_of_turns_equal_those_of_the_environment(seed):
    """Random episodes with forks and empty responses; the environment's own rewards as the reference."""
    rng = random.Random(seed)
    episodes, rewards = [], []
    for _ in range(rng.randint(1, 5)):
        line, episode = [rng.randint(2, 9)], []
        for _ in range(rng.randint(1, 6)):
            response = [rng.randint(2, 9) for _ in range(rng.randint(0, 3))]
            episode.append((list(line), response))
            line = [rng.randint(2, 9)] if rng.random() < 0.3 else [*line, *response]
            line += [rng.randint(2, 9) for _ in range(rng.randint(1, 2))]
        episode[rng.randrange(len(episode))][1].append(3)
        episodes.append(episode)
        rewards.append([float(rng.randint(-9, 9)) for _ in episode])
    turns = turns_of(episodes)
    turns["next", "reward"] = torch.tensor([reward for each in rewards for reward in each])[:, None]
    rows = MergeTurns()(turns)
    source = TextReward(lambda prompts, completions: rewards, Numbers())
    assert torch.equal(mixed(source, rows), mixed("episode", rows))


@pytest.mark.parametrize(
    "answer",
    [
        np.array([1.0, 3.0]),
        [np.float32(1), torch.tensor(3)],
        [np.array([0, 1]), np.array([1.0, 1.0, 1.0])],
        [True, 3],
    ],
)
def test_numbers_may_come_in_any_form(answer):
    reward = mixed(TextReward(lambda **texts: answer, Numbers()), rows_of([ONE, FORKED]))
    assert reward[0].sum() == 1
    assert reward[1:].sum() == 3


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (1.0, TypeError, "a list of numbers, one per episode, got float"),
        ("ab", TypeError, "a list of numbers, one per episode, got str"),
        ([1.0], ValueError, "each of the 2 episodes, got 1"),
        ([[1.0], 2.0], ValueError, "got 1 for episode 0 of the given ones, which has 2 turns"),
        ([[None, 1.0], 1.0], TypeError, "numbers, got None for episode 0"),
        (["1", 1.0], TypeError, "got '1' for episode 0"),
        ([float("nan"), 1.0], ValueError, "finite numbers"),
    ],
)
def test_answers_of_another_form_are_named(answer, error, what):
    source = TextReward(lambda prompts, completions: answer, Numbers(), name="judge")
    with pytest.raises(error, match=f"'judge' must return.*{what}"):
        mixed(source, rows_of([ONE, FORKED]))


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="fn must be a function"):
        TextReward(3, Numbers())
    with pytest.raises(TypeError, match="tokenizer must have a method decode"):
        TextReward(print, None)
    for name in ("prompts", "completion_ids"):
        with pytest.raises(ValueError, match=rf"\['{name}'\] are its texts"):
            mixed(TextReward(lambda **texts: [0], Numbers()), rows_of([ONE], **{name: ["a"]}))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_does_not_apply_where_it_returns_none(is_async):
    def fn(completions):
        return [1.0, None, [2.0, 3.0]]

    async def later(completions):
        return fn(completions)

    rows = rows_of([ONE, FORKED, ONE])
    reward = mixed(TextReward(later if is_async else fn, Numbers()), rows)
    assert rows["episode"].tolist() == [0, 1, 1, 2]
    assert reward[1:3].isnan().all()
    assert reward[0].nonzero().tolist() == [[6]]
    assert reward[3, [2, 6]].tolist() == [2.0, 3.0]
    none = mixed(
        [(TextReward(lambda prompts: [None] * 3, Numbers()), 1.0), (test_mix.by_length, 1.0)], rows
    )
    torch.testing.assert_close(none, 2 * mixed(test_mix.by_length, rows))


def test_columns_of_carried_items_arrive():
    items = [{"answer": 3, "text": "a", "messages": "m"}, {"answer": 4, 5: 6}, None]
    batch = turns_of([ONE, FORKED, ONE])
    batch["data"] = NonTensorStack(*(items[int(e)] for e in batch["collector", "traj_ids"]))
    batch["answer"] = torch.arange(len(batch))
    seen = {}

    def fn(answer, text, messages, data):
        seen.update(answer=answer, text=text, messages=messages, data=data)
        return [0.0] * 3

    source = TextReward(fn, Numbers())
    mixed(source, MergeTurns(carry=("data",))(batch))
    assert seen == {
        "answer": [3, 4, None],
        "text": ["a", None, None],
        "messages": ["m", None, None],
        "data": items,
    }
    mixed(source, MergeTurns(carry=("data", "answer"))(batch))
    assert seen["answer"] == [1, 4, 6]  # What was carried by name comes first.
    with pytest.raises(KeyError, match=r"all of them with carry=\('data',\)"):
        mixed(source, MergeTurns()(batch))


def say(role, content):
    return {"role": role, "content": content}


def test_messages_are_split_at_the_first_response():
    opening = [say("system", "s"), say("user", "2"), say("assistant", "4"), say("user", "3")]
    one, two = [*opening, say("assistant", "9")], [say("user", "?"), say("assistant", "8")]
    batch = turns_of([ONE, FORKED[:1]])
    last = [say("user", "hi"), say("assistant", "ho"), say("user", "end")]
    batch["text"] = NonTensorStack(one, two, last)
    rows = MergeTurns(carry=("text",))(batch)
    seen = {}

    def fn(prompts, completions, **others):
        seen.update(others, prompts=prompts, completions=completions)
        return [0.0, 0.0]

    mixed(TextReward(fn, Numbers(), conversational=True), rows)
    assert seen["prompts"] == [opening, last[:1]]
    assert seen["completions"] == [[one[-1], *two], last[1:]]
    assert seen["messages"] == [[*one, *two], last]
    assert seen["completion_ids"] == [[7, 0, 8, 9, 1], [6]]
    source = TextReward(fn, Numbers(), conversational=True, name="judge")
    with pytest.raises(KeyError, match=r"'judge' is conversational, .*carry=\('text', \.\.\.\)"):
        mixed(source, rows_of([ONE]))
    batch["text"] = NonTensorStack(one[:1], two, last)
    with pytest.raises(ValueError, match=r"'text' must have a message .* got 1 for 2 turns"):
        mixed(source, MergeTurns(carry=("text",))(batch))


def boxed_reward(completions, solution, log_extra=None, **kwargs):
    """In the calling convention of TRL's ``accuracy_reward``."""
    said = [completion[0]["content"] for completion in completions]
    return [
        None if gold is None else float(f"\\boxed{{{gold}}}" in text)
        for text, gold in zip(said, solution, strict=True)
    ]


def conversation_rows(*contents, **items):
    """Rows of episodes with one turn each, whose responses have ``content`` and 5 tokens."""
    batch = turns_of([[([5, 6], [7, 8, 8, 8, 9])]] * len(contents))
    batch["text"] = NonTensorStack(*([say("user", "?"), say("assistant", c)] for c in contents))
    columns = [
        dict(zip(items, values, strict=True)) for values in zip(*items.values(), strict=True)
    ]
    batch["data"] = NonTensorStack(*columns) if columns else NonTensorStack(*[{}] * len(contents))
    return MergeTurns(carry=("text", "data"))(batch)


def assert_first_alone_is_right(fn, *contents, solution):
    """Of three episodes; the function does not apply to the last."""
    rows = conversation_rows(*contents, solution=solution)
    reward = mixed(TextReward(fn, Numbers(), conversational=True), rows)
    assert reward.nansum(-1).tolist() == [1.0, 0.0, 0.0]
    assert reward.isnan().any(-1).tolist() == [False, False, True]


def test_functions_of_trls_convention_run_unchanged():
    said = r"is \boxed{1}"
    assert_first_alone_is_right(boxed_reward, said, said, "no", solution=["1", "2", None])


def test_trls_own_functions_run_unchanged():
    trl = pytest.importorskip("trl.rewards")
    rows = conversation_rows("<think>so</think>7", "7", solution=["1", "2"])

    def score(fn):
        return mixed(TextReward(fn, Numbers(), conversational=True), rows).sum(-1).tolist()

    assert score(trl.think_format_reward) == [1.0, 0.0]
    assert score(trl.get_soft_overlong_punishment(6, 4)) == [-0.75, -0.75]
    assert score(trl.get_repetition_penalty_reward(ngram_size=1)) == pytest.approx([-0.4, -0.4])


def test_trls_accuracy_runs_unchanged():
    trl = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    said = r"$\boxed{1}$"
    assert_first_alone_is_right(trl.accuracy_reward, said, said, "1", solution=["$1$", "$2$", "??"])


class Twice(TextEnv):
    """Two turns about ``data["word"]``."""

    def reset(self, data):
        self.turns = 0
        return [{"role": "user", "content": data["word"]}]

    def step(self, response):
        self.turns += 1
        return TextStep([{"role": "user", "content": "one"}], done=self.turns == 2)


def test_a_collectors_episodes():
    tokenizer = tiny_chat_tokenizer("one two three")
    engine = ScriptedEngine(tokenizer, lambda prompt: tokenizer("three<end>")["input_ids"])
    data = [{"word": "one", "reference": 1}, {"word": "two", "reference": 2}]
    with MultiTurnCollector(Twice(), engine, data, episodes_per_batch=2, total_episodes=2) as made:
        (batch,) = made
    rows = MergeTurns(carry=("reference", "text"))(batch)
    seen = {}

    def fn(prompts, completions, messages, reference):
        seen.update(prompts=prompts, completions=completions, messages=messages)
        return [[0.5, float(each)] for each in reference]

    model = make_model(vocab_size=len(tokenizer))
    made = ExperienceMaker(model, reward=TextReward(fn, tokenizer), advantage="batch")(rows)
    assert made["rewards", "shaped"].sum(-1).tolist() == [1.5, 2.5]
    assert seen["prompts"] == ["one", "two"]
    assert seen["completions"] == ["three one three"] * 2
    said = {"role": "assistant", "content": "three"}
    assert seen["messages"][1] == [
        {"role": "user", "content": "two"},
        said,
        {"role": "user", "content": "one"},
        said,
        {"role": "user", "content": "one"},
    ]

    def in_messages(prompts, completions, word):
        assert [[each["content"] for each in prompt] for prompt in prompts] == [[w] for w in word]
        assert completions == [dialogue[1:] for dialogue in seen["messages"]]
        return [float(completion[0]["content"] == "three") for completion in completions]

    rows = MergeTurns(carry=("data", "text"))(batch)
    source = TextReward(in_messages, tokenizer, conversational=True)
    made = ExperienceMaker(model, reward=source, advantage="batch")(rows)
    assert made["rewards", "shaped"].sum(-1).tolist() == [1.0, 1.0]
