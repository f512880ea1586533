"""A workflow's result as AReaL's dict of padded sequences, read as the turns of an episode.

Every run of sampled tokens becomes a turn, and nothing else does: merged into rows, the turns are the
sequences again, without padding and without the tokens after the last sampled one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.checks import LOG_PROB_ROUNDING, is_finite
from torchrl_mt.collectors import Prompt, Turn
from torchrl_mt.engines import Completion

__all__ = ["read_result"]

_REQUIRED = ("input_ids", "attention_mask", "rewards")
_OPTIONAL = ("loss_mask", "logprobs", "versions")
_INTEGER = (
    "integers",
    lambda x: not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool),
)
_REAL = "real numbers", lambda x: not x.is_complex()
_KINDS: Mapping[str, tuple[str, Callable[[Tensor], bool]]] = {
    "input_ids": _INTEGER,
    "versions": _INTEGER,
    "logprobs": ("floating numbers", lambda x: x.is_floating_point()),
}


def read_result(
    result: Mapping[str, Any] | TensorDictBase, recorded: Sequence[Turn], version: int
) -> list[Turn] | None:
    """Read AReaL's dict of ``B`` sequences, padded to ``T`` tokens, as turns.

    Tokens that are not attended to are padding, wherever they are. Of the others, each longest run of
    sampled tokens is a turn: the run is its response, all tokens before it are its prompt, and the run
    before it in the sequence is its parent. A sequence's first token is never sampled, since nothing
    predicts it. Tokens after the last sampled one are left out, since nothing is predicted from them.

    Args:
        result: tensors under these keys; an optional one may be missing or ``None``.

            - ``"input_ids"``: ``[B, T]`` integers.
            - ``"attention_mask"``: ``[B, T]``, 0 or 1 (or bool).
            - ``"rewards"``: ``[B]``, the reward of each sequence, which its last turn gets; or
              ``[B, T]``, of each token, which goes to the token's turn. The reward of a token that was
              not sampled goes to the last turn before it, or else to the sequence's first turn.
            - ``"loss_mask"`` (optional): ``[B, T]``, 1 where sampled. Without it, and with
              ``"logprobs"``, every token but the first was sampled.
            - ``"logprobs"`` (optional): ``[B, T]`` floating, of the token at the same place. NaN
              without it.
            - ``"versions"`` (optional): ``[B, T]`` integers, the weights that sampled each token.

            Of ``"loss_mask"``, values on padding are not read; of ``"logprobs"`` and ``"versions"``,
            values on tokens that were not sampled.
        recorded: turns that the engine recorded; a turn that is one of them keeps its sampling
            parameters, messages and times. Other turns have the sampling parameters of all of them; if
            these differ, the temperature is NaN, which :class:`~torchrl_mt.objectives.ExperienceMaker`
            refuses.
        version: weight version of tokens without one.

    Returns:
        The turns, one sequence after the other, with parents and rewards; ``None`` for a result that is
        not AReaL's: without ``"input_ids"``, or TED.

    Raises:
        ValueError: if a key is missing or unknown, a shape does not fit, a value is out of range, or
            nothing was sampled in a sequence, or prompts have images and a turn is none of those
            recorded.
        TypeError: if a value is no tensor or has a wrong dtype.

    Examples:
        >>> result = {
        ...     "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
        ...     "attention_mask": torch.ones(1, 5),
        ...     "loss_mask": torch.tensor([[0, 1, 1, 0, 1]]),
        ...     "logprobs": torch.tensor([[0.0, -1.0, -2.0, 0.0, -3.0]]),
        ...     "rewards": torch.tensor([1.0]),
        ... }
        >>> for turn in read_result(result, [], version=4):
        ...     answer = turn.completion
        ...     print(list(turn.prompt_ids), answer.token_ids, answer.log_probs, turn.reward)
        [5] [6, 7] [-1.0, -2.0] 0.0
        [5, 6, 7, 8] [9] [-3.0] 1.0
    """
    keys = result.keys()
    # A TED TensorDict may have tokens of its own.
    if "input_ids" not in keys or (isinstance(result, TensorDictBase) and "next" in keys):
        return None
    columns = _checked(result)
    attended = _as_mask("attention_mask", columns["attention_mask"])
    sampled = _sampled_tokens(columns, attended)
    _check_values(columns, attended, sampled)
    engine = _Recorded(recorded)
    turns: list[Turn] = []
    for row in range(len(attended)):
        places = attended[row].nonzero().flatten()
        tokens = columns["input_ids"][row, places].tolist()
        runs = _runs(sampled[row, places].tolist())
        starts = places[[start for start, _ in runs]]
        rewards = _turn_rewards(columns["rewards"][row], starts)
        for k, ((start, end), reward) in enumerate(zip(runs, rewards, strict=True)):
            if not is_finite(reward):
                raise _wrong("rewards", "be finite, as float32", f"{reward} in row {row}")
            size, where = end - start, places[start:end]
            log_probs, versions = [math.nan] * size, [version] * size
            if "logprobs" in columns:
                log_probs = columns["logprobs"][row, where].tolist()
            if "versions" in columns:
                versions = columns["versions"][row, where].tolist()
            turn = engine.turn(Prompt(tokens, start), tokens[start:end], log_probs, versions)
            turn.reward, turn.parent = reward, len(turns) - 1 if k else -1
            turns.append(turn)
    return turns


class _Recorded:
    """The turns that the engine recorded, for what a result does not tell."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = {
            (len(turn.prompt_ids), tuple(turn.completion.token_ids)): turn for turn in turns
        }
        self._has_images = any(turn.images for turn in turns)
        ways = [dict(turn.completion.sampling) for turn in turns]
        same = all(way == ways[0] for way in ways)
        self._sampling = (ways[0] if same else {"temperature": math.nan}) if ways else {}

    def turn(
        self, prompt: Prompt, tokens: list[int], log_probs: list[float], versions: list[int]
    ) -> Turn:
        """Make a turn with what is known of the call that sampled it."""
        call = self._turns.get((len(prompt), tuple(tokens)))
        if call is not None and call.prompt_ids == prompt:
            own = replace(call.completion, log_probs=log_probs, versions=versions)
            return replace(call, prompt_ids=prompt, completion=own)
        if self._has_images:
            raise _wrong(
                "input_ids",
                "be those of the engine's calls where prompts have images",
                "a turn that is none of them: return one reward per turn, or tokens as they were "
                "recorded",
            )
        return Turn(
            prompt, Completion(tokens, log_probs, versions, "stop", sampling=self._sampling)
        )


