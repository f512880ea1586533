"""TorchRL's chat environments as text environments, transforms and all.

What the model is shown only ever grows: each step hands on the messages that came after the response,
and a transform that rewrites what was shown before is an error, never a silent change of the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    unravel_key,
)
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, TensorDictPrimer, Transform, TransformedEnv
from torchrl.envs.llm.transforms import (
    DataLoadingPrimer,
    KLComputation,
    KLRewardTransform,
    RayDataLoadingPrimer,
    RetrieveKL,
    RetrieveLogProb,
)
from torchrl.envs.utils import make_composite_from_td

from torchrl_mt.envs.text_env import Message, TextEnv, TextStep

__all__ = ["ChatEnvAdapter"]

_KL_TRANSFORMS = (KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb)
_LOADERS = (DataLoadingPrimer, RayDataLoadingPrimer)
_POLICY_NODES = {"tokens", "log_probs", "masks", "logits"}
_DONE_KEYS = ("done", "terminated", "truncated")


class ChatEnvAdapter(TextEnv):
    r"""Play in a TorchRL chat environment: ``ChatEnv``, ``DatasetChatEnv``, with their transforms.

    Each episode has an environment of its own, made by ``factory`` at :meth:`reset` and closed with
    the adapter or at the next reset, and with it the subprocesses that its transforms started: such
    environments are not safe to share between threads. What is costly (a data set, a tokenizer)
    is best made outside of the factory.

    An episode's data may be a mapping, whose entries the environment and its transforms find in
    the tensordict at every step as those of TorchRL's ``DataLoadingPrimer`` (numbers become tensors),
    or the prompt alone: text, or a list of messages. The prompt of a mapping is its ``data_key`` entry
    (``"query"`` unless the environment was given another name) or else its ``"messages"``.

    An environment with its own data loader takes the prompt from the data all the same if that has
    one. For data ``{"seed": k}``, which is what a collector without data gives, it is item ``k`` of
    the loader's ``dataset`` (modulo its size), whatever the loader's order, repeats and batch size:
    so a group shares its prompt, and a run repeats.

    Args:
        factory: makes the environment; of batch size ``[1]`` (or ``[]``) and ``input_mode="history"``.
        reward_key: where the environment writes the reward, which is summed over its elements. An
            environment that writes none pays 0.

    Raises:
        TypeError: if ``factory`` is an environment rather than what makes one, or not callable.

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

    def __init__(self, factory: Callable[[], EnvBase], *, reward_key: NestedKey = "reward") -> None:
        if isinstance(factory, EnvBase) or not callable(factory):
            raise TypeError(
                "factory must be a callable that makes a TorchRL environment, one for every episode, "
                f"got {type(factory).__name__}: pass lambda: ChatEnv(...)."
            )
        self.factory = factory
        self.reward_key = reward_key
        self._lock = threading.Lock()
        self._env: EnvBase | None = None
        self._root: TensorDictBase | None = None
        self._given: set[str] = set()
        self._shown: list[Message] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatEnvAdapter:
        """An adapter of the same factory, without an episode: environments are not to be copied."""
        return type(self)(self.factory, reward_key=self.reward_key)

    def reset(self, data: Any = None) -> list[Message]:
        """Make an environment and begin an episode in it.

        Args:
            data: see :class:`ChatEnvAdapter`.

        Returns:
            The conversation that the environment opens with.

        Raises:
            TypeError: if ``factory`` makes no TorchRL environment, or ``data`` is none of the above.
            ValueError: if the environment is batched, is not in history mode, or has a transform
                that needs what only a policy could give it (tokens, log-probabilities); or if ``data``
                does not tell the prompt.
        """
        with self._lock, torch.no_grad():
            env = self.factory()
            if not isinstance(env, EnvBase):
                raise TypeError(
                    f"factory must make a TorchRL environment, got {type(env).__name__}."
                )
            try:
                _require_chat_env(env)
                item = _item(data, env)
                env = _with_data(env, item)
                root = env.reset()
            except BaseException:
                env.close(raise_if_closed=False)
                raise
            self._close()
            self._env, self._root, self._given = env, root, set(item)
            self._shown = _messages(_prompt(root, env))
            return list(self._shown)

    def step(self, response: str) -> TextStep:
        """Step the environment with a response.

        Args:
            response: the model's text.

        Returns:
            The messages that the environment added; the reward; done and truncated as the environment
            says; ``info`` with every other scalar of the step.

        Raises:
            RuntimeError: if no episode is under way, or the environment changed messages that the
                model has already seen or written.
        """
        with self._lock, torch.no_grad():
            if self._env is None or self._root is None:
                raise RuntimeError(
                    "ChatEnvAdapter.step was called with no episode under way: call reset first."
                )
            env, root, self._root = self._env, self._root, None
            said = {"role": _setting(env, "policy_role", None) or "assistant", "content": response}
            _say(root, said, batched=bool(env.batch_size))
            stepped = env.step(root)
            after = stepped["next"]
            messages = _messages(_prompt(after, env))
            known = [*self._shown, said]
            if messages[: len(known)] != known:
                raise RuntimeError(
                    "factory must make an environment that only adds messages, but one of its "
                    "transforms changed what the model had already seen or said: have it add a message "
                    "instead (AddThinkingPrompt: edit_last_turn=False)."
                )
            done, terminated, truncated = (_flag(after, key) for key in _DONE_KEYS)
            if not (done or terminated or truncated):
                self._root = env.step_mdp(stepped)
            self._shown = messages
            return TextStep(
                tuple(messages[len(known) :]),
                reward=_total(after.get(self.reward_key, None)),
                done=done or terminated or truncated,
                truncated=(done or truncated) and not terminated,
                info=self._info(after) or None,
            )

    def close(self) -> None:
        """Close the environment, once a step under way has ended."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        env, self._env, self._root = self._env, None, None
        if env is not None:
            env.close(raise_if_closed=False)

    def _info(self, after: TensorDictBase) -> dict[str, Any]:
        """What else the step says in single numbers and words."""
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
    """Refuse an environment that text alone cannot play in."""
    if tuple(env.batch_size) not in ((), (1,)):
        raise ValueError(
            "factory must make an environment of batch size [1], one conversation, got "
            f"{list(env.batch_size)}: leave batch_size or num_envs at 1."
        )
    mode = _setting(env, "input_mode", None)
    if mode != "history":
        raise ValueError(
            f"factory must make a chat environment with input_mode='history', got {mode!r}: only "
            "messages can be told apart from what the model was shown before."
        )
    for transform in _transforms(env):
        roots = {key if isinstance(key, str) else key[0] for key in transform.in_keys}
        if isinstance(transform, _KL_TRANSFORMS) or roots & _POLICY_NODES:
            raise ValueError(
                "factory must make an environment that needs nothing but text, but its "
                f"{type(transform).__name__} needs tokens or log-probabilities: leave it out and take "
                "penalties on log-probabilities where the policy is trained (ExperienceMaker)."
            )


def _with_data(env: EnvBase, item: Mapping[str, Any]) -> TransformedEnv:
    """The environment, started from ``item``, whose entries are in the tensordict at every step."""
    values = {key: _entry(value, env) for key, value in item.items()}
    data = TensorDict(values, batch_size=env.batch_size)
    primer = TensorDictPrimer(
        primers=make_composite_from_td(data, unsqueeze_null_shapes=False),
        default_value=lambda reset=None: data,
        single_default_value=True,
        call_before_env_reset=True,
        expand_specs=True,
        reset_key="_reset",
    )
    if not isinstance(env, TransformedEnv):
        return TransformedEnv(env, primer)
    inner = env
    while isinstance(inner.base_env, TransformedEnv):
        inner = inner.base_env
    # First, so that all other transforms find the data at a step; and since what precedes a reset
    # runs from last to first, it also has the last word there, over a data loader of the environment.
    inner.insert_transform(0, primer)
    env.empty_cache()
    return env


def _item(data: Any, env: EnvBase) -> dict[str, Any]:
    """The entries that the episode starts from, the prompt under the environment's name for it."""
    name = _setting(env, "data_key", "query")
    if isinstance(data, Mapping):
        item = {key: value for key, value in data.items() if value is not None}
        if name not in item and "messages" in item:
            item[name] = item.pop("messages")
    elif isinstance(data, (str, History)) or _is_conversation(data):
        item = {name: data}
    elif data is None:
        item = {}
    else:
        raise TypeError(
            "data must be a mapping, a prompt or a list of messages, got "
            f"{type(data).__name__} ({str(data)[:80]})."
        )
    loader = next((t for t in _transforms(env) if isinstance(t, _LOADERS)), None)
    if name not in item:
        item = _loaded(loader, item.get("seed"), name)
    missing = sorted(set(map(str, loader.data_keys if loader else ())) - set(map(str, item)))
    if missing:
        raise ValueError(
            f"data must hold all that the environment's data loader would, got no {missing}: add them, "
            "or leave the data loader out."
        )
    return item


