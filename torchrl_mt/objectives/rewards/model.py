"""A reward model as a reward source: its score at each row's last attended token.

Padding is read from the mask alone: its place and its token change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import read_entry
from torchrl_mt.ranks import is_sharded
from torchrl_mt.scoring.forward import run_model, scoring_mode
from torchrl_mt.scoring.packing import micro_batches
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_vision import RowVision
from torchrl_mt.vision import RowImages


class ModelReward(nn.Module):
    """Reward source that scores rows with a reward model, which must share the policy's vocabulary.

    Args:
        model: A Hugging Face sequence classifier with one label; or a module called with
            ``input_ids`` and ``attention_mask``, padded on the right. It returns one score per row,
            ``[n]`` or ``[n, 1]``, or per token, ``[n, L]`` or ``[n, L, 1]``, or an object with such
            ``logits``.
        name: Its name in metrics.
        passes: How rows are cut into forward passes; they are never packed.

    Raises:
        ValueError: If the model has several labels, or a number is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForSequenceClassification
        >>> model = Qwen2ForSequenceClassification(
        ...     Qwen2Config(
        ...         vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...         num_attention_heads=1, num_key_value_heads=1, num_labels=1,
        ...     )
        ... )
        >>> attended = torch.tensor([[True, True, True], [True, False, False]])
        >>> rows = TensorDict({"tokens": {"full": torch.ones(2, 3, dtype=torch.long)}}, [2])
        >>> rows["masks", "all_attention_mask"] = attended
        >>> ModelReward(model)(rows).shape
        torch.Size([2])
    """

    per_episode = True

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str = "model",
        passes: Passes | None = None,
    ) -> None:
        super().__init__()
        labels = getattr(getattr(model, "config", None), "num_labels", 1)
        if isinstance(getattr(model, "score", None), nn.Module) and labels != 1:
            raise ValueError(f"a reward model must have num_labels=1, got {labels}.")
        self.model = model
        self.name = name
        self.passes = Passes.checked(passes)

    def forward(self, rows: TensorDictBase) -> Tensor:
        """Score rows.

        Args:
            rows: Rows ``[n]`` with ``("tokens", "full")`` and ``("masks", "all_attention_mask")``, and
                the entries of ``VisionInputs`` if they show images.

        Returns:
            ``[n]`` float32.

        Raises:
            ValueError: If the model returns scores of another shape or is divided among ranks
                (``fully_shard``), or a row's image tokens do not fit its images.
            TypeError: If rows show images and the model takes none.
        """
        if is_sharded(self.model):
            raise ValueError(
                f"reward model {self.name!r} must be whole on each rank, but fully_shard divided it: "
                "ranks ask it about different numbers of rows. Leave it whole, or serve it "
                "(RemoteReward)."
            )
        tokens = read_entry(rows, ExperienceKeys.action)
        attention_mask = read_entry(rows, ExperienceKeys.attention_mask)

        scores = torch.zeros(len(tokens), device=tokens.device)
        lengths = attention_mask.sum(-1)
        vision = RowVision.of(self.model, tokens, attention_mask, RowImages.of(rows))
        with scoring_mode(self.model):
            most = self.passes.micro_batch_size, self.passes.max_tokens
            for part in micro_batches(lengths, *most):
                part = part.to(tokens.device)
                given = {} if vision is None else vision.padded(part)
                score = self._score(tokens[part], attention_mask[part], given)
                scores[part] = score.to(scores)
        return scores

    def _score(self, tokens: Tensor, attention_mask: Tensor, images: dict[str, Any]) -> Tensor:
        length, dtype = attention_mask.sum(-1).clamp(min=1), self.passes.dtype
        # A stable sort moves the attended tokens to the left, in order.
        order = (~attention_mask).int().argsort(dim=-1, stable=True)[:, : int(length.max())]
        attended = torch.arange(order.shape[1], device=tokens.device) < length.unsqueeze(-1)
        given = torch.where(attended, tokens.gather(-1, order), 0)
        inputs = {"input_ids": given, "attention_mask": attended.long(), **images}
        if "position_ids" in images:
            inputs["position_ids"] = images["position_ids"][..., : order.shape[1]]
        head = getattr(self.model, "score", None)
        body = getattr(self.model, "base_model", None)
        if isinstance(head, nn.Module) and isinstance(body, nn.Module) and body is not self.model:
            # The classifier itself would search for the last token that is no padding token, and
            # misread a row that ends with one.
            hidden = run_model(body, inputs, dtype)[0]
            with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype is not None):
                return head(_at(hidden, length - 1)).squeeze(-1)
        output = run_model(self.model, inputs, dtype)
        scores = output if isinstance(output, Tensor) else output.logits
        n, width = given.shape
        if scores.shape in ((n,), (n, 1)):
            return scores.reshape(-1)
        if scores.shape in ((n, width), (n, width, 1)):
            return _at(scores.reshape(n, width), length - 1)
        raise ValueError(
            f"reward model {self.name!r} must return one score for each of {n} rows, or for each of "
            f"their {width} tokens, got shape {tuple(scores.shape)}."
        )


def _at(states: Tensor, position: Tensor) -> Tensor:
    """Select one position of each row: ``[n, L, ...]`` to ``[n, ...]``."""
    return states[torch.arange(len(states), device=states.device), position.to(states.device)]
