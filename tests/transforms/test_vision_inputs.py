from __future__ import annotations

import copy
import pickle
import random
from functools import lru_cache
from inspect import signature

import pytest
import tensordict
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from torchrl.envs.transforms import Compose

from tests.buffers import buffer_of
from tests.tiers import examples
from tests.vision.episodes import FAMILIES, QWEN, Turn, as_steps, family, random_image, random_steps
from torchrl_mt.bridges.lightrft import Experience
from torchrl_mt.data import EpisodeSampler, EpisodeWriter
from torchrl_mt.transforms import DiscountedReturn, MergeTurns, VisionInputs
from torchrl_mt.vision import RowImages, StoredImage, compact_images
from torchrl_mt.vision.model import VisionModel
from torchrl_mt.vision.rows import COUNT, FIRST, GRIDS, HASH, KEYS, NEW, PIXELS, RAW, set_row_images

SEEDS = st.integers(0, 2**32 - 1)
IMAGE = ("tokens", "full")


def make_rows(name, seed=0, **kwargs):
    """Rows with inputs; rows differ in their tokens, so these name a row."""
    _, processor = family(name)
    steps, dialogues = random_steps(processor, seed, **kwargs)
    return VisionInputs(processor)(MergeTurns()(steps)), dialogues


def buffer_on(storage, *parts, **kwargs):
    """A buffer of rows on a storage of TorchRL's."""
    buffer = ReplayBuffer(storage=storage(64), **kwargs)
    for rows in parts:
        buffer.extend(rows)
    return buffer


def row_tokens(rows, row):
    return tuple(rows[IMAGE][row][rows["masks", "all_attention_mask"][row]].tolist())


def expected(dialogues):
    """The images of every prompt and response, by their tokens."""
    return {
        (*turn.prompt, *turn.response): turn.images for dialogue in dialogues for turn in dialogue
    }


@lru_cache(64)
def processed(name, shown):
    """What the processor itself makes of images."""
    _, processor = family(name)
    text = [processor.image_token * len(shown)]
    return processor(images=[image.pil() for image in shown], text=text, return_tensors="pt")


def check(rows, name, known):
    """Every row has exactly the inputs that the processor makes of its images."""
    images = RowImages.of(rows)
    for row in range(len(rows)):
        shown = known[row_tokens(rows, row)]
        got = images.inputs(torch.tensor([row]))
        assert int(images.count[row]) == len(shown)
        assert rows.get(RAW).tolist()[row] == tuple(shown)
        if not shown:
            assert (got, images.grids_of(row)) == ({}, [])
            continue
        want = processed(name, tuple(shown))
        assert torch.equal(got["pixel_values"], want["pixel_values"])
        if name in QWEN:
            assert torch.equal(got["image_grid_thw"], want["image_grid_thw"])
            assert images.grids_of(row) == list(map(tuple, want["image_grid_thw"].tolist()))
        else:
            assert (set(got), images.grids_of(row)) == ({"pixel_values"}, [])
    everything = images.inputs(torch.arange(len(rows)))
    parts = [images.inputs(torch.tensor([row])) for row in range(len(rows))]
    for key in everything:
        assert torch.equal(everything[key], torch.cat([part[key] for part in parts if part]))


@pytest.mark.parametrize("name", FAMILIES)
@examples(30, 2)
@given(seed=SEEDS)
def test_rows_have_the_inputs_of_their_images(name, seed):
    rows, dialogues = make_rows(name, seed)
    check(rows, name, expected(dialogues))
    shown = [image.key for raw in rows.get(RAW).tolist() for image in raw]
    assert list(rows[KEYS]) == shown
    patches = len(shown) if name == "llava" else int(rows[GRIDS].prod(-1).sum())
    assert len(rows[PIXELS]) == patches
    assert (GRIDS[1] in rows["images"].keys(is_leaf=lambda _: True)) == (name in QWEN)
    assert rows[COUNT].dtype == torch.int64


