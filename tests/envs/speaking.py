"""Models that say what a rule on the text of the prompt says, and the episodes that they play."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase

from tests.chat.families import QWEN25
from tests.chat.families_in_play import tokenizer_of
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import MultiTurnCollector

Message = dict[str, Any]


def call(name: str, *, id: str = "1", **arguments: Any) -> Message:
    """A call of a tool."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def says(content: str = "", *calls: Message) -> Message:
    """A message of the model."""
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


def adds(prompt: str) -> str | Message:
    """Have a tool add 3 and 4, then say what it said."""
    results = prompt.split("<tool_response>\n")[1:]
    return (
        results[-1].split("\n</tool_response>")[0] if results else says("", call("add", a=3, b=4))
    )


def speaker(answer: Callable[[str], str | Message]) -> ScriptedEngine:
    """An engine that answers a prompt by a text or a message."""
    tokenizer = tokenizer_of(QWEN25)
    stop = tokenizer.convert_tokens_to_ids(QWEN25.stop)

    def rule(prompt_ids: list[int]) -> list[int]:
        said = answer(tokenizer.decode(prompt_ids))
        text = QWEN25.say(said) if isinstance(said, Mapping) else said
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], stop]

    return ScriptedEngine(tokenizer, rule, [stop])


def collected(
    env: Any, engine: ScriptedEngine, data: Any = None, number: int = 1, **options: Any
) -> tuple[TensorDictBase, dict[str, Any]]:
    """The batch of a number of episodes, and the collector's counts; nothing may fail by default."""
    settings = {"episodes_per_batch": number, "total_episodes": number, **options}
    settings.setdefault("max_consecutive_failures", 1)
    with MultiTurnCollector(env, engine, data, **settings) as collector:
        (batch,) = collector
        return batch, collector.stats()
