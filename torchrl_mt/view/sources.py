"""Read episodes from dumps, data sets, buffers, batches, rows and experience."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from torchrl_mt.chat.encoding import decode, decode_each
from torchrl_mt.collectors import Episode
from torchrl_mt.collectors.dump import dump_records, episode_records
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import EpisodeDataset
from torchrl_mt.datasets.dataset import open_saved
from torchrl_mt.json_lines import to_json
from torchrl_mt.objectives.rows.reading import read_objects
from torchrl_mt.transforms.turn_tree import assign_rows, find_parents
from torchrl_mt.view.episodes import SeenEpisode, SeenTurn
from torchrl_mt.vision import StoredImage

__all__ = ["are_episodes", "name_of", "read_source"]

_VALUES = {
    "advantage": "advantage",
    "log_prob": ("log_probs", "full"),
    "kl": "kl",
    "entropy": "entropy",
    "value": "values",
    "return": "returns",
    "version": ("versions", "full"),
}
"""Entries of rows that are values of tokens."""


def name_of(source: Any) -> str:
    """Name a source in a few words."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    if isinstance(source, EpisodeDataset):
        return str(source.path)
    return type(source).__name__


def are_episodes(source: Sequence[Any]) -> bool:
    """Whether a list is one source: finished episodes."""
    return all(isinstance(each, Episode) for each in source)


