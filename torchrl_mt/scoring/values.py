"""Critics: a value network on a language model, and values at the sampled tokens of rows.

The value at a token depends only on the attended tokens before it, wherever padding lies.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_mt._hosts.peft import base_of, is_peft_model
from torchrl_mt.devices import sent
from torchrl_mt.scoring.forward import device_of, run_model
from torchrl_mt.scoring.packing import put_back
from torchrl_mt.scoring.packing_check import passes_over
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.vision import RowImages


class ValueModel(nn.Module):
    """A language model's backbone with a scalar head.

    The value at a position depends on the tokens up to and including it. The head starts at zero: at
    first all values are 0, and advantages are plain returns.

    Args:
        backbone: A transformers model whose output has ``last_hidden_state`` ``[N, L, H]``. It is
            shared, not copied.
        hidden_size: ``H``.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(
        ...     Qwen2Config(
        ...         vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...         num_attention_heads=1, num_key_value_heads=1,
        ...     )
        ... )
        >>> ValueModel.from_model(model)(torch.tensor([[1, 2, 3]]))
        tensor([[0., 0., 0.]], grad_fn=<SqueezeBackward1>)
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        # In float32: its gradient sums over all tokens, and half precision would lose small terms.
        self.head = nn.Linear(hidden_size, 1, device=device_of(backbone))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ValueModel:
        """Put a scalar head on a transformers model.

        Args:
            model: A causal language model, whose output layer is not used, or a backbone; or a PEFT
                model of one, of which adapters and head are trained. Its parameters are shared: beside
                an actor, load or copy the model again.

        Returns:
            The critic.

        Raises:
            TypeError: If ``model`` is no transformers model.
        """
        if is_peft_model(model):
            model = cast(PreTrainedModel, base_of(model))
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model must be a transformers PreTrainedModel, got {type(model).__name__}; for another "
                "kind of backbone call ValueModel(backbone, hidden_size)."
            )
        backbone = model.base_model
        if backbone is model:
            # transformers 4 does not name the base of its vision-language models.
            backbone = getattr(model, "model", model)
        return cls(backbone, model.config.get_text_config().hidden_size)

    @property
    def config(self) -> Any:
        """Configuration of the backbone, or ``None``."""
        return getattr(self.backbone, "config", None)

    @property
    def base_model(self) -> nn.Module:
        """The backbone, under transformers' name."""
        return self.backbone

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's token embedding."""
        return cast(PreTrainedModel, self.backbone).get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the value after each token.

        Args:
            input_ids: ``[N, L]`` int64.
            attention_mask: ``[N, L]``, 0 on padding.
            position_ids: ``[N, L]`` int64, or what else the backbone takes.
            **kwargs: What else the backbone takes, images among it.

        Returns:
            ``[N, L]`` float32.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if isinstance(self.backbone, PreTrainedModel):
            kwargs.setdefault("use_cache", False)
        hidden = self.backbone(input_ids=input_ids, **kwargs).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            if self.head.weight.is_meta:  # accelerate has its values, for calls of the head itself.
                return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
            weight, bias = self.head.weight.float(), self.head.bias.float()
            return nn.functional.linear(hidden.float(), weight, bias).squeeze(-1)


def row_values(
    critic: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    *,
    images: RowImages | None = None,
    passes: Passes | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Compute the values of the states in which tokens were sampled.

    A sampled token's state is the attended tokens before it: its value is the critic's output at the
    previous attended position, sampled or not. The output at a row's last token is not used.

    Args:
        critic: Called with ``input_ids`` and ``attention_mask`` (with ``position_ids`` when packed);
            returns ``[N, L]`` or ``[N, L, 1]``, or an object that has them as ``logits``:
            :class:`~torchrl_mt.objectives.ValueModel`, or transformers'
            ``AutoModelForTokenClassification`` with ``num_labels=1``.
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens.
        images: The rows' images, ``RowImages.of(rows)``; none by default. The critic's ``config`` must
            be that of a supported vision-language model.
        passes: How rows are cut into forward passes.
        device: Device of the result, that of ``tokens`` by default.

    Returns:
        ``[N, S]`` float32, zero on masked tokens and on a row's first token.

    Raises:
        ValueError: If shapes differ, a sampled token is padding, a number is out of range, the critic's
            output has another shape, the critic does not support packing, or a row's image tokens do
            not fit its images.
        TypeError: If a mask is not boolean, ``critic`` is no module or takes no ``images``.

    Examples:
        >>> class Count(nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return attention_mask.cumsum(-1).float()
        >>> attended = torch.tensor([[False, True, True, True]])
        >>> row_values(Count(), torch.tensor([[0, 5, 6, 7]]), attended, attended)
        tensor([[0., 0., 1., 2.]])
    """
    check_critic(critic)
    passes = Passes.checked(passes)
    places, values = [], []
    for step in passes_over(critic, tokens, attention_mask, mask, passes, images):
        shape = step.inputs["input_ids"].shape
        value = _values(run_model(critic, step.inputs, passes.dtype), shape)
        places.append(step.place)
        values.append(value.flatten()[sent(step.state, value.device)])
    return put_back(values, places, tokens, device)


def check_critic(critic: nn.Module) -> None:
    """Refuse a critic that is no module."""
    if not isinstance(critic, nn.Module):
        raise TypeError(f"critic must be a torch.nn.Module, got {type(critic).__name__}.")


def _values(output: Any, shape: torch.Size) -> Tensor:
    """Extract the values from a critic's output, one per token."""
    value = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(value, Tensor) or value.shape not in (shape, (*shape, 1)):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(output).__name__
        raise ValueError(
            f"critic must give one value for each token, {tuple(shape)} or {(*shape, 1)}, got {got}; "
            "use ValueModel, or a token classification model with num_labels=1."
        )
    return value
