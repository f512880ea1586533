"""Private names of transformers: what its models say of attention and of rotary frequencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, inference_mode, nn

__all__ = ["RotaryFrequencies", "attention_implementation", "rotary_frequencies"]


# --- Models that score rows -----------------------------------------------------------------------


def attention_implementation(model: nn.Module) -> str | None:
    """Name of a model's attention: the keyword can be read back from no public attribute."""
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(kind, str):
            return kind
    return None


@dataclass(frozen=True)
class RotaryFrequencies:
    """Frequencies of a rotary embedding that depend on the longest row of a pass.

    transformers keeps them in a buffer ``inv_freq`` that a forward pass changes: dynamic NTK puts
    another tensor in its place with each greater length, LongRoPE writes into it.
    """

    module: nn.Module
    """Whose buffer they are."""
    prefix: str
    """Of its attributes' names; not empty where layers of several types have their own."""
    dynamic: bool
    """Whether they change with each length, rather than once."""
    original: int
    """Most tokens of a row that has the model's own frequencies."""

    def reset(self) -> Callable[[], None]:
        """Forget the rows of earlier passes; what is returned puts the frequencies back."""
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
    """All frequencies of a model that depend on lengths; none of most models."""
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
    """Most tokens of a row that has LongRoPE's short frequencies."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # transformers 4
        own = getattr(config, "original_max_position_embeddings", None)
        return int(config.max_position_embeddings if own is None else own)
    return int((parameters[layer] if layer else parameters)["original_max_position_embeddings"])
