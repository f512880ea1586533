"""Nodes and objects of every form are stored, and read as they were written."""

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict, lazy_stack
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_mt.data import EpisodeStorage
from torchrl_mt.data._store.steps import Rows, Steps


class Pair(TensorClass):
    a: torch.Tensor
    b: str | None = None


def stored(data):
    storage = EpisodeStorage(20)
    storage.append(data)
    return storage[:]


def test_nodes_have_the_batch_size_of_the_steps():
    agents = TensorDict({"x": torch.arange(6).view(3, 2)}, [3, 2])
    text = NonTensorData("a", batch_size=[3])
    back = stored(TensorDict({"agents": agents, "none": TensorDict({}, [3]), "text": text}, [3]))
    assert torch.equal(back["agents", "x"], agents["x"])
    assert back["agents"].batch_size == (3,)
    assert set(back.keys()) == {"agents", "text"}
    assert list(back["text"]) == ["a"] * 3


def test_tensorclasses_keep_their_class():
    back = stored(Pair(a=torch.zeros(3, 2), b="x", batch_size=[3]))
    assert isinstance(back, Pair)
    assert back[1].b == "x"
    rows = [TensorDict({"p": Pair(a=torch.ones(i), batch_size=[])}) for i in range(3)]
    back = stored(lazy_stack(rows))
    assert isinstance(back[2].get("p"), Pair)
    assert [a.tolist() for a in back.get(("p", "a"), as_list=True)] == [[], [1.0], [1.0, 1.0]]


def test_variable_lengths_are_rows_of_a_dense_batch(make):
    data = make.turns([3, 2])
    back = stored(TensorDict({"x": torch.zeros(5), "tokens": data.get("tokens")}, [5]))
    assert type(back) is TensorDict
    assert isinstance(back.get("tokens"), LazyStackedTensorDict)
    assert make.steps(back.get("tokens")) == make.steps(data.get("tokens"))


def test_a_ragged_column_goes_to_another_device_in_one_copy():
    """Of the private steps: copies cannot be counted behind a storage, which needs a real device."""

    class Copies(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func is torch.ops.aten._to_copy.default
            return func(*args, **(kwargs or {}))

    items = [torch.rand(n, 2, m) for n, m in ((1, 2), (0, 4), (3, 1))]
    columns = {("a",): Rows([torch.arange(n) for n in (3, 0, 2)]), ("b",): Rows(items)}
    with Copies() as copies:
        moved = Steps(3, columns).on(torch.device("meta"))
    assert copies.number == 2
    assert [item.shape for item in moved.columns["b",].items] == [item.shape for item in items]
    mixed = Steps(2, {("a",): Rows([torch.zeros(1), torch.zeros(1).long()])})
    kinds = [item.dtype for item in mixed.on(torch.device("meta")).columns["a",].items]
    assert kinds == [torch.float32, torch.int64]
