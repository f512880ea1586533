from __future__ import annotations

import gc

import pytest

from torchrl_mt.engines import TransformersEngine


@pytest.fixture(scope="session", autouse=True)
def quick_to_close():
    """The host collects garbage when an engine closes: spare it a walk through every imported module."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def engine(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, page_size=8, max_new_tokens=8)
    yield engine
    engine.close()
