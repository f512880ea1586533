from __future__ import annotations

from functools import wraps
from weakref import WeakSet

import pytest

from torchrl_mt.engines import CompletionsEngine, PolicyEngine, TransformersEngine


@pytest.fixture(autouse=True)
def closed_in_the_end(monkeypatch):
    """Every engine that a test makes is closed after it."""
    made = WeakSet()

    def noted(init):
        @wraps(init)
        def make(engine, *args, **kwargs):
            init(engine, *args, **kwargs)
            made.add(engine)

        return make

    for kind in (CompletionsEngine, PolicyEngine, TransformersEngine):
        monkeypatch.setattr(kind, "__init__", noted(kind.__init__))
    yield
    for engine in list(made):
        engine.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def engine(model, tokenizer):
    return TransformersEngine(model, tokenizer, max_new_tokens=8)
