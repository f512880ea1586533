"""No stored episode holds steps of two, whoever writes, and none is cut but as documented."""

import logging
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import PendulumEnv, SerialEnv, StepCounter, TransformedEnv

from tests.buffers import buffer_of
from tests.data.makers import ends
from tests.data.saving import saved
from tests.tiers import examples, slow
from torchrl_mt.data import ClipSampler, EpisodeWriter


def buffer(max_steps=10_000, cls=ReplayBuffer, **kwargs):
    return buffer_of(
        max_steps, ClipSampler(slice_len=2), cls=cls, writer=EpisodeWriter(**kwargs), batch_size=4
    )


def trajectory(number, length, *, ids=None, done=True, noise=False, is_init=False):
    """Steps of one trajectory; the observation tells which, and how far it is."""
    t, goal = torch.arange(length + 1.0), torch.zeros(length, 2)
    seen = torch.stack([torch.full_like(t, number), t], 1)
    last = ends(length) & done
    after = {"reward": torch.ones(length, 1), "done": last, "truncated": torch.zeros_like(last)}
    after |= {"observation": seen[1:], "goal": goal.clone()}
    data = {"observation": seen[:-1], "goal": goal, "next": after}
    if noise:  # a key for which TED's rule does not hold
        data["noise"], after["noise"] = torch.rand(2, length, 1)
    if is_init:
        data["is_init"] = torch.arange(length)[:, None] == 0
    if ids is not None:
        data["collector"] = {"traj_ids": torch.full((length,), ids)}
    return TensorDict(data, [length])


def trajectories(rb):
    """What is told by each stored episode."""
    return [told(episode) for episode in rb.storage.episodes()]


def told(episode):
    """The trajectory that an episode is of, and its first and last step: AssertionError for two."""
    seen, following = episode["observation"], episode["next", "observation"]
    numbers = torch.cat([seen[:, 0], following[:, 0]]).unique()
    assert len(numbers) == 1, f"steps of the trajectories {numbers.tolist()} are one episode"
    assert torch.equal(seen[1:], following[:-1])
    assert episode["next", "done"].flatten().tolist() == [False] * (len(episode) - 1) + [True]
    return int(numbers), int(seen[0, 1]), int(following[-1, 1])


class Sender:
    """One environment after another of a collector that counts its episodes from 0."""

    def __init__(self, first, lengths, **kwargs):
        self.parts = [
            trajectory(first + k, length, ids=k, **kwargs) for k, length in enumerate(lengths)
        ]
        self.data = torch.cat(self.parts)
        self.sent = 0

    def send(self, steps):
        piece = self.data[self.sent : self.sent + steps]
        self.sent += len(piece)
        return piece


@examples(30)
@given(
    data=st.data(),
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    cls=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
    noise=st.booleans(),
    is_init=st.booleans(),
    together=st.booleans(),
)
def test_collectors_whose_ids_collide_are_kept_apart(data, lengths, cls, noise, is_init, together):
    """Every trajectory is stored whole, whatever pieces it comes in and whatever comes between."""
    senders = [
        Sender(100 * k, each, noise=noise, is_init=is_init) for k, each in enumerate(lengths)
    ]
    rb = buffer(cls=cls)
    if noise:  # learned where steps follow each other, which pieces of one step do not
        rb.extend(trajectory(10_000, 6, ids=0, noise=True, is_init=is_init))
    while left := [s for s in senders if s.sent < len(s.data)]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, max_size=3, unique_by=id))
        pieces = [s.send(data.draw(st.integers(1, 6))) for s in chosen]
        ids = [piece["collector", "traj_ids"] for piece in pieces]
        # Steps with one id that follow each other in a row are taken at their word.
        if together and all(a[-1] != b[0] for a, b in pairwise(ids)):
            pieces = [torch.cat(pieces)]
        for piece in pieces:
            rb.extend(piece)
    stored = sorted(trajectories(rb))
    expected = [(100 * k + i, 0, n) for k, each in enumerate(lengths) for i, n in enumerate(each)]
    assert [s for s in stored if s[0] < 10_000] == sorted(expected)
    assert rb.writer.stats() | {"breaks": 0} == dict.fromkeys(rb.writer.stats(), 0)


