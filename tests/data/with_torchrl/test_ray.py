"""A buffer that a Ray actor serves: several processes write to it and sample from it.

These tests need ``ray`` (``pip install 'torchrl-mt[ray]'``), and are skipped without it.
"""

from functools import partial

import pytest
import torch
from torchrl.data import RayReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import PendulumEnv, StepCounter, TransformedEnv

from torchrl_mt.collectors import UniqueTrajIds
from torchrl_mt.data import EpisodeStorage, EpisodeWriter, PrioritizedClipSampler

ray = pytest.importorskip("ray", reason="needs ray: pip install 'torchrl-mt[ray]'")
pytestmark = pytest.mark.slow

SPAN = 3
LIGHT = {"num_cpus": 0}


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


PARTS = {
    "storage": partial(EpisodeStorage, 40),
    "writer": EpisodeWriter,
    "sampler": partial(PrioritizedClipSampler, slice_len=SPAN),
    "batch_size": 4 * SPAN,
}


def by_backend():
    options = {"remote_config": LIGHT}
    return TensorDictReplayBuffer(**PARTS, service_backend="ray", service_backend_options=options)


def by_class():
    return RayReplayBuffer(replay_buffer_cls=TensorDictReplayBuffer, remote_config=LIGHT, **PARTS)


@pytest.fixture(scope="module", params=[by_backend, by_class])
def served(request, cluster):
    made = request.param()
    yield made
    made.shutdown()


@pytest.fixture
def rb(served):
    """A buffer that an actor serves, with nothing in it."""
    served.empty()
    return served


def places(steps):
    """Which step of which episode each is."""
    return list(zip(steps["episode"].tolist(), steps["step"].tolist(), strict=True))


def starts(sample):
    """Where its clips begin."""
    return set(places(sample)[::SPAN])


def check(stored, sample):
    """The sample is clips of stored steps."""
    at = {place: i for i, place in enumerate(places(stored))}
    where = torch.tensor([at[place] for place in places(sample)])
    assert torch.equal(stored["observation"][where], sample["observation"])
    assert torch.equal(stored["next", "observation"][where], sample["next", "observation"])
    assert (sample["episode"].view(-1, SPAN).diff() == 0).all()
    assert (sample["step"].view(-1, SPAN).diff() == 1).all()


def test_clips_of_what_other_processes_write(make, rb):
    rb.extend(make.vectors([7]))

    @ray.remote(num_cpus=0)
    def work(client, data):
        client.extend(data)
        return client.sample()

    sample = ray.get(work.remote(rb.client(), make.vectors([6, 5], seed=1, first_id=1)))
    assert len(rb) == 18
    check(rb[:], sample)
    check(rb[:], rb.sample())


def test_priorities_are_those_of_the_clips_as_sampled(make, rb):
    rb.extend(make.vectors([6, 15, 7]))
    samples = [rb.sample() for _ in range(3)]
    rb.extend(make.vectors([15], first_id=3))  # the first episode leaves
    for sample in samples:
        sample["td_error"] = torch.zeros(len(sample))
        rb.update_tensordict_priority(sample)
    drawn = set().union(*map(starts, samples))
    for _ in range(10):
        sample = rb.sample()
        check(rb[:], sample)
        assert not starts(sample) & drawn


def test_a_checkpoint_of_the_actor_goes_on_here_and_there(make, rb, tmp_path):
    data = make.vectors([6, 5])
    rb.extend(data)
    sample = rb.sample()
    rb.update_priority(sample["index"].view(-1, SPAN), 0.0)
    rb.dumps(tmp_path)
    state = rb.state_dict()
    rb.extend(make.vectors([7], first_id=2))

    here, too = TensorDictReplayBuffer(**PARTS), TensorDictReplayBuffer(**PARTS)
    here.loads(tmp_path)
    too.load_state_dict(state)
    rb.loads(tmp_path)
    for buffer in (rb, here, too):
        assert make.steps(buffer[:]) == make.steps(data)
        assert not starts(buffer.sample()) & starts(sample)


@pytest.mark.usefixtures("cluster")
def test_a_collector_of_several_processes():
    from torchrl.collectors.distributed import RayCollector

    # A local function is sent to other processes by value: they cannot import the tests.
    def env():
        return TransformedEnv(PendulumEnv(), StepCounter(max_steps=5))

    rb = by_backend()
    collector = RayCollector(
        [env, env],
        None,
        frames_per_batch=10,
        total_frames=40,
        trajs_per_batch=2,
        replay_buffer=rb,
        remote_configs=LIGHT,
        sync=True,
        collector_kwargs={"postproc": UniqueTrajIds()},
    )
    try:
        for _ in collector:
            pass
    finally:
        collector.shutdown(shutdown_ray=False)
    stored, clips = rb[:], rb.sample().view(4, SPAN)
    rb.shutdown()
    assert len(stored) >= 20
    assert stored["step_count"].view(-1, 5).tolist() == [list(range(5))] * (len(stored) // 5)
    episodes = stored["th"].view(-1, 5)
    assert torch.equal(stored["next", "th"].view(-1, 5)[:, :-1], episodes[:, 1:])
    assert (clips["step_count"].squeeze(-1).diff() == 1).all()
    ids = stored["collector", "traj_ids"].view(-1, 5)
    assert (ids == ids[:, :1]).all()
    assert len(ids[:, 0].unique()) == len(ids)
