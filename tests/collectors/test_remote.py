"""A collector in another process: a Ray actor, or one that TorchRL's schemes bring weights to."""

from __future__ import annotations

import multiprocessing
import sys
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RayReplayBuffer, ReplayBuffer
from torchrl.weight_update import MultiProcessWeightSyncScheme, RayWeightSyncScheme

from tests.collectors.runs import versions_in
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs.games.guess_number import GuessNumber
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns

pytestmark = pytest.mark.slow

WORDS = ["guess", "to", "higher", "lower", "correct", "invalid", *map(str, range(1, 17))]
LIGHT = {"num_cpus": 0}
TRAJ = ("collector", "traj_ids")


def make_model(seed=0):
    torch.manual_seed(seed)
    return tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)


def make_engine():
    return TransformersEngine(*make_model(), max_new_tokens=2)


OPTIONS = {"episodes_per_batch": 4, "limits": Limits(max_turns=2)}


@pytest.fixture(scope="module")
def ray(ray_cluster):
    # The actors need not find this module: what is in it travels by value.
    ray_cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray_cluster


def test_a_collector_in_an_actor_is_iterated_and_updated(ray):
    collector = MultiTurnCollector.as_remote(LIGHT).remote(
        GuessNumber, make_engine, total_episodes=12, **OPTIONS
    )
    first = ray.get(collector.next.remote())
    assert len(first[TRAJ].unique()) == 4
    assert versions_in(first) == {0}
    ray.get(collector.update_policy_weights_.remote(make_model(1)[0].state_dict()))
    assert ray.get(collector.get_policy_version.remote()) == 1
    assert versions_in(ray.get(collector.next.remote())) == {1}
    ray.get(collector.increment_version.remote())
    assert versions_in(ray.get(collector.next.remote())) == {2}
    assert ray.get(collector.next.remote()) is None
    stats = ray.get(collector.stats.remote())
    assert stats["accepted"] == stats["started"] == 12
    ray.get(collector.shutdown.remote())


def test_actors_write_to_the_buffer_of_another_actor(ray, tmp_path):
    parts = {
        "storage": partial(EpisodeStorage, 1000),
        "writer": EpisodeWriter,
        "sampler": partial(EpisodeSampler, replacement=False),
        "batch_size": 16,
    }
    buffer = RayReplayBuffer(replay_buffer_cls=ReplayBuffer, remote_config=LIGHT, **parts)
    make = MultiTurnCollector.as_remote(LIGHT).remote
    collectors = [
        make(GuessNumber, make_engine, replay_buffer=buffer.client(), total_episodes=8, **OPTIONS)
        for _ in range(2)
    ]
    ray.get([collector.start.remote() for collector in collectors])
    wait_until(lambda: all(ray.get(c.stats.remote())["accepted"] == 8 for c in collectors))
    ray.get([collector.async_shutdown.remote() for collector in collectors])
    turns = buffer.sample()
    assert turns[TRAJ].unique_consecutive().shape == turns[TRAJ].unique().shape == (16,)
    assert len(turns["group"].unique()) == 16
    assert len(MergeTurns()(turns)) >= 16

    # As the part of a run, the buffer of an actor is saved whole or not at all.
    RunCheckpoint(tmp_path).save(3, buffer=buffer)
    here = ReplayBuffer(**parts)
    assert RunCheckpoint(tmp_path).restore(buffer=here) == 3
    assert torch.equal(here[:][TRAJ], buffer[:][TRAJ])
    buffer.shutdown()


def test_an_engine_is_refused_with_advice_before_an_actor_is_made(ray):
    engine = make_engine()
    with pytest.raises(TypeError, match=r"policy=lambda: TransformersEngine\(\.\.\.\)"):
        MultiTurnCollector.as_remote(LIGHT).remote(GuessNumber, engine, **OPTIONS)
    engine.close()


def test_the_error_of_an_actors_arguments_is_raised(ray):
    collector = MultiTurnCollector.as_remote(LIGHT).remote("nowhere.Env", make_engine, **OPTIONS)
    creation = r"error raised in its creation task(.|\n)*importing the module 'nowhere' failed"
    with pytest.raises(ray.exceptions.ActorDiedError, match=creation):
        ray.get(collector.next.remote())


def test_a_buffer_that_an_actor_would_copy_is_refused(ray):
    parts = {"storage": partial(EpisodeStorage, 100), "batch_size": 2}
    here = ReplayBuffer(**parts)
    there = RayReplayBuffer(replay_buffer_cls=ReplayBuffer, remote_config=LIGHT, **parts)
    for buffer, advice in ((here, "a copy of it"), (there, r"give replay_buffer\.client\(\)")):
        with pytest.raises(TypeError, match=advice):
            MultiTurnCollector.as_remote(LIGHT).remote(
                GuessNumber, make_engine, replay_buffer=buffer, **OPTIONS
            )
    there.shutdown()


def test_rays_scheme_brings_weights_to_an_actor(ray):
    trained = make_model(1)[0]
    collector = MultiTurnCollector.as_remote(LIGHT).remote(GuessNumber, make_engine, **OPTIONS)
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", remote_collectors=[collector], model=trained)
    registered = collector.register_scheme_receiver.remote({"policy": scheme})
    scheme.connect()
    ray.get(registered)
    assert versions_in(ray.get(collector.next.remote())) == {1}
    scheme.send(trained)
    assert versions_in(ray.get(collector.next.remote())) == {2}
    ray.get(collector.shutdown.remote())
    scheme.shutdown()


def collect(scheme, asked, answers):
    """Collect a batch whenever asked; tell its versions and the engine's weights."""
    with MultiTurnCollector(GuessNumber, make_engine, **OPTIONS) as collector:
        collector.register_scheme_receiver({"policy": scheme})
        while asked.get(timeout=PATIENCE):
            batch = collector.next()
            weights = torch.cat([p.detach().flatten() for p in collector.engine.model.parameters()])
            answers.put((sorted(versions_in(batch)), weights.sum().item()))


def test_weights_come_to_a_collector_of_another_process():
    trained = make_model(1)[0]
    context = multiprocessing.get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(
        model_id="policy", model=trained, devices=[torch.device("cpu")], ctx=context
    )
    process = context.Process(target=collect, args=(scheme, asked, answers))
    process.start()
    scheme.connect()

    def answer():
        asked.put(True)
        return answers.get(timeout=PATIENCE)

    def total():
        return torch.cat([p.detach().flatten() for p in trained.parameters()]).sum().item()

    assert answer() == ([1], total())
    with torch.no_grad():
        for weight in trained.parameters():
            weight += 1
    scheme.send(TensorDict.from_module(trained).data)
    assert answer() == ([2], total())
    asked.put(False)
    process.join(PATIENCE)
    assert process.exitcode == 0