def _checked(result: Mapping[str, Any] | TensorDictBase) -> dict[str, Tensor]:
    """The result's tensors in host memory; their keys, types and shapes are right."""
    columns = {key: value for key, value in result.items() if value is not None}
    for key, value in columns.items():
        if key not in (*_REQUIRED, *_OPTIONAL):
            raise ValueError(
                f"a workflow's dict with 'input_ids' may have {', '.join((*_REQUIRED, *_OPTIONAL))}, "
                f"got {key!r}: rename it, or leave it out."
            )
        if not isinstance(value, Tensor):
            raise TypeError(f"a workflow's {key!r} must be a tensor, got {type(value).__name__}.")
        columns[key] = value.detach().cpu()
    for key in _REQUIRED:
        if key not in columns:
            hint = ""
            if key == "rewards":
                hint = " Return zeros if a reward of ExperienceMaker is to judge the rows."
            raise ValueError(
                f"a workflow's dict with 'input_ids' must have {key!r}, got {sorted(columns)}.{hint}"
            )
    if "loss_mask" not in columns and "logprobs" not in columns:
        raise ValueError(
            "a workflow's dict with 'input_ids' must have 'loss_mask', or 'logprobs' if every token "
            f"but the first was sampled, got {sorted(columns)}."
        )
    shape = columns["input_ids"].shape
    if len(shape) != 2 or not all(shape):
        hint = ": add the batch dimension with unsqueeze(0)" if len(shape) == 1 else ""
        raise _wrong("input_ids", "have shape [B, T] with at least one token", f"{[*shape]}{hint}")
    for key, value in columns.items():
        if value.shape != shape and not (key == "rewards" and value.shape == shape[:1]):
            allowed = f"{[*shape[:1]]} or {[*shape]}" if key == "rewards" else f"{[*shape]}"
            raise _wrong(key, f"have shape {allowed} to fit 'input_ids'", f"{[*value.shape]}")
        kind, fits = _KINDS.get(key, _REAL)
        if not fits(value):
            raise _wrong(key, f"hold {kind}", f"{value.dtype}", TypeError)
    return columns


