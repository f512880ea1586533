"""What belongs together in a collector's arguments: frozen records that several collectors may share.

Every field may also be given to the collector as a keyword of its own; a field has one name everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from torchrl_mt.chat.template_kwargs import checked_template_kwargs
from torchrl_mt.chat.tokens import ChatTokens, OnBreak, Template
from torchrl_mt.checks import check_choice

__all__ = ["ChatOptions", "FailurePolicy", "IncompleteGroups", "ItemOrder", "from_keywords"]

_Record = TypeVar("_Record")

IncompleteGroups = Literal["drop", "keep", "refill", "requeue"]
"""What becomes of a group of which a member was rejected for good."""

_LEAST_CONSECUTIVE = 32
"""How many episodes in a row may fail at least, if nobody says."""


@dataclass(frozen=True)
class FailurePolicy:
    """What follows when episodes are rejected.

    Args:
        max_retries: how often an episode that was rejected is played again.
        max_consecutive_failures: raise the last cause once this many episodes in a row were rejected
            in spite of retries, and none came to its end meanwhile. Until the environment's ``step``
            has returned once, or a workflow has, an episode that only a limit brought to its end
            does not interrupt the row. ``None`` means 32, or twice ``max_concurrency`` if that is
            more.
        incomplete_groups: what becomes of a group of which a member was rejected for good: ``"drop"``
            it, and with it the item until the data is gone through again; ``"keep"`` those that are
            left; ``"refill"``, play that member until it comes to its end, and drop the group if it
            does not in 16 more attempts; ``"requeue"``, drop the group and play its item again as a
            new one, before any new item. An item is given up after 64 times, or 16 in a row in which no
            member came to its end.

    Raises:
        ValueError: if a number is out of range or ``incomplete_groups`` unknown.

    Examples:
        >>> FailurePolicy(max_retries=2)
        FailurePolicy(max_retries=2, max_consecutive_failures=None, incomplete_groups='drop')
    """

    max_retries: int = 0
    max_consecutive_failures: int | None = None
    incomplete_groups: IncompleteGroups = "drop"

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {self.max_retries}.")
        most = self.max_consecutive_failures
        if most is not None and most < 1:
            raise ValueError(f"max_consecutive_failures must be at least 1, got {most}.")
        check_choice("incomplete_groups", self.incomplete_groups, get_args(IncompleteGroups))

    def most_consecutive(self, concurrency: int) -> int:
        """How many episodes in a row may fail where so many run at once."""
        return self.max_consecutive_failures or max(_LEAST_CONSECUTIVE, 2 * concurrency)


@dataclass(frozen=True)
class ItemOrder:
    """In which order the items of data are played.

    Args:
        shuffle: in random order, another one each epoch; for data with a length and items by index.
        cycle: begin again when the data ends; by default unless it is an iterator.
        seed: what the order follows from, and the items that are made without data.

    Raises:
        TypeError: if ``seed`` is no ``int``.

    Examples:
        >>> ItemOrder(shuffle=True, seed=7)
        ItemOrder(shuffle=True, cycle=None, seed=7)
    """

    shuffle: bool = False
    cycle: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}.")


@dataclass(frozen=True)
class ChatOptions:
    """How dialogues become tokens: the options of :class:`~torchrl_mt.collectors.ChatTokens`.

    Args:
        on_break: what is done where the chat template does not go on from what was sampled:
            ``"fork"`` begins a new row, ``"append"`` goes on all the same.
        template: the chat template that dialogues are rendered by: ``"training"`` keeps an episode in
            one row.
        template_kwargs: what else the chat template is given with every rendering, such as ``tools``
            or ``enable_thinking=False``. A workflow makes its own.

    Raises:
        TypeError: if ``template_kwargs`` is no mapping of names to plain data.
        ValueError: if an option is unknown, or ``template_kwargs`` says how a template is rendered.

    Examples:
        >>> ChatOptions(template="training").on_break
        'fork'
    """

    on_break: OnBreak = "fork"
    template: Template = "original"
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("on_break", self.on_break, get_args(OnBreak))
        check_choice("template", self.template, get_args(Template))
        # Iterators among them could be read but once.
        object.__setattr__(self, "template_kwargs", checked_template_kwargs(self.template_kwargs))

    def tokens(self, tokenizer: Any) -> ChatTokens:
        """What turns the messages of a tokenizer's model into tokens, with these options."""
        return ChatTokens(
            tokenizer,
            on_break=self.on_break,
            template=self.template,
            template_kwargs=self.template_kwargs,
        )


def from_keywords(
    name: str, cls: type[_Record], record: _Record | None, keywords: dict[str, Any]
) -> _Record:
    """A record as it was given, or made of the keywords that are its fields.

    Args:
        name: the argument that takes the record.
        cls: its class.
        record: what was given for it.
        keywords: other arguments; those that are fields of the record are taken out.

    Raises:
        TypeError: if both were given, or ``record`` is something else.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    given = {field: keywords.pop(field) for field in names if field in keywords}
    if record is None:
        return cls(**given)
    if not isinstance(record, cls):
        raise TypeError(f"{name} must be of class {cls.__name__}, got {record!r}.")
    if given:
        raise TypeError(
            f"{name} and {', '.join(given)} must not both be given: {', '.join(given)} may be said in "
            f"{name}={cls.__name__}(...)."
        )
    return record
