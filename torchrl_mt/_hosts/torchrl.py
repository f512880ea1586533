"""Private names of TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Signature, signature
from typing import Any

from tensordict import NestedKey
from torchrl.objectives import LossModule

# ---- replay buffers, their storages and samplers ------------------------------------------------


def buffers_on(storage: Any) -> list[Any]:
    """The buffers, and what else, that are attached to a storage: no public name lists them."""
    return list(storage._attached_entities_iter())


def writer_of(buffer: Any) -> Any:
    """The writer of what is attached to a storage; None if it has none.

    The public property makes the writer of a buffer with ``delayed_init``, which is not always wanted.
    """
    return getattr(buffer, "_writer", None)


def sampler_of(buffer: Any) -> Any:
    """The sampler of what is attached to a storage, as :func:`writer_of`."""
    return getattr(buffer, "_sampler", None)


def forget(sampler: Any) -> None:
    """Have a sampler begin anew, as ``buffer.empty()`` does to its own."""
    sampler._empty()


@contextmanager
def buffer_held(buffer: Any) -> Iterator[None]:
    """Keep other threads from writing to a buffer and from sampling from it.

    The locks are taken in the buffer's own order: batches that are being prefetched wait for the second.
    """
    with buffer._futures_lock:
        buffer.synchronize()
        with buffer._replay_lock:
            yield


def prefetched_batches(buffer: Any) -> Any:
    """The futures of the batches that a buffer prefetched: a deque, which may be changed."""
    return buffer._prefetch_queue


@contextmanager
def without_unreadable_prefetched_batches(
    buffer: Any, warn: Callable[[str, Exception], Any]
) -> Iterator[None]:
    """Have ``buffer.loads`` leave out saved batches that are on a device that is not here.

    Args:
        buffer: the buffer.
        warn: called with a format and the error if they are left out.
    """
    given = buffer._load_prefetch_state

    def load(path: Any) -> Any:
        try:
            return given(path)
        except RuntimeError as error:
            warn("prefetched batches are left out: %s", error)
            return None

    buffer._load_prefetch_state = load
    try:
        yield
    finally:
        del buffer._load_prefetch_state


# ---- classes with TorchRL's metaclasses ---------------------------------------------------------


class ConstructorSignature:
    """The ``__signature__`` of a class: the arguments of its ``__init__``, of a subclass's its own.

    The host's metaclasses, and a ``__new__``, take any arguments and would hide them from ``help``.

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


# ---- losses ---------------------------------------------------------------------------------------


def loss_mask_keys(loss: LossModule) -> tuple[NestedKey, ...]:
    """Where a loss looks for masks of what counts: ``loss_mask_key``, or the host's usual places."""
    return loss._loss_mask_keys()


# ---- wrappers of language models ----------------------------------------------------------------


def min_batch_size(wrapper: Any) -> int | None:
    """How many requests an ``LLMWrapperBase`` waits for by itself; ``None``: it does not.

    No public attribute has it.
    """
    return getattr(wrapper, "_min_batch_size", None)
