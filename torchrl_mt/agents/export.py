"""An episode's calls as a tree of interactions, with rewards that flow back along branches only.

An interaction is one model call or, in the style ``"concat"``, one branch from its first call to its
last. Its tensors follow AReaL's conventions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import is_non_tensor
from torch import Tensor

from torchrl_mt.checks import check_choice, check_unit_interval
from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.engines import Completion
from torchrl_mt.transforms.episode_entries import images_of_prompts
from torchrl_mt.transforms.turn_tree import find_parents
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.rows import NEW

if TYPE_CHECKING:
    from torchrl_mt.agents.session import Session

__all__ = ["Interaction", "export_interactions"]

Style = Literal["individual", "concat"]
"""One interaction for each call, or for each branch."""
_SAMPLED = ("tokens", "log_probs", "versions")
"""What a TED TensorDict has of each response."""


@dataclass(frozen=True)
class Interaction:
    """A model call, or a branch of calls that ends with it."""

    id: str
    """Id of the completion; the call's number in the episode if it has none."""
    parent_id: str | None
    """Id of the call whose tokens this call's prompt goes on from; ``None`` if there is none."""
    messages: Sequence[Mapping[str, Any]]
    """Messages that the model saw, as far as they are known: those of the request, or those that the
    turns of the branch recorded."""
    answer: Mapping[str, Any] | None
    """The message that the model answered with; ``None`` if it is unknown."""
    prompt_ids: Sequence[int]
    """Every token that the model saw."""
    response_ids: Sequence[int]
    """The tokens that it sampled."""
    log_probs: Sequence[float]
    """The log-probability of each sampled token."""
    versions: Sequence[int]
    """The weight version of each sampled token."""
    reward: float
    """See :func:`export_interactions`."""
    images: tuple[StoredImage, ...] = ()
    """All images of the prompt, in order."""
    branch: tuple[Interaction, ...] = ()
    """Earlier calls of the branch, whose sampled tokens count as sampled, too; none in the style
    ``"individual"``."""

    def to_tensor_dict(self) -> dict[str, Tensor]:
        """Convert to a row in AReaL's layout: prompt and response, and what of them was sampled.

        Returns:
            ``"input_ids"`` (int64), ``"loss_mask"`` (int64), ``"logprobs"`` (float32, 0 where not
            sampled), ``"versions"`` (int64, -1 where not sampled) and ``"attention_mask"`` (bool), all
            ``[1, T]`` without padding, and ``"rewards"`` (float32), ``[1]``. A workflow may return it.
        """
        tokens = [*self.prompt_ids, *self.response_ids]
        mask, log_probs, versions = [0] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens)
        for call in (*self.branch, self):
            start, size = len(call.prompt_ids), len(call.response_ids)
            mask[start : start + size] = [1] * size
            log_probs[start : start + size] = call.log_probs
            versions[start : start + size] = call.versions
        return {
            "input_ids": torch.tensor([tokens], dtype=torch.int64, device="cpu"),
            "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool, device="cpu"),
            "loss_mask": torch.tensor([mask], dtype=torch.int64, device="cpu"),
            "logprobs": torch.tensor([log_probs], dtype=torch.float32, device="cpu"),
            "versions": torch.tensor([versions], dtype=torch.int64, device="cpu"),
            "rewards": torch.tensor([self.reward], dtype=torch.float32, device="cpu"),
        }


