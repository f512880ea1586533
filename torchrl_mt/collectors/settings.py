"""Records of a collector's settings: failures, order of items, chat template.

Every field may also be given to the collector as a keyword argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from torchrl_mt.chat.replies import ParseReply
from torchrl_mt.chat.template_kwargs import checked_template_kwargs
from torchrl_mt.chat.tokens import ChatTokens, OnBreak, Template
from torchrl_mt.checks import check_at_least, check_choice, check_positive_integer

__all__ = [
    "AgentOptions",
    "ChatOptions",
    "FailurePolicy",
    "IncompleteGroups",
    "ItemOrder",
    "from_keywords",
]

_Record = TypeVar("_Record")

IncompleteGroups = Literal["drop", "keep", "refill", "requeue"]
"""What becomes of a group with a member that failed after all retries."""

_LEAST_CONSECUTIVE = 32
"""Minimum of the default of ``max_consecutive_failures``."""


@dataclass(frozen=True)
class FailurePolicy:
    """Retries of rejected episodes, and what becomes of incomplete groups.

    Args:
        max_retries: number of times that a rejected episode is played again.
        max_consecutive_failures: raise the last error after this many episodes in a row failed all
            retries and none finished. Until an environment's ``step`` or a workflow has returned once,
            an episode that a limit cuts does not end the row. ``None`` means 32 or twice
            ``max_concurrency``, whichever is more.
        incomplete_groups: what becomes of a group with a member that failed all retries. ``"drop"``:
            the group and its item are dropped (until the next epoch). ``"keep"``: the other members are
            kept. ``"refill"``: the member is played again up to 16 more times; then the group is
            dropped. ``"requeue"``: the group is dropped and its item played again, before any new item;
            an item is dropped after 64 requeues, or after 16 in a row in which every member failed.

    Raises:
        ValueError: if a number is out of range or ``incomplete_groups`` is unknown.

    Examples:
        >>> FailurePolicy(max_retries=2)
        FailurePolicy(max_retries=2, max_consecutive_failures=None, incomplete_groups='drop')
    """

    max_retries: int = 0
    max_consecutive_failures: int | None = None
    incomplete_groups: IncompleteGroups = "drop"

    def __post_init__(self) -> None:
        check_at_least("max_retries", self.max_retries, 0)
        if self.max_consecutive_failures is not None:
            check_at_least("max_consecutive_failures", self.max_consecutive_failures)
        check_choice("incomplete_groups", self.incomplete_groups, get_args(IncompleteGroups))

    def most_consecutive(self, concurrency: int) -> int:
        """``max_consecutive_failures``, or its default at this concurrency."""
        return self.max_consecutive_failures or max(_LEAST_CONSECUTIVE, 2 * concurrency)


@dataclass(frozen=True)
class ItemOrder:
    """The order in which items are played.

    Args:
        shuffle: play in random order, a new one every epoch; for data with a length and an index.
        cycle: start again when the data ends. ``None`` means true, except for iterators.
        seed: seed of the order, and of the items that are made without data.

    Raises:
        TypeError: if ``seed`` is not an ``int``.

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
    """How dialogues become tokens: the options of :class:`~torchrl_mt.chat.ChatTokens`.

    Args:
        on_break: what to do if the chat template rewrites earlier messages: ``"fork"`` starts a new
            training row, ``"append"`` continues the row with the tokens as they were sampled. ``None``
            is ``"fork"`` for environments and ``"append"`` for agents.
        template: the chat template: the tokenizer's own (``"original"``), or ``"training"``, which keeps
            an episode in one row.
        template_kwargs: variables of the chat template, such as ``tools`` or
            ``enable_thinking=False``. Workflows render their own prompts.
        max_prompt_tokens: maximum tokens of a prompt; no maximum if ``None``. A longer dialogue loses
            its oldest turns, until at most three quarters of the maximum are left, and goes on in a new
            row. The opening and the newest turn are always kept. An episode in which they alone are
            longer is rejected (``rejected/prompt_too_long``). For environments: workflows and agents
            choose their own prompts.

    Raises:
        TypeError: if ``template_kwargs`` is not a mapping of names to plain data.
        ValueError: if an option is unknown, ``template_kwargs`` has an argument of rendering, or
            ``max_prompt_tokens`` is not a positive integer.

    Examples:
        >>> ChatOptions(template="training").template
        'training'
    """

    on_break: OnBreak | None = None
    template: Template = "original"
    template_kwargs: Mapping[str, Any] | None = None
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.on_break is not None:
            check_choice("on_break", self.on_break, get_args(OnBreak))
        if self.max_prompt_tokens is not None:
            check_positive_integer("max_prompt_tokens", self.max_prompt_tokens)
        check_choice("template", self.template, get_args(Template))
        # The check turns iterators, which can be read only once, into lists.
        object.__setattr__(self, "template_kwargs", checked_template_kwargs(self.template_kwargs))

    def tokens(
        self,
        tokenizer: Any,
        parse: ParseReply | None = None,
        *,
        on_break: OnBreak = "fork",
        processor: Any = None,
    ) -> ChatTokens:
        """Make the :class:`~torchrl_mt.chat.ChatTokens` of a tokenizer with these options.

        Args:
            tokenizer: the tokenizer.
            parse: parses responses; see :class:`~torchrl_mt.chat.ChatTokens`.
            on_break: used if the options leave it open.
            processor: the processor of a model that takes images.
        """
        return ChatTokens(
            tokenizer,
            on_break=self.on_break or on_break,
            template=self.template,
            template_kwargs=self.template_kwargs,
            parse=parse,
            processor=processor,
        )


@dataclass(frozen=True)
class AgentOptions:
    """Options of the server that agents speak to; see :class:`~torchrl_mt.agents.AgentServer`.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        models: further engines by model name, such as ``{"judge": engine}``; their calls are answered,
            but are no turns.
        tool_parser: parses the text of a reply into a :class:`~torchrl_mt.chat.replies.ParsedReply`.
            ``None`` uses the tokenizer's response template or the model family's notation.
        max_body_bytes: maximum size of a request.
        max_requests: maximum number of requests in progress.

    Examples:
        >>> AgentOptions(port=8000).host
        '127.0.0.1'
    """

    host: str = "127.0.0.1"
    port: int = 0
    models: Mapping[str, Any] | None = None
    tool_parser: ParseReply | None = None
    max_body_bytes: int = 32 * 2**20
    max_requests: int = 4096

    def __post_init__(self) -> None:
        check_positive_integer("max_body_bytes", self.max_body_bytes)
        check_positive_integer("max_requests", self.max_requests)


def from_keywords(
    name: str, cls: type[_Record], record: _Record | None, keywords: dict[str, Any]
) -> _Record:
    """Return a record as given, or make it from the keywords that are its fields.

    Args:
        name: name of the argument that takes the record.
        cls: class of the record.
        record: the argument's value.
        keywords: other arguments; fields of the record are removed from it.

    Raises:
        TypeError: if both are given, or ``record`` is of another class.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    given = {field: keywords.pop(field) for field in names if field in keywords}
    if record is None:
        return cls(**given)
    if not isinstance(record, cls):
        raise TypeError(f"{name} must be of class {cls.__name__}, got {record!r}.")
    if given:
        raise TypeError(
            f"{name} and {', '.join(given)} must not both be given: give {', '.join(given)} in "
            f"{name}={cls.__name__}(...)."
        )
    return record