@examples(30)
@given(
    data=st.data(),
    environments=st.integers(1, 4),
    on_break=st.sampled_from(["truncate", "discard"]),
    flat=st.booleans(),
)
def test_rows_without_ids_are_cut_where_an_environment_was_reset(
    data, environments, on_break, flat
):
    """What is cut is stored as truncated or dropped, to the last step; nothing is glued."""
    rb = buffer(on_break=on_break)
    # What is learned first: that observations go on.
    rb.extend(torch.stack([trajectory(1000 + b, 40) for b in range(environments)]))
    rb.empty(empty_write_count=False)
    number, runs, steps = 0, [], 0
    rows = [[] for _ in range(environments)]
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(5, 12))
        batch = []
        for row in rows:
            # The environment goes on, or was reset without a word.
            if not row or data.draw(st.booleans()):
                row[:] = [trajectory(number, 100, done=False), 0]
                runs.append([number, 0])
                number += 1
            run, at = row
            piece = run[at : at + length].clone()
            row[1] += length
            next(r for r in runs if r[0] == int(run[0]["observation"][0]))[1] += length
            batch.append(piece)
        steps += length * environments
        rb.extend(batch[0] if flat and environments == 1 else torch.stack(batch))
    stored = trajectories(rb)
    still = list(rb.writer.open_episodes.values())
    live = {int(row[0][0]["observation"][0]) for row in rows}
    assert {int(e["observation"][0, 0]) for e in still} == live
    assert sum(map(len, still)) == sum(n for number, n in runs if number in live)
    gone = [(number, 0, n) for number, n in runs if number not in live]
    assert sorted(stored) == (gone if on_break == "truncate" else [])
    stats = rb.writer.stats()
    assert stats["breaks"] == len(gone)
    assert stats["truncated" if on_break == "truncate" else "dropped"] == len(gone)


def test_rollouts_without_ids_are_episodes(caplog):
    env = TransformedEnv(PendulumEnv(), StepCounter())
    rb = buffer()
    for _ in range(40):
        rb.extend(env.rollout(16).exclude("step_count", ("next", "step_count")))
    assert rb.storage.lengths.tolist() == [16] * 39
    rb.writer.flush()
    for episode in rb.storage.episodes():
        assert torch.equal(episode["th"][1:], episode["next", "th"][:-1])
        assert episode["next", "done"].flatten().tolist() == [False] * 15 + [True]
        assert not episode["next", "terminated"].any()
    assert rb.writer.stats()["breaks"] == 39
    said = [r.getMessage() for r in caplog.records if "do not go on" in r.getMessage()]
    assert len(said) == 1
    assert "episode 0" in said[0]


def test_environments_in_one_row_are_warned_of_once(caplog):
    together = torch.stack([trajectory(number, 30, done=False) for number in range(4)])
    for batch, warned in ((together, False), (together.reshape(-1), True)):
        rb = buffer()
        for _ in range(2):
            rb.extend(batch)
        assert caplog.text.count("'observation' is not always ('next', 'observation')") == warned


@pytest.mark.parametrize("batched", [slow(False), True])
@pytest.mark.parametrize("frames", [10, slow(1)])
def test_two_collectors_on_one_buffer(batched, frames):
    def env():
        return TransformedEnv(PendulumEnv(), StepCounter(max_steps=9))

    rb = buffer(cls=TensorDictReplayBuffer)
    frames = frames * 2 if batched else frames
    envs = [SerialEnv(2, env) if batched else env for _ in range(2)]
    collectors = [iter(Collector(each, frames_per_batch=frames, total_frames=-1)) for each in envs]
    for _ in range(200 // frames):
        for collector in collectors:
            rb.extend(next(collector))
    assert rb.storage.num_episodes >= 2 * (200 // 9 - 2)
    for episode in rb.storage.episodes():
        assert episode["step_count"].flatten().tolist() == list(range(9))
        assert torch.equal(episode["th"][1:], episode["next", "th"][:-1])
    assert rb.writer.stats()["truncated"] == rb.writer.stats()["dropped"] == 0
    assert len(rb.writer.open_episodes) <= 2 * (1 + batched)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "dumps"])
