"""Clips from TorchRL's ensembles are those that their own buffers would sample."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import (
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)

from tests.buffers import buffer_of
from tests.pages import code_of
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter, PrioritizedClipSampler


def buffer(data, cls=ReplayBuffer, **kwargs):
    rb = buffer_of(200, ClipSampler(slice_len=3, **kwargs), cls=cls)
    if data is not None:
        rb.extend(data)
    return rb


def the_clip_at(rb, handle):
    """What the buffer samples if it must sample the clip that begins at a step."""
    sampler, storage = rb.sampler, rb.storage
    span = 3 * sampler.stride
    first, clip = int(storage.places(handle)), 0
    for length in storage.lengths.tolist():
        if first < length:
            break
        first, clip = first - length, clip + max(length - span + 1, 0)
    options = {"stride": sampler.stride, "burn_in": sampler.burn_in}
    chosen = ClipSampler(slice_len=3, selector=lambda *_: torch.tensor([clip + first]), **options)
    return ReplayBuffer(storage=storage, sampler=chosen).sample(3)


@examples(30, few=4)
@given(
    kind=st.sampled_from(["vectors", "turns"]),
    cls=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
    stride=st.integers(1, 2),
    burn_in=st.integers(0, 1),
    draws=st.sampled_from(["all", 1, 2, 6]),
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=2, max_size=2),
)
def test_clips_are_those_of_their_buffers(make, kind, cls, stride, burn_in, draws, lengths):
    maker = getattr(make, kind)
    buffers = [
        buffer(maker([7, *given], seed=k, first_id=10 * k), cls, stride=stride, burn_in=burn_in)
        for k, given in enumerate(lengths)
    ]
    how = {"sample_from_all": True} if draws == "all" else {"p": [0.5, 0.5]}
    if draws != "all":
        how["num_buffer_sampled"] = draws
    generator = torch.Generator().manual_seed(0)
    mixed = ReplayBufferEnsemble(*buffers, batch_size=18, generator=generator, **how)
    rows = 2 if draws == "all" else draws
    for _ in range(2):
        sample = mixed.sample()
        assert sample.batch_size == (rows, 18 // rows)
        for clips in sample.unbind(0):
            number = int(clips["index", "buffer_ids"].flatten()[0])
            for clip in clips.split(3):
                expected = the_clip_at(buffers[number], clip["index", "index"][0])
                assert make.steps(clip.exclude("index")) == make.steps(expected.exclude("index"))


@pytest.mark.parametrize("sampler", [ClipSampler, PrioritizedClipSampler])
def test_padding_and_weights_are_told(make, sampler):
    buffers = []
    for k in range(2):
        rb = buffer(make.vectors([2, 2], seed=k))
        rb.set_sampler(sampler(slice_len=3, strict_length=False, pad_output=True))
        buffers.append(rb)
    mixed = ReplayBufferEnsemble(*buffers, batch_size=12, p=[0.5, 0.5], num_buffer_sampled=4)
    sample = mixed.sample()
    assert sample["collector", "mask"].tolist() == [[True, True, False]] * 4
    assert sample["next", "truncated"].squeeze(-1).tolist() == [[False, True, False]] * 4
    assert ("priority_weight" in sample) == (sampler is PrioritizedClipSampler)


def test_texts_of_strided_clips_come_along(make):
    def turns(first_id):
        data = make.turns([6], first_id=first_id)  # one clip
        for k, step in enumerate(data.tensordicts):
            step["next", "answer"] = f"answer {k}"
        return data

    buffers = [buffer(turns(k), stride=2) for k in range(2)]
    mixed = ReplayBufferEnsemble(*buffers, batch_size=6, p=[0.5, 0.5])
    assert mixed.sample()["next", "answer"] == [["answer 1", "answer 3", "answer 5"]] * 2


class Timed(ClipSampler):
    """A sampler as users wrap it: it copies the index, and measures."""

    def sample(self, *args, **kwargs):
        start = time.perf_counter()
        index, info = super().sample(*args, **kwargs)
        self.seconds = time.perf_counter() - start
        return index.clone(), info


@pytest.mark.parametrize("stride", [1, 2])
def test_a_wrapped_sampler_gives_the_same_clips(make, stride):
    mixes = []
    for cls in (ClipSampler, Timed):
        buffers = [buffer(make.vectors([9, 7], seed=k), stride=stride) for k in range(2)]
        for rb in buffers:
            rb.set_sampler(cls(slice_len=3, stride=stride, init_key="episode"))
        how = {"p": [0.5, 0.5], "generator": torch.Generator().manual_seed(0)}
        mixes.append(ReplayBufferEnsemble(*buffers, batch_size=12, num_buffer_sampled=4, **how))
    for _ in range(5):
        expected, got = (mixed.sample() for mixed in mixes)
        assert make.steps(got.reshape(-1)) == make.steps(expected.reshape(-1))
        assert got["next", "truncated"].squeeze(-1).tolist() == [[False, False, True]] * 4


# ---- the page -----------------------------------------------------------------------------------


def test_the_recipe_mixes_offline_and_online_data(make):
    mixing, joined = (code_of("replay.rst", "Offline and online data", i) for i in range(2))
    demonstrations = EpisodeStorage(1000)
    demonstrations.append(make.vectors([40]), {"by": "expert"})
    seen = []

    def collector():
        for k in range(8):
            yield make.vectors([20, 30], seed=k, first_id=100 + 2 * k)
            seen.append((names["clips"], names["is_online"]))

    given_ = [ReplayBuffer, ReplayBufferEnsemble, ClipSampler, EpisodeStorage, EpisodeWriter]
    names = {each.__name__: each for each in given_} | {"torch": torch}
    names |= {"dataset": demonstrations, "collector": collector()}
    exec(mixing, names)
    assert names["demonstrations"].storage.metadata(0) == {"by": "expert"}
    total = 0
    for clips, is_online in seen:
        assert clips.batch_size == (64, 16)
        assert torch.equal(is_online, clips["episode"][:, 0] >= 100)
        assert (clips["episode"].diff() == 0).all()
        assert (clips["step"].diff() == 1).all()
        assert (clips["next", "truncated"].squeeze(-1) == (torch.arange(16) == 15)).all()
        assert clips["is_init"][:, 0].all()
        total += int(is_online.sum())
    # Five standard deviations around the half.
    assert len(seen) == 8
    assert abs(total - 64 * 4) < 5 * (64 * 8 / 4) ** 0.5
    exec(joined, names)
    assert names["clips"].batch_size == (1024,)
    assert int((names["clips"]["episode"] >= 100).sum()) == 512


# ---- what the page says of the ensemble ---------------------------------------------------------


def test_its_generator_replaces_those_of_its_buffers(make):
    def samples(generator):
        torch.manual_seed(generator is None)
        buffers = [buffer(make.vectors([9, 8], seed=k)) for k in range(2)]
        for rb in buffers:
            rb.set_rng(torch.Generator().manual_seed(5))
        mixed = ReplayBufferEnsemble(
            *buffers, p=[0.5, 0.5], num_buffer_sampled=4, batch_size=12, generator=generator
        )
        assert all(rb.storage.generator is generator for rb in buffers)
        return make.steps(mixed.sample().reshape(-1).exclude("index"))

    seeded = [samples(torch.Generator().manual_seed(3)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    samples(None)


def test_shares_change_and_an_empty_buffer_is_told_of(make):
    buffers = [buffer(make.vectors([9])), buffer(None)]
    mixed = ReplayBufferEnsemble(
        *buffers, p=[0.5, 0.5], num_buffer_sampled=20, batch_size=60, generator=torch.Generator()
    )
    with pytest.raises(RuntimeError, match="nothing is stored yet"):
        mixed.sample()
    mixed.sampler.p = [1.0, 0.0]
    assert (mixed.sample()["index", "buffer_ids"] == 0).all()
    buffers[1].extend(make.vectors([9]))
    mixed.sampler.p = [0.0, 1.0]
    assert (mixed.sample()["index", "buffer_ids"] == 1).all()


def test_torchrls_offline_to_online_buffer_is_refused(make):
    rb = OfflineToOnlineReplayBuffer(
        buffer(make.vectors([9])), online_storage=EpisodeStorage(9), batch_size=6
    )
    with pytest.raises(TypeError, match="EpisodeStorage takes whole episodes"):
        rb.extend(make.vectors([4]))
