"""Credit assignment: returns and advantages from rewards, by kind of advantage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.checks import (
    as_tensor,
    check_choice,
    check_finite,
    check_positive_integer,
    check_shape,
    check_unit_interval,
)
from torchrl_mt.objectives.functional import (
    bilevel_gae,
    episode_gae,
    gdpo_advantage,
    gigpo_advantage,
    masked_whiten,
    message_states,
    otb_advantage,
    outcome_advantage,
    turn_gae,
    turn_normalize,
    turn_returns,
)
from torchrl_mt.objectives.functional.group import OVER_BATCH, GroupKind
from torchrl_mt.objectives.rows.batch import RowBatch

AdvantageKind = (
    GroupKind | Literal["gdpo", "gigpo", "otb", "turn", "gae", "turn_gae", "bilevel_gae", "distill"]
)
"""Kinds of advantage: of whole episodes within groups, or over time."""

CRITIC_KINDS = ("gae", "turn_gae", "bilevel_gae")
"""Kinds that need a critic."""
GROUP_KINDS = (
    *(kind for kind in get_args(GroupKind) if kind not in OVER_BATCH),
    "gdpo",
    "gigpo",
    "otb",
)
"""Kinds that read the group; the other group kinds compare with the whole batch."""
_TOO_LARGE = "rewards (or values) are too large for sums in float32; scale them down."
ADVANTAGE_KINDS = (*get_args(GroupKind), "gdpo", "gigpo", "otb", "turn", *CRITIC_KINDS)
"""Kinds that compare rewards: all but ``"distill"``."""


@dataclass(frozen=True)
class Advantage:
    """A kind of advantage with its settings.

    - ``"turn"``: each turn's return less the mean of its turn id, divided by one standard deviation over
      the batch (:func:`~torchrl_mt.objectives.functional.turn_normalize`). If the rows hold returns,
      ``("rewards", "to_go")``, and nothing gives other rewards, these are used and ``gamma`` is ignored;
    - ``"grpo"``, ``"dr_grpo"``, ``"rloo"``, ``"reinforce_baseline"``, ``"max_rl"``, ``"opo"``,
      ``"pass_at_k"``: the return of the episode's first turn, compared within its group, on all sampled
      tokens of the episode
      (:func:`~torchrl_mt.objectives.functional.outcome_advantage`,
      :func:`~torchrl_mt.objectives.functional.group_advantage`). Each episode counts once. If there are
      several episodes, some group must have two: collect with a ``group_size``;
    - ``"batch"`` or ``"reinforce++"``: the same, compared with the whole batch;
    - ``"gdpo"``: ``"grpo"`` of each reward source by itself, their weighted sum whitened over all
      episodes (:func:`~torchrl_mt.objectives.functional.gdpo_advantage`), without the KL;
    - ``"gigpo"``: ``"dr_grpo"`` of the episode's undiscounted return, plus that of each turn's return
      among the turns of the group before which the environment said the same
      (:func:`~torchrl_mt.objectives.functional.gigpo_advantage`); not for rows with images;
    - ``"otb"``: each token's return less that of the group at the token of the same number, weighted by
      how far the tokens so far move the actor's logits: the optimal token baseline
      (:func:`~torchrl_mt.objectives.functional.otb_advantage`). The actor scores the rows;
    - ``"gae"``, ``"turn_gae"``, ``"bilevel_gae"``: with the critic, over the whole episode: its sampled
      tokens, its turns, or tokens within turns
      (:func:`~torchrl_mt.objectives.functional.episode_gae`,
      :func:`~torchrl_mt.objectives.functional.turn_gae`,
      :func:`~torchrl_mt.objectives.functional.bilevel_gae`);
    - ``"distill"``: with a teacher, how much likelier it finds each sampled token than the old policy
      did, ``log_probs/teacher - log_probs/old``: on average the negative KL to the teacher, per token;
    - a callable from the rows, which have all other outputs already, to ``[N, S]``.

    Args:
        kind: See above.
        lmbda: Trace decay in [0, 1]: per sampled token with ``"gae"`` and ``"bilevel_gae"``, per turn
            with ``"turn_gae"``. Below 1, late rewards count less as long as the critic's values are
            wrong; a new critic's are 0.
        critic_lmbda: Trace decay of the critic's targets, ``"returns"``; by default they have the
            advantage's. With 1, late rewards reach the critic undamped in long episodes (VC-PPO,
            https://arxiv.org/abs/2503.01491; VAPO, https://arxiv.org/abs/2504.05118). For both levels of
            ``"bilevel_gae"``.
        bootstrap: Let the kinds with a critic count its value at the end of truncated episodes as what
            would have come, discounted once; rows need ``("next", "truncated")``
            (``MergeTurns(carry=(("next", "truncated"),))``). Else an episode's end is its end.
        turn_gamma: Discount per turn of ``"bilevel_gae"``, in [0, 1].
        turn_lmbda: Trace decay per turn of ``"bilevel_gae"``, in [0, 1].
        step_weight: Weight of the turns in ``"gigpo"``.
        pass_k: How many episodes ``"pass_at_k"`` takes the best of.
        lone_value: Advantage of an episode alone in its group, for the kinds that compare groups (but
            ``"gdpo"``); with ``"otb"`` of a token that no other episode of the group is as long as.
        whiten: Normalise the advantages over all sampled tokens of the batch. A row's first token is
            never trained: it does not count and gets 0.

    Raises:
        ValueError: If the kind is unknown or a number out of range.
        TypeError: If ``lone_value`` or ``step_weight`` is no number.

    Examples:
        >>> Advantage("turn_gae", lmbda=0.9).needs_critic
        True
    """

    kind: AdvantageKind | Callable[[TensorDictBase], Tensor] = "turn"
    lmbda: float = 0.95
    critic_lmbda: float | None = None
    bootstrap: bool = False
    turn_gamma: float = 1.0
    turn_lmbda: float = 0.95
    step_weight: float = 1.0
    pass_k: int = 4
    lone_value: float = 0.0
    whiten: bool = False

    def __post_init__(self) -> None:
        if not callable(self.kind):
            check_choice("advantage", self.kind, (*ADVANTAGE_KINDS, "distill"))
        for name in ("lmbda", "turn_gamma", "turn_lmbda"):
            check_unit_interval(name, getattr(self, name))
        if self.critic_lmbda is not None:
            check_unit_interval("critic_lmbda", self.critic_lmbda)
        if self.bootstrap and not self.needs_critic:
            raise ValueError(
                f"bootstrap=True needs a kind with a critic, {CRITIC_KINDS}, got {self.kind!r}."
            )
        check_positive_integer("pass_k", self.pass_k)
        check_finite("step_weight", self.step_weight)
        check_finite("lone_value", self.lone_value)

    @property
    def needs_critic(self) -> bool:
        """Whether it needs values."""
        return self.kind in CRITIC_KINDS

    @property
    def reads_group(self) -> bool:
        """Whether it compares the rows' groups."""
        return self.kind in GROUP_KINDS

    @property
    def needs_norms(self) -> bool:
        """Whether it needs the gradient norms of the actor's log-probabilities."""
        return self.kind == "otb"


