"""Rows of any origin in one form: all their tokens in one column, and what is known of each in others.

Padding is gone and nothing else: the tokens of a row are those that a model attends to, in order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from torchrl_mt.collectors.dump import dump_records
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import EpisodeDataset
from torchrl_mt.datasets.dataset import open_saved
from torchrl_mt.transforms import MergeTurns

__all__ = ["Rows", "read_rows"]


@dataclass(frozen=True)
class Rows:
    """``N`` rows with ``M`` tokens in all; what is not known is ``None``."""

    row: np.ndarray
    """``[M]``: the row of each token."""
    token: np.ndarray
    """``[M]``: its index in the row."""
    id: np.ndarray
    """``[M]``: its token id."""
    trained: np.ndarray
    """``[M]`` bool; in what a sampler recorded, whether it was sampled."""
    stray: np.ndarray
    """``[N]``: trained places that are padding."""
    log_prob: np.ndarray | None = None
    """``[M]``; as the others below, without meaning where not trained."""
    version: np.ndarray | None = None
    """``[M]``"""
    turn: np.ndarray | None = None
    """``[M]``: the turn that added the token."""
    episode: np.ndarray | None = None
    """``[N]``"""
    copy: np.ndarray | None = None
    """``[N]``: tells apart several copies of an episode."""
    group: np.ndarray | None = None
    """``[N]``"""
    temperature: np.ndarray | None = None
    """``[N]``: the sampler's; NaN if no forward pass can repeat it."""

    def of_tokens(self, name: str) -> np.ndarray:
        """A value of each token's row, ``[M]``; 0 if it is not known."""
        values = getattr(self, name)
        return np.zeros(len(self.row), np.int64) if values is None else values[self.row]


