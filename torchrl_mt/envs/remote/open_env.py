"""Environments of OpenEnv servers: an episode is a session, and a lost session is a lost episode."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torchrl_mt.checks import check_list, check_positive_finite, import_extra, shown
from torchrl_mt.envs.remote.errors import OpenEnvError, OpenEnvProtocolError
from torchrl_mt.envs.remote.protocol import (
    TEXT_ENV_KEY,
    ErrorCode,
    finite_number,
    reset_data,
)
from torchrl_mt.envs.remote.session import Session, open_session, websocket_address
from torchrl_mt.envs.text_env import Message, TextEnv, TextStep, takes_message
from torchrl_mt.vision.messages import refuse_links

__all__ = ["OpenEnvEnv"]


class OpenEnvEnv(TextEnv):
    """An environment that a server of OpenEnv's protocol runs, such as that of :func:`serve`.

    Each episode is a session: a WebSocket that :meth:`reset` opens, and that is closed when the episode
    is over, is abandoned or fails. A session that was lost is never replaced: the episode is rejected.
    Its cause in the collector's ``stats()`` is :class:`~torchrl_mt.envs.OpenEnvError` or a subclass.

    Needs ``pip install 'torchrl-mt[remote]'``. :doc:`/remote_envs` has examples.

    Args:
        base_url: address of the server, such as ``"http://localhost:8000"``; a list of several, of which
            an episode takes the one where this process has the fewest sessions; or a client of the
            ``openenv`` package, for its typed actions and observations.
        to_messages: makes the messages of an observation. By default, these are its ``"messages"``, or
            else one message of the user: an observation of a single text is that text, any other JSON.
        to_action: makes the action of a response. If it takes a second argument, this is the message
            with its ``tool_calls``. ``{"response": response}`` by default.
        headers: sent when a session is opened, such as ``{"Authorization": "Bearer ..."}``.
        timeout: seconds for opening the connection, and for each reply.

    Raises:
        ValueError: if an address is none, or ``timeout`` is not positive.
        TypeError: if another argument is of a wrong type.
        ImportError: if websockets is not installed.

    Examples:
        >>> import asyncio
        >>> from torchrl_mt.envs import TextStep, serve
        >>> class Echo(TextEnv):
        ...     def reset(self, data=None):
        ...         return [{"role": "user", "content": data["word"]}]
        ...
        ...     def step(self, response):
        ...         return TextStep(reward=float(len(response)), done=True)
        >>> async def play(env):
        ...     print(await env.reset({"word": "say something"}))
        ...     return await env.step("something")
        >>> with serve(Echo) as server:
        ...     asyncio.run(play(OpenEnvEnv(server.url))).reward
        [{'role': 'user', 'content': 'say something'}]
        9.0
    """

    def __init__(
        self,
        base_url: Any,
        *,
        to_messages: Callable[[Any], Sequence[Message]] | None = None,
        to_action: Callable[..., Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        for name, function in (("to_messages", to_messages), ("to_action", to_action)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r}.")
        check_positive_finite("timeout", timeout)
        import_extra("websockets.asyncio.client", "remote")
        self._client = _unwrapped(base_url)
        """A client of the openenv package, if one was given."""
        if self._client is not None:
            base_url = _address_of(self._client)
            headers = {**(getattr(self._client, "_headers", None) or {}), **(headers or {})}
        given = [base_url] if isinstance(base_url, str) else base_url
        if not isinstance(given, Iterable) or not (urls := list(given)):
            raise TypeError(
                "base_url must be an address such as 'http://localhost:8000', a list of addresses or a "
                f"client of the openenv package, got {base_url!r}."
            )
        self._urls = tuple(dict.fromkeys(map(websocket_address, urls)))
        self._to_messages = to_messages
        self._to_action = to_action
        self._headers = _checked_headers(headers)
        self._timeout = float(timeout)
        self._session: Session | None = None
        self._steps = 0
        self._sends_message = False
        """Whether the served environment's ``step`` takes the message."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenEnvEnv:
        shared = ("_client", "_to_messages", "_to_action")
        return self._copied(memo, _session=None, **{name: vars(self)[name] for name in shared})

    async def reset(self, data: Any = None) -> Sequence[Message]:
        """Open a session and begin its episode. If all sessions are in use, wait for one.

        Args:
            data: the item. A mapping is the data of the reset as it is, another value is sent as
                ``{"data": value}``. A served ``TextEnv`` gets the item itself.

        Raises:
            OpenEnvError: if no session can be opened, or the server refuses.
            TypeError: if the item is not fit for JSON.
        """
        if self._session is not None:
            await self._session.close()
        self._session, self._steps = None, 0
        self.tool_schemas = ()
        first = {"type": "reset", "data": reset_data(data)}
        self._session, answer = await open_session(self._urls, self._headers, self._timeout, first)
        with _dropping(self._session):
            if answer.get("done"):
                raise self._wrong("reset", "the episode is over before the first response")
            self._learn(answer)
            return self._messages("reset", self._result("reset", answer).observation)

    async def step(self, response: str, message: Message | None = None) -> TextStep:
        """Send the action of a response.

        What the server sends as ``metadata`` is the step's ``info``.

        Raises:
            OpenEnvError: if the server refuses, the session was lost, or no reply came in time. The
                session has ended then.
        """
        session = self._under_way(self._session)
        with _dropping(session):
            request: dict[str, Any] = {"type": "step", "data": self._action(response, message)}
            if session.knows_step_ids:
                request["step_id"] = self._steps
            try:
                answer = await session.ask("step", request)
            except OpenEnvError as error:
                if error.code != ErrorCode.VALIDATION_ERROR.value:
                    raise
                raise OpenEnvError(
                    error.url,
                    "step",
                    f"{error.reason}. The action was {str(request['data'])[:200]}: give to_action= that "
                    "makes what the server expects",
                    error.code,
                ) from None
            self._steps += 1
            step = self._step(answer)
        if step.done:
            await session.close()
        return step

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def _learn(self, answer: Mapping[str, Any]) -> None:
        """What our server tells of its environment with the first observation."""
        observation = answer.get("observation")
        told = observation.get(TEXT_ENV_KEY) if isinstance(observation, Mapping) else None
        told = told if isinstance(told, Mapping) else {}
        schemas = told.get("tool_schemas", [])
        if not isinstance(schemas, list) or not all(isinstance(s, Mapping) for s in schemas):
            raise self._wrong(
                "reset", f"tool_schemas must be a list of schemas, got {shown(schemas)}"
            )
        self.tool_schemas = schemas
        self.whole_text = told.get("whole_text") is True  # type: ignore[misc]
        self._sends_message = told.get("takes_message") is True

    def _action(self, response: str, message: Message | None) -> Mapping[str, Any]:
        """The data of a step."""
        if message is None:
            message = {"role": "assistant", "content": response}
        if self._to_action is None:
            action: Any = {"response": response}
            if self._sends_message:
                action["message"] = message
        elif takes_message(self._to_action):
            action = self._to_action(response, message)
        else:
            action = self._to_action(response)
        if self._client is not None:
            try:
                action = self._client._step_payload(action)
            except Exception as error:
                raise TypeError(
                    f"{type(self._client).__name__} cannot send {shown(action)} "
                    f"({type(error).__name__}: {error}): give to_action= that makes its action."
                ) from error
        if not isinstance(action, Mapping):
            raise TypeError(f"to_action must return a mapping, got {shown(action)}.")
        return action

    def _step(self, answer: Mapping[str, Any]) -> TextStep:
        """The step of a reply."""
        result = self._result("step", answer)
        reward = 0.0 if result.reward is None else finite_number(result.reward)
        if reward is None:
            raise self._wrong(
                "step", f"reward must be a finite number or null, got {shown(result.reward)}"
            )
        done = result.done
        if not isinstance(done, bool):
            raise self._wrong("step", f"done must be true or false, got {shown(done)}")
        info = getattr(result, "metadata", None) or answer.get("metadata")
        if info is not None and not isinstance(info, Mapping):
            raise self._wrong("step", f"metadata must be a JSON object, got {shown(info)}")
        sent = answer["observation"]
        history = None
        assert self._session is not None
        if self._session.knows_step_ids and "history" in sent:
            history = self._listed("step", sent["history"])
        flags = (answer, info or {}, sent)
        return TextStep(
            self._messages("step", result.observation),
            reward=reward,
            done=done,
            truncated=done and any(told.get("truncated") is True for told in flags),
            info=info or None,
            history=history,
        )

    def _messages(self, call: str, observation: Any) -> list[Message]:
        """The messages of an observation."""
        if self._to_messages is not None:
            messages = self._to_messages(observation)
            check_list("to_messages must return a list of messages", messages)
            return list(messages)
        fields = _fields(observation)
        if fields is not None and "messages" in fields:
            return self._listed(call, fields["messages"])
        return [{"role": "user", "content": _readable(observation, fields)}]

    def _listed(self, call: str, messages: Any) -> list[Message]:
        """Messages that a server sent; their images must be in them."""
        if not (isinstance(messages, list) and all(isinstance(said, Mapping) for said in messages)):
            raise self._wrong(
                call, f"messages must be a list of JSON objects, got {shown(messages)}"
            )
        try:
            for k, said in enumerate(messages):
                refuse_links(said, k)
        except ValueError as error:
            raise self._wrong(call, str(error)) from None
        return messages

    def _result(self, call: str, answer: Mapping[str, Any]) -> Any:
        """A reply as the client of the openenv package reads it, or as it is where there is none."""
        observation = answer.get("observation")
        if not isinstance(observation, Mapping):
            raise self._wrong(call, f"observation must be a JSON object, got {shown(observation)}")
        if self._client is None:
            return SimpleNamespace(**{"reward": None, "done": False, **answer})
        try:
            return self._client._parse_result(dict(answer))
        except Exception as error:
            name = type(self._client).__name__
            raise self._wrong(
                call, f"{name} cannot read the reply: {type(error).__name__}: {error}"
            ) from error

    def _wrong(self, call: str, reason: str) -> OpenEnvProtocolError:
        """The error for a reply that is not what it must be."""
        return OpenEnvProtocolError(
            self._urls[0] if self._session is None else self._session.url, call, reason
        )


