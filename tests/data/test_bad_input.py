"""What a buffer of episodes refuses: by name, and without any change."""

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

MAX_STEPS = 12


def batch(*done, ids=None, **entries):
    """Steps that end their episode where ``done`` is true."""
    steps = len(done)
    data = {
        "observation": torch.arange(steps * 2.0).view(steps, 2),
        "next": {"reward": torch.ones(steps, 1), "done": torch.tensor(done).view(steps, 1)},
        "collector": {"traj_ids": torch.tensor(ids if ids is not None else [0] * steps)},
    }
    return TensorDict(data, [steps]).update(entries)


def buffer(sampler=None, cls=ReplayBuffer, batch_size=4):
    """Two stored episodes, of 3 and 5 steps, and an open one of 2."""
    rb = buffer_of(
        MAX_STEPS, sampler or ClipSampler(slice_len=2), cls=cls, batch_size=batch_size, seed=0
    )
    rb.extend(batch(False, False, True, ids=[3] * 3))
    rb.extend(batch(*[False] * 4, True, ids=[4] * 5))
    rb.extend(batch(False, False, ids=[9] * 2))
    return rb


def everything(rb):
    """All that the buffer holds, as bits; a next sample included."""
    open_episodes = {key: e.to_dict() for key, e in rb.writer.open_episodes.items()}
    state = (
        rb[:].to_dict(),
        rb.storage.lengths,
        open_episodes,
        rb.writer.state_dict()["write_count"],
    )
    return repr(state) + repr(rb.storage.schema) + repr(rb._rng.get_state().tolist())


def changed(key, value):
    """A whole episode that would have to evict, with its last entry ``key`` as it must not be."""
    data = batch(*[False] * 9, True, ids=[5] * 10)
    data[key] = value
    return data


WRITES = {
    "no steps": (lambda: batch()[:0], ValueError, r"at least one step, got batch size \[0\]"),
    "no batch size": (
        lambda: batch(True)[0],
        ValueError,
        r"batch size of \[N\] or \[B, T\], got \[\]",
    ),
    "no data": (lambda: {"observation": 1}, TypeError, "data must be a TensorDict, got dict"),
    "no done flag": (
        lambda: batch(True).exclude(("next", "done")),
        ValueError,
        r'tell where episodes end: \("next", "done"\) .* is missing; the keys are .*observation',
    ),
    "a device without values": (
        lambda: changed("observation", torch.ones(10, 2, device="meta")),
        ValueError,
        "'observation' must be a dense tensor with values, got .* on device meta",
    ),
    "a sparse entry of an open episode": (
        lambda: batch(False, False, ids=[9, 9], observation=torch.eye(2).to_sparse()),
        ValueError,
        "'observation' must be a dense tensor with values, got layout",
    ),
    "an open episode too long": (
        lambda: batch(*[False] * (MAX_STEPS + 1), ids=[5] * 13),
        ValueError,
        f"episode 5 is refused: an episode of 13 steps does not fit in max_steps={MAX_STEPS}",
    ),
    "one id in two rows": (
        lambda: torch.stack([batch(False, True, ids=[6, 6]), batch(False, True, ids=[6, 6])]),
        ValueError,
        r"each row of a \[B, T\] batch .* id 6 is in more than one row",
    ),
    "ids that are no integers": (
        lambda: changed(("collector", "traj_ids"), torch.ones(10)),
        ValueError,
        r"must hold one integer id per step, got \(10,\) torch.float32",
    ),
    "the second of two episodes": (
        lambda: lazy_stack(
            [
                *batch(True, ids=[6]).unbind(0),
                *batch(True, ids=[7], observation=torch.ones(1, 3)).unbind(0),
            ]
        ),
        ValueError,
        "'observation' must be as in the first episode",
    ),
}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("name", WRITES)
def test_writes(name, cls):
    make, error, message = WRITES[name]
    rb, data = buffer(cls=cls), make()
    before = everything(rb)
    if cls is TensorDictReplayBuffer and name == "no data":
        error, message = ValueError, "only accepts TensorDictBase"
    with pytest.raises(error, match=message):
        rb.extend(data)
    assert everything(rb) == before
    # What was open can still end.
    rb.extend(batch(True, ids=[9]))
    assert rb.storage.lengths.tolist() == [3, 5, 3]


def test_rewards_that_are_no_numbers_are_kept():
    rb = buffer()
    data = batch(False, True, ids=[5, 5])
    data["next", "reward"] = torch.tensor([[float("nan")], [-float("inf")]])
    rb.extend(data)
    stored = rb.storage.episode(-1)["next", "reward"].flatten()
    assert stored.isnan().tolist() == [True, False]
    assert stored[1] == -float("inf")


SAMPLES = {
    "clips longer than every episode": (
        lambda: ClipSampler(slice_len=6),
        6,
        RuntimeError,
        "no stored episode holds a clip of 6 steps: the longest has 5",
    ),
    "strides longer than every episode": (
        lambda: ClipSampler(slice_len=2, stride=4, strict_length=False),
        2,
        None,
        None,
    ),
    "short clips": (lambda: ClipSampler(slice_len=6, strict_length=False), 6, None, None),
    "steps that are no whole clips": (
        lambda: ClipSampler(slice_len=2),
        5,
        RuntimeError,
        "positive multiple of slice_len, got batch_size=5 and slice_len=2",
    ),
    "clips that are no whole steps": (
        lambda: ClipSampler(num_slices=2),
        5,
        RuntimeError,
        "positive multiple of num_slices, got batch_size=5 and num_slices=2",
    ),
    "no episodes": (
        lambda: EpisodeSampler(),
        -1,
        ValueError,
        "batch_size counts episodes and must be positive, got -1",
    ),
}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name, cls):
    make, batch_size, error, message = SAMPLES[name]
    rb = buffer(make(), cls, batch_size)
    if error is None:
        sample, info = rb.sample(return_info=True)
        assert 0 < len(sample) <= batch_size
        assert set(info) <= {"index", "priority_weight"}
        if not isinstance(rb.sampler, EpisodeSampler):
            assert bool(sample["next", "truncated"][-1])
        return
    before, sampler = everything(rb), copy.deepcopy(rb.sampler.state_dict())
    with pytest.raises(error, match=message):
        rb.sample()
    assert everything(rb) == before
    assert rb.sampler.state_dict() == sampler


@pytest.mark.parametrize(
    "sampler",
    [ClipSampler(slice_len=2), PrioritizedClipSampler(slice_len=2), EpisodeSampler()],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_sampling_while_no_episode_has_ended_names_flush(sampler, cls):
    rb = cls(storage=EpisodeStorage(9), writer=EpisodeWriter(), sampler=sampler, batch_size=4)
    rb.extend(batch(False, False, False, ids=[1, 1, 2]))
    assert rb.writer.open_lengths == {1: 2, 2: 1}
    with pytest.raises(
        RuntimeError, match=r"none of the 2 open episodes \(with 3 steps.*flush\(\)"
    ):
        rb.sample()
    rb.writer.flush()
    assert rb.writer.open_lengths == {}
    assert len(rb.sample()) >= 4


@pytest.mark.parametrize("index", [8, -9, [0, 8], torch.tensor([-9]), 1.5, None])
def test_reading_what_is_not_stored(index):
    error = TypeError if index is None or isinstance(index, float) else IndexError
    with pytest.raises(error, match="index must"):
        buffer().storage[index]
