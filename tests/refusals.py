"""Tables of calls that are refused: one row for each error that a user can meet."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


def refused(
    text: str, call: Callable, *args: Any, error: type[Exception] = ValueError, **kwargs: Any
) -> Any:
    """A row of a table: what the error must say, with "…" for anything, and the call that raises it."""
    return pytest.param(partial(call, *args, **kwargs), error, text, id=text)


def check_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    """Make the call of a row, which must raise its error; returns nothing."""
    with pytest.raises(error, match=".*".join(map(re.escape, text.split("…")))):
        call()
