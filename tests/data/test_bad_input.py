"""What a buffer of episodes refuses: by name, and without any change."""

import copy
from functools import partial

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.refusals import check_refused
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


NO_VALUES = "'observation' must be a dense tensor with values, got"
WRITES = {
    "at least one step, got batch size [0]": lambda: batch()[:0],
    "batch size of [N] or [B, T], got []": lambda: batch(True)[0],
    "data must be a TensorDict, got dict": lambda: {"observation": 1},
    'tell where episodes end: ("next", "done") … is missing; the keys are …observation': (
        lambda: batch(True).exclude(("next", "done"))
    ),
    f"{NO_VALUES} … on device meta": lambda: changed(
        "observation", torch.ones(10, 2, device="meta")
    ),
    f"{NO_VALUES} layout": (
        lambda: batch(False, False, ids=[9, 9], observation=torch.eye(2).to_sparse())
    ),
    "episode 5 is refused: an episode of 13 steps does not fit in max_steps=12": (
        lambda: batch(*[False] * 13, ids=[5] * 13)
    ),
    "each row of a [B, T] batch … id 6 is in more than one row": (
        lambda: torch.stack([batch(False, True, ids=[6, 6]), batch(False, True, ids=[6, 6])])
    ),
    "must hold one integer id per step, got (10,) torch.float32": (
        lambda: changed(("collector", "traj_ids"), torch.ones(10))
    ),
    "'observation' must be as in the first episode": (
        lambda: lazy_stack(
            [*batch(True, ids=[6]), *batch(True, ids=[7], observation=torch.ones(1, 3))]
        )
    ),
}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("text", WRITES)
def test_writes(text, cls):
    rb, data = buffer(cls=cls), WRITES[text]()
    before = everything(rb)
    error = TypeError if isinstance(data, dict) else ValueError
    if error is TypeError and cls is TensorDictReplayBuffer:
        error, text = ValueError, "only accepts TensorDictBase"
    check_refused(partial(rb.extend, data), error, text)
    assert everything(rb) == before
    # What was open can still end.
    rb.extend(batch(True, ids=[9]))
    assert rb.storage.lengths.tolist() == [3, 5, 3]


SAMPLES = {
    "a clip of 6 steps: the longest has 5": (lambda: ClipSampler(slice_len=6), 6, RuntimeError),
    "of slice_len, got batch_size=5 and slice_len=2": (
        lambda: ClipSampler(slice_len=2),
        5,
        RuntimeError,
    ),
    "of num_slices, got batch_size=5 and num_slices=2": (
        lambda: ClipSampler(num_slices=2),
        5,
        RuntimeError,
    ),
    "counts episodes and must be positive, got -1": (EpisodeSampler, -1, ValueError),
}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("text", SAMPLES)
def test_samples(text, cls):
    sampler, batch_size, error = SAMPLES[text]
    rb = buffer(sampler(), cls, batch_size)
    before, state = everything(rb), copy.deepcopy(rb.sampler.state_dict())
    check_refused(rb.sample, error, text)
    assert everything(rb) == before
    assert rb.sampler.state_dict() == state


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
