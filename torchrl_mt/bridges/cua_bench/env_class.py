"""Environments of the form ``env_class(config)`` with ``reset() -> (env_ret, meta_info)``.

It is the form of cua-bench's environments: ``env_ret["obs"]`` is all that the model sees, as plain text
without a chat template, images in base64 between marks. An environment lives as long as its slot;
after a failure it is made anew.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_mt.bridges.cua_bench.prompts import EpisodeEngine
from torchrl_mt.checks import as_number
from torchrl_mt.collectors import LimitReached, Recorder, Rejected, StopReason
from torchrl_mt.threads import call_in_thread, call_user, close_env, start_daemon, within
from torchrl_mt.vision import StoredImage, VisionProcessor

__all__ = ["EnvClassWorkflow", "ObservationPrompts"]

_KEPT = 0.75
"""A prompt that is too long is cut to this share of the limit, so that the next turns fit."""

_IMAGE = re.compile(r"<\|vision_start\|>(.*?)<\|vision_end\|>", re.DOTALL)
"""An image in an observation."""


class EnvClassWorkflow:
    """Plays episodes in environments of this form, one environment per slot.

    ``env_ret`` has ``"obs"`` and, after a step, ``"reward"`` and ``"done"``. A step's ``meta_info`` is
    the turn's ``info``; its ``"uid"`` need not be unique.

    Args:
        env_class: makes an environment of its config.
        env_configs: the config of each slot.
        tokenizer: encodes observations.
        max_prompt_length: maximum tokens of a prompt.
        vision: the processor of a model that takes images.
    """

    def __init__(
        self,
        env_class: Callable[[Any], Any],
        env_configs: Sequence[Any],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        vision: VisionProcessor | None = None,
    ) -> None:
        self._vision = vision
        self._env_class = env_class
        self._configs = env_configs
        self._tokenizer = tokenizer
        self._longest = max_prompt_length
        self._name = getattr(env_class, "__name__", type(env_class).__name__)
        self._idle: dict[int, Any] = {}
        """Environments between two episodes, by slot."""

    async def arun_episode(self, engine: Recorder, data: Any) -> list[float]:
        """Play an episode in the environment of its slot; return one reward per turn."""
        own = engine.engine
        assert isinstance(own, EpisodeEngine)
        env = self._idle.pop(own.slot, None)
        if env is None:
            config = self._configs[own.slot]
            env = await call_in_thread(self._env_class, config, unclaimed=close_env)
        calls = _Calls(env, engine.limits.tool_timeout)
        try:
            return await self._play(calls, engine, own)
        finally:
            if calls.usable:
                self._idle[own.slot] = env
            else:
                start_daemon(close_env, env)

    async def _play(self, env: _Calls, engine: Recorder, own: EpisodeEngine) -> list[float]:
        prompts = ObservationPrompts(self._tokenizer, self._longest, self._vision)
        rewards: list[float] = []
        state, meta = self._checked("reset", await env.call("reset"))
        while True:
            own.info = {**meta, "env_uid": meta.get("uid")}
            try:
                if self._vision is None:
                    tokens = prompts.tokens(state["obs"])
                else:  # In a thread, since images may be large.
                    tokens = await call_in_thread(prompts.tokens, state["obs"])
                answer = await engine.generate(tokens, images=prompts.images)
            except LimitReached as limit:
                if limit.reason.of_time or not rewards:
                    raise
                return rewards  # Truncated: those of the turns before.
            ids = list(answer.token_ids)
            said = ids if answer.stop_token is None else ids[:-1]
            text = self._tokenizer.decode(
                said, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            state, meta = self._checked("step", await env.call("step", text))
            rewards.append(as_number(state["reward"]))
            engine.episode.turns[-1].info = meta
            engine.episode.judged = True
            if state["done"]:
                return rewards

    def _checked(self, method: str, returned: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """What ``reset`` or ``step`` returned, if it is of the right form."""
        needed = {"obs", "reward", "done"} if method == "step" else {"obs"}
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        if pair and isinstance(returned[0], Mapping) and isinstance(returned[1], Mapping):
            lacking = sorted(needed - returned[0].keys())
            if lacking:
                raise ValueError(
                    f"env_ret must have {sorted(needed)}, but that of {self._name}.{method} has no "
                    f"{lacking}."
                )
            obs = returned[0]["obs"]
            if isinstance(obs, str):
                return returned[0], returned[1]
            raise TypeError(
                f'env_ret["obs"] must be text, got {type(obs).__name__} from {self._name}.{method}: '
                "make it a TextEnv, whose observations are messages."
            )
        raise TypeError(
            f"{self._name}.{method} must return (env_ret, meta_info), two dicts, got "
            f"{type(returned).__name__} ({str(returned)[:80]})."
        )

    def close(self, timeout: float) -> None:
        """Close the environments that are between two episodes, within ``timeout`` seconds."""
        envs, self._idle = list(self._idle.values()), {}
        threads = [start_daemon(close_env, env) for env in envs]
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))


class _Calls:
    """Calls an environment, each within ``seconds``, and tells whether it can be reset afterwards."""

    def __init__(self, env: Any, seconds: float | None) -> None:
        self.usable = True
        """False once a call has failed, or was cancelled and may still run."""
        self._env = env
        self._seconds = seconds

    async def call(self, method: str, *args: Any) -> Any:
        self.usable = False
        calling = call_user(getattr(self._env, method), *args)
        returned = await within(calling, self._seconds, LimitReached(StopReason.TOOL_TIMEOUT))
        self.usable = True
        return returned


class ObservationPrompts:
    """Encodes the observations of an episode, each of which is all that the model sees.

    An observation that begins with the one before it adds a turn. If one is too long, the oldest turns
    are left out, never the first observation or the newest turn.

    Args:
        tokenizer: encodes text.
        longest: maximum tokens of a prompt.
        vision: the processor of a model that takes images. Observations then have them as
            ``<|vision_start|>...<|vision_end|>``, with a file in base64 in between.

    Attributes:
        images: the images of the last prompt, in order.

    Examples:
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> tokenizer = tiny_chat_tokenizer("task a b c")
        >>> prompts = ObservationPrompts(tokenizer, longest=3)
        >>> texts = ["task", "task a", "task a b", "task a b c"]
        >>> [tokenizer.decode(prompts.tokens(text)) for text in texts]
        ['task', 'task a', 'task a b', 'task c']
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        vision: VisionProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._longest = longest
        self._vision = vision
        self.images: list[StoredImage] = []
        self._known: dict[str, StoredImage] = {}
        """Images of the last prompt, by their base64."""
        self._parts: list[str] = []
        """The first observation, and what each later one added."""
        self._left_out = 0
        """Number of turns that are left out."""

    def tokens(self, obs: str) -> list[int]:
        """Tokens of an observation.

        Raises:
            Rejected: if the first observation and the newest turn are too long.
        """
        seen = "".join(self._parts)
        if self._parts and obs.startswith(seen):
            self._parts.append(obs[len(seen) :])
        elif self._parts and obs.startswith(self._parts[0]):
            self._parts, self._left_out = [self._parts[0], obs[len(self._parts[0]) :]], 0
        else:
            self._parts, self._left_out = [obs], 0
        ids = self._encode()
        if len(ids) <= self._longest:
            return ids
        while len(ids) > _KEPT * self._longest and self._left_out < len(self._parts) - 2:
            self._left_out += 1
            ids = self._encode()
        if len(ids) > self._longest:
            raise Rejected(
                "prompt_too_long",
                f"max_prompt_length={self._longest} must leave room for the first observation and the "
                f"newest turn, which have {len(ids)} tokens: raise it, or shorten them",
            )
        return ids

    def _encode(self) -> list[int]:
        """Encode the first observation and the turns that are not left out."""
        text = self._parts[0] + "".join(self._parts[1 + self._left_out :])
        if self._vision is None:
            return list(self._tokenizer(text)["input_ids"])
        before, shown = self._known, list[str]()
        mark = self._vision.mark

        def taken(found: re.Match[str]) -> str:
            shown.append(found[1])
            return mark

        # After the last end no image begins: each beginning would be looked at up to the text's end.
        images, end, rest = text.rpartition("<|vision_end|>")
        text = _IMAGE.sub(taken, images + end) + rest
        self._known = {
            each: before.get(each) or StoredImage.of(f"data:image/jpeg;base64,{each}")
            for each in shown
        }
        self.images = [self._known[each] for each in shown]
        return self._vision.expanded(self._tokenizer(text)["input_ids"], self.images)
