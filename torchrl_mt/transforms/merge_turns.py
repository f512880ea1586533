"""Merge the turns of whole episodes into training rows.

A row is exactly the tokens that the engine received and returned, and every sampled token is in exactly
one row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from tensordict import NestedKey, NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_mt.data._store.ring import runs
from torchrl_mt.devices import on_cpu, sent
from torchrl_mt.transforms.episode_entries import (
    TEXT,
    column_of,
    dialogue_of_rows,
    entry_of_rows,
    images_of_prompts,
    item_keys,
)
from torchrl_mt.transforms.turn_tree import assign_rows, find_parents
from torchrl_mt.vision.rows import NEW, set_row_images

__all__ = ["MergeTurns"]

_logger = logging.getLogger("torchrl_mt")

_PROMPT = ("tokens", "prompt")
_RESPONSE = ("tokens", "response")
_PARENT = ("turn", "parent")
_TEMPERATURE = ("sampling", "temperature")
_FLAGS = tuple(("next", name) for name in ("done", "terminated", "truncated"))
_REWARD, _RETURN = ("next", "reward"), ("next", "return")
_COLUMNS = (*_FLAGS, _PARENT, "group", _REWARD, _RETURN, _TEMPERATURE, "valid")
_LEAVES = (_PROMPT, _RESPONSE, ("log_probs", "response"), ("versions", "response"))
_USUAL = ("label", "reference")
"""Entries that are carried by default; a batch may lack them."""


class MergeTurns(Transform):
    """Merges the turns of whole episodes into right-padded rows, one per episode and fork.

    A turn whose prompt begins with the prompt and response of an earlier turn extends that turn's row. A
    turn that extends none (the history was cut or rewritten, or a sub-agent began), or one that another
    turn has extended, begins a new row with its whole prompt: the episode forks. Token ids are compared;
    nothing is decoded. :doc:`/data_format` has the rule and the keys.

    The input is a flat ``[ΣT]`` batch of turns, episodes one after the other, each with its turns in
    order, as collectors yield it and :class:`~torchrl_mt.data.EpisodeSampler` samples it. An episode
    that does not end is refused; missing first turns are not noticed. The output is a new TensorDict.

    In a replay buffer, the transform acts on samples. Use a plain :class:`~torchrl.data.ReplayBuffer`:
    rows are fewer than sampled steps, so they cannot hold sampling information per step.

    Args:
        pad_token_id: token id of the padding. It may be an ordinary token, since the masks mark padding.
        max_length: maximum length of a row, in tokens; no limit if ``None``.
        traj_key: key of each turn's trajectory id.
        carry: keys of entries that each row takes from its episode's last turn, or else from the item
            under ``"data"``. ``"text"`` is taken from all turns: the messages of the whole episode.

    Examples:
        >>> from tensordict import lazy_stack
        >>> turns = [([1, 2], [3], False), ([1, 2, 3, 4], [5], True), ([6], [7], True)]
        >>> batch = lazy_stack([
        ...     TensorDict({
        ...         "tokens": {"prompt": torch.tensor(prompt), "response": torch.tensor(response)},
        ...         ("next", "done"): torch.tensor([done]),
        ...     })
        ...     for prompt, response, done in turns
        ... ])
        >>> MergeTurns()(batch)["tokens", "full"]
        tensor([[1, 2, 3, 4, 5],
                [6, 7, 0, 0, 0]])
    """

    _warned: frozenset[str] = frozenset()
    """Keys whose absence was logged."""

    def __init__(
        self,
        *,
        pad_token_id: int = 0,
        max_length: int | None = None,
        traj_key: NestedKey = ("collector", "traj_ids"),
        carry: Sequence[NestedKey] = _USUAL,
    ) -> None:
        if not isinstance(pad_token_id, int):
            raise ValueError(f"pad_token_id must be an int, got {pad_token_id!r}.")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1 or None, got {max_length}.")
        if isinstance(carry, str):
            raise ValueError(
                f"carry must be a sequence of keys, got {carry!r}: write ({carry!r},)."
            )
        super().__init__()
        self.carry = tuple(unravel_key(key) for key in carry)
        self.pad_token_id = pad_token_id
        self.max_length = max_length
        self.traj_key = traj_key

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Merge a batch of whole episodes.

        Args:
            tensordict: flat ``[ΣT]`` batch of turns with ``("tokens", "prompt")`` and
                ``("tokens", "response")``, ragged or dense, and with trajectory ids or end flags.

        Returns:
            The rows, of batch size ``[N]``. The input is not changed.

        Raises:
            KeyError: if tokens are missing; if both trajectory ids and end flags are; or if an entry of
                ``carry`` is, and there are no mappings under ``"data"``.
            ValueError: if the batch is not flat or is empty, an episode does not end, a leaf does not
                match its turn, a prompt is empty, a row is longer than ``max_length``, or turns have
                images and the parents that these were added to are not known.
        """
        if tensordict.batch_dims != 1 or not len(tensordict):
            raise ValueError(
                "MergeTurns needs a flat, non-empty batch of turns, got batch size "
                f"{list(tensordict.batch_size)}: flatten it with reshape(-1)."
            )
        data = _read(tensordict, self.traj_key)
        ids = _column(data, self.traj_key)
        episode = _episode_index(data, ids, self.traj_key)
        prompts, given = _token_ids(data, _PROMPT)
        responses, sizes = _token_ids(data, _RESPONSE)
        if 0 in given:
            raise ValueError(
                f"MergeTurns: turn {given.index(0)} of the batch has an empty prompt, and nothing "
                "predicts the first token of a row: begin prompts with a token (a begin-of-sequence "
                "token will do), and drop turns in which the model was not called."
            )
        of_turn: list[int] = episode.tolist()
        response = torch.cat(list(responses))
        turn = torch.arange(len(of_turn), device="cpu")
        first = torch.searchsorted(episode, episode)  # the first turn of each turn's episode
        parent = _column(data, _PARENT)  # counted from the episode's first turn
        claimed = None if parent is None else torch.where(parent < 0, parent, parent + first)
        claims = None if claimed is None else claimed.tolist()
        parents = find_parents(
            prompts, response, sizes, of_turn, claims, images=tensordict.get(NEW, None) is not None
        )
        rows_of = assign_rows(parents, given, sizes)
        length = max(rows_of.length)
        if self.max_length is not None and length > self.max_length:
            which = of_turn[rows_of.first[rows_of.length.index(length)]]
            raise ValueError(
                f"A row of episode {which} of the batch has {length} tokens, more than "
                f"max_length={self.max_length}: raise it, or bound episodes where they are collected."
            )

        row, known, prompt_size, size, row_turn, row_end = (
            torch.tensor(x, device="cpu")
            for x in (rows_of.row, rows_of.known, given, sizes, rows_of.first, rows_of.last)
        )
        number = turn - first
        added = prompt_size - known
        start = row * length
        sampled = runs(start + prompt_size, size)
        shape = (len(row_turn), length)

        def table(fill: float, dtype: torch.dtype, at: Tensor, values: Tensor) -> Tensor:
            """Make a table ``[N, S]`` with values at flat indices and ``fill`` elsewhere."""
            out = torch.full(shape, fill, dtype=dtype, device="cpu")
            out.view(-1).scatter_(0, at, values)
            return out

        tokens = table(self.pad_token_id, torch.int64, sampled, response.long())
        whole = runs(start[row_end], prompt_size[row_end])
        prompt = torch.cat([prompts[k] for k in rows_of.last])
        tokens.view(-1).scatter_(0, whole, prompt.long())
        turns = table(-1, torch.int64, sampled, number.repeat_interleave(size))
        new = runs(start + known, added)
        turns.view(-1).scatter_(0, new, number.repeat_interleave(added))
        group = _column(data, "group")
        index = episode[row_turn]
        traj = index if ids is None else ids[row_turn].long()
        rows: dict[NestedKey, Tensor] = {
            ("tokens", "full"): tokens,
            ("masks", "all_attention_mask"): turns >= 0,
            ("masks", "all_assistant_mask"): table(
                False, torch.bool, sampled, torch.ones_like(sampled, dtype=torch.bool)
            ),
            ("turns", "full"): turns,
            "episode": traj,
            "group": traj.clone() if group is None else group[row_turn].long(),
            "episode_index": index.clone(),
            "fork": torch.arange(len(index), device="cpu") - torch.searchsorted(index, index),
        }
        log_probs = _sampled_leaf(data, ("log_probs", "response"), sizes)
        if log_probs is not None:
            rows["log_probs", "full"] = table(0.0, torch.float32, sampled, log_probs.float())
        versions = _sampled_leaf(data, ("versions", "response"), sizes)
        if versions is not None:
            full = table(-1, torch.int64, sampled, versions.long())
            newest = full.amax(-1)
            oldest = full.where(rows["masks", "all_assistant_mask"], newest[:, None]).amin(-1)
            rows["versions", "full"] = full
            rows["versions", "oldest"], rows["versions", "newest"] = oldest, newest
        reward = _column(data, _REWARD)
        if reward is not None:
            # The rewards of several turns may be on one token: they add up.
            rewards = torch.zeros(shape, device="cpu")
            place = _reward_places(first, start + prompt_size, size)
            rewards.view(-1).index_add_(0, place, reward.float())
            rows["rewards", "full"] = rewards
        returns = _column(data, _RETURN)
        if returns is not None:
            values = returns.float().repeat_interleave(size)
            rows["rewards", "to_go"] = table(0.0, torch.float32, sampled, values)
        temperature = _column(data, _TEMPERATURE)
        if temperature is not None:
            rows[_TEMPERATURE] = _common(temperature.float(), row, size > 0, len(row_turn))
        last_turn = {number: k for k, number in enumerate(of_turn)}
        row_last = [last_turn[of_turn[k]] for k in rows_of.first]
        valid = _column(data, "valid")
        if valid is not None:
            rows["valid"] = valid.bool()[row_last]
        rows = {key: sent(x, data.device) for key, x in rows.items()}
        out = TensorDict(rows, batch_size=shape[:1], device=tensordict.device)
        images = images_of_prompts(tensordict, parents, claims)
        if images is not None:
            if claims is None:
                _check_unlike(of_turn, prompts, responses, images)
            # A row is the prompt and response of its last turn.
            set_row_images(out, [images[k] for k in rows_of.last])
        for key in self.carry:
            if key == TEXT:
                value = dialogue_of_rows(tensordict, of_turn, row_last)
            else:
                value = entry_of_rows(tensordict, key, row_last)
            if value is not None:
                out.set(key, value)
            elif key not in _USUAL:
                out.set(key, self._missing_column(tensordict, key, len(row_last)))
        return out

    def _missing_column(self, batch: TensorDictBase, key: NestedKey, count: int) -> NonTensorStack:
        """A column of ``None`` for a key that no item has; an error if there are no mappings."""
        found = item_keys(batch)
        if found is None or not isinstance(key, str):
            raise KeyError(
                f"MergeTurns: carry names {key!r}, which neither the batch nor an item of its data "
                f"has: the batch has {_keys(batch)}, the items have {found or []}."
            )
        if key not in self._warned:
            self._warned |= {key}
            _logger.warning(
                "MergeTurns: carry names %r, which no episode of a batch has: its rows have None. The "
                "items of its data have %s: is it misspelt? This is said once for each key.",
                key,
                found,
            )
        return column_of([None] * count)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Not supported: single steps are no whole episodes."""
        raise RuntimeError(
            "MergeTurns acts on whole episodes and not on the steps of an environment: append it to a "
            "replay buffer, or call it on a batch."
        )


def _reward_places(first: Tensor, place: Tensor, size: Tensor) -> Tensor:
    """Flat index of the token that gets each turn's reward: a sampled token, if the episode has one.

    Args:
        first: first turn of each turn's episode.
        place: flat index of each response's first token.
        size: length of each response, in tokens.
    """
    turn, end = torch.arange(len(size), device=size.device), len(size) - 1
    before = torch.where(size > 0, turn, -1).cummax(0).values
    after = torch.where(size > 0, turn, end).flip(0).cummin(0).values.flip(0)
    is_after = (size[after] > 0) & (first[after] == first)
    last = place + size - 1
    alone = torch.where(is_after, place[after], last)
    return torch.where(before >= first, last[before], alone)


def _common(value: Tensor, row: Tensor, sampled: Tensor, rows: int) -> Tensor:
    """The common value ``[N]`` of each row's turns; NaN if they differ.

    Turns that sampled nothing count only in rows without a sampled token.
    """
    none = value.new_full((rows,), torch.inf)
    has_sampled = torch.zeros(rows, dtype=torch.bool, device=row.device)
    has_sampled[row[sampled]] = True
    counts = sampled | ~has_sampled[row]
    row, value = row[counts], value[counts]
    low = none.scatter_reduce(0, row, value, "amin")
    high = (-none).scatter_reduce(0, row, value, "amax")
    return low.where(low == high, torch.nan)


@dataclass(frozen=True)
class _Turns:
    """Turns as given, the device of their tokens, and on the CPU what rows are made of, by key."""

    batch: TensorDictBase
    device: torch.device
    entries: dict[NestedKey, Any]


def _read(tensordict: TensorDictBase, traj_key: NestedKey) -> _Turns:
    """Read turns; from another device in one copy, in which prompts that share memory are once."""
    found = {key: tensordict.get(key, None) for key in (traj_key, *_COLUMNS)}
    found |= {key: tensordict.get(key, None, as_list=True) for key in _LEAVES}
    parts = {key: [x] if isinstance(x, Tensor) else x for key, x in found.items()}
    parts = {key: part for key, part in parts.items() if isinstance(part, list)}
    device = parts[_RESPONSE][0].device if _RESPONSE in parts else torch.device("cpu")
    if all(part[0].is_cpu for part in parts.values()):
        return _Turns(tensordict, device, found)

    def place(x: Tensor) -> Any:
        return (x.data_ptr(), x.dtype) if x.ndim == 1 and x.is_contiguous() else id(x)

    longest: dict[Any, Tensor] = {}
    for x in sorted(chain(*parts.values()), key=Tensor.numel):
        longest[place(x)] = x
    copies = dict(zip(longest, on_cpu(*longest.values()), strict=True))
    for key, part in parts.items():
        ours = [copies[place(x)][: x.shape[0]] if x.ndim else copies[place(x)] for x in part]
        found[key] = ours[0] if isinstance(found[key], Tensor) else ours
    return _Turns(tensordict, device, found)


def _leaves(data: _Turns, key: NestedKey) -> tuple[Sequence[Tensor], list[int]] | None:
    """Each turn's vector and its length; ``None`` if the batch has no such leaf."""
    leaves = data.entries.get(key)
    if leaves is None:
        return None
    if isinstance(leaves, Tensor):
        leaves = leaves.unbind(0)
    shapes = [leaf.shape for leaf in leaves]
    for k, shape in enumerate(shapes):
        if len(shape) != 1:
            raise ValueError(
                f"MergeTurns: {key} must be 1-D in every turn, got shape {list(shape)} in turn {k}."
            )
    return leaves, [shape[0] for shape in shapes]


