"""Episodes as readable JSON lines, one line per training row.

A line describes a row exactly as ``MergeTurns`` makes it: which tokens were given, which were sampled,
in which turn and by which weights.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_mt.chat.encoding import decode, decode_each
from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.json_lines import append_lines, to_json, to_line
from torchrl_mt.paths import replace_file
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.messages import images_of

__all__ = ["EpisodeDump", "dump_records", "episode_records"]

_logger = logging.getLogger("torchrl_mt")


class EpisodeDump:
    """Write episodes into ``dump_dir/<version>.jsonl``, evaluations and rejected ones into subfolders.

    Those are ``dump_dir/eval`` and ``dump_dir/rejected``. The version is the newest that sampled a token
    of the episode; -1 if none was sampled. Each line is a JSON object, see :func:`episode_records`.
    Several threads and processes may write into one folder; lines are always whole, even if a process
    is killed.

    Every image of the messages is written once, into ``dump_dir/images``. Messages have the file's path
    from ``dump_dir``: ``{"type": "image", "image": "images/<hash>.png"}``.

    Args:
        dump_dir: the folder; made if missing.
        tokenizer: decodes the tokens; token ids are written if ``None``.

    Examples:
        >>> import json, tempfile
        >>> from torchrl_mt.collectors import StopReason, Turn
        >>> from torchrl_mt.engines import Completion
        >>> turn = Turn([1, 2], Completion([3], [-0.5], [7], "stop"), messages=[], reward=1.0)
        >>> folder = tempfile.mkdtemp()
        >>> EpisodeDump(folder).write([Episode({"task_id": "a"}, 0, 0, [turn], StopReason.DONE)])
        >>> line = json.loads(Path(folder, "7.jsonl").read_text())
        >>> line["task_id"], line["reward"], line["prompt"], line["completion"]
        ('a', 1.0, [1, 2], [3])
    """

    def __init__(self, dump_dir: str | os.PathLike[str], tokenizer: Any = None) -> None:
        self.dump_dir = Path(dump_dir)
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        self.tokenizer = tokenizer
        self.errors = 0
        """Number of failed calls of :meth:`record`."""
        self._written: set[str] = set()
        """Files of images that are there."""

    def record(self, episodes: Iterable[Episode], **what: Any) -> None:
        """As :meth:`write`, but an error is only logged, once, and counted."""
        try:
            self.write(episodes, **what)
        except Exception as error:
            self.errors += 1
            if self.errors == 1:
                _logger.warning(
                    "episodes could not be dumped; further errors are only counted.", exc_info=error
                )

    def write(
        self, episodes: Iterable[Episode], *, is_eval: bool = False, rejected: str | None = None
    ) -> None:
        """Append the lines of episodes. On an error, each file has all or none of its new lines.

        Args:
            episodes: finished episodes.
            is_eval: whether they are of an evaluation.
            rejected: why they were rejected; ``None`` if they were not. It is written as
                ``"rejected"``.
        """
        folder = self.dump_dir / "eval" if is_eval else self.dump_dir
        if rejected is not None:
            folder /= "rejected"
        lines: defaultdict[int, list[bytes]] = defaultdict(list)
        for episode in episodes:
            records = episode_records(episode, self.tokenizer)
            if rejected is not None:
                records = [record | {"rejected": rejected} for record in records]
            version = max(record["tail_version"] for record in records)
            lines[version] += map(to_line, records)
            for turn in episode.turns:  # First, so that no line names a file that is not there.
                for image in images_of(turn.messages):
                    self._write_image(image)
        for version, of_version in lines.items():
            append_lines(folder / f"{version}.jsonl", of_version)

    def _write_image(self, image: StoredImage) -> None:
        """Write the file of an image unless it is there; it is whole or not there at all."""
        name = _image_file(image)
        path = self.dump_dir / name
        if name not in self._written and not path.exists():
            replace_file(path, image.file()[1])
        self._written.add(name)


def episode_records(episode: Episode, tokenizer: Any = None) -> list[dict[str, Any]]:
    """Describe an episode by one record per training row.

    Args:
        episode: a finished episode.
        tokenizer: decodes the tokens, special ones included; token ids are kept if ``None``.

    Returns:
        At least one dict of JSON data (see :func:`~torchrl_mt.json_lines.to_json`), with

        - ``task_id``: the item's, or else the group's id; ``group``; ``sample_idx``: the episode's index
          in the group; ``traj_id``;
        - ``fork``: number of the row in the episode, from 0; ``num_forks``: number of rows beyond the
          first;
        - ``seqlen``: tokens of the row; ``prompt_len``: tokens before the first sampled one (all if none
          was sampled);
        - ``head_version`` and ``tail_version``: oldest and newest version that sampled a token of the
          row; -1 if none was sampled;
        - ``reward``: of the episode, summed over turns; ``rewards``: of each turn; ``stop_reason``;
          ``num_turns``;
        - ``messages``: new messages of the row's turns, images as the names of their files;
        - ``token_ids``: the row;
        - ``prompt`` and ``completion``: the row before its first sampled token, and from there on, the
          environment's tokens included; token ids without a tokenizer;
        - ``turns``: for each turn of the row its index in the episode (``"turn"``), its ``"parent"``
          (:attr:`Turn.parent`), the slice of its sampled tokens (``"start"`` to ``"stop"``),
          ``"reward"``, ``"finish_reason"``, ``"num_messages"``, and of each sampled token
          ``"log_probs"`` (to six decimal places), ``"versions"`` and, with a tokenizer, ``"pieces"``:
          its text.
    """
    turns, rows, parents = episode.turns, episode.rows(), episode.parents()
    num_rows = max(len(rows.last), 1)
    of_episode = {
        "task_id": episode.task_id,
        "group": episode.group,
        "sample_idx": episode.rank,
        "traj_id": episode.traj_id,
        "num_forks": num_rows - 1,
        "reward": float(episode.reward),
        "rewards": [turn.reward for turn in turns],
        "stop_reason": episode.stop_reason,
        "num_turns": len(turns),
    }
    records = []
    for fork in range(num_rows):
        mine = [(k, turns[k]) for k, row in enumerate(rows.row) if row == fork]
        tokens = _tokens(mine[-1][1]) if mine else []
        answers = [turn for _, turn in mine if len(turn.completion.token_ids)]
        prompt_len = len(answers[0].prompt_ids if answers else tokens)
        by_policy = [v for turn in answers for v in turn.completion.versions] or [-1]
        prompt, completion = _texts(tokens, prompt_len, tokenizer)
        of_row = {
            "fork": fork,
            "seqlen": len(tokens),
            "prompt_len": prompt_len,
            "head_version": min(by_policy),
            "tail_version": max(by_policy),
            "messages": [_readable(message) for _, turn in mine for message in turn.messages],
            "token_ids": tokens,
            "prompt": prompt,
            "completion": completion,
            "turns": [_of_turn(k, parents[k], turn, tokenizer) for k, turn in mine],
        }
        records.append(to_json(of_episode | of_row))
    return records


def dump_records(path: Path, subfolders: Iterable[str] = ()) -> Iterator[dict[str, Any]] | None:
    """Read the lines of a dump, by version; those of evaluations have a true ``"eval"``.

    An incomplete last line is left out: a run may be writing.

    Args:
        path: the folder, or a file of it.
        subfolders: those that are read after a folder's own files: ``"eval"``, ``"rejected"``.

    Returns:
        The records; ``None`` if the path is no dump.
    """
    files = [path] * (path.suffix == ".jsonl" and path.is_file())
    for folder in (path, *(path / name for name in subfolders)) if path.is_dir() else ():
        files += sorted(folder.glob("*.jsonl"), key=_version_of)
    if not files:
        return None
    with files[0].open(encoding="utf-8") as lines:
        if '"prompt_len"' not in lines.readline():
            return None
    return (
        json.loads(line) | {"eval": file.parent.name == "eval"}
        for file in files
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]
    )


def _version_of(file: Path) -> tuple[int, int, str]:
    """Order of the files of a dump."""
    name = file.stem
    return (1, int(name), "") if name.lstrip("-").isdigit() else (0, 0, name)


def _readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the names of files in place of its images."""
    if not images_of([message]):
        return message
    parts = [
        {**part, "image": _image_file(part["image"])} if images_of([{"content": [part]}]) else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _image_file(image: StoredImage) -> str:
    """Path of an image's file from the folder of the dump."""
    form = "png" if image.format == "raw" else image.format
    return f"images/{image.key}.{form}"


def _tokens(turn: Turn) -> list[int]:
    return [*turn.prompt_ids, *turn.completion.token_ids]


def _of_turn(k: int, parent: int, turn: Turn, tokenizer: Any) -> dict[str, Any]:
    """The entry of a turn in ``"turns"``."""
    start, completion = len(turn.prompt_ids), turn.completion
    sampled = list(completion.token_ids)
    entry = {
        "turn": k,
        "parent": parent,
        "start": start,
        "stop": start + len(sampled),
        "reward": turn.reward,
        "finish_reason": completion.finish_reason,
        "num_messages": len(turn.messages),
        "log_probs": np.round(np.asarray(completion.log_probs, np.float64), 6).tolist(),
        "versions": list(completion.versions),
    }
    if tokenizer is not None:
        entry["pieces"] = decode_each(tokenizer, sampled, list(turn.prompt_ids[-1:]))
    return entry


def _texts(tokens: list[int], prompt_len: int, tokenizer: Any) -> tuple[Any, Any]:
    """Texts of the prompt and of the rest; token ids without a tokenizer."""
    if tokenizer is None:
        return tokens[:prompt_len], tokens[prompt_len:]

    prompt, whole = decode(tokenizer, tokens[:prompt_len]), decode(tokenizer, tokens)
    if whole.startswith(prompt):
        # Many tokenizers decode the first word of a text unlike others, so decode the whole.
        return prompt, whole[len(prompt) :]
    return prompt, decode(tokenizer, tokens[prompt_len:])