def read_source(source: Any, tokenizer: Any = None) -> list[SeenEpisode]:
    """Read all episodes of a source.

    Args:
        source: a folder or file of ``dump_dir``, the path of a data set, of rows that ``save`` wrote or
            of a ``.pt`` file with a dict of rows, an :class:`~torchrl_mt.datasets.EpisodeDataset`, a
            replay buffer or its storage, a batch of whole episodes ``[ΣT]``, rows or experience ``[N]``,
            or finished :class:`~torchrl_mt.collectors.Episode` objects.
        tokenizer: decodes tokens whose text the source lacks; without it they are shown as numbers.

    Raises:
        TypeError: if it is none of these.
        FileNotFoundError: if there is no such file.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"source: there is nothing at {path}.")
        records = dump_records(path, ("eval", "rejected"))
        if records is not None:
            return [*_from_records(records, path if path.is_dir() else path.parent)]
        source = open_saved(path)
        if isinstance(source, dict):
            source = TensorDict.from_dict(source, auto_batch_size=True, batch_dims=1)
    if isinstance(source, ReplayBuffer):
        source = source._storage
    if isinstance(source, (EpisodeDataset, EpisodeStorage)):
        found = []
        for number, batch in enumerate(source.episodes()):
            for episode in _from_batch(batch, tokenizer):
                if not {("collector", "traj_ids"), "episode"} & {*batch.keys(include_nested=True)}:
                    episode.id = number
                found.append(episode)
        return found
    if isinstance(source, TensorDictBase):
        is_rows = ("tokens", "full") in source.keys(include_nested=True, leaves_only=False)
        read = _from_rows if is_rows else _from_batch
        return [*read(source, tokenizer)]
    if isinstance(source, Episode):
        source = [source]
    if isinstance(source, Sequence) and are_episodes(source):
        played = [record for each in source for record in episode_records(each, tokenizer)]
        return [*_from_records(played, None)]
    raise TypeError(
        "source must be a path, an EpisodeDataset, a replay buffer, a storage, a TensorDict or Episode "
        f"objects, got {type(source).__name__}."
    )


# Dumps


def _from_records(
    records: Iterable[Mapping[str, Any]], folder: Path | None
) -> Iterator[SeenEpisode]:
    """Read the records of dumps, the rows of an episode one after the other."""
    episode = None
    for record in records:
        if episode is None or record["fork"] == 0:
            if episode is not None:
                yield episode
            task = record["task_id"]
            episode = SeenEpisode(
                record["traj_id"],
                record["group"],
                record["sample_idx"],
                None if task == record["group"] else str(task),
                record["stop_reason"],
                record.get("rejected"),
                record.get("eval", False),
            )
        episode.length += record["seqlen"]
        _add_row(episode, record, folder)
    if episode is not None:
        yield episode


def _add_row(episode: SeenEpisode, record: Mapping[str, Any], folder: Path | None) -> None:
    """Add the turns of a record."""
    left = [_message(message, folder) for message in record["messages"]]
    for span in record["turns"]:
        ids = record["token_ids"][span["start"] : span["stop"]] if "token_ids" in record else []
        turn = SeenTurn(
            span["turn"],
            record["fork"],
            span.get("parent", span["turn"] - 1),
            float(span["reward"]),  # numbers that JSON lacks are strings
            span["finish_reason"],
            ids=ids,
            pieces=span.get("pieces", _numbers(ids)),
        )
        if "versions" in span:
            turn.values["version"] = np.asarray(span["versions"], np.float32)
            turn.values["log_prob"] = np.asarray([*map(float, span["log_probs"])], np.float32)
        episode.turns.append(turn)
        taken = span.get("num_messages", len(left))  # Older dumps do not tell.
        _add_messages(episode, turn, left[:taken], turn.turn + 1 == record["num_turns"])
        left = left[taken:]
    episode.turns.sort(key=lambda turn: turn.turn)


# Rows


def _from_rows(rows: TensorDictBase, tokenizer: Any) -> Iterator[SeenEpisode]:
    """Read rows; what turns of no token said is not in them."""
    keys = rows.keys(include_nested=True)

    def array(key: Any) -> Any:
        return _array(rows[key]) if key in keys else None

    arrays = {name: array(key) for name, key in _VALUES.items() if key in keys}
    ids, sampled = array(("tokens", "full")), array(("masks", "all_assistant_mask"))
    there, turns = array(("masks", "all_attention_mask")), array(("turns", "full"))
    there = np.ones(ids.shape, bool) if there is None else there
    turns = _turns_of(sampled) if turns is None else turns
    rewards = array(("rewards", "full"))
    if ("log_probs", "old") in keys and "log_prob" in arrays:
        gap = array(("log_probs", "old")).astype(np.float64) - arrays["log_prob"]
        arrays["ratio"] = np.exp(gap)
    episodes: dict[int, SeenEpisode] = {}
    begins: dict[int, list[tuple[SeenTurn, torch.Tensor]]] = {}
    numbers = _column(rows, "episode", range(len(rows)))
    groups = _column(rows, "group", [None] * len(rows))
    for i, (number, group) in enumerate(zip(numbers, groups, strict=True)):
        episode = episodes.setdefault(number, SeenEpisode(number, group))
        row = 1 + max((turn.row for turn in episode.turns), default=-1)
        at = np.flatnonzero(there[i])
        episode.length += len(at)
        of_turn, chosen = turns[i, at], sampled[i, at]
        for turn in np.unique(of_turn[of_turn >= 0]):
            mine = at[(of_turn == turn) & chosen]
            before = at[(of_turn == turn) & ~chosen]
            first = int(mine[0]) if len(mine) else int(at[of_turn == turn][-1]) + 1
            prefix = at[at < first]
            seen = SeenTurn(
                int(turn),
                row,
                ids=ids[i, mine].tolist(),
                values={name: each[i, mine].astype(np.float32) for name, each in arrays.items()},
                reward=None if rewards is None else float(rewards[i, at[of_turn == turn]].sum()),
            )
            seen.pieces = _pieces(tokenizer, seen.ids, ids[i, prefix[-1:]].tolist())
            if len(before):
                seen.given = [_given(tokenizer, ids[i, before].tolist())]
            episode.turns.append(seen)
            begins.setdefault(number, []).append((seen, torch.from_numpy(ids[i, prefix])))
    for number, episode in episodes.items():
        told = sorted(begins.get(number, []), key=lambda each: each[0].turn)
        responses = [torch.tensor(turn.ids, dtype=torch.int64, device="cpu") for turn, _ in told]
        parents = _parents([prompt.long() for _, prompt in told], responses)
        for (turn, _), parent in zip(told, parents, strict=True):
            turn.parent = told[parent][0].turn if parent >= 0 else -1
        episode.turns.sort(key=lambda turn: turn.turn)
        yield episode


def _turns_of(sampled: np.ndarray) -> np.ndarray:
    """Number the turns of rows: each run of sampled tokens ends one."""
    ends = np.zeros(sampled.shape, np.int64)
    ends[:, 1:] = sampled[:, :-1] & ~sampled[:, 1:]
    return ends.cumsum(1)


# Batches of turns or steps


def _from_batch(batch: Any, tokenizer: Any) -> Iterator[SeenEpisode]:
    """Read episodes in TED, ``[ΣT]``."""
    keys = batch.keys(include_nested=True)
    is_dialogue = ("tokens", "prompt") in keys and ("tokens", "response") in keys
    for number, steps in enumerate(_split(batch)):
        ids = steps.get(("collector", "traj_ids"), steps.get("episode", None))
        groups = steps.get("group", None)
        episode = SeenEpisode(
            number if ids is None else int(ids.reshape(-1)[0]),
            None if groups is None else int(groups.reshape(-1)[0]),
        )
        (_add_turns if is_dialogue else _add_steps)(episode, steps, tokenizer)
        yield episode


def _split(batch: Any) -> list[Any]:
    """Split a batch where episodes end."""
    done = batch.get(("next", "done"), None)
    ends = [] if done is None else (np.flatnonzero(_array(done).reshape(len(batch))) + 1).tolist()
    if len(batch) not in ends:
        ends.append(len(batch))
    return [batch[start:stop] for start, stop in pairwise([0, *ends])]


def _add_turns(episode: SeenEpisode, steps: Any, tokenizer: Any) -> None:
    """Add the turns of a dialogue."""
    prompts, responses = (
        steps.get(("tokens", name), as_list=True) for name in ("prompt", "response")
    )
    sizes = [len(response) for response in responses]
    claimed = steps.get(("turn", "parent"), None)
    parents = _parents(prompts, responses, None if claimed is None else claimed.flatten().tolist())
    rows = assign_rows(parents, [len(prompt) for prompt in prompts], sizes)
    episode.length = sum(rows.length)
    keys = steps.keys(include_nested=True)
    values = {
        name: steps.get((key, "response"), as_list=True)
        for name, key in (("log_prob", "log_probs"), ("version", "versions"))
        if (key, "response") in keys
    }
    rewards = steps.get(("next", "reward"), None)
    texts, ends, stops, data = (
        read_objects(steps, key) for key in ("text", "finish_reason", "stop_reason", "data")
    )
    for k, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        turn = SeenTurn(
            k,
            rows.row[k],
            parents[k],
            None if rewards is None else float(rewards[k].sum()),
            None if ends is None else _word(ends[k]),
            ids=response.tolist(),
            pieces=_pieces(tokenizer, response.tolist(), prompt[-1:].tolist()),
            values={name: _array(each[k]).astype(np.float32) for name, each in values.items()},
        )
        episode.turns.append(turn)
        if texts is not None and texts[k]:
            messages = [_message(message, None) for message in texts[k]]
            _add_messages(episode, turn, messages, k + 1 == len(prompts))
        elif len(prompt) > rows.known[k]:
            turn.given = [_given(tokenizer, prompt[rows.known[k] :].tolist())]
    episode.stop = None if stops is None else _word(stops[-1])
    if data is not None:
        episode.facts["data"] = to_json(data[-1])
        if isinstance(data[-1], Mapping) and "task_id" in data[-1]:
            episode.task = str(data[-1]["task_id"])


def _parents(
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    claimed: Sequence[int] | None = None,
) -> list[int]:
    """Find the parents of the turns of one episode."""
    sizes = [len(response) for response in responses]
    if not sizes:
        return []
    together = torch.cat([*responses]).long()
    return find_parents([*prompts], together, sizes, [0] * len(sizes), claimed)


def _add_messages(
    episode: SeenEpisode, turn: SeenTurn, messages: Sequence[Mapping[str, Any]], is_last: bool
) -> None:
    """Add a turn's messages: before its answer, the answer and, of the last turn, those after it."""
    turn.given = messages
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    # A dialogue may begin with answers that the policy did not give.
    if replies and (is_last or replies[-1] + 1 == len(messages)):
        turn.given, turn.said = messages[: replies[-1]], messages[replies[-1]]
        after = messages[replies[-1] + 1 :]
        if after:
            episode.turns.append(SeenTurn(turn.turn + 1, turn.row, turn.turn, given=after))


