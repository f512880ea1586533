"""What the tests of agents share: a server with a scripted engine, and clients of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import openai

from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.agents import AgentServer
from torchrl_mt.testing import tiny_chat_tokenizer

WORDS = ("one", "two", "three", "four")


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def counting_engine() -> ScriptedEngine:
    """An engine whose answer depends on the prompt's length."""
    tokenizer = tiny_chat_tokenizer(" ".join(WORDS))
    words = [tokenizer(word)["input_ids"][0] for word in WORDS]
    return ScriptedEngine(tokenizer, lambda p: [words[len(p) % 4], tokenizer.eos_token_id])


class GatedEngine(ScriptedEngine):
    """An engine that answers when its gate is open; counts cancelled calls."""

    def __init__(self, tokenizer: Any, rule: Any) -> None:
        super().__init__(tokenizer, rule)
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.cancelled = 0

    async def generate(self, prompt_ids: Any, **sampling: Any) -> Any:
        self.asked.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, **sampling)


def gated_engine() -> GatedEngine:
    plain = counting_engine()
    return GatedEngine(plain.tokenizer, plain.rule)


@asynccontextmanager
async def session_of(engine: Any, **options: Any):
    async with AgentServer(engine, **options) as server:
        session = server.open({"item": 1})
        try:
            yield session
        finally:
            await session.close()


def client_of(session: Any, *, socket: bool = False, **options: Any) -> openai.AsyncOpenAI:
    """The SDK's client of a session, with or without a socket."""
    if not socket:
        options["http_client"] = session.http_client
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


async def ask(client: Any, messages: Any, **options: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def post(session: Any, messages: Any, **options: Any) -> dict[str, Any]:
    """Ask without the SDK, whose own cost grows with the square of a dialogue's length."""
    body = {"messages": messages, **options}
    reply = await session.http_client.post("/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ledger_of(session: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens and log-probabilities of each turn."""
    return [
        (list(turn.prompt_ids), list(turn.completion.token_ids), list(turn.completion.log_probs))
        for turn in session.turns()
    ]


def ledger_of_engine(engine: ScriptedEngine) -> list[tuple[list[int], list[int], list[float]]]:
    return [
        (prompt, list(answer.token_ids), list(answer.log_probs)) for prompt, answer in engine.calls
    ]


async def check_stream(client: Any, messages: Any, whole: Any) -> None:
    """The parts of a stream are those of the whole completion of the same messages."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = [part async for part in await ask(client, messages, **options)]
    assert parts[-1].usage == whole.usage
    assert all(part.usage is None for part in parts[:-1])
    text = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
    assert text == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None, "stop"]


def failing(error: BaseException) -> Any:
    """What an engine's ``generate`` is where every call fails."""

    async def generate(*args: Any, **kwargs: Any) -> Any:
        raise error

    return generate
