import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data.llm import History

from torchrl_mt.data._store.steps import Rows, Steps, pack, unpack


class Pair(TensorClass):
    a: torch.Tensor
    b: str | None = None


def test_vectors_and_turns_come_back(make):
    for data in (make.vectors([3, 2]), make.turns([3, 2])):
        assert make.steps(pack(unpack(data))) == make.steps(data)


def test_variable_lengths_are_read_as_lists(make):
    data = make.turns([3, 2])
    rows = TensorDict({"x": torch.zeros(5), "tokens": data.get("tokens")}, [5])
    for form in (data, rows):
        back = pack(unpack(form))
        prompts = back.get(("tokens", "prompt"), as_list=True)
        expected = data.get(("tokens", "prompt"), as_list=True)
        assert all(torch.equal(a, b) for a, b in zip(prompts, expected, strict=True))
    assert type(back) is TensorDict
    assert isinstance(back.get("tokens"), make.lazy)


def test_nodes_come_back_with_the_batch_size_of_the_steps():
    agents = TensorDict({"x": torch.arange(6).view(3, 2)}, [3, 2])
    data = TensorDict({"agents": agents, "none": TensorDict({}, [3])}, [3])
    back = pack(unpack(data))
    assert torch.equal(back["agents", "x"], data["agents", "x"])
    assert back["agents"].batch_size == (3,)
    assert set(back.keys()) == {"agents"}


def test_tensorclasses_keep_their_class():
    back = pack(unpack(Pair(a=torch.zeros(3, 2), b="x", batch_size=[3])))
    assert isinstance(back, Pair)
    assert back[1].b == "x"
    inner = lazy_stack([TensorDict({"p": Pair(a=torch.ones(i), batch_size=[])}) for i in range(3)])
    back = pack(unpack(inner))
    assert isinstance(back[2].get("p"), Pair)
    assert [a.tolist() for a in back.get(("p", "a"), as_list=True)] == [[], [1.0], [1.0, 1.0]]


def test_histories_of_any_length_come_back():
    histories = [
        History(role=["user"] * k, content=[f"{k}.{j}" for j in range(k)], batch_size=[k])
        for k in (1, 3)
    ]
    data = lazy_stack([TensorDict({"history": history}) for history in histories])
    back = pack(unpack(data))
    for step, history in zip(back.unbind(0), histories, strict=True):
        assert step.get("history").content == history.content


def test_one_object_for_all_steps_is_an_object_per_step():
    steps = unpack(TensorDict({"x": torch.zeros(2), "t": NonTensorData("a", batch_size=[2])}, [2]))
    assert steps.columns[("t",)].items == ["a", "a"]


def test_concat_refuses_what_does_not_fit():
    a = unpack(TensorDict({"x": torch.zeros(2, 3)}, [2]))
    with pytest.raises(ValueError, match="same keys"):
        Steps.concat([a, unpack(TensorDict({"y": torch.zeros(2, 3)}, [2]))])
    with pytest.raises(ValueError, match=r"^'x' must keep its shape"):
        Steps.concat([a, unpack(TensorDict({"x": torch.zeros(2, 4)}, [2]))])


def test_a_key_in_some_steps_only_is_refused():
    data = lazy_stack(
        [TensorDict({"x": torch.zeros(2), "why": "end"}), TensorDict({"x": torch.zeros(2)})]
    )
    with pytest.raises(ValueError, match=r"why.*in some steps only"):
        unpack(data)


def test_only_tensor_collections_are_taken():
    with pytest.raises(TypeError, match="must be a TensorDict"):
        unpack({"x": torch.zeros(2)})


def test_threads_may_read_one_unread_batch_at_once(make):
    data = make.turns([3, 2])
    expected = make.steps(data)
    reads = [make.steps, unpack, lambda batch: make.steps(batch.clone())]
    number = 6
    start = threading.Barrier(number, timeout=60)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(number) as threads:
            for _ in range(40):
                batch = pack(unpack(data), unread=True)

                def read(i, batch=batch):
                    start.wait()
                    return reads[i % len(reads)](batch)

                for i, got in enumerate(threads.map(read, range(number))):
                    assert (make.steps(pack(got)) if i % len(reads) == 1 else got) == expected
    finally:
        sys.setswitchinterval(interval)


def test_a_ragged_column_goes_to_another_device_in_one_copy(make):
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
    assert all(item.is_meta for column in moved.columns.values() for item in column.items)
    mixed = Steps(2, {("a",): Rows([torch.zeros(1), torch.zeros(1).long()])})
    kinds = [item.dtype for item in mixed.on(torch.device("meta")).columns["a",].items]
    assert kinds == [torch.float32, torch.int64]