def test_a_second_run_does_not_go_on_with_the_episodes_of_the_first(how, tmp_path):
    rb = buffer()
    rb.extend(trajectory(1, 8, ids=0, done=False))
    other = saved(rb, how, tmp_path, buffer())
    again = trajectory(2, 12, ids=0)
    other.extend(again[:1])
    other.extend(again[1:5])
    assert other.writer.open_lengths == {0: 8, (0, 2): 5}
    assert told(other.writer.open_episodes[0].set(("next", "done"), again["next", "done"][-8:]))
    other.extend(again[5:])
    # The first run's episode may still go on, and keeps its name.
    other.extend(trajectory(1, 10, ids=0)[8:])
    assert trajectories(other) == [(2, 0, 12), (1, 0, 10)]
    assert other.writer.open_lengths == {}


def test_episodes_that_share_an_id_can_be_discarded_one_by_one():
    rb = buffer()
    for number in range(3):
        rb.extend(trajectory(number, 4 + number, ids=7, done=False))
    assert rb.writer.open_lengths == {7: 4, (7, 2): 5, (7, 3): 6}
    rb.writer.discard((7, 2))
    with pytest.raises(KeyError, match=r"no episode \(7, 2\) is open; .*\[7, \(7, 3\)\]"):
        rb.writer.discard((7, 2))
    rb.extend(trajectory(3, 2, ids=7, done=False))
    assert rb.writer.open_lengths == {7: 4, (7, 3): 6, (7, 2): 2}
    rb.writer.flush()
    assert trajectories(rb) == [(0, 0, 4), (2, 0, 6), (3, 0, 2)]


@pytest.mark.parametrize("on_break", ["truncate", "discard"])
def test_of_many_episodes_with_one_id_the_one_that_waited_longest_is_given_up(on_break):
    rb = buffer(on_break=on_break)
    for number in range(40):
        rb.extend(trajectory(number, 16, ids=0, done=False))
    assert len(rb.writer.open_episodes) == 32
    assert trajectories(rb) == [(n, 0, 16) for n in range(8) if on_break == "truncate"]
    assert rb.writer.stats()["breaks"] == 39


@pytest.mark.parametrize("ids", [7, None])
def test_a_break_can_be_refused(ids):
    rb = buffer(on_break="raise")
    rb.extend(trajectory(1, 5, ids=ids, done=False))
    before = rb.writer.state_dict()
    between = [trajectory(3, 2, ids=99)] if ids else []
    for bad in (
        trajectory(2, 5, ids=ids, done=False),
        torch.cat([*between, trajectory(2, 5, ids=ids, done=False)]),
    ):
        with pytest.raises(ValueError, match=rf"episode {ids or 0} .*: its 'observation' is not"):
            rb.extend(bad)
        after = rb.writer.state_dict()
        assert after["counts"] == before["counts"]
        assert after["continuity"] == before["continuity"]
        assert rb.writer.open_lengths == {ids or 0: 5}
        assert len(rb) == 0
    rb.extend(trajectory(1, 8, ids=ids)[5:])
    assert trajectories(rb) == [(1, 0, 8)]
    with pytest.raises(ValueError, match="on_break must be one of 'truncate', 'raise', 'discard'"):
        EpisodeWriter(on_break="cut")


def test_is_init_begins_an_episode_where_nothing_else_can_tell():
    def steps(*init, **ids):
        data = {name: torch.tensor(each) for name, each in ids.items()}
        data["is_init"] = torch.tensor(init)[:, None]
        return TensorDict(data | {"next": {"done": data["is_init"] & False}}, [len(init)])

    rb = buffer()
    rb.extend(steps(True, False, False))
    rb.extend(steps(False, True, False, True))
    assert rb.storage.lengths.tolist() == [4, 2]
    assert rb.writer.open_lengths == {0: 1}
    rb = buffer()
    rb.extend(steps(True, False, False, episode=[1, 1, 2]))
    rb.extend(steps(False, True, True, episode=[1, 1, 3]))
    assert rb.writer.open_lengths == {2: 1, 1: 3, (1, 2): 1, 3: 1}


def test_what_cannot_be_compared_is_told_by_ids_alone():
    rb = buffer()
    piece = trajectory(1, 4, ids=3, done=False).exclude(("next", "observation"), ("next", "goal"))
    for _ in range(3):
        rb.extend(piece)
    assert rb.writer.open_lengths == {3: 12}
    assert rb.writer.stats()["breaks"] == 0


