"""Play one episode within its limits.

However it ends, the episode holds complete turns only. A timeout never becomes a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

from torchrl_mt.chat.assistant_messages import name_tool_results
from torchrl_mt.chat.tokens import Answer
from torchrl_mt.checks import as_number, is_finite, shown
from torchrl_mt.collectors import context
from torchrl_mt.collectors.episode import Episode, copied
from torchrl_mt.collectors.event_loop.background_tasks import BackgroundTasks
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.playing.dialogue import Dialogue
from torchrl_mt.collectors.playing.env_factory import MakePlayer, Player, is_workflow
from torchrl_mt.collectors.recorder import LIMIT_CODE, LimitReached, Recorder
from torchrl_mt.collectors.workflow import Rejected, enter_result, misuse
from torchrl_mt.engines import Engine
from torchrl_mt.envs import Message, TextEnv, TextStep, ToolEnv
from torchrl_mt.envs.text_env import call_env, takes_message
from torchrl_mt.threads import call_in_thread, close_env, within
from torchrl_mt.vision import VisionProcessor
from torchrl_mt.vision.messages import is_image_part, with_stored_images

__all__ = ["PlayAgent", "play_chat", "play_episode"]

BeginDialogue: TypeAlias = Callable[[Sequence[Message], TextEnv], Dialogue]
"""Begins a dialogue, given its opening and its environment, after ``reset``."""

PlayAgent: TypeAlias = Callable[[Any, Recorder], Awaitable[Any]]


async def play_episode(
    make_player: MakePlayer,
    engine: Engine,
    begin_dialogue: BeginDialogue,
    limits: Limits,
    episode: Episode,
    sampling: Mapping[str, Any] | None = None,
    play_agent: PlayAgent | None = None,
    vision: VisionProcessor | None = None,
) -> None:
    """Play the item ``episode.data`` and write every turn into ``episode``.

    Args:
        make_player: makes the environment, workflow or agent of the episode.
        engine: samples the responses.
        begin_dialogue: begins the dialogue of an environment, given the first messages and it.
        limits: limits of the episode.
        episode: the episode to fill; it has no turns yet.
        sampling: arguments for the engine's ``generate``.
        play_agent: plays an agent, if the player is one, and returns its result as a workflow would.
        vision: the processor of a model that takes images.

    Raises:
        Rejected: if the workflow declines, a limit is reached before the first turn, a prompt is too
            long, or time runs out (unless ``limits.on_timeout`` is ``"mask"`` and there is a turn).
        ValueError: if the opening leaves no room for a response, a workflow's result does not fit the
            turns, or a reward is not finite.
        TypeError: if the player is of a wrong type or returns one.
    """
    recorder = Recorder(engine, episode, limits, sampling)
    episode.valid = True if limits.on_timeout == "mask" else None
    context.current.set(
        context.EpisodeContext(
            task_id=episode.task_id,
            group=episode.group,
            is_eval=episode.is_eval,
            version=engine.version,
            sample_idx=episode.rank,
            traj_id=episode.traj_id,
        )
    )
    try:
        await within(
            _play(make_player, recorder, begin_dialogue, play_agent, vision),
            limits.episode_timeout,
            LimitReached(StopReason.EPISODE_TIMEOUT),
            time_is_up=recorder.close,
        )
    except LimitReached as limit:
        masked = limit.reason.of_time and limits.on_timeout == "mask"
        if not episode.turns or (limit.reason.of_time and not masked):
            raise Rejected(limit.reason.value) from None
        episode.stop_reason = limit.reason
        if masked:
            episode.valid = False
    finally:
        recorder.close()


async def _play(
    make_player: MakePlayer,
    recorder: Recorder,
    begin_dialogue: BeginDialogue,
    play_agent: PlayAgent | None,
    vision: VisionProcessor | None,
) -> None:
    """Make the player, and play the episode with it."""
    episode = recorder.episode
    with episode.calls.call("environment", "the making of its environment"):
        player = await _make(make_player)
    if not isinstance(player, TextEnv):
        name = type(player).__name__
        if is_workflow(player):
            result = player.arun_episode(recorder, copied(episode.data))
            what = f"{name}.arun_episode"
        else:
            assert play_agent is not None
            result, what = play_agent(player, recorder), f"{name}.run"
        await _play_workflow(result, what, recorder)
        return
    try:
        await play_chat(player, recorder, begin_dialogue, vision)
    finally:
        _close(player)


async def _play_workflow(play: Awaitable[Any], what: str, recorder: Recorder) -> None:
    """Let a workflow or an agent play the episode with the recorder as its engine."""
    episode = recorder.episode
    escaped = result = None
    try:
        with episode.calls.call("environment", what):
            result = await play
    except LimitReached as limit:
        escaped = limit
    except Exception as error:
        if recorder.reached is None or getattr(error, "code", None) != LIMIT_CODE:
            raise
        escaped = LimitReached(recorder.reached)
    # A workflow may swallow the error, but a timeout must not become a reward.
    reached = StopReason.EPISODE_TIMEOUT if recorder.closed else recorder.reached
    if reached is not None and reached.of_time:
        raise LimitReached(reached)
    if escaped is not None:
        raise escaped
    enter_result(episode, result, recorder.version)
    episode.judged = True
    episode.stop_reason = reached or StopReason.DONE


async def play_chat(
    env: TextEnv,
    recorder: Recorder,
    begin_dialogue: BeginDialogue,
    vision: VisionProcessor | None = None,
) -> None:
    """Play the episode in an environment of its own, with the recorder as the engine."""
    episode, limits = recorder.episode, recorder.limits
    answered = True
    try:
        with episode.calls.call("environment", f"{type(env).__name__}.reset"):
            opening = await within(
                call_env(env, env.reset, copied(episode.data)),
                limits.tool_timeout,
                LimitReached(StopReason.TOOL_TIMEOUT),
            )
        new = await _messages(opening, "TextEnv.reset must return", env, "reset", vision)
        dialogue = begin_dialogue(new, env)
        prompt: Sequence[int] = dialogue.opening
        if limits.response_budget(len(prompt))[0] == 0:
            raise ValueError(
                f"max_episode_tokens={limits.max_episode_tokens} (or what the engine holds) must leave "
                f"room for a response, but the opening has {len(prompt)} tokens: raise the limit or "
                "shorten the prompt."
            )
        while True:
            begin = time.perf_counter()
            _, reached = limits.response_budget(len(prompt))
            try:
                answer = await recorder.generate(prompt, images=dialogue.images)
            except LimitReached:
                if episode.turns:  # Keep the messages that the model did not get to see.
                    episode.turns[-1].messages.extend(new)
                raise
            turn = episode.turns[-1]
            said = dialogue.read(answer, prompt)
            turn.messages = [*new, said.message]
            may_continue = limits.on_cut == "continue" and reached is StopReason.MAX_RESPONSE_TOKENS
            if answer.finish_reason == "length" and not may_continue:
                episode.stop_reason = reached
                return
            answered = False
            with episode.calls.call("environment", f"{type(env).__name__}.step"):
                step = await _answer(env, said, limits, time.perf_counter() - begin)
            turn.reward, turn.info = _reward(step, env), step.info
            turn.env_seconds = time.perf_counter() - begin - turn.model_seconds
            new = await _messages(step.messages, "TextStep.messages must be", env, "step", vision)
            new = name_tool_results(said.message, new)
            if not (new or step.done or step.history):
                raise misuse(
                    ValueError(
                        "TextStep must have messages, or done=True, got neither from "
                        f"{type(env).__name__}.step: there is nothing to go on with."
                    )
                )
            episode.judged = True
            if recorder.closed:  # The environment ignored the cancellation of the episode.
                raise LimitReached(StopReason.EPISODE_TIMEOUT)
            answered = True
            if step.done:
                episode.stop_reason = StopReason.TRUNCATED if step.truncated else StopReason.DONE
            elif len(episode.turns) == limits.max_turns:
                episode.stop_reason = StopReason.MAX_TURNS
            if episode.stop_reason is not None:
                turn.messages.extend(new)
                return
            history = step.history
            if history is not None:
                history = await _messages(history, "TextStep.history must be", env, "step", vision)
            goes_on, ids = dialogue.follow(new, len(prompt), history)
            prompt = recorder.continued(ids) if goes_on else ids
    finally:
        if not answered:
            recorder.drop_last()


async def _make(make_player: MakePlayer) -> Player:
    """Make a player, in a thread if it takes time."""
    if make_player.at_once:
        return make_player()
    return await call_in_thread(make_player, unclaimed=_close_unused)


def _close_unused(player: Player) -> None:
    """Close an environment that was made too late. Runs in a thread."""
    if isinstance(player, TextEnv):
        close_env(player)


def _close(env: TextEnv) -> None:
    if type(env).close is not TextEnv.close:
        background = BackgroundTasks.of(asyncio.get_running_loop())
        background.start(call_env(env, env.close), f"closing {type(env).__name__}")


async def _answer(env: TextEnv, said: Answer, limits: Limits, used: float) -> TextStep:
    """Ask the environment for its reply, within ``tool_timeout`` and the rest of ``turn_timeout``."""
    seconds, reason = limits.tool_timeout, StopReason.TOOL_TIMEOUT
    if limits.turn_timeout is not None:
        left = max(limits.turn_timeout - used, 0.0)
        if seconds is None or left < seconds:
            seconds, reason = left, StopReason.TURN_TIMEOUT
    response = said.text if env.whole_text else said.message["content"]
    # A copy: what the environment does with it must not change the dialogue.
    args = (response, deepcopy(said.message)) if takes_message(env.step) else (response,)
    step = await within(call_env(env, env.step, *args), seconds, LimitReached(reason))
    if not isinstance(step, TextStep):
        raise misuse(
            TypeError(
                f"TextEnv.step must return a TextStep, got {shown(step)} from "
                f"{type(env).__name__}.step: return torchrl_mt.envs.TextStep(messages, reward=..., "
                "done=...)."
            )
        )
    return step


async def _messages(
    value: Any, what: str, env: TextEnv, method: str, vision: VisionProcessor | None
) -> list[Message]:
    """Check and list the messages that an environment's method returned; ``what`` begins the error.

    Images are kept as :class:`~torchrl_mt.vision.StoredImage`, and ``vision`` has seen their sizes.
    """
    expected = f"{what} a list of messages such as {{'role': 'user', 'content': '...'}}, got"
    source = f"from {type(env).__name__}.{method}"
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise misuse(TypeError(f"{expected} {shown(value)} {source}."))
    messages = [*map(copied, value)]  # the environment may change its own later
    has_images = False
    for message in messages:
        if not isinstance(message, Mapping):
            raise misuse(TypeError(f"{expected} {shown(message)} among them, {source}."))
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise misuse(TypeError(f"{expected} one without content ({message!r:.80}) {source}."))
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        for part in parts:
            is_image = is_image_part(part)
            if is_image and vision is not None:
                has_images = True
            elif is_image or (isinstance(part, Mapping) and "text" not in part):
                # A template would write a placeholder for it, or nothing.
                may = "text or images" if vision else "text, since the model gets tokens alone"
                advice = ""
                if is_image:
                    advice = (
                        "give MultiTurnCollector(..., processor=...) for a model with images, or "
                    )
                raise ValueError(
                    f"messages must be {may}, got a part of type {part.get('type')!r} {source}: "
                    f"{advice}describe it in text."
                )
    if not has_images:
        return messages
    try:  # In a thread, since images may be large.
        return await call_in_thread(with_stored_images, messages, vision)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (It came {source}.)") from error


def _reward(step: TextStep, env: TextEnv) -> float:
    """The step's reward as a finite float."""
    source = "the reward function" if isinstance(env, ToolEnv) else f"{type(env).__name__}.step"
    try:
        if isinstance(step.reward, str):  # Of which float() would make a number.
            raise TypeError
        reward = as_number(step.reward)
    except (TypeError, ValueError, RuntimeError):
        raise misuse(
            TypeError(f"TextStep.reward must be a number, got {shown(step.reward)} from {source}.")
        ) from None
    if not is_finite(reward):
        raise ValueError(
            f"TextStep.reward must be finite, as float32, got {reward} from {source}: "
            "raise an error where a response cannot be judged."
        )
    return reward
