"""Episodes as a Hugging Face data set: one row per episode, readable without this package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets.writing import storage_of
from torchrl_mt.transforms.episode_entries import dialogue_of_rows, entry_of_rows
from torchrl_mt.vision.messages import with_data_uris

if TYPE_CHECKING:
    import datasets

__all__ = ["to_hf_dataset"]

_RAGGED: dict[str, tuple[NestedKey, str]] = {
    "prompt_ids": (("tokens", "prompt"), "int64"),
    "response_ids": (("tokens", "response"), "int64"),
    "log_probs": (("log_probs", "response"), "float32"),
    "versions": (("versions", "response"), "int64"),
}
"""Columns with one list per turn: the entry of the episode, and its type."""
_CALL = {"type", "id", "function"}
_FUNCTION = {"name", "arguments"}


def to_hf_dataset(episodes: Any) -> datasets.Dataset:
    """Convert episodes to a ``datasets.Dataset``, one row per episode.

    The columns are

    - ``messages``: the whole dialogue, with tool calls and thoughts;
    - ``reward``, the sum, and ``rewards``, those of the turns;
    - ``num_turns``, ``stop_reason`` (``None`` if it is not known), ``episode`` and ``group`` (ids);
    - where all episodes have them, one list per turn of ``prompt_ids``, ``response_ids``, ``log_probs``
      and ``versions``;
    - ``tools``, where the episodes' metadata have any.

    :class:`~torchrl_mt.datasets.ConversationDataset` takes the result. Releases of ``datasets`` without
    the type ``Json`` get the arguments of tool calls as JSON text.

    Args:
        episodes: an iterable of TED TensorDicts ``[T]``, each one or several whole episodes, as
            collectors yield them; one of them; or anything with ``episodes()``, such as an
            :class:`~torchrl_mt.data.EpisodeStorage`; or a ``ReplayBuffer`` on one.

    Raises:
        ImportError: if the package ``datasets`` is not installed.
        TypeError: if ``episodes`` is something else.
        ValueError: if an episode has no messages.

    Examples:
        >>> from tensordict import NonTensorStack, TensorDict
        >>> talk = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]]
        >>> next = TensorDict({"reward": torch.ones(1, 1), "done": torch.ones(1, 1).bool()}, [1])
        >>> episode = TensorDict({"text": NonTensorStack(*talk), "next": next}, [1])
        >>> to_hf_dataset([episode])[0]["messages"]
        [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]
    """
    datasets = import_extra("datasets", "arrow")
    if isinstance(episodes, ReplayBuffer):
        episodes = storage_of(episodes, "episodes")
    metadata = getattr(episodes, "metadata", None)
    rows: list[dict[str, Any]] = []
    for k, batch in enumerate(_batches(episodes)):
        tools = metadata(k).get("tools") if callable(metadata) else None
        rows += [{**row, "tools": tools} for row in _rows_of(batch, len(rows))]
    features = _features(datasets, rows)
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=features)


def _batches(episodes: Any) -> Iterable[Any]:
    if isinstance(episodes, TensorDictBase):
        return [episodes]
    if hasattr(episodes, "episodes"):
        found: Iterable[Any] = episodes.episodes()
        return found
    if isinstance(episodes, Iterable) and not isinstance(episodes, (str, bytes, Mapping)):
        return episodes
    raise TypeError(
        "episodes must be TED TensorDicts or something with episodes(), such as an EpisodeStorage, got "
        f"{type(episodes).__name__}."
    )


def _rows_of(batch: Any, number: int) -> Iterator[dict[str, Any]]:
    """Rows of the episodes of a batch, the first of which is episode ``number``."""
    if not isinstance(batch, TensorDictBase) or batch.batch_dims != 1 or not len(batch):
        shape = f" of shape {list(batch.batch_size)}" if isinstance(batch, TensorDictBase) else ""
        raise TypeError(
            f"episode {number} must be a TED TensorDict of shape [T], got {type(batch).__name__}{shape}."
        )
    ends = _ends(batch)
    last: list[int] = ends.nonzero().flatten().tolist()
    found = dialogue_of_rows(batch, (ends.cumsum(0) - ends.long()).tolist(), last)
    dialogues = [None] * len(last) if found is None else found.tolist()
    rewards = _numbers(batch, ("next", "reward")) or [0.0] * len(batch)
    entry = entry_of_rows(batch, ("stop_reason",), last)
    reasons = [None] * len(last) if entry is None else entry.tolist()
    columns = {name: _lists(batch, key) for name, (key, _) in _RAGGED.items()}
    ids, groups = _numbers(batch, ("collector", "traj_ids")), _numbers(batch, "group")
    for k, (before, end) in enumerate(pairwise([-1, *last])):
        messages, reason = dialogues[k], reasons[k]
        if not messages:
            raise ValueError(
                f"episode {number + k} must have messages under 'text', as the collector writes them, "
                f"got the keys {sorted(map(str, batch.keys()))}."
            )
        here = slice(before + 1, end + 1)
        yield {
            "messages": [dict(message) for message in with_data_uris(messages)],
            "reward": float(sum(rewards[here])),
            "rewards": rewards[here],
            "num_turns": end - before,
            "stop_reason": str(reason) if reason else None,
            "episode": number + k if ids is None else ids[end],
            "group": number + k if groups is None else groups[end],
            **{name: lists[here] for name, lists in columns.items() if lists is not None},
        }


def _ends(batch: TensorDictBase) -> Tensor:
    """Whether a step is the last of its episode, ``[T]`` bool."""
    ends = torch.zeros(len(batch), dtype=torch.bool, device="cpu")
    for name in ("done", "terminated", "truncated"):
        flag = batch.get(("next", name), None)
        if flag is not None:
            ends |= flag.reshape(len(batch), -1).any(-1).cpu()
    ids = batch.get(("collector", "traj_ids"), None)
    if ids is not None:
        ids = ids.reshape(-1).cpu()
        ends[:-1] |= ids[1:] != ids[:-1]
    ends[-1] = True
    return ends


def _numbers(batch: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """One number per step, the sum of several; ``None`` if the batch lacks the entry."""
    value = batch.get(key, None)
    return value.reshape(len(batch), -1).sum(-1).tolist() if isinstance(value, Tensor) else None


def _lists(batch: TensorDictBase, key: NestedKey) -> list[list[Any]] | None:
    """One list per step; ``None`` if the batch lacks the entry."""
    values = batch.get(key, None, as_list=True)
    return None if values is None else [value.tolist() for value in values]


def _features(datasets: Any, rows: list[dict[str, Any]]) -> Any:
    """Types of the columns; JSON where messages differ in form."""
    number, text, real = (datasets.Value(name) for name in ("int64", "string", "float64"))
    features: dict[str, Any] = {
        "messages": [_message_features(datasets, rows)],
        "reward": real,
        "rewards": [real],
        "num_turns": number,
        "stop_reason": text,
        "episode": number,
        "group": number,
    }
    for name, (_, dtype) in _RAGGED.items():
        if rows and all(name in row for row in rows):
            features[name] = [[datasets.Value(dtype)]]
    if any(row["tools"] for row in rows):
        features["tools"] = [datasets.Json()] if hasattr(datasets, "Json") else text
        for row in rows if features["tools"] is text else ():
            row["tools"] = json.dumps(row["tools"] or [])
    return datasets.Features(features)


def _message_features(datasets: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    text = datasets.Value("string")
    json_type = datasets.Json() if hasattr(datasets, "Json") else None
    features: dict[str, Any] = {"role": text, "content": text}
    messages = [message for row in rows for message in row["messages"]]
    for name in dict.fromkeys(name for message in messages for name in message):
        values = [message[name] for message in messages if message.get(name) is not None]
        if all(isinstance(value, str) for value in values):
            features[name] = text
        elif name == "tool_calls" and all(_is_plain(call) for calls in values for call in calls):
            function = {"name": text, "arguments": json_type or text}
            features[name] = [{"type": text, "id": text, "function": function}]
            for message in messages if json_type is None else ():
                message[name] = [_with_text(call) for call in message.get(name) or ()]
        elif json_type is not None:
            features[name] = json_type
        elif all(isinstance(value, (int, float)) for value in values):
            features[name] = datasets.Value("float64")  # Such as weights.
        else:
            features[name] = text
            for message in messages:
                if message.get(name) is not None:
                    message[name] = json.dumps(message[name])
    return features


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _is_plain(call: Any) -> bool:
    """Whether a call has the usual form alone."""
    return (
        isinstance(call, Mapping)
        and call.keys() <= _CALL
        and isinstance(call.get("function"), Mapping)
        and call["function"].keys() <= _FUNCTION
        and all(isinstance(call.get(name, ""), str) for name in ("type", "id"))
        and isinstance(call["function"].get("name", ""), str)
    )
