"""The record of one episode, turn by turn, and its conversion to a TensorDict.

Nothing is decoded or re-encoded: the TensorDict holds exactly the tokens that the engine was given and
returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_mt.collectors.limits import StopReason
from torchrl_mt.collectors.prompt import Prompt
from torchrl_mt.collectors.statistics.call_times import CallTimes
from torchrl_mt.collectors.workflow_entries import join_entries
from torchrl_mt.data._store.steps import Column, Objects, Path, Rows, Steps, pack
from torchrl_mt.engines import Completion
from torchrl_mt.transforms.turn_tree import RowAssignment, assign_rows, find_parents
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.images import is_image
from torchrl_mt.vision.messages import is_image_part

__all__ = ["Episode", "Turn", "copied", "episodes_to_tensordict", "parent_of"]

_PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Default sampling parameters."""


def copied(value: Any) -> Any:
    """Copy nested dicts and lists; what they hold is shared.

    Examples:
        >>> item = {"messages": [{"role": "user", "content": "hi"}]}
        >>> copied(item)["messages"].append(None)
        >>> len(item["messages"])
        1
    """
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return [*map(copied, value)] if type(value) is list else value


@dataclass(slots=True)
class Turn:
    """One model call, and what the environment says to it."""

    prompt_ids: Sequence[int]
    """Every token that the model saw; a :class:`~torchrl_mt.collectors.prompt.Prompt` shares memory
    between turns."""
    completion: Completion
    """The sampled response."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """New messages of this turn: those before the response, the response, and in the episode's last
    turn those after it."""
    reward: float = 0.0
    """The environment's reward for the response."""
    info: Mapping[str, Any] | None = None
    """The environment's further information on the response."""
    model_seconds: float = 0.0
    """Seconds that the model took to answer."""
    env_seconds: float = 0.0
    """Seconds that the environment took to reply."""
    images: tuple[StoredImage, ...] = ()
    """All images of the prompt, in the order of their placeholders."""
    parent: int | None = field(default=None, init=False, compare=False)
    """Index of the longest earlier turn whose prompt and response this turn's prompt begins with, and
    whose images its own begin with, the later one of equals; -1 if there is none, ``None`` if no
    collector recorded the turn."""
    _oldest: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def oldest(self) -> int | None:
        """Oldest weight version of its sampled tokens; ``None`` if there are none."""
        if self._oldest is None:
            self._oldest = min(self.completion.versions, default=None)
        return self._oldest

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.completion.token_ids)

    def goes_on_from(self, before: Turn) -> bool:
        """Whether its prompt begins with the prompt and response of an earlier turn, images included."""
        if self.images[: len(before.images)] != before.images:
            return False
        answer = list(before.completion.token_ids)
        start = len(before.prompt_ids)
        end = start + len(answer)
        prompt = self.prompt_ids
        # The response first: it is short, and it is what differs between branches.
        if list(prompt[start:end]) != answer:
            return False
        if isinstance(prompt, Prompt):
            return prompt.starts_with(before.prompt_ids)
        return list(prompt[:start]) == list(before.prompt_ids)


