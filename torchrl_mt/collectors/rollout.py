"""Play one episode: environment and engine by turns, within limits.

The rollout keeps the ledger itself and appends tokens to it; a turn's prompt is always the one that
the engine was given.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from torchrl_mt.collectors.chat import ChatTokens
from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.engines import Completion, Engine
from torchrl_mt.envs import Message, TextEnv

__all__ = ["play_episode"]

_T = TypeVar("_T")


async def play_episode(
    env: TextEnv, engine: Engine, chat: ChatTokens, limits: Limits, episode: Episode
) -> None:
    """Play ``episode.data`` in ``env`` to its end and write every turn into ``episode``.

    Args:
        env: an environment that no other episode uses.
        engine: samples the responses.
        chat: turns messages into tokens.
        limits: what the episode may use.
        episode: the ledger to fill; it has no turns yet.

    Raises:
        ValueError: if the opening alone exceeds ``limits.max_episode_tokens``.
        TypeError: if the environment's step does not return a ``TextStep``-like object.
    """
    try:
        messages = list(await _call(env, env.reset, episode.data))
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
        await _call(env, env.close)


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
            f"max_episode_tokens={limits.max_episode_tokens} must leave room for a response, but "
            f"the opening has {len(prompt_ids)} tokens: raise the limit or shorten the prompt."
        )
    answer = await engine.generate(prompt_ids, max_new_tokens=budget)
    response = chat.text(answer.token_ids)
    said = {"role": "assistant", "content": response}
    episode.turns.append(turn := Turn(prompt_ids, answer, [*messages, said]))
    if answer.finish_reason == "length":
        _end(episode, reached, [])
        return []
    step = await _call(env, env.step, response)
    turn.reward = float(step.reward)
    answered = list(step.messages)
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


async def _call(env: TextEnv, method: Callable[..., _T | Awaitable[_T]], *args: Any) -> _T:
    """Call an environment's method without holding up the other episodes."""
    if inspect.iscoroutinefunction(method) or env.inline:
        result = method(*args)
    else:
        result = await asyncio.to_thread(method, *args)
    return await result if inspect.isawaitable(result) else result