def read_rows(source: Any, name: str) -> Rows:
    """Read the rows of a source; :func:`~torchrl_mt.audit.audit_rows` names the sources.

    Args:
        source: the source.
        name: name of the argument, for errors.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: if it is no source.
        ValueError: if it cannot be read, or has no rows.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{name}: there is nothing at {path}.")
        try:
            source = _opened(path)
        except (UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
            raise ValueError(f"{name}: {source} cannot be read: {error}") from error
    if isinstance(source, ReplayBuffer):
        source = source._storage
    if isinstance(source, (EpisodeDataset, EpisodeStorage)):
        parts = [_merged(each, name, number) for number, each in enumerate(source.episodes())]
    elif isinstance(source, list) and all(isinstance(each, Mapping) for each in source):
        parts = [_of_record(record, name) for record in source]
    elif isinstance(source, Mapping):  # A TensorDict too.
        parts = [_of_mapping(source, name)]
    else:
        raise TypeError(
            f"{name} must be a path, a mapping of tensors, a TensorDict, a replay buffer, a storage or "
            f"an EpisodeDataset, got {type(source).__name__}."
        )
    if not sum(len(part.stray) for part in parts):
        raise ValueError(f"{name} must have at least one row, got none.")
    first = np.cumsum([0, *(len(part.stray) for part in parts)])
    parts = [replace(part, row=part.row + n) for part, n in zip(parts, first, strict=False)]
    columns = {each.name: [getattr(part, each.name) for part in parts] for each in fields(Rows)}
    known = {key: each for key, each in columns.items() if all(x is not None for x in each)}
    return Rows(**{key: np.concatenate(each) for key, each in known.items()})


def _opened(path: Path) -> Any:
    """What a path holds: the records of a dump as a list, tensors, or a data set."""
    # Evaluations and rejected episodes are not trained.
    records = dump_records(path)
    return open_saved(path) if records is None else [*records]


def _of_record(record: Mapping[str, Any], name: str) -> Rows:
    """The row that a line of a dump describes."""
    if not {"token_ids", "turns", "traj_id", "group"} <= set(record):
        raise ValueError(f"{name} must have 'token_ids' and 'turns' in each line, got {[*record]}.")
    tokens = torch.tensor([record["token_ids"]], dtype=torch.int64, device="cpu")
    values = torch.zeros(4, tokens.numel(), dtype=torch.float64, device="cpu")
    before = 0
    for span in record["turns"]:
        sampled = slice(span["start"], span["stop"])
        values[3, before : sampled.stop] = span["turn"]
        values[0, sampled] = 1
        values[1, sampled] = values.new_tensor([*map(float, span["log_probs"])])
        values[2, sampled] = values.new_tensor(span["versions"])
        before = sampled.stop
    known = dict(zip(("log_prob", "version", "turn"), values[1:, None], strict=True))
    ids = {
        "episode": tokens.new_tensor([record["traj_id"]]),
        "group": tokens.new_tensor([record["group"]]),
    }
    return _rows(tokens, torch.ones_like(tokens), values[:1], **known, **ids)


def _of_mapping(source: Any, name: str) -> Rows:
    def get(key: Any, like: Tensor | None = None, default: Any = ...) -> Any:
        """A tensor of the shape of another, or else ``[N, S]``."""
        value = source.get(key, None)
        if value is None and default is not ...:
            return default
        shape = getattr(value, "shape", None)
        if not isinstance(value, Tensor) or (
            value.ndim != 2 if like is None else shape != like.shape
        ):
            form = "[N, S]" if like is None else list(like.shape)
            came = f"one of {list(shape)}" if shape is not None else type(value).__name__
            raise ValueError(f"{name} must have {key!r}, a tensor {form}, got {came}.")
        return value

    if "prompt_ids" in source or "completion_ids" in source:
        prompt, answer = get("prompt_ids"), get("completion_ids")
        mask = get("completion_mask", answer)
        tokens = torch.cat([prompt, answer], 1)
        attention = torch.cat([get("prompt_mask", prompt), mask], 1)
        trained = mask * get("tool_mask", answer, torch.ones_like(mask))
        names = "sampling_per_token_logps", "old_per_token_logps"
    elif "input_ids" in source:
        tokens, answer = get("input_ids"), get("responses")
        if not torch.equal(tokens[:, -answer.shape[1] :], answer):
            raise ValueError(f"{name} must have 'responses' as the last columns of 'input_ids'.")
        attention, trained = get("attention_mask", tokens), get("response_mask", answer)
        names = "rollout_log_probs", "old_log_probs"
    else:
        if not isinstance(source, TensorDictBase):
            size = [len(each) for each in source.values() if isinstance(each, Tensor)]
            source = TensorDict(dict(source), batch_size=size[:1])
        if ("tokens", "full") not in source.keys(include_nested=True):
            return _merged(source, name)
        tokens = get(("tokens", "full"))
        column, temperature = tokens[:, 0], ("sampling", "temperature")
        known = {
            "log_prob": get(("log_probs", "full"), tokens, None),
            "version": get(("versions", "full"), tokens, None),
            "turn": get(("turns", "full"), tokens, None),
            "episode": get("episode", column, None),
            "copy": get("episode_index", column, None),
            "group": get("group", column, None),
            "temperature": get(temperature, column, None),
        }
        if ("images", "raw") in source.keys(include_nested=True):
            known["temperature"] = torch.full(column.shape, torch.nan, device="cpu")
        masks = (get(("masks", f"all_{mask}_mask"), tokens) for mask in ("attention", "assistant"))
        return _rows(tokens, *masks, **known)
    log_prob = get(names[0], answer, get(names[1], answer, None))
    right = (tokens.shape[1] - answer.shape[1], 0)
    if log_prob is not None:
        log_prob = torch.nn.functional.pad(log_prob, right)
    return _rows(tokens, attention, torch.nn.functional.pad(trained, right), log_prob=log_prob)


def _merged(batch: Any, name: str, number: int | None = None) -> Rows:
    """Rows of whole episodes in TED; ``number`` stands for an id that a single one lacks."""
    try:
        rows = MergeTurns(carry=())(batch)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name} must be rows or whole episodes: {error.args[0]}") from error
    if number is not None and ("collector", "traj_ids") not in batch.keys(include_nested=True):
        rows["episode"] = torch.full_like(rows["episode"], number)
    return _of_mapping(rows, name)


def _rows(tokens: Tensor, attention: Tensor, trained: Tensor, **known: Tensor | None) -> Rows:
    """Rows of padded tables ``[N, S]``, and what is known of tokens, ``[N, S]``, and rows, ``[N]``."""
    here, chosen = attention.bool().cpu(), trained.bool().cpu()
    arrays = {}
    for key, value in known.items():
        if value is not None:
            value = value.cpu()[here] if value.ndim == 2 else value.cpu()
            arrays[key] = (value.double() if value.is_floating_point() else value.long()).numpy()
    row, token = here.nonzero()[:, 0].numpy(), (here.cumsum(1) - 1)[here].numpy()
    ids, stray = tokens.cpu()[here].long().numpy(), (chosen & ~here).sum(1).numpy()
    return Rows(row, token, ids, chosen[here].numpy(), stray, **arrays)
