"""What is private to tensordict is as this package takes it to be."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    assert_close,
    tensorclass,
)

from torchrl_mt._hosts import tensordict as hosts

# ---- made without checks, and when they are read ------------------------------------------------


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_a_tensorclass_shares_its_entries_with_its_tensordict():
    pair = Pair(torch.zeros(3), torch.ones(3), batch_size=[3])
    data = hosts.tensordict_of(pair)
    assert isinstance(data, TensorDict)
    data["a"].fill_(5.0)
    assert pair.a.tolist() == [5.0] * 3


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_what_is_made_without_checks_is_as_what_is_made_with_them(device):
    values = {"a": torch.arange(3), "next": TensorDict({"b": torch.ones(3, 2)}, [3])}
    made = hosts.new_tensordict(dict(values), torch.Size([3]), device)
    known = TensorDict(values, [3], device=device)
    assert (made.batch_size, made.device) == (known.batch_size, known.device)
    assert_close(made, known)
    assert made["a"] is values["a"]
    nodes = [TensorDict({"a": torch.zeros(n)}, []) for n in (1, 3)]
    stack = hosts.new_stack(nodes, device)
    assert isinstance(stack, LazyStackedTensorDict)
    assert stack.batch_size == torch.Size([2])
    assert [len(a) for a in stack.get("a", as_list=True)] == [1, 3]


STACKS = {
    "nodes": (
        hosts.UnreadStack,
        LazyStackedTensorDict,
        lambda: [TensorDict({"a": torch.full((n,), 1.0)}, []) for n in (1, 3)],
    ),
    "objects": (hosts.UnreadObjects, NonTensorStack, lambda: [*map(NonTensorData, "xy")]),
}


def contents(stack):
    if isinstance(stack, NonTensorStack):
        return stack.tolist()
    return [node["a"].tolist() for node in stack.unbind(0)]


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize(
    "look",
    [
        lambda stack: stack,
        lambda stack: stack.clone(),
        lambda stack: pickle.loads(pickle.dumps(stack)),
        copy.deepcopy,
        lambda stack: stack[0:2],
        lambda stack: TensorDict({"x": stack}, [2]).get("x"),
    ],
)
def test_an_unread_stack_is_made_when_somebody_looks_into_it(kind, look):
    unread, host, make = STACKS[kind]
    calls = []

    def made():
        calls.append(None)
        return make()

    stack = unread.of("columns", torch.Size([2]), made)
    assert stack.batch_size == torch.Size([2])
    assert stack.is_unread
    assert stack.tree == "columns"
    assert not calls
    assert contents(look(stack)) == contents(host(*make()))
    assert len(calls) == 1
    assert type(stack) is host
