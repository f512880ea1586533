"""Losses of rows in parts, so that only one part's activations are in memory at a time.

Losses and gradients are those of all rows at once, up to rounding. Each part's gradient is computed in
the forward pass and handed out in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from torchrl_mt.devices import sent

Compute = Callable[[Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]]
"""From indices of rows ``[n]`` to their share of each loss, and to values of each token ``[n, S]``."""


def activation_budget(device: torch.device) -> int:
    """Bytes that activations may take: 512 MiB, on CUDA a quarter of the device's memory.

    Examples:
        >>> activation_budget(torch.device("cpu"))
        536870912
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 4
    return 1 << 29


def kept_bytes(run: Callable[[], Any], models: Iterable[nn.Module]) -> int:
    """Measure what a computation keeps for its backward pass, without the models' own tensors."""
    own = {
        x.untyped_storage().data_ptr()
        for model in models
        for x in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        graph = run()  # until it is gone, no other tensor gets the same storage
    del graph
    return sum(kept.values())


def losses_in_parts(
    compute: Compute, parts: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute losses of rows part by part.

    Args:
        compute: Computes a part, with a graph.
        parts: Indices of rows on the CPU, each row in one part.
        parameters: All tensors that get gradients.

    Returns:
        The sums of the parts' losses, and the values of each token of all rows ``[N, S]``, detached.
    """
    names: list[str] = []

    def run(weights: Tensor | None) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
        """Return losses ``[k]``, token values, and the gradients of the weighted sum of the losses."""
        losses: Any = 0.0
        tokens: list[dict[str, Tensor]] = []
        with _own_gradients(parameters) as gradients:
            for part in parts:
                with torch.enable_grad():
                    of_part, values = compute(part)
                    names[:] = of_part
                    stacked = torch.stack(list(of_part.values()))
                    total = stacked.sum() if weights is None else stacked @ weights.to(stacked)
                # Not autograd.grad(), which misses what reentrant checkpoints hide.
                total.backward()
                losses = losses + stacked.detach()
                tokens.append({name: value.detach() for name, value in values.items()})
        back = sent(torch.cat(list(parts)).argsort(), losses.device)
        joined = {name: torch.cat([one[name] for one in tokens])[back] for name in tokens[0]}
        return losses, joined, gradients

    losses, tokens, gradients = run(None)
    found = [gradients]

    def gradients_for(weights: Tensor) -> list[Tensor | None]:
        # Losses that are added up have one weight. For other sums, the parts are computed again.
        if found and bool((weights == weights[0]).all()):
            return [None if x is None else x.mul_(weights[0].to(x)) for x in found.pop()]
        return run(weights)[2]

    out = _Losses.apply(losses, gradients_for, *parameters)
    return dict(zip(names, out.unbind(), strict=True)), tokens


@contextmanager
def _own_gradients(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Collect gradients apart from those that the parameters have: in the list, at the end."""
    before = [p.grad for p in parameters]
    gradients: list[Tensor | None] = []
    try:
        for p in parameters:
            p.grad = None
        yield gradients
        gradients += [p.grad for p in parameters]
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient


class _Losses(torch.autograd.Function):
    """Losses whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, gradients_for: Callable[[Tensor], Any], *parameters: Tensor
    ) -> Tensor:
        ctx.gradients_for = gradients_for
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> Any:
        return None, None, *ctx.gradients_for(weights)
