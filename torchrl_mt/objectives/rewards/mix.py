"""Rewards of training rows: weighted sums of sources, chosen by each episode's label.

An episode's score counts once, on its last sampled token, however many rows it has. The order of the
rows changes nothing. A source that does not apply to an episode leaves its weight to those that do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any, Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_mt.checks import as_tensor, check_shape
from torchrl_mt.devices import sent
from torchrl_mt.objectives.functional.time.episodes import EpisodeIndex
from torchrl_mt.objectives.functional.time.sampled import rewards_on_sampled
from torchrl_mt.objectives.metrics import numbered, summary
from torchrl_mt.objectives.rewards.model import ModelReward
from torchrl_mt.objectives.rewards.sources import RewardSource, ask
from torchrl_mt.objectives.rows.batch import check_real
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import check_finite, check_like, read_entry, read_objects
from torchrl_mt.scoring.passes import Passes

OWN: Literal["episode"] = "episode"
DEFAULT = "default"

_METHODS = (MethodType, BuiltinMethodType)

Source = Literal["episode"] | RewardSource | nn.Module
"""The episode's own rewards, a callable (:mod:`~torchrl_mt.objectives.rewards.sources`), or a reward
model, as :class:`~torchrl_mt.objectives.ModelReward` takes it."""

Recipe = Source | Sequence[tuple[Source, float]] | Mapping[str, Sequence[tuple[Source, float]]]
"""One source, weighted sources, or weighted sources by label."""

RewardTransform = Callable[[Tensor, Tensor], Tensor]
"""``(reward, mask) -> reward``, all ``[N, S]``; the bool mask says where rewards lie."""


class RewardMix(nn.Module):
    """Weighted sums of reward sources; the label of an episode chooses the sum.

    Sources place rewards as follows:

    - ``"episode"``: as ``("rewards", "full")`` of the rows does;
    - a source that returns ``[n, S]``: on the tokens themselves. A reward on a token that was not
      sampled moves to the last sampled token before it in the row; in a row without sampled tokens, to
      the last one before it in the episode;
    - a source that returns ``[n]``: on the last sampled token of the *episode*. Only the score of the
      row that holds this token is read. Reward models and remote servers are asked only about it.

    Each source is called once, with copies of the rows whose labels give it a weight.

    A source may return ``None`` for rows: it does not apply to their episode. The episode's reward is
    then the weighted sum of the sources that apply, times the sum of all (absolute) weights of its
    recipe over theirs.

    Args:
        recipe: One source; ``(source, weight)`` pairs; or a mapping from label to such pairs, in which
            ``"default"`` is for rows without a label (:doc:`/rewards`).
        transform: Applied to the sum by :meth:`transformed`; nothing by default.
        passes: How rows are cut into forward passes of reward models.

    Raises:
        TypeError: If a source has the wrong type.
        ValueError: If a recipe is empty or a weight is not finite.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_mt.objectives.functional.time.episodes import index_episodes
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> rows = TensorDict({"rewards": {"full": torch.tensor([[0.0, 1.0], [0.0, 0.0]])}}, [2])
        >>> mix = RewardMix([("episode", 1.0), (lambda rows: torch.full((len(rows),), 4.0), 0.5)])
        >>> turns, episode = torch.zeros(2, 2, dtype=torch.long), torch.tensor([0, 1])
        >>> reward, metrics = mix(rows, index_episodes(mask, turns, episode))
        >>> reward
        tensor([[0., 3.],
                [2., 0.]])
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        transform: RewardTransform | None = None,
        passes: Passes | None = None,
    ) -> None:
        super().__init__()
        self.transform = transform
        self.by_label = isinstance(recipe, Mapping)
        """Whether labels are read."""
        self.passes = Passes.checked(passes)
        self.sources: list[Source] = []
        self.names: list[str] = []
        self.weights: dict[str, dict[int, float]] = {}
        for label, pairs in _by_label(recipe).items():
            if not isinstance(pairs, Sequence) or isinstance(pairs, str) or not pairs:
                raise ValueError(
                    f"reward: label {label!r} must have a list of (source, weight) pairs, got {pairs!r}."
                )
            mine = self.weights[label] = {}
            for pair in pairs:
                source, weight = _pair(label, pair)
                index = self._index(source)
                mine[index] = mine.get(index, 0.0) + weight
        # Modules are registered, so that they move with their owner.
        self.models = nn.ModuleList([s for s in self.sources if isinstance(s, nn.Module)])

    def _index(self, source: Source) -> int:
        """Return a source's index, adding the source if it is new."""
        for i, known in enumerate(self.sources):
            if known is source or (isinstance(known, ModelReward) and known.model is source):
                return i
            # Each look-up of a method makes a new object.
            if isinstance(source, _METHODS) and isinstance(known, _METHODS) and known == source:
                return i
        if isinstance(source, nn.Module) and not isinstance(source, ModelReward):
            source = ModelReward(source, passes=self.passes)
        name = source if isinstance(source, str) else _name(source)
        self.sources.append(source)
        self.names.append(numbered(name, self.names))
        return len(self.names) - 1

    @property
    def reads_own(self) -> bool:
        """Whether some recipe has the episodes' own rewards."""
        return OWN in self.names

    @property
    def needs_label(self) -> bool:
        """Whether every row must have a label."""
        return self.by_label and DEFAULT not in self.weights

    def forward(
        self,
        rows: TensorDictBase,
        episodes: EpisodeIndex,
        *,
        valid: Tensor | None = None,
        shown: TensorDictBase | None = None,
        keys: ExperienceKeys | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Ask all sources and add up their weighted rewards.

        Args:
            rows: The rows, ``[N]``.
            episodes: Their episodes.
            valid: ``[N]`` bool, false on rejected rows, which go to no source, enter no metric and get
                reward 0; all true by default.
            shown: The same rows under the default keys, to give to sources; ``rows`` by default.
            keys: Keys of the episodes' own rewards and of the labels (non-tensor) in ``rows``.

        Returns:
            The reward, ``[N, S]`` float32, zero on masked tokens, and NaN on all rows of an episode to
            which no source with a weight applies; and metrics of the other episodes' scores, which are
            sums over tokens: ``"reward/<label>/<source>/mean"``, ``"std"`` and ``"count"`` unweighted,
            and ``"reward/<label>/mean"`` and so on of the weighted sum.

        Raises:
            KeyError: If labels or the episodes' own rewards are missing.
            ValueError: If a label has no recipe or differs within an episode, an episode's own reward
                or a sum is not finite, or a source's result is invalid.
        """
        return self.separately(rows, episodes, valid=valid, shown=shown, keys=keys)[:2]

    def separately(
        self,
        rows: TensorDictBase,
        episodes: EpisodeIndex,
        *,
        valid: Tensor | None = None,
        shown: TensorDictBase | None = None,
        keys: ExperienceKeys | None = None,
    ) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
        """Do the same, and return what the sum is made of: the third result.

        ``"score/i"`` is the unweighted reward of source ``i``, ``"weight/i"`` its weight on each token's
        row: ``[N, S]`` float32, 0 where the source was not asked.
        """
        if valid is None:
            valid = torch.ones_like(episodes.of_row, dtype=torch.bool)
        shown = rows if shown is None else shown
        keys = ExperienceKeys() if keys is None else keys
        labels = self._labels(rows, episodes, keys.label, valid)
        device = episodes.mask.device
        # Rejected rows have no label, hence no source.
        of_label = {
            label: torch.tensor([x == label for x in labels], device=device)
            for label in self.weights
            if label in labels
        }
        scored: dict[int, Tensor] = {}
        applies: dict[int, Tensor] = {}
        places: dict[int, Tensor] = {}
        for i, source in enumerate(self.sources):
            asking = [here for label, here in of_label.items() if i in self.weights[label]]
            if not asking:
                continue
            wants = torch.stack(asking).any(0)
            if source == OWN:
                own = _own(rows, keys, wants.unsqueeze(-1), episodes)
                scored[i] = _on_sampled(own, episodes, shown)
                continue
            if getattr(source, "per_episode", False):
                outcome = torch.zeros_like(wants)
                outcome[episodes.outcome_rows()] = True
                wants &= outcome
            place = wants.nonzero().squeeze(-1)
            if len(place):
                places[i] = place
        there = shown.device or device
        # Indexing copies, so a source cannot change its caller's rows.
        calls = [
            (self.names[i], cast(RewardSource, self.sources[i]), shown[sent(place, there)])
            for i, place in places.items()
        ]
        for (i, place), answer in zip(places.items(), ask(calls), strict=True):
            scored[i], applies[i] = _place(self.names[i], answer.to(device), place, episodes, shown)
        nothing = torch.zeros(episodes.mask.shape, device=device)
        parts = {f"score/{i}": scored.get(i, nothing) for i in range(len(self.sources))}
        for i in range(len(self.sources)):
            weight = sum(
                (here * self.weights[label].get(i, 0.0) for label, here in of_label.items()),
                nothing[:, 0],
            )
            if i in applies:
                weight = weight * applies[i][episodes.of_row]
            parts[f"weight/{i}"] = weight.unsqueeze(-1).expand_as(nothing)
        return *self._sum(scored, applies, of_label, episodes), parts

    def _sum(
        self,
        scored: Mapping[int, Tensor],
        applies: Mapping[int, Tensor],
        of_label: Mapping[str, Tensor],
        episodes: EpisodeIndex,
    ) -> tuple[Tensor, dict[str, float]]:
        """Add up the sources' rewards ``[N, S]`` over each label's rows ``[N]`` bool, with metrics.

        ``applies`` ``[E]`` bool tells to which episodes a source does, by default to all.
        """
        total = torch.zeros(episodes.mask.shape, device=episodes.mask.device)
        metrics: dict[str, float] = {}
        sampled = episodes.last_token >= 0
        for label, rows in of_label.items():
            here = torch.zeros_like(sampled)
            here[episodes.of_row[rows]] = True
            here &= sampled
            weights = self.weights[label]
            counted = torch.zeros_like(sampled, dtype=torch.float64)
            for i, weight in weights.items():
                counts = applies.get(i, torch.ones_like(sampled))
                counted += abs(weight) * counts
                if i in scored:
                    total += torch.where(rows.unsqueeze(-1), weight * scored[i], 0.0)
                    score = episodes.total(scored[i].double())[here & counts]
                    metrics |= summary(f"reward/{label}/{self.names[i]}", score)
            whole = sum(map(abs, weights.values()))
            # Where every source applies, the sums are of the same terms in the same order: exactly 1.
            scale = torch.where(counted > 0, whole / counted, torch.nan if whole else 1.0)
            total *= torch.where(rows, scale[episodes.of_row], 1.0).float().unsqueeze(-1)
            here &= ~scale.isnan()
            self._check_sum(label, total[rows & ~scale[episodes.of_row].isnan()])
            metrics |= summary(f"reward/{label}", episodes.total(total.double())[here])
        return total, metrics

    def transformed(
        self,
        reward: Tensor,
        episodes: EpisodeIndex,
        valid: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """Apply the transform where rewards lie.

        Rewards lie on each episode's last sampled token and on every other sampled token whose reward
        is not 0. The transform gets the rewards and the mask of these places, both ``[N, S]``; its
        results elsewhere are ignored.

        Args:
            reward: ``[N, S]`` float32, zero on masked tokens.
            episodes: The rows' episodes.
            valid: ``[N]`` bool, false on rejected rows, which keep their rewards.
            device: Where the transform gets its arguments, by default the device of ``reward``.

        Returns:
            ``[N, S]`` float32, zero on masked tokens.

        Raises:
            ValueError: If the transform's result has another shape or is not finite.
            TypeError: If it is no tensor of real numbers.
        """
        if self.transform is None:
            return reward
        rewarded = (episodes.mask & (reward != 0)).contiguous()
        rewarded.view(-1)[episodes.last_token[episodes.last_token >= 0]] = True
        if valid is not None:
            rewarded &= valid.unsqueeze(-1)
        # On copies: in-place changes must not reach rewards outside the mask.
        name = "the result of reward_transform(reward, mask)"
        given = (sent(x.clone(), device or x.device) for x in (reward, rewarded))
        out = as_tensor(name, self.transform(*given))
        check_shape(name, out, reward.shape)
        out = out.to(reward.device).float()
        if not bool(out[rewarded].isfinite().all()):
            raise ValueError("reward_transform(reward, mask) must return finite numbers.")
        return torch.where(rewarded, out, reward)

    def _check_sum(self, label: str, total: Tensor) -> None:
        """Refuse a label's weighted sum that is not finite; finite rewards may overflow."""
        bad = total[~total.isfinite()]
        if len(bad):
            names = " and ".join(repr(self.names[i]) for i in self.weights[label])
            raise ValueError(
                f"reward: label {label!r}: the weighted rewards of {names} must add up to finite "
                f"numbers, got {float(bad[0])}; they are too large for float32: scale them down."
            )

    def _labels(
        self, rows: TensorDictBase, episodes: EpisodeIndex, key: NestedKey, valid: Tensor
    ) -> list[str | None]:
        """Read and check the label of every row; ``None`` on rejected rows."""
        kept = valid.tolist()
        if not self.by_label:
            return [DEFAULT if keep else None for keep in kept]
        labels = read_objects(rows, key)
        known = ", ".join(map(repr, self.weights))
        if labels is None:
            if self.needs_label:
                raise KeyError(
                    f"rows lack the entry {key!r}, which chooses between reward's recipes, {known}: "
                    "give the items of data such an entry, which MergeTurns carries to the rows, or "
                    f"add a recipe {DEFAULT!r}."
                )
            return [DEFAULT if keep else None for keep in kept]
        if not self.needs_label:
            # An item without a label, among others that have one.
            labels = [DEFAULT if label is None else label for label in labels]
        labels = [label if keep else None for label, keep in zip(labels, kept, strict=True)]
        first: dict[int, str] = {}
        for n, (label, episode) in enumerate(zip(labels, episodes.of_row.tolist(), strict=True)):
            if not kept[n]:
                continue
            if not isinstance(label, str) or label not in self.weights:
                new = DEFAULT if label is None else str(label)
                raise ValueError(
                    f"{key!r} of row {n} must be one of {known}, got {label!r}: no recipe stands in for "
                    f"another (that of {DEFAULT!r} is for rows without a label); add one to "
                    f"reward={{{new!r}: [(source, weight)], ...}}, a str, or give one recipe without "
                    "labels."
                )
            if first.setdefault(episode, label) != label:
                raise ValueError(
                    f"{key!r} must be the same on all rows of an episode, got {label!r} on row {n} and "
                    f"{first[episode]!r} on another row of its episode."
                )
        return labels


def _own(
    rows: TensorDictBase, keys: ExperienceKeys, wants: Tensor, episodes: EpisodeIndex
) -> Tensor:
    """Read the episodes' own rewards ``[N, S]``, zero outside ``wants`` ``[N, 1]`` bool."""
    own = read_entry(rows, keys.reward, ExperienceKeys.reward)
    check_like(keys.reward, own, keys.assistant_mask, episodes.mask.shape)
    check_real(keys.reward, own)
    hint = "the rewards' source is at fault; drop the episode or mark it as not valid."
    check_finite(keys.reward, own, wants.expand_as(own), rows.get(keys.episode, None), hint)
    return torch.where(wants, own, 0.0)


def _on_sampled(reward: Tensor, episodes: EpisodeIndex, rows: TensorDictBase) -> Tensor:
    """Move rewards ``[N, S]`` to sampled tokens of their rows, or else of their episodes.

    The rewards of a row without sampled tokens go to the episode's last sampled token up to that turn,
    or to its first if there is none.
    """
    placed = rewards_on_sampled(reward, episodes.mask).contiguous()
    idle = ~episodes.mask.any(-1) & (episodes.last_token[episodes.of_row] >= 0)
    lost = (idle.unsqueeze(-1) & (reward != 0)).nonzero()
    if not len(lost):
        return placed
    n, t = lost.unbind(-1)
    turns = read_entry(rows, ExperienceKeys.turns).to(reward.device)
    episode = episodes.of_row[n]
    # Padding has no turn: a reward on it belongs to the turn before it.
    turn, sampled = turns.cummax(-1).values[n, t], turns.flatten()[episodes.token]
    width = int(torch.cat([turn, sampled]).max()) + 2
    at = torch.searchsorted(episodes.of_token * width + sampled, episode * width + turn, right=True)
    at = torch.maximum(at - 1, torch.searchsorted(episodes.of_token, episode))
    placed.view(-1).index_add_(0, episodes.token[at], reward[n, t].float())
    return placed


def _place(
    name: str, answer: Tensor, place: Tensor, episodes: EpisodeIndex, rows: TensorDictBase
) -> tuple[Tensor, Tensor]:
    """Spread a source's result about some rows over the tokens of all rows.

    Return the rewards ``[N, S]``, and to which episodes the source applies, ``[E]`` bool: those without
    a NaN that is read.
    """
    out = torch.zeros(episodes.mask.shape, device=answer.device)
    if answer.ndim == 2:
        if answer.shape[1] != out.shape[1]:
            raise ValueError(
                f"reward source {name!r} must return one number for each of the {len(answer)} "
                f"rows, [{len(answer)}], or one for each of their tokens, "
                f"{[len(answer), out.shape[1]]}, got shape {tuple(answer.shape)}."
            )
        out[place] = answer
        applies = _whole(out, episodes)
        out = torch.where(applies[episodes.of_row].unsqueeze(-1), out, 0.0)
        return _on_sampled(out, episodes, rows), applies
    score = torch.zeros(len(out), device=answer.device)
    asked = torch.zeros(len(out), dtype=torch.bool, device=answer.device)
    score[place], asked[place] = answer, True
    last = episodes.last_token[episodes.last_token >= 0]
    row = last // max(1, out.shape[1])
    out.view(-1)[last] = torch.where(asked[row], score[row], 0.0)
    return out.nan_to_num(), _whole(out, episodes)


def _whole(reward: Tensor, episodes: EpisodeIndex) -> Tensor:
    """Tell which episodes have no NaN among their rewards ``[N, S]``: ``[E]`` bool."""
    whole = torch.ones_like(episodes.last_token, dtype=torch.bool)
    whole[episodes.of_row[reward.isnan().any(-1).to(whole.device)]] = False
    return whole


def _by_label(recipe: Recipe) -> Mapping[str, Any]:
    """Convert any form of recipe to one by label."""
    if isinstance(recipe, Mapping):
        if not recipe or not all(isinstance(label, str) for label in recipe):
            raise ValueError(f"reward must have a recipe for each label, a str, got {recipe!r}.")
        return recipe
    if isinstance(recipe, Sequence) and not isinstance(recipe, str):
        return {DEFAULT: recipe}
    return {DEFAULT: [(recipe, 1.0)]}


def _pair(label: str, pair: Any) -> tuple[Source, float]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"reward: label {label!r} must list (source, weight) pairs, got {pair!r}.")
    source, weight = pair
    if isinstance(source, TensorDictModuleBase) or not (source == OWN or callable(source)):
        raise TypeError(
            "a reward source must be 'episode', a callable from rows to a tensor, or a reward model "
            f"(nn.Module called with input_ids and attention_mask), got {source!r}."
        )
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not abs(weight) <= torch.finfo(torch.float32).max
    ):
        raise ValueError(
            f"reward: the weight of {source!r} must be a finite number, at most 3.4e38, got {weight!r}."
        )
    return source, float(weight)


def _name(source: Any) -> str:
    """Return a source's name in metrics and errors."""
    name = getattr(source, "name", None) or getattr(source, "__name__", None)
    return name if isinstance(name, str) else type(source).__name__
