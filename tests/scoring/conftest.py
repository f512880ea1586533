"""The tiny models and random rows of the objectives' tests."""

from tests.objectives.conftest import (  # noqa: F401
    _make_model,
    model,
    other_model,
    rows,
    spread,
    tokenizer,
)
