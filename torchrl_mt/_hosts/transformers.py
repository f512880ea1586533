"""Names of transformers that are private or change: attention, caches, rotary frequencies, images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, inference_mode, nn
from transformers import PreTrainedModel

__all__ = [
    "RotaryFrequencies",
    "attention_implementation",
    "cache_argument",
    "image_features",
    "looks_back_only",
    "rotary_frequencies",
]


def attention_implementation(model: nn.Module) -> str | None:
    """Return the name of a model's attention; no public attribute has it."""
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(kind, str):
            return kind
    return None


def looks_back_only(model: nn.Module) -> bool:
    """Whether a model of transformers attends to earlier tokens alone, and takes no images.

    A row is then computed alike with and without a mask of the padding behind it.
    """
    known = isinstance(getattr(model, "base_model", None), PreTrainedModel)
    if not known or not getattr(getattr(model, "config", None), "is_causal", True):
        return False
    causal = [m["is_causal"] for m in map(vars, model.modules()) if "is_causal" in m]
    return bool(causal) and all(causal)


def cache_argument(model: nn.Module) -> str:
    """Return the name of a model's argument for its cache, renamed after transformers 5.20.

    A class whose ``forward`` takes any keywords passes them on to the class that it is derived from.
    """
    forwards = [k.forward for k in (model, *type(model).__mro__) if hasattr(k, "forward")]
    accepted = (name for forward in forwards for name in inspect.signature(forward).parameters)
    return next((n for n in accepted if n in ("cache", "past_key_values")), "past_key_values")


@dataclass(frozen=True)
class RotaryFrequencies:
    """Rotary frequencies that depend on the longest row of a forward pass.

    A forward pass changes their buffer ``inv_freq``: dynamic NTK replaces it with each greater length,
    LongRoPE writes into it.
    """

    module: nn.Module
    """The module with the buffer."""
    prefix: str
    """Prefix of the attributes' names; not empty if types of layers have their own frequencies."""
    dynamic: bool
    """Whether they change with each length, rather than once."""
    original: int
    """Most tokens of a row with the model's own frequencies."""

    def reset(self) -> Callable[[], None]:
        """Reset to before any pass; return a function that restores the frequencies."""
        name, cached = f"{self.prefix}inv_freq", f"{self.prefix}max_seq_len_cached"
        frequencies, length = getattr(self.module, name), vars(self.module).get(cached)
        values = frequencies.clone()
        if self.dynamic:
            own: Tensor = getattr(self.module, f"{self.prefix}original_inv_freq")
            setattr(self.module, name, own.to(frequencies.device))
            setattr(self.module, cached, self.original)

        def restore() -> None:
            if not self.dynamic:
                with inference_mode(frequencies.is_inference()):
                    frequencies.copy_(values)
            setattr(self.module, name, frequencies)
            if length is None:
                vars(self.module).pop(cached, None)
            else:
                setattr(self.module, cached, length)

        return restore


def rotary_frequencies(model: nn.Module) -> list[RotaryFrequencies]:
    """List the frequencies of a model that depend on lengths; most models have none."""
    out = []
    for module in model.modules():
        kinds = vars(module).get("rope_type")
        if isinstance(kinds, str):
            kinds = {"": kinds}
        for layer, kind in (kinds if isinstance(kinds, dict) else {}).items():
            prefix = f"{layer}_" if layer else ""
            if not hasattr(module, f"{prefix}original_inv_freq"):
                continue
            if "dynamic" in kind:
                length = int(vars(module)["original_max_seq_len"])
                out.append(RotaryFrequencies(module, prefix, True, length))
            elif kind == "longrope":
                length = _short_frequencies(module.config, layer)
                out.append(RotaryFrequencies(module, prefix, False, length))
    return out


def _short_frequencies(config: Any, layer: str) -> int:
    """Most tokens of a row with LongRoPE's short frequencies."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # transformers 4
        own = getattr(config, "original_max_position_embeddings", None)
        return int(config.max_position_embeddings if own is None else own)
    return int((parameters[layer] if layer else parameters)["original_max_position_embeddings"])


def image_features(
    model: Any, inputs: Mapping[str, Tensor], sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Run a model's vision tower.

    Args:
        model: has ``get_image_features``, whose results have another form in each release.
        inputs: its arguments for some images.
        sizes: the images' tokens.

    Returns:
        ``[tokens, 1 + layers, H]`` for each image: what the language model takes for its tokens, and
        what is added to the outputs of its first layers (Qwen3-VL's DeepStack).
    """
    found = model.get_image_features(**inputs)
    if hasattr(found, "pooler_output"):
        own, layers = found.pooler_output, getattr(found, "deepstack_features", None) or ()
    elif isinstance(found[0], Tensor):
        own, layers = found, ()
    else:
        own, layers = found  # Qwen3-VL in transformers 4
    return torch.stack([_joined(part) for part in (own, *layers)], 1).split(list(sizes))


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of images ``[..., H]``, together or each, as one table ``[tokens, H]``."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([each.flatten(0, -2) for each in features])
