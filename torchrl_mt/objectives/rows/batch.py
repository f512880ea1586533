"""A batch of training rows whose entries were read and checked before anything is computed.

What is read is copied to the CPU at once: piece by piece, each would wait for the rows' device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_mt.checks import LOG_PROB_ROUNDING, check_mask
from torchrl_mt.devices import on_cpu, sent
from torchrl_mt.objectives.functional.time.episodes import (
    EpisodeIndex,
    index_episodes,
    run_ends,
)
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype
from torchrl_mt.objectives.rows.keys import ExperienceKeys, as_path
from torchrl_mt.objectives.rows.reading import (
    NO_LOG_PROB,
    check_finite,
    check_like,
    read_entry,
    read_episode,
    read_valid,
)
from torchrl_mt.scoring.log_probs import scored_tokens
from torchrl_mt.vision import RowImages


@dataclass(frozen=True)
class RowBatch:
    """Rows ``[N]`` and the entries that every computation needs."""

    rows: TensorDictBase
    on_host: TensorDictBase
    """The rows, with what is always read on the CPU; ``rows`` itself if it is there."""
    keys: ExperienceKeys
    tokens: Tensor
    """``[N, S]`` int64."""
    attention_mask: Tensor
    """``[N, S]`` bool, false on padding."""
    mask: Tensor
    """``[N, S]`` bool, true on sampled tokens; at least one is, if not ``may_lack_tokens``."""
    turns: Tensor
    """``[N, S]`` int64 turn id of each token."""
    episode: Tensor
    """``[N]`` int64 episode of each row; copies of an episode differ."""
    episodes: EpisodeIndex
    """The episodes' sampled tokens in order of time."""
    valid: Tensor
    """``[N]`` bool, false on the rows of rejected episodes."""

    @property
    def device(self) -> torch.device:
        """Device of the rows; all else is on the CPU."""
        return self.rows.get(self.keys.action).device

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, attention mask and mask: the arguments for scoring rows."""
        return self.tokens, self.attention_mask, self.mask

    @property
    def images(self) -> RowImages | None:
        """The rows' images, for scoring rows; ``None`` without the entries of ``VisionInputs``."""
        return RowImages.of(self.rows)

    @property
    def episode_id(self) -> Tensor:
        """Episode ids as in the rows, ``[N]``; copies share one."""
        return _read(self.on_host, self.keys, "episode")

    @property
    def counted(self) -> Tensor:
        """Sampled tokens of valid rows, ``[N, S]`` bool: those that enter statistics."""
        return self.mask & self.valid.unsqueeze(-1)

    @property
    def scored(self) -> Tensor:
        """Trained tokens, ``[N, S]`` bool: counted ones that are not a row's first token."""
        return scored_tokens(self.attention_mask, self.counted)

    def finite_float(self, name: str, value: Tensor, where: Tensor, hint: str) -> Tensor:
        """Convert values ``[N, S]`` of the named key to float32, zero on masked tokens.

        Values that are not finite are refused ``where`` they count and become 0 elsewhere.
        """
        value = value.float()
        check_finite(getattr(self.keys, name), value, where, self.episode_id, hint)
        return torch.where(self.mask & value.isfinite(), value, 0.0)

    def check_log_probs(self, name: str, value: Tensor) -> None:
        """Refuse log-probabilities ``[N, S]`` above 0, beyond rounding."""
        bad = (self.counted & (value > LOG_PROB_ROUNDING)).nonzero()
        if len(bad):
            n, t = bad[0].tolist()
            must, advice = NO_LOG_PROB
            raise ValueError(
                f"{getattr(self.keys, name)!r} must {must}, got {float(value[n, t]):.6g} (row {n}, "
                f"token {t}) and {len(bad) - 1} more. {advice}"
            )

    def read(self, name: str) -> Tensor:
        """Read the entry of the named key: real numbers ``[N, S]``."""
        value = _read(self.on_host, self.keys, name)
        check_like(getattr(self.keys, name), value, self.keys.action, self.mask.shape)
        check_real(getattr(self.keys, name), value)
        return value

    def group(self) -> Tensor:
        """Read each row's group id, ``[N]``; rows of one episode must share it."""
        group = _read(self.on_host, self.keys, "group")
        _check_integers(self.keys.group, group)
        check_like(self.keys.group, group, self.keys.episode, self.episode.shape)
        of_row = self.episodes.of_row
        one = group.new_zeros(len(self.episodes.last_token)).index_copy(0, of_row, group)
        other = (group != one[of_row]).nonzero()
        if len(other):
            n = int(other[0])
            raise ValueError(
                f"{self.keys.group!r} must be the same on all rows of an episode, got {int(group[n])} "
                f"(row {n}) and {int(one[of_row[n]])} in episode "
                f"{int(self.episode_id[n])}."
            )
        return group

    def truncated(self) -> Tensor:
        """Read whether each row's episode was truncated, ``[N]`` bool."""
        truncated = _read(self.on_host, self.keys, "truncated")
        if truncated.shape == (len(self.mask), 1):
            truncated = truncated.squeeze(-1)
        check_mask(f"the entry {self.keys.truncated!r} of rows", truncated, self.episode.shape)
        return truncated

    def has(self, name: str) -> bool:
        """Whether the rows have the entry of the named key."""
        return getattr(self.keys, name) in self.rows.keys(True)

    def turn_returns(self) -> Tensor:
        """Read the rows' own returns, ``[N, S]`` float32, zero on tokens that do not count."""
        returns = self.finite_float(
            "turn_return",
            self.read("turn_return"),
            self.counted,
            "the rewards' source is at fault; drop the episode or mark it as not valid.",
        )
        return torch.where(self.counted, returns, 0.0)

    def reject(self, rejected: Tensor) -> RowBatch:
        """Reject more rows, ``[N]`` bool, in a shallow copy of the rows."""
        rows, valid = self.rows.copy(), self.valid & ~rejected
        rows.set(self.keys.valid, sent(valid, self.device))
        return replace(self, rows=rows, valid=valid)

    def with_default_keys(self, made: Mapping[str, Tensor] | None = None) -> TensorDictBase:
        """Copy the rows shallowly, with all entries under their default keys as well.

        Add the outputs ``made`` so far, by key name. Entries in the way are dropped.
        """
        out = self.rows.copy()
        for field in fields(self.keys):
            key, default = getattr(self.keys, field.name), getattr(ExperienceKeys, field.name)
            if key != default and self.has(field.name):
                _put(out, default, self.rows.get(key))
        for name, value in (made or {}).items():
            _put(out, getattr(ExperienceKeys, name), sent(value, self.device))
        return out

    def episode_scores(self, reward: Tensor | None) -> Tensor:
        """Score of each row's episode, ``[N]``: its summed rewards, or without them its first return."""
        index = self.episodes
        if reward is not None:
            # Equal scores must come out equal in whatever order they are summed.
            total = index.total(reward.to(accumulation_dtype(reward.device))).float()[index.of_row]
            bad = (~total.isfinite()).nonzero()
            if len(bad):
                episode = int(self.episode_id[bad[0, 0]])
                raise ValueError(
                    f"the rewards of an episode must add up to a finite score for filters, got "
                    f"{float(total[bad[0, 0]])} in episode {episode}; scale the rewards down."
                )
            return total
        return self.at_first_token(self.read("turn_return").float())

    def at_first_token(self, per_token: Tensor) -> Tensor:
        """Read values ``[N, S]`` at the first sampled token of each row's episode, ``[N]``."""
        index = self.episodes
        begins = run_ends(index.of_token).roll(1)
        first = per_token.flatten()[index.token[begins]]
        return first.new_zeros(len(index.last_token)).index_copy(0, index.of_token[begins], first)[
            index.of_row
        ]


