"""The setup that all episodes of a collector share, and the filters applied to them.

Errors of an episode are returned, not raised, so they do not affect other episodes.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tensordict import TensorDictBase

from torchrl_mt.chat.tokens import ChatTokens
from torchrl_mt.collectors.episode import Episode, episodes_to_tensordict
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.playing.dialogue import Dialogue
from torchrl_mt.collectors.playing.env_factory import Make, MakePlayer, named, resolve
from torchrl_mt.collectors.playing.env_workers import EnvWorkers
from torchrl_mt.collectors.playing.play_episode import play_episode
from torchrl_mt.collectors.settings import AgentOptions, ChatOptions
from torchrl_mt.collectors.workflow import Rejected, Workflow
from torchrl_mt.collectors.workflow_entries import ExpectedEntries
from torchrl_mt.engines import Engine
from torchrl_mt.engines.policy.engine import as_engine
from torchrl_mt.envs import TextEnv
from torchrl_mt.plugins import load_plugin
from torchrl_mt.threads import call_user
from torchrl_mt.vision import VisionProcessor

if TYPE_CHECKING:
    from torchrl_mt.collectors.distributed.player import RemotePlayer

__all__ = ["EpisodePlayer", "Player"]

_CHATS_KEPT = 64

_logger = logging.getLogger("torchrl_mt")


Player: TypeAlias = "EpisodePlayer | RemotePlayer"
"""Plays episodes, here or elsewhere."""


class EpisodePlayer:
    """Plays episodes and returns their errors.

    The arguments are those of :class:`~torchrl_mt.collectors.MultiTurnCollector`.
    """

    def __init__(
        self,
        env: TextEnv | Workflow | Any | type | str | Callable[[], Any],
        policy: Engine | Any,
        *,
        limits: Limits,
        chat: ChatOptions,
        tokenizer: Any = None,
        accept: Callable[[TensorDictBase], Any] | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        env_workers: int | None = None,
        agents: AgentOptions,
        processor: Any = None,
    ) -> None:
        vision = None if processor is None else VisionProcessor.of(processor)
        with_tokenizer = vision.tokenizer if vision and tokenizer is None else tokenizer
        engine = as_engine(
            named(policy, "policy") if isinstance(policy, str) else policy, with_tokenizer
        )
        self.engine: Engine = engine
        """Samples the responses."""
        self.limits = limits
        self.accept = accept
        self.tokenizer = getattr(engine, "tokenizer", None) if tokenizer is None else tokenizer
        self.vision = vision
        if vision is not None:
            for each in (tokenizer, getattr(engine, "tokenizer", None)):
                if each is not None:
                    vision.check_tokenizer(each)
            self.tokenizer = vision.tokenizer
        self._workers: EnvWorkers | None = None
        self._make_player: MakePlayer
        if env_workers is None:
            self._make_player = resolve(env, workflow_kwargs)
        else:
            self._workers = EnvWorkers(env_workers, env, workflow_kwargs)
            self._make_player = Make(self._workers.make, at_once=True)
        workers = self._workers
        self.end: Callable[[], object] = (lambda: None) if workers is None else workers.close
        """Ends what the player has started, without a reference to the player."""
        self._chat_options = chat
        self._agent_options = agents
        self._agent_player: Any = None
        self._chats: OrderedDict[str, ChatTokens] = OrderedDict()
        if isinstance(env, TextEnv):
            self._get_chat(env.tool_schemas, env.whole_text)
        elif isinstance(env, type) and issubclass(env, TextEnv):
            self._get_chat()
        if self._make_player.is_agent:
            self._get_agent_player()

    async def failure_of(
        self,
        episode: Episode,
        sampling: Mapping[str, Any],
        expected: ExpectedEntries,
        engine: Engine | None = None,
    ) -> BaseException | None:
        """Play an episode and return its error, or ``None``.

        Args:
            episode: the episode to fill.
            sampling: arguments for the engine's ``generate``.
            expected: the entries that every episode's workflow must return.
            engine: the engine of this episode, if it has one of its own.
        """
        episode.shows_images = self.vision is not None
        try:
            await play_episode(
                self._make_player,
                engine or self.engine,
                self._begin_dialogue,
                self.limits,
                episode,
                sampling,
                lambda agent, recorder: self._get_agent_player().play(agent, recorder),
                self.vision,
            )
            if episode.valid is False:
                episode.entries = expected.blank(len(episode.turns))
            if not (episode.is_eval or self.accept is None):
                ted = episodes_to_tensordict([episode])
                if not await call_user(self.accept, ted):
                    return Rejected("not_accepted")
            if episode.valid is not False:
                expected.check(episode.entries)
        except BaseException as error:
            return error
        return None

    def close(self, timeout: float | None = None) -> None:
        """End the processes of ``env_workers``; they take a few seconds at most."""
        if self._workers is not None:
            self._workers.close()

    def _get_agent_player(self) -> Any:
        """Make the player of agents, with their server, on first use."""
        if self._agent_player is None:
            make_player = load_plugin("players", "agent")
            self._agent_player = make_player(
                self.engine,
                self.tokenizer,
                processor=self.vision,
                chat=self._chat_options,
                **vars(self._agent_options),
            )
        return self._agent_player

    def _begin_dialogue(self, opening: Sequence[Mapping[str, Any]], env: TextEnv) -> Dialogue:
        """Begin a dialogue in which the model may call the tools of an environment."""
        chat = self._get_chat(env.tool_schemas, env.whole_text)
        return Dialogue(chat, opening, self._chat_options.max_prompt_tokens)

    def _get_chat(
        self, tools: Sequence[Mapping[str, Any]] = (), whole_text: bool = False
    ) -> ChatTokens:
        """The :class:`~torchrl_mt.chat.ChatTokens` with tools of these schemas.

        It is made on first use. The last are kept, since items may have tools of their own. An
        environment that reads the whole text has a notation of its own, which the messages tell.

        Raises:
            ValueError: if ``template_kwargs`` has tools, too.
        """
        key = json.dumps(tools, default=repr) if tools else ""
        if key in self._chats:
            self._chats.move_to_end(key)
            return self._chats[key]
        options = self._chat_options
        if tools:
            kwargs = options.template_kwargs or {}
            if kwargs.get("tools"):
                raise ValueError(
                    'template_kwargs["tools"] must not be given with an environment that has tools of '
                    "its own, whose schemas are given to the chat template: leave it out."
                )
            options = replace(options, template_kwargs={**kwargs, "tools": list(tools)})
        chat = options.tokens(self.tokenizer, processor=self.vision)
        chat.announce()
        if tools and not whole_text:
            chat.warn_of_tools("environment")
        self._chats[key] = chat
        if len(self._chats) > _CHATS_KEPT:
            self._chats.popitem(last=False)
        return chat
