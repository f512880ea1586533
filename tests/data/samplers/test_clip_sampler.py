import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict import lazy_stack as stack
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.data import makers
from tests.data.handles import HANDLES
from tests.data.samplers.laws import chi_square, starts_drawn
from tests.refusals import check_refused, refused
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, PrioritizedClipSampler
from torchrl_mt.data._store.columns.columns import RecordColumn
from torchrl_mt.data._store.columns.rows import Windows


def buffer(cls=ReplayBuffer, max_steps=100, seed=0, **kwargs):
    return buffer_of(max_steps, ClipSampler(**kwargs), cls=cls, seed=seed)


MARKS = (("next", "done"), ("next", "terminated"), ("next", "truncated"), "is_init")


def marked(steps, spans):
    """Slow reference: the steps of clips of so many steps each, with the marks of clips."""
    steps = [step.clone() for step in steps]
    last = [k for span in spans for k in [*[False] * (span - 1), True]]
    first = [k for span in spans for k in [True, *[False] * (span - 1)]]
    for step, ends, begins in zip(steps, last, first, strict=True):
        flags = [step.get(key, None) for key in reversed(MARKS[:3])]
        stored = [flag for flag in flags if isinstance(flag, torch.Tensor)]
        none = torch.zeros_like(stored[0]) if stored else torch.zeros(1, dtype=torch.bool)
        truncated, terminated, done = (none if flag is None else flag for flag in flags)
        step["next", "truncated"] = torch.full_like(truncated, ends)
        step["next", "terminated"] = terminated.clone()
        step["next", "done"] = torch.ones_like(done) if ends else done.clone()
        if begins and "is_init" in step:
            step["is_init"] = torch.ones_like(step["is_init"])
    return steps


def spans_of(sample):
    """Steps of each clip of a flat sample, by the marks of their ends."""
    ends = sample["next", "truncated"].reshape(len(sample), -1).any(1).nonzero().flatten()
    return ends.diff(prepend=torch.tensor([-1])).tolist()