def test_bits_are_compared():
    """NaN goes on from itself, and 0.0 does not from -0.0."""
    rb = buffer()
    for value in (float("nan"), 0.0):
        whole = trajectory(1, 6, done=False)
        whole["observation"][3], whole["next", "observation"][2] = value, value
        rb.extend(whole[:3])
        rb.extend(whole[3:])
        assert rb.writer.open_lengths == {0: 6}
        rb.writer.flush()
    whole["observation"] = whole["observation"].clone()
    whole["observation"][3] = -0.0
    rb.extend(whole[:3])
    rb.extend(whole[3:])
    assert rb.writer.stats()["breaks"] == 1


def test_an_entry_that_does_not_hold_to_the_rule_is_found_out():
    """One that never does, from its first steps; one that no longer does, after a while."""
    rb = buffer()
    rb.extend(trajectory(0, 3, ids=1, noise=True))
    for number in range(1, 5):
        whole = trajectory(number, 30, ids=1, noise=True)
        for piece in whole.split(1):
            rb.extend(piece)
    assert trajectories(rb) == [(0, 0, 3), *((number, 0, 30) for number in range(1, 5))]
    assert rb.writer.stats()["breaks"] == 0
    # Now observations do not either; what is stored is cut until that is known.
    strange = trajectory(9, 400, ids=2, done=False, noise=True)
    strange["observation"] = torch.rand(400, 2)
    for piece in strange.split(40):
        rb.extend(piece)
    breaks = rb.writer.stats()["breaks"]
    for piece in strange.split(40):
        rb.extend(piece)
    assert rb.writer.stats()["breaks"] == breaks


def test_an_exception_within_a_row_neither_cuts_it_nor_is_it_forgotten_what_holds():
    rb = buffer()
    for number in range(3):
        whole = trajectory(number, 40, ids=1)
        whole["next", "observation"] = whole["next", "observation"].clone()
        whole["next", "observation"][20] += 1
        for piece in whole.split(16):
            rb.extend(piece)
    assert rb.storage.lengths.tolist() == [40] * 3
    rb.extend(trajectory(5, 8, ids=1)[:4])
    rb.extend(trajectory(6, 8, ids=1))
    assert told(rb.storage.episode(-1)) == (6, 0, 8)
    assert rb.writer.stats()["breaks"] == 1


# ---- budgets ------------------------------------------------------------------------------------


def test_the_open_steps_have_a_budget(caplog):
    rb = buffer(max_open_steps=20)
    for number in range(6):
        rb.extend(trajectory(number, 8, ids=number, done=False))
    # Those that waited longest have gone, and no more than needed.
    assert rb.writer.open_lengths == {4: 8, 5: 8}
    rb.extend(trajectory(4, 9, ids=4, done=False)[8:])
    rb.extend(trajectory(6, 8, ids=6, done=False))
    assert rb.writer.open_lengths == {4: 9, 6: 8}
    assert trajectories(rb) == [(number, 0, 8) for number in (0, 1, 2, 3, 5)]
    stats = rb.writer.stats()
    counts = {"breaks": 0, "truncated": 5, "dropped": 0}
    assert stats == {"open_episodes": 2, "open_steps": 17, **counts}
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "max_open_steps=20" in said[0]
    assert "reset_at_each_iter" in said[0]
    rb.empty()
    assert rb.writer.stats() == dict.fromkeys(stats, 0)
    rb.extend(trajectory(7, 50, ids=7, done=False))
    assert rb.writer.open_lengths == {7: 50}  # a single one may be longer
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match="max_open_steps must be a positive integer"):
            EpisodeWriter(max_open_steps=bad)


@pytest.mark.parametrize("others_id", [1, 2])
def test_an_open_episode_may_grow_to_all_that_the_storage_holds(others_id):
    rb = buffer(max_steps=5, max_open_steps=20)
    whole, other = trajectory(1, 5, ids=1), trajectory(2, 4, ids=others_id, done=False)
    rb.extend(whole[:3])
    rb.extend(other[:3])
    rb.extend(torch.cat([whole[3:], other[3:]]))
    assert trajectories(rb) == [(1, 0, 5)]
    assert [*rb.writer.open_lengths.values()] == [4]
    assert rb.writer.stats()["truncated"] == 0