def _loaded(loader: Any, seed: Any, name: str) -> dict[str, Any]:
    """Item ``seed`` of the environment's own data set."""
    source: Any = getattr(loader, "dataloader", None)
    dataset: Any = getattr(source, "dataset", None)
    if seed is None or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f'data must hold the prompt as data["{name}"] or data["messages"], or a "seed" where the '
            "environment's data loader has a dataset with items by number; the environment has "
            + ("no data loader" if loader is None else f"a {type(source).__name__}")
            + ": give the collector the items themselves (data=[...])."
        )
    batch = source.collate_fn([dataset[int(seed) % len(dataset)]])
    batch = batch[0] if isinstance(batch, list) else {key: batch[key][0] for key in batch}
    return dict(batch)


def _entry(value: Any, env: EnvBase) -> Any:
    """A value as the tensordict of a single conversation holds it."""
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value)
    if isinstance(value, torch.Tensor):
        return value.unsqueeze(0) if env.batch_size else value
    data = NonTensorData(value)
    return NonTensorStack(data) if env.batch_size else data


def _say(root: TensorDictBase, said: Message, *, batched: bool) -> None:
    """Write a response as TorchRL's policies do in history mode."""
    chat = root["history"]
    response = History.from_chats([[dict(said)]]) if batched else History.from_chats([dict(said)])
    chat.response = response
    # History.extend refuses messages of different fields, such as one with tool calls.
    chat.full = lazy_stack([*chat.prompt.unbind(-1), *response.unbind(-1)], -1)