def _token_ids(data: _Turns, key: NestedKey) -> tuple[Sequence[Tensor], list[int]]:
    """Each turn's token ids and their number."""
    found = _leaves(data, key)
    if found is None:
        raise KeyError(f"MergeTurns needs {key} in the batch, got the keys {_keys(data.batch)}.")
    for dtype in {leaf.dtype for leaf in found[0]}:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"MergeTurns: {key} must be of an integer dtype, got {dtype}.")
    return found


def _sampled_leaf(data: _Turns, key: NestedKey, expected: list[int]) -> Tensor | None:
    """A leaf with one value per sampled token, concatenated; ``None`` if the batch has no such leaf."""
    found = _leaves(data, key)
    if found is None:
        return None
    leaves, sizes = found
    if sizes != expected:
        k = next(k for k, size in enumerate(sizes) if size != expected[k])
        raise ValueError(
            f"MergeTurns: {key} must have one value for each of the {expected[k]} response tokens of "
            f"turn {k}, got {sizes[k]}."
        )
    return torch.cat(list(leaves))


def _check_unlike(
    episode: Sequence[int],
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    images: Sequence[tuple[Any, ...]],
) -> None:
    """Refuse turns that only their images tell apart, because a later turn may go on from either."""
    seen: dict[Any, tuple[Any, ...]] = {}
    for k, tokens in enumerate(zip(prompts, responses, strict=True)):
        key = (episode[k], *(tuple(part.tolist()) for part in tokens))
        if seen.setdefault(key, images[k]) != images[k]:
            raise ValueError(
                f"MergeTurns: turn {k} of the batch has the tokens of an earlier turn and other images: "
                f"{_PARENT} must tell which of them later turns went on from. Collectors write it."
            )


