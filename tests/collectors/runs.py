"""Collectors and their runs, in few words, and what is asked of any run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from tensordict import TensorDictBase

from torchrl_mt.collectors import CollectorOptions, MultiTurnCollector

_RARE = [field.name for field in fields(CollectorOptions)]


def collecting(
    env: Any, engine: Any, data: Any = None, *, n: int = 1, **options: Any
) -> MultiTurnCollector:
    """A collector of ``n`` episodes a batch; its options and those of ``CollectorOptions`` are alike."""
    rare = {name: options.pop(name) for name in _RARE if name in options}
    if rare:
        options["options"] = CollectorOptions(**rare)
    return MultiTurnCollector(env, engine, data, episodes_per_batch=n, **options)


def run_of(*args: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """All batches of a collector, and its statistics."""
    with collecting(*args, **options) as collector:
        return list(collector), collector.stats()


def first_batch(*args: Any, **options: Any) -> tuple[TensorDictBase, dict[str, Any]]:
    """The first batch of a collector, and its statistics."""
    with collecting(*args, **options) as collector:
        return next(iter(collector)), collector.stats()


def failed_run(match: str, *args: Any, **options: Any) -> tuple[BaseException, dict[str, Any]]:
    """The cause of the error that ends a run before its first batch, and the statistics."""
    with (
        collecting(*args, **options) as collector,
        pytest.raises(RuntimeError, match=match) as caught,
    ):
        next(iter(collector))
    return caught.value.__cause__, collector.stats()


def balanced(stats: dict[str, Any], running: int | None = None) -> bool:
    """Whether each episode that started is accepted, rejected or runs; if asked, so many run."""
    known = stats["accepted"] + stats["rejected"] + stats["running"] == stats["started"]
    return known and running in (None, stats["running"])


def oldest_version(batch: TensorDictBase) -> int:
    """The oldest weights that sampled a token of a batch."""
    return min(int(v.min()) for v in batch.get(("versions", "response"), as_list=True))
