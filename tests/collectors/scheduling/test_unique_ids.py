"""No two collectors give out one id, whoever made them and whatever they go on from."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.buffers import buffer_of
from tests.collectors.chats import Chat
from tests.collectors.runs import collecting
from tests.tiers import first_fast
from tests.waiting import PATIENCE
from torchrl_mt.collectors.scheduling import unique_ids as ids
from torchrl_mt.collectors.scheduling.unique_ids import RunIds, UniqueTrajIds, unique_ids
from torchrl_mt.transforms import MergeTurns

TRAJ, GROUP = ("collector", "traj_ids"), "group"
DATA = [{"turns": k % 3 + 1} for k in range(50)]


@pytest.fixture
def make(engine):
    """Makes collectors that are all alike, and shuts them down."""
    made, options = [], {"n": 4, "group_size": 2, "seed": 3, "sampling": {"seed": 3}}

    def make(state=None, buffer=None):
        made.append(collecting(Chat, engine, DATA, replay_buffer=buffer, **options))
        if state is not None:
            made[-1].load_state_dict(state)
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def check(buffer, accepted):
    """Every stored episode has an id of its own, and every group its two members."""
    storage = buffer._storage
    assert storage.num_episodes == accepted
    owners, groups = Counter(), Counter()
    for episode in storage.episodes():
        assert len(set(episode[TRAJ].tolist())) == len(set(episode[GROUP].tolist())) == 1
        assert len(episode) == episode["data"][0]["turns"]
        owners[int(episode[TRAJ][0])] += 1
        groups[int(episode[GROUP][0])] += 1
    assert set(owners.values()) == {1}
    assert set(groups.values()) == {2}


@pytest.mark.parametrize("seed", first_fast(range(4)))
def test_collectors_that_share_a_buffer_share_no_id_through_restarts(make, seed):
    """Each goes on from any earlier state now and then, whatever was delivered since."""
    draw, buffer = random.Random(seed), buffer_of(2000)
    collectors = [make(buffer=buffer) for _ in range(3)]
    states = [collector.state_dict() for collector in collectors]
    streams = [iter(collector) for collector in collectors]
    delivered = 0
    for _ in range(30):
        k = draw.randrange(3)
        what = draw.choice(["play", "play", "play", "save", "restart", "load"])
        if what == "play":
            next(streams[k])
            delivered += 4
        elif what == "save":
            states[draw.randrange(3)] = collectors[k].state_dict()
        else:
            if what == "restart":
                collectors[k].shutdown()
                collectors[k] = make(states[k], buffer)
            else:
                collectors[k].load_state_dict(states[k])
            streams[k] = iter(collectors[k])
    check(buffer, delivered)


@pytest.mark.parametrize("seed", first_fast(range(4)))
def test_steps_of_collectors_may_come_in_any_order(make, seed):
    draw, buffer = random.Random(seed), buffer_of(2000)
    queues = [list(next(iter(make())).split(1)) for _ in range(3)]
    episodes = 4 * len(queues)
    while any(queues):
        queue = draw.choice([queue for queue in queues if queue])
        buffer.extend(torch.cat([queue.pop(0) for _ in range(draw.randint(1, min(3, len(queue))))]))
    check(buffer, episodes)


def test_ids_of_one_collector_are_in_order_and_fit_everywhere(make):
    batches = list(islice(make(), 5))
    for key, per_batch in ((TRAJ, 4), (GROUP, 2)):
        found = torch.cat([batch[key] for batch in batches])
        assert found.dtype == torch.int64
        assert bool((found >= 10**6).all())
        assert bool((found < 2**53).all())
        assert torch.equal(found.double().long(), found)
        assert np.array_equal(np.array(json.loads(json.dumps(found.tolist()))), found.numpy())
        given = found.unique_consecutive()
        assert (given % 10**6).tolist() == list(range(5 * per_batch))
        assert torch.equal(given, given.sort().values)
    rows = MergeTurns()(batches[0])
    assert torch.equal(rows["episode"], batches[0][TRAJ].unique_consecutive())


def test_evaluations_have_ids_of_their_own(make):
    collector = make()
    trained = next(iter(collector))
    evaluated = [collector.evaluate(DATA[:3], n=2) for _ in range(2)]
    for key in (TRAJ, GROUP):
        found = [batch[key].unique() for batch in (trained, *evaluated)]
        assert len(torch.cat(found).unique()) == sum(map(len, found))


def test_a_state_of_an_earlier_version_goes_on(make, engine):
    """Its ids were counted from 0; what is sampled goes on all the same."""
    first = make()
    stream = iter(first)
    before = next(stream)
    old = {**first.state_dict(), "traj_ids": 4}
    expected = next(stream)
    batch = next(iter(make(old)))
    assert batch["data"] == expected["data"]
    for key in (TRAJ, GROUP):
        assert not torch.isin(batch[key], torch.cat([before[key], expected[key]])).any()
        assert not torch.isin(batch[key], torch.arange(10)).any()


def test_seeds_of_calls_do_not_follow_the_ids(make, engine):
    """Neither in a run that is repeated nor in one that goes on; a run that goes on repeats none."""
    asked = []
    generate = engine.generate

    async def listen(prompt_ids, *, seed=None, **sampling):
        asked.append(seed)
        return await generate(prompt_ids, **sampling)

    engine.generate = listen

    def seeds(stream):
        asked.clear()
        next(stream)
        return sorted(asked)

    first, again = make(), make()
    streams = iter(first), iter(again)
    begun = seeds(streams[0])
    assert seeds(streams[1]) == begun
    state = first.state_dict()
    following = seeds(streams[0])
    assert seeds(iter(make(state))) == following
    assert not set(begun) & set(following)


def test_a_collector_that_has_used_its_million_goes_on_elsewhere(monkeypatch):
    monkeypatch.setattr(ids, "_BLOCK", 4)
    found = list(islice(unique_ids(), 40))
    assert len(set(found)) == 40
    assert len({i // 4 for i in found}) == 10
    assert all(4 <= i < 2**53 for i in found)


def batch_of(found, key=TRAJ):
    return TensorDict({key: torch.tensor(found)}, [len(found)])


@given(st.lists(st.integers(-1, 12), min_size=1), st.lists(st.integers(-1, 12), min_size=1))
def test_ids_of_torchrls_collectors_are_renamed_alike(first, second):
    """Equal ids of one collector stay equal and in order; those of a copy are others."""
    rename = UniqueTrajIds()
    copied = pickle.loads(pickle.dumps(rename))
    now, later, there = rename(batch_of(first)), rename(batch_of(second)), copied(batch_of(first))
    before = torch.tensor(first + second)
    after = torch.cat([now[TRAJ], later[TRAJ]])
    assert after.dtype == torch.int64
    assert torch.equal(before < 0, after == before)
    real = before >= 0
    assert torch.equal(before[real][:, None] < before[real], after[real][:, None] < after[real])
    mine, others = after[real], there[TRAJ][torch.tensor(first) >= 0]
    assert not torch.isin(others, mine).any()


def test_more_than_a_million_ids_are_renamed_apart():
    given_ids = [0, 5, 10**6 - 1, 10**6, 3 * 10**6 + 1]
    found = UniqueTrajIds("episode")(batch_of(given_ids, "episode"))["episode"].tolist()
    assert len(set(found)) == len(given_ids)
    assert all(10**6 <= i < 2**53 for i in found)
    with pytest.raises(KeyError, match="track_traj_ids=True"):
        UniqueTrajIds()(batch_of([0], "episode"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_ids_of_small_dtypes_do_not_overflow(dtype):
    renamed = UniqueTrajIds()(TensorDict({TRAJ: torch.tensor([0, 3], dtype=dtype)}, [2]))[TRAJ]
    assert renamed.dtype == torch.int64
    assert renamed.diff() == 3
    assert renamed.min() >= 10**6


def ids_of_a_process(queue, seed):
    """What a process makes that is seeded like its siblings."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    run = RunIds()
    renamed = UniqueTrajIds()(batch_of([0, 1, 2]))[TRAJ].tolist()
    queue.put([list(islice(run.groups, 3)), list(islice(run.episodes, 3)), renamed])