def joined(steps):
    """Slow reference: what consecutive steps become when taken as one."""
    if len(steps) == 1:
        return steps[0]
    out, last = steps[0].clone(), steps[-1]
    out["next"] = last["next"].clone()
    if "action" in out:
        actions = [step["action"] for step in steps]
        out["action"] = torch.cat(actions) if actions[0].ndim else torch.stack(actions)
    out["next", "reward"] = torch.stack([step["next", "reward"] for step in steps]).sum(0)
    for flag in ("done", "terminated", "truncated"):
        if ("next", flag) in out.keys(True):
            out["next", flag] = torch.stack([step["next", flag] for step in steps]).any(0)
    return out


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=15),
    slice_len=st.integers(1, 4),
    stride=st.integers(1, 4),
    form=st.sampled_from(["flat", "short", "clips"]),
    weighting=st.sampled_from(["clip", "episode"]),
    shape=st.sampled_from([(), (2,), (2, 3)]),
    turns=st.booleans(),
    by_number=st.booleans(),
)
def test_clips_are_those_sliced_from_the_stored_episodes(
    make, lengths, slice_len, stride, form, weighting, shape, turns, by_number
):
    torch.manual_seed(0)
    strict, layout = form != "short", "clips" if form == "clips" else "flat"
    options = {"num_slices": 5} if by_number else {"slice_len": slice_len}
    options |= {"stride": stride, "strict_length": strict, "weighting": weighting, "layout": layout}
    rb = buffer(max_steps=40, seed=slice_len, **options)
    for k, length in enumerate(lengths):
        data = (make.turns if turns else make.vectors)([length], seed=k, first_id=k)
        data["next", "reward"] = torch.randint(-9, 9, (length, 1)).float()
        if not turns:
            data["action"] = torch.randn(length, *shape)
            data["next", "terminated"] = torch.rand(length, 1) < 0.5
        rb.extend(data)
        clips = [max(held - slice_len * stride + 1, 0) for held in rb.storage.lengths.tolist()]
        if not strict:
            whole = rb.storage.lengths >= stride
            clips = [max(n, int(w)) for n, w in zip(clips, whole, strict=True)]
        assert rb.sampler._sampleable_count(rb.storage, 5 * slice_len) == sum(clips)
    episodes = list(rb.storage.episodes())
    least = slice_len * stride if strict else stride
    longest = max(len(episode) for episode in episodes)
    if longest < least:
        with pytest.raises(RuntimeError, match=f"{least} steps: the longest has {longest}"):
            rb.sample(5 * slice_len)
        assert not rb.can_sample(5 * slice_len)
        assert rb.sampler._sampleable_count(rb.storage, 5 * slice_len) == 0
        return
    assert rb.can_sample(5 * slice_len)
    sample, info = rb.sample(5 * slice_len, return_info=True)
    assert set(info) == {"index"}
    if layout == "clips":
        assert sample.batch_size == info["index"].shape == (5, slice_len)
    flat = sample.reshape(-1)
    index = rb.storage.places(info["index"]).flatten().tolist()
    ends = flat["next", "truncated"].flatten().tolist()
    place = [(e, t) for e, episode in enumerate(episodes) for t in range(len(episode))]
    expected, fresh, previous = [], True, 0
    for i, end in zip(index, ends, strict=True):
        e, t = place[i]
        length = len(episodes[e])
        if fresh:
            first, kept = (e, t), slice_len if strict else min(slice_len, length // stride)
            assert length >= slice_len * stride or t == 0
        else:
            assert (e, t) == (first[0], previous + stride)
        assert t + stride <= length
        assert end == (t == first[1] + (kept - 1) * stride)
        expected.append(joined([episodes[e][k] for k in range(t, t + stride)]))
        fresh, previous = end, t
    assert fresh
    assert sum(ends) == 5
    assert make.steps(flat) == make.steps(stack(marked(expected, spans_of(flat))))


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_selector_chooses(make, layout, stride):
    calls = []

    def selector(step, storage, num_slices, span):
        calls.append((step, storage, num_slices, span))
        return torch.arange(step * num_slices, (step + 1) * num_slices) % storage.num_clips(span)

    rb = buffer(max_steps=30, slice_len=2, stride=stride, selector=selector, layout=layout)
    rb.extend(make.vectors([9, 8]))
    rb.extend(make.vectors([9, 3, 4], seed=1, first_id=2))
    span, starts, first = 2 * stride, [], 0
    for length in rb.storage.lengths.tolist():
        starts += range(first, first + max(length - span + 1, 0))
        first += length
    assert len(starts) == rb.storage.num_clips(span)
    for step in range(4):
        _, info = rb.sample(10, return_info=True)
        assert calls.pop() == (step, rb.storage, 5, span)
        chosen = [starts[(step * 5 + k) % len(starts)] for k in range(5)]
        places = rb.storage.places(info["index"]).reshape(5, 2)
        assert places.tolist() == [[i, i + stride] for i in chosen]
    state = rb.sampler.state_dict()
    other = ClipSampler(slice_len=2, stride=stride, selector=selector)
    other.load_state_dict(state)
    other.sample(rb.storage, 10)
    assert calls.pop()[0] == 4


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("flags", [{"done": torch.arange(4) == 3}, {}])
def test_marks_that_are_not_stored_are_in_the_sample(make, cls, layout, flags):
    rb = buffer(cls, slice_len=2, layout=layout)
    data = TensorDict({"step": torch.arange(4), **({"next": flags} if flags else {})}, [4])
    rb.storage.append(data)
    sample = rb.sample(6)
    assert set(sample["next"].keys()) == {"done", "terminated", "truncated"}
    assert "is_init" not in sample
    clips = sample.reshape(3, 2)
    for name in ("done", "terminated", "truncated"):
        assert clips["next", name].dtype == torch.bool
        assert clips["next", name].shape == ((3, 2) if flags else (3, 2, 1))
    assert clips["next", "truncated"].view(3, 2).tolist() == [[False, True]] * 3
    assert not clips["next", "terminated"].any()
    assert make.steps(rb[:]) == make.steps(data)  # What is stored has no marks.


def test_marks_can_be_switched_off(make):
    rb = buffer(slice_len=2, truncated_key=None, init_key=None)
    data = make.vectors([5])
    rb.extend(data)
    sample, info = rb.sample(4, return_info=True)
    assert set(info) == {"index"}
    assert make.steps(sample) == make.steps(data[rb.storage.places(info["index"])])


def test_marks_go_where_they_are_asked_for(make):
    rb = buffer(slice_len=2, truncated_key=("next", "agent", "truncated"), init_key="begins")
    data = make.vectors([5])
    data["begins"] = torch.zeros(5, 1, dtype=torch.bool)
    rb.extend(data)
    sample, info = rb.sample(4, return_info=True)
    places = rb.storage.places(info["index"])
    for key in (*MARKS[:3], "is_init"):
        assert torch.equal(sample[key], data[key][places])
    assert sample["begins"].flatten().tolist() == [True, False] * 2
    ends = sample["next", "agent"]
    assert set(ends.keys()) == {"truncated", "terminated", "done"}
    assert ends["truncated"].flatten().tolist() == [False, True] * 2
    assert torch.equal(ends["done"], ends["truncated"])


@pytest.mark.parametrize("weighting", ["clip", "episode"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_clips_are_drawn_uniformly(make, weighting, strict, stride):
    lengths, span = [3, 4, 5, 1, 9, 2], 4
    slice_len = span // stride
    options = {"stride": stride, "weighting": weighting, "strict_length": strict}
    rb = buffer(max_steps=sum(lengths), slice_len=slice_len, seed=1, **options)
    rb.extend(make.vectors([7] * 12))
    rb.extend(make.vectors([*lengths], seed=1))
    assert rb.storage.lengths.tolist() == lengths
    law = {}
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    for first, length in zip(starts.tolist(), lengths, strict=True):
        clips = length - span + 1 if strict else max(length - span + 1, int(length >= stride))
        for k in range(max(clips, 0)):
            law[first + k] = 1.0 if weighting == "clip" else 1.0 / clips
    # The 0.9999 quantile of chi-square with 11 degrees of freedom is 37.4.
    assert chi_square(starts_drawn(rb, slice_len), law) < 37.4


def test_each_record_is_gathered_once(make, monkeypatch):
    """Of the private columns: no sample tells how often memory was read for it."""
    rb = buffer(TensorDictReplayBuffer, slice_len=3)
    data = make.vectors([9, 9])
    data["image"] = torch.randn(18, 200)
    rb.extend(data)
    reads, read = [], Windows.read

    def noted(self, plan, shift=0):
        reads.append((id(self), shift, plan.span))
        return read(self, plan, shift)

    monkeypatch.setattr(Windows, "read", noted)
    rb.sample(30)
    assert len(set(reads)) == len(reads)
    assert {span for _, _, span in reads} == {3}
    # The small entries of a dtype together, once more for those that are read a step later.
    columns = rb.storage._store.columns
    records = {path: c.record for path, c in columns.items() if isinstance(c, RecordColumn)}
    assert ("image",) not in records
    held = {id(record) for record in records.values()}
    later = {id(records[key[1:]]) for key in rb.storage.shared_keys}
    assert len(later) == 2
    assert len(held) < len(records)
    assert len(reads) == len(held) + len(later) + 1


def test_an_index_that_was_changed_is_read_as_it_is_now(make):
    rb = buffer(slice_len=3)
    rb.extend(make.vectors([9, 9]))
    stored = make.steps(rb[:])
    for given_ in (2, HANDLES + 2, torch.tensor([5, 0, 1, 17, 0, 5])):
        index, _ = rb.sampler.sample(rb.storage, 6)
        index.copy_(given_) if isinstance(given_, torch.Tensor) else index.fill_(given_)
        meant = (index % HANDLES).tolist()
        assert make.steps(rb.storage.get(index)) == [stored[i] for i in meant]


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("how", ["write", "load"])
def test_a_selection_outlives_what_follows_and_is_read_once(make, how, stride, layout):
    reads = []
    for follows in (False, True):
        rb = buffer(max_steps=10, slice_len=3, stride=stride, layout=layout)
        rb.extend(make.vectors([9]))
        index, _ = rb.sampler.sample(rb.storage, 6)
        if follows and how == "write":
            rb.extend(make.vectors([9], seed=1, first_id=1))
        elif follows:
            other = EpisodeStorage(10)
            other.append(make.vectors([9], seed=1))
            rb.storage.load_state_dict(other.state_dict())
            assert make.steps(rb[:]) == make.steps(other[:])
        reads.append(rb.storage.get(index))
    assert reads[0].batch_size == reads[1].batch_size == index.shape
    assert make.steps(reads[0].reshape(-1)) == make.steps(reads[1].reshape(-1))
    with pytest.raises(IndexError, match="not stored"):  # by now
        rb.storage.get(index)


def test_few_selections_are_kept_that_are_not_read(make):
    rb = buffer(slice_len=3)
    rb.extend(make.vectors([9]))
    indices = [rb.sampler.sample(rb.storage, 6)[0] for _ in range(50)]
    assert len(rb.storage._selections) <= 8
    for index in indices:
        assert make.steps(rb.storage.get(index)) == make.steps(rb.storage.get(index))


OPTIONS = [
    {},
    {"stride": 2},
    {"strict_length": False, "pad_output": True},
    {"span": True, "pad_output": True, "burn_in": 1},
    {"truncated_key": None, "init_key": "begins"},
]


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_index_is_read_the_same_twice_copied_and_sent(make, layout, options, tmp_path):
    rb = buffer(slice_len=3, layout=layout, **options)
    data = make.vectors([2, 9, 7])
    data["begins"] = torch.zeros(18, dtype=torch.uint8)
    rb.extend(data)
    for _ in range(5):
        index, _ = rb.sampler.sample(rb.storage, 12)
        again, sent = index.clone(), pickle.loads(pickle.dumps(index))
        first = rb.storage.get(index)
        assert first.batch_size == index.shape
        steps = make.steps(first.reshape(-1))
        for each in (index, again, sent, index.numpy(), index.tolist()):
            assert make.steps(rb.storage.get(each).reshape(-1)) == steps
        flat = index.flatten()
        some = torch.randperm(len(flat))
        assert make.steps(rb.storage.get(flat[some])) == [steps[i] for i in some.tolist()]
        assert make.steps(rb.storage.get(int(flat[-1]))[None]) == steps[-1:]
        others = [pickle.loads(pickle.dumps(rb.storage)), EpisodeStorage(100), EpisodeStorage(100)]
        others[1].load_state_dict(rb.storage.state_dict())
        rb.storage.dumps(tmp_path)
        others[2].loads(tmp_path)
        for other in others:
            assert make.steps(other.get(index).reshape(-1)) == steps


def test_samples_of_different_marks_are_not_read_together(make):
    rb = buffer(slice_len=3)
    rb.extend(make.vectors([9]))
    before = rb.storage.state_dict()
    index, _ = rb.sampler.sample(rb.storage, 6)
    unaware = EpisodeStorage(100)
    unaware.load_state_dict(before)
    with pytest.raises(IndexError, match="a sample of another storage"):
        unaware.get(index)
    other, _ = ClipSampler(slice_len=2, stride=2).sample(rb.storage, 4)
    both = torch.cat([index, other])
    with pytest.raises(IndexError, match="samples with different marks"):
        rb.storage.get(both)
    assert rb.storage.get(rb.storage.places(both)).batch_size == (10,)
    rb.extend(make.vectors([70]))
    for stride in range(3, 64):
        ClipSampler(slice_len=1, stride=stride).sample(rb.storage, 1)
    with pytest.raises(RuntimeError, match="mark clips in 63 ways"):
        ClipSampler(slice_len=1, stride=64).sample(rb.storage, 1)


def ragged(batch_size, selector=None, **kwargs):
    """Sample turns with actions of several lengths."""
    rb, data = buffer(selector=selector, **kwargs), makers.turns([9])
    for k, step in enumerate(data.tensordicts):
        step["action"] = torch.arange(k)
    rb.extend(data)
    return rb.sample(batch_size)


def chosen(clips):
    """Sample what a selector gives."""
    return ragged(6, lambda *_: clips, slice_len=3)


ONE_OF_TWO = "exactly one of slice_len and num_slices"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused(ONE_OF_TWO, ClipSampler, error=TypeError),
        refused(ONE_OF_TWO, ClipSampler, slice_len=2, num_slices=2, error=TypeError),
        refused("slice_len must be a positive integer, got 0", ClipSampler, slice_len=0),
        refused("weighting must be", ClipSampler, slice_len=2, weighting="x"),
        refused("layout must be", ClipSampler, slice_len=2, layout="x"),
        refused(
            "selector must be …, got int", ClipSampler, slice_len=2, selector=3, error=TypeError
        ),
        *(
            refused(f"stride must be …, got {bad}", ClipSampler, slice_len=2, stride=bad)
            for bad in (0, 1.5, True)
        ),
        *(
            refused("of full length", ClipSampler, slice_len=2, selector=print, **more)
            for more in ({"strict_length": False}, {"weighting": "episode"})
        ),
        refused("'action' … got a ragged entry: use stride=1", ragged, 4, slice_len=2, stride=2),
        refused("tensor or array of integers, got list", chosen, [0, 1], error=TypeError),
        refused("integers of shape (2,), got torch.float32", chosen, torch.tensor([0.0, 1.0])),
        refused("got torch.float64", chosen, np.array([0.0, 1.0])),
        refused("in [0, 7)… 3 steps … 0 to 7", chosen, torch.tensor([0, 7], dtype=torch.int32)),
        refused("in [0, 7)… 3 steps … -1 to 0", chosen, np.array([-1, 0], dtype=np.int16)),
        refused("got torch.bool", chosen, torch.tensor([True, False])),
        refused("shape (2,), got torch.int64 and (1,)", chosen, torch.tensor([0])),
        refused("got torch.int64 and (2, 1)", chosen, torch.tensor([[0], [1]])),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize(
    "clips", [torch.tensor([4, 0], dtype=torch.int32), np.array([4, 0]), np.uint8([4, 0])]
)
def test_a_selector_may_give_any_integers(clips):
    found = chosen(clips).get("action", as_list=True)
    assert [len(each) for each in found] == [4, 5, 6, 0, 1, 2]


@pytest.mark.parametrize("sampler", [ClipSampler, PrioritizedClipSampler])
@pytest.mark.parametrize("own", [True, False])
def test_the_generator_decides(make, sampler, own):
    """The buffer's, or the global one of a buffer that has none."""
    draws = []
    for seed in (0, 0, 1):
        rb = buffer_of(100, sampler(slice_len=2), seed=seed if own else None)
        rb.extend(make.vectors([9, 9]))
        torch.manual_seed(len(draws) if own else seed)
        draws.append(rb.sample(40, return_info=True)[1]["index"].tolist())
    assert draws[0] == draws[1] != draws[2]


ENDS = torch.arange(6) == 5
NEVER = torch.zeros(6, dtype=torch.bool)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        {"terminated": NEVER, "truncated": ENDS},
        {"done": ENDS[:, None], "truncated": ENDS},
        {"done": ENDS, "truncated": ENDS[:, None].to(torch.uint8)},
        {"done": ENDS.float(), "terminated": NEVER.int()[:, None]},
        {"done": ENDS[:, None, None].repeat(1, 2, 1), "truncated": NEVER[:, None]},
    ],
)
def test_flags_keep_the_shape_and_dtype_that_they_are_stored_with(cls, stride, flags):
    rb = buffer(cls, slice_len=2, stride=stride)
    rb.extend(TensorDict({"next": flags}, [6]))
    sample, info = rb.sample(8, return_info=True)
    assert set(info) == {"index"}
    like = next(flags[n] for n in ("truncated", "terminated", "done") if n in flags)
    for name in ("done", "terminated", "truncated"):
        flag, stored = sample["next", name], flags.get(name, like)
        assert (flag.dtype, flag.shape[1:]) == (stored.dtype, stored.shape[1:])
        if name != "terminated":
            assert flag[1::2].bool().all()
    assert not sample["next", "truncated"][::2].any()
