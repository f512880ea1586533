"""Prompts that wait for the answers of a user's loop: an engine turned inside out.

Every prompt is given out once and answered once, with exactly the tokens of its answer. A prompt whose
episode has ended is gone, and an answer to it is dropped.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat import turn_ends
from torchrl_mt.checks import check_token_ids
from torchrl_mt.collectors import Episode, Rejected
from torchrl_mt.engines import Completion
from torchrl_mt.vision import StoredImage

__all__ = ["Answer", "AskingEngine", "EpisodeEngine", "WaitingPrompt"]


@dataclass(eq=False, slots=True)
class WaitingPrompt:
    """A prompt that waits for an answer."""

    slot: int
    """Index of the environment's slot."""
    uid: int
    """Id of the episode."""
    turn: int
    """Number of the call in its episode, from 0."""
    token_ids: list[int]
    info: Mapping[str, Any]
    """What else is told of the prompt."""
    answer: asyncio.Future[Completion]
    images: tuple[StoredImage, ...] = ()
    """All images of the prompt."""
    version: int = 0
    """The weight version when the prompt was given out."""


@dataclass(frozen=True)
class Answer:
    """A response to a prompt, as the user gave it."""

    slot: int
    uid: int
    turn: int | None
    """Number of the call in its episode; ``None`` if it was not told."""
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float] | None


class AskingEngine:
    """An engine that asks its caller for the answers.

    Args:
        tokenizer: the tokenizer of the prompts.
        max_prompt_length: maximum tokens of a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_length: int) -> None:
        self.tokenizer = tokenizer
        self.version = 0
        self.max_prompt_length = max_prompt_length
        self.changed = threading.Condition()
        """Held to read or change the prompts; notified of new ones and of ends."""
        self.closed = False
        self.num_dropped = 0
        """Number of answers to prompts that did not wait any more."""
        self._waiting: dict[tuple[int, int], WaitingPrompt] = {}
        """Prompts that were not given out yet, by episode and turn, the oldest first."""
        self._given: dict[tuple[int, int], WaitingPrompt] = {}
        """Prompts that were given out and not answered yet."""
        self._beginning: set[int] = set()
        """Slots whose episode has not asked for an answer yet."""
        self._turn_ends = set(map(tokenizer.convert_tokens_to_ids, turn_ends(tokenizer)))

    # The engine, in the event loop of the episodes

    def of(self, slot: int, episode: Episode) -> EpisodeEngine:
        """The engine of one episode, which begins; :meth:`end` follows."""
        with self.changed:
            self._beginning.add(slot)
        return EpisodeEngine(self, slot, episode)

    def end(self, slot: int) -> None:
        """Record that the episode of a slot is over."""
        with self.changed:
            self._beginning.discard(slot)

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Completion:
        """Refuse a prompt that is of no episode; see :meth:`of`."""
        raise RuntimeError("a loader's engine answers the prompts of its episodes only.")

    async def ask(self, prompt: WaitingPrompt) -> Completion:
        """Wait for the answer to a prompt."""
        key = prompt.uid, prompt.turn
        with self.changed:
            self._waiting[key] = prompt
            self._beginning.discard(prompt.slot)
            self.changed.notify_all()
        try:
            return await prompt.answer
        finally:
            with self.changed:
                self._waiting.pop(key, None)
                self._given.pop(key, None)

    def update_weights(self, source: Any) -> int:
        """Count an update of the weights, which are not here.

        Prompts that are given out from now on have the new version.
        """
        with self.changed:
            self.version += 1
            return self.version

    def close(self) -> None:
        """Give out no more prompts, and wake those who wait for some."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    # The user's side, in any thread; hold ``changed``

    @property
    def slots_waiting(self) -> set[int]:
        """Slots with a prompt that was not given out."""
        return {prompt.slot for prompt in self._waiting.values()}

    @property
    def slots_given(self) -> set[int]:
        """Slots with a prompt that was given out and not answered yet."""
        return {prompt.slot for prompt in self._given.values()}

    @property
    def num_beginning(self) -> int:
        """Number of slots whose episode has not asked for an answer yet."""
        return len(self._beginning)

    @property
    def num_given(self) -> int:
        """Number of prompts that were given out and not answered yet."""
        return len(self._given)

    def take(self, number: int) -> list[WaitingPrompt]:
        """Give out the prompts of ``number`` slots that waited longest; none if there are fewer."""
        found: dict[int, tuple[int, int]] = {}
        for key, prompt in self._waiting.items():
            found.setdefault(prompt.slot, key)
            if len(found) == number:
                break
        if len(found) < number:
            return []
        taken = [self._waiting.pop(key) for key in found.values()]
        for prompt in taken:
            prompt.version = self.version
            self._given[prompt.uid, prompt.turn] = prompt
        return taken

    def enter(self, answers: Sequence[Answer]) -> None:
        """Answer prompts that were given out; count and drop answers to others.

        Raises:
            ValueError: if an answer is to another prompt than its slot was given. Nothing is answered
                then.
        """
        found = [self._find(answer) for answer in answers]
        for row, (prompt, answer) in enumerate(zip(found, answers, strict=True)):
            if prompt is not None and prompt.token_ids != answer.prompt_ids:
                raise ValueError(
                    f"prompts[{row}] must be the row of input_ids that slot {answer.slot} was given "
                    f"({len(prompt.token_ids)} tokens), got {len(answer.prompt_ids)} other ones: pass "
                    'batch["input_ids"] and its mask on, rows in the order of worker_id.'
                )
        for prompt, answer in zip(found, answers, strict=True):
            if prompt is None:
                self.num_dropped += 1
                continue
            del self._given[prompt.uid, prompt.turn]
            loop = prompt.answer.get_loop()
            loop.call_soon_threadsafe(self._settle, prompt, self._completion(prompt, answer))

    def _find(self, answer: Answer) -> WaitingPrompt | None:
        """The prompt that an answer is to; ``None`` if it does not wait any more."""
        if answer.turn is not None:
            found = self._given.get((answer.uid, answer.turn))
        else:
            given = (prompt for prompt in self._given.values() if prompt.uid == answer.uid)
            found = next(given, None)
        if found is not None and found.slot != answer.slot:
            raise ValueError(
                f"worker_id must be that of its row of meta_info: the episode {answer.uid} is of "
                f"slot {found.slot}, got {answer.slot}."
            )
        return found

    def _completion(self, prompt: WaitingPrompt, answer: Answer) -> Completion:
        """The answer as a completion that the environment always sees."""
        ids = answer.token_ids
        # An empty stop string: the user ended the answer, with whatever token.
        by_token = ids[-1] in self._turn_ends
        return Completion(
            ids,
            [math.nan] * len(ids) if answer.log_probs is None else answer.log_probs,
            [prompt.version] * len(ids),
            "stop",
            stop_string=None if by_token else "",
        )

    def _settle(self, prompt: WaitingPrompt, completion: Completion) -> None:
        if prompt.answer.done():  # The episode was cancelled meanwhile.
            with self.changed:
                self.num_dropped += 1
        else:
            prompt.answer.set_result(completion)


