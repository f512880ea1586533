"""Where TorchRL's weight-sync schemes write: a copy of the engine's model.

A scheme writes to its module whenever weights arrive, also while tokens are sampled. The engine takes
the weights from the copy between two steps, and counts them: each token has the version that sampled it.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torchrl.weight_update import (
    NoWeightSyncScheme,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from torchrl_mt.engines import Engine

__all__ = ["check_scheme", "receiving_model"]

_TAKEN = (NoWeightSyncScheme, RayWeightSyncScheme, SharedMemWeightSyncScheme)


def check_scheme(scheme: Any, engine: Engine) -> None:
    """Refuse a scheme that cannot bring weights to an engine of this process (``TypeError``)."""
    name = type(scheme).__name__
    if not isinstance(scheme, WeightSyncScheme):
        raise TypeError(f"weight_recv_schemes must hold TorchRL's weight-sync schemes, got {name}.")
    if type(scheme).__module__.startswith("torchrl.weight_update.llm."):
        raise TypeError(
            f"{name} sends weights to an inference server, not to a collector, which only counts them: "
            "call sender.register_collector(collector) or, if the sender has no such method, "
            "collector.increment_version() after each update."
        )
    of_torchrl = type(scheme).__module__.startswith("torchrl.")
    if isinstance(scheme, RayModuleTransformScheme) or (
        of_torchrl and not isinstance(scheme, _TAKEN)
    ):
        raise TypeError(
            f"{name} is not supported by MultiTurnCollector: give a SharedMemWeightSyncScheme, "
            "MultiProcessWeightSyncScheme, RayWeightSyncScheme or NoWeightSyncScheme, or send a state "
            "dict to update_policy_weights_ yourself."
        )
    if not isinstance(scheme, NoWeightSyncScheme):
        _model_of(engine)


def receiving_model(engine: Engine) -> nn.Module:
    """Copy the engine's model, for a scheme to write to.

    Raises:
        TypeError: if the engine has no model in this process.
    """
    return copy.deepcopy(_model_of(engine)).requires_grad_(False)


def _model_of(engine: Engine) -> nn.Module:
    model = getattr(engine, "model", None)
    if isinstance(model, nn.Module):
        return model
    raise TypeError(
        f"{type(engine).__name__} has no model in this process that could receive weights: have "
        "update_policy_weights_ send them (on_update=), or send them otherwise and call "
        "increment_version() after each update."
    )
