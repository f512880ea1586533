"""A writer's transform works on a copy: linear in memory, and apart from what the caller holds."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, lazy_stack

from tests.buffers import buffer_of
from tests.data.conversations import PROMPT, RESPONSE, conversations, listed, play, turns_of
from tests.tiers import examples
from torchrl_mt.data import EpisodeWriter


def buffer(transform, max_steps=100):
    return buffer_of(max_steps, writer=EpisodeWriter(transform=transform))


def views(prompts):
    """The prompts as a collector gives them: those that extend each other are views of one tensor."""
    out = list(prompts)
    for t in range(len(prompts) - 2, -1, -1):
        after = out[t + 1]
        if len(after) >= len(prompts[t]) and torch.equal(after[: len(prompts[t])], prompts[t]):
            out[t] = after[: len(prompts[t])]
    return out


def entries(episode, responses):
    return {
        "log_probs": lambda t: {"response": torch.rand(len(responses[t]))},
        "image": lambda t: {"pixels": torch.rand(2, 1 + t % 2)},
        "episode": lambda _: torch.tensor(episode),
        "label": lambda t: torch.tensor(float(t)),
    }


def batch(talks, as_views):
    """Whole episodes, one after the other, with entries of every kind."""
    steps = []
    for e, (prompts, responses) in enumerate(map(play, talks)):
        given = views(prompts) if as_views else prompts
        steps.extend(turns_of(given, responses, **entries(e, responses)))
    ragged = lazy_stack(steps)
    data = ragged.exclude("tokens", "log_probs", "image").contiguous()
    for name in ("tokens", "log_probs", "image"):
        data[name] = ragged.get(name)
    data["text"] = NonTensorStack(*(f"{k}." for k in range(len(steps))))
    data["next", "info"] = NonTensorStack(*[{"t": k} for k in range(len(steps))])
    return data


def tensors(data):
    for key in list(data.keys(True, True)):
        found = data.get(key, as_list=True)
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, list):
            yield from (item for item in found if isinstance(item, torch.Tensor))


def values(data):
    """All that a batch holds, in a form that compares."""
    ragged = PROMPT, RESPONSE, ("log_probs", "response"), ("image", "pixels")
    return {
        "ragged": [listed(data, key) for key in ragged],
        "dense": [data[key].tolist() for key in ("episode", "label", ("next", "done"))],
        "objects": [list(data["text"]), list(data["next", "info"])],
    }


def ruin(data):
    """Change in place whatever can be."""
    for tensor in tensors(data):
        tensor.fill_(1)
    for node in data["tokens"].unbind(0):
        node["prompt"] = torch.zeros(3)
    data.get("text").tensordicts[0].data = "gone"
    data.set_at_("text", "gone", len(data) - 1)
    del data["log_probs"]
    data["next", "info"] = NonTensorStack(*["gone"] * len(data))


@examples()
@given(st.lists(conversations, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_no_transform_changes_what_the_caller_holds(talks, as_views, many):
    class Ruin:
        takes_many_episodes = many

        def __call__(self, episodes):
            copied = episodes.clone()
            ruin(episodes)
            return copied

    data = batch(talks, as_views)
    before, rb = values(data), buffer(Ruin())
    rb.extend(data)
    assert values(data) == before
    assert values(rb[:]) == before


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_memory_is_of_what_is_new_in_each_turn(as_views, many):
    turns, new, episodes = 64, 10, 3
    ends = list(accumulate([2 * new] * turns))
    line = torch.arange(ends[-1])
    prompts = [line[: end - new] for end in ends]
    responses = [line[end - new : end] for end in ends]
    talk = turns_of(prompts if as_views else [p.clone() for p in prompts], responses)
    held = {}

    class Look:
        takes_many_episodes = many

        def __call__(self, given):
            for tensor in tensors(given):
                memory = tensor.untyped_storage()
                held[memory.data_ptr()] = memory.nbytes()
            kept.append(given)
            return given

    kept = []
    buffer(Look(), 1000).extend(lazy_stack([*talk] * episodes))
    # A line of prompts and responses, and the responses once more; a line of its own for each prompt
    # would take 64 times as much.
    assert sum(held.values()) <= 2.5 * episodes * ends[-1] * 8 + 1000


OPERATIONS = [
    lambda td: td,
    copy.deepcopy,
    copy.copy,
    lambda td: td.clone(),
    lambda td: td.to("cpu"),
    lambda td: pickle.loads(pickle.dumps(td)),
    lambda td: torch.cat([td[:1], td[1:]]),
    lambda td: td[torch.arange(len(td))],
    lambda td: lazy_stack(list(td.unbind(0))),
    lambda td: td.lock_(),
    lambda td: td.exclude("label").update(td.select("label")),
    lambda td: td.rename_key_("tokens", "words").rename_key_("words", "tokens"),
]


@pytest.mark.parametrize("how", OPERATIONS)
@examples(15)
@given(
    talks=st.lists(conversations, min_size=1, max_size=3),
    reads=st.sets(st.sampled_from(["tokens", "log_probs", "image", "text", "next"])),
)
def test_a_transform_may_read_and_copy_what_it_is_given(how, talks, reads):
    data = batch(talks, True)
    before = values(data)

    def transform(given):
        for name in reads:
            list(given[name])
            if isinstance(given.get(name), LazyStackedTensorDict):
                assert len(given.get(name).tensordicts) == len(given)
        assert given.batch_size == data.batch_size
        out = how(given)
        assert values(out) == before
        return out

    transform.takes_many_episodes = True
    rb = buffer(transform)
    rb.extend(data)
    assert values(rb[:]) == before


def test_threads_of_a_transform_may_read_at_once(make):
    data = make.turns([3, 2])
    expected = make.steps(data)
    reads = [make.steps, lambda batch: make.steps(batch.clone())]
    start = threading.Barrier(6, timeout=60)

    def transform(given):
        def read(i):
            start.wait()
            return reads[i % 2](given)

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(read, range(6))) == [expected] * 6
        return given

    transform.takes_many_episodes = True
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            buffer(transform).extend(data)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("read", [False, True])
def test_steps_that_come_as_one_lazy_stack(read):
    """The whole is then put together when it is first read."""
    talk = [([1], [2], "extend", 0), ([0], [2, 1], "extend", 0), ([1, 1], [2], "cut", 2)]
    prompts, responses = play(talk)
    steps = turns_of(prompts, responses, prompt=prompts.__getitem__, text=str)

    def look(given):
        if read:
            assert listed(given, PROMPT) == listed(steps, PROMPT)
            given[0]["prompt"].fill_(9)
        return given

    rb = buffer(look)
    rb.extend(steps)
    assert listed(rb[:], PROMPT) == listed(steps, PROMPT)
    assert list(rb[:]["text"]) == ["0", "1", "2"]
    assert listed(rb[:], "prompt")[0] == ([9] if read else [1])
    assert prompts[0].tolist() == [1]
