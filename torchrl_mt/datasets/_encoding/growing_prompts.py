"""Growing prompts in files: each turn's prompt, written as what it adds to an earlier turn.

Where a schema has prompts and responses, files hold three entries in place of the prompts: the tokens
that each adds, how many leading tokens it keeps of an earlier turn (prompt, then response), and how many
steps back that turn is. What is read equals what was written; schemas and steps that users see have the
whole prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.columns.prompt_column import Addition, Prompts
from torchrl_mt.data._store.schema import PROMPT, RESPONSE, Schema
from torchrl_mt.data._store.steps import Path, Rows, Steps, step_tensors
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._files.readers import FormatReader, Runs, runs_of

__all__ = ["as_additions", "growing", "read_steps", "whole_prompts", "whole_schema"]

_ADDED, _KEPT, _BACK = ((*PROMPT, name) for name in ("added", "kept", "back"))
_Entry = TypeVar("_Entry")


def growing(schema: EpisodeSchema) -> EpisodeSchema:
    """Return the schema of what files hold."""
    fields: Any = schema.fields
    if not Schema(fields).growing:
        return schema
    number = Field("dense", (), torch.int64)
    parts = {_ADDED: fields[PROMPT], _KEPT: number, _BACK: number}
    return EpisodeSchema(_replaced(schema.fields, PROMPT, parts))


def whole_schema(schema: EpisodeSchema) -> EpisodeSchema:
    """Undo :func:`growing`."""
    if _ADDED not in schema.fields:
        return schema
    rest = {path: field for path, field in schema.fields.items() if path not in (_KEPT, _BACK)}
    return EpisodeSchema(_replaced(rest, _ADDED, {PROMPT: rest[_ADDED]}))


def _replaced(
    entries: Mapping[Path, _Entry], path: Path, others: Mapping[Path, _Entry]
) -> dict[Path, _Entry]:
    """Put entries in the place of one."""
    found: dict[Path, _Entry] = {}
    for each, entry in entries.items():
        found |= others if each == path else {each: entry}
    return found


def as_additions(steps: Steps) -> Steps:
    """Convert an episode with whole prompts to what files hold."""
    items = Prompts.of(steps, torch.tensor([steps.length], device="cpu")).items
    parts: dict[Path, Any] = {
        _ADDED: Rows([item.added for item in items]),
        _KEPT: torch.tensor([item.kept for item in items], device="cpu"),
        _BACK: torch.tensor([item.back for item in items], device="cpu"),
    }
    return replace(steps, columns=_replaced(steps.columns, PROMPT, parts))


def whole_prompts(steps: Steps) -> Steps:
    """Undo :func:`as_additions`, if the steps are such; they are an episode from its first step on.

    Raises:
        ValueError: if a prompt refers to a turn or to tokens that are not there.
    """
    columns: dict[Path, Any] = dict(steps.columns)
    if _ADDED not in columns:
        return steps
    added, answers = step_tensors(columns[_ADDED]), step_tensors(columns[RESPONSE])
    kept, back = (columns.pop(path).tolist() for path in (_KEPT, _BACK))
    sizes: list[int] = []
    for t, (new, answer) in enumerate(zip(added, answers, strict=True)):
        if not (0 <= back[t] <= t and 0 <= kept[t] <= (sizes[t - back[t]] if back[t] else 0)):
            raise ValueError(f"the prompt of turn {t} keeps tokens of a turn that has them not.")
        sizes.append(kept[t] + len(new) + len(answer))
    prompts = Rows(Prompts([*map(Addition, back, kept, added)]).whole(answers))
    return replace(steps, columns=_replaced(columns, _ADDED, {PROMPT: prompts}))


def read_steps(reader: FormatReader, runs: Runs, paths: Iterable[Path]) -> Steps:
    """Read steps, of these entries with whole prompts; prompts of one episode may share memory."""
    wanted = list(paths)
    if PROMPT not in wanted or _ADDED not in reader.schema.fields:
        return reader.read(runs, wanted)
    rest, parts = [path for path in wanted if path != PROMPT], [_ADDED, _KEPT, _BACK, RESPONSE]
    if len(runs.episodes) == 1 and runs.stride == 1 and not runs.starts[0]:
        steps = whole_prompts(reader.read(runs, [*dict.fromkeys([*rest, *parts])]))
        return Steps(len(runs), {path: steps.columns[path] for path in wanted})
    columns = {**reader.read(runs, rest).columns} if rest else {}
    # A prompt is read from the beginning of its episode on.
    episodes, place = np.unique(runs.episodes, return_inverse=True)
    ends = np.zeros(len(episodes), np.int64)
    np.maximum.at(ends, place, runs.starts + (runs.counts - 1) * runs.stride + 1)
    begins = np.zeros_like(ends)
    found = reader.read(Runs(episodes, begins, ends), parts)
    first, prompts = ends.cumsum() - ends, list[Tensor]()
    for begin, end in zip(first.tolist(), (first + ends).tolist(), strict=True):
        prompts += step_tensors(whole_prompts(found[begin:end]).columns[PROMPT])
    order = runs_of(first[place] + runs.starts, runs.counts, runs.stride)
    columns[PROMPT] = Rows([prompts[row] for row in order.tolist()])
    return Steps(len(runs), {path: columns[path] for path in wanted})