@dataclass(eq=False)
class EpisodeEngine:
    """The engine of one episode: its prompts wait for the loader's user."""

    engine: AskingEngine
    slot: int
    """Index of the environment's slot."""
    episode: Episode
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the environment tells of itself, beside the prompts."""
    _num_calls: int = field(default=0, init=False)

    @property
    def version(self) -> int:
        """The weight version."""
        return self.engine.version

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the prompts."""
        return self.engine.tokenizer

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Iterable[StoredImage] | None = (),
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Wait for the user's answer to a prompt.

        Args:
            prompt_ids: at least one token.
            images: its images; ``None`` is none.
            max_new_tokens: told to the user with ``sampling``.
            **sampling: sampling parameters that a workflow or an agent asks for; told to the user.

        Raises:
            ValueError: if the prompt is empty.
            Rejected: if it is longer than ``max_prompt_length``.
        """
        prompt = check_token_ids(prompt_ids)
        if not prompt:
            raise ValueError("prompt_ids must hold at least one token, got none.")
        longest = self.engine.max_prompt_length
        if len(prompt) > longest:
            raise Rejected(
                "prompt_too_long",
                f"max_prompt_length={longest} must leave room for the prompt, which has {len(prompt)} "
                "tokens: raise it, or shorten what the environment says",
            )
        turn = self._num_calls
        self._num_calls += 1
        wishes = {
            **sampling,
            **({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}),
        }
        turns = self.episode.turns
        facts: dict[str, Any] = {
            "data": self.episode.data,
            "info": turns[-1].info if turns else None,
            **({"sampling": wishes} if wishes else {}),
            **self.info,
            "uid": self.episode.traj_id,
            "turn": turn,
        }
        answer = asyncio.get_running_loop().create_future()
        uid = self.episode.traj_id
        return await self.engine.ask(
            WaitingPrompt(self.slot, uid, turn, prompt, facts, answer, tuple(images or ()))
        )

    def update_weights(self, source: Any) -> int:
        """Refuse: an episode cannot change the weights."""
        raise RuntimeError("an episode cannot change the weights.")

    def close(self) -> None:
        """Nothing to close: the loader's engine is shared."""
