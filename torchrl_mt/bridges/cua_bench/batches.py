"""Batches of prompts, answers and stored steps as padded tensors.

Nothing is decoded or encoded: rows hold the tokens that were given, prompts padded on the left and
responses on the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from torchrl_mt.bridges.cua_bench.prompts import Answer, WaitingPrompt
from torchrl_mt.checks import LOG_PROB_ROUNDING
from torchrl_mt.vision import StoredImage, VisionProcessor

__all__ = ["AnswerReader", "add_rows", "position_ids", "prompt_batch"]

_KEYS = ("prompts", "responses", "attention_mask", "worker_id", "meta_info")


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of the tokens of each row, counted from its first one; 0 on padding.

    Examples:
        >>> position_ids(torch.tensor([[0, 0, 1, 1]]))
        tensor([[0, 0, 0, 1]])
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0) * attention_mask


def prompt_batch(
    prompts: Sequence[WaitingPrompt], length: int, pad: int, vision: VisionProcessor | None = None
) -> dict[str, Any]:
    """The batch that the user is given: prompts ``[B, length]``, and whose they are."""
    input_ids, mask = _padded([prompt.token_ids for prompt in prompts], length, pad, left=True)
    batch = {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": position_ids(mask),
        "worker_id": np.array([prompt.slot for prompt in prompts], dtype=np.int64),
        "meta_info": _objects(prompt.info for prompt in prompts),
        "raw_prompt_ids": _objects(list(prompt.token_ids) for prompt in prompts),
    }
    if vision is not None:
        images = [prompt.images for prompt in prompts]
        batch["position_ids"] = _positions(input_ids, mask, images, vision)
        batch |= {name: _objects(each) for name, each in _image_columns(images, vision).items()}
        batch["raw_prompt_ids"] = _objects(
            vision.collapsed(prompt.token_ids, prompt.images) for prompt in prompts
        )
    return batch


def add_shown_images(batch: TensorDictBase) -> None:
    """Add all images of each turn's prompt to a batch of whole episodes, as ``("images", "prompt")``."""
    new = batch.get(("images", "new")).tolist()
    parents = batch["turn", "parent"].tolist()
    ids = batch["collector", "traj_ids"].tolist()
    shown: list[tuple[StoredImage, ...]] = []
    first = 0
    for k, (added, parent) in enumerate(zip(new, parents, strict=True)):
        if k and ids[k] != ids[k - 1]:
            first = k
        shown.append((*shown[first + parent], *added) if parent >= 0 else added)
    batch["images", "prompt"] = NonTensorStack(*map(NonTensorData, shown))


def add_rows(
    steps: TensorDictBase,
    prompt_length: int,
    response_length: int,
    pad: int,
    vision: VisionProcessor | None = None,
) -> None:
    """Add the padded rows of stored steps: the keys on which loops of padded batches train.

    ``"input_ids"``, ``"attention_mask"`` and ``"position_ids"`` are ``[N, P + R]``, ``"responses"`` is
    ``[N, R]``, ``"reward"`` is the return ``[N]``, and ``"meta_info"`` tells the episode. With images,
    ``"multi_modal_data"`` and ``"multi_modal_inputs"`` are those of each row, and positions are
    ``[N, 3, P + R]`` for models with M-RoPE.
    """
    prompts = steps.get(("tokens", "prompt"), as_list=True)
    answers = steps.get(("tokens", "response"), as_list=True)
    prompt_ids, prompt_mask = _padded(prompts, prompt_length, pad, left=True)
    responses, response_mask = _padded(answers, response_length, pad, left=False)
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    steps["input_ids"] = torch.cat([prompt_ids, responses], dim=1)
    steps["attention_mask"] = mask
    steps["position_ids"] = position_ids(mask)
    steps["responses"] = responses
    steps["reward"] = steps["next", "return"].reshape(len(steps)).float()
    uids = steps["collector", "traj_ids"].reshape(-1).tolist()
    infos = steps.get("info").tolist()
    described = [{**(info or {}), "uid": uid} for uid, info in zip(uids, infos, strict=True)]
    steps["meta_info"] = NonTensorStack(*map(NonTensorData, described))
    if vision is not None:
        images = steps.get(("images", "prompt")).tolist()
        steps["position_ids"] = _positions(steps["input_ids"], mask, images, vision)
        for name, values in _image_columns(images, vision).items():
            steps[name] = NonTensorStack(*map(NonTensorData, values))


