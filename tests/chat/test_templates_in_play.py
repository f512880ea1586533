"""Episodes under chat templates that rewrite dialogues, or take some messages only in their place."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.transforms import MergeTurns

from .templates import QWEN3, Shape, byte_level

TURNS = 3

ASKED_TOOL = Shape(
    name="a tool's answer only behind a question to it",
    template="""
{%- for message in messages %}
    {%- if message.role == 'tool' and 'look' not in messages[loop.index0 - 1].content %}
        {{- raise_exception('nobody asked the tool') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}""",
    stop="<|end|>",
    eos="<|end|>",
    special=("<|user|>", "<|assistant|>", "<|tool|>"),
)


class Questions(TextEnv):
    """Answers three times, in the given role."""

    inline = True

    def __init__(self, role):
        self.role = role

    def reset(self, data=None):
        self.left = TURNS
        return [{"role": "user", "content": "guess"}]

    def step(self, response):
        self.left -= 1
        return TextStep([{"role": self.role, "content": "higher"}], 1.0, self.left == 0)


def play(shape, role, answer, on_break="fork"):
    """One episode in which the model says the same every time: the rows, the calls, the stats."""
    tokenizer = shape.on(byte_level())
    ids = tokenizer(answer + shape.stop, add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(tokenizer, lambda prompt: ids)
    with MultiTurnCollector(
        lambda: Questions(role), engine, episodes_per_batch=1, total_episodes=1, on_break=on_break
    ) as collector:
        (batch,) = collector
        stats = collector.stats()
    return MergeTurns()(batch), engine.calls, stats


def lines(rows):
    """Each row's tokens without padding."""
    whole, here = rows["tokens", "full"], rows["masks", "all_attention_mask"]
    return [line[seen].tolist() for line, seen in zip(whole, here, strict=True)]


@pytest.mark.parametrize(("on_break", "forks"), [("fork", TURNS - 1), ("append", 0)])
def test_stripped_thinking_is_a_fork_or_stays_as_is_asked(caplog, on_break, forks):
    with caplog.at_level(logging.WARNING, "torchrl_mt"):
        rows, calls, stats = play(QWEN3, "user", "<think>\nwhy\n</think>\n\n8", on_break)
    assert stats["forks"] == forks
    assert len(rows) == forks + 1
    warnings = [r for r in caplog.records if "not prefix-stable" in r.getMessage()]
    assert len(warnings) == 1
    said = [[*prompt, *answer.token_ids] for prompt, answer in calls]
    assert lines(rows) == (said if on_break == "fork" else said[-1:])
    assert int(rows["masks", "all_assistant_mask"].sum()) == sum(len(a.token_ids) for _, a in calls)


@pytest.mark.parametrize("on_break", ["fork", "append"])
def test_a_message_that_only_the_dialogue_allows_is_appended(on_break):
    rows, calls, stats = play(ASKED_TOOL, "tool", "look", on_break)
    assert (stats["accepted"], stats["forks"], len(calls)) == (1, 0, TURNS)
    prompt, answer = calls[-1]
    assert lines(rows) == [[*prompt, *answer.token_ids]]
    assert torch.equal(rows["turns", "full"].unique(), torch.arange(TURNS))


def test_a_message_that_the_dialogue_refuses_rejects_its_episode():
    tokenizer = ASKED_TOOL.on(byte_level())
    ids = tokenizer("8<|end|>", add_special_tokens=False)["input_ids"]
    with (
        MultiTurnCollector(
            lambda: Questions("tool"),
            ScriptedEngine(tokenizer, lambda prompt: ids),
            episodes_per_batch=1,
            max_consecutive_failures=1,
        ) as collector,
        pytest.raises(Exception, match="nobody asked the tool"),
    ):
        next(iter(collector))
