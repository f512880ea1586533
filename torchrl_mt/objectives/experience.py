"""Training rows completed for the loss: log-probabilities, values, rewards, KL, advantages.

Statistics are taken over the whole batch, by episode, group and turn id. The order of the rows and
the cuts of a forked episode change nothing. A failed call leaves the rows unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, distributed, nn

from torchrl_mt.checks import (
    check_choice,
    check_is_batch,
    check_positive_finite,
    find_functions,
)
from torchrl_mt.objectives.credit import AdvantageKind, Credit
from torchrl_mt.objectives.filters import (
    FILTERS,
    Filter,
    filter_weight,
    reads_entropy,
    reads_group,
)
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
from torchrl_mt.objectives.process import Process, find_process, process_rows
from torchrl_mt.objectives.rewards.mix import OWN, Recipe, RewardMix, RewardTransform
from torchrl_mt.objectives.rows.all_ranks import AllRanks
from torchrl_mt.objectives.rows.batch import RowBatch, read_batch
from torchrl_mt.objectives.rows.keys import EPISODE_SCORE, ExperienceKeys
from torchrl_mt.objectives.rows.reading import MODEL_FAULT, check_temperature
from torchrl_mt.objectives.rows.sources import rows_of
from torchrl_mt.objectives.rows.writing import check_writable, undone_on_failure
from torchrl_mt.objectives.warnings import Warnings
from torchrl_mt.ranks import call_on_all, check_process_group
from torchrl_mt.scoring.base_policy import base_policy
from torchrl_mt.scoring.forward import scoring_mode, unwrapped
from torchrl_mt.scoring.log_probs import causal_lm, row_log_probs, scored_tokens
from torchrl_mt.scoring.passes import Passes, find_passes
from torchrl_mt.scoring.row_vision import image_keys
from torchrl_mt.scoring.values import check_critic, row_values

if TYPE_CHECKING:
    pass

_logger = logging.getLogger("torchrl_mt")

OldLogProbs = Literal["sampler", "actor"]
"""The policy in the importance ratio's denominator."""

_SAMPLER_FAULT = (
    "the sampler is at fault, or a workflow returned no 'logprobs'; score the rows again with "
    "old_log_probs='actor', or drop the episode."
)