def _prompt(root: TensorDictBase, env: EnvBase) -> History:
    """The conversation so far."""
    history = root["history"].prompt
    return history[0] if env.batch_size else history


def _messages(history: History) -> list[Message]:
    """A conversation as chat templates take it, without the padding of batches."""
    return [
        {key: value for key, value in message.items() if key != "is_complete" and value is not None}
        for message in history.tolist(tolist_first=True)
        if message["role"] != "<none>"
    ]


def _transforms(env: EnvBase) -> Iterator[Transform]:
    """Every transform on an environment, those within others too."""
    while isinstance(env, TransformedEnv):
        waiting = [env.transform]
        while waiting:
            transform = waiting.pop()
            yield transform
            if isinstance(transform, Compose):
                waiting.extend(transform.transforms)
        env = env.base_env


def _setting(env: EnvBase, name: str, default: Any) -> Any:
    """An attribute of the environment under all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return getattr(env, name, default)


def _is_conversation(data: Any) -> bool:
    """Whether data is a list of messages."""
    return (
        isinstance(data, Sequence)
        and len(data) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in data)
    )


def _flag(after: TensorDictBase, key: str) -> bool:
    """A done flag."""
    value = after.get(key, None)
    return value is not None and bool(value.any())


def _total(reward: torch.Tensor | None) -> float:
    """The sum of a reward's elements."""
    return 0.0 if reward is None else float(reward.sum())
