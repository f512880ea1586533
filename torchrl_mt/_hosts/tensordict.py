"""Private names of tensordict: the fields of a tensorclass as one TensorDict."""

from __future__ import annotations

from typing import Any, TypeVar

from tensordict import TensorDict

__all__ = ["tensor_fields", "with_tensor_fields"]

# --- Records of experience ------------------------------------------------------------------------

_Record = TypeVar("_Record", bound=Any)


def tensor_fields(record: Any) -> TensorDict:
    """The tensors of a tensorclass, which may have fields that hide its methods, ``values`` say."""
    return record._tensordict


def with_tensor_fields(record: _Record, fields: TensorDict) -> _Record:
    """A record of the same class with other tensors and the same objects that are no tensors."""
    return type(record)._from_tensordict(fields, dict(record._non_tensordict))
