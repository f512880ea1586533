"""Records of a collector's settings: chat template, server of agents, and the rarer rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torchrl_mt.chat.replies import ParseReply
from torchrl_mt.chat.template_kwargs import checked_template_kwargs
from torchrl_mt.chat.tokens import ChatTokens, OnBreak, Template
from torchrl_mt.checks import (
    check_at_least,
    check_choice,
    check_class,
    check_integer,
    check_positive_integer,
)
from torchrl_mt.collectors.scheduling.failure_limits import IncompleteGroups
from torchrl_mt.collectors.scheduling.group_filters import AcceptGroup
from torchrl_mt.collectors.scheduling.staleness import StalenessRule

__all__ = ["AgentOptions", "ChatOptions", "CollectorOptions"]


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
        tool_parser: takes the text of a reply and returns a :class:`~torchrl_mt.chat.ParsedReply`.
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


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """Rarer settings of a :class:`~torchrl_mt.collectors.MultiTurnCollector`.

    Args:
        shuffle: play the items in random order, a new one every epoch; for data with a length and an
            index.
        cycle: start again when the data ends. ``None`` means true, except for iterators.
        seed: seed of the order, and of the items that are made without data.
        accept_group: called with the episodes of a group, each in TED, ``[T]``, such as
            :func:`~torchrl_mt.collectors.has_spread`; false rejects them all
            (``rejected/group_not_accepted``), and a group of another item is played. May be ``async``.
        total_attempts: raise an error if ``accept_group`` has left no full batch after this many
            groups. ``None`` means ten times the groups of a batch.
        incomplete_groups: what becomes of a group with a member that failed all retries. ``"drop"``:
            the group and its item are dropped (until the next epoch). ``"keep"``: the other members are
            kept. ``"refill"``: the member is played again up to 16 more times; then the group is
            dropped. ``"requeue"``: the group is dropped and its item played again, before any new item;
            an item is dropped after 64 requeues, or after 16 in a row in which every member failed.
        staleness: what ``max_staleness`` bounds. ``"delivery"``: the age at delivery. A group with an
            episode that would be too old is rejected (``rejected/stale``) as soon as that is certain,
            and its item is played again. ``"admission"``: only how many batches are begun. Nothing is
            rejected, so slow episodes may be arbitrarily old: watch ``staleness/max``.
        chat: how dialogues become tokens: the chat template and its variables.
        tokenizer: renders messages; ``policy.tokenizer`` if ``None``.
        agents: the server that agents speak to.
        workflow_kwargs: arguments for the class that ``env`` is or names.
        env_workers: number of processes that run the environments, for environments that compute, since
            threads share one core. ``env``, items and messages are pickled, and a script needs
            ``if __name__ == "__main__":``. If a process dies, its episodes are rejected
            (``rejected/EnvWorkerError``) and a new process replaces it.
        progress: show a progress bar.

    Raises:
        TypeError: if ``seed`` is not an ``int``, or ``chat`` or ``agents`` is of another class.
        ValueError: if a number is out of range or a choice is unknown.

    Examples:
        >>> CollectorOptions(shuffle=True, seed=7, chat=ChatOptions(template="training")).seed
        7
    """

    shuffle: bool = False
    cycle: bool | None = None
    seed: int = 0
    accept_group: AcceptGroup | None = None
    total_attempts: int | None = None
    incomplete_groups: IncompleteGroups = "drop"
    staleness: StalenessRule = "delivery"
    chat: ChatOptions = ChatOptions()
    tokenizer: Any = None
    agents: AgentOptions = AgentOptions()
    workflow_kwargs: Mapping[str, Any] | None = None
    env_workers: int | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        check_integer("seed", self.seed)
        check_choice("incomplete_groups", self.incomplete_groups, get_args(IncompleteGroups))
        check_choice("staleness", self.staleness, get_args(StalenessRule))
        check_class("chat", self.chat, ChatOptions)
        check_class("agents", self.agents, AgentOptions)
        for name in ("total_attempts", "env_workers"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name))
