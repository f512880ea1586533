"""A harness of the library that plays a chat in this process.

The library's own chat program is a new process for each user message. This harness makes the same model
calls, through the same interception, on the event loop that plays the episode.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

__all__ = ["HARNESS_ID", "register_harness"]

HARNESS_ID = "torchrl_mt_chat"
"""The library finds harnesses as modules of the top level, by this name."""

_LIMIT_CODE = "limit_reached"
"""What a refusal by a limit of the collector has in it."""


def register_harness(vf: ModuleType) -> None:
    """Let the library find the harness.

    Args:
        vf: the library, ``verifiers.v1``.
    """
    if HARNESS_ID in sys.modules:
        return

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[name-defined]
        """Asks the model, and makes the calls that it asks for, until a reply has none."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            """Play the chat from the task's messages on."""
            error = await _play_chat(
                _opening(*self.resolve_prompt(data)),
                ctx.model,
                endpoint,
                secret,
                {
                    name: {"url": url, "timeout": self.config.tool_timeout}
                    for name, url in mcp_urls.items()
                },
                tool_interception_url,
            )
            return vf.ProgramResult(exit_code=int(bool(error)), stdout="", stderr=error)

    module = ModuleType(HARNESS_ID)
    module.ChatHarness = ChatHarness  # type: ignore[attr-defined]
    module.__all__ = ["ChatHarness"]  # type: ignore[attr-defined]
    sys.modules[HARNESS_ID] = module


def _opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The messages of a system prompt and of a prompt in any form of the library."""
    from verifiers.v1.dialects.chat import message_to_wire

    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _play_chat(
    messages: list[dict[str, Any]],
    model: str,
    endpoint: str,
    secret: str,
    servers: dict[str, dict[str, Any]],
    gate: str | None,
) -> str:
    """Go on with a chat until the model replies without a call of a tool.

    A call that a limit of the collector refuses ends the chat, too, so that what was played is scored.

    Args:
        messages: the chat so far.
        model: name of the model.
        endpoint: address of the model.
        secret: key for it.
        servers: tool servers by name.
        gate: address that says whether a call of a tool is to be made; every call is made if ``None``.

    Returns:
        Why the chat failed; empty if it did not.
    """
    import httpx

    async with AsyncExitStack() as stack:
        # A plain connection within this machine: loading certificates would take longer than all else.
        client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=False),
            headers={"Authorization": f"Bearer {secret}"},
            timeout=None,
        )
        await stack.enter_async_context(client)
        tools = _Tools(client, gate)
        await tools.connect(stack, servers)
        request = {"model": model, "messages": messages}
        if tools.schemas:
            request["tools"] = tools.schemas
        while True:
            response = await client.post(f"{endpoint}/chat/completions", json=request)
            if response.status_code == 400 and _LIMIT_CODE in response.text:
                return ""
            if response.status_code != 200:
                return response.text or f"status {response.status_code}"
            message = response.json()["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            if not message.get("tool_calls"):
                return ""
            for call in message["tool_calls"]:
                messages.append(await tools.call(call))


class _Tools:
    """The tools of a chat.

    Args:
        client: asks the gate, with its key.
        gate: address that says whether a call is to be made; every call is made if ``None``.
    """

    def __init__(self, client: Any, gate: str | None) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._client = client
        self._gate = gate
        self._dispatch: dict[str, Any] = {}
        self._servers: dict[str, Any] = {}

    async def connect(self, stack: AsyncExitStack, servers: dict[str, dict[str, Any]]) -> None:
        """Connect to tool servers until the stack is closed."""
        if servers:
            from verifiers.v1.harnesses.utils.mcp import connect_mcp

            self.schemas, self._dispatch, self._servers = await connect_mcp(
                {"mcpServers": servers}, stack
            )

    async def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Make a call and return the message of its result, or of what is wrong with the call."""
        from verifiers.v1.harnesses.utils.compaction import bound_tool_message
        from verifiers.v1.harnesses.utils.mcp import call_mcp

        name, text = call["function"]["name"], call["function"]["arguments"] or "{}"
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = text
        if self._gate is not None:
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            response = await self._client.post(self._gate, json=asked)
            response.raise_for_status()
            decision = response.json()
            if decision["action"] == "stop":
                raise RuntimeError(decision["reason"])
            if decision["action"] == "deny":
                return dict(bound_tool_message(decision["message"]))
        if not isinstance(arguments, dict):
            content: Any = f"error: the arguments must be a JSON object, got {text}"
        elif name not in self._dispatch:
            content = f"error: there is no tool {name!r}"
        else:
            content = await call_mcp(self._servers, self._dispatch, name, arguments)
        message = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
        return dict(bound_tool_message(message))
