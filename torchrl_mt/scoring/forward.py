"""Running a model on training rows: without a cache, in half precision where asked, and unchanged.

What a model was before (modes, hooks, frequencies that depend on lengths) it is again afterwards, and so
is the random state where one thread runs; threads that share a model take turns.
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

from torchrl_mt.scoring.rope_lengths import lengths_apart

_LOCKS: WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = WeakKeyDictionary()
_LOCKS_CHANGE = Lock()


@contextmanager
def scoring_mode(*models: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; give back every submodule's mode as it was.

    Another thread that enters it with one of the models, or that runs one through :func:`run_model`,
    waits until this one has left. Calls of the model itself do not wait.

    The random state is given back, too, but only while no other thread runs: torch's generators belong
    to all threads, and turned back they would deal another one (that samples, say) the same numbers
    twice. Then a model that draws although it is in evaluation mode moves it on.

    Args:
        *models: The models that are used inside.
    """
    with ExitStack() as stack:
        # In one order, lest two threads hold what the other waits for.
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


def _lock(model: nn.Module) -> AbstractContextManager[Any]:
    """Lock of a model and of all that have its first layer: wrappers, a critic on its backbone."""
    layers = (module for module in model.modules() if next(module.children(), None) is None)
    with _LOCKS_CHANGE:
        return _LOCKS.setdefault(next(layers), RLock())


def unwrapped(model: nn.Module) -> nn.Module:
    """Look through wrappers whose only submodule is ``module``: DistributedDataParallel, for one.

    It is the wrapper that is to be called; the model inside has the attributes that tell what it is.

    Examples:
        >>> inner = nn.Linear(1, 1)
        >>> unwrapped(nn.DataParallel(inner)) is inner, unwrapped(inner) is inner
        (True, True)
    """
    for level in _levels(model):
        model = level
    return model


def text_config(model: nn.Module) -> Any:
    """The configuration of a model, or of its text part if it has more; ``None`` if it has none."""
    config = getattr(unwrapped(model), "config", None)
    find = getattr(config, "get_text_config", None)
    return find() if callable(find) else config


def accepts(model: nn.Module, name: str) -> bool:
    """Say whether a model, and all that wraps it, can be called with a keyword argument of a name."""

    def takes(module: nn.Module) -> bool:
        parameters = inspect.signature(module.forward).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    return all(map(takes, _levels(model)))


def _levels(model: nn.Module) -> Iterator[nn.Module]:
    """The model, what it wraps, what that wraps, ..."""
    yield model
    inner = getattr(model, "module", None)
    while isinstance(inner, nn.Module) and list(model.children()) == [inner]:
        yield inner
        model, inner = inner, getattr(inner, "module", None)


def run_model(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """Call a model on its own device, while no other thread scores with it.

    ``inputs`` are keyword arguments, whose tensors may lie anywhere; ``dtype`` is what to compute in
    where torch's automatic mixed precision does.

    Raises:
        ValueError: If the model has no embedding of a token, or its rotary frequencies depend on the
            longest row of a pass, and rows of this one would have others alone
            (:mod:`~torchrl_mt.scoring.rope_lengths`).
    """
    _check_vocabulary(model, inputs["input_ids"])
    parameter = next(model.parameters(), None)
    device = inputs["input_ids"].device if parameter is None else parameter.device
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    inner = unwrapped(model)
    # What comes through ** may be a module's that does not know it; transformers' models all do.
    named = "use_cache" in inspect.signature(inner.forward).parameters
    if accepts(model, "use_cache") and (named or getattr(inner, "config", None) is not None):
        inputs["use_cache"] = False
    precision = nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    with _lock(model), lengths_apart(model, inputs), precision:
        return model(**inputs)


def _check_vocabulary(model: nn.Module, token_ids: Tensor) -> None:
    """Refuse tokens that the model cannot embed: on a GPU they would end the process's use of it."""
    inner = unwrapped(model)
    embedding = None
    # Models of more than text may have no one embedding.
    with suppress(AttributeError, NotImplementedError):
        embedding = cast(Any, inner).get_input_embeddings()
    if getattr(type(embedding), "forward", None) is not nn.Embedding.forward:
        return  # Another one may know what to do with any number.
    count = cast(nn.Embedding, embedding).num_embeddings
    unknown = token_ids[(token_ids < 0) | (token_ids >= count)]
    # A model puts pictures in the place of some tokens before it embeds the others.
    placeholders = {
        value
        for name, value in vars(getattr(inner, "config", None) or object).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    left = set(unknown.tolist()) - placeholders
    if left:
        raise ValueError(
            f"tokens must be in [0, {count}), the vocabulary of the {type(inner).__name__} that they "
            f"are given to, got {min(left)}; were they made with another tokenizer than this model's?"
        )


@contextmanager
def hooked(
    module: nn.Module,
    before: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None = None,
    after: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> Iterator[None]:
    """Watch a submodule's calls from this thread; calls from other threads go on as ever.

    Args:
        module: The submodule.
        before: Called with the positional arguments; returns what to call with instead, or ``None``.
        after: Called with these and the output; returns what to give instead, or ``None``.
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
