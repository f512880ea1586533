"""A causal language model with a padded cache, tested to give the same logits as without."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from torchrl_mt._hosts.transformers import cache_argument
from torchrl_mt.engines.model_facts import input_device
from torchrl_mt.engines.transformers.images import ImageFeatures
from torchrl_mt.engines.transformers.padded_cache import CacheLayout, PaddedCache
from torchrl_mt.vision import StoredImage

__all__ = ["CachedModel"]

_LONGEST_CHECK = 300
"""Longest attention window that the test exceeds, in tokens."""


class CachedModel:
    """A causal language model and the layout of its cache.

    Args:
        model: the model in evaluation mode.
        barred: tokens that are never sampled.
        features: the model's features of images; None if prompts have none.

    Raises:
        ValueError: if the model caches anything but keys and values of every token (recurrent and hybrid
            models), or its log-probabilities differ with a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        barred: Sequence[int] = (),
        features: ImageFeatures | None = None,
    ) -> None:
        devices = {str(weight.device) for weight in model.parameters() if not weight.is_meta}
        if len(devices) > 1:
            raise ValueError(
                f"model must be on one device, got a {type(model).__name__} on {sorted(devices)}; load "
                "it without device_map, or have a server split it (CompletionsEngine)."
            )
        self.model = model
        self._barred, self._features = barred, features
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        try:
            with torch.inference_mode():
                self.layout = self._read_layout()
                self.key_cost = self._read_key_cost()
                problem = self._worst_gap()
        except Exception as error:  # models refuse such a cache in many ways
            reason = f"it takes no such cache ({type(error).__name__}: {error})"
            raise ValueError(_refusal(model, reason)) from error
        if problem is not None:
            raise ValueError(_refusal(model, problem))
        self._place = self.model.device, self.model.dtype

    def has_moved(self) -> bool:
        """Whether device or dtype of the model have changed since the layout was read."""
        return self._place != (self.model.device, self.model.dtype)

    def follow(self) -> None:
        """Read the layout again; caches made before are of no use."""
        self.layout = self._read_layout()
        # After the pass: hooks of accelerate may move the model in it.
        self._place = self.model.device, self.model.dtype

    def new_cache(self) -> PaddedCache:
        """Make an empty cache."""
        return PaddedCache(self.layout, self._cache_argument)

    def logits(
        self, inputs: dict[str, Any], images: Mapping[int, StoredImage] | None = None
    ) -> torch.Tensor:
        """Compute the logits of the next token; minus infinity for tokens that are never sampled.

        Args:
            inputs: the model's keyword arguments, as a cache prepared them.
            images: images of the inputs' prompts, by number.

        Returns:
            ``[B, V]``, after the last column.
        """
        logits = self._shown(inputs, images) if images else self._computed(inputs)
        for token in self._barred:
            logits[:, token : token + 1] = -torch.inf  # nothing, if the output ends before it
        return logits

    def forget_images(self) -> None:
        """Forget what the model saw of images."""
        if self._features is not None:
            self._features.forget()

    def _computed(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits ``[B, V]`` after the last column."""
        if not self._takes_positions:
            del inputs["position_ids"]
        return self.model(**inputs, **self._options).logits[:, -1]

    def _shown(self, inputs: dict[str, Any], images: Mapping[int, StoredImage]) -> torch.Tensor:
        """Logits ``[B, V]`` after the last column of prompts with images."""
        assert self._features is not None
        embedded, is_image, layers = self._features.embed(inputs.pop("input_ids"), images)
        inputs["inputs_embeds"] = embedded
        if not layers:
            return self._computed(inputs)
        decoder: Any = self.model.get_decoder()
        hidden = decoder(
            **inputs, visual_pos_masks=is_image, deepstack_visual_embeds=layers
        ).last_hidden_state
        return self.model.get_output_embeddings()(hidden[:, -1])

    def _read_key_cost(self) -> float:
        """Cost of attending to a cached token, relative to computing a token."""
        config: Any = self.model.config.get_text_config()
        return 4 * config.hidden_size * len(self.layout.shapes) / self.model.num_parameters()

    def _read_layout(self) -> CacheLayout:
        """Find the shapes of each layer's keys and values, by one forward pass."""
        cache = DynamicCache()
        config: Any = self.model.config.get_text_config()
        token = torch.zeros((1, 1), dtype=torch.int64, device=input_device(self.model))
        inputs: dict[str, Any] = {"input_ids": token, self._cache_argument: cache}
        logits = self.model(**inputs, use_cache=True).logits
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
        """Compare log-probabilities with a padded cache and without; describe the gap, if any."""
        config: Any = self.model.config.get_text_config()
        window = max(
            getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")
        )
        length = 6 + (window if window <= _LONGEST_CHECK else 0)
        texts = torch.arange(2 * length, device=self.layout.device).view(2, length) ** 2
        texts %= config.vocab_size
        cache, sizes = self.new_cache(), [length - 1, 2]  # the second text is shorter
        rows = cache.join(sizes, [[], []])
        self._computed(cache.fill(rows, texts[:, : length - 4], sizes, 3))
        self._computed(cache.fill(rows, texts[:, length - 4 : -1], sizes, 0))
        logits = self._computed(cache.extend(texts[:, -1:]))
        plain = torch.stack(
            [self.model(input_ids=text[None]).logits[0, -1] for text in (texts[0], texts[1, -3:])]
        )
        if plain.isnan().any():
            return "its logits are not numbers"
        plain = plain.float().log_softmax(-1)
        # Tokens with a logit of minus infinity cannot be compared.
        gap = (logits.float().log_softmax(-1) - plain)[plain > -torch.inf].abs()
        # In half precision, rounding may route a token to another expert.
        tolerance = 0.1 if self.layout.dtype.itemsize < 4 else 1e-3
        if gap.mean() <= tolerance:
            return None
        return f"its log-probabilities are {gap.mean():.2g} nats off with a cache"


def _refusal(model: PreTrainedModel, problem: str) -> str:
    """The error message for a model that this engine cannot sample from."""
    return (
        f"model must keep keys and values of every token and nothing else, got {type(model).__name__}: "
        f"{problem}. Wrap it in TorchRL's TransformersWrapper, which generates as transformers does."
    )
