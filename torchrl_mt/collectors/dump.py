"""Episodes as lines of JSON for people to read, a line for every training row.

Every line says exactly what ``MergeTurns`` makes of the episode: which tokens were given, which were
sampled, in which turn and by which weights.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.collectors.jsonl import append_lines, to_json, to_line

__all__ = ["EpisodeDump", "episode_records"]


class EpisodeDump:
    """Write episodes into ``dump_dir/<version>.jsonl``, and evaluations into ``dump_dir/eval``.

    The version is the last that sampled a token of the episode; -1 if none was sampled. Each line is
    a JSON object, see :func:`episode_records`. Lines are appended whole, whatever happens to the
    process, and any number of threads and processes may write into one folder.

    Args:
        dump_dir: the folder; it is made if need be.
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

    def write(self, episodes: Iterable[Episode], *, is_eval: bool = False) -> None:
        """Append the lines of episodes.

        Where it raises, no file has lines of this call that are not whole, and no file has only some
        of those that were meant for it.

        Args:
            episodes: finished episodes.
            is_eval: whether they were played to evaluate the policy.
        """
        folder = self.dump_dir / "eval" if is_eval else self.dump_dir
        lines: defaultdict[int, list[bytes]] = defaultdict(list)
        for episode in episodes:
            records = episode_records(episode, self.tokenizer)
            version = max(record["tail_version"] for record in records)
            lines[version] += map(to_line, records)
        for version, of_version in lines.items():
            append_lines(folder / f"{version}.jsonl", of_version)


def episode_records(episode: Episode, tokenizer: Any = None) -> list[dict[str, Any]]:
    """Describe an episode, one record for every row that ``MergeTurns`` makes of it.

    Args:
        episode: a finished episode.
        tokenizer: decodes the tokens, special ones included; token ids are kept if ``None``.

    Returns:
        At least one dict of what JSON can hold (see :func:`~torchrl_mt.collectors.jsonl.to_json`), with

        - ``task_id``: the data's own, or else the group's id; ``group``; ``sample_idx``, the episode's
          place in it; ``traj_id``;
        - ``fork``: 0 for the episode's first row, then counting up; ``num_forks``: how many rows there
          are beyond the first;
        - ``seqlen``: tokens of the row; ``prompt_len``: those before its first sampled token (all of
          them if none was sampled);
        - ``head_version`` and ``tail_version``: the lowest and the highest that sampled a token of
          the row; -1 if none was sampled;
        - ``reward``: the episode's, summed over all turns; ``rewards``: each turn's; ``stop_reason``;
          ``num_turns``;
        - ``messages``: those that are new in the row's turns;
        - ``prompt`` and ``completion``: the row's tokens up to its first sampled token, and all
          from there on, those of the environment included;
        - ``turns``: for each turn in the row its number in the episode (``"turn"``), where in the row
          its sampled tokens lie (from ``"start"`` up to ``"stop"``), its ``"reward"`` and
          ``"finish_reason"``.

    """
    turns, rows = episode.turns, episode.rows()
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
            "messages": [message for _, turn in mine for message in turn.messages],
            "prompt": prompt,
            "completion": completion,
            "turns": [_span(k, turn) for k, turn in mine],
        }
        records.append(to_json(of_episode | of_row))
    return records


def _tokens(turn: Turn) -> list[int]:
    """A row as its last turn leaves it: what the model saw, and what it sampled."""
    return [*turn.prompt_ids, *turn.completion.token_ids]


def _span(k: int, turn: Turn) -> dict[str, Any]:
    """Where a turn's sampled tokens lie: its row begins with all that the turn was given."""
    start = len(turn.prompt_ids)
    return {
        "turn": k,
        "start": start,
        "stop": start + len(turn.completion.token_ids),
        "reward": turn.reward,
        "finish_reason": turn.completion.finish_reason,
    }


def _texts(tokens: list[int], prompt_len: int, tokenizer: Any) -> tuple[Any, Any]:
    """The text up to a token, and from there on."""
    if tokenizer is None:
        return tokens[:prompt_len], tokens[prompt_len:]

    def text(ids: list[int]) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    prompt, whole = text(tokens[:prompt_len]), text(tokens)
    if whole.startswith(prompt):
        # Many tokenizers write a word at the beginning of a text unlike one in the middle.
        return prompt, whole[len(prompt) :]
    return prompt, text(tokens[prompt_len:])
