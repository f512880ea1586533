"""Reports from plain dicts. The page alone is filled: a report would read them from a source."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from torchrl_mt.view.pages import render, script_json

LOG_PROB = {"key": "log_prob", "name": "log-probability", "unit": "nats", "kind": "low"}
VERSION = {"key": "version", "name": "weight version", "unit": "", "kind": "steps"}
COLUMNS = [LOG_PROB | {"low": -0.05, "high": 0}, VERSION | {"low": 0, "high": 4}]


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    empty = {"reasoning": None, "tool_calls": None, "name": None, "images": None}
    return {"role": role, "content": content} | empty | more


def turn(number: int, asked: str, pieces: Iterable[str], **more: Any) -> dict[str, Any]:
    """A turn that answers the one before, in the same row."""
    pieces = list(pieces)
    place = {"turn": number, "row": 0, "parent": number - 1, "reward": None, "finish": "stop"}
    said = message("assistant", "".join(pieces))
    ids = [sum(map(ord, piece)) for piece in pieces]
    given = [message("user", asked)]
    return place | {"given": given, "pieces": pieces, "ids": ids, "said": said} | more


def episode(number: int, turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The index's entry of an episode, and its turns beside it."""
    tokens = sum(len(turn["pieces"]) for turn in turns)
    sizes = {"turns": len(turns), "tokens": tokens, "length": tokens, "reward": number / 10}
    unknown = dict.fromkeys(["group", "sample", "task", "rejected"])
    origin = {"stop": "solved", "head": 3, "tail": 4, "source": 0, "eval": False}
    return {"id": number, "key": str(number), "content": turns} | sizes | unknown | origin | more


def values(key: str, count: int) -> np.ndarray[Any, Any]:
    """A column of an episode: no value at its first token, then numbers that tell the place."""
    numbers = np.arange(count) % 5 if key == "version" else -np.arange(count) / 100
    return np.concatenate([[np.nan], numbers[1:]])[:count].astype("<f4")


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def part(entry: dict[str, Any]) -> str:
    """The line of an episode: its turns, and the values of its tokens byte by byte."""
    keys = [column["key"] for column in COLUMNS]
    content = {"turns": entry["content"], "columns": keys, "facts": {"seed": entry["id"]}}
    planes = [values(key, entry["tokens"]).view(np.uint8).reshape(-1, 4).T for key in keys]
    shuffled = b"".join(plane.tobytes() for plane in planes)
    return f"{packed(json.dumps(content).encode())} {packed(shuffled)}"


def filled(episodes: list[dict[str, Any]], images: str = "") -> str:
    listed = [{key: entry[key] for key in entry if key != "content"} for entry in episodes]
    health = [{"level": "watch", "title": "One.", "text": "Two.", "link": "#stop=length"}]
    index = {"title": "A & B", "made": "today", "sources": ["a file"], "health": health}
    index |= {"columns": COLUMNS, "episodes": listed}
    index |= {"bases": {"episode": 0, "group": 0}, "vocabulary": {}}
    return render(
        "report",
        title=index["title"],
        index=script_json(index),
        parts="\n".join(map(part, episodes)),
        images=images,
    )
