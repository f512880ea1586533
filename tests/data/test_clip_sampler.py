import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.data.columns import DenseColumn


def buffer(cls=ReplayBuffer, max_steps=100, seed=0, prefetch=None, batch_size=None, **kwargs):
    return cls(
        storage=EpisodeStorage(max_steps),
        writer=EpisodeWriter(),
        sampler=ClipSampler(**kwargs),
        generator=torch.Generator().manual_seed(seed),
        batch_size=batch_size,
        prefetch=prefetch,
    )


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    span=st.integers(1, 9),
    strict=st.booleans(),
    weighting=st.sampled_from(["clip", "episode"]),
    turns=st.booleans(),
)
def test_clips_are_runs_of_one_episode(make, lengths, span, strict, weighting, turns):
    rb = buffer(max_steps=40, slice_len=span, strict_length=strict, weighting=weighting, seed=span)
    maker = make.turns if turns else make.vectors
    for k, length in enumerate(lengths):
        rb.extend(maker([length], seed=k, first_id=k))
    kept = rb.storage.lengths
    if strict and int(kept.max()) < span:
        with pytest.raises(RuntimeError, match=f"{span} steps: the longest has {int(kept.max())}"):
            rb.sample(5 * span)
        assert not rb.can_sample(5 * span)
        return
    assert rb.can_sample(5 * span)
    sample, info = rb.sample(5 * span, return_info=True)
    index = info["index"].tolist()
    stored = make.steps(rb[:])
    assert make.steps(sample) == [stored[i] for i in index]
    ends = info["next", "truncated"].squeeze(-1)
    starts = [*ends.roll(1).nonzero().squeeze(1).tolist(), len(index)]
    starts[0] = 0
    of = torch.repeat_interleave(torch.arange(len(kept)), kept)
    for start, stop in pairwise(starts):
        clip = index[start:stop]
        assert clip == list(range(clip[0], clip[0] + len(clip)))
        assert len({int(of[i]) for i in clip}) == 1
        assert len(clip) == (span if strict else min(span, int(kept[of[clip[0]]])))
    assert len(starts) == 6


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("form", [{"slice_len": 4}, {"num_slices": 5}])
def test_marks_are_those_of_slice_sampler(make, cls, form):
    data = make.vectors([6, 9, 5])
    ours = buffer(cls, **form)
    theirs = cls(storage=LazyTensorStorage(100), sampler=SliceSampler(**form))
    ours.extend(data.clone())
    theirs.extend(data.clone())
    (a, info_a), (b, info_b) = (rb.sample(20, return_info=True) for rb in (ours, theirs))
    assert info_a.keys() == info_b.keys()
    assert a.batch_size == b.batch_size
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in info_a.keys() - {"index"}:
        assert info_a[key].shape == info_b[key].shape
        assert info_a[key].dtype == info_b[key].dtype
    stored, index = ours[:], info_a["index"]
    ends = torch.arange(20) % 4 == 3
    assert torch.equal(info_a["next", "truncated"].squeeze(-1), ends)
    done = stored["next", "done"][index].squeeze(-1)
    assert torch.equal(info_a["next", "done"].squeeze(-1), ends | done)
    assert torch.equal(info_a["next", "terminated"], stored["next", "terminated"][index])
    starts = torch.arange(20) % 4 == 0
    assert torch.equal(info_a["is_init"].squeeze(-1), starts | stored["is_init"][index].squeeze(-1))
    if cls is TensorDictReplayBuffer:
        assert torch.equal(a["next", "truncated"], info_a["next", "truncated"])
        assert torch.equal(a["is_init"], info_a["is_init"])


def test_marks_take_the_shape_of_the_done_flag():
    for done in (torch.tensor([0, 0, 1, 0, 1]) > 0, torch.ones(5, 2, 1) > 0):
        rb = buffer(TensorDictReplayBuffer, slice_len=2)
        if done.ndim > 1:
            done = done & (torch.arange(5) == 4)[:, None, None]
        rb.extend(TensorDict({"next": {"done": done}}, [5]))
        sample = rb.sample(6)
        for flag in ("done", "truncated", "terminated"):
            assert sample["next", flag].shape == (6, *done.shape[1:])
        assert sample["next", "truncated"].reshape(3, 2, -1).any(-1).tolist() == [[False, True]] * 3


def test_marks_can_be_switched_off(make):
    rb = buffer(slice_len=2, truncated_key=None, init_key=None)
    rb.extend(make.vectors([5]))
    _, info = rb.sample(4, return_info=True)
    assert set(info) == {"index"}


