"""Agents: programs that speak to an OpenAI endpoint, played as workflows of a collector."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import httpx

from torchrl_mt.agents.server import AgentServer
from torchrl_mt.agents.session import Session
from torchrl_mt.collectors.recorder import LimitReached, Recorder
from torchrl_mt.collectors.workflow import Rejected
from torchrl_mt.threads import call_user

__all__ = ["Agent", "AgentPlayer"]


@runtime_checkable
class Agent(Protocol):
    """An agent: an object with a method ``run``, plain or ``async``.

    A plain method runs in a thread. ``run`` may leave out parameters that it does not need, and may also
    have ``session``, the :class:`Session`.

    Examples:
        >>> class Asks:
        ...     async def run(self, data, *, base_url, api_key, http_client):
        ...         request = {"messages": [{"role": "user", "content": data["question"]}]}
        ...         reply = await http_client.post("/chat/completions", json=request)
        ...         answer = reply.json()["choices"][0]["message"]["content"]
        ...         return float(answer == data["answer"])
        >>> isinstance(Asks(), Agent)
        True
    """

    def run(self, data: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> Any:
        """Play one episode.

        Args:
            data: the episode's item.
            base_url: address of the server, ending in ``/v1``, for any process of this machine.
            api_key: key of the episode.
            http_client: a client that reaches the server without a socket. Use it in this event loop
                only, not in a thread.

        Returns:
            A number, the reward of the episode, which its last turn gets; ``{completion_id: reward}``,
            with 0 for the calls that are missing; a list with one reward per call; or ``None`` to reject
            the episode. Rewards must be finite.
        """


class AgentPlayer:
    """Plays the episodes of an agent, with one server for all, started when the first episode begins.

    Args:
        *args: arguments of the :class:`AgentServer`.
        **kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._server = AgentServer(*args, **kwargs)
        self._starting: asyncio.Task[None] | None = None

    async def play(self, agent: Agent, recorder: Recorder) -> Any:
        """Play one episode and return its result in the form of workflows.

        Raises:
            LimitReached: if the agent failed when a limit had refused its last call.
            Exception: of the agent; or of the engine, if it failed in the agent's last call.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._server.start())
        await asyncio.shield(self._starting)
        session = self._server.open_recorded(recorder)
        try:
            result = await _run(agent, session)
        except Rejected:
            raise
        except Exception as error:
            if recorder.reached is not None:
                raise LimitReached(recorder.reached) from error
            if session.error is not None:
                raise session.error from error
            raise
        finally:
            await session.close()
        return _per_turn(result, session) if isinstance(result, Mapping) else result


async def _run(agent: Agent, session: Session) -> Any:
    """Call an agent: on the event loop if it is ``async``, else in a thread."""
    takes = inspect.signature(agent.run).parameters
    takes_others = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    given: dict[str, Any] = {
        name: getattr(session, name)
        for name in ("base_url", "api_key", "http_client")
        if takes_others or name in takes
    }
    if "session" in takes:
        given["session"] = session
    return await call_user(partial(agent.run, session.data, **given))


def _per_turn(rewards: Mapping[str, Any], session: Session) -> list[Any]:
    """Rewards of the turns by the ids of their completions; 0 where none is given.

    Raises:
        ValueError: if an id is not of this episode.
    """
    known = session.completion_ids
    unknown = sorted(map(str, rewards.keys() - set(known)))
    if unknown:
        raise ValueError(
            f"an agent's rewards must have ids of this episode's completions, {known[:3]}..., got "
            f"{unknown[:3]}."
        )
    return [rewards.get(id, 0.0) for id in known]
