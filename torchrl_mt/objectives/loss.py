"""The multi-turn policy loss: any objective, any aggregation, any mask, in bounded memory.

Only sampled tokens affect its value and gradient. With the full batch's total, the gradients of
shards add up to the full batch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchrl.objectives import LossModule

from torchrl_mt._hosts.torch import has_gradient_hooks
from torchrl_mt._hosts.torchrl import loss_mask_keys
from torchrl_mt.checks import (
    check_choice,
    check_class,
    check_finite,
    check_is_batch,
    check_positive,
    check_shape,
)
from torchrl_mt.devices import sent
from torchrl_mt.objectives.entropy import EntropyController, entropy_coefficient
from torchrl_mt.objectives.functional import (
    aggregate,
    correct,
    kl_estimate,
    merge_totals,
    value_loss,
)
from torchrl_mt.objectives.functional.aggregation import Aggregation, aggregation_total
from torchrl_mt.objectives.functional.corrections import Correction, find_corrections, weighs
from torchrl_mt.objectives.functional.kl import KLKind
from torchrl_mt.objectives.functional.policy.objectives import (
    OBJECTIVES,
    Objective,
    clip_bounds,
    compares,
    takes,
)
from torchrl_mt.objectives.idle_updates import IdleUpdates
from torchrl_mt.objectives.kl import KLCoefficient, kl_coefficient
from torchrl_mt.objectives.loss_inputs import (
    OnHost,
    check_outputs,
    check_total,
    counted_tokens,
    read_inputs,
    warn_of_no_correction,
)
from torchrl_mt.objectives.loss_parts import activation_budget, kept_bytes, losses_in_parts
from torchrl_mt.objectives.metrics import (
    CORRECTION_DIAGNOSTICS,
    CRITIC_DIAGNOSTICS,
    POLICY_DIAGNOSTICS,
    SUPERVISED_DIAGNOSTICS,
    critic_diagnostics,
    policy_diagnostics,
)
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import check_like, read_entry
from torchrl_mt.objectives.splitting import cut, cut_trees
from torchrl_mt.objectives.warnings import warn_of_mode
from torchrl_mt.ranks import call_on_all, check_process_group, exchanges_gradients
from torchrl_mt.scoring.distillation import Distillation, check_same_tokens
from torchrl_mt.scoring.log_probs import causal_lm, row_scores
from torchrl_mt.scoring.packing_check import tree_width
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_vision import image_keys, vision_towers
from torchrl_mt.scoring.values import check_critic, row_values
from torchrl_mt.vision import RowImages

Sequences = Literal["row", "turn"]
"""What counts as one sequence for objectives and corrections of whole sequences."""


@dataclass(frozen=True)
class ValueLoss:
    """A critic and the settings of its loss (:func:`~torchrl_mt.objectives.functional.value_loss`).

    Args:
        critic: A value network, called like the actor. Its output, or the output's ``logits``, has one
            value per token, ``[N, L]`` or ``[N, L, 1]``. Its loss reads ``"returns"``.
        coef: Weight of the loss.
        clip_value: Clip the loss at this distance from ``"values"``.

    Raises:
        ValueError: If ``clip_value`` is not positive.
        TypeError: If ``critic`` is no module or ``coef`` no number.
    """

    critic: nn.Module
    coef: float = 1.0
    clip_value: float | None = None

    def __post_init__(self) -> None:
        check_critic(self.critic)
        check_finite("coef", self.coef)
        if self.clip_value is not None:
            check_positive("clip_value", self.clip_value)


class MultiTurnLoss(LossModule):
    """Policy loss over the sampled tokens of training rows.

    Minimise the sum of the outputs that begin with ``loss_``. The others are detached diagnostics.
    :doc:`/learning` lists them, the objectives, corrections and aggregations, and the rows and tokens
    that do not count. The models' parameters are shared, not copied.

    Args:
        actor: A causal language model or a ``TransformersWrapper`` around one.
        objective: A name in :data:`~torchrl_mt.objectives.functional.OBJECTIVES`, such as ``"sft"``
            (:ref:`supervised-starts`), or a function of the same signature
            (:data:`~torchrl_mt.objectives.functional.Objective`). Bind hyperparameters with
            ``functools.partial``: ``partial(ppo, dual_clip=3.0)``.
        aggregation: ``"token_mean"``, ``"seq_mean_token_mean"``, ``"seq_mean_token_sum"`` or
            ``"prompt_mean"``, which reads ``"group"``.
        clip_epsilon: Largest distance of the importance ratio from 1, or ``(low, high)``. Default: the
            objective's own (0.2 for PPO), or what ``functools.partial`` binds.
        correction: Off-policy weights for a sampler that differs from the old policy: one or several of
            :data:`~torchrl_mt.objectives.functional.CORRECTIONS`, or functions of the same signature.
            Needs ``ExperienceMaker(old_log_probs="actor")``.
        sequence: One sequence is a whole row, or a turn of a row by ``("turns", "full")``. For
            objectives and corrections of whole sequences.
        kl_coef: Weight of the KL to the reference: a number, or a TorchRL controller, which you update
            after each step. ``None`` leaves the KL out; 0 only reports it.
        kl_kind: The estimator to minimise (:doc:`/credit`). The gradient of k1 is 0 on average.
        entropy_coef: Weight of the entropy bonus: a number, or an
            :class:`~torchrl_mt.objectives.EntropyController`, which you update after each step.
        critic: A value network, or :class:`~torchrl_mt.objectives.ValueLoss`.
        distillation: A teacher, and how the actor is drawn to it at the sampled tokens.
        sft_coef: Weight of the cross-entropy of further tokens, those of the entry ``("masks", "sft")``,
            such as a tool's output: their sum over the number of trained tokens (``"token_mean"``),
            of sequences or of prompts.
        freeze_vision: Do not train the vision towers of actor and critic, here and for good
            (:doc:`/images`).
        passes: How rows are cut into forward passes, and the sampling temperature
            (:doc:`/large_models`).

    Raises:
        ValueError: If a name is unknown, a number is out of range, or an argument does not fit the
            objective, the correction or the model.
        TypeError: If a model, function or coefficient is none.

    Examples:
        >>> loss_module = MultiTurnLoss(actor, entropy_coef=0.01)  # doctest: +SKIP
        >>> losses = loss_module(rows)  # doctest: +SKIP
        >>> (losses["loss_objective"] + losses["loss_entropy"]).backward()  # doctest: +SKIP
    """

    aggregation_norm: float | None = None
    """Further divisor of ``"seq_mean_token_sum"``, 1 by default."""
    max_idle_updates: int | None = 16
    """An error after so many updates in a row in which all advantages were 0, so that the entropy bonus
    or the KL alone changed the model; ``None`` goes on."""

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Keys of the entries; ``set_keys`` changes them."""

        action: NestedKey = ExperienceKeys.action
        attention_mask: NestedKey = ExperienceKeys.attention_mask
        assistant_mask: NestedKey = ExperienceKeys.assistant_mask
        sample_log_prob: NestedKey = ExperienceKeys.sample_log_prob
        sampler_log_prob: NestedKey = ExperienceKeys.sampler_log_prob
        ref_log_probs: NestedKey = ExperienceKeys.ref_log_probs
        advantage: NestedKey = ExperienceKeys.advantage
        weight: NestedKey = ExperienceKeys.weight
        valid: NestedKey = ExperienceKeys.valid
        sampling_temperature: NestedKey = ExperienceKeys.sampling_temperature
        turns: NestedKey = ExperienceKeys.turns
        group: NestedKey = ExperienceKeys.group
        value: NestedKey = ExperienceKeys.value
        value_target: NestedKey = ExperienceKeys.value_target
        sft_mask: NestedKey = ExperienceKeys.sft_mask

    def __init__(
        self,
        actor: nn.Module,
        *,
        objective: str | Objective = "ppo",
        aggregation: Aggregation = "token_mean",
        clip_epsilon: float | tuple[float, float] | None = None,
        correction: str | Correction | Sequence[str | Correction] | None = None,
        sequence: Sequences = "row",
        kl_coef: KLCoefficient | None = None,
        kl_kind: KLKind = "k3",
        entropy_coef: float | EntropyController | None = None,
        critic: nn.Module | ValueLoss | None = None,
        distillation: Distillation | None = None,
        sft_coef: float | None = None,
        freeze_vision: bool = False,
        passes: Passes | None = None,
    ) -> None:
        super().__init__()
        causal_lm(actor)
        if not callable(objective):
            check_choice("objective", objective, OBJECTIVES)
            objective = OBJECTIVES[objective]
        bounds = clip_bounds(objective, clip_epsilon)
        corrections = find_corrections(correction)
        if takes(objective, "sampler_log_prob") and any(map(weighs, corrections)):
            raise ValueError(
                f"objective={objective!r} takes sampler_log_prob and weights by the ratio to the "
                f"sampler itself: correction={correction!r} would apply it twice. Pass "
                "correction=None, or 'geometric', which only masks."
            )
        if corrections and not compares(objective):
            raise ValueError(
                f"correction must be None for an objective that imitates, like 'sft': its rows need no "
                f"log-probabilities of a sampler, which {correction!r} reads. Weight tokens by the "
                "entry ('weights', 'full') instead."
            )
        check_choice("aggregation", aggregation, get_args(Aggregation))
        check_choice("sequence", sequence, get_args(Sequences))
        if sequence == "turn" and not any(takes(f, "turns") for f in (objective, *corrections)):
            raise ValueError(
                "sequence='turn' is for objectives and corrections of whole sequences, which are those "
                f"with a keyword 'turns'; got objective={objective!r}, correction={correction!r}."
            )
        check_choice("kl_kind", kl_kind, get_args(KLKind))
        valued = critic if critic is None or isinstance(critic, ValueLoss) else ValueLoss(critic)
        network = None if valued is None else valued.critic
        if kl_coef is not None:
            kl_coefficient(kl_coef)
        if entropy_coef is not None:
            entropy_coefficient(entropy_coef)
        if sft_coef is not None:
            check_finite("sft_coef", sft_coef)
        if distillation is not None:
            check_class("distillation", distillation, Distillation)
            check_same_tokens(actor, distillation.teacher)
        if not isinstance(freeze_vision, bool):
            raise TypeError(f"freeze_vision must be True or False, got {freeze_vision!r}.")
        if freeze_vision:
            _freeze_vision(causal_lm(actor), network)
        self.actor_network = actor
        self.critic_network = network
        self.objective = objective
        self.corrections = corrections
        self.aggregation: Aggregation = aggregation
        self.sequence: Sequences = sequence
        self.clip_epsilon = bounds
        self.kl_coef = kl_coef
        self.kl_kind: KLKind = kl_kind
        self.entropy_coef = entropy_coef
        self.value_loss = valued
        self.distillation = distillation
        self.sft_coef = sft_coef
        self.passes = Passes.checked(passes)
        self._idle = IdleUpdates()
        self._tokens_in_memory: int | None = None
        self._compared = False
        self._looked_at_mode = False
        self._set_in_keys()
        self.out_keys = [
            "loss_objective",
            *([] if kl_coef is None else ["loss_kl", "kl_to_ref"]),
            *([] if entropy_coef is None else ["loss_entropy"]),
            *([] if critic is None else ["loss_critic", *CRITIC_DIAGNOSTICS]),
            *([] if distillation is None else ["loss_distill", "divergence"]),
            *([] if sft_coef is None else ["loss_sft"]),
            *(CORRECTION_DIAGNOSTICS if corrections else []),
            *(POLICY_DIAGNOSTICS if "sample_log_prob" in self._names() else SUPERVISED_DIAGNOSTICS),
        ]

    @property
    def functional(self) -> bool:
        """Always false: the models keep their parameters."""
        return False

    def _names(self) -> list[str]:
        """List the required entries by their names in ``set_keys``."""
        needed = {
            "sample_log_prob": compares(self.objective)
            or (self.kl_coef is not None and self.kl_kind == "k3_is"),
            "advantage": compares(self.objective),
            "ref_log_probs": self.kl_coef is not None and not self._ref_is_optional,
            "sampler_log_prob": bool(self.corrections) or takes(self.objective, "sampler_log_prob"),
            "turns": self.sequence == "turn",
            "group": self.aggregation == "prompt_mean",
            "value_target": self.critic_network is not None,
            "value": self.value_loss is not None and self.value_loss.clip_value is not None,
            "sft_mask": self.sft_coef is not None,
        }
        always = ["action", "attention_mask", "assistant_mask"]
        return always + [name for name, is_needed in needed.items() if is_needed]

    @property
    def _ref_is_optional(self) -> bool:
        """Whether the KL to the reference is only reported."""
        return self.kl_coef is not None and not kl_coefficient(self.kl_coef)

    def _set_in_keys(self) -> None:
        """Set ``in_keys``; the base class calls this after ``set_keys``."""
        self.in_keys = [getattr(self.tensor_keys, name) for name in self._names()]

    @property
    def optional_in_keys(self) -> list[NestedKey]:
        """Keys of the entries that are used where the rows have them."""
        keys = self.tensor_keys
        ref = [keys.ref_log_probs] * self._ref_is_optional
        images = image_keys(self.actor_network, self.critic_network)
        may = [keys.weight, keys.valid, keys.sampling_temperature, *ref, *images]
        return [*may, *loss_mask_keys(self)]

    def total(
        self,
        tensordict: TensorDictBase,
        *,
        process_group: distributed.ProcessGroup | None = None,
    ) -> Tensor:
        """Compute the aggregation's divisor, to pass to ``forward`` with shards of these rows.

        Args:
            tensordict: All rows of one optimizer step; with ``process_group``, those of this rank.
            process_group: Add up the totals of these ranks (as
                :func:`~torchrl_mt.objectives.functional.merge_totals` does), each with its own rows or
                none: ``torch.distributed.group.WORLD``. Every rank must call. DDP and FSDP average
                gradients over the ranks, so multiply the loss by their number.

        Returns:
            Scalar int64; for ``"prompt_mean"`` ``[K, 2]`` int64
            (:func:`~torchrl_mt.objectives.functional.aggregation.aggregation_total`).

        Raises:
            KeyError: If the rows lack an entry.
            ValueError: If entries do not fit together.
            TypeError: If ``process_group`` is no process group.
            RuntimeError: If this happens on another rank of ``process_group``.
        """
        check_process_group(process_group)
        if process_group is None:
            return self._total(tensordict)
        totals = call_on_all(lambda: self._total(tensordict).cpu(), process_group)
        device = read_entry(
            tensordict, self.tensor_keys.attention_mask, ExperienceKeys.attention_mask
        ).device
        return merge_totals(*totals).to(device)

    def _total(self, tensordict: TensorDictBase) -> Tensor:
        """Compute the divisor of the rows of this process."""
        keys = self.tensor_keys
        mask = counted_tokens(
            tensordict,
            keys,
            read_entry(tensordict, keys.attention_mask, ExperienceKeys.attention_mask),
            read_entry(tensordict, keys.assistant_mask, ExperienceKeys.assistant_mask),
            loss_mask_keys(self),
        )
        group = None
        if self.aggregation == "prompt_mean":
            group = read_entry(tensordict, keys.group, ExperienceKeys.group)
            check_like(keys.group, group, keys.attention_mask, mask.shape[:1])
        return aggregation_total(mask, self.aggregation, group=group)

    def forward(
        self, tensordict: TensorDictBase, *, total: float | Tensor | None = None
    ) -> TensorDictBase:
        """Compute the losses and diagnostics.

        The models run in their current mode: keep an actor with dropout in evaluation mode, as the old
        log-probabilities were computed without dropout.

        Args:
            tensordict: Rows ``[N]`` as :class:`ExperienceMaker` completes them; for ``"sft"``, any
                rows. Entries must be constants: one that carries a graph is refused.
            total: For a shard, :meth:`total` of the whole batch: the shards' losses and gradients then
                sum to the batch's. Diagnostics are the shard's own.

        Returns:
            A TensorDict without batch dimensions: ``"loss_objective"``, ``"loss_kl"`` (with
            ``kl_coef``), ``"loss_entropy"`` (with ``entropy_coef``), ``"loss_critic"`` (with
            ``critic``), and the diagnostics.

        Raises:
            KeyError: If the rows lack an entry.
            ValueError: If entries do not fit together, an entry is not finite on a sampled token or
                carries a graph, rows have another ``("sampling", "temperature")`` ``[N]`` than
                ``passes``, or a model's output has the
                wrong shape or is not finite.
            TypeError: If the rows are no TensorDict, ``total`` is no number or tensor, or the actor
                returns no logits.
        """
        check_is_batch("rows", tensordict)
        check_total(total)
        keys = self.tensor_keys
        names = self._names()
        if self._ref_is_optional and tensordict.get(keys.ref_log_probs, None) is not None:
            names.append("ref_log_probs")
        rows, mask, on_host = read_inputs(
            tensordict, keys, names, loss_mask_keys(self), self.passes.temperature
        )
        if not self._compared and "sampler_log_prob" in rows:
            self._compared = warn_of_no_correction(rows, mask, keys)
        if total is None:
            total = aggregation_total(mask, self.aggregation, group=rows.get("group"))
        metrics: dict[str, Tensor] = {}
        if self.corrections:
            rows["correction"], metrics = correct(
                self.corrections,
                rows["sample_log_prob"],
                rows["sampler_log_prob"],
                mask,
                turns=rows.get("turns"),
                advantage=rows["advantage"],
            )
        whole = _Rows(rows, mask, on_host, RowImages.of(tensordict))
        trained = [p for p in self.parameters() if p.requires_grad]
        if trained and torch.is_grad_enabled() and not self._looked_at_mode:
            self._looked_at_mode = True
            warn_of_mode(self.actor_network)
        parts = self._parts(whole, total) if trained and torch.is_grad_enabled() else []
        if len(parts) > 1:
            losses, tokens = losses_in_parts(
                lambda part: self._losses(whole.at(part), total), parts, trained
            )
        else:
            losses, tokens = self._losses(whole, total)
        log_prob, entropy = tokens["log_prob"], tokens["entropy"]
        outputs = {"the actor's log-probabilities": log_prob, "the actor's entropies": entropy}
        if "value" in tokens:
            outputs["the critic's values"] = tokens["value"]
        check_outputs(outputs, mask)
        if trained and torch.is_grad_enabled():
            self._count_idle(whole, trained)
        old = rows.get("sample_log_prob")
        out = losses | policy_diagnostics(log_prob, old, entropy, tokens["clipped"], mask)
        out |= {f"correction_{name}": value for name, value in metrics.items()}
        if "kl" in tokens:
            out["kl_to_ref"] = aggregate(tokens["kl"].detach(), mask)
        if "divergence" in tokens:
            out["divergence"] = aggregate(tokens["divergence"].detach(), mask)
        if "value" in tokens:
            returns = rows["value_target"]
            out |= critic_diagnostics(tokens["value"], returns, tokens["value_clipped"], mask)
        return TensorDict(out, batch_size=[])

    def _losses(
        self, part: _Rows, total: float | Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the losses of rows, and the values of each token that diagnostics read."""
        rows, mask = part.entries, part.mask
        passes = replace(
            self.passes, micro_batch_size=None, micro_batch_tokens=None, with_entropy=True
        )
        ids, attended, trained, scored = part.on_host
        # Without a bonus the entropy is only reported: no gradient reaches it.
        imitated = rows.get("sft_mask")
        given: dict[str, Any] = {"images": part.images, "passes": passes, "device": mask.device}
        log_prob, entropy, divergence, _ = row_scores(
            self.actor_network, ids, attended, scored, distillation=self.distillation, **given
        )
        assert entropy is not None

        def reduce(per_token: Tensor) -> Tensor:
            group, norm = rows.get("group"), self.aggregation_norm
            return aggregate(per_token, mask, self.aggregation, total=total, group=group, norm=norm)

        losses: dict[str, Tensor] = {}
        tokens: dict[str, Tensor] = {}
        if imitated is not None and self.sft_coef is not None:
            count = torch.as_tensor(total, device=log_prob.device)
            count = count.new_tensor(len(count)) if count.ndim else count
            summed = torch.where(imitated, log_prob, 0.0).sum()
            losses["loss_sft"] = -self.sft_coef * summed / count.clamp(min=1)
            log_prob, entropy = (torch.where(mask, x, 0.0) for x in (log_prob, entropy))

        loss, clipped = self.objective(
            log_prob,
            rows.get("sample_log_prob"),
            rows.get("advantage"),
            mask,
            clip_epsilon=self.clip_epsilon,
            **self._extras(rows),
        )
        check_shape("the loss that objective returns", loss, mask.shape)
        for factor in ("correction", "weight"):
            if factor in rows:
                loss = loss * torch.where(mask, rows[factor], 0.0)
        losses["loss_objective"] = reduce(loss)
        tokens |= {"log_prob": log_prob, "entropy": entropy, "clipped": clipped}
        if divergence is not None and self.distillation is not None:
            tokens["divergence"] = divergence
            losses["loss_distill"] = self.distillation.coef * reduce(divergence)
        if self.kl_coef is not None and "ref_log_probs" in rows:
            ref = torch.where(mask, rows["ref_log_probs"], 0.0)
            old = rows.get("sample_log_prob")
            old = None if old is None else torch.where(mask, old, 0.0)
            tokens["kl"] = kl_estimate(log_prob, ref, self.kl_kind, old_log_prob=old)
            losses["loss_kl"] = kl_coefficient(self.kl_coef) * reduce(tokens["kl"])
        if self.entropy_coef is not None:
            losses["loss_entropy"] = -entropy_coefficient(self.entropy_coef) * reduce(entropy)
        if self.value_loss is not None:
            value = row_values(self.value_loss.critic, ids, attended, trained, **given)
            error, tokens["value_clipped"] = value_loss(
                value,
                rows["value_target"],
                mask,
                old_value=rows.get("value"),
                clip_value=self.value_loss.clip_value,
            )
            tokens["value"] = value
            losses["loss_critic"] = self.value_loss.coef * reduce(error)
        return losses, tokens

    def _parts(self, whole: _Rows, total: float | Tensor) -> list[Tensor]:
        """Cut rows into forward passes: indices of rows ``[n]`` each."""
        passes, critic = self.passes, self.critic_network
        models = [self.actor_network, *([] if critic is None else [critic])]
        one_pass = passes.dtype is torch.float16 or any(map(exchanges_gradients, models))
        if one_pass or any(map(has_gradient_hooks, self.parameters())) or not len(whole.mask):
            return []
        tokens, attended, _, _ = whole.on_host
        lengths = attended.sum(-1)
        if passes.micro_batch_tokens == "auto":
            limit = self._find_limit(whole, total, lengths, models)
            passes = replace(passes, micro_batch_tokens=limit)
        if passes.packed == "tree":
            return cut_trees(tokens, attended, passes, tree_width(self.actor_network))
        return cut(lengths, passes)

    def _find_limit(
        self, whole: _Rows, total: float | Tensor, lengths: Tensor, models: list[nn.Module]
    ) -> int | None:
        """Find the number of tokens whose activations fit into memory; measured once, when needed."""
        if self._tokens_in_memory is None:
            budget = activation_budget(whole.mask.device)
            weights = sum(p.nbytes for model in models for p in model.parameters())
            if lengths.numel() * int(lengths.max()) * weights <= budget:
                return None  # A token's activations take less than the weights.
            longest = lengths.argmax(keepdim=True)
            kept = kept_bytes(lambda: self._losses(whole.at(longest), total), models)
            self._tokens_in_memory = max(1, int(lengths[longest]) * budget // max(1, kept))
        return self._tokens_in_memory

    def _count_idle(self, whole: _Rows, trained: list[nn.Parameter]) -> None:
        """Count an update that follows regularisers alone."""
        regularised = self.kl_coef is not None and not self._ref_is_optional
        if self.entropy_coef is not None:
            regularised |= entropy_coefficient(self.entropy_coef) != 0
        watched = self.max_idle_updates is not None and regularised and "advantage" in whole.entries
        if watched and not exchanges_gradients(self.actor_network):
            weight = whole.entries["advantage"]
            for factor in ("correction", "weight"):
                weight = weight * whole.entries.get(factor, 1.0)
            idle = not bool((whole.mask & (weight != 0)).any())
            self._idle.count(idle, trained, self.max_idle_updates)

    def _extras(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Select the optional entries that the objective takes."""
        names = ("sampler_log_prob", "turns")
        return {name: rows[name] for name in names if name in rows and takes(self.objective, name)}


@dataclass(frozen=True)
class _Rows:
    """What the losses of rows are computed from."""

    entries: dict[str, Tensor]
    """Entries ``[N, ...]`` by their names in ``set_keys``; ``"correction"``: off-policy weights."""
    mask: Tensor
    """``[N, S]`` bool, the trained tokens."""
    on_host: OnHost
    images: RowImages | None

    def at(self, index: Tensor) -> _Rows:
        """Select rows; ``index`` is on the CPU."""
        there = sent(index, self.mask.device)
        entries = {name: entry[there] for name, entry in self.entries.items()}
        images = self.images
        if images is not None:
            own = sent(index, images.first.device)
            images = replace(images, first=images.first[own], count=images.count[own])
        on_host = tuple(x[index] for x in self.on_host)
        return _Rows(entries, self.mask[there], on_host, images)


def _freeze_vision(actor: nn.Module, critic: nn.Module | None) -> None:
    """Stop training the vision towers, of which the actor must have one."""
    towers = vision_towers(actor)
    if not towers:
        raise ValueError(
            "freeze_vision=True needs an actor with a vision tower, a submodule 'visual' or "
            f"'vision_tower', got {type(actor).__name__}; leave it out for a model of text."
        )
    if critic is not None:
        towers += vision_towers(critic)
    wrapped = [m for m in (actor, critic) if isinstance(m, DistributedDataParallel)]
    late = [m for m in wrapped if not m.find_unused_parameters]
    if any(p.requires_grad for m in late for tower in vision_towers(m) for p in tower.parameters()):
        raise ValueError(
            "freeze_vision=True comes too late for a model that DistributedDataParallel wraps, which "
            "would wait for gradients of the vision tower and exchange none: freeze it before wrapping "
            "the model, model.model.visual.requires_grad_(False) (vision_tower in LLaVA)."
        )
    for tower in towers:
        tower.requires_grad_(False)
