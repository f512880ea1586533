"""A buffer with every kind of entry, an open episode and priorities; and curricula."""

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import TensorDictReplayBuffer

from tests.buffers import buffer_of
from torchrl_mt.collectors import SuccessRateCurriculum, WeightedCurriculum
from torchrl_mt.data import PrioritizedClipSampler

PRIORITIES = torch.tensor([2.0, 1.0, 4.0, 1.0, 6.0, 1.0, 7.0])


def turns(length, episode, *, whole=True):
    """An episode with dense, shared, ragged, growing and non-tensor entries."""
    rows = []
    for t in range(length):
        done = torch.tensor([whole and t == length - 1])
        first, then = (torch.tensor([10.0 * episode + t + i]) for i in (0, 1))
        after = {"observation": then, "reward": then / 2, "done": done}
        row = {
            "observation": first,
            "tokens": {"prompt": torch.arange(3 * t + 2), "response": torch.tensor([3 * t + 2])},
            "text": f"turn {t} of {episode}",
            "episode": torch.tensor(episode),
            "next": {**after, "terminated": done, "truncated": torch.zeros_like(done)},
        }
        rows.append(TensorDict(row, []))
    return lazy_stack(rows)


EPISODES = [(4, 0), (3, 1)]
OPEN = (2, 2)


def empty():
    return buffer_of(
        20, PrioritizedClipSampler(slice_len=2), cls=TensorDictReplayBuffer, batch_size=8
    )


def filled():
    """A buffer with two episodes, priorities and an open episode."""
    rb = empty()
    index = torch.cat([rb.extend(turns(length, episode)) for length, episode in EPISODES])
    rb.extend(turns(*OPEN, whole=False))
    rb.update_priority(index, PRIORITIES)
    return rb


def curricula():
    return {
        "success": SuccessRateCurriculum(range(5), seed=3),
        "weighted": WeightedCurriculum(range(5), [1.0, 2.0, 3.0, 0.0, 1.0], seed=3),
    }