@dataclass(frozen=True)
class Credit:
    """Advantages and returns of rewards, with a discount; see :class:`Advantage`.

    Raises:
        ValueError: If ``gamma`` is out of range.
    """

    advantage: Advantage
    gamma: float | None

    def __post_init__(self) -> None:
        check_unit_interval("gamma", self.discount)

    @property
    def discount(self) -> float:
        """``gamma``, 1 by default."""
        return 1.0 if self.gamma is None else self.gamma

    @property
    def end_discount(self) -> float:
        """Discount of what comes after the last turn."""
        return self.advantage.turn_gamma if self.advantage.kind == "bilevel_gae" else self.discount

    def check(self, batch: RowBatch) -> None:
        """Refuse batches of several episodes, each alone in its group, if groups are compared.

        A single episode passes: the others may have been filtered out. Rejected episodes count as
        members; copies of an episode count once.
        """
        if not self.advantage.reads_group:
            return
        member = torch.stack([batch.group(), batch.episode_id], dim=1).unique(dim=0)
        if len(member) > 1 and len(member[:, 0].unique()) == len(member):
            raise ValueError(
                f"advantage={self.advantage.kind!r} compares the episodes of a group, but each of these "
                f"{len(member)} episodes is alone in its group ({batch.keys.group!r}), so there is "
                "nothing to learn. Collect with group_size=8, say, and give the maker whole groups "
                "(EpisodeSampler(group_key='group')); or choose an advantage that needs no groups: "
                "'turn', 'batch' or, with a critic, 'gae'."
            )

    def check_states(self, batch: RowBatch) -> None:
        """Refuse rows with images, if states are told apart by their tokens."""
        if self.advantage.kind == "gigpo" and batch.images is not None:
            raise ValueError(
                "advantage='gigpo' tells states apart by their tokens, which do not tell images apart: "
                "give a function of the rows, advantage=lambda rows: gigpo_advantage(..., state=...)."
            )

    def outcome(self, batch: RowBatch, reward: Tensor) -> Tensor:
        """Return of each row's episode without the KL, ``[N]``."""
        return batch.at_first_token(self._returns_to_go(batch, reward, torch.zeros_like(reward)))

    def advantage_and_return(
        self,
        batch: RowBatch,
        reward: Tensor | None,
        kl_reward: Tensor,
        made: Mapping[str, Tensor],
        parts: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns.

        Args:
            batch: The rows.
            reward: ``[N, S]`` floating; ``None`` takes the rows' own returns.
            kl_reward: ``[N, S]`` float32, the KL term of the reward.
            made: The outputs so far, ``[N, S]``, by key name; and ``"gradient_norm"``, if needed.
            parts: What the reward is made of, as of ``RewardMix.separately``; read by ``"gdpo"``.

        Returns:
            Advantage and return, ``[N, S]`` float32, zero on masked tokens; the advantage is also zero
            on rejected rows. Values that count must be finite.
        """
        if self.advantage.needs_critic:
            assert reward is not None
            advantage, returns = self._from_critic(batch, reward + kl_reward, made["value"])
        else:
            returns = self._returns_to_go(batch, reward, kl_reward)
        returns = batch.finite_float("value_target", returns, batch.counted, _TOO_LARGE)
        hint = _TOO_LARGE
        if callable(self.advantage.kind):
            advantage = _call_advantage(
                self.advantage.kind, batch, {**made, "value_target": returns}
            )
            hint = "advantage(rows) is at fault."
        elif self.advantage.kind == "distill":
            advantage = made["teacher_log_probs"] - made["sample_log_prob"].float()
        elif self.advantage.kind == "gdpo":
            assert parts is not None
            advantage = self._from_parts(batch, parts)
        elif self.advantage.kind == "gigpo":
            assert reward is not None
            advantage = self._from_states(batch, reward + kl_reward, returns)
        elif self.advantage.needs_norms:
            advantage = otb_advantage(
                returns,
                made["gradient_norm"],
                batch.counted,
                batch.turns,
                batch.episode,
                batch.group(),
                lone_value=self.advantage.lone_value,
            )
        elif not self.advantage.needs_critic:
            advantage = self._from_comparison(batch, returns, self.advantage.kind)
        advantage = batch.finite_float("advantage", advantage, batch.scored, hint)
        if self.advantage.whiten:
            advantage = masked_whiten(advantage, batch.scored)
            advantage = batch.finite_float("advantage", advantage, batch.scored, _TOO_LARGE)
        return torch.where(batch.counted, advantage, 0.0), returns

    def _returns_to_go(self, batch: RowBatch, reward: Tensor | None, kl_reward: Tensor) -> Tensor:
        """Compute each turn's return-to-go, KL term included."""
        total = kl_reward if reward is None else reward + kl_reward
        returns = turn_returns(total, batch.mask, batch.turns, self.discount, episode=batch.episode)
        if reward is None:
            # Returns are linear in rewards: those of the KL add to the rows' own.
            returns = returns + batch.turn_returns()
        return returns

    def _from_comparison(self, batch: RowBatch, returns: Tensor, kind: AdvantageKind) -> Tensor:
        """Compute advantages by comparison with other turns or episodes."""
        entries = returns, batch.counted, batch.turns
        if kind == "turn":
            return turn_normalize(*entries, episode=batch.episode)
        return outcome_advantage(
            *entries,
            batch.episode,
            batch.group() if self.advantage.reads_group else torch.zeros_like(batch.episode),
            cast(GroupKind, kind),
            scored=batch.scored,
            lone_value=self.advantage.lone_value,
            pass_k=self.advantage.pass_k,
        )

    def _from_parts(self, batch: RowBatch, parts: Mapping[str, Tensor]) -> Tensor:
        """Compute advantages of rewards that are compared one by one."""
        names = [name.removeprefix("score/") for name in parts if name.startswith("score/")]
        nothing = torch.zeros_like(batch.mask, dtype=torch.float32)
        returns = [self._returns_to_go(batch, parts[f"score/{name}"], nothing) for name in names]
        return gdpo_advantage(
            torch.stack(returns),
            torch.stack([parts[f"weight/{name}"][:, 0] for name in names]),
            batch.counted,
            batch.turns,
            batch.episode,
            batch.group(),
        )

    def _from_states(self, batch: RowBatch, reward: Tensor, returns: Tensor) -> Tensor:
        """Compute advantages by comparison with episodes, and with turns that began in one state."""
        entries = batch.counted, batch.turns, batch.episode
        return gigpo_advantage(
            returns,
            turn_returns(reward, *entries[:2], 1.0, episode=batch.episode),
            *entries,
            batch.group(),
            message_states(batch.tokens, batch.attention_mask, *entries),
            step_weight=self.advantage.step_weight,
            lone_value=self.advantage.lone_value,
        )

    def _from_critic(self, batch: RowBatch, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute advantages and the critic's targets from its values."""
        own = self.advantage
        advantage, returns = self._gae(batch, reward, value, own.lmbda, own.turn_lmbda)
        if own.critic_lmbda is not None:
            slower = own.critic_lmbda, own.critic_lmbda
            returns = self._gae(batch, reward, value, *slower)[1]
        return advantage, returns

    def _gae(
        self, batch: RowBatch, reward: Tensor, value: Tensor, lmbda: float, turn_lmbda: float
    ) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns from a critic's values."""
        entries = reward, value, batch.mask, batch.turns, self.discount, lmbda
        if self.advantage.kind == "gae":
            return episode_gae(*entries, episode=batch.episode)
        if self.advantage.kind == "turn_gae":
            return turn_gae(*entries, episode=batch.episode)
        return bilevel_gae(
            *entries,
            turn_gamma=self.advantage.turn_gamma,
            turn_lmbda=turn_lmbda,
            episode=batch.episode,
        )


def _call_advantage(
    advantage: Callable[[TensorDictBase], Tensor], batch: RowBatch, made: Mapping[str, Tensor]
) -> Tensor:
    """Call an advantage function with completed rows."""
    # On a copy: in-place changes must not reach the rows.
    name = "the result of advantage(rows)"
    result = as_tensor(name, advantage(batch.with_default_keys(made).clone()))
    check_shape(name, result, batch.mask.shape)
    return result.to(batch.mask.device)
