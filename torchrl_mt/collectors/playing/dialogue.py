"""The dialogue of an environment's episode, and the tokens of its next prompt.

A prompt goes on from the last response, token for token, unless the dialogue itself was changed: by the
environment, by the chat template, or because it had become too long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_mt.chat.tokens import Answer, ChatTokens
from torchrl_mt.collectors.workflow import Rejected
from torchrl_mt.engines import Completion
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.messages import images_of

__all__ = ["Dialogue"]

_KEPT = 0.75
"""Part of ``max_prompt_tokens`` that a prompt may have once turns were left out. The rest lets it grow
for a few turns; otherwise each of them would start a new row."""


class Dialogue:
    """The messages of an episode and the tokens of its next prompt.

    Args:
        chat: converts messages to tokens.
        opening: the first messages.
        max_prompt_tokens: maximum tokens of a prompt; no maximum if ``None``.

    Raises:
        Rejected: if the opening is longer than ``max_prompt_tokens``.
    """

    def __init__(
        self,
        chat: ChatTokens,
        opening: Sequence[Mapping[str, Any]],
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._chat = chat
        self._longest = max_prompt_tokens
        self._messages = list(opening)
        self._turns: list[int] = []
        """Index of the response of each turn."""
        self._last: Completion | None = None
        self.opening = self._rendered()
        """Tokens of the first prompt."""

    @property
    def images(self) -> list[StoredImage]:
        """Images of the next prompt, in order."""
        return images_of(self._messages) if self._chat.takes_images else []

    def read(self, completion: Completion, prompt: Sequence[int]) -> Answer:
        """Append a response to ``prompt``, and return it as text and as messages."""
        said = self._chat.read(
            completion.token_ids,
            prompt_ids=prompt,
            messages=self._messages,
            last_token=completion.stop_token,
        )
        self._turns.append(len(self._messages))
        self._messages.append(said.in_dialogue)
        self._last = completion
        return said

    def follow(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt_length: int,
        history: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[bool, Sequence[int]]:
        """Append the environment's messages.

        Args:
            messages: the messages.
            prompt_length: number of tokens of the last prompt.
            history: the messages that take the place of the dialogue so far.

        Returns:
            ``True`` and the tokens after the last response; or ``False`` and the whole next prompt.

        Raises:
            Rejected: if the next prompt is longer than ``max_prompt_tokens``, even without all earlier
                turns.
        """
        if history is not None:
            self._messages, self._turns = [], []
            for message in (*history, *messages):
                if message.get("role") == "assistant":
                    message = self._chat.write(message, self._messages)
                    self._turns.append(len(self._messages))
                self._messages.append(message)
            return False, self._rendered()
        assert self._last is not None
        answer = self._last.token_ids
        goes_on, ids = self._chat.follow(
            self._messages, messages, answer, last_token=self._last.stop_token
        )
        self._messages.extend(messages)
        length = len(ids) + (prompt_length + len(answer) if goes_on else 0)
        if self._longest is not None and length > self._longest:
            return False, self._shortened()
        return goes_on, ids

    def _rendered(self) -> list[int]:
        """Render the dialogue as a whole."""
        ids = self._chat.open(self._messages)
        return ids if self._longest is None or len(ids) <= self._longest else self._shortened()

    def _shortened(self) -> list[int]:
        """Leave out the oldest turns, never the opening or the newest turn, and render the rest."""
        assert self._longest is not None
        turns = self._turns or [len(self._messages)]
        wanted = _KEPT * self._longest

        def without(number: int) -> list[Mapping[str, Any]]:
            return [*self._messages[: turns[0]], *self._messages[turns[number] :]]

        def fits(number: int) -> bool:
            return len(self._chat.open(without(number))) <= wanted

        left_out = bisect_left(range(len(turns) - 1), True, key=fits)
        self._messages = without(left_out)
        gap = turns[left_out] - turns[0]
        self._turns = [index - gap for index in self._turns[left_out:]]
        ids = self._chat.open(self._messages)
        if len(ids) > self._longest:
            what = "the opening and the newest turn have" if self._turns else "the opening has"
            raise Rejected(
                "prompt_too_long",
                f"max_prompt_tokens={self._longest} must leave room for the dialogue, but {what} "
                f"{len(ids)} tokens: raise it, or shorten the messages",
            )
        return ids
