"""What a call of an agent costs in CPU time, beside the same call by a workflow.

Nothing is computed by a model: the engine answers at once. Each turn adds a message of 100 words and an
answer of 50 tokens, so that 128 turns are 20,000 tokens. An episode is played in five ways:

- *workflow*: a loop on the episode's engine that renders messages itself. It has no requests.
- *server*: :class:`~torchrl_mt.agents.AgentServer` is given requests as a web server gives them, by
  function call. This is the cost of the server alone.
- *http_client*: the same with the client of :attr:`Session.http_client`, in the same process.
- *socket*: the client is in another process, whose CPU does not count. The web server does.
- *openai*: OpenAI's client with ``http_client``.

CPU is that of the process, per call, the median of several episodes. *Encoded* is the number of tokens
that were encoded, over the final length of the dialogue without the sampled tokens: 1 is the least.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from tables import Part, Row, show

from torchrl_mt.agents import AgentServer
from torchrl_mt.chat.encoding import RenderedTextEncoder
from torchrl_mt.chat.tokens import ChatTokens
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.recorder import Recorder
from torchrl_mt.engines import Completion
from torchrl_mt.testing import tiny_chat_tokenizer

TURNS = (8, 128)
WORDS = [f"word{k}" for k in range(1000)]
QUESTION, ANSWER = 100, 50

Ask = Callable[[bytes], Awaitable[bytes]]


class Engine:
    """Answers at once with other tokens each time."""

    version = 0

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer(WORDS)
        self.words = self.tokenizer(" ".join(WORDS))["input_ids"]
        self.calls = 0

    async def generate(
        self, prompt_ids: Any, *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        self.calls += 1
        ids = [self.words[(self.calls * 7 + k) % 1000] for k in range(ANSWER - 1)]
        ids.append(self.tokenizer.eos_token_id)
        return Completion(ids, [-1.0] * ANSWER, [0] * ANSWER, "stop")

    def update_weights(self, source: Any) -> int:
        return 0

    def close(self) -> None:
        pass


def question(turn: int) -> dict[str, str]:
    """The user's message of a turn."""
    words = (WORDS[(turn * 31 + k) % 1000] for k in range(QUESTION))
    return {"role": "user", "content": " ".join(words)}


async def by_workflow(engine: Engine, chat: ChatTokens, turns: int) -> float:
    """Play an episode by hand; CPU seconds per call."""
    recorder = Recorder(engine, Episode(None), Limits())
    begin = time.process_time()
    dialogue: list[Any] = [question(0)]
    prompt: Any = chat.open(dialogue)
    for turn in range(turns):
        answer = await recorder.generate(prompt)
        last = answer.token_ids[-1]
        said = chat.read(answer.token_ids, prompt_ids=prompt, messages=dialogue, last_token=last)
        dialogue.append(said.in_dialogue)
        new = [question(turn + 1)]
        _, ids = chat.follow(dialogue, new, answer.token_ids, last_token=last)
        prompt = recorder.continued(ids)
        dialogue += new
    return (time.process_time() - begin) / turns


async def converse(ask: Ask, turns: int) -> float:
    """Ask for turn after turn; CPU seconds per call, those of the requests' JSON not counted."""
    messages, seconds = [question(0)], 0.0
    for turn in range(turns):
        content = json.dumps({"model": "policy", "messages": messages}).encode()
        begin = time.process_time()
        body = await ask(content)
        seconds += time.process_time() - begin
        said = json.loads(body)["choices"][0]["message"]
        messages += [{"role": "assistant", "content": said["content"]}, question(turn + 1)]
    return seconds / turns


async def by_server(server: AgentServer, turns: int) -> float:
    """Call the server as a web server does."""
    session = server.open()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", f"Bearer {session.api_key}".encode())],
        "query_string": b"",
    }

    async def ask(content: bytes) -> bytes:
        parts = [{"type": "http.request", "body": content}]
        sent: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        await server._app(dict(scope), receive, send)
        return b"".join(sent)

    seconds = await converse(ask, turns)
    await session.close()
    return seconds