def _positions(
    ids: Tensor, mask: Tensor, images: Sequence[Sequence[StoredImage]], vision: VisionProcessor
) -> Tensor:
    """Positions of rows with images: ``[N, 3, S]`` for models with M-RoPE, else those of text."""
    if vision.merge_size is None:
        return position_ids(mask)
    out = torch.zeros(len(ids), 3, ids.shape[1], dtype=torch.int64, device="cpu")
    for k, shown in enumerate(images):
        real = mask[k].bool()
        positions = vision.positions(ids[k, real], shown)
        assert positions is not None
        out[k, :, real] = positions
    return out


def _image_columns(
    images: Sequence[Sequence[StoredImage]], vision: VisionProcessor
) -> dict[str, list[Any]]:
    """Each row's images as PIL images and as arguments of the model."""
    return {
        "multi_modal_data": [{"image": [image.pil() for image in shown]} for shown in images],
        "multi_modal_inputs": [vision.batch(shown) for shown in images],
    }


def _padded(
    rows: Sequence[Sequence[int] | Tensor], length: int, pad: int, *, left: bool
) -> tuple[Tensor, Tensor]:
    """Rows as int64 ``[B, length]``, padded on one side, and their mask."""
    ids = torch.full((len(rows), length), pad, dtype=torch.int64, device="cpu")
    mask = torch.zeros(len(rows), length, dtype=torch.int64, device="cpu")
    for k, row in enumerate(rows):
        place = slice(length - len(row), length) if left else slice(0, len(row))
        ids[k, place] = torch.as_tensor(row, dtype=torch.int64, device="cpu")
        mask[k, place] = 1
    return ids, mask


def _objects(values: Iterable[Any]) -> np.ndarray:
    """An array of objects; ``np.array`` would look into them."""
    values = list(values)
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