@pytest.mark.slow
@pytest.mark.parametrize(("start", "number"), [("spawn", 2), ("fork", 4)])
def test_processes_share_no_id_however_they_are_seeded(start, number):
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    processes = [context.Process(target=ids_of_a_process, args=(queue, 0)) for _ in range(number)]
    for process in processes:
        process.start()
    found = [ids for _ in processes for part in queue.get(timeout=PATIENCE) for ids in part]
    for process in processes:
        process.join()
    assert len(set(found)) == len(found) == number * 9


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=20))
def test_renamed_pieces_of_two_collectors_never_join(pieces):
    """Though nothing else in them tells whose they are."""
    renames = {source: UniqueTrajIds() for source in (False, True)}
    buffer, sent = buffer_of(2000), {False: 0, True: 0}
    for source, size in pieces:
        place = torch.arange(sent[source], sent[source] + size)
        sent[source] += size
        steps = {TRAJ: place // 3, "source": torch.full((size,), source), "place": place}
        done = (place % 3 == 2)[:, None]
        buffer.extend(renames[source](TensorDict({**steps, "next": {"done": done}}, [size])))
    storage = buffer.storage
    assert storage.num_episodes == sum(steps // 3 for steps in sent.values())
    for episode in storage.episodes():
        assert len(episode["source"].unique()) == len(episode[TRAJ].unique()) == 1
        assert torch.equal(episode["place"] % 3, torch.arange(3))
