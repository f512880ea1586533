"""A page that shows episodes, in one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_mt.json_lines import to_json
from torchrl_mt.paths import replace_file
from torchrl_mt.view.episodes import SeenEpisode, SeenTurn, join
from torchrl_mt.view.pages import render, script_json
from torchrl_mt.view.sources import are_episodes, name_of, read_source
from torchrl_mt.vision import StoredImage

__all__ = ["Report", "write_report"]

_COLUMNS = {
    "advantage": ("advantage", "", "diverging"),
    "log_prob": ("log-probability", "nats", "low"),
    "ratio": ("ratio to the sampler", "", "diverging"),
    "kl": ("KL to the reference", "nats", "high"),
    "entropy": ("entropy", "nats", "high"),
    "value": ("value", "", "diverging"),
    "return": ("return", "", "diverging"),
    "version": ("weight version", "", "steps"),
    "turn": ("turn", "", "steps"),
}
"""Name, unit and kind of scale of each value that tokens may have."""


def write_report(source: Any, path: str | os.PathLike[str], *, tokenizer: Any = None) -> Path:
    """Write a page that shows episodes: what was said, sampled, rewarded and pushed where.

    The page is one file and loads nothing from elsewhere. It lists the episodes, shows each as a
    dialogue with tokens coloured by advantage, log-probability and more, compares the members of a
    group, and draws forks as a tree. A link to it keeps what it shows. The text of a model is never read
    as markup.

    Args:
        source: a folder or file of ``dump_dir``, the path of a data set, of rows that ``save`` wrote or
            of a ``.pt`` file with a dict of rows, an :class:`~torchrl_mt.datasets.EpisodeDataset`, a
            replay buffer or its storage, a batch of whole episodes ``[ΣT]``, rows or experience ``[N]``,
            or a list of these. Episodes of several sources are joined by id: ``[batch, experience]``
            shows what was sampled and what training computed on the same tokens.
        path: the file; replaced at once if it exists.
        tokenizer: decodes tokens. Dumps have their text; of other sources, tokens are shown as numbers
            without it.

    Returns:
        The path.

    Raises:
        TypeError: if ``source`` is none of these.
        FileNotFoundError: if there is no such file.
        ValueError: if it has no episode.

    Examples:
        >>> import tempfile
        >>> from torchrl_mt.collectors import Episode, StopReason, Turn
        >>> from torchrl_mt.engines import Completion
        >>> said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> turn = Turn([1, 2], Completion([3], [-0.5], [7], "stop"), messages=said, reward=1.0)
        >>> episode = Episode({"task_id": "a"}, 0, 0, [turn], StopReason.DONE)
        >>> path = write_report([episode], Path(tempfile.mkdtemp(), "report.html"))
        >>> path.read_text(encoding="utf-8")[:15]
        '<!doctype html>'
    """
    return Report(source, tokenizer=tokenizer).write(path)


class Report:
    """The page of :func:`write_report`; the last expression of a notebook's cell shows it.

    Args:
        source: as of :func:`write_report`.
        tokenizer: likewise.
        title: the page's title.
        health: findings about the run, each a dict of ``"level"`` (``"bad"``, ``"watch"`` or
            ``"good"``), ``"title"``, ``"text"`` and ``"link"``; shown at the top.
    """

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        title: str = "Episodes",
        health: Sequence[dict[str, Any]] = (),
    ) -> None:
        several = isinstance(source, (list, tuple)) and not are_episodes(source)
        sources = list(source) if several else [source]
        self.title, self.health = title, list(health)
        self.sources = [name_of(each) for each in sources]
        self.episodes = join(read_source(each, tokenizer) for each in sources)
        if not self.episodes:
            raise ValueError(f"source must have at least one episode, got none in {self.sources}.")

    def html(self) -> str:
        """Return the whole page."""
        images: dict[str, StoredImage] = {}
        vocabulary: dict[int, str] = {}
        parts = [_part(episode, images, vocabulary) for episode in self.episodes]
        files_of = [(key, image.file()) for key, image in images.items()]
        return render(
            "report",
            title=self.title,
            index=script_json(self._index() | {"vocabulary": vocabulary}),
            parts="\n".join(parts),
            images="\n".join(
                f"{key} image/{form} {base64.b64encode(data).decode()}"
                for key, (form, data) in files_of
            ),
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page; an error leaves what was there."""
        return replace_file(Path(path).expanduser(), self.html().encode("utf-8", "replace"))

    def _repr_html_(self) -> str:
        page = html.escape(self.html(), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:1px solid #8884" '
            f'sandbox="allow-scripts" title="{html.escape(self.title)}"></iframe>'
        )

    def _index(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "sources": self.sources,
            "health": self.health,
            "bases": {
                "episode": _base([episode.id for episode in self.episodes]),
                "group": _base([each.group for each in self.episodes if each.group is not None]),
            },
            "columns": _columns(self.episodes),
            "episodes": [
                _line(episode) | {"key": key}
                for key, episode in zip(_keys(self.episodes), self.episodes, strict=True)
            ],
        }


