"""Check the variables that users pass to a chat template: tools, documents and switches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["checked_template_kwargs"]

_LISTS = {
    "tools": "JSON schemas or functions",
    "documents": "mappings, such as {'title': ..., 'text': ...}",
}
"""Arguments of ``apply_chat_template`` that templates read too, and what each is a list of."""


def checked_template_kwargs(template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the variables of a chat template and return them, iterators as lists.

    Raises:
        TypeError: if it is not a mapping, a name is not a string, a tool is neither a function nor a
            mapping, or a document is not a mapping.
        ValueError: if a name is an argument of rendering itself, such as ``tokenize``.
    """
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping):
        raise TypeError(
            "template_kwargs must be a mapping such as {'enable_thinking': False}, got "
            f"{type(template_kwargs).__name__}."
        )
    for name in template_kwargs:
        if not isinstance(name, str):
            raise TypeError(f"template_kwargs must have text as names, got {name!r}.")
    host = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    reserved = {"messages", "conversations", *host} - _LISTS.keys()
    if found := sorted(reserved.intersection(template_kwargs)):
        raise ValueError(
            f"template_kwargs must not have {found}, which say how a dialogue is rendered: give what "
            "the chat template reads, such as tools or enable_thinking (and another template as "
            "tokenizer.chat_template)."
        )
    given = {
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in template_kwargs.items()
    }
    for name in _LISTS.keys() & given.keys():
        _check_entries(name, given[name])
    return given


def _check_entries(name: str, value: Any) -> None:
    if value is None:
        return
    expected = f"template_kwargs[{name!r}] must be a list of {_LISTS[name]}"
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{expected}, got {type(value).__name__}.")
    for k, entry in enumerate(value):
        if not (isinstance(entry, Mapping) or (name == "tools" and callable(entry))):
            raise TypeError(f"{expected}, got {type(entry).__name__} ({str(entry)[:80]}) at {k}.")
