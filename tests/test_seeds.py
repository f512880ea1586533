"""Draws of a library's modules: from the episode's generators inside, from the global ones outside."""

# ruff: noqa: NPY002 - the library draws from the global generators

from __future__ import annotations

import asyncio
import copy
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import examples
from torchrl_mt.seeds import EpisodeGenerators, drawing_from, redirect_draws, seed_of

SOURCE = """
import random, numpy, numpy as np
from numpy import random as np_random

def draw():
    items = list(range(9))
    random.shuffle(items)
    return [
        items, random.random(), random.choice("abc"), random.gauss(0, 1), random.Random(3).random(),
        int(np.random.randint(99)), float(numpy.random.normal()), float(np_random.rand()),
        np.random.permutation(5).tolist(), float(np.linspace(0, 1, 3)[1]),
    ]

def seed(value):
    random.seed(value)
    np.random.seed(value)
"""


def imported(name):
    made = sys.modules[name] = ModuleType(name)
    exec(SOURCE, vars(made))
    return made


@pytest.fixture(scope="module")
def library():
    made, other = imported("drawing_library.games"), imported("drawing_library2")
    for _ in range(2):
        redirect_draws("drawing_library")
    assert (other.random, other.np) == (random, np)
    yield made
    del sys.modules[made.__name__], sys.modules[other.__name__]


def states():
    return random.getstate(), np.random.get_state()[1].tolist()


@examples()
@given(seed=st.integers(0, 2**32 - 1))
def test_a_seed_means_what_it_means_for_the_global_generators(library, seed):
    with drawing_from(EpisodeGenerators(0)):
        library.seed(seed)
        inside = library.draw()
    library.seed(seed)
    assert library.draw() == inside


@examples()
@given(seeds=st.lists(st.integers(-(2**70), 2**70), min_size=2, max_size=5, unique=True))
def test_episodes_draw_from_their_own_generators(library, seeds):
    async def episode(seed, generators):
        drawn = []
        for _ in range(3):
            with drawing_from(generators):
                drawn.append(library.draw())
            await asyncio.sleep(0)
        return drawn

    async def at_once():
        return await asyncio.gather(*(episode(k, EpisodeGenerators(k)) for k in seeds))

    before = states()
    together = asyncio.run(at_once())
    assert states() == before
    alone = [asyncio.run(episode(k, EpisodeGenerators(k))) for k in seeds]
    assert together == alone


# ---- seeds of data -------------------------------------------------------------------------------

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
ITEMS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


def turned_round(value):
    """An equal value, in which all mappings have another order."""
    if isinstance(value, dict):
        return {key: turned_round(part) for key, part in reversed(value.items())}
    return [turned_round(part) for part in value] if isinstance(value, list) else value


@examples()
@given(item=ITEMS, other=ITEMS)
def test_the_content_determines_a_seed_of_31_bits(item, other):
    seed = seed_of(item)
    assert seed == seed_of(copy.deepcopy(item)) == seed_of(turned_round(item))
    assert 0 <= seed < 2**31
    if item != other:
        assert seed != seed_of(other)


def test_a_seed_depends_neither_on_hashes_nor_on_addresses():
    objects = {"c": object(), "d": SimpleNamespace(e=object())}
    assert seed_of({"a": {"x", "y", "z"}, "b": np.arange(3), **objects}) == 120698323


def test_long_arrays_count_whole():
    zeros, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1
    assert seed_of({"a": zeros}) == seed_of({"a": torch.zeros(5000)}) != seed_of({"a": other})


def test_a_given_seed_is_the_seed():
    given_seeds = (None, {"seed": np.int64(3)}, {"seed": 0, "a": 1})
    assert [seed_of(data) for data in given_seeds] == [None, 3, 0]
    assert seed_of({"seed": None, "a": 1}) != seed_of({"seed": None, "a": 2})
