"""What the loss needs beyond the rows themselves: behaviour and reference scores, KL, advantages.

Statistics are taken over the whole batch of rows that is given, by episode, group and turn id, so the
order of the rows and how a forked episode was cut into them change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_mt.objectives import _rows
from torchrl_mt.objectives._rows import read_entry, read_episode
from torchrl_mt.objectives.functional import (
    kl_estimate,
    outcome_advantage,
    turn_normalize,
    turn_returns,
)
from torchrl_mt.objectives.functional._checks import (
    check_choice,
    check_positive,
    check_shape,
    check_unit_interval,
)
from torchrl_mt.objectives.functional.group import GroupKind
from torchrl_mt.objectives.functional.kl import KLKind
from torchrl_mt.objectives.row_log_probs import (
    causal_lm,
    micro_batches,
    row_log_probs,
    scored_tokens,
    scoring_mode,
)

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "batch", "turn"]
"""How credit is given: to whole episodes by group (the first four), or turn by turn."""

OldLogProbs = Literal["sampler", "actor"]
"""Whose log-probabilities the importance ratio is taken against."""


class ExperienceMaker(TensorDictModuleBase):
    """Complete training rows with old and reference log-probabilities, KL, advantages and returns.

    ``"returns"`` is the return-to-go of each turn, ``gamma`` counting turns, over the whole episode
    whatever rows its forks lie in. Rows are one episode if they agree on ``"episode"`` and, where it
    is present, on ``"episode_index"``, which tells copies of one episode apart among the rows of one
    :class:`~torchrl_mt.transforms.MergeTurns` call. An episode that was truncated counts like one
    that was terminated: what it might still have earned is taken as 0. The advantage is

    - ``"grpo"``, ``"dr_grpo"``, ``"rloo"``, ``"batch"``: the episode's return (that of its first turn)
      compared with its group, each episode counting once, on all of its sampled tokens
      (:func:`~torchrl_mt.objectives.functional.outcome_advantage`);
    - ``"turn"``: each turn's return, normalised among the turns of the batch that have the same turn
      id (:func:`~torchrl_mt.objectives.functional.turn_normalize`). The rows' own
      ``("rewards", "to_go")`` are used where present, in place of ``("rewards", "full")`` and
      ``gamma``;
    - a callable: the rows, with all other outputs already in them, to ``[N, S]``.

    No gradient flows; the models' modes and the random state are left as they were.

    Args:
        actor: A causal language model or a ``TransformersWrapper`` around one.
        ref: The reference policy, of the same kinds; without it there is no KL.
        advantage: See above.
        gamma: Discount per turn, in [0, 1].
        kl_coef: Subtract this times the KL from the reward of each sampled token; needs ``ref``. At
            0 the KL is only written.
        kl_kind: The estimator of ``"kl"``, from the old policy to the reference. In a reward its
            value counts, and k1's is unbiased, as is the policy gradient that it adds
            (http://joschu.net/blog/kl-approx.html; https://arxiv.org/abs/2203.02155, eq. 2).
        old_log_probs: ``"sampler"`` takes ``("log_probs", "full")`` as sampled; ``"actor"``
            scores the rows again under the actor as it is now.
        temperature: The temperature that the tokens were sampled at, if not 1.
        micro_batch_size: Most rows of one forward pass.
        micro_batch_tokens: Most tokens of one forward pass, padding included.

    Raises:
        ValueError: If an argument is unknown or out of range, or ``kl_coef`` is given without ``ref``.
        TypeError: If ``actor`` or ``ref`` is no language model.

    Examples:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> actor = Qwen2ForCausalLM(
        ...     Qwen2Config(
        ...         vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...         num_attention_heads=1, num_key_value_heads=1, pad_token_id=0,
        ...     )
        ... )
        >>> sampled = torch.tensor([[False, True], [False, True]])
        >>> rows = TensorDict(
        ...     {
        ...         "tokens": {"full": torch.tensor([[1, 2], [1, 3]])},
        ...         "masks": {
        ...             "all_attention_mask": torch.ones(2, 2, dtype=torch.bool),
        ...             "all_assistant_mask": sampled,
        ...         },
        ...         "log_probs": {"full": torch.tensor([[0.0, -2.0], [0.0, -2.0]])},
        ...         "turns": {"full": torch.zeros(2, 2, dtype=torch.long)},
        ...         "rewards": {"full": torch.tensor([[0.0, 1.0], [0.0, 0.0]])},
        ...         "episode": torch.tensor([0, 1]),
        ...         "group": torch.tensor([0, 0]),
        ...     },
        ...     batch_size=[2],
        ... )
        >>> ExperienceMaker(actor, advantage="dr_grpo")(rows)["advantage"].squeeze(-1)
        tensor([[ 0.0000,  0.5000],
                [ 0.0000, -0.5000]])
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        ref: nn.Module | None = None,
        advantage: AdvantageKind | Callable[[TensorDictBase], Tensor] = "grpo",
        gamma: float = 1.0,
        kl_coef: float = 0.0,
        kl_kind: KLKind = "k1",
        old_log_probs: OldLogProbs = "sampler",
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        causal_lm(actor)
        if ref is not None:
            causal_lm(ref)
        elif kl_coef:
            raise ValueError(f"kl_coef needs a reference policy, got {kl_coef} with ref=None.")
        if not callable(advantage):
            check_choice("advantage", advantage, get_args(AdvantageKind))
        check_unit_interval("gamma", gamma)
        check_positive("temperature", temperature)
        check_choice("kl_kind", kl_kind, get_args(KLKind))
        check_choice("old_log_probs", old_log_probs, get_args(OldLogProbs))
        for name, value in (
            ("micro_batch_size", micro_batch_size),
            ("micro_batch_tokens", micro_batch_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}.")
        self.actor = actor
        self.ref = ref
        self.advantage = advantage
        self.gamma = gamma
        self.kl_coef = kl_coef
        self.kl_kind: KLKind = kl_kind
        self.old_log_probs = old_log_probs
        self.temperature = temperature
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.in_keys = [
            _rows.TOKENS,
            _rows.ATTENTION_MASK,
            _rows.ASSISTANT_MASK,
            *([_rows.SAMPLER_LOG_PROBS] if old_log_probs == "sampler" else []),
            _rows.TURNS,
            _rows.REWARDS,
            _rows.EPISODE,
            _rows.GROUP,
        ]
        self.out_keys = [
            _rows.OLD_LOG_PROBS,
            *([] if ref is None else [_rows.REF_LOG_PROBS, "kl"]),
            "advantage",
            "returns",
        ]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the outputs into the rows.

        Args:
            tensordict: Rows ``[N]``: whole groups, for the statistics are those of the rows given.

        Returns:
            The same rows, completed.

        Raises:
            KeyError: If the rows lack an entry.
            ValueError: If entries do not fit together or a row is there twice; the rows are then
                unchanged.
        """
        mask = read_entry(tensordict, _rows.ASSISTANT_MASK)
        out: dict = {}
        if self.old_log_probs == "sampler":
            hint = "; old_log_probs='actor' does without"
            old = read_entry(tensordict, _rows.SAMPLER_LOG_PROBS, hint)
            check_shape(str(_rows.SAMPLER_LOG_PROBS), old, mask.shape)
            out[_rows.OLD_LOG_PROBS] = torch.where(mask, old.float(), 0.0)
        else:
            out[_rows.OLD_LOG_PROBS] = self._score(self.actor, tensordict)
        if self.ref is not None:
            out[_rows.REF_LOG_PROBS] = self._score(self.ref, tensordict)
            kl = kl_estimate(out[_rows.OLD_LOG_PROBS], out[_rows.REF_LOG_PROBS], self.kl_kind)
            attention_mask = read_entry(tensordict, _rows.ATTENTION_MASK)
            out["kl"] = torch.where(scored_tokens(attention_mask, mask), kl, 0.0)
        given = tensordict.get(_rows.TURN_RETURNS, None)
        if given is not None:
            check_shape(str(_rows.TURN_RETURNS), given, mask.shape)
        use_given = given if self.advantage == "turn" else None
        out["returns"] = self._returns(tensordict, mask, out.get("kl"), use_given)
        advantage = self._advantage(tensordict, mask, out)
        out["advantage"] = torch.where(mask, advantage, 0.0).unsqueeze(-1)
        for key, value in out.items():
            tensordict.set(key, value)
        return tensordict

    def _returns(
        self, rows: TensorDictBase, mask: Tensor, kl: Tensor | None, given: Tensor | None
    ) -> Tensor:
        """Return-to-go of each turn, less the KL's part in the reward."""
        if given is None:
            reward = read_entry(rows, _rows.REWARDS).float()
        elif self.kl_coef:
            reward = torch.zeros_like(given, dtype=torch.float32)
        else:
            return torch.where(mask, given.float(), 0.0)
        if kl is not None and self.kl_coef:
            reward = reward - self.kl_coef * kl
        turns, episode = read_entry(rows, _rows.TURNS), read_episode(rows)
        returns = turn_returns(reward, mask, turns, self.gamma, episode=episode)
        # Returns are linear in rewards: those of the KL add to those that came with the rows.
        return returns if given is None else torch.where(mask, given.float(), 0.0) + returns

    def _advantage(self, rows: TensorDictBase, mask: Tensor, out: dict) -> Tensor:
        """Advantage of each token, ``[N, S]``."""
        if callable(self.advantage):
            completed = rows.copy()
            for key, value in out.items():
                completed.set(key, value)
            advantage = self.advantage(completed)
            check_shape("the result of advantage(rows)", advantage, mask.shape)
            return advantage.float()
        turns, episode = read_entry(rows, _rows.TURNS), read_episode(rows)
        if self.advantage == "turn":
            return turn_normalize(out["returns"], mask, turns, episode=episode)
        kind: GroupKind = self.advantage
        group = read_entry(rows, _rows.GROUP)
        return outcome_advantage(out["returns"], mask, turns, episode, group, kind)

    def _score(self, model: nn.Module, rows: TensorDictBase) -> Tensor:
        """Log-probabilities of the rows' sampled tokens, in micro-batches."""
        keys = (_rows.TOKENS, _rows.ATTENTION_MASK, _rows.ASSISTANT_MASK)
        tokens, attention_mask, mask = (read_entry(rows, key) for key in keys)
        out = torch.zeros(tokens.shape, device=tokens.device)
        lengths = attention_mask.sum(-1)
        with scoring_mode(model):
            for part in micro_batches(lengths, self.micro_batch_size, self.micro_batch_tokens):
                part = part.to(tokens.device)
                log_prob, _ = row_log_probs(
                    model,
                    tokens[part],
                    attention_mask[part],
                    mask[part],
                    temperature=self.temperature,
                )
                out[part] = log_prob
        return out
