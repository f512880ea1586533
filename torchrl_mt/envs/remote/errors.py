"""Errors of environments on other machines. Collectors count them by class as causes of rejections."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CapacityReached",
    "OpenEnvConnectionError",
    "OpenEnvError",
    "OpenEnvProtocolError",
    "OpenEnvTimeoutError",
]


class OpenEnvError(RuntimeError):
    """A call of an environment on another machine failed: the server or its environment refused it.

    Its subclasses are other causes: :class:`OpenEnvConnectionError`, :class:`OpenEnvTimeoutError` and
    :class:`OpenEnvProtocolError`. Collectors count each class as a cause of its own, such as
    ``stats()["rejected/OpenEnvTimeoutError"]``.

    Args:
        url: address of the server.
        call: the call that failed, such as ``"step"``.
        reason: why it failed.
        code: the code in the server's reply, such as ``"VALIDATION_ERROR"``; empty if there is none.

    Examples:
        >>> print(OpenEnvError("ws://localhost:8000/ws", "step", "the environment raised ValueError"))
        step at ws://localhost:8000/ws failed: the environment raised ValueError.
    """

    def __init__(self, url: str, call: str, reason: str, code: str = "") -> None:
        super().__init__(f"{call} at {url} failed: {reason.rstrip('.')}.")
        self.url = url
        self.call = call
        self.reason = reason
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.call, self.reason, self.code)


class OpenEnvConnectionError(OpenEnvError):
    """The server cannot be reached, or the session was lost."""


class OpenEnvTimeoutError(OpenEnvError):
    """The server did not answer within the timeout."""


class OpenEnvProtocolError(OpenEnvError):
    """The server's reply is not what the protocol asks for."""


class CapacityReached(OpenEnvError):
    """All sessions of the server are in use. The client asks again: this is no failure."""
