"""Reports from plain dicts: the template filled as the library fills it, and a browser to open it in."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

COLUMNS = [
    {
        "key": "log_prob",
        "name": "log-probability",
        "unit": "nats",
        "kind": "low",
        "low": -0.05,
        "high": 0,
    },
    {
        "key": "ratio",
        "name": "importance ratio",
        "unit": "",
        "kind": "diverging",
        "low": 0.5,
        "high": 1.5,
    },
    {"key": "version", "name": "weight version", "unit": "", "kind": "steps", "low": 0, "high": 9},
]

BROWSER = next(filter(None, map(shutil.which, ["chromium", "google-chrome", "chrome"])), None)


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    empty = {"reasoning": None, "tool_calls": None, "name": None, "images": None}
    return {"role": role, "content": content, **empty, **more}


def turn(number: int, asked: str, pieces: Iterable[str], **more: Any) -> dict[str, Any]:
    """A turn that answers the one before, in the same row."""
    pieces = list(pieces)
    return {
        "turn": number,
        "row": 0,
        "parent": number - 1,
        "reward": None,
        "finish": "stop",
        "given": [message("user", asked)],
        "pieces": pieces,
        "ids": [sum(map(ord, piece)) for piece in pieces],
        "said": message("assistant", "".join(pieces)),
    } | more


def episode(number: int, turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The index's entry of an episode, with its turns in an entry of their own."""
    tokens = sum(len(turn["pieces"]) for turn in turns)
    return {
        "id": number,
        "group": None,
        "sample": None,
        "task": None,
        "reward": number / 10,
        "turns": len(turns),
        "tokens": tokens,
        "length": tokens,
        "stop": "solved",
        "rejected": None,
        "head": 3,
        "tail": 4,
        "source": 0,
        "eval": False,
        "content": turns,
    } | more


def values(key: str, count: int) -> np.ndarray[Any, Any]:
    """A column of an episode: no value at its first token, then numbers that tell the place."""
    numbers = np.arange(count) % 5 if key == "version" else -np.arange(count) / 100
    return np.concatenate([[np.nan], numbers[1:]])[:count].astype("<f4")


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def part(entry: dict[str, Any]) -> str:
    keys = [column["key"] for column in COLUMNS]
    content = {"turns": entry["content"], "columns": keys, "facts": {"seed": entry["id"]}}
    planes = [values(key, entry["tokens"]).view(np.uint8).reshape(-1, 4).T for key in keys]
    shuffled = b"".join(plane.tobytes() for plane in planes)
    return f"{packed(json.dumps(content).encode())} {packed(shuffled)}"


def filled(episodes: list[dict[str, Any]], images: str = "") -> str:
    assets = files("torchrl_mt") / "view" / "assets"
    read = {
        name: (assets / name).read_text() for name in ["report.html.j2", "report.css", "report.js"]
    }
    listed = [{key: entry[key] for key in entry if key != "content"} for entry in episodes]
    health = [{"level": "watch", "title": "One.", "text": "Two.", "link": "#stop=length"}]
    index = {
        "title": "Trial & report",
        "made": "2026-11-28 16:00 UTC",
        "sources": ["a file"],
        "health": health,
        "columns": COLUMNS,
        "episodes": listed,
    }
    return (
        jinja2.Environment(autoescape=True)
        .from_string(read["report.html.j2"])
        .render(
            title=index["title"],
            css=Markup(read["report.css"]),
            js=Markup(read["report.js"]),
            index=json.dumps(index).replace("<", "\\u003c"),
            parts="\n".join(map(part, episodes)),
            images=images,
        )
    )