@contextmanager
def _dropping(session: Session) -> Iterator[None]:
    """End the session if anything fails."""
    try:
        yield
    except BaseException as error:
        session.drop(f"a call failed ({type(error).__name__})")
        raise


def _unwrapped(given: Any) -> Any:
    """A client of the openenv package, also from its synchronous wrapper; ``None`` for all else."""
    given = getattr(given, "_async", given)
    extends = all(
        callable(getattr(given, name, None)) for name in ("_step_payload", "_parse_result")
    )
    return given if extends and not isinstance(given, type) else None


def _address_of(client: Any) -> str:
    """The address of a client of the openenv package."""
    url = getattr(client, "base_url", None) or getattr(client, "_ws_url", None)
    if not isinstance(url, str):
        raise ValueError(
            f"base_url must have an address, but this {type(client).__name__} has none yet: connect it, "
            "or give base_url= to it."
        )
    return url


def _checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers that can be sent."""
    headers = {} if headers is None else headers
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping of names to values, got {shown(headers)}.")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers must be strings, got {name!r}: {value!r}.")
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"headers must be printable ASCII, but that of {name!r} is not.")
    return dict(headers)


def _fields(observation: Any) -> Mapping[str, Any] | None:
    """The fields of an observation of any kind, without those that are not for the model."""
    if callable(getattr(observation, "model_dump", None)):
        observation = observation.model_dump()
    elif dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        observation = dataclasses.asdict(observation)
    if not isinstance(observation, Mapping):
        return None
    hidden = {"reward", "done", "metadata", "truncated"}
    return {name: value for name, value in observation.items() if name not in hidden}


def _readable(observation: Any, fields: Mapping[str, Any] | None) -> str:
    """An observation as text for the model."""
    value = observation if fields is None else fields
    if fields is not None and len(fields) == 1:
        (lone,) = fields.values()
        value = lone if isinstance(lone, str) else fields
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
