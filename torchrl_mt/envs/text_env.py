"""The interface of a text environment: chat messages out, the model's answer in.

One instance plays one episode at a time. It never sees a token: what the model was given and what
it sampled is kept by the engine, so no environment can spoil the record.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

__all__ = ["Message", "TextEnv", "TextStep"]

Message: TypeAlias = Mapping[str, Any]
"""A chat message as chat templates take it: ``{"role": ..., "content": ...}`` and more."""


@dataclass(frozen=True)
class TextStep:
    """What an environment answers to one response of the model.

    Args:
        messages: what the model is shown next, appended to the dialogue after its own response.
        reward: the reward of the turn that was just answered: a finite number, or a collector rejects
            the episode.
        done: the episode is over, for whatever reason.
        truncated: the episode was cut short rather than finished, so what would have followed may
            still be worth something. Only with ``done=True``.
        info: anything else worth keeping about the turn; a collector writes it to the non-tensor
            column ``"info"``.

    Raises:
        TypeError: if ``messages`` is a single message or a string.
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

    def __post_init__(self) -> None:
        if isinstance(self.messages, (str, Mapping)):
            raise TypeError(
                "messages must be a list of messages such as {'role': 'user', 'content': '...'}, got "
                f"{type(self.messages).__name__} ({str(self.messages)[:80]})."
            )
        if self.truncated and not self.done:
            raise ValueError(
                "TextStep(truncated=True) ends the episode and needs done=True, got done=False."
            )

    @property
    def terminated(self) -> bool:
        """Whether the episode came to an end of its own: done and not truncated."""
        return self.done and not self.truncated


class TextEnv(ABC):
    """An environment that talks: base class for tasks whose steps are chat turns.

    Subclasses define :meth:`reset` and :meth:`step`, each as a plain or as an ``async def`` method.
    A ``step(self, response, message)`` of two arguments is also given the whole answer, as a message:
    its ``content``, and where there are such its ``reasoning_content`` and ``tool_calls``.
    An instance plays one episode at a time and may be reset for another once that one is over or
    given up; a collector makes one instance for every episode that runs concurrently.

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
    """Whether plain methods return at once, so that a collector may call them on its event loop. By
    default they run in worker threads, where a slow one holds up no other episode."""

    whole_text: ClassVar[bool] = False
    """Whether ``response`` is all that the model said but the stop token, thoughts and tool calls in its
    family's notation included, instead of the message's content: for a reward of the format, say."""

    @abstractmethod
    def reset(self, data: Any = None) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin an episode.

        Args:
            data: the prompt data set's item for this episode. All members of a group get the same
                object: do not change it.

        Returns:
            The messages that the model is shown first.
        """

    @abstractmethod
    def step(self, response: str) -> TextStep | Awaitable[TextStep]:
        """Answer one response of the model.

        Args:
            response: what the model said in this turn: the message's ``content``, without thoughts and
                tool calls. It is the whole text, special tokens included, if a part of the answer
                cannot be read, or the model's family has no such parts. A second argument, if a
                subclass has one, is the message ``{"role": "assistant", "content": response,
                "reasoning_content": ..., "tool_calls": [{"type": "function", "id": ..., "function":
                {"name": ..., "arguments": {...}}}]}``, whose last two are there only if the model
                thought or called.

        Returns:
            What the model is shown next, the turn's reward and whether the episode is over.
        """

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - optional on purpose
        """Release what the environment holds; it is not used afterwards.

        A collector closes an environment when its episode is over, however that ended, and goes on
        meanwhile; an error here is logged. A plain method may run while a call that was given up, since
        it took too long, is still under way in another thread.
        """


def takes_message(step: Callable[..., Any]) -> bool:
    """Whether an environment's ``step`` is to be given the whole message: it needs a second argument.

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
