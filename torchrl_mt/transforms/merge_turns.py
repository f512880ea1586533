"""Whole episodes in, training rows out.

Concatenating a row gives exactly what the engine was given and what it returned, and every sampled
token lies in exactly one row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from tensordict import NestedKey, NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_mt.transforms.episode_entries import column_of_none, entry_of_rows, item_keys
from torchrl_mt.transforms.turn_tree import assign_rows, find_parents

__all__ = ["MergeTurns"]

_logger = logging.getLogger("torchrl_mt")

_PROMPT = ("tokens", "prompt")
_RESPONSE = ("tokens", "response")
_PARENT = ("turn", "parent")
_TEMPERATURE = ("sampling", "temperature")
_USUAL = ("label", "reference")
"""What is carried where it is there."""


class MergeTurns(Transform):
    """Merge the turns of whole episodes into right-padded rows, one per episode and fork.

    A turn's parent is the last turn before it in the episode whose tokens its prompt begins with. A turn
    goes on with the row that ends with its parent. If it has none (the history was cut or rewritten, a
    sub-agent began), or another turn went on from there, the episode forks: a new row starts with the
    turn's whole prompt. Tokens are compared as token ids; nothing is decoded. ``("turn", "parent")``
    saves the search for parents and is never believed: a parent that does not fit the tokens is found
    by comparing, and -1 can at worst begin a row too many.

    It takes a flat ``[ΣT]`` batch of turns, episodes one after the other, each with its turns in
    order: what a collector sends, or :class:`~torchrl_mt.data.EpisodeSampler` deals. An episode ends at
    a ``done`` flag (``terminated`` or ``truncated`` where there is none), and one that does not end so
    is refused; without flags it ends where the trajectory id changes. Whether the first turns are
    there cannot be told. As a transform of a replay buffer it acts on what is sampled. Use a plain
    :class:`~torchrl.data.ReplayBuffer`: there are not as many rows as sampled steps, so sampling
    information of each step cannot be written into them.

    The rows are a new TensorDict with the keys that the documentation's *Data format* lists. What the
    batch lacks (log-probabilities, versions, rewards, returns, temperatures, ``"valid"``), they lack. On
    the details:

    - ``("rewards", "full")`` has each turn's reward on its last sampled token. A turn that sampled
      nothing leaves it on the last token that its episode sampled before it, in whichever row; if there
      is none, on the first that the episode samples after it. Where an episode samples nothing at all,
      rewards lie on their turns' last tokens, and nothing is trained.
    - ``"episode"`` and ``"group"``: without ids, episodes are numbered by their place in the batch;
      without groups, each is its own. ``"episode_index"`` tells copies of one episode apart.
    - ``("sampling", "temperature")`` is NaN where a row's turns differ. Turns that sampled nothing count
      only in rows without a sampled token.
    - ``"valid"`` is what the episode's last turn says.

    Args:
        pad_token_id: token id that fills the rows up. It may be an ordinary token: the masks alone tell
            what is padding.
        max_length: longest row allowed, in tokens; no limit if ``None``.
        traj_key: where the trajectory id of each turn is.
        carry: keys of entries of which each row gets the value of its episode's last turn: entries of
            the batch, or, where it has none, of the collector's ``"data"`` (mappings; an item without
            the key counts as ``None``). Of a key that none of a batch's items has, the logger
            ``torchrl_mt`` warns, once; where there are no such items either, it is an error. ``"label"``
            and ``"reference"`` may lack.

    Examples:
        >>> from tensordict import lazy_stack
        >>> turns = [([1, 2], [3], False), ([1, 2, 3, 4], [5], True), ([6], [7], True)]
        >>> batch = lazy_stack([
        ...     TensorDict({
        ...         ("tokens", "prompt"): torch.tensor(prompt),
        ...         ("tokens", "response"): torch.tensor(response),
        ...         ("next", "done"): torch.tensor([done]),
        ...     })
        ...     for prompt, response, done in turns
        ... ])
        >>> rows = MergeTurns()(batch)
        >>> rows["tokens", "full"]
        tensor([[1, 2, 3, 4, 5],
                [6, 7, 0, 0, 0]])
        >>> rows["masks", "all_assistant_mask"].int()
        tensor([[0, 0, 1, 0, 1],
                [0, 1, 0, 0, 0]], dtype=torch.int32)
    """

    _told: frozenset[str] = frozenset()
    """The keys that were warned of."""

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
            The rows, batch size ``[N]``. The input is left as it was.

        Raises:
            KeyError: if tokens are missing, or trajectory ids and end flags both are, or an entry that
                ``carry`` names and no item of data can have.
            ValueError: if the batch is not flat, is empty, has an episode that does not end, a leaf does
                not fit its turn, a turn has an empty prompt, or a row is longer than ``max_length``.
        """
        if tensordict.batch_dims != 1 or not len(tensordict):
            raise ValueError(
                "MergeTurns needs a flat, non-empty batch of turns, got batch size "
                f"{list(tensordict.batch_size)}: flatten it with reshape(-1)."
            )
        ids = _column(tensordict, self.traj_key)
        episode = _episode_index(tensordict, ids, self.traj_key)
        prompts, given = _token_ids(tensordict, _PROMPT)
        responses, sizes = _token_ids(tensordict, _RESPONSE)
        if 0 in given:
            raise ValueError(
                f"MergeTurns: turn {given.index(0)} of the batch has an empty prompt, and nothing "
                "predicts the first token of a row: begin prompts with a token (a begin-of-sequence "
                "token will do), and drop turns in which the model was not called."
            )
        of_turn: list[int] = episode.tolist()
        response = torch.cat(list(responses))
        device = response.device
        turn = torch.arange(len(of_turn), device=device)
        first = torch.searchsorted(episode, episode)  # the first turn of each turn's episode
        told = _column(tensordict, _PARENT)
        places = None if told is None else torch.where(told < 0, told, told + first).tolist()
        parents = find_parents(prompts, response, sizes, of_turn, places)
        rows_of = assign_rows(parents, given, sizes)
        length = max(rows_of.length)
        if self.max_length is not None and length > self.max_length:
            which = of_turn[rows_of.first[rows_of.length.index(length)]]
            raise ValueError(
                f"A row of episode {which} of the batch has {length} tokens, more than "
                f"max_length={self.max_length}: raise it, or bound episodes where they are collected."
            )

        row, known, prompt_size, size, row_turn, row_end = (
            torch.tensor(x, device=device)
            for x in (rows_of.row, rows_of.known, given, sizes, rows_of.first, rows_of.last)
        )
        number = turn - first
        added = prompt_size - known
        start = row * length
        sampled = _ranges(start + prompt_size, size)
        shape = (len(row_turn), length)

        def table(fill: float, dtype: torch.dtype, at: Tensor, values: Tensor) -> Tensor:
            """The ``[N, S]`` table with values at the given places and one value elsewhere."""
            out = torch.full(shape, fill, dtype=dtype, device=device)
            out.view(-1).scatter_(0, at, values)
            return out

        tokens = table(self.pad_token_id, torch.int64, sampled, response.long())
        whole = _ranges(start[row_end], prompt_size[row_end])
        prompt = torch.cat([prompts[k] for k in rows_of.last])
        tokens.view(-1).scatter_(0, whole, prompt.long())
        turns = table(-1, torch.int64, sampled, number.repeat_interleave(size))
        new = _ranges(start + known, added)
        turns.view(-1).scatter_(0, new, number.repeat_interleave(added))
        group = _column(tensordict, "group")
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
            "fork": torch.arange(len(index), device=device) - torch.searchsorted(index, index),
        }
        log_probs = _sampled_leaf(tensordict, ("log_probs", "response"), sizes)
        if log_probs is not None:
            rows["log_probs", "full"] = table(0.0, torch.float32, sampled, log_probs.float())
        versions = _sampled_leaf(tensordict, ("versions", "response"), sizes)
        if versions is not None:
            full = table(-1, torch.int64, sampled, versions.long())
            newest = full.amax(-1)
            oldest = full.where(rows["masks", "all_assistant_mask"], newest[:, None]).amin(-1)
            rows["versions", "full"] = full
            rows["versions", "oldest"], rows["versions", "newest"] = oldest, newest
        reward = _column(tensordict, ("next", "reward"))
        if reward is not None:
            # Several turns may leave their rewards on one token: they add up.
            rewards = torch.zeros(shape, device=device)
            place = _reward_places(first, start + prompt_size, size)
            rewards.view(-1).index_add_(0, place, reward.float())
            rows["rewards", "full"] = rewards
        returns = _column(tensordict, ("next", "return"))
        if returns is not None:
            values = returns.float().repeat_interleave(size)
            rows["rewards", "to_go"] = table(0.0, torch.float32, sampled, values)
        temperature = _column(tensordict, _TEMPERATURE)
        if temperature is not None:
            rows[_TEMPERATURE] = _common(temperature.float(), row, size > 0, len(row_turn))
        last_turn = {number: k for k, number in enumerate(of_turn)}
        row_last = [last_turn[of_turn[k]] for k in rows_of.first]
        valid = _column(tensordict, "valid")
        if valid is not None:
            rows["valid"] = valid.bool()[row_last]
        out = TensorDict(rows, batch_size=shape[:1], device=tensordict.device)
        for key in self.carry:
            value = entry_of_rows(tensordict, key, row_last)
            if value is not None:
                out.set(key, value)
            elif key not in _USUAL:
                out.set(key, self._lacking(tensordict, key, len(row_last)))
        return out

    def _lacking(self, tensordict: TensorDictBase, key: NestedKey, count: int) -> NonTensorStack:
        """A column for a key that no episode of this batch has, if items may have it at all."""
        found = item_keys(tensordict)
        if found is None or not isinstance(key, str):
            raise KeyError(
                f"MergeTurns: carry names {key!r}, which neither the batch nor an item of its data "
                f"has: the batch has {_keys(tensordict)}, the items have {found or []}."
            )
        if key not in self._told:
            self._told |= {key}
            _logger.warning(
                "MergeTurns: carry names %r, which no episode of a batch has: its rows have None. The "
                "items of its data have %s: is it misspelt? This is said once for each key.",
                key,
                found,
            )
        return column_of_none(count)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse to act on single steps."""
        raise RuntimeError(
            "MergeTurns acts on whole episodes and not on the steps of an environment: append it to a "
            "replay buffer, or call it on a batch."
        )


def _ranges(start: Tensor, size: Tensor) -> Tensor:
    """Concatenate ``arange(start[i], start[i] + size[i])`` over ``i``."""
    shift = (start + size - size.cumsum(0)).repeat_interleave(size)
    return shift + torch.arange(len(shift), device=start.device)


def _reward_places(first: Tensor, place: Tensor, size: Tensor) -> Tensor:
    """Where each turn's reward lies: on a sampled token of its episode, if there is any.

    Args:
        first: the first turn of each turn's episode.
        place: where each turn's response begins.
        size: how many tokens that is.
    """
    turn, end = torch.arange(len(size), device=size.device), len(size) - 1
    before = torch.where(size > 0, turn, -1).cummax(0).values
    after = torch.where(size > 0, turn, end).flip(0).cummin(0).values.flip(0)
    is_after = (size[after] > 0) & (first[after] == first)
    last = place + size - 1
    alone = torch.where(is_after, place[after], last)
    return torch.where(before >= first, last[before], alone)


def _common(value: Tensor, row: Tensor, sampled: Tensor, rows: int) -> Tensor:
    """The value ``[N]`` that the turns of each row have in common, NaN if they differ.

    Of the turns that sampled something, if the row has any.
    """
    none = value.new_full((rows,), torch.inf)
    has_sampled = torch.zeros(rows, dtype=torch.bool, device=row.device)
    has_sampled[row[sampled]] = True
    counts = sampled | ~has_sampled[row]
    row, value = row[counts], value[counts]
    low = none.scatter_reduce(0, row, value, "amin")
    high = (-none).scatter_reduce(0, row, value, "amax")
    return low.where(low == high, torch.nan)


def _leaves(
    tensordict: TensorDictBase, key: NestedKey
) -> tuple[Sequence[Tensor], list[int]] | None:
    """The vector of every turn and how long each is, or ``None`` if the batch has no such leaf."""
    leaves = tensordict.get(key, None, as_list=True)
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


def _token_ids(tensordict: TensorDictBase, key: NestedKey) -> tuple[Sequence[Tensor], list[int]]:
    """The token ids of every turn, and how many there are."""
    found = _leaves(tensordict, key)
    if found is None:
        raise KeyError(f"MergeTurns needs {key} in the batch, got the keys {_keys(tensordict)}.")
    for dtype in {leaf.dtype for leaf in found[0]}:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"MergeTurns: {key} must be of an integer dtype, got {dtype}.")
    return found


def _sampled_leaf(tensordict: TensorDictBase, key: NestedKey, expected: list[int]) -> Tensor | None:
    """A leaf with one value for every sampled token, end to end, or ``None`` if there is none."""
    found = _leaves(tensordict, key)
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


def _column(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """The leaf with one number for every turn, ``[ΣT]``, or ``None`` if there is none."""
    value = tensordict.get(key, None)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.numel() != len(tensordict):
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"MergeTurns: {key} must be a tensor with one number for each of the {len(tensordict)} "
            f"turns, got {what}."
        )
    return value.reshape(-1)


def _episode_index(tensordict: TensorDictBase, ids: Tensor | None, traj_key: NestedKey) -> Tensor:
    """The place in the batch of each turn's episode, ``[ΣT]``; every episode must end."""
    names = ["done", "terminated", "truncated"]
    found = {name: _column(tensordict, ("next", name)) for name in names}
    flags = {name: flag.bool() for name, flag in found.items() if flag is not None}
    if ids is None and not flags:
        raise KeyError(
            f"MergeTurns needs trajectory ids under {traj_key} or end flags under ('next', 'done') to "
            f"tell episodes apart, got the keys {_keys(tensordict)}."
        )
    last = list(flags.values())
    if ids is not None:
        last.append(torch.cat([ids[1:] != ids[:-1], ids.new_ones(1).bool()]))
    ends = torch.stack(last).any(0)
    ends[-1] = True
    # One of two flags by itself does not tell where episodes ended by the other.
    tells = "done" in flags or len(flags) == 2
    done = torch.stack([*flags.values()]).any(0) if tells else ends
    cut = (ends & ~done).nonzero()
    if len(cut):
        raise ValueError(
            f"MergeTurns needs whole episodes, but turn {int(cut[0])}, the last of its episode in the "
            f"batch, is not {' or '.join(flags)}. Give the replay buffer sampler=EpisodeSampler(): "
            "other samplers deal steps or parts of episodes. A collector's batch fits as it comes."
        )
    return ends.cumsum(0) - ends.long()


def _keys(tensordict: TensorDictBase) -> list[NestedKey]:
    """The batch's keys, those of Python objects included, for error messages."""
    return sorted(tensordict.keys(True, True, is_leaf=is_leaf_nontensor), key=str)