@pytest.mark.parametrize("weighting", ["clip", "episode"])
@pytest.mark.parametrize("strict", [True, False])
def test_clips_are_drawn_uniformly(make, weighting, strict):
    lengths, span = [3, 4, 5, 9, 2], 4
    rb = buffer(
        max_steps=sum(lengths), slice_len=span, weighting=weighting, strict_length=strict, seed=1
    )
    rb.extend(make.vectors([7] * 12))
    rb.extend(make.vectors([*lengths], seed=1))
    assert rb.storage.lengths.tolist() == lengths
    law = {}
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    for first, length in zip(starts.tolist(), lengths, strict=True):
        clips = length - span + 1 if strict else max(length - span + 1, 1)
        for k in range(max(clips, 0)):
            law[first + k] = 1.0 if weighting == "clip" else 1.0 / clips
    counts, draws = dict.fromkeys(law, 0), 0
    for _ in range(40):
        index, info = rb.sampler.sample(rb.storage, 500 * span)
        ends = info["next", "truncated"].squeeze(-1).roll(1)
        for i in index[ends].tolist():
            counts[i] += 1
            draws += 1
    expected = {i: draws * p / sum(law.values()) for i, p in law.items()}
    chi2 = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    # The 0.9999 quantile of chi-square with 9 degrees of freedom is 33.7.
    assert draws == 20000
    assert chi2 < 33.7


def test_the_buffers_generator_decides(make):
    data = make.vectors([9, 9])
    draws = []
    for seed in (0, 0, 1):
        rb = buffer(slice_len=2, seed=seed)
        rb.extend(data)
        torch.manual_seed(len(draws))
        draws.append(rb.sample(40, return_info=True)[1]["index"].tolist())
    assert draws[0] == draws[1] != draws[2]


def test_each_column_is_gathered_once(make, monkeypatch):
    rb = buffer(TensorDictReplayBuffer, slice_len=3)
    rb.extend(make.vectors([9, 9]))
    reads, read = [], DenseColumn.read
    monkeypatch.setattr(
        DenseColumn,
        "read",
        lambda self, plan, shift=0: (
            reads.append((id(self), shift, plan.span)) or read(self, plan, shift)
        ),
    )
    rb.sample(30)
    assert len(set(reads)) == len(reads) == len(list(rb[0].keys(True, True)))
    assert {span for _, _, span in reads[:9]} == {3}


def test_an_index_that_was_changed_is_read_as_it_is_now(make):
    rb = buffer(slice_len=3)
    rb.extend(make.vectors([9, 9]))
    stored = make.steps(rb[:])
    index, _ = rb.sampler.sample(rb.storage, 6)
    index.fill_(2)
    assert make.steps(rb.storage.get(index)) == [stored[2]] * 6


def test_a_selection_outlives_a_write(make):
    rb = buffer(max_steps=10, slice_len=3)
    rb.extend(make.vectors([9]))
    stored = make.steps(rb[:])
    index, _ = rb.sampler.sample(rb.storage, 6)
    rb.extend(make.vectors([9], seed=1, first_id=1))
    assert make.steps(rb.storage.get(index)) == [stored[i] for i in index.tolist()]


def test_selections_that_are_not_read_are_forgotten(make):
    rb = buffer(slice_len=3)
    rb.extend(make.vectors([9]))
    for _ in range(5):
        rb.sampler.sample(rb.storage, 6)
    gc.collect()
    assert len(rb.storage._selections) == 0


def test_prefetching_gives_whole_clips(make):
    rb = buffer(slice_len=3, batch_size=12, prefetch=3)
    rb.extend(make.vectors([9, 4, 6]))
    for _ in range(20):
        clips = rb.sample().view(4, 3)
        assert (clips["episode"] == clips["episode"][:, :1]).all()


def test_bad_arguments_are_refused(make):
    for kwargs in ({}, {"slice_len": 2, "num_slices": 2}):
        with pytest.raises(TypeError, match="exactly one of slice_len and num_slices"):
            ClipSampler(**kwargs)
    with pytest.raises(ValueError, match="slice_len must be positive"):
        ClipSampler(slice_len=0)
    with pytest.raises(ValueError, match="weighting must be"):
        ClipSampler(slice_len=2, weighting="x")
    rb = buffer(slice_len=4)
    with pytest.raises(RuntimeError, match="nothing is stored"):
        rb.sample(8)
    rb.extend(make.vectors([3]))
    with pytest.raises(RuntimeError, match="batch_size=6 and slice_len=4"):
        rb.sample(6)
    with pytest.raises(RuntimeError, match="a clip of 4 steps: the longest has 3"):
        rb.sample(8)
    with pytest.raises(TypeError, match="EpisodeStorage, got LazyTensorStorage"):
        ClipSampler(slice_len=2).sample(LazyTensorStorage(10), 4)
