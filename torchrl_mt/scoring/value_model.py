"""A critic from a transformers model: its last hidden states and one number made of each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """A language model's backbone with a scalar head.

    The value at a position is a function of the tokens up to and including it. The head starts at
    zero: until it has learned something every value is 0, and advantages are plain returns.

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
        parameter = next(backbone.parameters(), None)
        self.backbone = backbone
        # Its gradient is a sum over all tokens: in half precision it would lose the small ones.
        self.head = nn.Linear(
            hidden_size, 1, device=None if parameter is None else parameter.device
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ValueModel:
        """Put a scalar head on a transformers model.

        Args:
            model: A causal language model, whose output layer is left out, or a backbone. Its
                parameters are shared: for a critic beside an actor, load or copy the model once more.

        Returns:
            The critic.

        Raises:
            TypeError: If ``model`` is no transformers model.
        """
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model must be a transformers PreTrainedModel, got {type(model).__name__}; for another "
                "kind of backbone call ValueModel(backbone, hidden_size)."
            )
        return cls(model.base_model, model.config.get_text_config().hidden_size)

    @property
    def config(self) -> Any:
        """The backbone's configuration; ``None`` if it has none."""
        return getattr(self.backbone, "config", None)

    @property
    def base_model(self) -> nn.Module:
        """The backbone, under the name that transformers has for it."""
        return self.backbone

    def get_input_embeddings(self) -> nn.Module:
        """The backbone's embedding of tokens, as transformers' models give it."""
        return cast(PreTrainedModel, self.backbone).get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Value after each token.

        Args:
            input_ids: ``[N, L]`` int64.
            attention_mask: ``[N, L]``, 0 on padding.
            position_ids: ``[N, L]`` int64.
            **kwargs: What else the backbone takes.

        Returns:
            ``[N, L]`` float32.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if isinstance(self.backbone, PreTrainedModel):
            kwargs.setdefault("use_cache", False)
        hidden = self.backbone(input_ids=input_ids, **kwargs).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = self.head.weight.float(), self.head.bias.float()
            return nn.functional.linear(hidden.float(), weight, bias).squeeze(-1)