def test_what_cannot_be_stored_is_dropped_for_the_budget():
    rb = buffer(max_open_steps=10)
    for number in range(3):
        steps = trajectory(number, 8, ids=number, done=False)
        steps["next", "terminated"] = steps["next"].pop("done")
        rb.extend(steps.exclude(("next", "truncated")))
    assert rb.writer.open_lengths == {2: 8}
    assert rb.writer.stats()["dropped"] == 2
    assert len(rb) == 0
    rb = buffer(max_open_steps=10, transform=lambda e: e if len(e) < 8 else torch.cat([e] * 2000))
    for number, length in enumerate([8, 4, 8, 3]):
        rb.extend(trajectory(number, length, ids=number, done=length == 3))
    assert rb.writer.open_lengths == {2: 8}
    assert rb.writer.stats() | {"truncated": 1, "dropped": 1} == rb.writer.stats()
    assert rb.storage.lengths.tolist() == [4, 3]


# ---- other data ---------------------------------------------------------------------------------


def agents(length, *ends):
    """Steps of two agents, each with flags of its own."""
    done = torch.zeros(length, 2, 1, dtype=torch.bool)
    for t, agent in ends:
        done[t, agent] = True
    return TensorDict(
        {"x": torch.arange(length), "next": {"agents": {"done": done, "terminated": done.clone()}}},
        [length],
    )


@pytest.mark.parametrize(("done_on_any", "lengths"), [(True, [2, 2, 1]), (False, [4, 1])])
def test_flags_of_several_agents_end_an_episode(done_on_any, lengths):
    data = agents(6, (1, 0), (3, 0), (3, 1), (4, 0))
    data["next", "agents", "terminated"][4, 1] = True
    key = [("next", "agents", "done"), ("next", "agents", "terminated")]
    rb = buffer(end_key=key, done_on_any=done_on_any)
    rb.extend(data[:3])
    rb.extend(data[3:])
    assert rb.storage.lengths.tolist() == lengths
    rb.writer.flush()
    last = rb.storage.episode(-1)["next", "agents"]
    assert last["done"].all()
    assert not last["terminated"].any()
    one = buffer(end_key=("next", "agents", "done"))
    one.extend(data)
    assert one.storage.lengths.tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match=r"\('next', 'agents', 'done'\) is missing"):
        buffer(end_key=key).extend(trajectory(1, 3))


BUFFERS = [ReplayBuffer, TensorDictReplayBuffer]
STORED = [*product(BUFFERS, [("done", "truncated"), ("done",)])]
STORED += [(TensorDictReplayBuffer, ("terminated",))]  # where the sample alone says "truncated"


@pytest.mark.parametrize(("cls", "flags"), STORED)
@pytest.mark.parametrize("ids", [None, 3])
def test_a_sample_can_be_written_back(cls, flags, ids):
    rb = buffer(cls=cls)
    for number in range(3):
        whole = trajectory(number, 6, ids=ids, is_init=True)
        whole["next", "terminated"] = whole["next", "done"].clone()
        drop = {"done", "truncated", "terminated"} - set(flags)
        rb.extend(whole.exclude(*(("next", flag) for flag in drop)))
    keys = set(rb.storage[:].keys(True, True))
    open_one = trajectory(9, 4, ids=ids, is_init=True, done=False)
    rb.extend(open_one.rename_key_(("next", "done"), ("next", flags[0])).select(*keys))
    sample = rb.sample()
    assert len(sample) == 4
    rb.extend(sample)
    assert rb.storage.lengths.tolist() == [6, 6, 6, 2, 2]
    assert set(rb.storage[:].keys(True, True)) - {"index"} == keys - {"index"}
    assert torch.equal(rb.storage[-4:]["observation"], sample["observation"])
    assert list(rb.writer.open_lengths.values()) == [4]


def test_ids_that_are_changed_in_place_are_other_ids():
    """An environment may fill one TensorDict again and again."""
    rb, ids = buffer(), torch.zeros(2, 1, dtype=torch.int64)
    done = torch.zeros(2, 1, 1, dtype=torch.bool)
    data = TensorDict({"collector": {"traj_ids": ids}, "next": {"done": done}}, [2, 1])
    for first in (0, 2, 0, 4):
        ids[:, 0] = torch.tensor([first, first + 1])
        rb.extend(data)
    assert rb.writer.open_lengths == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
