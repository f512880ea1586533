"""Completed rows as a tensorclass with the field's usual names; no entry of the rows is lost.

:meth:`to`, :meth:`pin_memory`, indexing and stacking act on every field, nested ones in ``info``
included. :meth:`to` a dtype converts floating fields only.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
)
from torch import Tensor

from torchrl_mt.objectives import ExperienceKeys
from torchrl_mt.vision import RowImages, StoredImage, compact_images

_NAMES = {
    "sequences": "action",
    "attention_mask": "attention_mask",
    "action_mask": "assistant_mask",
    "action_log_probs": "sample_log_prob",
    "returns": "value_target",
    "advantages": "advantage",
    "base_action_log_probs": "ref_log_probs",
    "values": "value",
    "kl": "kl",
    "action_entropy": "entropy",
}
"""Key name of each field's entry in the rows."""
_TABLES = (("images", "pixel_values"), ("images", "grid_thw"))
"""The tables of images in ``info``, which have no batch dimension."""
_OPTIONAL = ("base_action_log_probs", "values", "kl", "action_entropy")


class Experience(TensorClass, shadow=True):  # type: ignore[call-arg]
    """Experience of ``N`` rows of ``S`` tokens, as :class:`ExperienceMaker` makes it.

    All fields but ``info`` have shape ``[N, S]``; those that the maker did not write are ``None``.
    Sampled tokens are where ``action_mask`` is true, with holes between turns. The images of the rows
    are in ``info``, each once; :attr:`pixel_values`, :attr:`image_grid_thw` and :attr:`raw_images` are
    those of these rows, also of an experience that was cut, shuffled or joined.
    """

    sequences: Tensor
    """int64 tokens."""
    attention_mask: Tensor
    """bool, false on padding."""
    action_mask: Tensor
    """bool, true on tokens that the policy sampled."""
    action_log_probs: Tensor
    """float32 log-probabilities under the old policy."""
    returns: Tensor
    """float32 returns-to-go, or the critic's targets."""
    advantages: Tensor
    """float32 advantages."""
    base_action_log_probs: Tensor | None = None
    """float32 log-probabilities under the reference policy."""
    values: Tensor | None = None
    """float32 values of the critic. Hides the method of this name; use ``items()``."""
    kl: Tensor | None = None
    """float32 estimates of the KL from the old policy to the reference."""
    action_entropy: Tensor | None = None
    """float32 entropy of the actor at each sampled token."""
    info: TensorDict | None = None
    """All other entries of the rows, ``[N]``."""

    @property
    def pixel_values(self) -> Tensor | None:
        """Inputs of the rows' images, one row after the other; ``None`` without images."""
        images = None if self.info is None else RowImages.of(self.info)
        if images is None:
            return None
        return images.inputs(torch.arange(len(self), device="cpu")).get("pixel_values")

    @property
    def image_grid_thw(self) -> Tensor | None:
        """int64 ``[M, 3]``, patches of the rows' images; ``None`` without images or grids."""
        return None if self.info is None else RowImages.grids_in(self.info)

    @property
    def raw_images(self) -> list[tuple[StoredImage, ...]] | None:
        """Each row's images as the environment gave them; ``None`` if the rows do not have them."""
        raw = None if self.info is None else self.info.get(("images", "raw"), None)
        if isinstance(raw, NonTensorData):
            return [raw.data] * len(self)
        return None if raw is None else raw.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A part has the tables of all rows, which no other process needs.
        info = None if self.info is None else compact_images(self.info)
        if info is self.info:
            return object.__reduce_ex__(self, protocol)
        compact = _made(self, _fields_of(self) | {"info": info}, self.device)
        return object.__reduce_ex__(compact, protocol)

    def to(self, *args: Any, **kwargs: Any) -> Experience:
        """Move every field to a device, or convert the floating fields to a dtype.

        Args:
            *args: A device, a floating dtype, a tensor that has both, or a device and a dtype; then
                ``non_blocking``.
            **kwargs: ``device``, ``dtype``, ``non_blocking`` and others of a TensorDict's ``to``.

        Returns:
            The moved experience, its images' inputs included; tokens, masks and ids keep their type.

        Raises:
            TypeError: If the dtype is not floating.
        """
        dtype, where = kwargs.pop("dtype", None), []
        for arg in args:
            if isinstance(arg, bool):
                kwargs.setdefault("non_blocking", arg)
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, Tensor):
                dtype = arg.dtype
                where.append(arg.device)
            else:
                where.append(arg)
        if not (dtype is None or dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating one, got {dtype}.")
        fields = TensorDict(_fields_of(self), self.batch_size, self.device)
        if where or kwargs:
            fields = fields.to(*where, **kwargs)
        if dtype is not None:
            fields = fields.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
        moved = _made(self, dict(_with_images(fields, dtype).items()), fields.device)
        return moved.lock_() if self.is_locked else moved

    def half(self) -> Experience:
        """:meth:`to` float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Experience:
        """:meth:`to` bfloat16."""
        return self.to(torch.bfloat16)

    def float(self) -> Experience:
        """:meth:`to` float32."""
        return self.to(torch.float32)

    def double(self) -> Experience:
        """:meth:`to` float64."""
        return self.to(torch.float64)

    @classmethod
    def from_rows(cls, rows: TensorDictBase, keys: ExperienceKeys | None = None) -> Experience:
        """Make an experience of completed rows; tensors are shared, not copied.

        Args:
            rows: Rows ``[N]`` as :class:`ExperienceMaker` completes them.
            keys: The maker's ``tensor_keys``, if ``set_keys`` changed them.

        Returns:
            The experience.

        Raises:
            KeyError: If the rows lack the entry of a required field.

        Examples:
            >>> import torch
            >>> rows = TensorDict(
            ...     {
            ...         "tokens": {"full": torch.tensor([[5, 6]])},
            ...         "masks": {
            ...             "all_attention_mask": torch.tensor([[True, True]]),
            ...             "all_assistant_mask": torch.tensor([[False, True]]),
            ...         },
            ...         "log_probs": {"old": torch.tensor([[0.0, -1.0]])},
            ...         "advantage": torch.tensor([[[0.0], [2.0]]]),
            ...         "returns": torch.tensor([[0.0, 3.0]]),
            ...         "group": torch.tensor([4]),
            ...     },
            ...     batch_size=[1],
            ... )
            >>> experience = Experience.from_rows(rows)
            >>> experience.advantages, experience.info["group"], experience.kl
            (tensor([[0., 2.]]), tensor([4]), None)
            >>> bool((experience.to_rows() == rows).all())
            True
        """
        keys = ExperienceKeys() if keys is None else keys
        where: dict[str, NestedKey] = {field: getattr(keys, _NAMES[field]) for field in _NAMES}
        found = {field: rows.get(key, None) for field, key in where.items()}
        for field, value in found.items():
            if value is None and field not in _OPTIONAL:
                raise KeyError(
                    f"rows lack the entry {where[field]!r}: complete them with ExperienceMaker first."
                )
        found["advantages"] = found["advantages"].squeeze(-1)
        info = rows.exclude(*where.values())
        return cls(**found, info=info, batch_size=rows.batch_size, device=rows.device)

    def to_rows(self, keys: ExperienceKeys | None = None) -> TensorDictBase:
        """Convert back to rows; tensors are shared, not copied.

        Args:
            keys: Keys of the entries; the default ones if not given.

        Returns:
            Rows ``[N]`` as before ``from_rows``.
        """
        keys = ExperienceKeys() if keys is None else keys
        rows = TensorDict({}, self.batch_size) if self.info is None else self.info.copy()
        for field, name in _NAMES.items():
            value = getattr(self, field)
            if value is not None:
                value = value.unsqueeze(-1) if field == "advantages" else value
                rows.set(getattr(keys, name), value)
        return rows


def _fields_of(experience: Experience) -> dict[str, Any]:
    """Return the fields that are not None."""
    fields = {name: getattr(experience, name) for name in (*_NAMES, "info")}
    return {name: value for name, value in fields.items() if value is not None}


def _made(like: Experience, fields: dict[str, Any], device: torch.device | None) -> Experience:
    """Make an experience of other fields."""
    return Experience(**fields, batch_size=like.batch_size, device=device)


def _with_images(fields: TensorDict, dtype: torch.dtype | None) -> TensorDict:
    """Move the tables of images, which have no batch dimension, to where the fields are."""
    info = fields.get("info", None)
    tables = {} if info is None else {key: info.get(key, None) for key in _TABLES}
    moved = {
        key: _moved(table, fields.device, dtype)
        for key, table in tables.items()
        if table is not None
    }
    if not moved:
        return fields
    fields, info = fields.copy(), info.copy()
    for key, table in moved.items():
        info.set(key, table)
    fields.set("info", info)
    return fields


def _moved(
    table: NonTensorData | NonTensorStack, device: torch.device | None, dtype: torch.dtype | None
) -> NonTensorData | NonTensorStack:
    """Move a table, or each of the tables of rows that were joined, once."""
    if isinstance(table, NonTensorStack):
        rows = table.unbind(0)
        once = {id(row.data): row for row in rows}
        made = {name: _moved(row, device, dtype) for name, row in once.items()}
        return NonTensorStack(*(made[id(row.data)] for row in rows))
    data = table.data
    if data is None:  # Of a row that tensordict.pad added.
        return table
    data = data.to(device or data.device, dtype if data.is_floating_point() else None)
    return NonTensorData(data, batch_size=table.batch_size)
