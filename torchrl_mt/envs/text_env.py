"""The interface of text environments: the model's answer in, chat messages out.

An instance plays one episode at a time. It never handles tokens, so it cannot corrupt the record of what
the model received and sampled.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from torchrl_mt.checks import check_list
from torchrl_mt.threads import call_user

__all__ = ["Message", "TextEnv", "TextStep"]

_T = TypeVar("_T")
_E = TypeVar("_E", bound="TextEnv")

Message: TypeAlias = Mapping[str, Any]
"""A chat message as chat templates take it: ``{"role": ..., "content": ...}`` and more.

The content is text or a list of parts, ``{"type": "text", "text": ...}`` and, for models that take
images, ``{"type": "image", "image": ...}`` in any form of :meth:`torchrl_mt.vision.StoredImage.of`.
"""


@dataclass(frozen=True)
class TextStep:
    """An environment's reply to one response of the model.

    Args:
        messages: messages to append to the dialogue after the model's response; at least one, unless the
            step is ``done`` or has a ``history``.
        reward: reward of this turn; if it is not finite, collectors reject the episode.
        done: whether the episode is over, for any reason.
        truncated: whether the episode was cut short, so that its final state may still have value. Only
            with ``done=True``.
        info: further data about the turn; collectors write it to the non-tensor column ``"info"``.
        history: the messages that take the place of the dialogue so far, to leave out or shorten what is
            old; ``messages`` come after them. The next prompt then starts a new training row.

    Raises:
        TypeError: if ``messages`` or ``history`` is a single message or a string.
        ValueError: if ``truncated`` is set on a step that is not ``done``.

    Examples:
        >>> step = TextStep([{"role": "user", "content": "correct"}], reward=1.0, done=True)
        >>> step.terminated
        True
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: Mapping[str, Any] | None = None
    history: Sequence[Message] | None = None

    def __post_init__(self) -> None:
        such = "must be a list of messages such as {'role': 'user', 'content': '...'}"
        check_list(f"messages {such}", self.messages)
        if self.history is not None:
            check_list(f"history {such}", self.history)
        if self.truncated and not self.done:
            raise ValueError(
                "TextStep(truncated=True) ends the episode and needs done=True, got done=False."
            )

    @property
    def terminated(self) -> bool:
        """Whether the episode ended by itself: done and not truncated."""
        return self.done and not self.truncated


class TextEnv(ABC):
    """Base class of text environments, whose steps are chat turns.

    Subclasses define :meth:`reset` and :meth:`step`, as plain or ``async def`` methods. If ``step``
    takes a second argument, ``step(self, response, message)``, it also receives the whole answer as a
    message with its ``content``, ``reasoning_content`` and ``tool_calls``.

    An instance plays one episode at a time. It may be reset once that episode is over or abandoned.
    Collectors make one instance per concurrent episode.

    Examples:
        >>> class Echo(TextEnv):
        ...     def reset(self, data=None):
        ...         return [{"role": "user", "content": data["word"]}]
        ...
        ...     async def step(self, response):
        ...         return TextStep(reward=float(len(response)), done=True)
        >>> Echo().reset({"word": "say something"})
        [{'role': 'user', 'content': 'say something'}]
    """

    inline: ClassVar[bool] = False
    """Whether plain methods return at once, so that collectors may call them on the event loop. By
    default they run in threads, where a slow one delays no other episode."""

    whole_text: ClassVar[bool] = False
    """Whether ``response`` is the whole text without the stop token, including thoughts and tool calls
    in the model's notation, instead of the message's content. Useful to reward the format, say."""

    tool_schemas: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the model may call. Collectors read them after :meth:`reset` and
    give them to the chat template as ``tools``."""

    @abstractmethod
    def reset(self, data: Any = None) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin an episode.

        Args:
            data: the data set's item for this episode. Its dicts and lists are copies; all else in it is
                shared by the episodes of a group.

        Returns:
            The first messages of the dialogue.
        """

    @abstractmethod
    def step(self, response: str) -> TextStep | Awaitable[TextStep]:
        """Reply to one response of the model.

        Args:
            response: the ``content`` of the model's message, without thoughts and tool calls. It is the
                whole text, including special tokens, if a part of the answer cannot be parsed, or the
                model's family has no such parts. The second argument, if a subclass has one, is the
                message ``{"role": "assistant", "content": response, "reasoning_content": ...,
                "tool_calls": [{"type": "function", "id": ..., "function": {"name": ..., "arguments":
                {...}}}]}``; its last two keys are missing if the model did not think or call tools.

        Returns:
            The next messages, the turn's reward and whether the episode is over.
        """

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - optional on purpose
        """Release the environment's resources; it is not used afterwards.

        Collectors close an environment in the background when its episode is over, however it ended, and
        log errors. A plain method may run while a call that timed out is still running in another
        thread.
        """

    def _under_way(self, episode: _T | None) -> _T:
        """What a step works on, which is ``None`` if no episode is under way."""
        if episode is None:
            raise RuntimeError(
                f"{type(self).__name__}.step was called with no episode under way: call reset first."
            )
        return episode

    def _copied(self: _E, memo: dict[int, Any], **instead: Any) -> _E:
        """A deep copy, but for the attributes that are given for it."""
        copied = copy.copy(self)
        memo[id(self)] = copied
        for name in vars(self).keys() - instead.keys():
            setattr(copied, name, copy.deepcopy(vars(self)[name], memo))
        vars(copied).update(instead)
        return copied


def takes_message(step: Callable[..., Any]) -> bool:
    """Whether a ``step`` takes the message: its second argument is required or named ``message``.

    Examples:
        >>> takes_message(lambda response, message: None)
        True
        >>> takes_message(lambda response, verbose=False: None)
        False
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is second.empty or second.name == "message"


async def call_env(env: TextEnv, method: Callable[..., Any], *args: Any) -> Any:
    """Call an environment's method, in a thread unless it is ``async`` or the environment inline."""
    if not env.inline:
        return await call_user(method, *args)
    result = method(*args)
    return await result if inspect.isawaitable(result) else result
