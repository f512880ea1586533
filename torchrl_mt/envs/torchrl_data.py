"""Initial data of an episode in a TorchRL environment, from the caller or the environment's loader."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, TensorDictPrimer, Transform, TransformedEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.envs.utils import make_composite_from_td

from torchrl_mt.checks import shown

__all__ = ["LoaderItems", "initial_entries", "transforms_of", "with_entries"]

_SEEDS_KEPT = 10_000


class LoaderItems:
    """Items of an environment's data loader, by seed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: DataLoadingPrimer | None = None
        self._drawn: dict[int, dict[str, Any]] = {}

    def item(self, loader: DataLoadingPrimer, seed: int | None) -> dict[str, Any]:
        """The item of a seed, by index if the data set can be indexed; without a seed, the next item."""
        dataset: Any = getattr(loader.dataloader, "dataset", None)
        if seed is None or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            return self._draw(loader, seed)
        batch = loader.dataloader.collate_fn([dataset[seed % len(dataset)]])
        if not is_tensor_collection(batch):
            batch = TensorDict.from_dict(batch, batch_size=[1])
        return _entries_of(batch[0])

    def _draw(self, loader: DataLoadingPrimer, seed: int | None) -> dict[str, Any]:
        """Draw an item from the first loader that was passed, once per seed."""
        with self._lock:
            if seed is not None and seed in self._drawn:
                return self._drawn[seed]
            self._source = self._source or loader
            item = _entries_of(self._source.default_value())
            if seed is not None:
                self._drawn[seed] = item
                if len(self._drawn) > _SEEDS_KEPT:
                    del self._drawn[next(iter(self._drawn))]
            return item


def initial_entries(data: Any, env: EnvBase, loader_items: LoaderItems) -> dict[str, Any]:
    """Initial entries of an episode, with the question under the environment's ``data_key``.

    Raises:
        TypeError: if ``data`` is neither a mapping nor a question.
        ValueError: if ``data`` lacks the question or another entry of the environment's data loader.
    """
    name = getattr(env, "data_key", "query")
    if isinstance(data, Mapping):
        given = {key: value for key, value in data.items() if value is not None}
        if name not in given and "messages" in given:
            given[name] = given.pop("messages")
    elif isinstance(data, (str, History)) or _is_conversation(data):
        given = {name: data}
    elif data is None:
        given = {}
    else:
        raise TypeError(f"data must be a mapping, a text or a list of messages, got {shown(data)}.")
    loader = next((t for t in transforms_of(env) if isinstance(t, DataLoadingPrimer)), None)
    if loader is None:
        if name in given:
            return given
        raise ValueError(
            f'data must hold the question, as data["{name}"] or data["messages"], since the environment '
            f"has no data loader of its own, got {sorted(map(str, given))}."
        )
    if name not in given:
        seed = given.get("seed")
        return loader_items.item(loader, None if seed is None else int(seed))
    if missing := sorted(set(map(str, loader.data_keys)) - set(map(str, given))):
        raise ValueError(
            f"data must hold all that the environment's data loader would, got no {missing}: add them, "
            "or leave the data loader out."
        )
    return given


def with_entries(env: EnvBase, entries: Mapping[str, Any]) -> TransformedEnv:
    """Add entries to an environment's tensordict at every step."""
    data = TensorDict({key: _batched(value) for key, value in entries.items()}, batch_size=[1])
    primer = TensorDictPrimer(
        primers=make_composite_from_td(data, unsqueeze_null_shapes=False),
        default_value=lambda reset=None: data,
        single_default_value=True,
        call_before_env_reset=True,
        expand_specs=True,
        reset_key="_reset",
    )
    if not isinstance(env, TransformedEnv):
        return TransformedEnv(env, primer)
    inner = env
    while isinstance(inner.base_env, TransformedEnv):
        inner = inner.base_env
    # First, so that all other transforms find the data at a step. Before a reset, transforms run from
    # last to first, so this one also overrides the environment's data loader.
    inner.insert_transform(0, primer)
    env.empty_cache()
    return env


def transforms_of(env: EnvBase) -> Iterator[Transform]:
    """All transforms of an environment, including nested ones."""
    while isinstance(env, TransformedEnv):
        waiting = [env.transform]
        while waiting:
            transform = waiting.pop()
            yield transform
            if isinstance(transform, Compose):
                waiting.extend(transform.transforms)
        env = env.base_env


def _entries_of(item: TensorDictBase) -> dict[str, Any]:
    """The entries of one item, with non-tensor entries unwrapped."""
    return {key: item[key] for key in item.keys()}  # noqa: SIM118 - iterates over rows otherwise


def _batched(value: Any) -> Any:
    """A value with a batch dimension of 1."""
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value, device="cpu")
    if isinstance(value, torch.Tensor):
        # A copy, because episodes may share the data and a transform may write into it.
        return value.unsqueeze(0).clone()
    return NonTensorStack(NonTensorData(value))


def _is_conversation(data: Any) -> bool:
    """Whether data is a list of messages."""
    return (
        isinstance(data, Sequence)
        and len(data) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in data)
    )
