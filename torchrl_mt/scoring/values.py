"""A critic's values at the sampled tokens of training rows, wherever their padding lies.

The value at a token is predicted before the token is seen: it is a function of the attended tokens
before it and of nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_mt.scoring.forward import check_dtype, run_model
from torchrl_mt.scoring.packing import check_rows, forward_passes, put_back
from torchrl_mt.scoring.packing_support import check_packing, takes_lengths


def check_critic(critic: nn.Module) -> None:
    """Refuse what is no module.

    Args:
        critic: See :func:`row_values`.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(critic, nn.Module):
        raise TypeError(f"critic must be a torch.nn.Module, got {type(critic).__name__}.")


def row_values(
    critic: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    *,
    packed: bool = False,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Predict the return from each sampled token on, before the token is known.

    The state in which a token is sampled is the attended tokens before it: its value is the critic's
    output at the previous attended position, sampled or not. The critic's output at a row's last token
    is not read.

    Args:
        critic: Called with ``input_ids`` and ``attention_mask`` (with ``position_ids`` when packed);
            returns ``[N, L]`` or ``[N, L, 1]``, or an object that has them as ``logits``:
            :class:`~torchrl_mt.objectives.ValueModel`, or transformers'
            ``AutoModelForTokenClassification`` with ``num_labels=1``.
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens.
        packed: Put several rows into one sequence; see
            :func:`~torchrl_mt.objectives.row_log_probs`.
        micro_batch_size: Most sequences of one forward pass.
        micro_batch_tokens: Most tokens of one forward pass, padding included.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for automatic mixed precision.

    Returns:
        ``[N, S]`` float32 on the device of ``tokens``, zero where masked and at the first token of a
        row, before which there is nothing.

    Raises:
        ValueError: If shapes differ, a sampled token lies on padding, a number is out of range, the
            critic's output has another shape, or it cannot be given packed rows.
        TypeError: If a mask is not boolean or ``critic`` is no module.

    Examples:
        >>> class Count(nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return attention_mask.cumsum(-1).float()
        >>> attended = torch.tensor([[False, True, True, True]])
        >>> row_values(Count(), torch.tensor([[0, 5, 6, 7]]), attended, attended)
        tensor([[0., 0., 1., 2.]])
    """
    check_critic(critic)
    check_rows(tokens, attention_mask, mask)
    check_dtype(dtype)
    if packed:
        check_packing(critic, tokens[attention_mask], dtype)
    places, values = [], []
    for step in forward_passes(
        tokens,
        attention_mask,
        mask,
        packed=packed,
        with_lengths=packed and takes_lengths(critic),
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=micro_batch_tokens,
    ):
        shape = step.inputs["input_ids"].shape
        value = _values(run_model(critic, step.inputs, dtype), shape)
        places.append(step.place)
        values.append(value.flatten()[step.state.to(value.device)])
    return put_back(values, places, tokens)


def _values(output: Any, shape: torch.Size) -> Tensor:
    """The values in a critic's output, one for each token."""
    value = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(value, Tensor) or value.shape not in (shape, (*shape, 1)):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(output).__name__
        raise ValueError(
            f"critic must give one value for each token, {tuple(shape)} or {(*shape, 1)}, got {got}; "
            "use ValueModel, or a token classification model with num_labels=1."
        )
    return value
