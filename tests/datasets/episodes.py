"""Random episodes of random schemas, and their exact comparison.

They are made of the private ``Steps``: nothing public says in one place whether an entry is dense,
ragged or of objects. Other tests take it from here.
"""

from __future__ import annotations

import random

import torch
from tensordict import TensorDict

from torchrl_mt.data._store.schema import bits
from torchrl_mt.data._store.steps import Objects, Rows, Steps, pack, unpack

# fmt: off
DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]
ODD_NAMES = [
    "..", ".", "/", "a/b", "a", "A", "a.b", "b", "npy", "a.npy", "mp4", "con", "NUL", "aux.x", "é",
    "e\u0301", "ß", "ss", "a ", "a.", " ", "\n", "\x00", "~", "-a", "_", "a~b", "x" * 300, "\\",
    "C:", "a*", "ı", "I", "K", "k", "観測", "a_b", "a__b",
]
# fmt: on
SHAPES = [(), (1,), (3,), (2, 2), (0,)]
IMAGES = [(5, 4), (5, 4, 1), (5, 4, 3), (3, 4, 5), (4, 6, 4)]
TEXTS = ["", "guess 7", "ünïcödé 🎲", "line\nbreak\u2028", 'quote " and \\', "\ud800", "\x00"]
MESSAGES = [
    [{"role": "user", "content": "hi"}],
    [],
    [{"role": "tool", "content": None, "n": [1.5]}],
]
OBJECTS = [None, True, 3, 2**70, -0.5, [1, [2]], {"a": {"b": []}}, (1, "x"), b"\xff\x00", {1: 2}]


def random_bits(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bit patterns: NaNs, infinities and negative zeros among them."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def random_schema(rng: random.Random) -> dict:
    """Kinds of entries, by key."""
    schema: dict = {("action",): ("dense", rng.choice(DTYPES), rng.choice(SHAPES))}
    for i in range(rng.randrange(5)):
        path = rng.choice([(f"x{i}",), ("deep", f"x{i}"), ("deep", "er", f"x.{i}/é")])
        kind = rng.choice(
            ["dense", "ragged", "image", "ragged image", "text", "messages", "object"]
        )
        if kind == "dense":
            schema[path] = (kind, rng.choice(DTYPES), rng.choice(SHAPES))
        elif kind == "ragged":
            schema[path] = (kind, rng.choice(DTYPES), rng.randrange(1, 3))
        elif kind == "image":
            schema[path] = ("dense", torch.uint8, rng.choice(IMAGES))
        else:
            schema[path] = (kind,)
    if rng.random() < 0.6:
        dtype, shape = rng.choice(
            [(torch.float32, (3,)), (torch.uint8, (4, 5, 3)), (rng.choice(DTYPES), ())]
        )
        schema[("observation",)] = ("dense", dtype, shape)
        schema[("next", "observation")] = ("next", dtype, shape)
    if rng.random() < 0.7:
        schema[("next", "reward")] = ("dense", torch.float32, (1,))
        schema[("next", "done")] = ("dense", torch.bool, (1,))
    return schema


def random_episode(rng: random.Random, schema: dict, length: int | None = None) -> TensorDict:
    """A TED TensorDict of a schema; its next observations sometimes differ from the observations."""
    T = length or rng.randrange(1, 7)
    columns: dict = {}
    for path, (kind, *more) in schema.items():
        if path == ("next", "done"):
            columns[path] = (torch.arange(T) == T - 1).unsqueeze(-1)
        elif kind == "dense":
            columns[path] = random_bits(rng, (T, *more[1]), more[0])
        elif kind == "next":
            last = random_bits(rng, (1, *more[1]), more[0])
            columns[path] = torch.cat([columns[path[1:]][1:], last])
            if rng.random() < 0.2:
                columns[path] = random_bits(rng, (T, *more[1]), more[0])
        elif kind == "ragged":
            shapes = [tuple(rng.randrange(4) for _ in range(more[1])) for _ in range(T)]
            if rng.random() < 0.5:  # One episode does not show that shapes vary.
                shapes = shapes[:1] * T
            columns[path] = Rows([random_bits(rng, shape, more[0]) for shape in shapes])
        elif kind == "ragged image":
            sizes = [(rng.randrange(1, 6), rng.randrange(1, 6), 3) for _ in range(T)]
            columns[path] = Rows([random_bits(rng, size, torch.uint8) for size in sizes])
        else:
            values = {"text": TEXTS, "messages": MESSAGES, "object": OBJECTS}[kind]
            columns[path] = Objects([rng.choice(values) for _ in range(T)])
    return pack(Steps(T, columns), unread=True)


def random_data(seed: int, most: int = 5) -> tuple[list[TensorDict], list[dict]]:
    """Episodes of one random schema, and metadata."""
    rng = random.Random(seed)
    schema = random_schema(rng)
    episodes = [random_episode(rng, schema) for _ in range(rng.randrange(1, most))]
    metadata = [
        rng.choice([{}, {"task": rng.choice(TEXTS), "seed": i}]) for i in range(len(episodes))
    ]
    return episodes, metadata


def assert_same(got: TensorDict, expected: TensorDict) -> None:
    """Check that two episodes are equal, bit for bit, in values, dtypes, shapes and keys."""
    a, b = unpack(got), unpack(expected)
    assert a.length == b.length
    assert a.columns.keys() == b.columns.keys()
    for path, wanted in b.columns.items():
        found = a.columns[path]
        assert isinstance(found, Objects) == isinstance(wanted, Objects), path
        if isinstance(wanted, Objects):
            assert list(map(repr, found.items)) == list(map(repr, wanted.items)), path
            continue
        rows, others = (
            list(column.unbind(0)) if isinstance(column, torch.Tensor) else column.items
            for column in (found, wanted)
        )
        for i, (x, y) in enumerate(zip(rows, others, strict=True)):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), (path, i)
            assert torch.equal(bits(x.contiguous()), bits(y.contiguous())), (path, i)