def export_interactions(
    session_or_episode: Session | Episode | TensorDictBase,
    style: Style = "individual",
    discount: float = 1.0,
) -> dict[str, Interaction]:
    """Export the model calls of an episode.

    A call's parent is the longest earlier call whose prompt and response its prompt begins with
    (``Turn.parent``). A branch leads from a call without a parent to a leaf, a call that is no other's
    parent.

    - ``"individual"``: one interaction per call. Its reward is the call's return: its own reward, plus
      ``discount`` times the sum of the returns of all calls whose parent it is. Nothing flows from one
      branch into another: not from a later sub-agent, and not from an attempt that began anew. At
      discount 1, the returns of the calls without a parent add up to the reward of the episode.
    - ``"concat"``: one interaction per leaf, whose row has the sampled tokens of the whole branch. Its
      reward is the undiscounted sum of the rewards of the branch's calls, since the row is one
      sequence. What two leaves share is in both rows, tokens and rewards; to train it once, use
      :class:`~torchrl_mt.transforms.MergeTurns`.

    Args:
        session_or_episode: a :class:`~torchrl_mt.agents.Session`, an
            :class:`~torchrl_mt.collectors.Episode`, or the TED TensorDict of one episode, ``[T]``.
        style: ``"individual"`` or ``"concat"``.
        discount: discount per call in [0, 1], for ``"individual"``.

    Returns:
        The interactions by id, in order of their calls.

    Raises:
        ValueError: if the style is unknown, the discount out of range, or a TensorDict has more than one
            episode.
        KeyError: if a TensorDict lacks tokens, log-probabilities, versions or rewards.
        TypeError: if ``session_or_episode`` is none of the above.

    Examples:
        >>> def turn(prompt, token, reward=0.0):
        ...     return Turn(prompt, Completion([token], [-0.5], [0], "stop"), reward=reward)
        >>> episode = Episode(None, turns=[turn([1], 2), turn([1, 2, 3], 4, reward=1.0)])
        >>> [call.reward for call in export_interactions(episode, discount=0.9).values()]
        [0.9, 1.0]
        >>> branches = export_interactions(episode, style="concat")
        >>> branches["1"].to_tensor_dict()["loss_mask"]
        tensor([[0, 1, 0, 1]])
    """
    check_choice("style", style, get_args(Style))
    check_unit_interval("discount", discount)
    turns, ids, requests = _read(session_or_episode)
    parents = Episode(None, turns=turns).parents()
    returns = [turn.reward for turn in turns]
    for k in reversed(range(len(turns))):  # children come after their parents
        if parents[k] >= 0:
            returns[parents[k]] += discount * returns[k]
    calls: list[Interaction] = []
    for k, (turn, parent) in enumerate(zip(turns, parents, strict=True)):
        before = calls[parent] if parent >= 0 else None
        messages, answer = requests.get(k) or _dialogue(turn, before)
        calls.append(
            Interaction(
                id=ids[k],
                parent_id=None if before is None else before.id,
                messages=messages,
                answer=answer,
                prompt_ids=turn.prompt_ids,
                response_ids=turn.completion.token_ids,
                log_probs=turn.completion.log_probs,
                versions=turn.completion.versions,
                reward=returns[k],
                images=turn.images,
            )
        )
    if style == "individual":
        return {call.id: call for call in calls}
    branches = {}
    for leaf in sorted(set(range(len(turns))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        reward = sum(turns[k].reward for k in path)
        earlier = tuple(calls[k] for k in reversed(path[1:]))
        branches[ids[leaf]] = replace(calls[leaf], reward=reward, branch=earlier)
    return branches


_Said = tuple[list[Mapping[str, Any]], Mapping[str, Any] | None]
"""Messages of a call, and the answer."""


def _read(
    source: Session | Episode | TensorDictBase,
) -> tuple[list[Turn], list[str], dict[int, _Said]]:
    """The turns, their ids, and what the requests and responses of some of them say."""
    if isinstance(source, (Episode, TensorDictBase)):
        turns = _turns_of(source) if isinstance(source, TensorDictBase) else list(source.turns)
        ids = [str((turn.info or {}).get("completion_id", "")) for turn in turns]
        return turns, _unique(ids), {}
    if not hasattr(source, "completion_ids"):
        raise TypeError(
            "session_or_episode must be a Session, an Episode or the TensorDict of an episode, got "
            f"{type(source).__name__}."
        )
    turns, ids = source.turns(), source.completion_ids
    bodies = {entry["response"].get("id"): entry for entry in source.transcript}
    choices: Counter[str] = Counter()  # A request may ask for several.
    requests = {}
    for k, id_ in enumerate(ids):
        if id_ and id_ in bodies:
            choice = bodies[id_]["response"]["choices"][choices[id_]]
            answer = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
            requests[k] = list(bodies[id_]["request"].get("messages") or []), answer
            choices[id_] += 1
    return turns, _unique(ids), requests


def _unique(ids: Sequence[str]) -> list[str]:
    """Ids that differ: a call's number if it has none, and the place among the calls that share one.

    Examples:
        >>> _unique(["a", "", "a"])
        ['a', '1', 'a/1']
    """
    seen: Counter[str] = Counter()
    out = []
    for k, id_ in enumerate(ids):
        out.append((f"{id_}/{seen[id_]}" if seen[id_] else id_) if id_ else str(k))
        seen[id_] += 1
    return out


def _dialogue(turn: Turn, before: Interaction | None) -> _Said:
    """Messages and answer from what the turn recorded, after those of its parent."""
    said = [*before.messages] if before is not None else []
    if before is not None and before.answer is not None:
        said.append(before.answer)
    new = turn.messages
    # An episode's last turn also has the environment's messages after the answer.
    roles = [message.get("role") for message in new]
    if "assistant" not in roles:
        return [*said, *new], None
    at = len(roles) - 1 - roles[::-1].index("assistant")
    return [*said, *new[:at]], new[at]


def _turns_of(ted: TensorDictBase) -> list[Turn]:
    """The turns of one episode in TED."""
    if ted.batch_dims != 1 or not len(ted):
        raise ValueError(
            f"session_or_episode must be one episode of batch size [T], got {[*ted.batch_size]}."
        )
    ids = ted.get(("collector", "traj_ids"), None)
    done = ted.get(("next", "done"), None)
    if (ids is not None and len(ids.unique()) > 1) or (done is not None and bool(done[:-1].any())):
        raise ValueError(
            "session_or_episode must be one episode, got a TensorDict with several: export them one by "
            "one."
        )
    steps = ted.unbind(0)
    prompts = [step["tokens", "prompt"] for step in steps]
    sampled = [[step[name, "response"] for name in _SAMPLED] for step in steps]
    claimed = ted.get(("turn", "parent"), None)
    claims = None if claimed is None else claimed.flatten().tolist()
    parents = find_parents(
        prompts,
        torch.cat([response for response, *_ in sampled]),
        [len(response) for response, *_ in sampled],
        [0] * len(steps),
        claims,
        images=ted.get(NEW, None) is not None,
    )
    images = images_of_prompts(ted, parents, claims) or [()] * len(steps)
    turns = []
    for step, prompt, columns, parent, shown in zip(
        steps, prompts, sampled, parents, images, strict=True
    ):
        tokens, log_probs, versions = (column.tolist() for column in columns)
        turn = Turn(
            prompt.tolist(),
            Completion(tokens, log_probs, versions, "stop"),
            messages=list(_object(step, "text") or []),
            reward=float(step["next", "reward"].sum()),
            info=_object(step, "info"),
            images=shown,
        )
        turn.parent = parent
        turns.append(turn)
    return turns


def _object(step: TensorDictBase, key: str) -> Any:
    """The Python object of a non-tensor entry; ``None`` without it."""
    value = step.get(key, None)
    return value.data if is_non_tensor(value) else None
