"""Episodes in which a model of some family gives the answers that it is told to give."""

from __future__ import annotations

from functools import cache

from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.chat import ChatTokens
from torchrl_mt.collectors import ChatOptions, CollectorOptions, MultiTurnCollector
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.transforms import MergeTurns

from .templates import byte_level


@cache
def tokenizer_of(family):
    return family.on(byte_level())


@cache
def chat_of(family, on_break="fork"):
    return ChatTokens(tokenizer_of(family), on_break=on_break)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def result_of(call, content):
    """A tool's answer to a call."""
    named = {"tool_call_id": call["id"], "name": call["function"]["name"]}
    return {"role": "tool", "content": content, **named}


def kinds(family):
    """A message of each kind that the family has, and what follows it."""
    found = {"plain": {"content": "It is 8."}}
    if family.calls:
        found["call"] = {"content": "", "tool_calls": [call("look", q="a b", n=3)]}
        if family.several:
            two = [call("look", q="a"), call("find", n=2, x=[1, {"y": None}], t=True)]
            found["calls"] = {"content": "", "tool_calls": two}
        if family.says_and_calls:
            found["content and call"] = {"content": "Wait.", "tool_calls": [call("look", q="é")]}
    if family.thinks:
        thinking = {
            f"thoughts, {kind}": {**message, "reasoning_content": "hm, so\nlower"}
            for kind, message in found.items()
        }
        if family.opens:
            # A prompt that opens the thoughts has them, be they empty.
            found = {k: {**m, "reasoning_content": "so"} for k, m in found.items()}
        found |= thinking
    return {kind: {"role": "assistant", **message} for kind, message in found.items()}


def without_ids(message):
    """A message whose calls have no ids."""
    calls = [{k: v for k, v in c.items() if k != "id"} for c in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


def stop_of(family, message):
    return (family.call_stop if message.get("tool_calls") else None) or family.stop


class Records(TextEnv):
    """Answers calls as a tool does, everything else as the user, and keeps what it is given."""

    inline = True

    def __init__(self, turns, seen):
        self.left, self.seen = turns, seen

    def reset(self, data=None):
        return [{"role": "system", "content": "rules"}, {"role": "user", "content": "guess"}]

    def step(self, response, message):
        self.left -= 1
        self.seen.append((response, message))
        calls = message.get("tool_calls") or ()
        new = [{"role": "tool", "content": f"result {k}"} for k in range(len(calls))]
        return TextStep(new or [{"role": "user", "content": "more"}], 1.0, self.left == 0)


def play(family, messages, **chat):
    """An episode of these answers: what the environment saw, rows, the model's calls, stats."""
    tokenizer, seen = tokenizer_of(family), []
    texts = [family.say(message) + stop_of(family, message) for message in messages]
    stops = tokenizer.convert_tokens_to_ids([family.stop, family.call_stop or family.stop])
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    played = play_episode(tokenizer, lambda: Records(len(messages), seen), answers, stops, **chat)
    return seen, *played


def play_episode(tokenizer, env, answers, stops=(), **chat):
    """An episode in which the model samples these tokens: rows, the model's calls, stats."""
    left = iter(answers)
    engine = ScriptedEngine(tokenizer, lambda prompt: next(left), stops)
    with MultiTurnCollector(
        env,
        engine,
        episodes_per_batch=1,
        total_episodes=1,
        max_consecutive_failures=1,
        options=CollectorOptions(chat=ChatOptions(**chat)),
    ) as made:
        (batch,) = made
        return MergeTurns()(batch), engine.calls, made.stats()


def lines(rows):
    """Each row's tokens without padding."""
    whole, here = rows["tokens", "full"], rows["masks", "all_attention_mask"]
    return [line[seen].tolist() for line, seen in zip(whole, here, strict=True)]
