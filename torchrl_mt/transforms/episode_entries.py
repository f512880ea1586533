"""Entries of an episode (its label, a reference answer, its images), copied to each of its rows.

Every row has the value of its episode's last turn, which knows the episode's outcome. Images are those
of the row itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NestedKey, NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from torchrl_mt.devices import upload
from torchrl_mt.vision.images import StoredImage
from torchrl_mt.vision.rows import NEW

DATA = "data"
"""Key of the data item that each episode was reset with, as collectors write it."""
TEXT = "text"
"""Key of each turn's messages, as collectors write them."""


def entry_of_rows(
    tensordict: TensorDictBase, key: NestedKey, row_last: Sequence[int]
) -> Tensor | NonTensorStack | None:
    """Read one value per row, from an entry of the batch or else from the episodes' data items.

    Args:
        tensordict: ``[ΣT]`` turns.
        key: key of the entry. If the batch has no such entry, a string is looked up in the mappings
            under ``"data"``.
        row_last: index of the last turn of each row's episode, for ``N`` rows.

    Returns:
        A tensor ``[N, ...]``, or ``N`` objects, with ``None`` for an item without the key; ``None`` if
        neither the batch nor any item has it.

    Examples:
        >>> from tensordict import TensorDict
        >>> turns = TensorDict({"data": NonTensorStack({"label": "a"}, {"label": "b"})}, [2])
        >>> entry_of_rows(turns, "label", [0, 1, 1]).tolist()
        ['a', 'b', 'b']
    """
    value = tensordict.get(key, None)
    if isinstance(value, Tensor):
        return value[upload(row_last, value.device)]
    if value is not None:
        objects = _objects(value, len(tensordict))
        return column_of([objects[turn] for turn in row_last])
    items = tensordict.get(DATA, None)
    if items is None or not isinstance(key, str):
        return None
    objects = _objects(items, len(tensordict))
    rows = [objects[turn] for turn in row_last]
    if not any(isinstance(item, Mapping) and key in item for item in rows):
        return None
    return column_of([item.get(key) if isinstance(item, Mapping) else None for item in rows])


def dialogue_of_rows(
    tensordict: TensorDictBase, of_turn: Sequence[int], row_last: Sequence[int]
) -> NonTensorStack | None:
    """Read the messages of each row's whole episode, from the messages of its turns.

    Args:
        tensordict: ``[ΣT]`` turns.
        of_turn: number of each turn's episode.
        row_last: index of the last turn of each row's episode, for ``N`` rows.

    Returns:
        ``N`` lists of messages; ``None`` if the turns have no messages.

    Examples:
        >>> from tensordict import TensorDict
        >>> turns = TensorDict({"text": NonTensorStack(["hi"], ["yes"], ["no"])}, [3])
        >>> dialogue_of_rows(turns, [0, 0, 1], [1, 2]).tolist()
        [['hi', 'yes'], ['no']]
    """
    value = tensordict.get(TEXT, None)
    if value is None:
        return None
    dialogues: dict[int, list[Any]] = {}
    for episode, messages in zip(of_turn, _objects(value, len(tensordict)), strict=True):
        dialogues.setdefault(episode, []).extend(messages or ())
    return column_of([dialogues[of_turn[turn]] for turn in row_last])


def images_of_prompts(
    tensordict: TensorDictBase, parents: Sequence[int], claimed: Sequence[int] | None
) -> list[tuple[StoredImage, ...]] | None:
    """List all images of each turn's prompt, from those that prompts add to their parents'.

    Args:
        tensordict: ``[ΣT]`` turns.
        parents: index of each turn's parent, -1 for none.
        claimed: what the turns themselves name as their parents; ``None`` if they name none.

    Returns:
        A tuple of images per turn; ``None`` if the turns have no ``("images", "new")``.

    Raises:
        ValueError: if a turn with images has another parent than it claims.
    """
    value = tensordict.get(NEW, None)
    if value is None:
        return None
    images: list[tuple[StoredImage, ...]] = []
    for turn, (new, parent) in enumerate(
        zip(_objects(value, len(tensordict)), parents, strict=True)
    ):
        own = () if new is None else tuple(new) if isinstance(new, (list, tuple)) else (new,)
        before = images[parent] if parent >= 0 else ()
        images.append(before + tuple(map(StoredImage.of, own)))
        if claimed is not None and claimed[turn] != parent and images[turn]:
            raise ValueError(
                f"MergeTurns: the prompt of turn {turn} of the batch, which has images, does not begin "
                "with the tokens of the turn that ('turn', 'parent') names: its images cannot be told. "
                "Keep the tokens as the collector wrote them."
            )
    return images


def item_keys(tensordict: TensorDictBase) -> list[Any] | None:
    """Sorted keys of a batch's data items; ``None`` if no item is a mapping.

    Examples:
        >>> from tensordict import TensorDict
        >>> item_keys(TensorDict({"data": NonTensorStack({"label": "a"}, {"hint": "b"})}, [2]))
        ['hint', 'label']
    """
    items = _objects(tensordict.get(DATA, None), len(tensordict))
    mappings = [item for item in items if isinstance(item, Mapping)]
    return sorted({key for item in mappings for key in item}, key=str) if mappings else None


def _objects(value: Any, count: int) -> list[Any]:
    """The Python objects of a non-tensor entry; all ``None`` if it is a nested TensorDict."""
    if isinstance(value, NonTensorData):
        return [value.data] * count
    return value.tolist() if isinstance(value, NonTensorStack) else [None] * count


def column_of(values: Sequence[Any]) -> NonTensorStack:
    """A column of Python objects."""
    return NonTensorStack(*(NonTensorData(value) for value in values))