class ExperienceMaker(TensorDictModuleBase):
    """Complete training rows with old and reference log-probabilities, KL, advantages and returns.

    Rows with the same ``"episode"`` and, where present, the same ``"episode_index"`` are one episode;
    the index tells apart copies within one :class:`~torchrl_mt.transforms.MergeTurns` call. Nothing
    is bootstrapped: a truncated episode counts like a terminated one.

    Advantages:

    - ``"turn"`` (default, no groups or critic): each turn's return less the mean of its turn id, divided
      by one standard deviation over the batch
      (:func:`~torchrl_mt.objectives.functional.turn_normalize`). If the rows hold returns,
      ``("rewards", "to_go")``, and you give no ``reward``, ``reward_transform`` and ``process``, these
      are used and ``gamma`` is ignored;
    - ``"grpo"``, ``"dr_grpo"``, ``"rloo"``, ``"reinforce_baseline"``, ``"max_rl"``, ``"opo"``: the
      return of the episode's first turn, compared within its group, on all sampled tokens of the
      episode (:func:`~torchrl_mt.objectives.functional.outcome_advantage`,
      :func:`~torchrl_mt.objectives.functional.group_advantage`). Each episode counts once. If there
      are several episodes, some group must have two: collect with a ``group_size``;
    - ``"batch"`` or ``"reinforce++"``: the same, compared with the whole batch;
    - ``"gae"``, ``"turn_gae"``, ``"bilevel_gae"``: with the critic, over the whole episode: its sampled
      tokens, its turns, or tokens within turns
      (:func:`~torchrl_mt.objectives.functional.episode_gae`,
      :func:`~torchrl_mt.objectives.functional.turn_gae`,
      :func:`~torchrl_mt.objectives.functional.bilevel_gae`);
    - a callable from the rows, which have all other outputs already, to ``[N, S]``.

    ``"returns"`` is each turn's return-to-go over its whole episode, with ``gamma`` per turn; with a
    ``"gae"`` kind it is the critic's target.

    Rows whose ``"valid"`` ``[N]`` bool is false are rejected. They go to no reward source, enter no
    statistic, and get reward and advantage 0; :class:`MultiTurnLoss` leaves them out. Values that are
    not finite on them become 0, as do all values on tokens that were not sampled.

    Rows with images, prepared by ``VisionInputs``, need vision-language models of one family.
    The ``optional_in_keys`` are used where the rows have them. Complete rows once: what an earlier
    maker wrote, such as weights, stays and changes the loss.

    Reward sources, ``reward_transform``, ``advantage`` and filters answer with tensors on any device, or
    with lists of numbers: answers are moved to the rows' device.

    No gradient flows. The models' modes are restored, and so is the random state unless other threads
    run. After a call, ``metrics`` holds numbers about the rewards, the KL and its coefficient, the
    entropy, the groups and the sampled tokens.

    Args:
        actor: A causal language model or a ``TransformersWrapper`` around one.
        ref: The reference policy, of the same kinds; without it there is no KL. ``"base"`` is the base
            model of the actor's PEFT adapters, without a second copy: the actor with its adapters off.
        critic: A value network for :func:`~torchrl_mt.objectives.row_values`; writes ``"values"``.
        reward: One or more reward sources, by label if wanted
            (:class:`~torchrl_mt.objectives.RewardMix`). Default: the episodes' own rewards. Without
            recipes by label, metrics call all rows ``"default"``.
        reward_transform: ``(reward, mask) -> reward``, all ``[N, S]``; the mask says where rewards lie
            (:meth:`~torchrl_mt.objectives.RewardMix.transformed`). For example a
            :class:`~torchrl_mt.objectives.functional.RewardNormalizer`, or
            ``lambda reward, mask: clip_reward(reward, -1.0, 1.0)[0]``. If the call fails later, the
            buffers of a module (given itself or as a bound method) are restored; other state is not.
        process: One or more functions from rows to rows, called after the reward sources and before all
            else. They get a copy of the rows under the default keys, with the rewards ``("rewards",
            "shaped")`` ``[N, S]`` and their sum over each row's episode ``("rewards", "episode")``
            ``[N]``. They may change the rewards, reject rows (``"valid"``), weight them (``("weights",
            "full")``, ``[N]`` or ``[N, S]``, which multiplies that of the filters), drop whole episodes
            and add entries. The maker then returns new rows, and leaves those that it was given.
        advantage: See above.
        gamma: Discount in [0, 1]: per sampled token with ``"gae"`` and ``"bilevel_gae"``, else per
            turn. ``None`` means 1, or the discount already in ``("rewards", "to_go")``.
        lmbda: Trace decay in [0, 1]: per sampled token with ``"gae"`` and ``"bilevel_gae"``, per turn
            with ``"turn_gae"``. Below 1, late rewards count less as long as the critic's values are
            wrong; a new critic's are 0.
        turn_gamma: Discount per turn of ``"bilevel_gae"``, in [0, 1].
        turn_lmbda: Trace decay per turn of ``"bilevel_gae"``, in [0, 1].
        lone_value: Advantage of an episode alone in its group, for the kinds that compare groups.
        whiten: Normalise the advantages over all sampled tokens of the batch. A row's first token is
            never trained: it does not count and gets 0.
        filters: Writes ``("weights", "full")`` ``[N, S]``, which :class:`MultiTurnLoss` multiplies
            the objective by: ``"dynamic_sampling"`` (0 in groups whose episodes all score the same),
            ``"clip_filter"`` (the same, with the other groups weighted up), ``"top_entropy"`` (only the
            least certain tokens; needs ``with_entropy``), a function
            (:data:`~torchrl_mt.objectives.filters.Filter`, for example
            ``partial(top_entropy, rho=0.1)``), or several, whose weights multiply. The loss's divisor
            does not change. To save computing such rows and leave them out of the divisor, drop them:
            ``rows = rows[rows["weights", "full"].any(-1)]``.
        kl_coef: Subtract ``kl_coef`` times the KL from the reward of each sampled token; needs
            ``ref``. At 0 the KL is only written. A TorchRL KL controller is updated with each batch's
            mean KL per token, for the next batch. The coefficient of an ``AdaptiveKLController`` is
            saved in ``state_dict()``; numbers and constant controllers are neither saved nor restored.
        kl_kind: Estimator of ``"kl"``, from the old policy to the reference. As a reward, k1 is
            unbiased, and so is its policy gradient
            (http://joschu.net/blog/kl-approx.html; https://arxiv.org/abs/2203.02155, eq. 2).
        old_log_probs: ``"sampler"`` takes ``("log_probs", "full")``; ``"actor"`` scores the rows again
            under the current actor.
        with_entropy: Whether to write the actor's entropy at each sampled token as ``"entropy"``.
        temperature: The sampling temperature. Rows with another ``("sampling", "temperature")``
            ``[N]`` are refused.
        passes: How rows are cut into forward passes of all models.
        process_group: The rows are those of this rank, perhaps none, and all ranks call together:
            advantages, whitening, filters, metrics, ``reward_transform`` and the KL controller see the
            rows of all ranks, as in one process. Models and reward sources still get this rank's alone.
            Functions of rows get all ranks' tensors, without images and Python objects. An episode's
            rows must be on one rank. Not with ``process``.
        **keywords: Fields of :class:`~torchrl_mt.objectives.Passes` one by one instead: ``packed=True``.

    Raises:
        ValueError: If an argument is unknown or out of range, or needs another that is missing.
        TypeError: If ``actor`` or ``ref`` is no language model, a reward source has the wrong type, or
            both ``passes`` and keywords are given, or ``process_group`` is none.

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

    _AcceptedKeys = ExperienceKeys

    def __init__(
        self,
        actor: nn.Module,
        *,
        ref: nn.Module | Literal["base"] | None = None,
        critic: nn.Module | None = None,
        reward: Recipe | None = None,
        reward_transform: RewardTransform | None = None,
        process: Process | Sequence[Process] = (),
        advantage: AdvantageKind | Callable[[TensorDictBase], Tensor] = "turn",
        gamma: float | None = None,
        lmbda: float = 0.95,
        turn_gamma: float = 1.0,
        turn_lmbda: float = 0.95,
        lone_value: float = 0.0,
        whiten: bool = False,
        filters: str | Filter | Sequence[str | Filter] = (),
        kl_coef: KLCoefficient = 0.0,
        kl_kind: KLKind = "k1",
        old_log_probs: OldLogProbs = "sampler",
        with_entropy: bool = False,
        temperature: float = 1.0,
        passes: Passes | None = None,
        process_group: distributed.ProcessGroup | None = None,
        **keywords: Any,
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
        if critic is not None:
            check_critic(critic)
        self.advantage = advantage
        self.gamma = gamma
        self.lmbda = lmbda
        self.turn_gamma = turn_gamma
        self.turn_lmbda = turn_lmbda
        self.lone_value = lone_value
        self.whiten = whiten
        if self.credit.needs_critic and critic is None:
            raise ValueError(f"advantage={advantage!r} needs a critic, got critic=None.")
        check_positive_finite("temperature", temperature)
        check_choice("kl_kind", kl_kind, get_args(KLKind))
        check_choice("old_log_probs", old_log_probs, get_args(OldLogProbs))
        self.passes = find_passes(passes, keywords, caller=type(self))
        self.actor = actor
        self.ref = ref
        self.critic = critic
        self.process = find_process(process)
        check_process_group(process_group)
        if self.process and process_group is not None:
            raise ValueError(
                "process and process_group cannot both be given: a function from rows to rows sees the "
                "rows of its own rank alone. Use reward_transform, filters or an advantage of your own, "
                "which see those of all ranks, or process the rows before they are divided."
            )
        self.process_group = process_group
        self.own_reward = reward is None and reward_transform is None and not self.process
        self.reward = RewardMix(
            OWN if reward is None else reward, transform=reward_transform, passes=self.passes
        )
        self.filters = find_functions("filters", filters, FILTERS)
        self.kl_coef = kl_coef
        self.kl_kind: KLKind = kl_kind
        self.old_log_probs = old_log_probs
        self.with_entropy = with_entropy
        self.temperature = temperature
        self.metrics: dict[str, float] = {}
        self._warnings = Warnings()
        self.tensor_keys = ExperienceKeys()
        self._set_in_and_out_keys()

    @property
    def credit(self) -> Credit:
        """Credit assignment with the current attributes: discounts may change between calls."""
        return Credit(**{field.name: getattr(self, field.name) for field in fields(Credit)})

    @property
    def reads_group(self) -> bool:
        """Whether the advantage or a filter needs the rows' groups."""
        return self.credit.reads_group or any(map(reads_group, self.filters))

    @property
    def reads_entropy(self) -> bool:
        """Whether a filter needs entropies that this maker does not write."""
        return not self.with_entropy and any(map(reads_entropy, self.filters))

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
        read += ["group"] * self.reads_group + ["entropy"] * self.reads_entropy
        read += ["label"] * self.reward.needs_label
        write = ["sample_log_prob"] + ["ref_log_probs", "kl"] * (self.ref is not None)
        write += ["entropy"] * self.with_entropy + ["value"] * (self.critic is not None)
        write += ["shaped_reward"] * (not self.own_reward) + ["advantage", "value_target"]
        write += ["weight"] * bool(self.filters)
        self.in_keys = [getattr(self.tensor_keys, name) for name in read]
        may = ["episode_index", "fork", "valid", "sampling_temperature", "versions"]
        may += ["label"] * (self.reward.by_label and not self.reward.needs_label)
        may += ["turn_return"] * (self.own_reward and self.credit.advantage == "turn")
        self.optional_in_keys = [getattr(self.tensor_keys, name) for name in may]
        self.optional_in_keys += image_keys(
            self.actor, None if isinstance(self.ref, str) else self.ref, self.critic
        )
        self.out_keys = [getattr(self.tensor_keys, name) for name in write]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the outputs into the rows.

        Args:
            tensordict: Rows ``[N]`` of whole groups: statistics are taken over these rows, and over
                those of the other ranks of ``process_group``.

        Returns:
            The same rows, completed; with ``process`` new ones, those that it left.

        Raises:
            TypeError: If the rows are no TensorDict.
            KeyError: If the rows lack an entry.
            ValueError: If entries do not fit together; a row is a duplicate or was sampled at another
                temperature; copies of an episode cannot be told apart; no token was sampled; groups
                are compared but every episode is alone in its group; a reward, log-probability, value
                or advantage that counts is not finite; a reward source's answer is invalid; or the
                rows are locked or an output's place is taken. The rows are then unchanged.
                Likewise if a function of ``process`` does what it may not.
            RewardError: If a reward server fails. The rows are then unchanged: calling again is safe.
            RuntimeError: If this happens on another rank of ``process_group``.
        """
        check_is_batch("rows", tensordict)
        group = self.process_group
        ranks = None if group is None else AllRanks.of(lambda: self._read(tensordict), group)
        batch = self._read(tensordict) if ranks is None else ranks.mine
        whole = batch if ranks is None else ranks.batch
        with undone_on_failure(tensordict, self.out_keys, self.reward.transform):
            self._check(whole)
            reward, metrics = self._rewards_of_all(batch)
            weight = None
            if self.process:
                assert reward is not None
                left = process_rows(self.process, batch, reward)
                batch = whole = read_batch(left.rows, self.tensor_keys)
                reward = torch.where(batch.counted, left.reward, 0.0)
                weight, metrics = left.weight, metrics | left.metrics
            if ranks is None:
                scores = self._scores(batch, reward)
            else:
                scores = ranks.gather(lambda: self._scores(batch, reward))
            out, found = self._outputs(whole, scores, weight)
            for name, value in out.items():
                own = value if ranks is None else ranks.own(value)
                batch.rows.set(getattr(self.tensor_keys, name), own)
            if "kl" in out:
                update_kl_coefficient(self.kl_coef, out["kl"], whole.scored)
        self.metrics = metrics | found
        return batch.rows

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
        key = batch.keys.sampling_temperature
        check_temperature(rows, key, self.temperature, batch.counted.any(-1))
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

    def _rewards_of_all(self, batch: RowBatch) -> tuple[Tensor | None, dict[str, float]]:
        """Reward the rows of this process; the metrics are those of all ranks."""
        if self.process_group is None:
            return self._rewards(batch)
        rewards: list[Tensor | None] = []

        def ask() -> dict[str, float]:
            reward, metrics = self._rewards(batch)
            rewards.append(reward)
            return metrics

        # Before the models: a rank whose reward server fails must not leave the others waiting.
        every = call_on_all(ask, self.process_group)
        return rewards[0], merge_summaries(every)

    def _rewards(self, batch: RowBatch) -> tuple[Tensor | None, dict[str, float]]:
        """Ask the reward sources, after a check that costs less; ``None`` for the rows' own returns."""
        if self.old_log_probs == "sampler":
            self._sampler_log_probs(batch)
        # The rows' own returns stand for their rewards.
        if self.own_reward and self.credit.advantage == "turn" and batch.has("turn_return"):
            if self.gamma is not None:
                self._warnings.of_gamma(batch, self.gamma)
            return None, {}
        reward, metrics = self.reward(
            batch.rows,
            batch.episodes,
            valid=batch.valid,
            shown=batch.with_default_keys(),
            keys=self.tensor_keys,
        )
        return reward, metrics

    def _sampler_log_probs(self, batch: RowBatch) -> Tensor:
        """Read and check the sampler's log-probabilities, ``[N, S]`` float32."""
        log_prob = batch.read("sampler_log_prob")
        log_prob = batch.finite_float("sampler_log_prob", log_prob, batch.counted, _SAMPLER_FAULT)
        batch.check_log_probs("sampler_log_prob", log_prob)
        return log_prob

    def _scores(self, batch: RowBatch, reward: Tensor | None) -> dict[str, Tensor]:
        """Score rows with the models: results by key name, with the ``"reward"`` if there is one."""
        out: dict[str, Tensor] = {} if reward is None else {"reward": reward}
        if self.old_log_probs == "sampler":
            old = batch.read("sampler_log_prob")
            out["sample_log_prob"] = self._sampler_log_probs(batch)
        if self.old_log_probs == "actor" or self.with_entropy:
            log_prob, entropy = self._score(self.actor, batch, self.with_entropy)
            if self.old_log_probs == "actor":
                old = log_prob
                out["sample_log_prob"] = batch.finite_float(
                    "sample_log_prob", old, batch.scored, MODEL_FAULT
                )
            if entropy is not None:
                out["entropy"] = batch.finite_float("entropy", entropy, batch.scored, MODEL_FAULT)
        if self.ref is not None:
            ref = self._score_ref(batch)
            out["ref_log_probs"] = batch.finite_float(
                "ref_log_probs", ref, batch.scored, MODEL_FAULT
            )
            # From the models' own values: a 0 written for NaN is no log-probability.
            kl = kl_estimate(old.float(), ref, self.kl_kind)
            kl = torch.where(scored_tokens(batch.attention_mask, batch.mask), kl, 0.0)
            out["kl"] = batch.finite_float(
                "kl", kl, batch.scored, "the policies are too far apart."
            )
        if self.critic is not None:
            value = self._values(self.critic, batch)
            out["value"] = batch.finite_float("value", value, batch.counted, MODEL_FAULT)
        return out

    def _outputs(
        self, batch: RowBatch, scores: Mapping[str, Tensor], weight: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the outputs of scored rows, by key name, and the metrics.

        ``weight`` is that of ``process``, of rows ``[N]`` or tokens ``[N, S]``.
        """
        out = dict(scores)
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
        reward = out.pop("reward", None)
        if reward is not None and not self.own_reward:
            # After the models: running statistics must not count a batch whose scoring failed.
            reward = out["shaped_reward"] = self.reward.transformed(
                reward, batch.episodes, batch.valid
            )
        if self.reads_group:
            if reward is not None and self.credit.reads_group:
                outcome = self.credit.outcome(batch, reward)
            else:
                outcome = batch.episode_scores(reward)
            metrics |= groups_without_spread(batch, outcome)
        advantage, out["value_target"] = self.credit.advantage_and_return(
            batch, reward, kl_reward, out
        )
        out["advantage"] = advantage.unsqueeze(-1)
        if self.filters or weight is not None:
            completed = batch.with_default_keys(out)
            completed.set(EPISODE_SCORE, batch.episode_scores(reward))
            of_process = () if weight is None else (lambda rows: weight,)
            filters = (*self.filters, *of_process)
            out["weight"] = filter_weight(filters, completed, batch.counted)
            kept = (out["weight"] > 0).sum() / batch.counted.sum().clamp(min=1)
            metrics["kept_fraction"] = float(kept)
        self._warnings.of_advantage(batch, advantage, out.get("weight"))
        if batch.has("versions"):
            self._warnings.of_versions(batch, self.actor)
        return out, metrics

    def _score(
        self, model: nn.Module, batch: RowBatch, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the log-probabilities of sampled tokens and, if asked, the entropies."""
        with scoring_mode(model):
            return row_log_probs(
                model,
                *batch.inputs,
                temperature=self.temperature,
                with_entropy=with_entropy,
                images=batch.images,
                passes=self.passes,
            )

    def _score_ref(self, batch: RowBatch) -> Tensor:
        """Compute the reference's log-probabilities of sampled tokens."""
        assert self.ref is not None
        if not isinstance(self.ref, str):
            return self._score(self.ref, batch)[0]
        with base_policy(self.actor):
            return self._score(self.actor, batch)[0]

    def _values(self, critic: nn.Module, batch: RowBatch) -> Tensor:
        """Compute the values of the states in which tokens were sampled."""
        with scoring_mode(critic):
            return row_values(critic, *batch.inputs, images=batch.images, passes=self.passes)
