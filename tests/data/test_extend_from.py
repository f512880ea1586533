"""A storage takes the episodes of a dataset, some at a time, and loses none.

How many at a time is private, and set to few here: nobody can ask for it.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorStorage
from torchrl.data.datasets.common import BaseDatasetExperienceReplay
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter

from tests.buffers import buffer_of
from tests.tiers import examples
from torchrl_mt.data import EpisodeSampler, EpisodeStorage
from torchrl_mt.data._store import dataset_episodes


class Episodes:
    """A dataset as small as one can be."""

    def __init__(self, episodes):
        self.given = episodes
        self.asked = []

    def __len__(self):
        return len(self.given)

    def episode(self, i):
        self.asked.append(i)
        return self.given[i]


class WithMetadata(Episodes):
    def metadata(self, i):
        return {"number": i} if i % 2 else None


def source_of(kind, episodes):
    if kind in ("storage", "buffer"):
        storage = EpisodeStorage(1000)
        for i, episode in enumerate(episodes):
            storage.append(episode, {"number": i} if i % 2 else None)
        return storage if kind == "storage" else ReplayBuffer(storage=storage)
    return (Episodes if kind == "plain" else WithMetadata)(episodes)


@examples(30, few=5)
@given(
    kind=st.sampled_from(["plain", "metadata", "storage", "buffer"]),
    data=st.sampled_from(["vectors", "turns"]),
    before=st.lists(st.integers(1, 5), max_size=3),
    lengths=st.lists(st.integers(1, 9), max_size=12),
    budgets=st.tuples(st.integers(9, 60), st.none() | st.integers(1, 9)),
    at_a_time=st.integers(1, 20),
)
def test_it_is_what_appending_each_would_have_done(
    make, kind, data, before, lengths, budgets, at_a_time
):
    def episodes(lengths, **kwargs):
        return make.split(getattr(make, data)(lengths, **kwargs)) if lengths else []

    storage, expected = (EpisodeStorage(budgets[0], max_episodes=budgets[1]) for _ in range(2))
    for episode in episodes(before, first_id=90):
        storage.append(episode)
        expected.append(episode)
    new = episodes(lengths, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_episodes, "_STEPS_AT_A_TIME", at_a_time)
        assert storage.extend_from(source_of(kind, new)) == len(new)
    for i, episode in enumerate(new):
        expected.append(episode, {"number": i} if kind != "plain" and i % 2 else None)
    assert storage.lengths.tolist() == expected.lengths.tolist()
    for i in range(storage.num_episodes):
        assert make.steps(storage.episode(i)) == make.steps(expected.episode(i))
        assert storage.metadata(i) == expected.metadata(i)


def test_it_reads_a_bounded_number_of_steps_ahead(make, monkeypatch):
    monkeypatch.setattr(dataset_episodes, "_STEPS_AT_A_TIME", 10)
    dataset, stored = Episodes(make.split(make.vectors([4] * 9))), []
    storage = EpisodeStorage(1000)
    append = storage.append_all

    def watched(steps, *args):
        stored.append((len(dataset.asked), steps.length))
        return append(steps, *args)

    storage.append_all = watched
    assert storage.extend_from(dataset) == 9
    assert stored == [(3, 8), (5, 8), (7, 8), (9, 8), (9, 4)]
    assert dataset.asked == [*range(9)]


def test_keys_choose_what_is_stored(make):
    storage, episode = EpisodeStorage(100), make.vectors([4])
    storage.extend_from(Episodes([episode]), keys=["action", ("next", "reward"), ("next", "done")])
    expected = episode.select("action", ("next", "reward"), ("next", "done"))
    assert make.steps(storage.episode(0)) == make.steps(expected)
    whole = EpisodeStorage(100)
    whole.extend_from(Episodes([episode]), keys=["next"])
    assert make.steps(whole.episode(0)) == make.steps(episode.select("next"))
    with pytest.raises(
        KeyError, match=r"episode 0 of the dataset: keys names 'reward', .*'action'"
    ):
        EpisodeStorage(9).extend_from(Episodes([episode]), keys=["reward"])
    with pytest.raises(TypeError, match=r"keys must be a list of keys, got the string 'action'"):
        EpisodeStorage(9).extend_from(Episodes([episode]), keys="action")


class Unreadable(Episodes):
    def episode(self, i):
        if i == 3:
            raise OSError("episode 3 is damaged.")
        return super().episode(i)


@pytest.mark.parametrize("at_a_time", [1, 6, 1024])
def test_the_episode_that_is_refused_is_named_and_those_before_it_stay(
    make, monkeypatch, at_a_time
):
    monkeypatch.setattr(dataset_episodes, "_STEPS_AT_A_TIME", at_a_time)
    good = make.split(make.vectors([2, 3, 2, 3, 2]))
    long, odd = make.vectors([11]), make.vectors([3]).exclude("action")
    wide = make.vectors([3]).replace(action=torch.zeros(3, dtype=torch.float64))
    batch = make.vectors([4]).reshape(2, 2)
    errors = [
        (Episodes([*good[:3], long, *good[3:]]), ValueError, "refused: .*max_steps=10"),
        (Episodes([*good[:3], odd, *good[3:]]), ValueError, "refused: .*action"),
        (Episodes([*good[:3], wide, *good[3:]]), ValueError, "refused: .*action"),
        (Episodes([*good[:3], good[0][:0], *good[3:]]), ValueError, "refused: .*empty"),
        (Episodes([*good[:3], batch, *good[3:]]), ValueError, r"dataset: .*\[2, 2\]"),
        (Episodes([*good[:3], {"a": 1}, *good[3:]]), TypeError, "dataset: .*got dict"),
    ]
    for dataset, kind, message in errors:
        storage = EpisodeStorage(10)
        with pytest.raises(kind, match=f"episode 3 of.*{message}") as error:
            storage.extend_from(dataset)
        assert storage.lengths.tolist() == [2, 3, 2]
        if "refused" in message:
            assert "The 3 episodes before it were appended." in str(error.value)
    storage = EpisodeStorage(10)
    with pytest.raises(OSError, match="episode 3 is damaged"):
        storage.extend_from(Unreadable(good))
    assert storage.lengths.tolist() == [2, 3, 2]


def test_what_has_no_episodes_is_refused(make):
    storage = EpisodeStorage(10)
    for dataset in (make.vectors([3]), ReplayBuffer(storage=LazyTensorStorage(9)), "path"):
        with pytest.raises(TypeError, match=r"dataset must have len\(dataset\) .*buffer.extend"):
            storage.extend_from(dataset)
    rb = ReplayBuffer(storage=storage)
    for dataset in (storage, rb):
        with pytest.raises(ValueError, match="dataset must be another one"):
            storage.extend_from(dataset)


def test_a_dataset_that_does_not_fit_is_told_of(make, said):
    storage = EpisodeStorage(10)
    assert storage.extend_from(Episodes(make.split(make.vectors([4, 3, 5, 4])))) == 4
    assert storage.lengths.tolist() == [5, 4]
    assert (
        "only the newest 2 of the 4 episodes of the dataset are kept: raise max_steps=10"
        in said()[0]
    )


def test_others_write_to_the_source_meanwhile(make):
    """What the source evicts while it is read is skipped; what it stores is not read."""
    source, storage = EpisodeStorage(12), EpisodeStorage(100)
    for i in range(4):
        source.append(make.vectors([3], first_id=i))
    read = source.episode

    def episode(i):
        found = read(i)
        source.append(make.vectors([6], first_id=9))
        return found

    source.episode = episode
    assert storage.extend_from(source) == 2
    assert [int(e["episode"][0]) for e in storage.episodes()] == [0, 2]


# ---- TorchRL's offline datasets -----------------------------------------------------------------


class Offline(BaseDatasetExperienceReplay):
    """A dataset as TorchRL's own are: TED steps in mapped files, which nobody writes to."""

    def __init__(self, data, folder):
        storage = TensorStorage(data.memmap(folder))
        super().__init__(storage=storage, writer=ImmutableDatasetWriter(), batch_size=2)

    @property
    def data_path(self):
        return None

    data_path_root = data_path

    def _is_downloaded(self):
        return True


@pytest.mark.parametrize("ids", ["episode", "traj_ids", None])
@pytest.mark.parametrize("at_a_time", [None, 5])
def test_offline_datasets_of_torchrl_go_through_a_buffer(make, tmp_path, ids, at_a_time):
    data = make.vectors([3, 6, 1, 4])
    if ids != "episode":
        number = data.pop("episode")
        data.set(("collector", "traj_ids"), number) if ids else None
    dataset = Offline(data, tmp_path)
    buffer = buffer_of(100, EpisodeSampler(), batch_size=2)
    step = at_a_time or len(dataset)
    open_steps = 0
    for first in range(0, len(dataset), step):
        buffer.extend(dataset[first : first + step])
        open_steps = max(open_steps, buffer.writer.stats()["open_steps"])
    assert open_steps < (6 if at_a_time else 1)
    assert buffer.storage.lengths.tolist() == [3, 6, 1, 4]
    assert make.steps(buffer.storage[:]) == make.steps(data)
    assert len(buffer.sample()) in range(2, 13)
