"""An environment in which the model uses a computer, on servers such as cua-bench's.

Only what parses as an action is executed, and every action at most once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from torchrl_mt.bridges.cua_bench.actions import (
    ACTION_FORMATS,
    Action,
    ActionError,
    describe_actions,
    parse_actions,
)
from torchrl_mt.bridges.cua_bench.computer import Computer, ComputerError, Observation, check_server
from torchrl_mt.checks import check_choice, check_positive_finite, check_positive_integer
from torchrl_mt.envs import Message, TextEnv, TextStep

__all__ = ["ComputerEnv"]

_NO_USER = "There is no user who could help. Go on alone."


class ComputerEnv(TextEnv):
    """An environment of computers behind HTTP, as cua-bench's servers offer them.

    The model sees the instruction, how to write actions (:func:`parse_actions`) and the screen. Its
    response has one or several actions. The environment executes them in order, or none if there is
    anything else between the tags, and answers with the screen after the last one. ``done()`` ends the
    episode with the reward of the server's evaluation. Step ``max_step`` is executed, evaluated, and
    ends the episode as truncated.

    A server plays one episode at a time: have more servers than ``max_concurrency``, since an episode
    waits until one is free. A request that fails rejects the episode for ``ComputerError``; a step is
    never sent again. Let ``timeout`` and the 60 seconds of waits be below the collector's
    ``tool_timeout``. :doc:`/computer_use` has the rest: servers that fail, tasks and how dialogues are
    shortened.

    Args:
        server_url: address of a server, or several of them.
        task_configs: tasks ``{"env_path": str, "task_index": int, "split": str}``; the last two are 0
            and ``"train"`` by default, other entries are not used.
        max_step: maximum number of responses in an episode.
        max_hist: number of last pairs of an observation and a response that stay whole.
        timeout: maximum seconds of a request, besides those of a ``wait``. The server releases a
            computer that was idle for as long, so let it be above the time of a response.
        action_format: ``"tagged"``, ``<|action_start|>click(0.5, 0.5)<|action_end|>``, or ``"think"``,
            ``<think>...</think><action>click(0.5, 0.5)</action>``.

    Raises:
        ImportError: if httpx or tenacity is not installed. A screenshot needs Pillow.
        TypeError: if an argument is of a wrong type.
        ValueError: if an address, a task, a number or ``action_format`` is not as above.

    Examples:
        >>> import asyncio
        >>> tasks = [{"env_path": "./task", "task_index": 0, "split": "train"}]
        >>> env = ComputerEnv(["http://localhost:8001", "http://localhost:8002"], tasks, max_step=20)
        >>> messages = asyncio.run(env.reset({"task": 0}))  # doctest: +SKIP
    """

    def __init__(
        self,
        server_url: str | Sequence[str],
        task_configs: Sequence[Mapping[str, Any]],
        *,
        max_step: int = 50,
        max_hist: int = 10,
        timeout: float = 300.0,
        action_format: str = "tagged",
    ) -> None:
        if not isinstance(server_url, Iterable):
            raise TypeError(
                "server_url must be an address such as 'http://localhost:8001', or several, got "
                f"{type(server_url).__name__} ({server_url!r:.80})."
            )
        urls = [server_url] if isinstance(server_url, (str, bytes)) else list(server_url)
        if not urls:
            raise ValueError("server_url must be an address or several, got none.")
        self._servers = tuple(dict.fromkeys(check_server(url) for url in urls))
        if isinstance(task_configs, (str, Mapping)) or not isinstance(task_configs, Iterable):
            raise TypeError(
                "task_configs must be a list of tasks such as {'env_path': './task', 'task_index': 0, "
                f"'split': 'train'}}, got {type(task_configs).__name__} ({task_configs!r:.80})."
            )
        self._tasks = tuple(
            _checked_task(task, f"task_configs[{i}]") for i, task in enumerate(task_configs)
        )
        if not self._tasks:
            raise ValueError("task_configs must have at least one task, got none.")
        self.max_step = check_positive_integer("max_step", max_step)
        self.max_hist = check_positive_integer("max_hist", max_hist)
        check_positive_finite("timeout", timeout)
        self.timeout = timeout
        check_choice("action_format", action_format, ACTION_FORMATS)
        self.action_format = action_format
        self._computer: Computer | None = None
        self._episode: _Episode | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputerEnv:
        shared = {"_servers": self._servers, "_tasks": self._tasks}
        return self._copied(memo, _computer=None, _episode=None, **shared)

    def __getstate__(self) -> dict[str, Any]:
        # What is sent to another process plays no episode yet.
        return {**vars(self), "_computer": None, "_episode": None}

    async def reset(self, data: Any = None) -> Sequence[Message]:
        """Begin a task on a free server.

        Raises:
            TypeError: if the data names no task.
            ValueError: if the task that it names is none.
            ComputerError: if the server does not begin it.
        """
        task = self._task(data)
        self._episode = None
        with suppress(
            ComputerError
        ):  # The last episode's server is lost; this one may have another.
            await self.close()
        self._computer = await Computer.find(self._servers, self.timeout)
        instruction, observation = await self._computer.reset(task)
        prompt = [instruction, describe_actions(self.action_format)]
        self._episode = _Episode([part for part in prompt if part], observation, self.max_hist)
        return self._episode.opening()

    async def step(self, response: str, message: Message | None = None) -> TextStep:
        """Execute the actions of a response.

        Raises:
            RuntimeError: if no episode is under way.
            ComputerError: if the server fails; the episode is over then.
        """
        # Whatever interrupts the step, the episode does not go on: an action may have been executed.
        episode, self._episode = self._under_way(self._episode), None
        computer = self._under_way(self._computer)
        notes: list[str] = []
        reward, done = 0.0, False
        try:
            actions = self._parsed(response)
        except ActionError as error:
            actions = []
            episode.invalid += 1
            notes = [f"Nothing was executed: {error}", describe_actions(self.action_format)]
        played: list[str] = []
        for action in actions:
            played.append(str(action))
            if action.name == "call_user":
                notes = [_NO_USER]
                continue
            reply = await computer.act(action)
            reward, done = reward + reply.reward, reply.done
            if reply.observation is not None:
                episode.observation = reply.observation
            if done:
                break
        info = {"actions": played, "invalid": episode.invalid}
        if done:
            return TextStep(reward=reward, done=True, info=info)
        said = message or {"role": "assistant", "content": response}
        history = episode.add(said, "; ".join(played), notes)
        if episode.steps == self.max_step:
            reward += (await computer.act(Action("done"))).reward
            return TextStep([episode.newest()], reward=reward, done=True, truncated=True, info=info)
        self._episode = episode
        return TextStep([episode.newest()], reward=reward, info=info, history=history)

    async def close(self) -> None:
        """Release the computer and the server, if an episode has them.

        Raises:
            ComputerError: if the server does not confirm it.
        """
        computer, self._computer = self._computer, None
        if computer is not None:
            await computer.close()

    def _task(self, data: Any) -> dict[str, Any]:
        """The task that the data of an episode names."""
        if data is None:
            return random.choice(self._tasks)
        index = data
        if isinstance(data, Mapping):
            if "env_path" in data:
                return _checked_task(data, "data")
            index = data.get("task", data.get("seed"))
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise TypeError(
                "data must name a task: {'env_path': ...}, an integer, {'task': 0} or {'seed': 0}, got "
                f"{type(data).__name__} ({data!r:.80})."
            )
        if isinstance(data, Mapping) and "task" not in data:
            return self._tasks[int(index) % len(self._tasks)]
        if not 0 <= int(index) < len(self._tasks):
            raise ValueError(
                f"data must name one of the {len(self._tasks)} tasks in task_configs, from 0, got "
                f"{data!r:.80}."
            )
        return self._tasks[int(index)]

    def _parsed(self, response: str) -> list[Action]:
        """The actions of a response that may be executed."""
        actions = parse_actions(response, self.action_format)
        if any(action.name == "done" for action in actions[:-1]):
            raise ActionError("done() must be the last action.")
        return actions


@dataclass
class _Episode:
    """What the model sees of an episode.

    With h = ``max_hist`` and n steps, the first ``h * max(0, n // h - 1)`` pairs are lines: h to 2h - 1
    pairs are whole, once there are as many.
    """

    prompt: Sequence[str]
    observation: Observation
    max_hist: int
    steps: int = 0
    invalid: int = 0
    lines: list[str] = field(default_factory=list)
    """What was done in each step."""
    whole: deque[tuple[list[str | Observation], Message]] = field(default_factory=deque)
    """Pairs of what the model was shown and its response; what it is shown now is in ``shown``."""
    shown: list[str | Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shown = [self.observation]

    def opening(self) -> list[Message]:
        """The first messages of the dialogue."""
        return [_user([*self.prompt, self.observation])]

    def newest(self) -> Message:
        """The message of the newest observation."""
        return _user(self.shown)

    def add(self, said: Message, actions: str, notes: Sequence[str]) -> list[Message] | None:
        """Add a step; return the dialogue before the newest observation if it was shortened.

        Args:
            said: the response.
            actions: its actions as text; empty if it was invalid.
            notes: what is said to the model before the observation.
        """
        self.steps += 1
        self.lines.append(f"{self.steps}. {actions or '(no valid action)'}")
        self.whole.append((self.shown, said))
        self.shown = [*notes, self.observation]
        if len(self.whole) < 2 * self.max_hist:
            return None
        for _ in range(self.max_hist):
            self.whole.popleft()
        old = "\n".join(["Your first steps were:", *self.lines[: -self.max_hist]])
        history: list[Message] = []
        for number, (shown, response) in enumerate(self.whole):
            history.append(_user(shown if number else [*self.prompt, old, *shown]))
            history.append(response)
        return history


def _user(parts: Sequence[str | Observation]) -> Message:
    """A user's message: a string if it has no image, else a list of parts."""
    content: list[dict[str, str]] = []
    for part in parts:
        text, image = (part, None) if isinstance(part, str) else (part.text, part.image)
        if text is not None and content and content[-1]["type"] == "text":
            content[-1]["text"] += f"\n\n{text}"
        elif text is not None:
            content.append({"type": "text", "text": text})
        if image is not None:
            content.append({"type": "image", "image": image})
    has_image = any(part["type"] == "image" for part in content)
    return {"role": "user", "content": content if has_image else content[0]["text"]}


def _checked_task(task: Any, name: str) -> dict[str, Any]:
    """What a server is told about a task."""
    if not isinstance(task, Mapping):
        raise TypeError(
            f"{name} must be a mapping such as {{'env_path': './task', 'task_index': 0, 'split': "
            f"'train'}}, got {type(task).__name__} ({task!r:.80})."
        )
    checked = {"task_index": 0, "split": "train", **task}
    for key in ("env_path", "split"):
        if not isinstance(checked.get(key), str) or not checked[key]:
            raise ValueError(f"{name}['{key}'] must be a string, got {checked.get(key)!r:.80}.")
    index = checked["task_index"]
    if isinstance(index, bool) or not isinstance(index, Integral) or int(index) < 0:
        raise ValueError(f"{name}['task_index'] must be an integer, 0 or more, got {index!r:.80}.")
    return {"env_path": checked["env_path"], "task_index": int(index), "split": checked["split"]}
