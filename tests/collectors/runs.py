"""Collectors and their runs, in few words, and what is asked of any run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from threading import Thread
from typing import Any

import pytest
from tensordict import TensorDictBase

from tests.waiting import PATIENCE
from torchrl_mt.collectors import CollectorOptions, MultiTurnCollector

_RARE = [field.name for field in fields(CollectorOptions)]


def collecting(
    env: Any,
    engine: Any,
    data: Any = None,
    *,
    n: int = 1,
    make: type[MultiTurnCollector] = MultiTurnCollector,
    **options: Any,
) -> MultiTurnCollector:
    """A collector of ``n`` episodes a batch; its options and those of ``CollectorOptions`` are alike."""
    rare = {name: options.pop(name) for name in _RARE if name in options}
    if rare:
        options["options"] = CollectorOptions(**rare)
    return make(env, engine, data, episodes_per_batch=n, **options)


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


@contextmanager
def beside(*functions: Callable[[], Any]) -> Iterator[None]:
    """Call functions in threads of their own meanwhile; in the end they have returned."""
    threads = [Thread(target=each, daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def balanced(stats: dict[str, Any], running: int | None = None) -> bool:
    """Whether each episode that started is accepted, rejected or runs; if asked, so many run."""
    known = stats["accepted"] + stats["rejected"] + stats["running"] == stats["started"]
    return known and running in (None, stats["running"])


def lists(batch: TensorDictBase, *key: str) -> list[list[Any]]:
    """Tokens and the like of a batch, turn for turn."""
    return [values.tolist() for values in batch.get(key, as_list=True)]


def played(batch: TensorDictBase, key: str = "k") -> list[Any]:
    """What the items of a batch have under a key, turn for turn."""
    return [item[key] for item in batch["data"]]


def played_to_the_end(collector: MultiTurnCollector, seen: list[Any] | None = None) -> list[Any]:
    """Take all batches and update the weights after each; return ``played`` of all, behind ``seen``."""
    seen = [] if seen is None else seen
    for batch in collector.iterator():
        seen += played(batch)
        collector.update_policy_weights_()
    return seen


def versions_in(batch: TensorDictBase) -> set[int]:
    """Of the weights that sampled a token of a batch."""
    return {version for turn in lists(batch, "versions", "response") for version in turn}


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The messages in the log that have the text in them."""
    return [message for message in caplog.messages if text in message]
