"""What is sent over Ray shares no storage with what is not sent."""

from __future__ import annotations

import pickle
from itertools import chain

import pytest
from torchrl.data import RayReplayBuffer, ReplayBuffer

from tests.collectors.chats import Chat
from torchrl_mt._hosts import ray as hosts
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter

RAGGED = [("tokens", "prompt"), ("tokens", "response")]


class FarBuffer:
    """Stands for a buffer in an actor: it keeps what it is sent as Ray sends it."""

    __module__ = RayReplayBuffer.__module__

    def __init__(self):
        self.sent = []

    def extend(self, batch):
        self.sent.append(pickle.dumps(batch))


@pytest.fixture
def in_actor(monkeypatch):
    monkeypatch.setattr(hosts, "_in_actor", lambda: True)


def play(engine, buffer=None, episodes=64):
    with MultiTurnCollector(
        *(Chat, engine, [{"turns": 3}]),
        episodes_per_batch=episodes,
        total_episodes=episodes,
        replay_buffer=buffer,
    ) as collector:
        (batch,) = collector
        return batch


def shares_nothing(steps):
    """Whether every tensor has no more storage than elements."""
    values = [steps.get(key, as_list=True) if steps.batch_dims else [steps[key]] for key in RAGGED]
    return all(each.untyped_storage().nbytes() == each.nbytes for each in chain(*values))


def test_a_batch_sent_to_a_buffer_shares_nothing(engine):
    far = FarBuffer()
    play(engine, far)
    here = play(engine)
    assert not shares_nothing(here)
    assert shares_nothing(pickle.loads(far.sent[0]))
    assert len(far.sent[0]) < len(pickle.dumps(here)) / 4
    assert not hosts.is_remote(ReplayBuffer(storage=EpisodeStorage(8)))


@pytest.mark.usefixtures("in_actor")
def test_what_an_actor_gives_out_shares_nothing(engine):
    batch = play(engine)
    rb = ReplayBuffer(
        storage=EpisodeStorage(1000),
        writer=EpisodeWriter(),
        sampler=EpisodeSampler(),
        batch_size=16,
    )
    rb.extend(batch)
    assert shares_nothing(batch)
    assert shares_nothing(rb.sample())
    assert shares_nothing(rb[:])
    assert shares_nothing(rb[0])
