"""Rewards by functions of text, as TRL and verifiers have them.

A row's prompt is what comes before its first sampled token, its completion is the rest. Nothing that is
decoded here is trained on.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import is_non_tensor
from torch import Tensor

from torchrl_mt.objectives.functional.time.episodes import EpisodeIndex, index_episodes
from torchrl_mt.objectives.rewards.sources import Scores
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import read_entry, read_episode, read_objects
from torchrl_mt.vision.rows import RAW

__all__ = ["Decoder", "TextReward", "prompt_mask", "texts_of"]

DIALOGUE = "text"
"""Key of an episode's messages, as ``MergeTurns(carry=("text",))`` writes it."""
ITEMS = "data"
"""Key of the items, as ``MergeTurns(carry=("data",))`` writes it."""
_OURS = {field.default for field in fields(ExperienceKeys)} - {ExperienceKeys.label}
"""Entries of rows that are no columns of the items."""
_TEXTS = ("prompts", "completions")
_TOKENS = "completion_ids"


class Decoder(Protocol):
    """Tokenizer interface."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of tokens."""


class TextReward:
    """Reward source that calls a function of texts.

    The function is called once for all episodes, as ``fn(prompts=..., completions=...,
    completion_ids=..., messages=..., **columns)``; every argument is a list with one element per
    episode. It returns one number per episode, which is the reward of its last sampled token; or one
    list per episode with a number for each of its turns; or ``None`` for an episode to which it does
    not apply (:class:`~torchrl_mt.objectives.RewardMix`). It may be ``async``. Only what it has
    parameters for is passed; everything if it takes ``**kwargs``.

    - ``prompts``, ``completions``: the text of each episode's last row before its first sampled token,
      and the rest of the row, the environment's messages included. (An episode has several rows if its
      history was cut; the last one has what the model saw at the end.) If ``conversational``, lists of
      messages instead: those of the whole episode before the model's first response, and the rest.
    - ``completion_ids``: the token ids of the completions' texts, special tokens included.
    - ``messages``: the messages of the whole episode, if the rows have ``"text"``, as
      ``MergeTurns(carry=("text", ...))`` writes it; else ``None``.
    - ``images``: the images of each episode's last row, a tuple in the order of its text
      (:doc:`/images`).
    - ``columns``: other entries of the items that ``carry`` brought to the rows, such as ``reference``;
      all of them if it brought the items themselves, ``carry=("data", ...)``. Where an item lacks one,
      it is ``None``.

    Args:
        fn: The function.
        tokenizer: Decodes the rows.
        name: Its name in metrics and errors; that of the function by default.
        skip_special_tokens: Whether to leave special tokens out of the texts, the marks of roles and
            turns among them.
        conversational: Whether ``prompts`` and ``completions`` are messages, as TRL gives them if its
            data set is conversational. The rows must have ``"text"``.

    Raises:
        TypeError: If ``fn`` is not callable or ``tokenizer`` cannot decode.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> def is_right(completions):
        ...     return [float("seven" in said) for said in completions]
        >>> tokenizer = tiny_chat_tokenizer("seven eight")
        >>> tokens = torch.tensor(tokenizer(["<user> seven", "<user> eight"])["input_ids"])
        >>> masks = {"all_attention_mask": tokens >= 0, "all_assistant_mask": tokens > 3}
        >>> rows = TensorDict({"tokens": {"full": tokens}, "masks": masks}, [2])
        >>> rows["turns"], rows["episode"] = {"full": 0 * tokens}, torch.arange(2)
        >>> TextReward(is_right, tokenizer)(rows)
        tensor([[0., 1.],
                [0., 0.]])
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tokenizer: Decoder,
        *,
        name: str | None = None,
        skip_special_tokens: bool = True,
        conversational: bool = False,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a function of prompts and completions, got {fn!r}.")
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"tokenizer must have a method decode, got {tokenizer!r}.")
        self.fn = fn
        self.tokenizer = tokenizer
        self.name = name or getattr(fn, "__name__", None) or type(fn).__name__
        self.skip_special_tokens = skip_special_tokens
        self.conversational = conversational

    def __call__(self, rows: TensorDictBase) -> Scores | Awaitable[Scores]:
        """Call the function for the rows' episodes.

        Args:
            rows: Rows ``[n]`` with tokens, both masks, turns and episodes; all rows of each episode.

        Returns:
            ``[n, S]`` float32, or an awaitable of it if the function is ``async``. If it returned
            ``None``, a list instead, with ``None`` for the rows of these episodes.

        Raises:
            KeyError: If rows lack an entry, or a column that the function requires.
            TypeError, ValueError: If the function's result is of another form.
        """
        mask = read_entry(rows, ExperienceKeys.assistant_mask)
        turns = read_entry(rows, ExperienceKeys.turns)
        episodes = index_episodes(mask, turns, read_episode(rows))
        asked = rows[episodes.outcome_rows()]
        if not len(asked):
            return torch.zeros(mask.shape, device=mask.device)
        tokens = read_entry(asked, ExperienceKeys.action)
        attended = read_entry(asked, ExperienceKeys.attention_mask)
        before = prompt_mask(asked)
        after = attended & ~before
        texts: list[list[Any]]
        if self.conversational:
            texts = self._split_messages(
                asked, _turn_count(episodes, turns)[episodes.last_token >= 0]
            )
        else:
            texts = [
                texts_of(self.tokenizer, tokens, part, skip_special_tokens=self.skip_special_tokens)
                for part in (before, after)
            ]
        given = dict(zip(_TEXTS, texts, strict=True))
        given[_TOKENS] = _ids_of(tokens, after)
        answer = self.fn(**self._arguments(asked, given))
        if inspect.isawaitable(answer):
            return self._when_answered(answer, episodes, turns)
        return self._place(answer, episodes, turns)

    async def _when_answered(
        self, answer: Awaitable[Any], episodes: EpisodeIndex, turns: Tensor
    ) -> Scores:
        return self._place(await answer, episodes, turns)

    def _split_messages(self, rows: TensorDictBase, turns: Tensor) -> list[list[Any]]:
        """Each row's messages before its episode's first response, and the others.

        The model said one message in each of ``turns`` ``[n]``: the last ones of its role, since those
        of others come in the opening.
        """
        dialogues = read_objects(rows, DIALOGUE)
        if dialogues is None:
            raise KeyError(
                f"reward source {self.name!r} is conversational, but the rows lack the entry "
                f"{DIALOGUE!r}: bring the messages with MergeTurns(carry=({DIALOGUE!r}, ...))."
            )
        parts: list[list[Any]] = [[], []]
        for dialogue, count in zip(dialogues, turns.tolist(), strict=True):
            said = [i for i, each in enumerate(dialogue) if each["role"] == "assistant"]
            if len(said) < count:
                raise ValueError(
                    f"reward source {self.name!r} is conversational, but {DIALOGUE!r} must have a "
                    f"message of the assistant for each turn: got {len(said)} for {count} turns."
                )
            parts[0].append(dialogue[: said[-count]])
            parts[1].append(dialogue[said[-count] :])
        return parts

    def _arguments(
        self, rows: TensorDictBase, texts: Mapping[str, list[Any]]
    ) -> dict[str, list[Any] | None]:
        """The texts and columns that the function has parameters for."""
        columns: dict[str, list[Any] | None] = {
            key: read_objects(rows, key)
            for key, value in rows.items()
            if key not in _OURS and (is_non_tensor(value) or not is_tensor_collection(value))
        }
        dialogue = columns.pop(DIALOGUE, None)
        items = [each if isinstance(each, Mapping) else {} for each in columns.get(ITEMS) or ()]
        for key in set().union(*items):
            columns.setdefault(key, [item.get(key) for item in items])
        if clash := columns.keys() & texts.keys():
            raise ValueError(
                f"reward source {self.name!r}: {sorted(clash)} are its texts, but the rows carry "
                "columns of these names: rename them."
            )
        images = read_objects(rows, RAW)
        if images is not None:
            columns["images"] = images
        if dialogue is not None or "messages" not in columns:
            columns["messages"] = dialogue
        columns |= texts
        parameters = _parameters(self.fn)
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return columns
        missing = [
            name
            for name, each in parameters.items()
            if each.default is each.empty and name not in columns
        ]
        if missing:
            raise KeyError(
                f"reward source {self.name!r} has the parameters {missing}, but gets "
                f"{sorted(columns)}: bring columns of the items with MergeTurns(carry=(...)), all of "
                f"them with carry=({ITEMS!r},), or give the parameters defaults."
            )
        return {name: value for name, value in columns.items() if name in parameters}

    def _place(self, answer: Any, episodes: EpisodeIndex, turns: Tensor) -> Scores:
        """Put the function's rewards on the tokens of the rows, as :meth:`__call__` returns them."""
        asked = (episodes.last_token >= 0).nonzero().squeeze(-1).tolist()
        what = f"reward source {self.name!r} must return"
        answer = _plain(answer)
        if not isinstance(answer, Sequence) or isinstance(answer, (str, Mapping)):
            raise TypeError(
                f"{what} a list of numbers, one per episode, got {type(answer).__name__} "
                f"({str(answer)[:80]})."
            )
        if len(answer) != len(asked):
            raise ValueError(
                f"{what} one number (or one list) for each of the {len(asked)} episodes, got "
                f"{len(answer)}."
            )
        ends = _turn_ends(episodes, turns)
        out = torch.zeros(turns.numel(), dtype=torch.float64, device="cpu")
        skipped = {episode for episode, given in zip(asked, answer, strict=True) if given is None}
        for place, (episode, given) in enumerate(zip(asked, answer, strict=True)):
            if given is None:
                continue
            given, at = _plain(given), ends[episode]
            if not isinstance(given, Sequence) or isinstance(given, str):
                given, at = [given], [int(episodes.last_token[episode])]
            if len(given) != len(at):
                raise ValueError(
                    f"{what} a number for each turn of an episode, got {len(given)} for episode {place} "
                    f"of the given ones, which has {len(at)} turns."
                )
            for position, reward in zip(at, given, strict=True):
                number = _plain(reward)
                if not isinstance(number, Real):
                    raise TypeError(
                        f"{what} numbers, got {reward!r} for episode {place} of the given ones."
                    )
                out[position] += float(number)
        out = out.float().view(turns.shape)
        if skipped:
            rows = zip(episodes.of_row.tolist(), out.tolist(), strict=True)
            return [None if episode in skipped else row for episode, row in rows]
        return out.to(turns.device)


