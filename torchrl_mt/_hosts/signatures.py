"""What ``help`` says a class is made with: the arguments of its ``__init__``, of a subclass's its own.

The host's metaclasses, and a ``__new__``, take any arguments and would hide them.
"""

from __future__ import annotations

from inspect import Signature, signature
from typing import Any

__all__ = ["ConstructorSignature"]


class ConstructorSignature:
    """A class's ``__signature__``; what is made of the class has none.

    Examples:
        >>> class Host(type):
        ...     def __call__(cls, *args, **kwargs):
        ...         return super().__call__(*args, **kwargs)
        >>> class Clip(metaclass=Host):
        ...     __signature__ = ConstructorSignature()
        ...     def __init__(self, span, *, stride=1): ...
        >>> signature(Clip)
        <Signature (span, *, stride=1)>
    """

    def __get__(self, instance: Any, owner: type) -> Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        init = signature(owner.__init__)  # type: ignore[misc]
        parameters = list(init.parameters.values())[1:]
        return Signature(parameters)
