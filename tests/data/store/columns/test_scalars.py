"""Scalars of every dtype whose next value is not that of the step after."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_mt.data import EpisodeStorage

DTYPES = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_steps", [100, 9])
def test_scalars_that_disagree_are_read_as_they_were(make, dtype, max_steps):
    storage, episodes = EpisodeStorage(max_steps), []
    for number, length in enumerate([4, 3, 5, 1, 2, 3, 4, 2]):
        values = torch.arange(length + 1).to(dtype)
        following = values[1:] if number % 4 != 3 else torch.full((length,), 77).to(dtype)
        episode = {"level": values[:-1], "next": {"level": following}}
        episodes.append(TensorDict(episode, [length]))
        storage.append(episodes[-1])
        assert bool(storage.shared_keys) == (number < 7)  # The fourth has one step.
    kept = episodes[-storage.num_episodes :]
    assert [make.steps(got) for got in storage.episodes()] == [make.steps(each) for each in kept]
