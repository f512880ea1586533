from __future__ import annotations

import pytest

from torchrl_mt.engines import TransformersEngine


@pytest.fixture
def engine(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, max_new_tokens=8)
    yield engine
    engine.close()
