"""Episodes of ``verifiers.v1``, whose model calls go to the episode's own server.

The library's model client sends each call with the id of the rollout's trace. A relay passes the call on
to the server of the episode that plays this rollout. So all episodes of an event loop share an
environment, its tool servers and the client.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from torchrl_mt.bridges.verifiers.chat_harness import HARNESS_ID, register_harness
from torchrl_mt.threads import call_in_thread

__all__ = ["V1Env"]

_MODEL = "policy"
"""Name of the model that is trained."""
_ID = re.compile(rb'"id":\s*"([^"]+)"')
"""The id of a completion: the first in its body, whole or as a stream."""
_SHUTDOWN_SECONDS = 1.0


class V1Env:
    """Environments of ``verifiers.v1`` and their tasks.

    Args:
        vf: the library, ``verifiers.v1``.
        env: an id, a taskset, a configuration or an environment.
        config: further configuration for an id, as in the library's ``[env]`` block.
        num_tasks: number of tasks, from the first; all if ``None``.

    Raises:
        TypeError: if ``env`` is none of these.
        ValueError: if it names no taskset.
    """

    def __init__(
        self, vf: ModuleType, env: Any, config: Mapping[str, Any], num_tasks: int | None
    ) -> None:
        self._vf = vf
        register_harness(vf)
        self._taskset: Any = None
        make: Any = vf.load_environment
        if isinstance(env, str):
            taskset = {**config.get("taskset", {}), "id": env}
            env = vf.resolve_env_config({**config, "taskset": taskset})
        if isinstance(env, vf.Taskset):
            self._taskset, id = env, env.config.id or _importable(type(env))
            env = vf.resolve_env_config({"taskset": env.config.model_copy(update={"id": id})})
        elif isinstance(env, vf.Env):
            self._taskset, make, env = env.taskset, type(env), env.config
        if not isinstance(env, vf.EnvConfig):
            raise TypeError(
                "env must be the id of an installed environment or taskset, or a Taskset, Env or "
                f"EnvConfig of verifiers.v1, got {type(env).__name__}."
            )
        if not env.taskset.id:
            raise ValueError(
                "env must name a taskset, got a configuration without taskset.id: give the id of an "
                "installed taskset."
            )
        self._make_env = make
        self._config = _in_process(vf, env)
        if self._taskset is None:
            self._taskset = vf.load_taskset(env.taskset)
        if num_tasks is not None:
            self._taskset = self._taskset.take(num_tasks)
        self._tasks: dict[int, Any] = {}
        self._loading = threading.Lock()
        self._servers: dict[asyncio.AbstractEventLoop, _Server] = {}

    def items(self) -> list[dict[str, Any]]:
        """One item for each task: its data, as JSON values, and ``"idx"``."""
        return [
            {**task.data.model_dump(mode="json", exclude_defaults=True), "idx": idx}
            for idx, task in self._load().items()
        ]

    async def run(self, data: Any, http_client: Any, session: Any) -> Any:
        """Play an episode and return the library's record of it, with rewards by completion.

        Raises:
            verifiers.v1.RolloutError: the error that the library recorded.
            TimeoutError: if a time limit of the environment was reached.
            RuntimeError: if the environment cannot be served, a limit refused the first call, or no
                agent that is trained made a call.
        """
        task = await self._task(data)
        env, relay = await self._server().get()
        calls = _Calls(http_client)
        context = self._vf.ModelContext(
            model=_MODEL, client=self._vf.EvalClientConfig(base_url=relay.url, api_key_var="")
        )

        def remember(trace: Any) -> None:
            calls.traces[trace.id] = trace
            relay.calls[trace.id] = calls

        try:
            episode = await env.run_episode(task, context, on_trace=remember)
        finally:
            for id in calls.traces:
                relay.calls.pop(id, None)
        self._raise_for(env, episode)
        if calls.refusal and not session.turns():
            raise RuntimeError(calls.refusal)
        return episode, self._enter(episode, calls, session)

    def _server(self) -> _Server:
        """The server of the running loop, which ends with the loop."""
        for loop, server in list(self._servers.items()):
            if server.has_ended:
                self._servers.pop(loop, None)
        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            self._servers[loop] = _Server(self._new_env)
        return self._servers[loop]

    def _new_env(self) -> Any:
        """Make an environment with the tasks, for one event loop."""
        env = self._make_env(self._config)
        env.taskset = self._taskset
        return env

    def _load(self) -> dict[int, Any]:
        """The tasks by ``idx``.

        Raises:
            ValueError: if there are infinitely many, or none.
        """
        with self._loading:
            if not self._tasks:
                if not self._taskset.bounded:
                    raise ValueError(
                        "num_tasks must be given for a taskset without end: the number of tasks to use."
                    )
                self._tasks = {task.data.idx: task for task in self._taskset}
            if not self._tasks:
                raise ValueError("env must have tasks, got a taskset without any.")
            return self._tasks

    async def _task(self, data: Any) -> Any:
        """The task that an item names.

        Raises:
            ValueError: if it names none.
        """
        tasks = self._tasks or await call_in_thread(self._load)
        idx = data.get("idx") if isinstance(data, Mapping) else None
        if isinstance(idx, int) and idx in tasks:
            return tasks[idx]
        if isinstance(data, Mapping) and idx is None and isinstance(data.get("seed"), int):
            return list(tasks.values())[data["seed"] % len(tasks)]
        raise ValueError(
            'data must be an item of VerifiersEnv.items(), with the "idx" of a task, or {"seed": k}, '
            f"got {str(data)[:200]}."
        )

    def _raise_for(self, env: Any, episode: Any) -> None:
        """Raise the error that the library recorded."""
        late = [trace.stop_condition for trace in episode.traces if trace.is_timeout]
        if late or getattr(episode, "is_timeout", False):
            raise TimeoutError(
                f"a time limit of the environment was reached: {late or 'timeout.episode'}."
            )
        if env.complete(episode):
            return
        errors = [error for trace in episode.traces if not trace.ok for error in trace.errors[-1:]]
        errors.extend(episode.errors)
        if not errors:
            raise self._vf.RolloutError("the environment does not count the episode as complete.")
        error = errors[0]
        kind = getattr(self._vf, error.type, None)
        if isinstance(kind, type) and issubclass(kind, self._vf.RolloutError):
            raise kind(error.message)
        raise self._vf.RolloutError(f"{error.type}: {error.message}")

    def _enter(self, episode: Any, calls: _Calls, session: Any) -> dict[str, float]:
        """Write what the library found out into the turns, and return rewards by completion.

        The last turn of each trace gets its reward. That of a trace without a turn is only noted in the
        ``info`` of the episode's last turn.

        Raises:
            RuntimeError: if no agent that is trained has a turn.
        """
        turns = dict(zip(session.completion_ids, session.turns(), strict=True))
        rewards: dict[str, float] = {}
        without_turns: dict[str, float] = {}
        for trace in episode.traces:
            if not trace.agent.trainable:
                continue
            ids = [id for id in calls.completions.get(trace.id, ()) if id in turns]
            if not ids:
                name = trace.agent.name
                without_turns[name] = without_turns.get(name, 0.0) + trace.reward
                continue
            rewards[ids[-1]] = rewards.get(ids[-1], 0.0) + trace.reward
            turns[ids[-1]].info = {
                **(turns[ids[-1]].info or {}),
                "agent": trace.agent.name,
                "rewards": {
                    name: None if reward is None else reward.score
                    for name, reward in trace.rewards.items()
                },
                "metrics": dict(trace.metrics),
                "stop_condition": trace.stop_condition,
                "info": trace.info,
            }
        if not rewards:
            raise RuntimeError("the environment ended without a reply of the model.")
        if without_turns:
            last = list(turns.values())[-1]
            last.info = {**(last.info or {}), "rewards_without_turns": without_turns}
        return rewards


def _importable(cls: type) -> str:
    """An id by which the library finds a class, wherever it is defined."""
    name = f"torchrl_mt_taskset_{id(cls):x}"
    module = ModuleType(name)
    module.Taskset = cls  # type: ignore[attr-defined]
    module.__all__ = ["Taskset"]  # type: ignore[attr-defined]
    sys.modules[name] = module
    return name


def _in_process(vf: ModuleType, config: Any) -> Any:
    """The configuration with plain chats in this process, and without retries.

    A plain chat is an agent whose harness is the library's ``null`` or was not chosen, unless it needs a
    container. A retry would leave the turns of the first attempt in the episode.
    """
    agents = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
    taskset_id = config.taskset.id
    is_plain = vf.default_harness_id(taskset_id) == "bash"
    is_plain &= not vf.task_type(taskset_id).NEEDS_CONTAINER
    for name, agent in agents.items():
        update: dict[str, Any] = {"retries": vf.RetryConfig()}
        is_chat = is_plain if agent.harness is None else agent.harness.id == "null"
        is_local = "runtime" not in agent.model_fields_set or agent.runtime.type == "subprocess"
        if is_chat and is_local:
            harness = agent.harness or vf.HarnessConfig()
            update["harness"] = harness.model_copy(update={"id": HARNESS_ID})
            update["runtime"] = vf.SubprocessConfig()  # No process: a folder for the task's hooks.
        agents[name] = agent.model_copy(update=update)
    return config.model_copy(update=agents)


class _Calls:
    """The model calls of one episode.

    Args:
        http_client: reaches the episode's server.
    """

    def __init__(self, http_client: Any) -> None:
        self.traces: dict[str, Any] = {}
        self.completions: dict[str, list[str]] = {}
        """Ids of the completions, by the id of the trace."""
        self.refusal = ""
        """The last refusal."""
        self._http_client = http_client

    async def answer(self, trace_id: str, path: str, body: bytes, headers: Any) -> Any:
        """Pass a call on, and return the response."""
        agent = self.traces[trace_id].agent
        if not agent.trainable:
            body = await self._for_other(agent, body)
        response = await self._http_client.post(path, content=body, headers=headers)
        if response.status_code != 200:
            self.refusal = response.text
        elif found := _ID.search(response.content):
            self.completions.setdefault(trace_id, []).append(found[1].decode())
        return response

    async def _for_other(self, agent: Any, body: bytes) -> bytes:
        """The request of an agent that is not trained, for a model of its own.

        Raises:
            ValueError: if the collector has none for it.
        """
        request = json.loads(body)
        listed = (await self._http_client.get("/models")).json()["data"]
        names = {model["id"] for model in listed}
        if request["model"] == _MODEL:
            request["model"] = agent.name
        if request["model"] not in names - {_MODEL}:
            raise ValueError(
                f"the environment's agent {agent.name!r} is not trained and needs an engine of its own: "
                f"give the collector models={{{request['model']!r}: engine}}."
            )
        return json.dumps(request).encode()


class _Server:
    """An environment and a relay that serve the episodes of one event loop until it ends.

    Args:
        make_env: makes the environment, in a thread.
    """

    def __init__(self, make_env: Callable[[], Any]) -> None:
        self._ready: asyncio.Future[tuple[Any, _Relay]]
        self._ready = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self._serve(make_env))

    @property
    def has_ended(self) -> bool:
        """Whether it serves no longer."""
        return self.task.done()

    async def get(self) -> tuple[Any, _Relay]:
        """The environment and the relay, once they serve."""
        return await asyncio.shield(self._ready)

    async def _serve(self, make_env: Callable[[], Any]) -> None:
        try:
            env = await call_in_thread(make_env)
            async with _Relay().serving() as relay, env.serving():
                self._ready.set_result((env, relay))
                await asyncio.Event().wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(
                    RuntimeError(f"serving the environment failed: {type(error).__name__}: {error}")
                )
                self._ready.exception()  # Retrieved, whoever waits.
            if isinstance(error, asyncio.CancelledError):
                raise


class _Relay:
    """Passes the calls of the library's model client on to the episodes.

    It listens on this machine only, and knows no key: a call must have the id of a trace that is played.
    """

    def __init__(self) -> None:
        self.calls: dict[str, _Calls] = {}
        """Of the episodes that are played, by the id of the trace."""
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[_Relay]:
        """Listen."""
        from aiohttp import web  # What the library's own servers are made of.

        app = web.Application(client_max_size=2**30)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}/v1"
            yield self
        finally:
            await runner.cleanup()

    async def _list_models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": []})

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        trace_id = request.headers.get("X-Session-ID", "")
        if trace_id not in self.calls:
            return _error(web, 409, "the episode of this trace is over.")
        headers = _kept(request.headers, ("content-type", "x-stainless-retry-count"))
        body = await request.read()
        try:
            path = "/" + request.match_info["path"]
            response = await self.calls[trace_id].answer(trace_id, path, body, headers)
        except ValueError as error:
            return _error(web, 400, str(error))
        return web.Response(
            status=response.status_code,
            body=response.content,
            headers=_kept(response.headers, ("content-type",)),
        )


def _kept(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def _error(web: Any, status: int, message: str) -> Any:
    error = {"message": message, "type": "invalid_request_error", "param": None}
    return web.json_response({"error": error}, status=status)
