"""Private names of TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Signature, signature
from pathlib import Path
from typing import Any

from tensordict import NestedKey
from torchrl import _utils
from torchrl.objectives import LossModule

# ---- replay buffers, their storages and samplers ------------------------------------------------


def buffers_on(storage: Any) -> list[Any]:
    """List the buffers and other objects attached to a storage; no public name lists them."""
    return list(storage._attached_entities_iter())


def writer_of(buffer: Any) -> Any:
    """Return the writer of an object attached to a storage; None if it has none.

    The public property would create the writer of a buffer with ``delayed_init``.
    """
    return getattr(buffer, "_writer", None)


def sampler_of(buffer: Any) -> Any:
    """Return the sampler of an object attached to a storage, as :func:`writer_of`."""
    return getattr(buffer, "_sampler", None)


def forget(sampler: Any) -> None:
    """Reset a sampler, as ``buffer.empty()`` does."""
    sampler._empty()


@contextmanager
def buffer_held(buffer: Any) -> Iterator[None]:
    """Lock a buffer against writing and sampling by other threads.

    The locks are taken in the buffer's own order: batches being prefetched wait for the second.
    """
    with buffer._futures_lock:
        buffer.synchronize()
        with buffer._replay_lock:
            yield


def prefetched_batches(buffer: Any) -> Any:
    """Return the futures of a buffer's prefetched batches: a deque, which may be changed."""
    return buffer._prefetch_queue


@contextmanager
def prefetched_batches_saved_by(
    buffer: Any, save: Callable[[Path, Any], Any], load: Callable[[Path], Any]
) -> Iterator[None]:
    """Make ``buffer.dumps`` and ``buffer.loads`` call these for prefetched batches, which they pickle.

    Args:
        buffer: the buffer.
        save: called with the folder and the state.
        load: called with the folder; returns the state, or None to leave it out.
    """
    buffer._dump_prefetch_state, buffer._load_prefetch_state = save, load
    try:
        yield
    finally:
        del buffer._dump_prefetch_state, buffer._load_prefetch_state


# ---- classes with TorchRL's metaclasses ---------------------------------------------------------


class ConstructorSignature:
    """Descriptor for ``__signature__``: the arguments of a class's (or subclass's) ``__init__``.

    TorchRL's metaclasses, and a ``__new__``, take any arguments and hide them from ``help``.

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


# ---- Ray ----------------------------------------------------------------------------------------


def as_remote(cls: type, remote_config: dict[str, Any]) -> Any:
    """Make a Ray actor class, as TorchRL's own collectors do; ``remote_config`` must not be empty."""
    return _utils.as_remote.__func__(cls, remote_config)


def hold_ray(init_config: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Initialise Ray unless it is, as TorchRL's collectors and buffers do.

    Args:
        init_config: arguments of ``ray.init``.

    Returns:
        A function that gives Ray up. Ray is shut down if TorchRL or this function initialised it, and
        nobody else holds it.
    """
    from torchrl._comm.ray_runtime import _RayRuntimeLease

    return _RayRuntimeLease.acquire(dict(init_config or {})).release


# ---- losses ---------------------------------------------------------------------------------------


def loss_mask_keys(loss: LossModule) -> tuple[NestedKey, ...]:
    """Return the keys under which a loss looks for its mask."""
    return loss._loss_mask_keys()


# ---- wrappers of language models ----------------------------------------------------------------


def min_batch_size(wrapper: Any) -> int | None:
    """Return how many requests an ``LLMWrapperBase`` batches; None if it does not batch.

    No public attribute has it.
    """
    return getattr(wrapper, "_min_batch_size", None)