@dataclass(slots=True)
class Episode:
    """A whole episode."""

    data: Any
    """The item that the environment was reset with."""
    group: int = -1
    """Id of the group of episodes that share the item."""
    traj_id: int = -1
    """Id of the episode."""
    turns: list[Turn] = field(default_factory=list)
    """Turns in order."""
    stop_reason: StopReason | None = None
    """Why it ended; ``None`` while it runs."""
    rank: int = 0
    """Index of the episode in its group."""
    group_number: int = 0
    """Number of the group in its run, from 0; seeds follow from it."""
    is_eval: bool = False
    """Whether it is played for evaluation."""
    entries: TensorDictBase | None = None
    """Entries that a workflow returned, ``[T]``, one step per turn."""
    judged: bool = False
    """Whether the environment has answered a response, or the workflow has returned a result."""
    valid: bool | None = None
    """Whether it counts in the loss and in statistics; ``None`` if every episode does."""
    shows_images: bool | None = None
    """Whether its turns may show images: if so, batches have ``("images", "new")``, if not, images are
    refused. ``None`` outside of a collector, where turns may and there is no such entry."""
    oldest_elsewhere: int | None = field(default=None, repr=False, compare=False)
    """Oldest weight version of its sampled tokens, as far as known, while it runs in another process."""
    calls: CallTimes = field(default_factory=CallTimes, repr=False, compare=False)
    """Running calls, and the seconds of past ones."""
    begun: float = field(default_factory=time.monotonic, repr=False, compare=False)
    """Start time, in seconds of the monotonic clock."""

    @property
    def task_id(self) -> Any:
        """The item's ``"task_id"`` if it has one, else the id of the group."""
        data = self.data
        if not (isinstance(data, Mapping) and "task_id" in data.keys()):  # noqa: SIM118  (TensorDict)
            return self.group
        found = data["task_id"]
        return found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_forks(self) -> int:
        """Number of training rows beyond the first."""
        return max(len(self.rows().first) - 1, 0)

    def age(self, version: int) -> int | None:
        """Age of its oldest token in weight versions; ``None`` if none was sampled."""
        found = [self.oldest_elsewhere, *(turn.oldest for turn in self.turns)]
        versions = [oldest for oldest in found if oldest is not None]
        # Tokens may be newer: workers load new weights before all have them and the version counts.
        return max(version - min(versions), 0) if versions else None

    def parents(self) -> list[int]:
        """Parent of each turn, see :attr:`Turn.parent`; found by comparison if one is unknown."""
        known = [turn.parent for turn in self.turns if turn.parent is not None]
        if len(known) == len(self.turns):
            return known
        if any(turn.images for turn in self.turns):
            return [parent_of(turn, self.turns[:k]) for k, turn in enumerate(self.turns)]
        answers = [turn.completion.token_ids for turn in self.turns]
        return find_parents(
            _prompts([turn.prompt_ids for turn in self.turns]),
            torch.tensor(list(chain.from_iterable(answers)), dtype=torch.int64, device="cpu"),
            [len(answer) for answer in answers],
            [0] * len(answers),
        )

    def rows(self) -> RowAssignment:
        """Training row of each turn."""
        return assign_rows(
            self.parents(),
            [len(turn.prompt_ids) for turn in self.turns],
            [len(turn.completion.token_ids) for turn in self.turns],
        )


def episodes_to_tensordict(episodes: Sequence[Episode]) -> TensorDict:
    """Convert finished episodes to one flat batch in TED.

    Args:
        episodes: at least one, each with at least one turn.

    Returns:
        A TensorDict of batch size ``[ΣT]``, one step per turn, with the keys of the documentation's
        *Data format* and the entries that workflows returned. ``"tokens"``, ``"log_probs"`` and
        ``"versions"`` are lazily stacked, since lengths differ: ``td.get(key, as_list=True)`` gives one
        tensor per turn. Prompts that extend each other are views of one tensor.

    Raises:
        ValueError: if the entries of workflows differ between episodes, or have a key that the
            collector writes itself.

    Examples:
        >>> turn = Turn([1, 2], Completion([3], [-0.5], [0], "stop"), messages=[])
        >>> td = episodes_to_tensordict([Episode(None, 0, 0, [turn], StopReason.DONE)])
        >>> td.get(("tokens", "prompt"), as_list=True)
        [tensor([1, 2])]
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    completions = [turn.completion for turn in turns]
    num_turns = torch.tensor([len(episode.turns) for episode in episodes], device="cpu")
    last = num_turns.cumsum(0) - 1
    size = len(turns)

    def per_turn(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), device="cpu").repeat_interleave(num_turns)

    def flags(ended: Iterable[bool]) -> torch.Tensor:
        out = torch.zeros(size, 1, dtype=torch.bool, device="cpu")
        out[last, 0] = torch.tensor(list(ended), device="cpu")
        return out

    items, lengths = _items(episodes), [len(episode.turns) for episode in episodes]
    parents = [episode.parents() for episode in episodes]
    reasons = [episode.stop_reason or StopReason.TRUNCATED for episode in episodes]
    stop_reason = [""] * size
    for position, reason in zip(last.tolist(), reasons, strict=True):
        stop_reason[position] = reason.value
    columns: dict[Path, Column] = {
        ("tokens", "prompt"): Rows(_prompts([turn.prompt_ids for turn in turns])),
        ("tokens", "response"): _split([answer.token_ids for answer in completions], torch.int64),
        ("log_probs", "response"): _split(
            [answer.log_probs for answer in completions], torch.float32
        ),
        ("versions", "response"): _split([answer.versions for answer in completions], torch.int64),
        ("next", "reward"): torch.tensor(
            [[turn.reward] for turn in turns], dtype=torch.float32, device="cpu"
        ),
        ("next", "done"): flags(True for _ in reasons),
        ("next", "terminated"): flags(not reason.truncated for reason in reasons),
        ("next", "truncated"): flags(reason.truncated for reason in reasons),
        ("collector", "traj_ids"): per_turn(episode.traj_id for episode in episodes),
        ("group",): per_turn(episode.group for episode in episodes),
        ("turn", "parent"): torch.tensor(list(chain.from_iterable(parents)), device="cpu"),
        ("seconds", "model"): torch.tensor([turn.model_seconds for turn in turns], device="cpu"),
        ("seconds", "env"): torch.tensor([turn.env_seconds for turn in turns], device="cpu"),
        ("text",): Objects([turn.messages for turn in turns]),
        ("info",): Objects([turn.info for turn in turns]),
    }
    for name, plain in _PLAIN.items():
        columns["sampling", name] = torch.tensor(
            [type(plain)(answer.sampling.get(name, plain)) for answer in completions], device="cpu"
        )
    columns["finish_reason",] = Objects([answer.finish_reason for answer in completions])
    columns["stop_reason",] = Objects(stop_reason)
    columns["data",] = Objects(
        [data for data, n in zip(items, lengths, strict=True) for _ in range(n)]
    )
    if any(episode.valid is not None for episode in episodes):
        columns["valid",] = per_turn(episode.valid is not False for episode in episodes)
    if any(episode.shows_images for episode in episodes):
        columns["images", "new"] = Objects(
            list(chain.from_iterable(map(_new_images, episodes, parents)))
        )
    batch: TensorDict = pack(Steps(size, columns), unread=True)
    entries = join_entries(
        [episode.entries for episode in episodes],
        [len(episode.turns) * (episode.valid is False) for episode in episodes],
    )
    return batch if entries is None else batch.update(entries)


def parent_of(turn: Turn, earlier: Sequence[Turn]) -> int:
    """Index of the longest earlier turn that a turn went on from, the later of equals; -1 for none."""
    places = sorted(range(len(earlier)), key=lambda k: earlier[k].length)
    return next((k for k in reversed(places) if turn.goes_on_from(earlier[k])), -1)


def _items(episodes: Sequence[Episode]) -> list[Any]:
    """The episodes' items; images in them as :class:`StoredImage`, so that each is kept once."""
    known: dict[int, Any] = {}
    for episode in episodes:
        if id(episode.data) not in known:
            data = episode.data
            known[id(data)] = _with_stored_images(data) if episode.shows_images else data
    return [known[id(episode.data)] for episode in episodes]


