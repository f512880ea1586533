"""Reading a data set: what it holds, what is refused, damage, and formats of a user's own."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch

from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import (
    ClipDataset,
    DatasetError,
    EpisodeDataset,
    load_episodes,
    open_episodes,
    register_format,
    save_episodes,
)

from .every_format import ALL, new_path


@pytest.fixture
def dataset(tmp_path):
    episodes = [
        {"action": torch.arange(n), "next": {"reward": torch.ones(n, 1), "deep": {"x": [1.0] * n}}}
        for n in (3, 1, 5)
    ]
    save_episodes([(e, {"n": len(e["action"])}) for e in episodes], tmp_path / "a.jsonl")
    return EpisodeDataset(tmp_path / "a.jsonl")


def test_what_it_holds(dataset):
    assert len(dataset) == 3
    assert dataset.lengths.tolist() == [3, 1, 5]
    assert [dataset.num_clips(span) for span in (1, 2, 3, 6)] == [9, 6, 4, 0]
    assert dataset.keys == ["action", ("next", "reward"), ("next", "deep", "x")]
    assert dataset.metadata(-1) == {"n": 5}
    assert dataset.episode(-3)["action"].tolist() == [0, 1, 2]
    assert "episodes=3, steps=9" in repr(dataset)


def test_keys_name_entries_or_all_under_them(dataset):
    def keys(*chosen):
        return EpisodeDataset(dataset.path, [*chosen]).keys

    assert keys("next") == [("next", "reward"), ("next", "deep", "x")]
    assert keys(("next", "deep"), "action") == [("next", "deep", "x"), "action"]
    said = "keys names 'rewards', which is not among the entries: 'action'"
    with pytest.raises(KeyError, match=said):
        keys("rewards")
    with pytest.raises(TypeError, match="keys must be a list of keys, got 'action'"):
        EpisodeDataset(dataset.path, "action")
    with pytest.raises(TypeError, match=r"give \[\('next', 'reward'\)\]"):
        EpisodeDataset(dataset.path, ("next", "reward"))


def test_what_is_not_there_is_named(dataset, tmp_path):
    with pytest.raises(IndexError, match=r"episode 3 is out of range: .* has 3 episodes"):
        dataset.episode(3)
    with pytest.raises(IndexError, match="episode -4"):
        dataset.metadata(-4)
    with pytest.raises(ValueError, match="span must be a positive integer, got 0"):
        dataset.num_clips(0)
    with pytest.raises(FileNotFoundError, match="there is no data set at"):
        EpisodeDataset(tmp_path / "b.jsonl")
    (tmp_path / "notes.txt").write_text("no episodes")
    with pytest.raises(DatasetError, match=r"notes\.txt is no data set of a known format"):
        EpisodeDataset(tmp_path / "notes.txt")


def test_episodes_appended_later_are_not_seen(dataset):
    with open_episodes(dataset.path, mode="append") as out:
        out.write_episode(dataset.episode(0))
    assert len(dataset) == len([*dataset.episodes()]) == 3
    assert len(EpisodeDataset(dataset.path)) == 4


def test_it_can_be_pickled_and_closed(dataset):
    copy = pickle.loads(pickle.dumps(dataset))
    with dataset:
        assert (copy.episode(2) == dataset.episode(2)).all()
    assert dataset.episode(2)["action"].tolist() == [0, 1, 2, 3, 4]  # It is opened again.


@pytest.mark.parametrize("format", ALL)
def test_a_foreign_file_is_named(format, tmp_path):
    path = new_path(tmp_path, format, "foreign")
    path.write_bytes(b"\x00\x01 not this\n" * 2)
    with pytest.raises(DatasetError, match=path.name):
        EpisodeDataset(path)
    with pytest.raises(DatasetError, match=path.name):
        EpisodeDataset(path, format=format).episode(0)
    path.unlink()
    path.mkdir()
    with pytest.raises(DatasetError, match=path.name):
        EpisodeDataset(path, format=format)


# ---- formats of a user's own --------------------------------------------------------------------


class Numbers:
    """Reads a file of numbers, one episode a line."""

    opened = 0

    def __init__(self, path):
        self.lines = path.read_text().splitlines()
        self.lengths = [len(line.split()) for line in self.lines]
        self.closed = False
        Numbers.opened += 1

    def episode(self, i):
        return {"number": [int(word) for word in self.lines[i].split()]}

    def close(self):
        self.closed = True


class NumbersWriter:
    def __init__(self, path, mode, separator=" "):
        assert mode in ("error", "append")
        self.file, self.separator = path.open("a"), separator

    def write_episode(self, episode, metadata):
        assert metadata == {}
        self.file.write(self.separator.join(map(str, episode["number"].tolist())) + "\n")
        self.file.flush()

    def close(self):
        self.file.close()


@pytest.fixture
def numbers():
    register_format("numbers", Numbers, NumbersWriter, lambda path: path.suffix == ".numbers")


def test_a_registered_format_is_written_and_read(numbers, tmp_path):
    path = tmp_path / "a.numbers"
    with open_episodes(path) as out:
        out.write_episode({"number": [1, 2, 3]})
        with pytest.raises(ValueError, match="'number' must be as in the first episode"):
            out.write_episode({"number": [0.5]})
    save_episodes([{"number": [4, 5]}], path, mode="append", separator="  ")
    dataset = EpisodeDataset(path)
    assert (dataset.format, dataset.lengths.tolist()) == ("numbers", [3, 2])
    assert dataset.episode(1)["number"].tolist() == [4, 5]
    assert dataset.metadata(1) == {}
    assert [clip["number"].tolist() for clip in ClipDataset(dataset, 2)] == [[1, 2], [2, 3], [4, 5]]
    storage = EpisodeStorage(10)
    assert load_episodes(path, storage) == 2
    with pytest.raises(TypeError, match="has no option 'crf'; it has 'separator'"):
        open_episodes(path, mode="append", crf=3)


def test_an_unreadable_episode_is_named_and_the_rest_is_read(numbers, tmp_path, caplog):
    path = tmp_path / "a.numbers"
    path.write_text("1 2\n3 what\n5 6\n")
    dataset = EpisodeDataset(path)
    with pytest.raises(DatasetError, match=r"episode 1 of .*a\.numbers cannot be read: invalid"):
        dataset.episode(1)
    with pytest.raises(DatasetError, match="episode 1"):
        [*dataset.episodes()]
    read = [episode["number"].tolist() for episode in dataset.episodes(skip_unreadable=True)]
    assert read == [[1, 2], [5, 6]]
    assert "It is left out." in caplog.text
    clips = ClipDataset(dataset, 2)
    assert clips[2]["number"].tolist() == [5, 6]
    with pytest.raises(DatasetError, match="episode 1"):
        clips.__getitems__([0, 1, 2])


def test_a_reader_that_fails_is_named(tmp_path):
    def broken(path):
        raise RuntimeError("no such codec")

    register_format("broken", broken, None, lambda path: path.suffix == ".broken")
    path = tmp_path / "a.broken"
    path.write_text("")
    with pytest.raises(DatasetError, match=r"a\.broken cannot be read as 'broken': no such codec"):
        EpisodeDataset(path)
    with pytest.raises(ValueError, match="'broken' can be read only"):
        open_episodes(tmp_path / "b.broken")


def test_bad_formats_are_refused():
    for arguments, match in {
        ("", None, None, bool): "name must be a string",
        ("a", 1, None, bool): "reader must be callable or None",
        ("a", None, 1, bool): "writer must be callable or None",
        ("a", None, None, "a"): "detect must be callable",
    }.items():
        with pytest.raises(TypeError, match=match):
            register_format(*arguments)


@pytest.mark.parametrize(
    ("format", "module"), [("arrow", "pyarrow"), ("lance", "lance"), ("video", "av")]
)
def test_a_missing_library_is_named_with_its_extra(format, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    path = new_path(tmp_path, format, "a")
    with pytest.raises(ImportError, match=rf"pip install 'torchrl-mt\[{format}\]'"):
        open_episodes(path, format=format)
    assert not path.exists()
