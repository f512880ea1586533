"""A model that computes padded batches, and is refused unless that is exact."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from torchrl_mt.engines.transformers.padded_cache import CacheLayout, PaddedCache

__all__ = ["CachedModel"]

_LONGEST_CHECK = 300
"""Tokens; a window that is longer is not looked beyond."""


class CachedModel:
    """A causal language model and what its cache looks like.

    Args:
        model: in the mode that it samples in.

    Raises:
        ValueError: if it keeps something else than keys and values of every token (recurrent and hybrid
            models), or says something else with a cache than without.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        try:
            with torch.inference_mode():
                self.layout = self._read_layout()
                self.key_cost = self._read_key_cost()
                problem = self._worst_gap()
        except Exception as error:  # whatever a model has against such a cache
            reason = f"it takes no such cache ({type(error).__name__}: {error})"
            raise ValueError(_refusal(model, reason)) from error
        if problem is not None:
            raise ValueError(_refusal(model, problem))

    def new_cache(self) -> PaddedCache:
        """A cache of no rows."""
        return PaddedCache(self.layout)

    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """``[B, V]`` the logits of what follows the last column of what a cache prepared."""
        if not self._takes_positions:
            del inputs["position_ids"]
        return self.model(**inputs, **self._options).logits[:, -1]

    def _read_key_cost(self) -> float:
        """What attending to a token of the cache costs, as a share of what computing a token does."""
        config: Any = self.model.config.get_text_config()
        return 4 * config.hidden_size * len(self.layout.shapes) / self.model.num_parameters()

    def _read_layout(self) -> CacheLayout:
        """Learn from one forward pass what a layer keeps of a token."""
        cache = DynamicCache()
        config: Any = self.model.config.get_text_config()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.model.device)
        logits = self.model(input_ids=token, past_key_values=cache, use_cache=True).logits
        if logits.ndim != 3:
            raise ValueError(f"its logits have shape {list(logits.shape)}: is it a language model?")
        if not cache.layers:
            raise ValueError("it fills no layer of a cache")
        if len(cache.layers) > config.num_hidden_layers:
            raise ValueError(f"it fills {len(cache.layers)} layers of a cache")
        shapes: list[Any] = []
        for layer in cache.layers:
            pair: list[Any] = [getattr(layer, name, None) for name in ("keys", "values")]
            if any(tensor is None or tensor.shape[0::2] != (1, 1) for tensor in pair):
                raise ValueError(f"its layer {len(shapes)} keeps no keys and values of a token")
            shapes.append(tuple((tensor.shape[1], tensor.shape[3]) for tensor in pair))
        shapes += [None] * (config.num_hidden_layers - len(shapes))
        return CacheLayout(tuple(shapes), pair[0].dtype, pair[0].device)

    def _worst_gap(self) -> str | None:
        """What is wrong with log-probabilities computed in padded pieces, if anything is."""
        config: Any = self.model.config.get_text_config()
        window = max(
            getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")
        )
        length = 6 + (window if window <= _LONGEST_CHECK else 0)
        texts = torch.arange(2 * length, device=self.layout.device).view(2, length) ** 2
        texts %= config.vocab_size
        cache, sizes = self.new_cache(), [length - 1, 2]  # the second text is shorter
        rows = cache.join(sizes, [[], []])
        self.logits(cache.fill(rows, texts[:, : length - 4], sizes, 3))
        self.logits(cache.fill(rows, texts[:, length - 4 : -1], sizes, 0))
        logits = self.logits(cache.extend(texts[:, -1:]))
        plain = torch.stack(
            [self.model(input_ids=text[None]).logits[0, -1] for text in (texts[0], texts[1, -3:])]
        )
        if plain.isnan().any():
            return "its logits are not numbers"
        plain = plain.float().log_softmax(-1)
        # Tokens that are ruled out have no logit to compare.
        gap = (logits.float().log_softmax(-1) - plain)[plain > -torch.inf].abs()
        # In half precision an expert may be chosen otherwise, which is no fault of the cache.
        tolerance = 0.1 if self.layout.dtype.itemsize < 4 else 1e-3
        if gap.mean() <= tolerance:
            return None
        return f"its log-probabilities are {gap.mean():.2g} nats off with a cache"


def _refusal(model: PreTrainedModel, problem: str) -> str:
    """Why a model cannot be sampled from here, and where it can."""
    return (
        f"model must keep keys and values of every token and nothing else, got {type(model).__name__}: "
        f"{problem}. Wrap it in TorchRL's TransformersWrapper, which generates as transformers does."
    )
