"""What is private to TorchRL and used here: ``tests/hosts/test_torchrl.py`` fails when it changes."""

from __future__ import annotations

from typing import Any

__all__ = ["min_batch_size"]

# Wrappers of language models


def min_batch_size(wrapper: Any) -> int | None:
    """How many requests an ``LLMWrapperBase`` waits for by itself; ``None``: it does not.

    No public attribute has it.
    """
    return getattr(wrapper, "_min_batch_size", None)