def read_batch(
    rows: TensorDictBase, keys: ExperienceKeys, *, may_lack_tokens: bool = False
) -> RowBatch:
    """Read and check rows ``[N]``.

    Refused are a missing entry, shapes that differ, masks or ids of a wrong type, duplicate rows or
    turns, sampled padding, and rows without any sampled token unless they ``may_lack_tokens``.
    """
    names = ("action", "attention_mask", "assistant_mask", "turns")
    on_host = _on_host(rows, keys)
    entries = [_read(on_host, keys, name) for name in names]
    tokens, attention_mask, mask, turns = entries
    for name in ("action", "turns", "episode", "episode_index", "fork"):
        _check_integers(getattr(keys, name), rows.get(getattr(keys, name), None))
    if tokens.ndim != 2 or rows.batch_size != tokens.shape[:1]:
        raise ValueError(
            f"rows must have batch size [N] and {keys.action!r} shape [N, S], got "
            f"{list(rows.batch_size)} and {tuple(tokens.shape)}."
        )
    for name, entry in zip(names, entries, strict=True):
        check_like(getattr(keys, name), entry, keys.action, tokens.shape)
    check_mask(str(keys.attention_mask), attention_mask, tokens.shape)
    check_mask(str(keys.assistant_mask), mask, tokens.shape)
    if not may_lack_tokens and not bool(mask.any()):
        raise ValueError(
            f"{keys.assistant_mask!r} is false everywhere: no token of these {len(rows)} rows was "
            "sampled by the policy, so there is nothing to learn from. One of several ranks may have no "
            "such rows, with ExperienceMaker(process_group=...)."
        )
    padding = (mask & ~attention_mask).nonzero()
    if len(padding):
        n, t = padding[0].tolist()
        raise ValueError(
            f"{keys.assistant_mask!r} must lie within {keys.attention_mask!r}, but token {t} of row {n} "
            f"is sampled and padding, and so are {len(padding) - 1} more."
        )
    episode = read_episode(on_host, keys.episode, keys.episode_index, keys.fork)
    episodes = index_episodes(mask, turns, episode)
    _check_turns(rows, keys, turns, episodes)
    valid = read_valid(on_host, keys.valid, mask)
    mixed = torch.zeros_like(episode).index_add(0, episodes.of_row, (~valid).to(episode.dtype))
    mixed = valid & (mixed[episodes.of_row] > 0)
    if bool(mixed.any()):
        raise ValueError(
            f"{keys.valid!r} must be the same on all rows of an episode, but some rows of episode "
            f"{int(_read(rows, keys, 'episode')[mixed][0])} are rejected and others are not."
        )
    return RowBatch(
        rows, on_host, keys, tokens, attention_mask, mask, turns, episode, episodes, valid
    )


