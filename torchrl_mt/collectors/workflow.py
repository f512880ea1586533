"""Workflows: user code that plays whole episodes, and how its results become rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from tensordict import TensorDictBase

from torchrl_mt.checks import as_number, is_finite
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.engines import Engine
from torchrl_mt.plugins import load_plugin, plugin_names

__all__ = ["Rejected", "Workflow", "enter_result", "misuse"]


@runtime_checkable
class Workflow(Protocol):
    """Plays an episode: calls the engine as often as it likes and returns the rewards.

    One instance plays all episodes, many at a time.

    Examples:
        >>> class Once:
        ...     async def arun_episode(self, engine, data):
        ...         answer = await engine.generate(data["prompt_ids"])
        ...         return float(len(answer.token_ids) < 5)
        >>> isinstance(Once(), Workflow)
        True
    """

    async def arun_episode(self, engine: Engine, data: Any) -> Any:
        """Play one episode.

        Args:
            engine: the engine; every call is recorded as a turn of the episode.
            data: the episode's item.

        Returns:
            ``None`` to reject the episode; a number, the reward of the last turn; a list of numbers,
            one per turn; a TED TensorDict, ``[T]``, one step per turn, with ``("next", "reward")``,
            whose other entries are kept; or AReaL's dict of padded sequences, with ``"input_ids"``,
            ``"attention_mask"`` and ``"rewards"``, whose turns take the place of those recorded (the
            documentation's *Workflows written for AReaL*). Rewards must be finite.
        """


class Rejected(Exception):
    """An episode is rejected without an error.

    Args:
        cause: the cause under which it is counted.
        detail: what was wrong and what to do, for the log.
    """

    def __init__(self, cause: str, detail: str | None = None) -> None:
        super().__init__(detail or cause)
        self.cause = cause


_Error = TypeVar("_Error", bound=Exception)


def misuse(error: _Error) -> _Error:
    """Mark an error of code that never does what is asked of it: it ends a run that it begins."""
    error.is_misuse = True  # type: ignore[attr-defined]
    return error


def enter_result(episode: Episode, result: Any, version: int) -> None:
    """Write a workflow's result into the episode that it played.

    Args:
        episode: the episode, with the turns that the engine recorded.
        result: what the workflow returned; see :meth:`Workflow.arun_episode`.
        version: the engine's weight version, for sampled tokens that come without one.

    Raises:
        Rejected: if the result is ``None``.
        TypeError: if the result is of a wrong type.
        ValueError: if the number of rewards differs from that of the turns, a reward is not finite, the
            engine was never called, or AReaL's dict does not fit together
            (:func:`~torchrl_mt.bridges.areal.read_result`).
    """
    if result is None:
        raise Rejected("declined")
    if isinstance(result, (Mapping, TensorDictBase)):
        for name in plugin_names("results"):
            read = load_plugin("results", name)(result, episode.turns, version)
            if read is not None:
                episode.turns = read
                return
    turns = episode.turns
    if not turns:
        raise misuse(
            ValueError(
                "a workflow or agent must call the engine at least once (a workflow may also return a "
                "dict with 'input_ids'): there is nothing to learn from."
            )
        )
    if isinstance(result, torch.Tensor):
        result = result.tolist()
    if isinstance(result, TensorDictBase):
        episode.entries, rewards = _entries(result, len(turns))
    elif isinstance(result, Sequence) and not isinstance(result, str):
        rewards = _numbers(result)
    else:
        rewards = [0.0] * (len(turns) - 1) + _numbers([result])
    if len(rewards) != len(turns):
        raise ValueError(
            f"a workflow must return one reward for each turn: {len(turns)} were played, got "
            f"{len(rewards)} rewards."
        )
    for k, reward in enumerate(rewards):
        if not is_finite(reward):
            raise ValueError(
                f"a workflow must return finite rewards, as float32, got {reward} for turn {k}: return "
                "None where an episode cannot be judged."
            )
    for turn, reward in zip(turns, rewards, strict=True):
        turn.reward = reward


def _entries(result: TensorDictBase, turns: int) -> tuple[TensorDictBase, list[float]]:
    """Split a workflow's TensorDict into its own entries and the rewards."""
    if result.batch_size != (turns,):
        raise ValueError(
            f"a workflow's TensorDict must have a step for each turn, batch size [{turns}], got "
            f"{list(result.batch_size)}."
        )
    reward = result.get(("next", "reward"), None)
    if reward is None:
        raise ValueError('a workflow\'s TensorDict must have ("next", "reward"), got none.')
    own: tuple[Any, ...] = ("tokens", "log_probs", "versions", "collector", "group")
    own = (*own, ("next", "reward"), ("images", "new"))
    flags = tuple(("next", name) for name in ("done", "terminated", "truncated"))
    return result.exclude(*own, *flags), reward.reshape(turns, -1).sum(1).tolist()


def _numbers(values: Sequence[Any]) -> list[float]:
    for value in values:
        if not isinstance(value, Real) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            raise misuse(
                TypeError(
                    "a workflow or agent must return None, a number, a list of numbers or a TensorDict, "
                    f"got {type(value).__name__} ({str(value)[:80]}). A workflow's dict must have "
                    "'input_ids'."
                )
            )
    return [as_number(value) for value in values]
