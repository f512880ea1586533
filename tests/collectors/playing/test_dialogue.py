"""Dialogues that environments change, and dialogues that become too long."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.chat import families as f
from tests.chat.families_in_play import stop_of, tokenizer_of
from tests.collectors.runs import run_of
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import ChatOptions
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_tokenizer
from torchrl_mt.transforms import MergeTurns

WORDS = [f"w{k}" for k in range(64)]


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


class Talk(TextEnv):
    """Opens with ``data["opening"]`` words and replies with ``data["replies"]`` words, turn by turn."""

    def __init__(self, fold=None):
        self.fold = fold

    def reset(self, data):
        self.replies = iter(data["replies"])
        self.left = len(data["replies"])
        self.dialogue = [user(" ".join(WORDS[: data["opening"]]))]
        return list(self.dialogue)

    def step(self, response):
        self.left -= 1
        new = user(" ".join(random.choices(WORDS, k=next(self.replies))))
        self.dialogue += [said(response), new]
        history = None
        if self.fold and len(self.dialogue) > self.fold:
            history = [self.dialogue[0], user("w1")]
            self.dialogue = [*history, new]
        return TextStep([new], reward=1.0, done=self.left == 0, history=history)


def play(env, data, rule=None, tokenizer=None, **options):
    """Play an item: the batch, the prompts and answers in order, the tokenizer, the stats."""
    tokenizer = tokenizer or tiny_chat_tokenizer(" ".join(WORDS))
    engine = ScriptedEngine(tokenizer, rule or (lambda _: tokenizer("w2 w3<end>")["input_ids"]))
    options = {"total_episodes": 1, "max_consecutive_failures": 1, **options}
    (batch,), stats = run_of(env, engine, [data], **options)
    return (
        batch,
        [(prompt, list(each.token_ids)) for prompt, each in engine.calls],
        tokenizer,
        stats,
    )


def failure_of(env, data, **options):
    """The cause of the error that ends a run of one item."""
    with pytest.raises(RuntimeError) as caught:
        play(env, data, **options)
    return caught.value.__cause__


def test_a_history_takes_the_place_of_the_dialogue_and_starts_a_row():
    batch, calls, tokenizer, stats = play(Talk(fold=5), {"opening": 2, "replies": [1] * 5})
    prompts = [tokenizer.decode(prompt) for prompt, _ in calls]
    begin = "<user> w0 w1 <end> "
    assert prompts[1].startswith(begin + "<assistant> w2 w3 <end> <user>")
    assert prompts[3].startswith(begin + "<user> w1 <end> <user>")
    assert prompts[4].startswith(prompts[3] + " w2 w3 <end> <user>")
    assert stats["forks"] == 1
    rows = MergeTurns()(batch)
    assert len(rows) == 2
    mask = rows["masks", "all_assistant_mask"]
    assert rows["tokens", "full"][mask].tolist() == [t for _, answer in calls for t in answer]


def test_answers_in_a_history_are_rendered_like_answers():
    class Shortens(TextEnv):
        def reset(self, data):
            return [user("w0")]

        def step(self, response, message):
            if response == "w5":
                return TextStep(done=True)
            return TextStep([user("w4")], history=[user("w0"), {**message, "content": "w1"}])

    answers = iter(["w3<end>", "w5<end>"])
    tokenizer = tiny_chat_tokenizer(" ".join(WORDS))
    _, calls, _, _ = play(Shortens(), {}, lambda prompt: tokenizer(next(answers))["input_ids"])
    assert tokenizer.decode(calls[1][0]) == (
        "<user> w0 <end> <assistant> w1 <end> <user> w4 <end> <assistant>"
    )


def test_a_history_of_the_wrong_type_is_named():
    with pytest.raises(TypeError, match=r"history must be a list of messages .* got dict"):
        TextStep(history=user("a"))

    class Wrong(Talk):
        def step(self, response):
            return TextStep([user("w1")], history=["w0"])

    failure = failure_of(Wrong(), {"opening": 1, "replies": [1, 1]})
    assert "TextStep.history must be" in str(failure)


def reference(calls, opening, replies, longest, count):
    """The prompts as number of kept turns: as many as fit into three quarters, when one is too long."""
    kept, result = [], []
    for k in range(len(replies)):
        if k:
            kept.append(k - 1)
            if count(opening, kept) > longest:
                while len(kept) > 1 and count(opening, kept) > 0.75 * longest:
                    kept.pop(0)
        result.append(list(kept))
    return result


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_that_is_too_long_loses_its_oldest_turns(seed):
    rng = random.Random(seed)
    opening, longest = rng.randint(1, 8), rng.randint(32, 48)
    replies = [rng.randint(1, 12) for _ in range(12)]
    data, chat = {"opening": opening, "replies": replies}, ChatOptions(max_prompt_tokens=longest)
    batch, calls, _, stats = play(Talk(), data, chat=chat)
    # An opening has its words, two tokens around them and <assistant>; a turn 4 and its reply's 3 more.
    count = lambda words, kept: words + 3 + sum(4 + replies[k] + 2 for k in kept)  # noqa: E731
    expected = reference(calls, opening, replies, longest, count)
    assert [len(prompt) for prompt, _ in calls] == [count(opening, kept) for kept in expected]
    first = calls[0][0][:-1]
    assert all(prompt[: len(first)] == first for prompt, _ in calls)
    cuts = sum(before[:1] != after[:1] for before, after in pairwise(expected[1:]))
    assert stats["forks"] == cuts
    rows = MergeTurns()(batch)
    assert len(rows) == 1 + cuts
    trained = rows["tokens", "full"][rows["masks", "all_assistant_mask"]]
    assert trained.tolist() == [t for _, answer in calls for t in answer]


@pytest.mark.parametrize(
    ("opening", "replies", "what"),
    [(30, [1, 1], "the opening has 33 tokens"), (2, [1, 30, 1], "the newest turn have")],
)
def test_what_can_not_be_left_out_rejects_the_episode_by_name(opening, replies, what, caplog):
    data, chat = {"opening": opening, "replies": replies}, ChatOptions(max_prompt_tokens=30)
    assert failure_of(Talk(), data, chat=chat).cause == "prompt_too_long"
    assert what in caplog.text


def test_a_family_that_rewrites_its_dialogues_is_shortened_too():
    family = f.QWEN3
    tokenizer = tokenizer_of(family)
    text = family.say({"role": "assistant", "content": "w2", "reasoning_content": "w3"})
    text += stop_of(family, {"role": "assistant", "content": "w2"})
    rule = lambda prompt: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    data = {"opening": 2, "replies": [3] * 12}
    _, whole, _, _ = play(Talk(), data, rule, tokenizer)
    longest = len(whole[0][0]) * 4
    _, calls, _, _ = play(
        Talk(), data, rule, tokenizer, chat=ChatOptions(max_prompt_tokens=longest)
    )
    lengths = [len(prompt) for prompt, _ in calls]
    assert max(lengths) <= longest < max(len(prompt) for prompt, _ in whole)
    assert len(lengths) == 12


@pytest.mark.parametrize("kind", ["image", "image_url", "audio"])
def test_what_is_no_text_is_refused_by_name(kind):
    class Screen(TextEnv):
        def reset(self, data):
            return [{"role": "user", "content": [{"type": kind, kind: "data:"}]}]

        def step(self, response):
            raise AssertionError("not reached")

    text = f"messages must be text, since the model gets tokens alone, got a part of type '{kind}'"
    assert text in str(failure_of(Screen(), {}))
