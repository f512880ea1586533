"""Episodes of the classic API of verifiers, which has ``load_environment`` and ``MultiTurnEnv``.

Releases up to 0.3 have it. The library plays its rollout with an OpenAI client of the episode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

__all__ = ["ClassicEnv"]

_LIMIT_CODE = "limit_reached"
"""What a refusal by a limit of the collector has in it."""

_failures: ContextVar[list[Exception] | None] = ContextVar("torchrl_mt_failures", default=None)
"""Errors of reward functions of the current episode."""


class ClassicEnv:
    """An environment of the classic API and the rows of its data set.

    Args:
        vf: the library, ``verifiers``.
        env: an id or an environment.
        config: arguments for the function that makes an environment with this id.
        num_tasks: number of rows, from the first; all if ``None``.

    Raises:
        TypeError: if ``env`` is neither.
        ValueError: if rewards compare the rollouts of a group.
    """

    def __init__(
        self, vf: ModuleType, env: Any, config: Mapping[str, Any], num_tasks: int | None
    ) -> None:
        self._vf = vf
        if isinstance(env, str):
            env = vf.load_environment(env, **config)
        if not isinstance(env, vf.Environment):
            raise TypeError(
                "env must be the id of an installed environment, or an Environment, for this release of "
                f"verifiers, got {type(env).__name__}: objects of verifiers.v1 need release 0.4."
            )
        if env.rubric.has_group_rewards:
            raise ValueError(
                "env must have rewards of single rollouts, got a rubric that compares those of a group: "
                "compare them in the advantage, or with the collector's accept_group."
            )
        for rubric in _rubrics(env):
            rubric.funcs = [_noting_errors(function) for function in rubric.funcs]
        self._env = env
        self._rows = env.get_dataset(n=num_tasks or -1)
        self._client_class = _client_class(vf)

    def items(self) -> list[dict[str, Any]]:
        """The rows of the data set: the question, the right answer, and what else it has."""
        return [dict(row) for row in self._rows]

    async def run(
        self, data: Any, http_client: Any, session: Any
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Play an episode and return the library's record of it, with rewards by completion.

        Raises:
            verifiers.Error: the error that the library recorded.
            Exception: the error of a reward function.
            TimeoutError: if the time limit of the environment was reached.
        """
        import openai

        client = openai.AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=http_client,
            max_retries=0,
        )
        failures: list[Exception] = []
        token = _failures.set(failures)
        try:
            output = await self._env.run_rollout(
                self._row(data),
                self._client_class(client),
                model="policy",
                sampling_args={},
                state_columns=["trajectory"],
            )
        finally:
            _failures.reset(token)
        if output["stop_condition"] == "timeout_reached":
            raise TimeoutError("the environment's timeout_seconds was reached.")
        if (error := output.get("error")) is not None:
            kind = getattr(self._vf, error["error"], self._vf.Error)
            raise kind(error["error_chain_repr"])
        if failures:
            raise failures[0]
        return output, _enter(output, session)

    def _row(self, data: Any) -> dict[str, Any]:
        """The row that an item names.

        Raises:
            ValueError: if it names none.
        """
        if isinstance(data, Mapping) and "prompt" in data:
            return dict(data)
        if isinstance(data, Mapping) and isinstance(data.get("seed"), int):
            return dict(self._rows[data["seed"] % len(self._rows)])
        raise ValueError(
            'data must be an item of VerifiersEnv.items(), with a "prompt", or {"seed": k}, got '
            f"{str(data)[:200]}."
        )


def _enter(output: Mapping[str, Any], session: Any) -> dict[str, float]:
    """Write what the library found out into the last turn, and return rewards by completion.

    A turn gets the reward that the environment gave its step, and the last one that of the rubric, too.
    """
    turns = dict(zip(session.completion_ids, session.turns(), strict=True))
    if not turns:
        raise RuntimeError("the environment ended without a reply of the model.")
    rewards = {
        step["response"].id: float(step["reward"])
        for step in output["trajectory"]
        if step["reward"] is not None and step["response"].id in turns
    }
    id, last = list(turns.items())[-1]
    rewards[id] = rewards.get(id, 0.0) + output["reward"]
    last.info = {
        **(last.info or {}),
        "metrics": dict(output["metrics"] or {}),
        "stop_condition": output["stop_condition"],
    }
    return rewards


def _rubrics(env: Any) -> Iterator[Any]:
    """The rubrics of an environment, of those that it groups, and the members of groups of rubrics."""
    waiting = [
        env.rubric,
        *(rubric for part in getattr(env, "envs", []) for rubric in _rubrics(part)),
    ]
    while waiting:
        rubric = waiting.pop()
        yield rubric
        waiting.extend(getattr(rubric, "rubrics", []))


def _noting_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose errors are noted. The library makes them rewards of 0."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        try:
            result = function(*args, **kwargs)
            return float(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            if (failures := _failures.get()) is not None:
                failures.append(error)
            raise

    return call


def _client_class(vf: ModuleType) -> Any:
    """A class of clients that end a rollout at a limit of the collector, so that it is scored."""

    class Client(vf.OpenAIChatCompletionsClient):  # type: ignore[name-defined]
        """The library's client, for which a limit is the end of the model's context."""

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().get_response(*args, **kwargs)
            except vf.ModelError as error:  # The library has wrapped the client's own.
                if getattr(error.__cause__, "code", None) != _LIMIT_CODE:
                    raise
                raise vf.OverlongPromptError(str(error.__cause__)) from error

    return Client
