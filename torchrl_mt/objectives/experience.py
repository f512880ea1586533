"""Training rows completed for the loss: log-probabilities, values, rewards, KL, advantages.

Statistics are taken over the whole batch, by episode, group and turn id. The order of the rows and
the cuts of a forked episode change nothing. A failed call leaves the rows unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, distributed, nn

from torchrl_mt.checks import (
    check_choice,
    check_is_batch,
    find_functions,
)
from torchrl_mt.devices import sent
from torchrl_mt.objectives.credit import Advantage, AdvantageKind, Credit
from torchrl_mt.objectives.filters import FILTERS, is_filter, reads_entropy, reads_group
from torchrl_mt.objectives.functional import kl_estimate
from torchrl_mt.objectives.functional.kl import KLKind
from torchrl_mt.objectives.kl import (
    KLCoefficient,
    kl_coefficient,
    kl_state,
    load_kl_state,
    update_kl_coefficient,
)
from torchrl_mt.objectives.metrics import (
    episodes_per_group,
    groups_without_spread,
    merge_summaries,
    sampled_tokens,
    summary,
)
from torchrl_mt.objectives.process import Process, process_rows
from torchrl_mt.objectives.rewards.mix import OWN, Recipe, RewardMix
from torchrl_mt.objectives.rows.all_ranks import AllRanks
from torchrl_mt.objectives.rows.batch import RowBatch, read_batch
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import MODEL_FAULT, check_temperature
from torchrl_mt.objectives.rows.sources import rows_of
from torchrl_mt.objectives.rows.writing import check_writable, undone_on_failure
from torchrl_mt.objectives.warnings import Warnings
from torchrl_mt.ranks import call_on_all, check_process_group
from torchrl_mt.scoring.base_policy import base_policy
from torchrl_mt.scoring.forward import scoring_mode, unwrapped
from torchrl_mt.scoring.log_probs import causal_lm, row_scores, scored_tokens
from torchrl_mt.scoring.packing_check import tree_width
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_trees import tree_ratio
from torchrl_mt.scoring.row_vision import image_keys
from torchrl_mt.scoring.served_teacher import TokenScorer, check_teacher, served_log_probs
from torchrl_mt.scoring.values import check_critic, row_values

_logger = logging.getLogger("torchrl_mt")

OldLogProbs = Literal["sampler", "actor"]
"""The policy in the importance ratio's denominator."""

_NO_ENTRIES = ("end_value", "gradient_norm")
"""Names of scores that are not written into rows."""
_SAMPLER_FAULT = (
    "the sampler is at fault, or a workflow returned no 'logprobs'; score the rows again with "
    "old_log_probs='actor', or drop the episode."
)


