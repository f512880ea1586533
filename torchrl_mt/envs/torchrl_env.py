"""TorchRL's chat environments, with their transforms, as text environments.

The dialogue only grows: each step returns the messages after the response. A transform that rewrites
earlier messages raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    lazy_stack,
    unravel_key,
)
from torchrl.data.llm import History
from torchrl.envs import EnvBase
from torchrl.envs.llm.transforms import (
    KLComputation,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
)

from torchrl_mt.envs.text_env import Message, TextEnv, TextStep
from torchrl_mt.envs.torchrl_data import LoaderItems, initial_entries, transforms_of, with_entries

__all__ = ["ChatEnvAdapter"]

_KL_TRANSFORMS = (KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb)
_POLICY_NODES = {"tokens", "log_probs", "masks", "logits"}
_DONE_KEYS = ("done", "terminated", "truncated")


class ChatEnvAdapter(TextEnv):
    r"""A TorchRL chat environment (``ChatEnv``, ``DatasetChatEnv``) with its transforms.

    **Lifetime.** Such environments are not thread-safe, so each episode has its own. ``factory`` makes
    it at :meth:`reset`; it is closed with the adapter or at the next reset, together with subprocesses
    that its transforms started. Make costly objects (a data set, a tokenizer) outside of the factory.

    **Data.** An episode's data is a mapping, or the question alone: text, or a list of messages. Entries
    of a mapping are in the tensordict at every step, as those of TorchRL's ``DataLoadingPrimer`` are;
    numbers become tensors. Its question is the ``data_key`` entry (``"query"`` by default) or else
    ``"messages"``.

    **Data loaders.** An environment with its own data loader needs no question in the data, but uses one
    if there is. Otherwise ``{"seed": k}``, the data of a collector without data, selects item ``k`` of
    the loader's ``dataset`` (modulo its size). So a group shares its question and runs repeat, whatever
    the loader's order. A loader that can only be iterated is shared by the adapter and its copies; it
    gives a new item for every new seed, and the same item for the same seed.

    Args:
        factory: makes the environment, of batch size ``[1]`` and ``input_mode="history"``.
        reward_key: key of the environment's reward, which is summed over its elements. Without one, the
            reward is 0.

    Raises:
        TypeError: if ``factory`` is an environment or not callable.

    Examples:
        >>> from torchrl.envs.llm import ChatEnv
        >>> from torchrl.envs.llm.transforms import SimpleToolTransform
        >>> def factory():
        ...     tools = {"add": lambda a, b: a + b}
        ...     return ChatEnv(system_prompt="Use tools.").append_transform(SimpleToolTransform(tools))
        >>> env = ChatEnvAdapter(factory)
        >>> [message["role"] for message in env.reset({"query": "3 + 4?"})]
        ['system', 'user']
        >>> env.step('<tool>add\n{"a": 3, "b": 4}</tool>').messages
        ({'role': 'tool', 'content': 'Tool add executed successfully:\n7'},)
        >>> env.close()
    """

    whole_text = True
    """TorchRL's transforms look for thoughts and tool calls in the text."""

    def __init__(self, factory: Callable[[], EnvBase], *, reward_key: NestedKey = "reward") -> None:
        if isinstance(factory, EnvBase) or not callable(factory):
            raise TypeError(
                "factory must be a callable that makes a TorchRL environment, one for every episode, "
                f"got {type(factory).__name__}: pass lambda: ChatEnv(...)."
            )
        self.factory = factory
        self.reward_key = reward_key
        self._loader_items = LoaderItems()
        self._lock = threading.Lock()
        self._is_to_close = False
        self._env: EnvBase | None = None
        self._root: TensorDictBase | None = None
        self._given: set[str] = set()
        self._shown: list[Message] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatEnvAdapter:
        """Copy the adapter without its episode, because environments cannot be copied."""
        other = type(self)(self.factory, reward_key=self.reward_key)
        other._loader_items = self._loader_items
        return other

    def reset(self, data: Any = None) -> list[Message]:
        """Make an environment and begin an episode in it.

        Raises:
            TypeError: if ``factory`` makes no TorchRL environment, or ``data`` is neither a mapping nor
                a question.
            ValueError: if the environment is batched, is not in history mode, or has a transform that
                needs tokens or log-probabilities; or if ``data`` has no question.
        """
        with self._alone():
            env = self.factory()
            if not isinstance(env, EnvBase):
                raise TypeError(
                    f"factory must make a TorchRL environment, got {type(env).__name__}."
                )
            try:
                _require_chat_env(env)
                entries = initial_entries(data, env, self._loader_items)
                env = with_entries(env, entries)
                root = env.reset()
            except BaseException:
                env.close(raise_if_closed=False)
                raise
            self._close()
            self._env, self._root, self._given = env, root, set(entries)
            self._shown = _messages(root)
            return list(self._shown)

    def step(self, response: str) -> TextStep:
        """Step the environment with a response.

        Returns:
            The messages that the environment added, the reward, whether the episode is done, and in
            ``info`` all other scalars and strings of the step.

        Raises:
            RuntimeError: if no episode is under way, or the environment changed earlier messages.
        """
        with self._alone():
            env, root = self._under_way(self._env), self._under_way(self._root)
            self._root = None
            role = getattr(env, "policy_role", None) or "assistant"
            said = {"role": role, "content": response}
            _say(root, said)
            stepped = env.step(root)
            after = stepped["next"]
            messages = _messages(after)
            known = [*self._shown, said]
            if messages[: len(known)] != known:
                raise RuntimeError(
                    "factory must make an environment that only adds messages, but one of its "
                    "transforms changed what the model had already seen or said: have it add a message "
                    "instead (AddThinkingPrompt: edit_last_turn=False)."
                )
            flags = {key for key in _DONE_KEYS if key in after and after[key].any()}
            if not flags:
                self._root = env.step_mdp(stepped)
            self._shown = messages
            reward = after.get(self.reward_key, None)
            return TextStep(
                tuple(messages[len(known) :]),
                reward=0.0 if reward is None else float(reward.sum()),
                done=bool(flags),
                truncated="truncated" in flags and "terminated" not in flags,
                info=self._info(after) or None,
            )

    def close(self) -> None:
        """Close the environment; never blocks.

        If another thread is in a step or reset, that thread closes the environment when it ends.
        """
        self._is_to_close = True
        self._close_if_asked()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the environment, and close it afterwards if another thread has asked for it."""
        try:
            with self._lock, torch.no_grad():
                if self._is_to_close:  # This is for the previous environment.
                    self._is_to_close = False
                    self._close()
                yield
        finally:
            self._close_if_asked()

    def _close_if_asked(self) -> None:
        """Close if asked to; a thread that holds the lock does so after releasing it."""
        while self._is_to_close and self._lock.acquire(blocking=False):
            try:
                self._is_to_close = False
                self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        env, self._env, self._root = self._env, None, None
        if env is not None:
            env.close(raise_if_closed=False)

    def _info(self, after: TensorDictBase) -> dict[str, Any]:
        """All other scalars and strings of a step."""
        known = {"history", *_DONE_KEYS, *self._given}
        info = {}
        for key, value in after.items(True, True):
            path = key if isinstance(key, tuple) else (key,)
            if path[0] in known or key == unravel_key(self.reward_key):
                continue
            name = "/".join(path)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                info[name] = value.item()
            elif isinstance(value, NonTensorStack) and value.numel() == 1:
                info[name] = value.tolist()[0]
            elif isinstance(value, NonTensorData):
                info[name] = value.data
        return info


def _require_chat_env(env: EnvBase) -> None:
    """Refuse an environment that cannot be played with text alone."""
    mode = getattr(env, "input_mode", None)
    if mode != "history":
        raise ValueError(
            f"factory must make a chat environment with input_mode='history', got {mode!r}: only "
            "messages can be told apart from what the model was shown before."
        )
    if tuple(env.batch_size) != (1,):
        raise ValueError(
            "factory must make an environment of batch size [1], one conversation, got "
            f"{list(env.batch_size)}: leave batch_size or num_envs at 1."
        )
    for transform in transforms_of(env):
        roots = {key if isinstance(key, str) else key[0] for key in transform.in_keys}
        if isinstance(transform, _KL_TRANSFORMS) or roots & _POLICY_NODES:
            raise ValueError(
                "factory must make an environment that needs nothing but text, but its "
                f"{type(transform).__name__} needs tokens or log-probabilities: leave it out and take "
                "penalties on log-probabilities where the policy is trained (ExperienceMaker)."
            )


def _say(root: TensorDictBase, said: Message) -> None:
    """Write a response to the history, as TorchRL's policies do."""
    chat = root["history"]
    response = History.from_chats([[dict(said)]])
    chat.response = response
    # History.extend refuses messages of different fields, such as one with tool calls.
    chat.full = lazy_stack([*chat.prompt.unbind(-1), *response.unbind(-1)], -1)


def _messages(root: TensorDictBase) -> list[Message]:
    """The dialogue so far in the format of chat templates, without padding."""
    return [
        {key: value for key, value in message.items() if key != "is_complete" and value is not None}
        for message in root["history"].prompt[0].tolist(tolist_first=True)
        if message["role"] != "<none>"
    ]