def _base(numbers: Sequence[int]) -> int:
    """The part of ids that collectors add to a count from 0, if it is the same in all; else 0."""
    base = min(numbers, default=0) // 1_000_000 * 1_000_000
    return base if all(0 <= number - base < 1_000_000 for number in numbers) else 0


def _keys(episodes: Sequence[SeenEpisode]) -> list[str]:
    """A name of each episode for links: its id, and its source if several have that id."""
    counts = Counter(episode.id for episode in episodes)
    keys = []
    for number, episode in enumerate(episodes):
        keys.append(str(episode.id) if counts[episode.id] == 1 else f"{episode.id}.{number}")
    return keys


def _line(episode: SeenEpisode) -> dict[str, Any]:
    """What the list of episodes shows."""
    versions = [turn.values["version"] for turn in episode.turns if "version" in turn.values]
    known = np.concatenate(versions) if versions else np.zeros(0)
    known = known[np.isfinite(known) & (known >= 0)]
    return {
        "id": episode.id,
        "group": episode.group,
        "sample": episode.sample,
        "task": episode.task,
        "reward": _number(episode.reward),
        "turns": sum(turn.said is not None or bool(turn.pieces) for turn in episode.turns),
        "tokens": episode.num_tokens,
        "length": episode.length,
        "stop": episode.stop,
        "rejected": episode.rejected,
        "head": int(known.min()) if len(known) else None,
        "tail": int(known.max()) if len(known) else None,
        "source": episode.source,
        "eval": episode.is_eval,
    }


def _number(value: float | None) -> float | None:
    """A reward to six digits; ``None`` if it is no number."""
    return float(f"{value:.6g}") if value is not None and np.isfinite(value) else None


def _columns(episodes: Sequence[SeenEpisode]) -> list[dict[str, Any]]:
    """The values that tokens have, each with the range that colours span."""
    found = []
    for key, (name, unit, kind) in _COLUMNS.items():
        if key == "turn":
            low, high = 0.0, float(max(len(episode.turns) for episode in episodes) - 1)
        else:
            parts = [t.values[key] for each in episodes for t in each.turns if key in t.values]
            values = np.concatenate(parts) if parts else np.zeros(0)
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            # Some outliers must not make all other tokens look alike.
            low, high = np.quantile(values, (0, 1) if kind == "steps" else (0.02, 0.98)).tolist()
        found.append(
            {"key": key, "name": name, "unit": unit, "kind": kind, "low": low, "high": high}
        )
    return found


def _part(episode: SeenEpisode, images: dict[str, StoredImage], vocabulary: dict[int, str]) -> str:
    """An episode's turns and values, compressed; adds its images and the usual texts of its tokens."""
    named = {name for turn in episode.turns for name in turn.values}
    columns = [name for name in _COLUMNS if name in named]
    shown = [
        {
            "turn": turn.turn,
            "row": turn.row,
            "parent": turn.parent,
            "reward": _number(turn.reward),
            "finish": turn.finish,
            "given": [_with_keys(message, images) for message in turn.given],
            **_tokens(turn, vocabulary),
            "said": turn.said and _with_keys(turn.said, images),
        }
        for turn in episode.turns
    ]
    text = json.dumps(
        to_json({"turns": shown, "columns": columns, "facts": episode.facts}), ensure_ascii=False
    )
    parts = [text.encode("utf-8", "replace")]
    parts.append(b"".join(_planes(_joined(episode, name)) for name in columns))
    return " ".join(base64.b64encode(zlib.compress(part, 9)).decode() for part in parts)


def _tokens(turn: SeenTurn, vocabulary: dict[int, str]) -> dict[str, Any]:
    """Ids of the sampled tokens, and their texts where these are not the usual ones."""
    others = {
        k: piece
        for k, (token, piece) in enumerate(zip(turn.ids, turn.pieces, strict=True))
        if vocabulary.setdefault(token, piece) != piece
    }
    return {"ids": list(turn.ids), "others": others}


def _joined(episode: SeenEpisode, name: str) -> np.ndarray:
    """A value of all tokens of an episode; NaN where there is none."""
    found = [turn.values.get(name, np.full(len(turn.ids), np.nan)) for turn in episode.turns]
    return np.concatenate(found).astype("<f4")


def _planes(values: np.ndarray) -> bytes:
    """Float32 numbers of four digits, all first bytes before all second ones: they compress well."""
    bits = values.view("<u4").copy()
    finite = np.isfinite(values) & (np.abs(values) < 1e38)
    bits[finite] = (bits[finite] + 0x200) & np.uint32(0xFFFFFC00)
    return bits.view(np.uint8).reshape(-1, 4).T.tobytes()


def _with_keys(message: Any, images: dict[str, StoredImage]) -> dict[str, Any]:
    """A message with the keys of its images."""
    if "images" not in message:
        return dict(message)
    images |= {image.key: image for image in message["images"]}
    return {**message, "images": [image.key for image in message["images"]]}