def texts_of(
    tokenizer: Decoder, tokens: Tensor, mask: Tensor, *, skip_special_tokens: bool
) -> list[str]:
    """Decode each row's tokens under a mask.

    Args:
        tokenizer: Decodes.
        tokens: ``[N, S]`` int64.
        mask: ``[N, S]`` bool.
        skip_special_tokens: Whether to leave special tokens out.
    """
    return [
        tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        for ids in _ids_of(tokens, mask)
    ]


def _ids_of(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """Each row's token ids under a mask, both ``[N, S]``; copied to the CPU at once."""
    return [row[kept].tolist() for row, kept in zip(tokens.cpu(), mask.cpu(), strict=True)]


def prompt_mask(rows: TensorDictBase) -> Tensor:
    """Which tokens come before the first sampled one of their row: ``[N, S]`` bool."""
    sampled = read_entry(rows, ExperienceKeys.assistant_mask)
    return read_entry(rows, ExperienceKeys.attention_mask) & (sampled.cumsum(-1) == 0)


def _plain(value: Any) -> Any:
    """A tensor or an array as lists and numbers; anything else as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters by name; ``**kwargs`` if it cannot be inspected."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):  # Such as functions that are written in C.
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _turn_count(episodes: EpisodeIndex, turns: Tensor) -> Tensor:
    """Number of each episode's turns, ``[E]``."""
    zeros = turns.new_zeros(len(episodes.last_token))
    return zeros.scatter_reduce(0, episodes.of_row, turns.amax(-1) + 1, "amax")


def _turn_ends(episodes: EpisodeIndex, turns: Tensor) -> list[list[int]]:
    """Index in the flattened rows of the token that gets each turn's reward, by episode.

    It is the turn's last sampled token. If the turn sampled nothing, it is the last one before it, or
    else the first one of the episode.
    """
    width = int(turns.max()) + 1
    count = _turn_count(episodes, turns)
    sampled = turns.flatten()[episodes.token]
    table = turns.new_full((len(count) * width,), -1)
    table = table.scatter_reduce(0, episodes.of_token * width + sampled, episodes.token, "amax")
    numbers = torch.arange(len(count), device=count.device)
    first = torch.searchsorted(episodes.of_token, numbers).clamp(max=len(sampled) - 1)
    ends = []
    for line, number, begin in zip(
        table.view(-1, width).tolist(), count.tolist(), episodes.token[first].tolist(), strict=True
    ):
        for turn in range(number):
            if line[turn] < 0:
                line[turn] = line[turn - 1] if turn else begin
        ends.append(line[:number])
    return ends