async def by_http_client(server: AgentServer, turns: int) -> float:
    """Ask with the client of the session."""
    session = server.open()

    async def ask(content: bytes) -> bytes:
        return (await session.http_client.post("/chat/completions", content=content)).content

    seconds = await converse(ask, turns)
    await session.close()
    return seconds


async def by_openai(server: AgentServer, turns: int) -> float:
    """Ask with OpenAI's client; its own cost counts."""
    session = server.open()
    client = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=session.http_client
    )
    messages: list[Any] = [question(0)]
    begin = time.process_time()
    for turn in range(turns):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": completion.choices[0].message.content}
        messages += [said, question(turn + 1)]
    seconds = (time.process_time() - begin) / turns
    await session.close()
    return seconds


async def by_socket(server: AgentServer, turns: int) -> float:
    """Be asked by another process."""
    session = server.open()
    begin = time.process_time()
    await asyncio.to_thread(_pipe().send, (session.base_url, session.api_key, turns))
    await asyncio.to_thread(_pipe().recv)
    seconds = (time.process_time() - begin) / turns
    assert len(session.turns()) == turns
    await session.close()
    return seconds


_client: list[Any] = []


def _pipe() -> Any:
    """A pipe to the process of the client."""
    if not _client:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        context.Process(target=_ask_over_sockets, args=(theirs,), daemon=True).start()
        _client.append(ours)
    return _client[0]


def _ask_over_sockets(pipe: Any) -> None:
    """The client's process."""
    while True:
        base_url, key, turns = pipe.recv()
        where = urlsplit(base_url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port)

        async def ask(
            content: bytes,
            path: str = f"{where.path}/chat/completions",
            headers: dict[str, str] = {"Authorization": f"Bearer {key}"},  # noqa: B006
            connection: Any = connection,
        ) -> bytes:
            connection.request("POST", path, content, headers)
            return connection.getresponse().read()

        asyncio.run(converse(ask, turns))
        connection.close()
        pipe.send(None)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the tokens that are encoded."""
    plain = RenderedTextEncoder.beginning, RenderedTextEncoder.middle
    number = [0]

    def counting(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def count(self: Any, text: str) -> list[int]:
            ids = encode(self, text)
            number[0] += len(ids)
            return ids

        return count

    RenderedTextEncoder.beginning, RenderedTextEncoder.middle = map(counting, plain)  # type: ignore[method-assign]
    try:
        yield number
    finally:
        RenderedTextEncoder.beginning, RenderedTextEncoder.middle = plain  # type: ignore[method-assign]


async def measure(repeats: int) -> list[Row]:
    """The rows of the table."""
    engine = Engine()
    chat = ChatTokens(engine.tokenizer)
    rows = []
    async with AgentServer(engine) as server:
        ways: dict[str, Callable[[int], Awaitable[float]]] = {
            "workflow": lambda turns: by_workflow(engine, chat, turns),
            "server": lambda turns: by_server(server, turns),
            "http_client": lambda turns: by_http_client(server, turns),
            "socket": lambda turns: by_socket(server, turns),
            "openai": lambda turns: by_openai(server, turns),
        }
        for name, play in ways.items():
            await play(2)
            cells = []
            for turns in TURNS:
                times = [await play(turns) for _ in range(repeats)]
                cells.append(f"{1e3 * statistics.median(times):.2f} ms")
            chat._cached_tokens.cache_clear()
            for kept in server._chats._chats.values():
                kept.result()._cached_tokens.cache_clear()
            with counted() as number:
                await play(TURNS[-1])
            # The last question of the workflow is encoded, but not asked.
            written = TURNS[-1] * (QUESTION + 3) + (QUESTION + 3) * (name == "workflow")
            rows.append((name, *cells, f"{number[0] / written:.2f}"))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rst", type=Path, help="write the table for the documentation")
    args = parser.parse_args()
    header = ("CPU of a call", *(f"{turns} turns" for turns in TURNS), "encoded")
    part = Part(header, (40, 20, 20, 20), lambda args: asyncio.run(measure(args.repeats)))
    show([part], args, args.rst)


if __name__ == "__main__":
    main()
