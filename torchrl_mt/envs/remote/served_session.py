"""A session of the server: one WebSocket, one environment, one request at a time.

Whatever a client sends, the session answers with an observation or an error. Whatever ends it, its
environment is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torchrl_mt.checks import check_list, import_extra, shown
from torchrl_mt.envs.remote.protocol import (
    IDLE_CLOSE_CODE,
    TEXT_ENV_KEY,
    ErrorCode,
    error_message,
    finite_number,
    item_of,
    write,
)
from torchrl_mt.envs.text_env import TextEnv, TextStep, call_env, takes_message
from torchrl_mt.strict_json import read_json
from torchrl_mt.threads import call_in_thread, close_env
from torchrl_mt.vision.messages import with_data_uris

__all__ = ["CLOSE_SECONDS", "ServedSession", "dismiss"]

CLOSE_SECONDS = 10.0
"""How long a session waits for its environment to close, or for a call that was given up."""
_DISMISSAL_SECONDS = 2.0
"""How long the server waits for the first request of a client that gets no session."""
_LONGEST_ID = 255
_logger = logging.getLogger("torchrl_mt")


class _Refusal(Exception):
    """A request is answered with an error."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.EXECUTION_ERROR) -> None:
        super().__init__(message)
        self.code = code


class _Gone(Exception):
    """The client is gone."""


