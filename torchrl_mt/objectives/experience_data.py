"""Completed rows as a record with the field's usual names; nothing of the rows is lost in it.

Like every tensorclass, :meth:`to`, :meth:`pin_memory`, indexing and stacking act on every field,
``info`` and what is nested in it included; but :meth:`to` a dtype leaves ids and masks what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorClass, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_mt._hosts.tensordict import tensordict_of, with_tensor_fields
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import read_entry

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
"""Each field's entry in the rows, by the name of its key."""
_OPTIONAL = ("base_action_log_probs", "values", "kl", "action_entropy")


class Experience(TensorClass, shadow=True):  # type: ignore[call-arg]
    """Experience of ``N`` rows of ``S`` tokens, as :class:`ExperienceMaker` makes it.

    Sampled tokens lie where ``action_mask`` is true, with holes between turns; all fields but ``info``
    have the shape ``[N, S]``. What the maker did not make is ``None``.
    """

    sequences: Tensor
    """int64: the tokens."""
    attention_mask: Tensor
    """bool: not padding."""
    action_mask: Tensor
    """bool: sampled by the policy."""
    action_log_probs: Tensor
    """float32: of the old policy."""
    returns: Tensor
    """float32: return-to-go, or what the critic is trained towards."""
    advantages: Tensor
    """float32."""
    base_action_log_probs: Tensor | None = None
    """float32: of the reference policy."""
    values: Tensor | None = None
    """float32: of the critic. It hides the method of this name; use ``items()``."""
    kl: Tensor | None = None
    """float32: estimates of the KL from the old policy to the reference."""
    action_entropy: Tensor | None = None
    """float32: the actor's entropy where each token was sampled."""
    info: TensorDict | None = None
    """All other entries of the rows, ``[N]``."""

    def to(self, *args: Any, **kwargs: Any) -> Experience:
        """Move every field; a dtype is for those that hold floating numbers, as in a module.

        Args:
            *args: A device, a floating dtype, a tensor that has both, or a device and a dtype; then
                ``non_blocking``.
            **kwargs: ``device``, ``dtype``, ``non_blocking`` and what else a TensorDict's ``to`` takes.

        Returns:
            The experience there; tokens, masks and ids keep their type, and so their values.

        Raises:
            TypeError: If the dtype is no floating one.
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
        fields = tensordict_of(self)
        if where or kwargs:
            fields = fields.to(*where, **kwargs)
        if dtype is not None:
            fields = fields.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
        if self.is_locked:
            fields.lock_()
        return with_tensor_fields(self, fields)

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
        """Take completed rows; their tensors are shared, not copied.

        Args:
            rows: Rows ``[N]`` as :class:`ExperienceMaker` completes them.
            keys: Where their entries lie: the maker's ``tensor_keys``, if ``set_keys`` changed them.

        Returns:
            The experience.

        Raises:
            KeyError: If the rows lack an entry that has no ``None``.

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
        found = {}
        for field, key in where.items():
            if field in _OPTIONAL:
                found[field] = rows.get(key, None)
            else:
                found[field] = read_entry(rows, key, getattr(ExperienceKeys, _NAMES[field]))
        found["advantages"] = found["advantages"].squeeze(-1)
        info = rows.exclude(*where.values())
        return cls(**found, info=info, batch_size=rows.batch_size, device=rows.device)

    def to_rows(self, keys: ExperienceKeys | None = None) -> TensorDictBase:
        """Give the rows back; tensors are shared, not copied.

        Args:
            keys: Where to put the entries.

        Returns:
            Rows ``[N]``, as ``from_rows`` took them.
        """
        keys = ExperienceKeys() if keys is None else keys
        rows = TensorDict({}, self.batch_size) if self.info is None else self.info.copy()
        for field, name in _NAMES.items():
            value = getattr(self, field)
            if value is not None:
                value = value.unsqueeze(-1) if field == "advantages" else value
                rows.set(getattr(keys, name), value)
        return rows
