"""Forward passes of a model that leave it unchanged, without a cache, in half precision if asked.

Modes, hooks and length-dependent frequencies are restored, and so is the random state if no other thread
runs. Threads that share a model take turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from threading import Lock, RLock, active_count, get_ident
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrl_mt._hosts.accelerate import execution_device
from torchrl_mt._hosts.peft import is_peft_model
from torchrl_mt._hosts.transformers import looks_back_only
from torchrl_mt.devices import sent
from torchrl_mt.ranks import reshard
from torchrl_mt.scoring.rope_lengths import lengths_apart

_LOCKS: WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = WeakKeyDictionary()
_LOCKS_CHANGE = Lock()


@contextmanager
def scoring_mode(*models: nn.Module) -> Iterator[None]:
    """Put models in evaluation mode without gradients; restore every submodule's mode afterwards.

    Other threads wait to enter it with one of the models, or to run one through :func:`run_model`;
    direct calls of a model do not wait.

    The random state is restored only if no other thread runs: generators are shared by all threads, and
    one that samples meanwhile would get the same numbers twice.

    Args:
        *models: The models to use inside.
    """
    with ExitStack() as stack:
        # In a fixed order, against deadlocks.
        for lock in sorted({id(lock): lock for lock in map(_lock, models)}.values(), key=id):
            stack.enter_context(lock)
        modes = [(module, module.training) for model in models for module in model.modules()]
        stack.enter_context(torch.no_grad())
        if active_count() == 1:
            parameters = (p for model in models for p in model.parameters())
            devices = {p.device.index for p in parameters if p.device.type == "cuda"}
            stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        try:
            for model in models:
                model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for model in models:
                reshard(model)


def _lock(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the lock of all models with the same first layer: wrappers, critics on a backbone."""
    layers = (module for module in model.modules() if next(module.children(), None) is None)
    with _LOCKS_CHANGE:
        return _LOCKS.setdefault(next(layers), RLock())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers whose only submodule is ``module``, as DistributedDataParallel.

    Call the wrapper; read attributes of the model inside.

    Examples:
        >>> inner = nn.Linear(1, 1)
        >>> unwrapped(nn.DataParallel(inner)) is inner, unwrapped(inner) is inner
        (True, True)
    """
    for level in _levels(model):
        model = level
    return model


def text_config(model: nn.Module) -> Any:
    """Return a model's configuration, of its text part if it has several; ``None`` if it has none."""
    config = getattr(unwrapped(model), "config", None)
    find = getattr(config, "get_text_config", None)
    return find() if callable(find) else config


def accepts(model: nn.Module, name: str) -> bool:
    """Whether a model and all its wrappers take a keyword argument of this name."""

    def takes(module: nn.Module) -> bool:
        parameters = inspect.signature(module.forward).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    return all(map(takes, _levels(model)))


def _levels(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, the model that it wraps, and so on."""
    yield model
    inner = getattr(model, "module", None)
    while isinstance(inner, nn.Module) and list(model.children()) == [inner]:
        yield inner
        model, inner = inner, getattr(inner, "module", None)


def run_model(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """Call a model on its own device, while no other thread scores with it.

    ``inputs`` are keyword arguments with tensors on any device; ``dtype`` is the type for automatic
    mixed precision, if any.

    Raises:
        ValueError: If a token is outside the model's vocabulary, or rows need different rotary
            frequencies (:mod:`~torchrl_mt.scoring.rope_lengths`).
    """
    _check_vocabulary(model, inputs["input_ids"])
    if isinstance(model, DistributedDataParallel) and not torch.is_grad_enabled():
        # The wrapper sends buffers to all ranks, which need not make as many passes.
        model = model.module
    device = device_of(model) or inputs["input_ids"].device
    rows, inputs = inputs, _without_needless_mask(model, inputs)
    inputs = {k: sent(v, device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    inner = unwrapped(model)
    # A ** may lead to a module without this keyword; transformers' models all have it.
    named = "use_cache" in inspect.signature(inner.forward).parameters
    if accepts(model, "use_cache") and (named or getattr(inner, "config", None) is not None):
        inputs["use_cache"] = False
    precision = nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    with _lock(model), lengths_apart(model, rows), precision:
        return model(**inputs)


def _without_needless_mask(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Leave out a mask on the CPU that hides nothing but padding behind rows from a causal model.

    transformers would wait twice for a GPU to look at it, and attention without one is faster.
    """
    mask, inner = inputs.get("attention_mask"), unwrapped(model)
    if not isinstance(mask, Tensor) or not mask.is_cpu or mask.ndim != 2:
        return inputs
    inner = inner.get_base_model() if is_peft_model(inner) else inner  # type: ignore[operator]
    if bool((mask[:, 1:] > mask[:, :-1]).any()) or not looks_back_only(inner):
        return inputs
    return inputs | {"attention_mask": None}


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first layer; None without parameters.

    Raises:
        ValueError: If its weights have no values.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_meta:
        return None if parameter is None else parameter.device
    device = execution_device(model)
    if device is None:
        raise ValueError(
            f"{type(model).__name__} must have weights with values, got parameters on the meta device; "
            "load it first, or offload this very module with accelerate."
        )
    return device


def _check_vocabulary(model: nn.Module, token_ids: Tensor) -> None:
    """Refuse tokens that the model cannot embed: on a GPU they would break the CUDA context."""
    inner = unwrapped(model)
    embedding = None
    # Multimodal models may have no single embedding.
    with suppress(AttributeError, NotImplementedError):
        embedding = cast(Any, inner).get_input_embeddings()
    if getattr(type(embedding), "forward", None) is not nn.Embedding.forward:
        return  # A custom embedding may take any number.
    count = cast(nn.Embedding, embedding).num_embeddings
    unknown = token_ids[(token_ids < 0) | (token_ids >= count)]
    # Some tokens are placeholders for pictures, replaced before embedding.
    placeholders = {
        value
        for name, value in vars(getattr(inner, "config", None) or object).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    left = set(unknown.tolist()) - placeholders
    if left:
        raise ValueError(
            f"tokens must be in [0, {count}), the vocabulary of {type(inner).__name__}, got "
            f"{min(left)}; were they made with another model's tokenizer?"
        )


@contextmanager
def hooked(
    module: nn.Module,
    before: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None = None,
    after: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> Iterator[None]:
    """Hook a submodule's calls from this thread; calls from other threads are unaffected.

    Args:
        module: The submodule.
        before: Called with the positional arguments; returns their replacement, or ``None``.
        after: Called with these and the output; returns the output's replacement, or ``None``.
    """
    owner = get_ident()

    def pre_hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return before(args) if before is not None and get_ident() == owner else None

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return after(args, output) if after is not None and get_ident() == owner else None

    with ExitStack() as stack:
        if before is not None:
            stack.callback(module.register_forward_pre_hook(pre_hook).remove)
        if after is not None:
            stack.callback(module.register_forward_hook(hook).remove)
        yield