@pytest.mark.parametrize("name", QWEN)
@given(seed=SEEDS)
def test_positions_are_those_of_the_model(name, seed):
    rows, _ = make_rows(name, seed)
    model, _ = family(name)
    facts, images = VisionModel.of(model.config), RowImages.of(rows)
    for row in range(len(rows)):
        tokens = torch.tensor([row_tokens(rows, row)])
        is_image = tokens == facts.image_token_id
        given = images.inputs(torch.tensor([row]))
        index = model.model.get_rope_index
        # transformers 4 finds the images by their tokens.
        marks = {"mm_token_type_ids": is_image.int()}
        want, _ = index(
            input_ids=tokens,
            image_grid_thw=given.get("image_grid_thw"),
            attention_mask=torch.ones_like(tokens),
            **{name: mark for name, mark in marks.items() if name in signature(index).parameters},
        )
        assert torch.equal(facts.positions(is_image[0], images.grids_of(row)), want[:, 0])


def through(storage):
    """Put rows into a buffer and take them out in another order."""

    return lambda rows: buffer_on(storage, rows)[torch.randperm(len(rows))]


OPERATIONS = {
    "index": lambda rows: rows[torch.randint(len(rows), (5,))],
    "mask": lambda rows: rows[torch.arange(len(rows)) % 2 == 0],
    "slice": lambda rows: rows[len(rows) // 2 :],
    "split": lambda rows: torch.cat(rows.split(2)[::-1]),
    "chunk": lambda rows: rows.chunk(2)[-1],
    "stack": lambda rows: torch.stack(list(rows.unbind(0))[::-1]),
    "lazy stack": lambda rows: lazy_stack([rows[i] for i in torch.randperm(len(rows)).tolist()]),
    "repeat": lambda rows: rows[:1].expand(3),
    "cat": lambda rows: torch.cat([rows[1:], rows[:1]]),
    "clone": lambda rows: rows.clone(),
    "copy": lambda rows: rows.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "pickled row": lambda rows: pickle.loads(pickle.dumps(torch.stack([rows[0], rows[-1]]))),
    "to": lambda rows: rows.to("cpu"),
    "contiguous": lambda rows: rows.contiguous(),
    "reshape": lambda rows: rows.unsqueeze(0).reshape(-1),
    "list storage": through(ListStorage),
    "stack storage": through(LazyStackStorage),
    "tensor storage": through(LazyTensorStorage),
    "compact": lambda rows: compact_images(rows[1:])[:2],
    "compact lazy stack": lambda rows: compact_images(lazy_stack(list(rows.unbind(0))[::-1])),
    "joined compact": lambda rows: torch.cat([compact_images(rows[2:]), compact_images(rows[:1])]),
    "again": lambda rows: VisionInputs(family("qwen2_5_vl")[1])(rows[1:]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_images_follow_their_rows(operation):
    rows, dialogues = make_rows("qwen2_5_vl", 0, episodes=4)
    unnamed = MergeTurns()(as_steps(dialogues).exclude(("turn", "parent")))
    assert unnamed.get(RAW).tolist() == rows.get(RAW).tolist()
    check(OPERATIONS[operation](rows), "qwen2_5_vl", expected(dialogues))


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_rows_of_two_calls_can_be_concatenated_and_stacked(name):
    (one, first), (two, second) = (make_rows(name, seed) for seed in (1, 2))
    length = max(one[IMAGE].shape[1], two[IMAGE].shape[1])

    def padded(rows):
        wide = rows.select("images")
        for key in (IMAGE, ("masks", "all_attention_mask")):
            shape = (len(rows), length - rows[key].shape[1])
            wide[key] = torch.cat([rows[key], rows[key].new_zeros(shape)], 1)
        return wide

    known = expected([*first, *second])
    both = torch.cat([padded(one), padded(two)])
    check(both, name, known)
    check(both[torch.randperm(len(both))], name, known)
    check(torch.stack([padded(two)[0], padded(one)[-1]]), name, known)
    check(VisionInputs(family(name)[1])(both), name, known)
    for storage in (ListStorage, LazyStackStorage):
        check(buffer_on(storage, padded(one), padded(two), batch_size=16).sample(), name, known)


def test_a_storage_that_mixes_rows_up_is_noticed():
    rows, _ = make_rows("qwen2_5_vl", 3, episodes=5)
    more, _ = make_rows("qwen2_5_vl", 4, episodes=5)
    assert len(set(rows[HASH].tolist())) > 1
    mixed = buffer_on(LazyMemmapStorage, rows.select("images"), more.select("images"))[:]
    with pytest.raises(ValueError, match=r"no inputs of the images of row .*VisionInputs"):
        RowImages.of(mixed)
    mixed = buffer_on(LazyMemmapStorage, rows)[:]
    with pytest.raises(ValueError, match=r"row \d+ has images of another row.*ListStorage"):
        VisionInputs(family("qwen2_5_vl")[1])(mixed)


def test_a_table_of_other_rows_is_noticed():
    one, _ = make_rows("qwen2_5_vl", 4)
    other, _ = make_rows("qwen2_5_vl", 5)
    mixed = one.clone()
    for key in (PIXELS, GRIDS, KEYS):
        mixed.set(key, NonTensorData(other[key], batch_size=one.batch_size))
    with pytest.raises(ValueError, match=r"no inputs of the images of row .*VisionInputs"):
        RowImages.of(mixed)
    mixed = one.clone()
    mixed.set(KEYS, NonTensorData(one[KEYS][1:], batch_size=one.batch_size))
    with pytest.raises(ValueError, match="no inputs of the images of row"):
        RowImages.of(mixed)
    torch.testing.assert_close(
        RowImages.of(one.exclude(FIRST, KEYS)).first, RowImages.of(one).first
    )
    with pytest.raises(ValueError, match=r"exactly these rows.*first"):
        RowImages.of(one.exclude(FIRST)[1:])
    with pytest.raises(KeyError, match="VisionInputs"):
        RowImages.of(one.exclude(PIXELS))
    assert RowImages.of(TensorDict({"a": torch.zeros(2)}, [2])) is None


def test_in_a_buffer_of_episodes():
    name = "qwen2_vl"
    _, processor = family(name)
    steps, dialogues = random_steps(processor, 6, episodes=5)
    buffer = buffer_of(
        100,
        EpisodeSampler(replacement=False),
        writer=EpisodeWriter(transform=DiscountedReturn(0.9)),
        batch_size=3,
        transform=Compose(MergeTurns(), VisionInputs(processor)),
    )
    buffer.extend(steps)
    for _ in range(3):
        rows = buffer.sample()
        check(rows, name, expected(dialogues))
    buffer = pickle.loads(pickle.dumps(buffer))
    check(buffer.sample(), name, expected(dialogues))


def test_episodes_keep_each_image_once():
    rng = random.Random(0)
    images = [random_image(rng) for _ in range(3)]
    dialogue, prompt = [], []
    for k in range(3):
        prompt = [*prompt, 4 + k]
        dialogue.append(Turn(prompt, [9], images[: k + 1], k - 1))
        prompt = [*prompt, 9]
    buffer = buffer_of(100)
    buffer.extend(as_steps([dialogue] * 4))
    kept = [image for new in buffer[:].get(NEW).tolist() for image in new]
    assert [id(image) for image in kept] == [id(image) for image in images] * 4
    sent = pickle.loads(pickle.dumps(buffer))[:].get(NEW).tolist()
    assert len({id(image) for new in sent for image in new}) == 3


def test_rows_without_any_image():
    _, processor = family("qwen2_5_vl")
    rows = MergeTurns()(as_steps([[Turn([5, 6], [7], [], -1)]]))
    assert rows.get(RAW).tolist() == [()]
    rows = VisionInputs(processor)(rows)
    assert (rows[COUNT].tolist(), rows[GRIDS].shape) == ([0], (0, 3))
    assert RowImages.of(rows).inputs(torch.tensor([0])) == {}
    others, dialogues = make_rows("qwen2_5_vl", 7)
    keys = (IMAGE, ("masks", "all_attention_mask"), "images")
    wide = rows.select(*keys)
    for key in keys[:2]:
        wide[key] = torch.cat([rows[key], rows[key].new_zeros(1, others[key].shape[1] - 3)], 1)
    known = {**expected(dialogues), (5, 6, 7): []}
    check(torch.cat([wide, others.select(*keys)]), "qwen2_5_vl", known)


def test_experience_keeps_images():
    rows, dialogues = make_rows("qwen2_5_vl", 8)
    zeros = torch.zeros(rows[IMAGE].shape)
    rows["log_probs", "old"], rows["advantage"], rows["returns"] = zeros, zeros[..., None], zeros
    again = Experience.from_rows(rows).to("cpu")[torch.arange(len(rows) - 1)].to_rows()
    check(again, "qwen2_5_vl", expected(dialogues))


# Refusals


def test_placeholders_must_be_those_of_the_images():
    _, processor = family("qwen2_5_vl")
    transform = VisionInputs(processor)
    small, large = (StoredImage.of(torch.zeros(8, side, 3, dtype=torch.uint8)) for side in (8, 24))
    image, text = processor.image_token_id, 5
    tokens = torch.tensor([[image, text, image, image, image], [text] * 5])
    rows = TensorDict({IMAGE: tokens}, [2])
    set_row_images(rows, [(small, large), ()])
    before = rows.clone()
    assert transform(rows)[COUNT].tolist() == [2, 0]
    for raw, error in [
        ([(small,), ()], "row 0: .* got 4 for 1 images with 1 tokens.*cut"),
        ([(small, large), (small,)], "row 1: .* got 0 for 1 images with 1 tokens"),
        ([(large, small), ()], "row 0: .* image 0 must be side by side"),
    ]:
        rows = before.clone()
        set_row_images(rows, raw)
        with pytest.raises(ValueError, match=error):
            transform(rows)
        assert set(rows.keys(True, True)) == {IMAGE, HASH}
    # Padding may be an image token.
    masked = before.clone()
    masked[IMAGE][1] = image
    masked["masks", "all_attention_mask"] = torch.tensor([[True] * 5, [False] * 5])
    assert transform(masked)[COUNT].tolist() == [2, 0]


def test_what_is_missing_is_named():
    _, processor = family("qwen2_5_vl")
    transform = VisionInputs(processor)
    rows = TensorDict({IMAGE: torch.tensor([[1]])}, [1])
    with pytest.raises(KeyError, match=r"'images', 'raw'.*MergeTurns"):
        transform(rows)
    raw = TensorDict({}, [1]).set(RAW, NonTensorStack(NonTensorData(())))
    with pytest.raises(KeyError, match=r"'tokens', 'full'.*MergeTurns"):
        transform(raw)
    with pytest.raises(ValueError, match=r"batch size \[N\], got \[\]"):
        transform(rows[0])
    with pytest.raises(RuntimeError, match="training rows"):
        transform._call(rows)
    with pytest.raises(TypeError, match=r"processor must be one of Qwen2VL.*got \w+:"):
        VisionInputs(processor.tokenizer)


@pytest.mark.parametrize("with_parent", [True, False])
def test_merging_needs_to_know_whose_images_were_added_to(with_parent):
    rng = random.Random(1)
    one, two = random_image(rng), random_image(rng)
    steps = as_steps(
        [[Turn([4], [5], [one], -1), Turn([4], [5], [two], -1), Turn([4, 5, 6], [7], [one], 0)]]
    )
    if with_parent:
        assert MergeTurns()(steps).get(RAW).tolist() == [(one,), (two,)]
    else:
        with pytest.raises(
            ValueError, match="turn 1 of the batch has the tokens of an earlier turn"
        ):
            MergeTurns()(steps.exclude(("turn", "parent")))


def test_a_parent_that_the_tokens_contradict_is_refused_where_there_are_images():
    image = random_image(random.Random(2))
    steps = as_steps([[Turn([4], [5], [image], -1), Turn([8, 9], [7], [image, image], 0)]])
    with pytest.raises(ValueError, match=r"turn 1 of the batch, which has images"):
        MergeTurns()(steps)


def test_rows_that_fill_a_batch_show_nothing():
    rows, _ = make_rows("qwen2_5_vl", 3)
    filled = RowImages.of(tensordict.pad(rows.select("tokens", "images"), [0, 2]))
    assert filled.count.tolist() == [*rows[COUNT].tolist(), 0, 0]
    again = VisionInputs(family("qwen2_5_vl")[1])(
        tensordict.pad(rows.select("tokens", "masks", "images"), [0, 2])
    )
    every = torch.arange(len(rows))
    for key, value in RowImages.of(rows).inputs(every).items():
        for images in (filled, RowImages.of(again)):
            assert torch.equal(images.inputs(torch.arange(len(rows) + 2))[key], value)
