"""Whatever the data, a run that is cut and goes on neither repeats an item nor skips one."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.collectors.runs import beside
from tests.refusals import check_refused, refused
from tests.tiers import examples
from torchrl_mt.collectors.items.items import Item, Items

SIZE = 7


class MapStyle(Dataset):
    """Items by index, as torch's map-style data gives them."""

    def __init__(self, size: int = SIZE, fails_at: int = -1) -> None:
        self.size = size
        self.fails_at = fails_at

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if index == self.fails_at:
            raise KeyError("broken")
        return {"id": index, "task": f"task {index}"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"id": i} for i in range(SIZE)])


class SizedStream(Stream):
    def __len__(self) -> int:
        return SIZE


class HfLike:
    """What of a Hugging Face ``Dataset`` matters here: a length, rows by int, columns by name."""

    def __init__(self, columns: dict[str, list]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._columns[key]
        return {name: column[key] for name, column in self._columns.items()}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


class ByEpoch(Sampler):
    """Shuffles by the epoch that it is told, as ``DistributedSampler`` does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def infinite():
    return ({"id": i % SIZE} for i in itertools.count())


# Name: how to make equal data, and whether an epoch has each of SIZE items once.
def load(batch_size: int | None = 3, **kwargs) -> DataLoader:
    return DataLoader(MapStyle(), batch_size=batch_size, **kwargs)


# Name: how to make equal data.
DATA = {
    "none": lambda: None,
    "list": lambda: [{"id": i} for i in range(SIZE)],
    "tuple": lambda: tuple(range(SIZE)),
    "range": lambda: range(SIZE),
    "tensor": lambda: torch.arange(SIZE),
    "map style": MapStyle,
    "hf like": lambda: HfLike({"id": list(range(SIZE)), "q": list("abcdefg")}),
    "tensordict": lambda: TensorDict({"id": torch.arange(SIZE)}, [SIZE]),
    "set": lambda: {f"word {i}" for i in range(SIZE)},
    "re-iterable": lambda: dict.fromkeys(range(SIZE)).keys(),
    "generator function": lambda: lambda: iter(range(SIZE)),
    "iterable dataset": Stream,
    "sized iterable dataset": SizedStream,
    "iterator": infinite,
    "loader": load,
    "loader, shuffled": lambda: load(shuffle=True),
    "loader, generator": lambda: load(shuffle=True, generator=generator()),
    "loader, sampler's generator": lambda: load(
        sampler=RandomSampler(MapStyle(), generator=generator())
    ),
    "loader, subset": lambda: load(2, sampler=SubsetRandomSampler(range(SIZE))),
    "loader, weights": lambda: load(2, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "loader, replacement": lambda: load(2, sampler=RandomSampler(MapStyle(), True)),
    "loader, batch sampler": lambda: DataLoader(
        MapStyle(), batch_sampler=BatchSampler(RandomSampler(MapStyle()), 2, False)
    ),
    "loader, set_epoch": lambda: load(4, sampler=ByEpoch()),
    "loader, no batches": lambda: load(None, shuffle=True),
    "loader, iterable": lambda: DataLoader(Stream(), batch_size=3),
    "loader, lists": lambda: load(shuffle=True, collate_fn=list),
    "loader, tensordict": lambda: DataLoader(DATA["tensordict"](), 3, collate_fn=torch.stack),
}
BY_INDEX = ["list", "tuple", "range", "tensor", "map style", "hf like", "tensordict", "set"]
WITHOUT_EPOCHS = ["none", "iterator", "loader, weights", "loader, replacement"]
"""Of which an epoch has not each of SIZE items once."""


def plain(value):
    """An item as something that can be compared."""
    if isinstance(value, TensorDict):
        return {key: each.tolist() for key, each in value.items()}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def take(items: Items, number: int) -> list[Item]:
    return [Item(item.ticket, plain(item.value)) for item in itertools.islice(items, number)]


@pytest.mark.parametrize(
    ("kind", "shuffle"), [(k, False) for k in DATA] + [(k, True) for k in BY_INDEX]
)
@examples(8, few=3)
@given(plan=st.data())
def test_a_run_that_goes_on_is_the_run_that_was_never_cut(kind, shuffle, plan):
    make = DATA[kind]
    seed = plan.draw(st.integers(-3, 2**40))
    whole = take(Items(make(), shuffle=shuffle, seed=seed), 40)

    items = Items(make(), shuffle=shuffle, seed=seed)
    unfinished: dict[int, object] = {}
    position = 0
    for restart in range(4):
        torch.manual_seed(restart)  # as a training run disturbs torch's global generator
        number = plan.draw(st.integers(0, 9))
        expected = sorted(unfinished)[:number]
        expected += range(position, position + number - len(expected))
        taken = take(items, number)
        assert taken == [whole[ticket] for ticket in expected]
        position = max([position, *(ticket + 1 for ticket in expected)])
        unfinished.update(taken)
        for ticket in plan.draw(st.permutations(expected))[: plan.draw(st.integers(0, 9))]:
            items.done(ticket)
            del unfinished[ticket]
        state = items.state_dict()
        assert state["open"] == sorted(unfinished)
        state = pickle.loads(pickle.dumps(state))
        # Over new data that is equal, by one who was made with another seed or has read already.
        items = Items(make(), shuffle=shuffle, seed=0)
        if kind != "iterator":
            take(items, plan.draw(st.integers(0, 9)))
        items.load_state_dict(state)
        if restart == 2:  # saved again before anything was taken
            again = Items(make(), shuffle=shuffle, seed=1)
            again.load_state_dict(items.state_dict())
            items = again
    rest = [*sorted(unfinished), *range(position, len(whole))]
    assert take(items, len(rest)) == [whole[ticket] for ticket in rest]


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [(k, False) for k in DATA if k not in WITHOUT_EPOCHS] + [(k, True) for k in BY_INDEX],
)
def test_an_epoch_has_every_item_once(kind, shuffle):
    items = Items(DATA[kind](), shuffle=shuffle)
    epochs = [[repr(value) for _, value in take(items, SIZE)] for _ in range(3)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == SIZE
    once = take(Items(DATA[kind](), shuffle=shuffle, cycle=False), 99)
    assert [repr(value) for _, value in once] == epochs[0]


@pytest.mark.parametrize("kind", BY_INDEX)
def test_shuffling_follows_from_the_seed_and_the_epoch(kind):
    def order(seed):
        items = take(Items(DATA[kind](), shuffle=True, seed=seed), 3 * SIZE)
        return [repr(value) for _, value in items]

    assert order(1) == order(1) != order(2)
    assert len({tuple(order(1)[i * SIZE : (i + 1) * SIZE]) for i in range(3)}) == 3


def test_without_shuffling_data_keeps_its_order():
    assert [value for _, value in take(Items(range(3)), 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_shuffling_loader_is_in_a_new_order_every_epoch_and_leaves_torch_alone():
    loader = DataLoader(MapStyle(50), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    ids = [value["id"].item() for _, value in itertools.islice(Items(loader, seed=3), 100)]
    assert ids[:50] != ids[50:]
    assert sorted(ids[:50]) == sorted(ids[50:]) == list(range(50))
    assert torch.equal(torch.get_rng_state(), before)
    assert loader.generator is None
    assert loader.sampler.generator is None


def test_a_loader_with_a_worker_goes_on():
    def make():
        loader = load(2, shuffle=True, num_workers=1, multiprocessing_context="fork")
        return Items(loader, cycle=False)

    whole, items, on = take(make(), SIZE), make(), make()
    assert take(items, 3) == whole[:3]
    for ticket in (0, 2):
        items.done(ticket)
    on.load_state_dict(items.state_dict())
    assert take(on, 99) == [whole[1], *whole[3:]]


def test_real_hugging_face_data():
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    data = datasets.Dataset.from_dict({"id": list(range(SIZE))})
    taken = take(Items(data, shuffle=True), SIZE)
    assert sorted(value["id"] for _, value in taken) == [*range(SIZE)]


def test_without_data_every_item_is_a_new_seed():
    one, two = take(Items(seed=1), 50), take(Items(seed=2), 50)
    assert one[0].value == {"seed": 1_000_003}
    assert len({value["seed"] for _, value in one + two}) == 100


def test_what_is_put_back_comes_before_anything_new():
    for data in (range(SIZE), iter(range(SIZE))):
        items = Items(data)
        tickets = [item.ticket for item in take(items, 4)]
        items.done(tickets[0])
        items.put_back(3)
        items.put_back(1)
        assert [value for _, value in take(items, 3)] == [1, 3, 4]


def test_only_unfinished_items_cost_memory():
    items = Items(infinite())
    for item in itertools.islice(items, 10_000):
        items.done(item.ticket)
    item = next(items)
    state = items.state_dict()
    assert state["open"] == [10_000] == [item.ticket]
    assert len(pickle.dumps(state)) < 1000


def test_state_is_a_snapshot():
    items = Items(infinite())
    taken = take(items, 3)
    state = items.state_dict()
    kept = copy.deepcopy(state)
    items.done(taken[1].ticket)
    take(items, 5)
    assert state == kept


def test_the_end_of_the_data_is_saved_too():
    for make in (lambda: range(3), lambda: iter(range(3)), lambda: DataLoader(range(3))):
        items = Items(make(), cycle=False)
        assert len(take(items, 9)) == 3
        with pytest.raises(StopIteration):
            next(items)
        on = Items(make(), cycle=False)
        on.load_state_dict(items.state_dict())
        assert [ticket for ticket, _ in take(on, 9)] == [0, 1, 2]
        with pytest.raises(StopIteration):
            next(on)


def test_threads_share_items():
    items, taken, lock = Items(range(100), shuffle=True), [], threading.Lock()

    def work():
        for _ in range(50):
            item = next(items)
            with lock:
                taken.append(item)
            items.done(item.ticket)

    with beside(*[work] * 4):
        pass
    assert sorted(ticket for ticket, _ in taken) == list(range(200))
    assert Counter(value for _, value in taken) == dict.fromkeys(range(100), 2)


# Bad input

EMPTY = "data must hold at least one item, got none"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused(EMPTY, Items, []),
        refused(EMPTY, Items, ()),
        refused(EMPTY, Items, iter([])),
        refused(EMPTY, Items, lambda: iter([])),
        refused(EMPTY, Items, {}.keys()),
        refused(EMPTY, Items, set()),
        refused(EMPTY, Items, torch.empty(0)),
        refused(EMPTY, Items, MapStyle(0)),
        refused(EMPTY, Items, DataLoader(MapStyle(2), batch_size=3, drop_last=True)),
        refused("data must give one item after the other", Items, {"a": [1]}, error=TypeError),
        refused("data must give one item after the other", Items, "abc", error=TypeError),
        refused("data must give one item after the other", Items, b"abc", error=TypeError),
        refused("data must be a list, a Dataset", Items, 3, error=TypeError),
        refused("DataLoader(..., shuffle=True)", Items, DataLoader(MapStyle()), shuffle=True),
        refused("list(data)", Items, Stream(), shuffle=True),
        refused("list(data)", Items, iter([1]), shuffle=True),
        refused("without data", Items, None, shuffle=True),
        refused("without data", Items, cycle=False),
        refused("cycle=True needs data", Items, iter([1]), cycle=True),
    ],
)
def test_data_that_cannot_be_given_out_as_asked_is_refused_at_once(call, error, text):
    check_refused(call, error, text)


def test_data_that_comes_only_once_is_not_cycled_without_end():
    spent = iter([1])
    items = Items(lambda: spent)
    take(items, 1)
    with pytest.raises(RuntimeError, match="no item in epoch 1"):
        next(items)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (range(5), range(6)),
        (range(5), iter(range(5))),
        (range(5), None),
        (DataLoader(MapStyle(5)), DataLoader(MapStyle(6))),
    ],
)
def test_the_state_of_other_data_is_refused(saved, other):
    state = Items(saved).state_dict()
    items = Items(other)
    before = items.state_dict()
    with pytest.raises(ValueError, match="state_dict must be of the same data"):
        items.load_state_dict(state)
    assert items.state_dict() == before
    with pytest.raises(ValueError, match=r"length 5.*length 6"):
        Items(range(6)).load_state_dict(Items(range(5)).state_dict())


def test_state_beyond_the_data_or_behind_an_iterator_is_refused():
    longer, shorter = (lambda: iter(range(9))), (lambda: iter(range(4)))
    items = Items(longer)
    take(items, 6)
    other = Items(shorter)
    take(other, 2)
    with pytest.raises(ValueError, match="ends after 4"):
        other.load_state_dict(items.state_dict())
    assert [value for _, value in take(other, 3)] == [2, 3, 0]
    ahead = Items(iter(range(9)))
    behind = ahead.state_dict()
    take(ahead, 3)
    with pytest.raises(ValueError, match="got 0 where 3 items were taken"):
        ahead.load_state_dict(behind)


def test_a_broken_item_is_named_and_not_skipped():
    items = Items(MapStyle(fails_at=2))
    take(items, 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"data\[2\] raised KeyError") as caught:
            next(items)
        assert isinstance(caught.value.__cause__, KeyError)
    assert items.state_dict()["following"] == 2

    def stream():
        yield 0
        raise OSError("unreachable")

    for data in (stream, stream(), DataLoader(MapStyle(fails_at=1))):
        items = Items(data)
        take(items, 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="item 1 of epoch 0"):
                next(items)


def test_a_ticket_is_done_or_put_back_once():
    items = Items(range(3))
    next(items)
    items.put_back(0)
    for method in (items.done, items.put_back):
        for ticket in (0, 1):
            with pytest.raises(ValueError, match="ticket must be"):
                method(ticket)
    next(items)
    items.done(0)
    with pytest.raises(ValueError, match="ticket must be"):
        items.done(0)


# The rows of a loader's batches


_LEAF = st.sampled_from(["int", "str", "float"])
_SHAPE = st.recursive(
    _LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
    ),
    max_leaves=6,
)


def fill(shape, number: int):
    """An item of the given shape."""
    if isinstance(shape, list):
        return [fill(each, 10 * number + i) for i, each in enumerate(shape)]
    if isinstance(shape, dict):
        return {key: fill(each, 10 * number + i) for i, (key, each) in enumerate(shape.items())}
    return {"int": number, "str": f"s{number}", "float": number / 2}[shape]


@examples(30, few=15)
@given(
    shape=st.fixed_dictionaries({"id": st.just("int"), "x": _SHAPE}),
    size=st.integers(1, 5),
    batch_size=st.integers(1, 3),
)
def test_batching_and_unbatching_changes_no_item(shape, size, batch_size):
    rows = [fill(shape, i + 1) for i in range(size)]
    items = Items(DataLoader(rows, batch_size=batch_size), cycle=False)
    assert [plain(value) for _, value in items] == rows


def test_columns_in_lists_are_rows_if_the_user_collated_them():
    def columns(batch):
        return {"ids": [item["id"] for item in batch], "half": [item["id"] / 2 for item in batch]}

    items = Items(DataLoader(MapStyle(3), batch_size=2, collate_fn=columns), cycle=False)
    assert [value for _, value in items] == [{"ids": i, "half": i / 2} for i in range(3)]


@pytest.mark.parametrize(
    ("collate", "match"),
    [
        (lambda batch: {"a": [1, 2, 3], "b": [1]}, "same length"),
        (lambda batch: tuple(batch), "tuple"),
        (lambda batch: 3, "has no rows"),
        (lambda batch: {"a": torch.tensor(1)}, r"batch\['a'\] is of type Tensor"),
        (lambda batch: "text", "has no rows"),
    ],
)
def test_batches_without_rows_are_refused(collate, match):
    items = Items(DataLoader(MapStyle(), batch_size=2, collate_fn=collate))
    with pytest.raises(RuntimeError, match=match):
        next(items)


def test_data_with_a_length_and_items_by_index_are_indexable_whatever_else_they_are():
    class Cursor:
        """Also an iterator over itself."""

        def __len__(self):
            return 5

        def __getitem__(self, k):
            return 10 * k

        def __iter__(self):
            return self

        def __next__(self):
            raise AssertionError("not to be read in order")

    items = Items(Cursor(), shuffle=True, cycle=False)
    assert sorted(item.value for item in items) == [0, 10, 20, 30, 40]
    assert items.state_dict()["data"]["kind"] == "by index"
