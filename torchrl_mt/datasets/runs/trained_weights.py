"""The weights of a module that training changes, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["TrainedWeights"]


class TrainedWeights:
    """A part of a :class:`~torchrl_mt.datasets.RunCheckpoint`: a module without its frozen parameters.

    With LoRA, checkpoints are as large as the adapters, not as the model. Under the name ``model``, the
    engine takes the module when it is restored, as one with a server must. The frozen parameters must
    be there then, as when a model is loaded by name.

    Args:
        module: A model, a loss module or an experience maker.

    Raises:
        ValueError: From ``load_state_dict``, if other parameters are trained than in the saved run, or
            some have other shapes; nothing has changed.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> _ = model[0].requires_grad_(False)
        >>> sorted(TrainedWeights(model).state_dict())
        ['1.bias', '1.weight']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that are trained, and buffers."""
        named = nn.Module.named_parameters(self.module, remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        state = self.module.state_dict()
        return {name: value for name, value in state.items() if name not in frozen}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise for what :meth:`load_state_dict` would refuse."""
        own = self.state_dict()
        if different := sorted(own.keys() ^ state.keys()):
            raise ValueError(
                f"the same parameters must be trained as in the saved run, got {different[0]!r} in one "
                "of them only."
            )
        for name, value in own.items():
            if isinstance(value, Tensor) and value.shape != state[name].shape:
                raise ValueError(
                    f"{name} must have the shape {tuple(state[name].shape)} as in the saved run, got "
                    f"{tuple(value.shape)}."
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the trained weights of a checkpoint; the others stay."""
        self.check_state_dict(state)
        self.module.load_state_dict(state, strict=False)
