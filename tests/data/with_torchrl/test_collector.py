"""TorchRL's collectors fill the buffer with the episodes of TorchRL's environments, each one whole."""

import importlib.util
import sys

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from tests.buffers import buffer_of
from tests.tiers import slow
from torchrl_mt.data import ClipSampler

needs_gymnasium = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None,
    reason="gymnasium is not installed: pip install torchrl-mt[test]",
)


def cartpole():
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())


FORKS = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks processes"),
]
ENVS = {
    "single": lambda: cartpole,
    "serial": lambda: SerialEnv(2, cartpole),
    "parallel": lambda: ParallelEnv(2, cartpole, mp_start_method="fork"),
}


def check_cartpole(rb, collected):
    """Every stored episode is one game of CartPole, and every clip lies within one."""
    storage = rb.storage
    assert ("next", "observation") in storage.shared_keys
    assert ("next", "step_count") in storage.shared_keys
    assert storage.table.oldest > 0, "no episode has left: the check is of a buffer that is full"
    open_steps = sum(len(episode) for episode in rb.writer.open_episodes.values())
    assert rb.write_count + open_steps == collected
    assert sum(storage.lengths.tolist()) == len(storage) <= storage.max_size
    for episode in storage.episodes():
        length = len(episode)
        assert episode["step_count"].flatten().tolist() == list(range(length))
        assert episode["next", "done"].flatten().tolist() == [False] * (length - 1) + [True]
        assert torch.equal(episode["next", "observation"][:-1], episode["observation"][1:])
        # A game begins near the centre and ends off it, so the last observation is its own.
        assert (episode["observation"][0].abs() <= 0.05).all()
        x, _, angle, _ = episode["next", "observation"][-1].tolist()
        assert abs(x) > 2.4 or abs(angle) > 0.2
        assert len(episode["collector", "traj_ids"].unique()) == 1
    for _ in range(5):
        clips = rb.sample().view(-1, 4)
        assert (clips["step_count"].squeeze(-1).diff() == 1).all()
        assert (clips["collector", "traj_ids"].diff() == 0).all()
        assert torch.equal(clips["next", "observation"][:, :-1], clips["observation"][:, 1:])


@needs_gymnasium
@pytest.mark.parametrize("env", ["single", "serial", pytest.param("parallel", marks=FORKS)])
# A game of a random policy takes about 20 steps: a batch ends within one, or holds several.
@pytest.mark.parametrize("frames_per_batch", [14, slow(98)])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("extend_buffer", [False, True])
def test_cartpole_games_are_stored_whole(env, frames_per_batch, cls, extend_buffer):
    rb = buffer_of(150, ClipSampler(slice_len=4), cls=cls, batch_size=32)
    collector = Collector(
        ENVS[env](),
        frames_per_batch=frames_per_batch,
        total_frames=35 * 14,
        replay_buffer=rb,
        extend_buffer=extend_buffer,
    )
    collector.set_seed(0)
    try:
        batches = sum(1 for _ in collector)
    finally:
        collector.shutdown()
    check_cartpole(rb, collected=batches * frames_per_batch)
