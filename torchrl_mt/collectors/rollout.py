"""Play one episode: environment and engine by turns, within limits.

The rollout keeps the ledger itself and appends tokens to it; a turn's prompt is always the one that
the engine was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchrl_mt.collectors.chat import ChatTokens
from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.loop_thread import call_in_thread
from torchrl_mt.engines import Completion, Engine
from torchrl_mt.envs import Message, TextEnv, TextStep

__all__ = ["play_episode"]

_T = TypeVar("_T")


async def play_episode(
    env: TextEnv, engine: Engine, chat: ChatTokens, limits: Limits, episode: Episode
) -> None:
    """Play ``episode.data`` in ``env`` to its end and write every turn into ``episode``.

    Args:
        env: an environment that no other episode uses; it is closed at the end, whatever that is.
        engine: samples the responses. Its ``max_total_tokens`` and ``max_new_tokens``, if it has such,
            bound the conversation and each response like the limits of the same meaning.
        chat: turns messages into tokens.
        limits: what the episode may use.
        episode: the ledger to fill; it has no turns yet.

    Raises:
        ValueError: if the opening alone leaves no room for a response.
        TypeError: if the environment is none, or does not return what :class:`TextEnv` says.
    """
    if not isinstance(env, TextEnv):
        raise TypeError(
            f"env must make a TextEnv (reset, step and close), got {type(env).__name__}: derive it "
            "from TextEnv."
        )
    limits = _within(limits, engine)
    try:
        messages = _messages(await _ask(env, env.reset, episode.data), "TextEnv.reset must return")
        prompt_ids = chat.open(messages)
        while episode.stop_reason is None:
            messages = await _play_turn(env, engine, chat, limits, episode, messages, prompt_ids)
            if episode.stop_reason is None:
                answer = episode.turns[-1].completion
                prompt_ids = [
                    *prompt_ids,
                    *answer.token_ids,
                    *chat.extend(messages, last_token=_stop_token(answer)),
                ]
                if limits.response_budget(len(prompt_ids))[0] == 0:
                    _end(episode, StopReason.MAX_EPISODE_TOKENS, messages)
    finally:
        if type(env).close is not TextEnv.close:
            await _ask(env, env.close)


async def _play_turn(
    env: TextEnv,
    engine: Engine,
    chat: ChatTokens,
    limits: Limits,
    episode: Episode,
    messages: Sequence[Message],
    prompt_ids: list[int],
) -> list[Message]:
    """Play one turn, end the episode where it ends, and return the environment's messages."""
    budget, reached = limits.response_budget(len(prompt_ids))
    if budget == 0:
        raise ValueError(
            f"max_episode_tokens={limits.max_episode_tokens} (or what the engine holds) must leave room "
            f"for a response, but the opening has {len(prompt_ids)} tokens: raise the limit or shorten "
            "the prompt."
        )
    answer = await engine.generate(prompt_ids, max_new_tokens=budget)
    response = chat.text(answer.token_ids)
    said = {"role": "assistant", "content": response}
    episode.turns.append(turn := Turn(prompt_ids, answer, [*messages, said]))
    was_cut = answer.finish_reason == "length"
    if was_cut:
        _end(episode, reached, [])
        return []
    step = await _ask(env, env.step, response)
    if not isinstance(step, TextStep):
        raise TypeError(f"TextEnv.step must return a TextStep, got {_shown(step)}.")
    turn.reward, turn.info = _reward(step), step.info
    answered = _messages(step.messages, "TextStep.messages must be")
    if step.done:
        _end(episode, StopReason.TRUNCATED if step.truncated else StopReason.DONE, answered)
    elif len(episode.turns) == limits.max_turns:
        _end(episode, StopReason.MAX_TURNS, answered)
    return answered


def _stop_token(answer: Completion) -> int | None:
    """The token by which the model ended its answer, if it did."""
    stopped = answer.finish_reason == "stop" and len(answer.token_ids) > 0
    return answer.token_ids[-1] if stopped else None


def _end(episode: Episode, reason: StopReason, messages: Sequence[Message]) -> None:
    """Close the ledger; the last turn also keeps what the environment said last."""
    episode.stop_reason = reason
    episode.turns[-1].messages.extend(messages)


def _within(limits: Limits, engine: Engine) -> Limits:
    """The limits, and the engine's own where those are tighter or where there are none."""
    total = getattr(engine, "max_total_tokens", None)
    bounds = [bound for bound in (limits.max_episode_tokens, total) if bound is not None]
    response = limits.max_response_tokens or getattr(engine, "max_new_tokens", None)
    return replace(
        limits, max_episode_tokens=min(bounds, default=None), max_response_tokens=response
    )


def _messages(value: Any, what: str) -> list[Message]:
    """The messages that an environment gave; ``what`` begins the error."""
    expected = f"{what} a list of messages such as {{'role': 'user', 'content': '...'}}, got"
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{expected} {_shown(value)}.")
    messages = list(value)
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"{expected} {_shown(message)} among them.")
    return messages


def _reward(step: TextStep) -> float:
    """The step's reward as a number."""
    try:
        return float(step.reward)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"TextStep.reward must be a number, got {_shown(step.reward)}.") from None


def _shown(value: Any) -> str:
    """A value as errors name it."""
    return f"{type(value).__name__} ({str(value)[:80]})"


async def _ask(env: TextEnv, method: Callable[..., _T | Awaitable[_T]], *args: Any) -> _T:
    """Call an environment's method without holding up the other episodes."""
    if inspect.iscoroutinefunction(method) or env.inline:
        result = method(*args)
    else:
        result = await call_in_thread(method, *args)
    return await result if inspect.isawaitable(result) else result