def _add_steps(episode: SeenEpisode, steps: Any, tokenizer: Any) -> None:
    """Add the steps of any other environment: what was seen, what was done, and the reward."""
    episode.length = len(steps)
    for k, step in enumerate(steps.unbind(0)):
        seen: dict[str, str] = {}
        done: dict[str, str] = {}
        for key, value in step.items():
            if key not in ("next", "collector", "group", "episode"):
                (done if key == "action" else seen)[key] = _shown(value)
        reward = step.get(("next", "reward"), None)
        turn = SeenTurn(k, parent=k - 1, reward=None if reward is None else float(reward.sum()))
        turn.given = [{"role": "step", "content": _lines(seen)}]
        turn.said = {"role": "action", "content": _lines(done)} if done else None
        episode.turns.append(turn)


# Values


def _array(value: torch.Tensor) -> np.ndarray:
    """A tensor as an array; ``[N, S, 1]`` as ``[N, S]``."""
    value = value.detach().cpu()
    if value.ndim == 3:
        value = value.squeeze(-1)
    return value.float().numpy() if value.dtype.is_floating_point else value.numpy()


def _column(rows: TensorDictBase, key: str, default: Sequence[Any]) -> list[Any]:
    return rows[key].reshape(len(rows)).tolist() if key in rows else [*default]