def _on_host(rows: TensorDictBase, keys: ExperienceKeys) -> TensorDictBase:
    """Copy rows shallowly, and to the CPU their entries but for outputs; or return rows there."""
    tokens = rows.get(keys.action, None)
    if not isinstance(tokens, Tensor) or tokens.is_cpu:
        return rows
    names = [field.name for field in fields(keys)]
    read = [getattr(keys, name) for name in names[: names.index("sample_log_prob")]]
    entries = {key: x for key in read if isinstance(x := rows.get(key, None), Tensor)}
    out = rows.copy().clear_device_()
    for key, x in zip(entries, on_cpu(*entries.values()), strict=True):
        out.set(key, x)
    return out


def _put(rows: TensorDictBase, key: NestedKey, value: Tensor) -> None:
    """Set an entry, dropping any tensor on its path."""
    path = as_path(key)
    for depth in range(1, len(path)):
        there = rows.get(path[:depth], None)
        if there is not None and not isinstance(there, TensorDictBase):
            rows.del_(path[:depth])
    rows.set(key, value)


def check_real(key: NestedKey, value: Tensor) -> None:
    """Refuse an entry of complex numbers."""
    if value.is_complex():
        raise TypeError(f"the entry {key!r} of rows must hold real numbers, got {value.dtype}.")


def _check_integers(key: NestedKey, value: object) -> None:
    """Refuse an entry that is there and holds anything but integers."""
    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
    if value is not None and (
        not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
    ):
        raise TypeError(f"the entry {key!r} of rows must hold integers, got {kind}.")


def _check_turns(
    rows: TensorDictBase, keys: ExperienceKeys, turns: Tensor, episodes: EpisodeIndex
) -> None:
    """Refuse a turn sampled in two rows, as when copies of an episode are taken for one."""
    row, turn = episodes.token // turns.shape[1], turns.flatten()[episodes.token]
    again = episodes.of_token[1:] == episodes.of_token[:-1]
    again = (again & (turn[1:] == turn[:-1]) & (row[1:] != row[:-1])).nonzero()
    if len(again):
        at = int(again[0])
        one, other = row[at : at + 2].tolist()
        episode = int(_read(rows, keys, "episode")[one])
        raise ValueError(
            f"turn {int(turn[at])} of episode {episode} lies in row {one} "
            f"and in row {other}: copies of an episode must differ in {keys.episode_index!r}, which "
            "MergeTurns writes (keep it with the rows), and turns must count on from row to row."
        )


def _read(rows: TensorDictBase, keys: ExperienceKeys, name: str) -> Tensor:
    """Read the entry of the named key."""
    hint = "; old_log_probs='actor' does without" if name == "sampler_log_prob" else ""
    return read_entry(rows, getattr(keys, name), getattr(ExperienceKeys, name), hint=hint).cpu()