def _sampled_tokens(columns: Mapping[str, Tensor], attended: Tensor) -> Tensor:
    """Which tokens were sampled, ``[B, T]`` bool: some in each row, and never its first."""
    empty = ~attended.any(-1)
    if bool(empty.any()):
        raise _wrong(
            "attention_mask", "be 1 on some token of each row", f"none in row {_at(empty)}"
        )
    after_first = attended & (attended.cumsum(-1) > 1)
    if "loss_mask" in columns:
        mask = columns["loss_mask"]
        sampled = after_first & _as_mask("loss_mask", torch.where(attended, mask, 0))
        key, advice = "loss_mask", "return None if the model said nothing"
    else:
        sampled, key, advice = after_first, "input_ids", "the first token cannot be sampled"
    empty = ~sampled.any(-1)
    if bool(empty.any()):
        expected = "have a sampled token after the first token of each row"
        raise _wrong(key, expected, f"none in row {_at(empty)}: {advice}")
    return sampled


def _check_values(columns: Mapping[str, Tensor], attended: Tensor, sampled: Tensor) -> None:
    """Refuse tokens, versions and log-probabilities that are out of range where they are read."""
    ids = columns["input_ids"]
    checks = [("input_ids", "be 0 or more on attended tokens", attended & (ids < 0), "")]
    if "versions" in columns:
        wrong = sampled & (columns["versions"] < 0)
        advice = "; leave it out for the engine's version"
        checks.append(("versions", "be 0 or more on sampled tokens", wrong, advice))
    if "logprobs" in columns:
        value = columns["logprobs"]
        wrong = sampled & ~(value.isfinite() & (value <= LOG_PROB_ROUNDING))
        advice = "; leave it out if it is unknown"
        checks.append(("logprobs", "be finite and 0 or less on sampled tokens", wrong, advice))
    for key, expected, wrong, advice in checks:
        if bool(wrong.any()):
            row, token = wrong.nonzero()[0].tolist()
            got = f"{columns[key][row, token].item()} in row {row} at token {token}{advice}"
            raise _wrong(key, expected, got)


def _as_mask(key: str, value: Tensor) -> Tensor:
    """Convert zeros and ones of any dtype to bool."""
    wrong = (value != 0) & (value != 1)
    if bool(wrong.any()):
        raise _wrong(key, "be 0 or 1", f"{value[wrong][0].item()} in row {_at(wrong.any(-1))}")
    return value.bool()


def _runs(sampled: Sequence[bool]) -> list[tuple[int, int]]:
    """Start and end of each longest run of sampled tokens.

    Examples:
        >>> _runs([False, True, True, False, True])
        [(1, 3), (4, 5)]
    """
    changes = [k for k, (a, b) in enumerate(pairwise([False, *sampled, False])) if a != b]
    return list(zip(changes[::2], changes[1::2], strict=True))


def _turn_rewards(rewards: Tensor, starts: Tensor) -> list[float]:
    """Each turn's reward; ``starts`` are the places of the turns' first tokens."""
    out = torch.zeros(len(starts), dtype=torch.float64, device="cpu")
    if rewards.ndim == 0:
        out[-1] = rewards
    else:
        # A turn has its tokens and those up to the next turn; the first also has those before it.
        turn = torch.searchsorted(starts, torch.arange(len(rewards), device="cpu"), right=True) - 1
        out.index_add_(0, turn.clamp(min=0), rewards.double())
    return out.tolist()


def _at(rows: Tensor) -> int:
    """The first row ``[B]`` that is true."""
    return int(rows.nonzero()[0])


def _wrong(key: str, expected: str, got: str, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"a workflow's {key!r} must {expected}, got {got}.")