def _with_stored_images(value: Any) -> Any:
    """Plain data with its images as :class:`StoredImage`; itself if it has none."""
    if is_image(value):
        # Others are no pictures to look at: masks, depths, palettes.
        looks = getattr(value, "mode", "RGB") in ("L", "RGB", "RGBA")
        return StoredImage.of(value) if looks else value
    if type(value) is dict:
        found = {key: _with_stored_images(each) for key, each in value.items()}
        if is_image_part(value) and isinstance(value.get("image"), (np.ndarray, torch.Tensor)):
            found["image"] = StoredImage.of(value["image"])
        changed = any(found[key] is not each for key, each in value.items())
    elif type(value) in (list, tuple):
        found = type(value)(map(_with_stored_images, value))
        changed = any(new is not old for new, old in zip(found, value, strict=True))
    else:
        return value
    return found if changed else value


def _new_images(episode: Episode, parents: Sequence[int]) -> list[tuple[StoredImage, ...]]:
    """What each turn's prompt adds to the images of its parent's."""
    turns = episode.turns
    return [
        turn.images[len(turns[parent].images) :] if parent >= 0 else turn.images
        for turn, parent in zip(turns, parents, strict=True)
    ]


def _prompts(prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """One tensor per prompt; prompts of one conversation are views of one tensor."""
    longest: dict[int, Prompt] = {}
    for prompt in prompts:
        if isinstance(prompt, Prompt):
            known = longest.setdefault(id(prompt.line), prompt)
            if len(prompt) > len(known):
                longest[id(prompt.line)] = prompt
    lines = {
        key: torch.tensor(prompt[:], dtype=torch.int64, device="cpu")
        for key, prompt in longest.items()
    }
    return [
        lines[id(prompt.line)][: len(prompt)]
        if isinstance(prompt, Prompt)
        else torch.tensor(list(prompt), dtype=torch.int64, device="cpu")
        for prompt in prompts
    ]


def _split(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Rows:
    """One tensor per row, all views of one buffer."""
    flat = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype, device="cpu")
    return Rows(list(flat.split([len(row) for row in rows])))