def _column(data: _Turns, key: NestedKey) -> Tensor | None:
    """A leaf ``[ΣT]`` with one number per turn; ``None`` if the batch has no such leaf."""
    value = data.entries.get(key)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.numel() != len(data.batch):
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"MergeTurns: {key} must be a tensor with one number for each of the {len(data.batch)} "
            f"turns, got {what}."
        )
    return value.reshape(-1)


def _episode_index(data: _Turns, ids: Tensor | None, traj_key: NestedKey) -> Tensor:
    """Index ``[ΣT]`` of each turn's episode in the batch; every episode must end."""
    found = {key[1]: _column(data, key) for key in _FLAGS}
    flags = {name: flag.bool() for name, flag in found.items() if flag is not None}
    if ids is None and not flags:
        raise KeyError(
            f"MergeTurns needs trajectory ids under {traj_key} or end flags under ('next', 'done') to "
            f"tell episodes apart, got the keys {_keys(data.batch)}."
        )
    last = list(flags.values())
    if ids is not None:
        last.append(torch.cat([ids[1:] != ids[:-1], ids.new_ones(1).bool()]))
    ends = torch.stack(last).any(0)
    ends[-1] = True
    # With only one of "terminated" and "truncated", an episode may have ended by the other.
    is_complete = "done" in flags or len(flags) == 2
    done = torch.stack([*flags.values()]).any(0) if is_complete else ends
    cut = (ends & ~done).nonzero()
    if len(cut):
        raise ValueError(
            f"MergeTurns needs whole episodes, but turn {int(cut[0])}, the last of its episode in the "
            f"batch, is not {' or '.join(flags)}. Give the replay buffer sampler=EpisodeSampler(): "
            "other samplers deal steps or parts of episodes. A collector's batch fits as it comes."
        )
    return ends.cumsum(0) - ends.long()


def _keys(tensordict: TensorDictBase) -> list[NestedKey]:
    """The batch's keys, including those of Python objects, for errors."""
    return sorted(tensordict.keys(True, True, is_leaf=is_leaf_nontensor), key=str)
