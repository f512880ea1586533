"""Model inputs of the images that training rows show, made when rows are sampled.

Batches and buffers keep the images as they were given; a row's inputs are those of exactly its images.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_mt.vision.processor import VisionProcessor
from torchrl_mt.vision.rows import write_inputs

__all__ = ["VisionInputs"]


class VisionInputs(Transform):
    """Makes a model's inputs of the images of training rows, from the pixels stored with them.

    Append it after :class:`~torchrl_mt.transforms.MergeTurns` to the transforms of a replay buffer, or
    call it on rows. It reads ``("images", "raw")`` and writes:

    - ``("images", "pixel_values")``: float32, the inputs of all rows' images, one after the other:
      patches ``[ΣP, D]`` (Qwen) or pictures ``[M, C, H, W]`` (LLaVA).
    - ``("images", "grid_thw")`` (Qwen): int64 ``[M, 3]``, patches of each image in time, height, width.
    - ``("images", "keys")``: a tuple of ``M`` hashes that names these images.
    - ``("images", "count")``: int64 ``[N]``, number of each row's images.
    - ``("images", "first")``: int64 ``[N]``, where each row's first is among the ``M``.

    The first three are non-tensor entries without batch dimension. Rows may be indexed, shuffled, split,
    stacked and concatenated, also with those of another call. To keep rows in a buffer of their own, use
    a :class:`~torchrl.data.ListStorage` or :class:`~torchrl.data.LazyStackStorage`.

    Args:
        processor: the Hugging Face processor that the rows' prompts were made with: of Qwen2-VL,
            Qwen2.5-VL, Qwen3-VL or LLaVA.

    Raises:
        TypeError: if the processor is of another family.

    Examples:
        >>> import numpy as np, torch
        >>> from tensordict import NonTensorData, NonTensorStack, TensorDict
        >>> from torchrl_mt.testing import tiny_vl_model
        >>> from torchrl_mt.vision import StoredImage
        >>> _, processor = tiny_vl_model()
        >>> image = StoredImage.of(np.zeros((8, 24, 3), np.uint8))
        >>> tokens = torch.tensor([[5] + [processor.image_token_id] * 3])
        >>> rows = TensorDict({"tokens": {"full": tokens}}, [1])
        >>> _ = rows.set(("images", "raw"), NonTensorStack(NonTensorData((image,))))
        >>> rows = VisionInputs(processor)(rows)
        >>> rows["images", "pixel_values"].shape, rows["images", "grid_thw"], rows["images", "count"]
        (torch.Size([12, 48]), tensor([[1, 2, 6]]), tensor([1]))
    """

    def __init__(self, processor: Any) -> None:
        vision = VisionProcessor.of(processor)
        super().__init__()
        self._vision = vision

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the inputs into rows.

        Args:
            tensordict: rows ``[N]`` as :class:`~torchrl_mt.transforms.MergeTurns` makes them.

        Returns:
            The same rows. Inputs that they had are made again.

        Raises:
            KeyError: if ``("images", "raw")`` or ``("tokens", "full")`` is missing.
            ValueError: if rows are not of batch size ``[N]``, or the image tokens of a row are not those
                of its images; nothing is written then.
        """
        if tensordict.batch_dims != 1:
            raise ValueError(
                f"VisionInputs needs rows of batch size [N], got {list(tensordict.batch_size)}."
            )
        write_inputs(tensordict, self._vision)
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Not supported: steps of an environment are no rows."""
        raise RuntimeError(
            "VisionInputs acts on training rows and not on the steps of an environment: append it after "
            "MergeTurns, or call it on rows."
        )
