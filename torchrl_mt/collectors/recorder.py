"""The engine of an episode: it records every call as a turn and enforces the episode's limits.

The episode holds each model call once, with exactly the tokens that went in and came out, in the order
in which the calls began.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any

from torchrl_mt.checks import check_at_least, check_token_ids
from torchrl_mt.collectors.episode import Episode, Turn, parent_of
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.prompt import Prompt
from torchrl_mt.engines import Completion, Engine
from torchrl_mt.engines.sampling import random_word
from torchrl_mt.threads import within
from torchrl_mt.vision import StoredImage

__all__ = ["LIMIT_CODE", "LimitReached", "Recorder", "limits_of_play", "within"]

_LINES = 4
"""Number of an episode's last conversations that further prompts share memory with."""


LIMIT_CODE = "limit_reached"
"""The ``code`` of the OpenAI client's error for :class:`LimitReached`."""


class LimitReached(Exception):
    """A limit of the episode allows no further model call.

    Args:
        reason: the limit.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode has reached its limit: {reason.value}")
        self.reason = reason


class Recorder:
    """An engine that records prompts and responses as the turns of an episode.

    Args:
        engine: samples the responses.
        episode: the episode to fill.
        limits: limits of the episode; the engine's ``max_total_tokens`` and ``max_new_tokens``, if it
            has them, bound the conversation and each response as well.
        sampling: arguments for every call, unless the call has its own. ``max_new_tokens`` bounds
            responses like ``limits.max_response_tokens``. From ``seed``, the group's number, the
            episode's rank and the call's number follows a 31-bit seed for each call.

    Raises:
        ValueError: if ``max_new_tokens`` is below 1.
        TypeError: if ``seed`` is no integer.
    """

    def __init__(
        self,
        engine: Engine,
        episode: Episode,
        limits: Limits,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.episode = episode
        """The episode that is filled."""
        self._sampling = dict(sampling or {})
        self._seed = _member_seed(self._sampling.pop("seed", None), episode)
        longest = self._sampling.pop("max_new_tokens", None)
        self.limits = limits_of_play(limits, longest, engine)
        self.reached: StopReason | None = None
        """The limit that refused the last calls. A later call that succeeds clears it, unless it is a
        timeout."""
        self._refused_at = 0
        """Number of calls begun before the last refusal."""
        self._lines: list[list[int]] = []
        """Tokens of each conversation, the one that grew last at the end."""
        self._shown: tuple[StoredImage, ...] = ()
        """Images of the conversation that grew last."""
        self._order: list[int] = []
        """The call number of each turn; calls are numbered as they begin."""
        self._calls = self._running = 0
        self.closed = False
        """Whether the episode is over or has timed out."""

    @property
    def version(self) -> int:
        """The engine's weight version."""
        return self.engine.version

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer, if it has one."""
        return getattr(self.engine, "tokenizer", None)

    def update_weights(self, source: Any) -> int:
        """Refuse to update the weights from within an episode.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "an episode cannot change the weights: use collector.update_policy_weights_."
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Iterable[Any] | None = (),
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample a response from the engine and record it as a turn; see :meth:`take_turn`."""
        turn = await self.take_turn(
            prompt_ids, images=images, max_new_tokens=max_new_tokens, **sampling
        )
        return turn.completion

    async def take_turn(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Iterable[Any] | None = (),
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Turn:
        """Sample a response from the engine and return the turn that records it.

        Args:
            prompt_ids: every token that the model is to see, with a placeholder for each token of an
                image.
            images: all images of the prompt, in order: :class:`~torchrl_mt.vision.StoredImage` or what
                its ``of`` takes; ``None`` is none. What :meth:`continued` returns has the earlier ones.
            max_new_tokens: maximum length of the response; the limits may set a lower one.
            **sampling: arguments for the engine's ``generate``.

        Raises:
            LimitReached: if the episode has no turn left, the prompt leaves no room for a response, or
                the turn times out.
            RuntimeError: if the episode is over.
            TypeError: if ``prompt_ids`` are not integers, or ``images`` is no list of images.
            ValueError: if there are images and the collector has no processor.
        """
        self._check_open()
        shown = self._images(images) or getattr(prompt_ids, "images", ())
        if not isinstance(prompt_ids, (Prompt, list)):
            # Checked here: the engine only sees a list that is made of it.
            prompt_ids = check_token_ids(prompt_ids)
        limits = self.limits
        budget, reached = limits.response_budget(len(prompt_ids))
        if limits.max_turns is not None and len(self._order) + self._running >= limits.max_turns:
            raise self._refusal(StopReason.MAX_TURNS)
        if budget == 0:
            raise self._refusal(reached)
        if max_new_tokens is not None:
            budget = max_new_tokens if budget is None else min(budget, max_new_tokens)
        prompt, call = self._prompt(prompt_ids, shown), self._calls
        self._calls += 1
        self._running += 1
        if self._seed is not None:
            sampling.setdefault("seed", _call_seed(self._seed, call))
        if shown:  # Engines for text alone need not know of images.
            sampling["images"] = shown
        begin = time.perf_counter()
        try:
            with self.episode.calls.call("engine", "the engine's answer"):
                answer = await within(
                    self.engine.generate(
                        prompt[:], max_new_tokens=budget, **{**self._sampling, **sampling}
                    ),
                    limits.turn_timeout,
                    LimitReached(StopReason.TURN_TIMEOUT),
                    time_is_up=partial(self._refusal, StopReason.TURN_TIMEOUT),
                )
        finally:
            self._running -= 1
        self._check_open()
        turn = Turn(prompt, answer, model_seconds=time.perf_counter() - begin, images=shown)
        self._enter(turn, call)
        if self.reached is not None and not self.reached.of_time and call >= self._refused_at:
            self.reached = None  # The player has found a way around the limit.
        if len(prompt.line) == len(prompt):
            prompt.line.extend(answer.token_ids)
        return turn

    def continued(self, tokens: Sequence[int], images: Sequence[StoredImage] = ()) -> Sequence[int]:
        """The prompt of the last turn, its response, and further tokens, as the next prompt.

        Args:
            tokens: the further tokens.
            images: their images. The prompt also has those of the last turn.
        """
        line = self._lines[-1]
        line.extend(tokens)
        return Prompt(line, len(line), (*self._shown, *images))

    def drop_last(self) -> None:
        """Remove the last turn."""
        self.drop(self.episode.turns[-1])

    def drop(self, turn: Turn) -> None:
        """Remove a turn, unless another went on from it and from no other like it."""
        turns = self.episode.turns
        place = next(k for k, other in enumerate(turns) if other is turn)
        left = [*turns[:place], *turns[place + 1 :]]
        parents = [parent_of(later, left[:k]) for k, later in enumerate(left)]
        for child, parent in zip(left, parents, strict=True):
            # A shorter parent would leave the response in a prompt and nowhere else.
            if child.parent == place and (parent < 0 or left[parent].length < turn.length):
                return
        del self._order[place], turns[place]
        for other, parent in zip(left, parents, strict=True):
            other.parent = parent

    def close(self) -> None:
        """End the episode; further calls raise."""
        self.closed = True

    def _refusal(self, reason: StopReason) -> LimitReached:
        """The error that refuses a call; the limit is kept in case that the player swallows it."""
        if self.reached is None or not self.reached.of_time:
            self.reached = reason
            self._refused_at = self._calls
        return LimitReached(reason)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the episode is over: its engine answers no more.")

    def _images(self, images: Iterable[Any] | None) -> tuple[StoredImage, ...]:
        """The images of a call."""
        if images is None:
            return ()
        is_one = isinstance(images, (str, bytes, Mapping)) or getattr(images, "ndim", 4) < 4
        if is_one or not isinstance(images, Iterable):
            raise TypeError(
                "images must be a list of the prompt's images, got "
                f"{type(images).__name__}: give images=[image] for one."
            )
        shown = tuple(map(StoredImage.of, images))
        if shown and self.episode.shows_images is False:
            raise ValueError(
                f"images must come with the model's processor, got {len(shown)} and no processor: give "
                "MultiTurnCollector(..., processor=AutoProcessor.from_pretrained(...))."
            )
        return shown

    def _prompt(self, tokens: Sequence[int], images: tuple[StoredImage, ...]) -> Prompt:
        """The prompt as a view of the conversation that it continues, or of a new one."""
        for line in reversed(self._lines):
            if isinstance(tokens, Prompt) and tokens.line is line:
                break
            if len(tokens) >= len(line) and tokens[: len(line)] == line:
                line.extend(tokens[len(line) :])
                break
        else:
            line = list(tokens)
        self._lines = [*(other for other in self._lines if other is not line), line][-_LINES:]
        self._shown = images
        return Prompt(line, len(tokens), images)

    def _enter(self, turn: Turn, call: int) -> None:
        """Insert a turn in the order of calls and set parents."""
        turns, place = self.episode.turns, bisect(self._order, call)
        self._order.insert(place, call)
        turns.insert(place, turn)
        for k in range(place, len(turns)):  # The further ones began later and ended earlier.
            turns[k].parent = parent_of(turns[k], turns[:k])


def limits_of_play(limits: Limits, max_new_tokens: int | None, engine: Engine) -> Limits:
    """The tightest of the limits, of the sampling's ``max_new_tokens`` and of the engine's limits.

    Raises:
        ValueError: if ``max_new_tokens`` is below 1.
    """
    if max_new_tokens is not None:
        check_at_least("max_new_tokens", max_new_tokens)
        longest = min(max_new_tokens, limits.max_response_tokens or max_new_tokens)
        limits = replace(limits, max_response_tokens=longest)
    return limits.within(engine)


def _member_seed(seed: Any, episode: Episode) -> int | None:
    if seed is None:
        return None
    try:
        seed = index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, got {seed!r}.") from None
    return random_word(random_word(seed, episode.group_number), episode.rank)


def _call_seed(seed: int, call: int) -> int:
    """Seed of a call; 31 bits, since not every server takes more."""
    return random_word(seed, call) >> 33
