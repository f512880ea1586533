"""``help`` and editors see how each public class is made."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from typing import Any, Protocol

import pytest

from torchrl_mt.data import ClipSampler, EpisodeSampler, EpisodeStorage, PrioritizedClipSampler

PACKAGES = ("agents", "collectors", "data", "datasets", "engines", "envs", "objectives", "testing")
PACKAGES += ("objectives.filters", "objectives.functional", "transforms", "view", "vision")


def public_classes() -> list[type]:
    """Those that one makes objects of: not protocols, nor those without a constructor of their own."""
    found: dict[str, type] = {}
    for package in PACKAGES:
        module = importlib.import_module(f"torchrl_mt.{package}")
        for name in getattr(module, "__all__", dir(module)):
            each = getattr(module, name)
            if inspect.isclass(each) and each.__module__.startswith("torchrl_mt"):
                found[each.__qualname__] = each
    return [
        each
        for _, each in sorted(found.items())
        if Protocol not in each.__bases__ and "__init__" in vars(each)
    ]


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__qualname__)
def test_the_signature_of_a_class_is_that_of_its_constructor(cls: type) -> None:
    shown = inspect.signature(cls).parameters
    assert list(shown) == list(inspect.signature(cls.__init__).parameters)[1:]
    assert not {"args", "kwargs"} & set(shown)


def test_there_are_public_classes() -> None:
    names = {cls.__name__ for cls in public_classes()}
    assert {"EpisodeStorage", "EpisodeSampler", "MultiTurnCollector", "MultiTurnLoss"} <= names


class Small(EpisodeStorage):
    def __init__(self, size: int) -> None:
        super().__init__(size, max_tokens=size)


def test_a_subclass_has_the_signature_of_its_own_constructor() -> None:
    assert list(inspect.signature(Small).parameters) == ["size"]
    assert Small(3).max_tokens == 3


MADE = [EpisodeStorage(5), EpisodeSampler(), ClipSampler(slice_len=2)]


@pytest.mark.parametrize(
    "made", [*MADE, PrioritizedClipSampler(slice_len=2)], ids=lambda made: type(made).__name__
)
def test_what_is_made_is_copied_and_is_no_signature(made: Any) -> None:
    assert type(pickle.loads(pickle.dumps(made))) is type(made)
    assert type(copy.deepcopy(made)) is type(made)
    assert not hasattr(made, "__signature__")
