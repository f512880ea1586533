"""What is private to tensordict is as this package takes it to be."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from torchrl_mt._hosts import tensordict as hosts
from torchrl_mt.data._store.steps import Objects, Rows, Steps, pack

# ---- made without checks, and when they are read ------------------------------------------------


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
        return [node.tolist() for node in stack.unbind(0)]
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
    assert hosts.unread_tree(stack) == "columns"
    assert not calls
    assert contents(look(stack)) == contents(host(*make()))
    assert len(calls) == 1
    assert type(stack) is host
    assert hosts.unread_tree(stack) is None


def test_lists_of_what_is_in_a_stack_leave_it_unread():
    steps = Steps(2, {("t", "a"): Rows([torch.ones(1), torch.ones(3)]), ("o",): Objects(["x", {}])})
    data = pack(steps, unread=True)
    assert [len(a) for a in data.get(("t", "a"), as_list=True)] == [1, 3]
    assert data.get(("t", "b"), "none", as_list=True) == "none"
    data = pack(steps, unread=True)
    assert [len(a) for a in data.get(("t", "a"), as_list=True)] == [1, 3]
    assert data.get("o").tolist() == ["x", {}]
    assert hosts.unread_tree(data.get("t")) is not None
    assert hosts.unread_tree(data.get("o")) is not None
    assert data.get("o").tolist(as_linked_list=True) == ["x", {}]
    assert hosts.unread_tree(data.get("o")) is None


@pytest.mark.parametrize("kind", STACKS)
def test_threads_that_look_into_an_unread_stack_at_once_see_the_same_elements(kind):
    unread, host, make = STACKS[kind]
    both = threading.Barrier(2, timeout=30)

    def made():
        both.wait()  # Both threads found the stack unread.
        return make()

    stack = unread.of("columns", torch.Size([2]), made)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: stack.tensordicts, range(2))
    assert first is second
    assert contents(stack) == contents(host(*make()))
    assert type(stack) is host


@pytest.mark.parametrize("kind", STACKS)
def test_an_unread_stack_is_whole_at_every_switch_between_threads(kind):
    """Another reader comes between any two instructions of the first one's reading."""
    unread, host, make = STACKS[kind]
    expected = contents(host(*make()))
    looks = [
        contents,
        hosts.unread_tree,
        lambda stack: stack.clone(),
        lambda stack: pickle.loads(pickle.dumps(stack)),
    ]
    for first, second in itertools.product(looks, looks):
        at, stopped = 0, True
        while stopped:
            at += 1
            stack = unread.of("columns", torch.Size([2]), make)
            stopped = interrupted_at(at, partial(first, stack), partial(second, stack))
            assert contents(stack) == expected
        assert at > 20


def interrupted_at(number, first, second):
    """Call ``second`` before an instruction that ``first`` runs there; False if it runs fewer."""
    left = number

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != hosts.__file__:
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                second()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        first()
    finally:
        sys.settrace(before)
    return left <= 0