class ServedSession:
    """A session with an environment of its own.

    Args:
        connection: the open WebSocket.
        make_env: makes the environment; called in a thread.
        idle_timeout: seconds without a request after which the session ends.
        logged: what the server has logged: failures of a kind are logged once.
    """

    def __init__(
        self,
        connection: Any,
        make_env: Callable[[], Any],
        idle_timeout: float,
        logged: set[str],
    ) -> None:
        self._logged = logged
        self._connection = connection
        self._make_env = make_env
        self._idle_timeout = idle_timeout
        self._env: TextEnv | None = None
        self._playing = False
        """Whether an episode is under way."""
        self._gives_up = False
        """Whether a call was cancelled, because the connection has closed."""
        self._steps = 0
        self._used_ids: set[str | int] = set()
        """Ids of the steps of this episode."""
        self._last: tuple[str | int, str] | None = None
        """Id of the last step that had one, and its reply."""

    async def run(self) -> None:
        """Answer requests until the client leaves or is idle for too long; close the environment."""
        connection_closed = import_extra("websockets.exceptions", "remote").ConnectionClosed
        closed = asyncio.ensure_future(self._connection.wait_closed())
        try:
            if not await self._make(closed):
                return
            while True:
                raw = await self._receive()
                text = await self._until(closed, self._answer(raw))
                if text is None:
                    return
                await self._connection.send(text)
        except (connection_closed, _Gone):
            pass
        finally:
            closed.cancel()
            if self._env is not None:
                await self._close_env(self._env)

    async def _make(self, closed: asyncio.Future[None]) -> bool:
        """Make the environment; tell the client if that failed."""
        make = partial(call_in_thread, self._make_env, unclaimed=_close_unused)
        try:
            making = self._called("make_env", make, ErrorCode.FACTORY_ERROR)
            env = await self._until(closed, making)
            if not isinstance(env, TextEnv):
                self._log(f"make_env must make a TextEnv, got {type(env).__name__}")
                raise _Refusal(
                    f"make_env must make a TextEnv, got {shown(env)}.", ErrorCode.FACTORY_ERROR
                )
        except _Refusal as refusal:
            await dismiss(self._connection, error_message(refusal.code, str(refusal)))
            return False
        self._env = env
        return True

    async def _receive(self) -> str | bytes:
        """The next message; a session that is idle for too long is closed meanwhile."""
        loop = asyncio.get_running_loop()
        idle: list[asyncio.Task[None]] = []

        def end() -> None:
            reason = f"idle for {self._idle_timeout:g} seconds"
            idle.append(loop.create_task(self._connection.close(IDLE_CLOSE_CODE, reason)))

        timer = loop.call_later(self._idle_timeout, end)
        try:
            return await self._connection.recv()
        finally:
            timer.cancel()
            for task in idle:
                await task

    async def _until(self, closed: asyncio.Future[None], work: Coroutine[Any, Any, Any]) -> Any:
        """The result of work, which is given up if the connection closes first."""
        if closed.done():
            work.close()
            raise _Gone
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Gone
        finally:
            if not task.done():
                self._gives_up = True
                task.cancel()
                await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        return task.result()

    async def _answer(self, raw: str | bytes) -> str | None:
        """The reply to a message; ``None`` if the client says goodbye."""
        try:
            kind, message = _checked(raw)
            if kind == "close":
                return None
            if kind == "reset":
                return await self._reset(message)
            if kind == "step":
                return await self._step(message)
            return write({"type": "state", "data": {"step_count": self._steps}})
        except _Refusal as refusal:
            return write(error_message(refusal.code, str(refusal)))
        except Exception as error:  # such as one whose text cannot be made
            name = type(error).__name__
            self._log(f"a request of a client raised {name}", error)
            return write(error_message(ErrorCode.SESSION_ERROR, f"the request failed: {name}."))

    async def _reset(self, message: Mapping[str, Any]) -> str:
        env, item = self._env, item_of(_data(message))
        assert env is not None
        self._playing, self._steps, self._last = False, 0, None
        self._used_ids.clear()
        opening = _messages(env, "reset", await self._ask(env, env.reset, item))
        observation: dict[str, Any] = {"messages": opening}
        differs = {
            "tool_schemas": list(env.tool_schemas or ()),
            "whole_text": bool(env.whole_text),
            "takes_message": takes_message(env.step),
        }
        if any(differs.values()):
            observation[TEXT_ENV_KEY] = {key: value for key, value in differs.items() if value}
        text = _written(env, "reset", {"observation": observation, "reward": None, "done": False})
        self._playing = True
        return text

    async def _step(self, message: Mapping[str, Any]) -> str:
        step_id = message.get("step_id")
        if self._last is not None and step_id is not None and step_id == self._last[0]:
            return self._last[1]
        response, said = _action(_data(message))
        self._check_step(step_id)
        if step_id is not None:
            self._used_ids.add(step_id)
        try:
            text = await self._executed(response, said)
        except _Refusal as refusal:
            text = write(error_message(refusal.code, str(refusal)))
        if step_id is not None:
            self._last = step_id, text
        return text

    def _check_step(self, step_id: Any) -> None:
        """Refuse a step that must not be executed."""
        if step_id is not None and step_id in self._used_ids:
            raise _Refusal(
                f"step_id {step_id!r} is that of an earlier step; only the last one is answered again.",
                ErrorCode.VALIDATION_ERROR,
            )
        if not self._playing:
            raise _Refusal(
                "no episode is under way: send a reset before the first step and after the last."
            )

    async def _executed(self, response: str, said: Mapping[str, Any] | None) -> str:
        """The reply to a step, by the environment."""
        env = self._env
        assert env is not None
        args: tuple[Any, ...] = (response,)
        if takes_message(env.step):
            args = (response, {"role": "assistant", "content": response, **(said or {})})
        step = await self._ask(env, env.step, *args)
        name = type(env).__name__
        if not isinstance(step, TextStep):
            raise _Refusal(f"{name}.step must return a TextStep, got {shown(step)}.")
        observation: dict[str, Any] = {"messages": _messages(env, "step", step.messages)}
        if step.history is not None:
            observation["history"] = _messages(env, "step", step.history)
        answer: dict[str, Any] = {
            "observation": observation,
            "reward": _reward(env, step.reward),
            "done": bool(step.done),
        }
        if step.truncated:
            answer["truncated"] = True
        if step.info:
            answer["metadata"] = dict(step.info)
        text = _written(env, "step", answer)
        self._steps += 1
        self._playing = not step.done
        return text

    async def _ask(self, env: TextEnv, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment, in a thread unless it is ``async`` or inline."""
        what = f"{type(env).__name__}.{method.__name__}"
        return await self._called(what, partial(call_env, env, method, *args))

    async def _called(
        self,
        what: str,
        call: Callable[[], Awaitable[Any]],
        code: ErrorCode = ErrorCode.EXECUTION_ERROR,
    ) -> Any:
        """The result of a call of a user's; what it raises is logged and told to the client.

        ``SystemExit`` too, which would end the server.
        """
        try:
            return await call()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self._gives_up:
                raise
            self._log(f"{what} raised {type(error).__name__}", error)
            raise _Refusal(f"{what} raised {type(error).__name__}: {error}", code) from None

    def _log(self, what: str, error: BaseException | None = None) -> None:
        """Log the first failure of a kind; clients are told of each."""
        if what not in self._logged:
            self._logged.add(what)
            _logger.warning(
                "%s. More of this kind are only told to the client.", what, exc_info=error
            )

    async def _close_env(self, env: TextEnv) -> None:
        """Close the environment; it is left behind if that takes too long."""
        if type(env).close is TextEnv.close:
            return
        closing = asyncio.ensure_future(self._ask(env, env.close))
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        if not closing.done():
            closing.cancel()
            _logger.warning(
                "%s did not close within %g seconds and is left behind.",
                type(env).__name__,
                CLOSE_SECONDS,
            )
        elif not closing.cancelled():
            closing.exception()  # logged already


async def dismiss(
    connection: Any, message: Mapping[str, Any], code: int = 1000, reason: str = ""
) -> None:
    """Tell a client why it gets no session, and close.

    Its first request may be on the way. A connection that closed before would take the message with it.
    """
    connection_closed = import_extra("websockets.exceptions", "remote").ConnectionClosed
    with suppress(connection_closed, asyncio.TimeoutError):
        await connection.send(write(message))
        await asyncio.wait_for(connection.recv(), _DISMISSAL_SECONDS)
    await connection.close(code, reason)


def _close_unused(env: Any) -> None:
    """Close an environment that was made after its client had left. Runs in a thread."""
    if isinstance(env, TextEnv):
        close_env(env)


def _checked(raw: str | bytes) -> tuple[str, Mapping[str, Any]]:
    """Type and message of a request; refuse what is none."""
    try:
        if not isinstance(raw, str):
            raise ValueError("a message must be text, got a binary frame")
        message = read_json(raw)
    except ValueError as error:
        raise _Refusal(f"Invalid JSON: {str(error)[:200]}.", ErrorCode.INVALID_JSON) from None
    if not isinstance(message, dict):
        raise _Refusal(
            f"a message must be a JSON object with 'type', got {shown(message)}.",
            ErrorCode.VALIDATION_ERROR,
        )
    kind = message.get("type")
    allowed = {"reset": {"data"}, "step": {"data", "step_id"}, "state": set(), "close": set()}
    if not isinstance(kind, str) or kind not in allowed:
        raise _Refusal(
            f"Unknown message type: {str(kind)[:80]!r}; the types are {', '.join(allowed)}.",
            ErrorCode.UNKNOWN_TYPE,
        )
    step_id = message.get("step_id", 0)
    if (
        isinstance(step_id, bool)
        or not isinstance(step_id, (str, int))
        or len(str(step_id)) > _LONGEST_ID
    ):
        raise _Refusal(
            f"step_id must be a number or a string of at most {_LONGEST_ID} characters, got "
            f"{shown(step_id)}.",
            ErrorCode.VALIDATION_ERROR,
        )
    unknown = sorted(message.keys() - allowed[kind] - {"type"})
    if unknown:
        raise _Refusal(
            f"a {kind} message has no key {unknown[0][:80]!r}.", ErrorCode.VALIDATION_ERROR
        )
    return kind, message


def _data(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data of a message, ``{}`` for a reset without any."""
    data = message.get("data", {} if message["type"] == "reset" else None)
    if not isinstance(data, dict):
        raise _Refusal(
            f"data of a {message['type']} must be a JSON object, got {shown(data)}.",
            ErrorCode.VALIDATION_ERROR,
        )
    return data


def _action(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Response and message of an action. OpenEnv's typed actions have ``metadata``, too."""
    response, said = data.get("response"), data.get("message")
    unknown = sorted(data.keys() - {"response", "message", "metadata"})
    if not isinstance(response, str):
        wrong = f"'response' as a string, got {shown(response)}"
    elif said is not None and not isinstance(said, dict):
        wrong = f"'message' as a JSON object, got {shown(said)}"
    elif unknown:
        wrong = f"no key {unknown[0][:80]!r}"
    else:
        return response, said
    raise _Refusal(
        f'an action must have {wrong}: {{"response": "what the model said"}}.',
        ErrorCode.VALIDATION_ERROR,
    )


def _messages(env: TextEnv, method: str, value: Any) -> list[Any]:
    """The messages that a method of the environment returned."""
    expected = f"{type(env).__name__}.{method} must give a list of messages"
    try:
        check_list(expected, value)
    except TypeError as error:
        raise _Refusal(str(error)) from None
    messages = list(value)
    for message in messages:
        if not isinstance(message, Mapping):
            raise _Refusal(f"{expected}, got {shown(message)} in it.")
    try:
        return with_data_uris(messages)
    except (TypeError, ValueError) as error:
        raise _Refusal(f"{expected}, but {error}") from None


def _reward(env: TextEnv, value: Any) -> float:
    """The reward of a step as a finite float."""
    reward = finite_number(value)
    if reward is None:
        raise _Refusal(
            f"the reward of {type(env).__name__}.step must be a finite number, got {shown(value)}."
        )
    return reward


def _written(env: TextEnv, method: str, answer: Mapping[str, Any]) -> str:
    """An observation as JSON."""
    try:
        return write({"type": "observation", "data": answer})
    except (TypeError, ValueError) as error:
        raise _Refusal(
            f"what {type(env).__name__}.{method} returns must be fit for JSON: {error}."
        ) from None