def _pieces(tokenizer: Any, ids: Sequence[int], before: Sequence[int]) -> list[str]:
    return _numbers(ids) if tokenizer is None else decode_each(tokenizer, ids, before)


def _numbers(ids: Sequence[int]) -> list[str]:
    return [f"{token} " for token in ids]


def _given(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    """Tokens as a message, where none is known."""
    text = " ".join(map(str, ids)) if tokenizer is None else decode(tokenizer, ids)
    return {"role": "tokens", "content": text}


def _word(value: Any) -> str | None:
    return str(getattr(value, "value", value)) or None


def _shown(value: Any) -> str:
    """A value of a step, in a line."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 16:
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        value = value.tolist()
    return json.dumps(to_json(value), ensure_ascii=False)


def _lines(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name} = {value}" for name, value in values.items())


def _message(message: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """A message as the page shows it."""
    content, images = message.get("content"), []
    if isinstance(content, (list, tuple)):
        texts = []
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "image":
                images.append(_image(part.get("image"), folder))
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                texts.append(json.dumps(to_json(part), ensure_ascii=False))
        content = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        content = json.dumps(to_json(content), ensure_ascii=False)
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    shown = {
        "content": content,
        "reasoning": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": calls or None,
        "name": message.get("name"),
        "images": [image for image in images if image is not None] or None,
    }
    role = str(message.get("role", ""))
    return {"role": role} | {key: each for key, each in shown.items() if each is not None}


def _call(call: Any) -> dict[str, Any]:
    made = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = made.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # Else it is shown as it is.
            arguments = json.loads(arguments)
    return {"name": str(made.get("name", call)), "arguments": to_json(arguments)}


def _image(image: Any, folder: Path | None) -> StoredImage | None:
    """An image of a message; of a dump, a file within its folder."""
    if isinstance(image, StoredImage):
        return image
    if isinstance(image, str) and folder is not None:
        for root in (folder, folder.parent):
            file = (root / image).resolve()
            if file.is_file() and file.is_relative_to(root.resolve() / "images"):
                return StoredImage.of(file.read_bytes())
    return None
