"""Scores of a model that FSDP2 divides, computed inside its forward pass, where its weights are whole.

As in :mod:`~torchrl_mt.scoring.output_head`, only scored tokens get logits, in chunks, and each call
compares recomputed logits with the model's own. The ranks agree on the verdict: a second pass needs all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from torchrl_mt._hosts.peft import is_peft_model
from torchrl_mt._hosts.torch import is_changed, is_compiled
from torchrl_mt.ranks import is_dtensor, most
from torchrl_mt.scoring import output_head as head
from torchrl_mt.scoring.forward import hooked, run_model
from torchrl_mt.scoring.output_head import OutputStates

Scores: TypeAlias = tuple[Tensor, Tensor | None]
"""Log-probabilities, and entropies or ``None``: ``[K]``."""


def scores_inside(
    model: nn.Module,
    inputs: dict[str, Any],
    dtype: torch.dtype | None,
    score: Callable[[OutputStates], Scores],
) -> Scores | Tensor:
    """Run a divided language model, and score its states where its output layer is called.

    Args:
        model: A causal language model; every rank calls.
        inputs: Its keyword arguments, with ``input_ids`` ``[B, L]``.
        dtype: See :func:`~torchrl_mt.scoring.forward.run_model`.
        score: Computes the scores from the states.

    Returns:
        The scores; or whole logits ``[B, L, V]`` where
        :func:`~torchrl_mt.scoring.output_head.output_states` returns them, for models that are not
        transformers' (PEFT's adapters are fine), and for output layers that ``fully_shard`` was applied
        to themselves.
    """
    layer = _output_layer(model)
    if layer is None:
        return head.whole_logits(model, inputs, dtype)
    shape = inputs["input_ids"].shape
    scale, softcap = head.post_processing(model)[0]
    states: list[Tensor] = []
    scores: list[Scores] = []
    raw: list[Tensor] = []

    def cut(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0] if len(args) == 1 else None
        if not isinstance(x, Tensor) or x.shape[:-1] != shape or is_dtensor(layer.weight):
            return None
        states.append(x)
        # Before the layer's own product, so that the backward pass comes after that of the product,
        # which makes FSDP gather the weights again.
        scores.append(score(OutputStates(x, layer.weight, layer.bias, scale, softcap)))
        return (x[:1, -head.PROBED :],)

    def keep(args: tuple[Any, ...], output: Tensor) -> None:
        raw.append(output.detach())

    with hooked(layer, before=cut, after=keep):
        output = run_model(model, inputs, dtype)
    logits = head.logits_of(model, output)
    if not scores:
        return head.checked(model, logits, shape)
    fits = len(scores) == 1 and not head.lost_graph(model, layer, states[0])
    fits = fits and head.same(raw[0], scale, softcap, logits.detach())
    # NaN cannot be compared: decide in a later pass.
    verdict = most(0 if fits else 2 if bool(raw[0].isfinite().all()) else 1, model)
    if verdict:
        if verdict == 2:
            head.WHOLE_ONLY.add(model)
        return head.whole_logits(model, inputs, dtype)
    log_prob, entropy = scores[0]
    if not log_prob.requires_grad:
        return log_prob, entropy
    no_entropy = log_prob.new_empty(0)
    log_prob, given = _Tied.apply(log_prob, no_entropy if entropy is None else entropy, logits)
    return log_prob, None if entropy is None else given


def _output_layer(model: nn.Module) -> nn.Linear | None:
    """Return the output layer if its weights are those of an outer module that FSDP gathers."""
    inner = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    if model in head.WHOLE_ONLY or not isinstance(inner, PreTrainedModel):
        return None
    layer = inner.get_output_embeddings()
    special = is_compiled(model) or type(layer) is not nn.Linear or is_compiled(layer)
    return None if special or is_changed(layer) else layer


class _Tied(torch.autograd.Function):
    """Scores whose backward pass goes through the model's output, with a gradient of zero.

    FSDP prepares its backward pass when it sees a gradient of the output.
    """

    @staticmethod
    def forward(
        ctx: Any, log_prob: Tensor, entropy: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits)
        return log_prob.clone(), entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (logits,) = ctx.saved_tensors
        return grad_log_prob, grad_entropy, torch.zeros_like(logits)
