"""The multi-turn policy loss: one forward pass, any objective, any aggregation, any mask.

Its value and gradient are functions of the sampled tokens alone; with the full batch's total, the
gradients of shards add up to the full batch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_mt.objectives import _rows
from torchrl_mt.objectives._rows import read_entry
from torchrl_mt.objectives.functional import (
    OBJECTIVES,
    Objective,
    aggregate,
    aggregation_total,
    kl_estimate,
)
from torchrl_mt.objectives.functional._checks import check_choice, check_positive, check_shape
from torchrl_mt.objectives.functional.aggregation import AGGREGATIONS, Aggregation
from torchrl_mt.objectives.functional.kl import MAX_LOG_RATIO, KLKind
from torchrl_mt.objectives.row_log_probs import causal_lm, row_log_probs, scored_tokens


class MultiTurnLoss(LossModule):
    """Policy loss over the sampled tokens of training rows.

    A sampled token that comes first in its row is left out of everything: nothing predicts it.

    The output has ``"loss_objective"``, with ``kl_coef`` ``"loss_kl"``, with ``entropy_coef``
    ``"loss_entropy"``: their sum is what one minimises. Detached diagnostics over the sampled tokens:
    ``"clip_fraction"``, ``"approx_kl"`` (k3, from the old policy to the actor), ``"ess"`` (effective
    share of the samples, in [0, 1]), ``"entropy"`` and, with ``kl_coef``, ``"kl_to_ref"``.

    The actor's parameters are shared, not copied, and it runs in the mode that it is in; keep it in
    evaluation mode if it has dropout, as the old log-probabilities come from a model without.

    Args:
        actor: A causal language model or a ``TransformersWrapper`` around one.
        objective: ``"ppo"``, ``"reinforce"``, or a function of the same signature
            (:data:`~torchrl_mt.objectives.functional.Objective`).
        aggregation: ``"token_mean"``, ``"seq_mean_token_mean"`` or ``"seq_mean_token_sum"``
            (:func:`~torchrl_mt.objectives.functional.aggregate`).
        clip_epsilon: Bound on the importance ratio's distance from 1, or ``(low, high)``.
        kl_coef: Weight of the KL to the reference, read from ``("log_probs", "ref")``. ``None``
            reads and writes nothing of it; at 0 ``"kl_to_ref"`` is still reported.
        kl_kind: The estimator that is minimised: k3 varies little and is never negative
            (http://joschu.net/blog/kl-approx.html), and is GRPO's (https://arxiv.org/abs/2402.03300,
            eq. 4); the slope of k1 would be 0 on average.
        entropy_coef: Weight of the entropy bonus.
        temperature: The temperature that the tokens were sampled at, if not 1.

    Raises:
        ValueError: If a name is unknown or ``clip_epsilon`` is out of range.
        TypeError: If ``actor`` is no language model.

    Examples:
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
        ...         "log_probs": {"old": torch.tensor([[0.0, -2.0], [0.0, -2.0]])},
        ...         "advantage": torch.tensor([[0.0, 1.0], [0.0, -1.0]]).unsqueeze(-1),
        ...     },
        ...     batch_size=[2],
        ... )
        >>> loss = MultiTurnLoss(actor, objective="ppo")
        >>> out = loss(rows)
        >>> sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        >>> actor.lm_head.weight.grad.abs().sum() > 0
        tensor(True)
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Where the entries lie; ``set_keys`` changes them."""

        action: NestedKey = _rows.TOKENS
        attention_mask: NestedKey = _rows.ATTENTION_MASK
        assistant_mask: NestedKey = _rows.ASSISTANT_MASK
        sample_log_prob: NestedKey = _rows.OLD_LOG_PROBS
        ref_log_probs: NestedKey = _rows.REF_LOG_PROBS
        advantage: NestedKey = "advantage"

    def __init__(
        self,
        actor: nn.Module,
        *,
        objective: str | Objective = "ppo",
        aggregation: Aggregation = "token_mean",
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_coef: float | None = None,
        kl_kind: KLKind = "k3",
        entropy_coef: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        causal_lm(actor)
        if not callable(objective):
            check_choice("objective", objective, OBJECTIVES)
            objective = OBJECTIVES[objective]
        check_choice("aggregation", aggregation, AGGREGATIONS)
        self.actor_network = actor
        self.objective = objective
        self.aggregation: Aggregation = aggregation
        self.clip_epsilon = _bounds(clip_epsilon)
        self.kl_coef = kl_coef
        self.kl_kind: KLKind = kl_kind
        self.entropy_coef = entropy_coef
        check_positive("temperature", temperature)
        self.temperature = temperature
        self._set_in_keys()
        self.out_keys = [
            "loss_objective",
            *([] if kl_coef is None else ["loss_kl", "kl_to_ref"]),
            *([] if entropy_coef is None else ["loss_entropy"]),
            *("clip_fraction", "approx_kl", "ess", "entropy"),
        ]

    @property
    def functional(self) -> bool:
        """False: the actor keeps its parameters."""
        return False

    def _set_in_keys(self) -> None:
        """List the entries that are read; the base class calls this after ``set_keys``."""
        keys = self.tensor_keys
        names = ["action", "attention_mask", "assistant_mask", "sample_log_prob", "advantage"]
        if self.kl_coef is not None:
            names.append("ref_log_probs")
        self.in_keys = [getattr(keys, name) for name in names]

    def total(self, tensordict: TensorDictBase) -> Tensor:
        """Count what the aggregation divides by, to give to ``forward`` with shards of these rows.

        Args:
            tensordict: All rows of one optimizer step.

        Returns:
            Scalar int64.
        """
        mask = read_entry(tensordict, self.tensor_keys.assistant_mask)
        attention_mask = read_entry(tensordict, self.tensor_keys.attention_mask)
        return aggregation_total(scored_tokens(attention_mask, mask), self.aggregation)

    def forward(
        self, tensordict: TensorDictBase, *, total: float | Tensor | None = None
    ) -> TensorDictBase:
        """Compute the losses of rows.

        Args:
            tensordict: Rows ``[N]`` as :class:`ExperienceMaker` completes them.
            total: With shards of a batch, :meth:`total` of the whole batch; the shards' losses and
                gradients then sum to the batch's. Diagnostics are the shard's own.

        Returns:
            A TensorDict without batch dimensions; see the class.

        Raises:
            KeyError: If the rows lack an entry.
            ValueError: If entries do not fit together.
        """
        keys = self.tensor_keys
        tokens = read_entry(tensordict, keys.action)
        mask = read_entry(tensordict, keys.assistant_mask)
        attention_mask = read_entry(tensordict, keys.attention_mask)
        maker = "; ExperienceMaker writes it"
        old = read_entry(tensordict, keys.sample_log_prob, maker)
        advantage = read_entry(tensordict, keys.advantage, maker)
        check_shape(str(keys.sample_log_prob), old, tokens.shape)
        check_shape(str(keys.advantage), advantage, torch.Size((*tokens.shape, 1)))
        old, advantage = old.float(), advantage.squeeze(-1).float()
        ref = None
        if self.kl_coef is not None:
            ref = read_entry(tensordict, keys.ref_log_probs, f"{maker} when it has a ref").float()
            check_shape(str(keys.ref_log_probs), ref, tokens.shape)

        # Without a bonus the entropy is only reported: its gradient is not computed.
        log_prob, entropy = row_log_probs(
            self.actor_network,
            tokens,
            attention_mask,
            mask,
            temperature=self.temperature,
            with_entropy=True,
        )
        assert entropy is not None
        mask = scored_tokens(attention_mask, mask)
        if total is None:
            total = aggregation_total(mask, self.aggregation)

        def reduce(per_token: Tensor) -> Tensor:
            return aggregate(per_token, mask, self.aggregation, total=total)

        loss, clipped = self.objective(log_prob, old, advantage, mask, self.clip_epsilon)
        out = {"loss_objective": reduce(loss)}
        if self.kl_coef is not None and ref is not None:
            kl = kl_estimate(log_prob, ref, self.kl_kind)
            out["loss_kl"] = self.kl_coef * reduce(kl)
            out["kl_to_ref"] = aggregate(kl.detach(), mask)
        if self.entropy_coef is not None:
            out["loss_entropy"] = -self.entropy_coef * reduce(entropy)
        out |= _diagnostics(log_prob.detach(), old, entropy.detach(), clipped, mask)
        return TensorDict(out, batch_size=[])


@torch.no_grad()
def _diagnostics(
    log_prob: Tensor, old: Tensor, entropy: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Means over the sampled tokens, and the effective share of the samples."""
    count = mask.sum().clamp(min=1)
    log_ratio = torch.where(mask, log_prob - old, 0.0)
    weight = torch.where(mask, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    # Kish's effective sample size over the number of samples.
    ess = weight.sum().square() / weight.square().sum().clamp(min=1e-30) / count
    return {
        "clip_fraction": (clipped & mask).sum() / count,
        "approx_kl": kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3").sum() / count,
        "ess": ess,
        "entropy": entropy.sum() / count,
    }


def _bounds(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    """Check the clip range and write it as a pair."""
    pair = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon,) * 2
    if len(pair) != 2 or not 0 <= pair[0] < 1 or not pair[1] >= 0:
        raise ValueError(
            "clip_epsilon must be a number in [0, 1), or (low, high) with low in [0, 1) and "
            f"high >= 0, got {clip_epsilon!r}."
        )
    return float(pair[0]), float(pair[1])
