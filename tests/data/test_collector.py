import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import PendulumEnv, SerialEnv, StepCounter, TransformedEnv

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter


def env():
    return TransformedEnv(PendulumEnv(), StepCounter(max_steps=9))


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("extend_buffer", [False, True])
def test_torchrls_collector_fills_the_buffer(cls, batched, extend_buffer):
    rb = cls(
        storage=EpisodeStorage(60),
        writer=EpisodeWriter(),
        sampler=ClipSampler(slice_len=4),
        batch_size=16,
    )
    collector = Collector(
        SerialEnv(2, env) if batched else env,
        frames_per_batch=10,
        total_frames=100,
        replay_buffer=rb,
        extend_buffer=extend_buffer,
    )
    for _ in collector:
        assert (rb.storage.lengths == 9).all()
    collector.shutdown()
    assert rb.storage.num_episodes == 6
    assert rb.write_count == (90 if batched else 99)
    for episode in rb.storage.episodes():
        assert episode["step_count"].squeeze(-1).tolist() == list(range(9))
        assert torch.equal(episode["next", "th"][:-1], episode["th"][1:])
    assert ("next", "th") in rb.storage.shared_keys
    sample = rb.sample()
    assert sample.batch_size == (16,)
    assert (sample["step_count"].view(4, 4).diff() == 1).all()
