"""An environment in which the model calls tools until it answers.

Whatever a tool does, the episode goes on: an error is a message that the model can read.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

from torchrl_mt.checks import check_at_least, check_list, check_positive_finite, shown
from torchrl_mt.envs.mcp_tools import MCPConnection, MCPTools, is_connection
from torchrl_mt.envs.text_env import Message, TextEnv, TextStep
from torchrl_mt.envs.tools import CallableTool, Tool, ToolError, call_tool
from torchrl_mt.threads import call_user, wait_all

__all__ = ["ToolEnv"]

_MOST_AT_ONCE = 32
"""Calls of a response that run at the same time, each of a plain function in a thread."""


class ToolEnv(TextEnv):
    """An environment of tools: it answers the model's calls, and rewards the whole dialogue.

    The episode's data has the opening messages as ``data["messages"]``. Every call in a response is
    answered by a message of role ``"tool"``: with the result, as text, JSON or images, or with ``"error:
    "`` and the reason. A response without a call ends the episode, and ``reward`` judges it. An episode
    that a limit of the collector ends has reward 0. A copy shares the tools: for a state of each
    episode, let methods of a subclass be the tools (:doc:`/environments`). ``info`` has the numbers of
    ``calls`` and ``errors``.

    Args:
        tools: functions, each plain (run in threads) or ``async``, with type hints and a docstring in
            Google's style; :class:`~torchrl_mt.envs.Tool`, with a schema or a time limit of its own;
            open connections to MCP servers; or :class:`~torchrl_mt.envs.MCPTools`, which opens one for
            each episode.
        reward: called with all messages of the dialogue and the data; returns the reward. Plain (run in
            a thread) or ``async``.
        max_calls: maximum number of calls in an episode; any number if ``None``. Calls beyond it are
            answered with an error, and a response that calls on after that ends the episode.
        tool_timeout: maximum seconds of a call; unlimited if ``None``. (The one of
            :class:`~torchrl_mt.collectors.Limits` is for all that a response brings about, and rejects
            the episode.)
        parser: called with the whole text of a response; returns a :class:`~torchrl_mt.chat.ParsedReply`
            or a list of calls. ``None`` parses by the notation of the model's family.

    Raises:
        TypeError: if ``tools`` is not a list of these, or ``reward`` or ``parser`` is not callable.
        ValueError: if a function has no schema, two tools have one name, or a number is out of range.
        RuntimeError: if an open connection is given outside of an event loop.

    Examples:
        >>> def double(number: int) -> int:
        ...     '''Double a number.
        ...
        ...     Args:
        ...         number: the number.
        ...     '''
        ...     return 2 * number
        >>> env = ToolEnv([double], reward=lambda messages, data: messages[-1]["content"] == data["is"])
        >>> asyncio.run(env.reset({"messages": [{"role": "user", "content": "2 * 4?"}], "is": "8"}))
        [{'role': 'user', 'content': '2 * 4?'}]
    """

    def __init__(
        self,
        tools: Iterable[Any],
        *,
        reward: Callable[[list[dict[str, Any]], Any], Any],
        max_calls: int | None = None,
        tool_timeout: float | None = None,
        parser: Callable[[str], Any] | None = None,
    ) -> None:
        check_list("tools must be a list of functions", tools)
        for name, function in (("reward", reward), ("parser", parser)):
            if not callable(function) and (name == "reward" or function is not None):
                raise TypeError(f"{name} must be a function, got {function!r}.")
        if max_calls is not None:
            check_at_least("max_calls", max_calls, 0)
        if tool_timeout is not None:
            check_positive_finite("tool_timeout", tool_timeout)
        self.max_calls = max_calls
        self.tool_timeout = tool_timeout
        self.whole_text = parser is not None  # type: ignore[misc]
        self._reward = reward
        self._parser = parser
        self._given = [_as_tool(tool) for tool in tools]
        self._tools: dict[str, CallableTool] = {}
        self._offer([tool for tool in self._given if isinstance(tool, Tool)])
        self._connections: list[MCPConnection] = []
        self._data: Any = None
        self._dialogue: list[dict[str, Any]] | None = None
        """All messages so far; ``None`` if no episode is under way."""
        self._calls = self._errors = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ToolEnv:
        shared = ("_reward", "_parser", "_given", "_tools", "tool_schemas")
        own: dict[str, Any] = {"_connections": [], "_dialogue": None, "_data": None}
        copied = self._copied(memo, **own, **{name: vars(self)[name] for name in shared})
        copied._reward = _method_of(copied, self, self._reward)
        copied._parser = _method_of(copied, self, self._parser)
        copied._given = [_tool_of(copied, self, tool) for tool in self._given]
        copied._offer([tool for tool in copied._given if isinstance(tool, Tool)])
        return copied

    async def reset(self, data: Any = None) -> Sequence[Message]:
        """Begin an episode with ``data["messages"]``; open its connections to MCP servers.

        Raises:
            TypeError: if the data has no list of messages.
            ValueError: if two tools have the same name.
            Exception: the error of a server.
        """
        messages = data.get("messages") if isinstance(data, Mapping) else None
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
            raise TypeError(
                "data must be a mapping with the opening messages, {'messages': [{'role': 'user', "
                f"'content': '...'}}], ...}}, got {str(data)[:80]}."
            )
        opening = list(messages)
        self._dialogue = None
        await self.close()
        offered: list[CallableTool] = []
        for tool in self._given:
            if isinstance(tool, Tool):
                offered.append(tool)
                continue
            connection = MCPConnection(tool)
            self._connections.append(connection)
            offered += await connection.open()
        self._offer(offered)
        self._data = data
        self._dialogue = copy.deepcopy(opening)
        self._calls = self._errors = 0
        return opening

    async def step(self, response: str, message: Message | None = None) -> TextStep:
        """Answer the calls of a response, or reward the dialogue if there are none to answer.

        Raises:
            RuntimeError: if no episode is under way.
            TypeError: if the parser returns something else.
            Exception: the error of ``reward``.
        """
        dialogue = self._under_way(self._dialogue)
        try:
            said = self._read(response, message)
        except ValueError as error:
            said = {"role": "assistant", "content": response}
            new = [{"role": "user", "content": f"error: {error}"}]
            self._errors += 1
        else:
            warned = self.max_calls is not None and self._calls > self.max_calls
            new = [] if warned else await self._answers(said.get("tool_calls", ()))
        dialogue += [said, *new]
        info = {"calls": self._calls, "errors": self._errors}
        if new:
            return TextStep(copy.deepcopy(new), info=info)
        self._dialogue = None
        reward = await call_user(self._reward, dialogue, self._data)
        return TextStep(reward=reward, done=True, info=info)

    async def close(self) -> None:
        """Close the connections that the episode opened."""
        connections, self._connections = self._connections, []
        closed = await asyncio.gather(*(c.close() for c in connections), return_exceptions=True)
        for error in closed:
            if error is not None:
                raise error

    def _offer(self, tools: Sequence[CallableTool]) -> None:
        """Set the tools that the model may call."""
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) < len(tools):
            names = [tool.name for tool in tools]
            raise ValueError(
                "tools must have different names, got several that are named "
                f"{next(name for name in names if names.count(name) > 1)!r}."
            )
        self._tools = by_name
        self.tool_schemas = [tool.schema for tool in tools]

    def _read(self, response: str, message: Message | None) -> dict[str, Any]:
        """The response as a message whose calls have ids."""
        said: dict[str, Any] = {"role": "assistant", "content": response}
        calls: Any
        if self._parser is None:
            said.update(message or {})
            calls = said.pop("tool_calls", None) or ()
        else:
            calls = self._parser(response)
            if hasattr(calls, "tool_calls"):
                said = dict(calls.message())
                calls = said.pop("tool_calls", ())
        check_list("parser must return a torchrl_mt.chat.ParsedReply or a list of calls", calls)
        named = [_in_chat_form(call, self._calls + k) for k, call in enumerate(calls)]
        return {**said, **({"tool_calls": named} if named else {})}

    async def _answers(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages that answer the calls, in their order."""
        first, self._calls = self._calls, self._calls + len(calls)
        slots = asyncio.Semaphore(_MOST_AT_ONCE)  # Given out in the order of the calls.

        async def answer(call: Mapping[str, Any], number: int) -> str | list[dict[str, Any]]:
            async with slots:
                return await self._answer(call["function"], number)

        contents = await wait_all(answer(call, first + k) for k, call in enumerate(calls))
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": content,
            }
            for call, content in zip(calls, contents, strict=True)
        ]

    async def _answer(self, function: Mapping[str, Any], number: int) -> str | list[dict[str, Any]]:
        """The result of a call, or its error."""
        try:
            if self.max_calls is not None and number >= self.max_calls:
                raise ToolError(
                    f"only {self.max_calls} calls are allowed, and all are used; answer without tools"
                )
            tool = self._tools.get(function["name"])
            if tool is None:
                raise ToolError(
                    f"there is no tool {function['name']!r}; the tools are {', '.join(self._tools)}"
                )
            return await call_tool(tool, function["arguments"], self.tool_timeout)
        except ToolError as error:
            self._errors += 1
            return f"error: {error}"


def _as_tool(tool: Any) -> Tool | MCPTools:
    """A tool in any form as one of two classes."""
    if isinstance(tool, (Tool, MCPTools)):
        return tool
    return MCPTools(tool) if is_connection(tool) else Tool(tool)


def _tool_of(copied: ToolEnv, env: ToolEnv, tool: Tool | MCPTools) -> Tool | MCPTools:
    """A tool of an environment as a tool of its copy, on which its own methods are called."""
    if isinstance(tool, MCPTools):
        return tool
    function = _method_of(copied, env, tool.function)
    return tool if function is tool.function else Tool(function, tool.schema, tool.timeout)


def _method_of(copied: ToolEnv, env: ToolEnv, function: Any) -> Any:
    """A method of an environment as a method of its copy; any other function as it is."""
    if getattr(function, "__self__", None) is env:
        return MethodType(function.__func__, copied)
    return function


def _in_chat_form(call: Any, number: int) -> dict[str, Any]:
    """A call as chat templates take it, with an id."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            f"calls must be such as {{'name': ..., 'arguments': {{...}}}}, got {shown(call)}."
        )
    named = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return {"type": "function", "id": call.get("id") or f"call{number:05}", "function": named}