class ExperienceMaker(TensorDictModuleBase):
    """Complete training rows with old and reference log-probabilities, KL, advantages and returns.

    Call it once with whole groups, before rows are split: statistics are taken over the rows of a call.
    Complete rows once: weights that an earlier maker wrote change the loss. :doc:`/data_format` lists
    what is read and written, :doc:`/learning` the advantages, rewards and metrics.

    Args:
        actor: A causal language model or a ``TransformersWrapper`` around one. Rows with images need
            vision-language models of one family (:doc:`/images`).
        advantage: The kind of advantage by name, or :class:`~torchrl_mt.objectives.Advantage` with its
            settings; or a callable from the rows, which have all other outputs already, to ``[N, S]``.
        reward: One or more reward sources, by label if wanted, or a
            :class:`~torchrl_mt.objectives.RewardMix`. Default: the episodes' own rewards.
        gamma: Discount in [0, 1]: per sampled token with ``"gae"`` and ``"bilevel_gae"``, else per turn.
            ``None`` means 1, or the discount already in ``("rewards", "to_go")``.
        ref: The reference policy, of the same kinds as ``actor``; without it there is no KL. ``"base"``
            is the base model of the actor's PEFT adapters: the actor with its adapters off.
        teacher: A language model of the actor's tokenizer, or a ``CompletionsEngine`` for one that
            servers hold, for ``advantage="distill"``; writes ``("log_probs", "teacher")``. An engine
            scores text alone, at temperature 1.
        critic: A value network for :func:`~torchrl_mt.objectives.row_values`; writes ``"values"``.
        process: What does not count, or counts less: ``"dynamic_sampling"``, ``"clip_filter"``,
            ``"top_entropy"``, a function from rows to rows, or several.
        kl_coef: Subtract ``kl_coef`` times the KL from the reward of each sampled token; needs ``ref``.
            At 0 the KL is only written. A TorchRL controller is updated with each batch's mean KL per
            token, for the next batch.
        kl_kind: Estimator of ``"kl"``, from the old policy to the reference (:doc:`/credit`).
        old_log_probs: ``"sampler"`` takes ``("log_probs", "full")``; ``"actor"`` scores the rows again
            under the current actor.
        passes: How rows are cut into forward passes of all models, and the sampling temperature. With
            ``with_entropy``, the actor's entropy at each sampled token is written as ``"entropy"``.
        process_group: All ranks call together, each with its own rows or none, and statistics are those
            of all ranks' rows (:ref:`several-ranks`).

    Raises:
        ValueError: If an argument is unknown or out of range, or needs another that is missing.
        TypeError: If ``actor`` or ``ref`` is no language model, a reward source has the wrong type, or
            ``process_group`` is none.

    Examples:
        >>> maker = ExperienceMaker(actor, advantage="grpo")  # doctest: +SKIP
        >>> rows = maker(MergeTurns()(batch))  # doctest: +SKIP
        >>> losses = MultiTurnLoss(actor)(rows)  # doctest: +SKIP
    """

    _AcceptedKeys = ExperienceKeys

    def __init__(
        self,
        actor: nn.Module,
        *,
        advantage: AdvantageKind | Advantage | Callable[[TensorDictBase], Tensor] = "turn",
        reward: Recipe | RewardMix | None = None,
        gamma: float | None = None,
        ref: nn.Module | Literal["base"] | None = None,
        teacher: nn.Module | TokenScorer | None = None,
        critic: nn.Module | None = None,
        process: str | Process | Sequence[str | Process] = (),
        kl_coef: KLCoefficient = 0.0,
        kl_kind: KLKind = "k1",
        old_log_probs: OldLogProbs = "sampler",
        passes: Passes | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        model = causal_lm(actor)
        coefficient = kl_coefficient(kl_coef)
        if isinstance(ref, str):
            check_choice("ref", ref, ("base",))
            with base_policy(actor):
                pass  # Refuses what has no base.
        elif ref is not None:
            inner = unwrapped(causal_lm(ref))
            if any(module is inner for module in model.modules()):
                _logger.warning(
                    "ref is the actor itself, so the KL stays near 0 however much the actor learns. "
                    "Give a copy: copy.deepcopy(actor). For the base of a PEFT model, give ref='base'."
                )
        elif coefficient:
            raise ValueError(f"kl_coef needs a reference policy, got {coefficient} with ref=None.")
        if teacher is not None:
            check_teacher(teacher, actor, Passes.checked(passes).temperature)
        if critic is not None:
            check_critic(critic)
        self.advantage = advantage if isinstance(advantage, Advantage) else Advantage(advantage)
        if isinstance(self.advantage.kind, nn.Module):
            self.advantage_model = self.advantage.kind
        self.gamma = gamma
        if self.credit.advantage.needs_critic and critic is None:
            raise ValueError(f"advantage={self.advantage.kind!r} needs a critic, got critic=None.")
        if self.advantage.kind == "distill" and teacher is None:
            raise ValueError("advantage='distill' needs a teacher, got teacher=None.")
        check_choice("kl_kind", kl_kind, get_args(KLKind))
        check_choice("old_log_probs", old_log_probs, get_args(OldLogProbs))
        self.passes = Passes.checked(passes)
        self.actor = actor
        self.ref = ref
        self.teacher = teacher
        self.critic = critic
        self.process = find_functions("process", process, FILTERS)
        check_process_group(process_group)
        self.process_group = process_group
        self.own_reward = reward is None and all(map(is_filter, self.process))
        """Whether the rewards are those that the rows came with."""
        if not isinstance(reward, RewardMix):
            reward = RewardMix(OWN if reward is None else reward, passes=self.passes)
        self.reward = reward
        if self.advantage.kind == "gdpo":
            filters = all(map(is_filter, self.process))
            if coefficient or reward.transform is not None or not filters:
                raise ValueError(
                    "advantage='gdpo' compares the sources' rewards one by one: it needs kl_coef=0 "
                    "(put the KL in the loss), no RewardMix(transform=...), and no functions in "
                    "process but filters, because all these change the sum."
                )
        self.kl_coef = kl_coef
        self.kl_kind: KLKind = kl_kind
        self.old_log_probs = old_log_probs
        self.metrics: dict[str, float] = {}
        """Numbers of the last call: about the rewards, the KL, the groups and the sampled tokens."""
        self._warnings = Warnings()
        self.tensor_keys = ExperienceKeys()
        self._set_in_and_out_keys()

    @property
    def credit(self) -> Credit:
        """Credit assignment with the current attributes: the discount may change between calls."""
        return Credit(self.advantage, self.gamma)

    @property
    def reads_group(self) -> bool:
        """Whether the advantage or a filter needs the rows' groups."""
        return self.advantage.reads_group or any(map(reads_group, self.process))

    @property
    def reads_entropy(self) -> bool:
        """Whether a filter needs entropies that this maker does not write."""
        return not self.passes.with_entropy and any(map(reads_entropy, self.process))

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        """Change where entries are read and written.

        Functions of rows (reward sources, filters, an advantage) still find them under the default
        keys.

        Args:
            **kwargs: Names of ``tensor_keys`` with their keys; ``None`` restores the default.

        Raises:
            ValueError: If a name is unknown, or one key equals or contains another.
            TypeError: If a key is neither a string nor a tuple of strings.
        """
        self.tensor_keys.change(kwargs)
        self._set_in_and_out_keys()

    def get_extra_state(self) -> dict[str, float | None]:
        """Return the adaptive KL coefficient for :meth:`state_dict`."""
        return kl_state(self.kl_coef)

    def set_extra_state(self, state: Mapping[str, float | None]) -> None:
        """Restore an adaptive KL coefficient; a fixed one does not change."""
        load_kl_state(self.kl_coef, state)

    def _set_in_and_out_keys(self) -> None:
        """List the entries that are read and written."""
        sampler = self.old_log_probs == "sampler"
        read = ["action", "attention_mask", "assistant_mask", "turns", "episode"]
        read += ["sampler_log_prob"] * sampler + ["reward"] * self.reward.reads_own
        read += ["truncated"] * self.advantage.bootstrap
        read += ["group"] * self.reads_group + ["entropy"] * self.reads_entropy
        read += ["label"] * self.reward.needs_label
        write = ["sample_log_prob"] + ["ref_log_probs", "kl"] * (self.ref is not None)
        write += ["teacher_log_probs"] * (self.teacher is not None)
        write += ["entropy"] * self.passes.with_entropy + ["value"] * (self.critic is not None)
        write += ["shaped_reward"] * (not self.own_reward) + ["advantage", "value_target"]
        write += ["weight"] * any(map(is_filter, self.process))
        self.in_keys = [getattr(self.tensor_keys, name) for name in read]
        may = ["episode_index", "fork", "valid", "sampling_temperature", "versions"]
        may += ["label"] * (self.reward.by_label and not self.reward.needs_label)
        may += ["turn_return"] * (self.own_reward and self.advantage.kind == "turn")
        self.optional_in_keys = [getattr(self.tensor_keys, name) for name in may]
        self.optional_in_keys += image_keys(self.actor, self.ref, self.teacher, self.critic)
        self.out_keys = [getattr(self.tensor_keys, name) for name in write]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the outputs into the rows.

        ``"returns"`` is each turn's return-to-go over its whole episode, with ``gamma`` per turn; with a
        ``"gae"`` kind it is the critic's target. A truncated episode counts like a terminated one unless
        ``Advantage(bootstrap=True)``. ``process`` is applied after rewards and before advantages. An
        episode to which no reward source applies (``None``) is rejected: its rows get a false
        ``"valid"``.

        No gradient flows. The models' modes are restored, and so is the random state unless other
        threads run.

        Args:
            tensordict: Rows ``[N]`` of whole groups: statistics are taken over these rows, and over
                those of the other ranks of ``process_group``. All rows of an episode must be on one
                rank.

        Returns:
            The same rows, completed. With ``process``, new ones, those that it left; the given rows stay
            as they were.

        Raises:
            TypeError: If the rows are no TensorDict.
            KeyError: If the rows lack an entry.
            ValueError: If entries do not fit together; a row is a duplicate, or its ``("sampling",
                "temperature")`` ``[N]`` is not that of ``passes``; copies of an episode cannot be told
                apart; no token was sampled; groups are compared but every episode is alone in its
                group; a reward, log-probability, value or advantage that counts is not finite; a reward
                source's result is invalid; or the rows are locked or an output's place is taken. The
                rows are then unchanged. Likewise if a function of ``process`` does what it may not.
            RewardError: If a reward server fails. The rows are then unchanged: calling again is safe.
                So they are if the server of an engine as ``teacher`` fails (``CompletionsError``).
            RuntimeError: If this happens on another rank of ``process_group``.
        """
        check_is_batch("rows", tensordict)
        group = self.process_group
        ranks = None if group is None else AllRanks.of(lambda: self._read(tensordict), group)
        batch = self._read(tensordict) if ranks is None else ranks.mine
        whole = batch if ranks is None else ranks.batch
        may_write = [*self.out_keys, self.tensor_keys.valid]
        with undone_on_failure(tensordict, may_write, self.reward.transform):
            self._check(whole)
            reward, metrics, parts = self._rewards_of_all(batch)
            if ranks is None:
                scores = self._scores(batch, reward) | parts
            else:
                scores = ranks.gather(lambda: self._scores(batch, reward) | parts)
            reward, rejects = scores.pop("reward", None), False
            parts = {name: scores.pop(name) for name in parts}
            if reward is not None:
                unscored = reward.isnan().any(-1)
                if rejects := bool(unscored.any()):
                    whole = whole.reject(unscored)
                    reward = torch.where(unscored.unsqueeze(-1), 0.0, reward)
                # After the models: running statistics must not count a batch whose scoring failed.
                given = reward, whole.episodes, whole.valid
                reward = self.reward.transformed(*given, device=whole.device)
            rows, number = batch.rows, None
            if self.process:
                said = {name: scores[name] for name in scores if name not in _NO_ENTRIES}
                left = process_rows(self.process, whole, said, reward)
                whole, number, reward = left.batch, left.number, left.reward
                scores = {name: value[number] for name, value in scores.items()}
                parts = {name: value[number] for name, value in parts.items()}
                metrics = metrics | left.metrics
                rows = whole.rows
                if ranks is not None:
                    rows = ranks.own_rows(number)
                    for key in left.written:
                        rows.set(key, ranks.own(whole.rows.get(key), number))
            out, found = self._outputs(whole, scores, reward, parts)
            if rejects:
                out["valid"] = whole.valid
            for name, value in out.items():
                if ranks is not None:
                    value = ranks.own(value, number)
                rows.set(getattr(self.tensor_keys, name), sent(value, batch.device))
            if "kl" in out:
                update_kl_coefficient(self.kl_coef, out["kl"], whole.scored)
        self.metrics = metrics | found
        if self.passes.packed == "tree":
            self.metrics["tree/ratio"] = tree_ratio(*batch.inputs[:2], tree_width(self.actor))
        return rows

    def rows_of(self, batch: Any) -> TensorDictBase:
        """Get rows that the maker may write to; tensors are shared, and the batch is not changed.

        Args:
            batch: Rows ``[N]``; or whole episodes in TED, flat ``[ΣT]``, which ``MergeTurns()`` makes
                rows of; or a collector or replay buffer of either, whose next batch is taken.

        Raises:
            TypeError: If the batch is none of these.
            ValueError: If there is no next batch.
        """
        return rows_of(batch, self.tensor_keys.action)

    def _read(self, rows: TensorDictBase) -> RowBatch:
        """Read and check the rows of this process."""
        batch = read_batch(rows, self.tensor_keys, may_lack_tokens=self.process_group is not None)
        # Of the rows of this process: those of all ranks have no images.
        self.credit.check_states(batch)
        key = batch.keys.sampling_temperature
        sampled = batch.on_host.get(key, None)
        check_temperature(key, sampled, self.passes.temperature, batch.counted.any(-1))
        if not isinstance(self.teacher, nn.Module | None) and batch.images is not None:
            raise ValueError(
                "an engine as teacher scores text alone, but the rows have images: give its model."
            )
        if not self.process:
            check_writable(rows, self.out_keys)
        return batch

    def _check(self, batch: RowBatch) -> None:
        """Refuse rows that lack what the advantage and the filters compare."""
        self.credit.check(batch)
        if self.reads_entropy:
            batch.read("entropy")
        if self.reads_group:
            batch.group()

    def _rewards_of_all(
        self, batch: RowBatch
    ) -> tuple[Tensor | None, dict[str, float], dict[str, Tensor]]:
        """Reward the rows of this process; the metrics are those of all ranks."""
        if self.process_group is None:
            return self._rewards(batch)
        made: list[tuple[Tensor | None, dict[str, Tensor]]] = []

        def ask() -> dict[str, float]:
            reward, metrics, parts = self._rewards(batch)
            made.append((reward, parts))
            return metrics

        # Before the models: a rank whose reward server fails must not leave the others waiting.
        every = call_on_all(ask, self.process_group)
        reward, parts = made[0]
        return reward, merge_summaries(every), parts

    def _rewards(
        self, batch: RowBatch
    ) -> tuple[Tensor | None, dict[str, float], dict[str, Tensor]]:
        """Ask the reward sources, after a check that costs less; ``None`` for the rows' own returns.

        The last result is what the rewards are made of, if the advantage reads it.
        """
        if self.old_log_probs == "sampler":
            self._sampler_log_probs(batch)
        # The rows' own returns stand for their rewards.
        if self.own_reward and self.advantage.kind == "turn" and batch.has("turn_return"):
            if self.gamma is not None:
                self._warnings.of_gamma(batch, self.gamma)
            return None, {}, {}
        given = batch.on_host, batch.episodes
        options: dict[str, Any] = {"valid": batch.valid, "keys": self.tensor_keys}
        options["shown"] = batch.with_default_keys()
        if self.advantage.kind == "gdpo":
            return self.reward.separately(*given, **options)
        reward, metrics = self.reward(*given, **options)
        return reward, metrics, {}

    def _sampler_log_probs(self, batch: RowBatch) -> Tensor:
        """Read and check the sampler's log-probabilities, ``[N, S]`` float32."""
        log_prob = batch.read("sampler_log_prob")
        log_prob = batch.finite_float("sampler_log_prob", log_prob, batch.counted, _SAMPLER_FAULT)
        batch.check_log_probs("sampler_log_prob", log_prob)
        return log_prob

    def _scores(self, batch: RowBatch, reward: Tensor | None) -> dict[str, Tensor]:
        """Score rows with the models: results by key name, with the ``"reward"`` if there is one."""
        out: dict[str, Tensor] = {} if reward is None else {"reward": reward}

        def keep(
            name: str, value: Tensor | None, where: Tensor = batch.scored, of: str | None = None
        ) -> None:
            if value is not None:
                out[name] = batch.finite_float(of or name, value, where, MODEL_FAULT)

        if self.old_log_probs == "sampler":
            old = batch.read("sampler_log_prob")
            out["sample_log_prob"] = self._sampler_log_probs(batch)
        with_norms = self.advantage.needs_norms
        if self.old_log_probs == "actor" or self.passes.with_entropy or with_norms:
            log_prob, entropy, norm = self._score(self.actor, batch, self.passes, with_norms)
            if self.old_log_probs == "actor":
                old = log_prob
                keep("sample_log_prob", old)
            keep("entropy", entropy)
            keep("gradient_norm", norm, of="sample_log_prob")
        if self.ref is not None:
            ref = self._score_other(self.ref, batch)
            keep("ref_log_probs", ref)
            # From the models' own values: a 0 written for NaN is no log-probability.
            kl = kl_estimate(old.float(), ref, self.kl_kind, old_log_prob=old)
            kl = torch.where(scored_tokens(batch.attention_mask, batch.mask), kl, 0.0)
            out["kl"] = batch.finite_float(
                "kl", kl, batch.scored, "the policies are too far apart."
            )
        if self.teacher is not None:
            keep("teacher_log_probs", self._score_other(self.teacher, batch))
        if self.critic is not None:
            value, end = self._values(self.critic, batch)
            keep("value", value, batch.counted)
            keep("end_value", end, batch.counted, of="value")
        return out

    def _outputs(
        self,
        batch: RowBatch,
        scores: Mapping[str, Tensor],
        reward: Tensor | None,
        parts: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the outputs of scored rows, by key name, and the metrics."""
        out = {name: scores[name] for name in scores if name not in _NO_ENTRIES}
        metrics = sampled_tokens(batch)
        if self.reads_group:
            metrics |= episodes_per_group(batch)
        if "entropy" in out:
            metrics |= summary("entropy", out["entropy"][batch.scored])
        kl_reward = torch.zeros_like(batch.mask, dtype=torch.float32)
        if "kl" in out:
            coefficient = kl_coefficient(self.kl_coef)
            metrics |= summary("kl", out["kl"][batch.scored]) | {"kl_coef": coefficient}
            if coefficient:
                kl_reward = torch.where(batch.counted, -coefficient * out["kl"], 0.0)
        if (end := scores.get("end_value")) is not None:
            kl_reward = kl_reward + self.credit.end_discount * end
        if reward is not None and not self.own_reward:
            out["shaped_reward"] = reward
        if self.reads_group:
            if reward is not None and self.advantage.reads_group:
                outcome = self.credit.outcome(batch, reward)
            else:
                outcome = batch.episode_scores(reward)
            metrics |= groups_without_spread(batch, outcome)
        advantage, out["value_target"] = self.credit.advantage_and_return(
            batch, reward, kl_reward, {**scores, **out}, parts
        )
        out["advantage"] = advantage.unsqueeze(-1)
        weight = batch.rows.get(batch.keys.weight, None) if self.process else None
        if weight is not None:
            weight = weight.cpu()
            kept = (weight > 0).sum() / batch.counted.sum().clamp(min=1)
            metrics["kept_fraction"] = float(kept)
        self._warnings.of_advantage(batch, advantage, weight)
        if batch.has("versions"):
            self._warnings.of_versions(batch, self.actor)
        return out, metrics

    def _score(
        self, model: nn.Module, batch: RowBatch, passes: Passes, with_norms: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the log-probabilities of sampled tokens and, if asked, entropies and norms."""
        with scoring_mode(model):
            log_prob, entropy, _, norm = row_scores(
                model, *batch.inputs, images=batch.images, passes=passes, with_norms=with_norms
            )
        return log_prob, entropy, norm

    def _score_other(
        self, model: nn.Module | TokenScorer | Literal["base"], batch: RowBatch
    ) -> Tensor:
        """Compute the log-probabilities of sampled tokens under the reference or the teacher."""
        passes = replace(self.passes, with_entropy=False)
        if not isinstance(model, str | nn.Module):
            return served_log_probs(model, *batch.inputs)
        if not isinstance(model, str):
            return self._score(model, batch, passes)[0]
        with base_policy(self.actor):
            return self._score(self.actor, batch, passes)[0]

    def _values(self, critic: nn.Module, batch: RowBatch) -> tuple[Tensor, Tensor | None]:
        """Compute the values of the states in which tokens were sampled, ``[N, S]``.

        With ``bootstrap``, also those after truncated episodes, each on the episode's last token.
        """
        inputs: tuple[Tensor, ...] = batch.inputs
        ends = None
        if self.advantage.bootstrap:
            tokens, attended, mask = inputs
            last = batch.episodes.last_token
            ends = torch.zeros_like(mask)
            ends.view(-1)[last[last >= 0]] = True
            ends &= batch.truncated().unsqueeze(-1)
            # The value of a further token's state is that after the row.
            further = torch.zeros_like(tokens[:, :1]), attended.any(-1, True), ends.any(-1, True)
            inputs = tuple(torch.cat(pair, 1) for pair in zip(inputs, further, strict=True))
        with scoring_mode(critic):
            values = row_values(critic, *inputs, images=batch.images, passes=self.passes)
        if ends is None:
            return values, None
        return values[:, :-1], torch.where(ends, values[:, -1:], 0.0)
