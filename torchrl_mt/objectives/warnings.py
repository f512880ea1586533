"""Warnings, once each, about training that silently learns nothing or from unintended numbers."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from torchrl_mt.objectives.functional import turn_returns
from torchrl_mt.objectives.rows.batch import RowBatch
from torchrl_mt.ranks import local
from torchrl_mt.scoring.forward import text_config

_logger = logging.getLogger("torchrl_mt")

_BATCHES = 4
"""Batches without an advantage, or of new episodes from one weight version, with changing weights, that
lead to the warning. A collector that runs ahead has fewer before it gets new weights."""
_NEW = 0.25
"""Smallest share of new episodes in a new batch; batches from a buffer mix old and new ones."""
_WEIGHTS = 64
"""Numbers of each parameter that are compared: every optimizer step changes some."""


class Warnings:
    """The warnings of one :class:`~torchrl_mt.objectives.ExperienceMaker`, each given once."""

    def __init__(self) -> None:
        self._over: set[str] = set()
        """What was said, or will not be any more."""
        self._flat = 0
        """Batches without an advantage in a row."""
        self._version: int | None = None
        """The first batch's weight version."""
        self._highest = self._batches = 0
        """The highest episode id, and the number of batches of new episodes from that version."""
        self._weights = torch.empty(0, device="cpu")

    def of_advantage(self, batch: RowBatch, advantage: Tensor, weight: Tensor | None) -> None:
        """Warn if the weighted advantage ``[N, S]`` was 0 on all trained tokens for some batches."""
        counts = advantage if weight is None else advantage * weight
        if "advantage" in self._over or not bool(batch.scored.any()):
            return
        self._flat = 0 if bool(counts[batch.scored].any()) else self._flat + 1
        if self._flat == _BATCHES:
            self._over.add("advantage")
            _logger.warning(
                "The advantage%s was 0 on all trained tokens of %d batches in a row, so nothing was "
                "learned: the episodes that are compared had equal rewards. If all are right, the task "
                "is solved: stop, or use harder items. If none is, use easier items, reward partial "
                "answers, or play more episodes for each item (group_size). This is said once.",
                "" if weight is None else ", or the filters' weight,",
                _BATCHES,
            )

    def of_gamma(self, batch: RowBatch, gamma: float) -> None:
        """Warn if the rows' own returns, which are used, were not discounted by ``gamma``."""
        if "gamma" in self._over or not bool(batch.counted.any()):
            return
        if batch.has("reward"):
            reward = torch.where(batch.counted, batch.read("reward").float(), 0.0)
            asked = turn_returns(reward, batch.mask, batch.turns, gamma, episode=batch.episode)
            asked, used = asked[batch.counted], batch.turn_returns()[batch.counted]
            if bool(((asked - used).abs() <= 1e-3 * used.abs().max()).all()):
                return
        self._over.add("gamma")
        _logger.warning(
            "gamma=%s does not discount the rewards: the rows carry returns, %r, that were made with "
            "another gamma (of DiscountedReturn, in the writer or the buffer), and these are used. "
            "Leave gamma out, or drop the entry from the rows, and gamma counts. This is said once.",
            gamma,
            batch.keys.turn_return,
        )

    def of_versions(self, batch: RowBatch, actor: nn.Module) -> None:
        """Warn if new episodes keep coming from one weight version while the actor is trained.

        An episode is new if its id is above all earlier ones. Repeated episodes (epochs), mostly old
        episodes (a buffer) and unchanged weights do not count. The watch ends at the first other
        version: the sampler does get new weights.
        """
        if "versions" in self._over or not bool(batch.counted.any()):
            return
        version = int(batch.read("versions")[batch.counted].max())
        if version < 0:
            return
        episodes = batch.episode_id[batch.valid].unique()
        is_new = True
        if self._version is None:
            self._version = version
        else:
            is_new = float((episodes > self._highest).double().mean()) >= _NEW
        self._highest = max(self._highest, int(episodes.max()))
        if version != self._version:
            self._over.add("versions")
        elif is_new and not torch.equal(weights := some_weights(actor), self._weights):
            self._batches, self._weights = self._batches + 1, weights
        if self._batches == _BATCHES:
            self._over.add("versions")
            _logger.warning(
                "%r has been %d in %d batches of new episodes, though the actor's weights changed "
                "between them: the sampler did not get the new weights. Call "
                "collector.update_policy_weights_(model) after training, or, without a collector, "
                "engine.update_weights(model); also with share_weights=True, where it makes the "
                "engine drop its cache under the old weights. Ignore this if the episodes come from "
                "a data set. This is said once.",
                batch.keys.versions,
                version,
                _BATCHES,
            )


def warn_of_mode(model: nn.Module) -> None:
    """Warn if dropout would make a trained model's ratios noise, or checkpointing is on in vain."""
    modules = list(model.modules())
    drops = any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in modules)
    drops |= model.training and bool(getattr(text_config(model), "attention_dropout", 0.0))
    if drops:
        _logger.warning(
            "The actor drops out while it is trained, but its old log-probabilities were computed "
            "without dropout, so the ratios are noise. Call actor.eval(), or set dropout to 0."
        )
    if any(getattr(m, "gradient_checkpointing", False) and not m.training for m in modules):
        _logger.warning(
            "The actor has gradient checkpointing on, but is in evaluation mode, in which "
            "transformers does not checkpoint: it saves no memory. Call actor.train(); its dropout must "
            "be 0 then."
        )


def some_weights(model: nn.Module) -> Tensor:
    """Copy some numbers of this rank's part of each trained parameter, ``[K]`` float32 on the CPU."""
    ours = (p for p in model.parameters() if p.requires_grad and not p.is_meta)
    trained = [local(p.detach()) for p in ours]
    some = [p.flatten()[:_WEIGHTS].to(trained[0].device, torch.float32) for p in trained]
    return torch.cat(some).cpu() if some else torch.empty(0, device="cpu")