class AnswerReader:
    """Reads the user's answers, and refuses what is not one.

    Args:
        num_slots: number of slots.
        vocabulary: number of token ids.
        longest: maximum tokens of a response.
        barred: token ids that no response may have: those that stand for images.
    """

    def __init__(
        self, num_slots: int, vocabulary: int, longest: int, barred: Sequence[int] = ()
    ) -> None:
        self._barred = torch.tensor(barred, dtype=torch.int64, device="cpu")
        self._num_slots = num_slots
        self._vocabulary = vocabulary
        self._longest = longest

    def __call__(self, batch: Mapping[str, Any]) -> list[Answer]:
        """Read a batch of answers, one per row.

        Args:
            batch: ``"prompts"`` ``[B, P]``, ``"responses"`` ``[B, R]``, ``"attention_mask"``
                ``[B, P + R]``, ``"worker_id"`` and ``"meta_info"`` of ``B`` entries, and perhaps
                ``"log_probs"`` ``[B, R]``.

        Raises:
            ValueError: if an entry is missing, or of a wrong shape or value; names it.
            TypeError: if an entry is of a wrong type; names it.
        """
        if not hasattr(batch, "keys"):
            raise TypeError(
                f"batch must be a dict with {', '.join(_KEYS)}, got {type(batch).__name__}."
            )
        missing = [key for key in _KEYS if key not in batch.keys()]  # noqa: SIM118  (TensorDict)
        if missing:
            raise ValueError(
                f"the answers must have {', '.join(_KEYS)}, got none of {', '.join(missing)}."
            )
        prompts = _integers("prompts", batch["prompts"])
        responses = _integers("responses", batch["responses"])
        mask = _integers("attention_mask", batch["attention_mask"])
        size, width = prompts.shape
        if len(responses) != size:
            raise ValueError(
                f"responses must have a row for each of the {size} prompts, got {len(responses)}."
            )
        expected = [size, width + responses.shape[1]]
        if list(mask.shape) != expected:
            raise ValueError(
                f"attention_mask must be of prompts and responses, {expected}, got "
                f"{list(mask.shape)}: join the batch's mask and that of the responses."
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("attention_mask must be 0 or 1 everywhere, got other values.")
        prompt_mask, response_mask = mask[:, :width].bool(), mask[:, width:].bool()
        _require_rows(
            (prompt_mask[:, 1:] >= prompt_mask[:, :-1]).all(1),
            "attention_mask must be 0 before the prompt and 1 within it",
        )
        _require_rows(
            (response_mask[:, 1:] <= response_mask[:, :-1]).all(1),
            "attention_mask must be 1 within the response and 0 behind it, without holes",
        )
        lengths, prompt_lengths = response_mask.sum(1), prompt_mask.sum(1).tolist()
        _require_rows(
            lengths > 0, "responses must have at least one token that attention_mask shows"
        )
        _require_rows(
            lengths <= self._longest,
            f"responses must have at most max_response_length={self._longest} tokens",
        )
        known = (responses >= 0) & (responses < self._vocabulary)
        _require_rows(
            (known | ~response_mask).all(1),
            f"responses must be token ids in 0..{self._vocabulary - 1}",
        )
        if len(self._barred):
            shows = torch.isin(responses, self._barred) & response_mask
            _require_rows(
                ~shows.any(1),
                f"responses must have none of the tokens {self._barred.tolist()} that stand for images",
            )
        log_probs = self._log_probs(batch.get("log_probs"), responses, response_mask)
        slots = self._slots_of(batch["worker_id"], size)
        return [
            Answer(
                slots[k],
                *episode,
                prompts[k, width - prompt_lengths[k] :].tolist(),
                responses[k, : lengths[k]].tolist(),
                None if log_probs is None else log_probs[k, : lengths[k]].tolist(),
            )
            for k, episode in enumerate(_episodes(batch["meta_info"], size))
        ]

    def _log_probs(self, given: Any, responses: Tensor, mask: Tensor) -> Tensor | None:
        """The log-probabilities, checked where the mask shows tokens."""
        if given is None:
            return None
        log_probs = _tensor("log_probs", "floating numbers", given)
        if not log_probs.is_floating_point():
            raise TypeError(f"log_probs must be floating numbers, got {log_probs.dtype}.")
        if log_probs.shape != responses.shape:
            raise ValueError(
                f"log_probs must have the shape of responses, {list(responses.shape)}, got "
                f"{list(log_probs.shape)}."
            )
        fine = log_probs.isfinite() & (log_probs <= LOG_PROB_ROUNDING)
        _require_rows((fine | ~mask).all(1), "log_probs must be finite and 0 or less")
        return log_probs.float()

    def _slots_of(self, given: Any, size: int) -> list[int]:
        """The slots, each once."""
        slots = _listed("worker_id", given)
        if len(slots) != size or not all(isinstance(slot, Integral) for slot in slots):
            raise ValueError(
                f'worker_id must be one integer for each of the {size} rows, as in batch["worker_id"], '
                f"got {given!r}."
            )
        slots = [int(slot) for slot in slots]
        for slot in slots:
            if not 0 <= slot < self._num_slots:
                raise ValueError(
                    f"worker_id must be in 0..{self._num_slots - 1}, got {slot}: pass "
                    'batch["worker_id"] on.'
                )
        if len(set(slots)) < size:
            twice = next(slot for slot in slots if slots.count(slot) > 1)
            raise ValueError(
                f"worker_id must name each slot once, got {twice} in several rows: answer a slot's "
                "prompts one after the other."
            )
        return slots


def _episodes(given: Any, size: int) -> list[tuple[int, int | None]]:
    """The episode and the turn of each row."""
    infos = _listed("meta_info", given)
    out: list[tuple[int, int | None]] = []
    for info in infos:
        uid = info.get("uid") if isinstance(info, Mapping) else None
        turn = info.get("turn") if isinstance(info, Mapping) else None
        if not isinstance(uid, Integral) or not (turn is None or isinstance(turn, Integral)):
            raise ValueError(
                'meta_info must be the dicts of batch["meta_info"], with the "uid" and the "turn" of '
                f"the prompt, got {info!r}."
            )
        out.append((int(uid), None if turn is None else int(turn)))
    if len(out) != size:
        raise ValueError(f"meta_info must have a dict for each of the {size} rows, got {len(out)}.")
    return out


def _listed(name: str, given: Any) -> list[Any]:
    """Entries of a tensor, an array or a list."""
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise TypeError(f'{name} must be that of the batch, batch["{name}"], got {given!r}.')
    return list(values)


def _tensor(name: str, expected: str, given: Any) -> Tensor:
    """A tensor on the CPU."""
    try:
        return torch.as_tensor(given, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor of {expected}, got {type(given).__name__}: {error}."
        ) from None


def _integers(name: str, given: Any) -> Tensor:
    """A tensor of integers, ``[B, S]``, on the CPU."""
    tensor = _tensor(name, "integers", given)
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}.")
    if tensor.ndim != 2:
        raise ValueError(
            f"{name} must have two dimensions, rows and tokens, got {list(tensor.shape)}."
        )
    return tensor.long()


def _require_rows(right: Tensor, rule: str) -> None:
    """Refuse rows ``[B]`` that break a rule."""
    if not bool(right.all()):
        wrong = (~right).nonzero().reshape(-1).tolist()
        raise ValueError(f"{rule}, got other ones in the rows {wrong[:5]}.")
