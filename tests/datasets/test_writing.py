"""Writing to disk and to memory: modes, what is refused, and what an error leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tests.buffers import buffer_of
from torchrl_mt.data import ClipSampler, EpisodeStorage
from torchrl_mt.datasets import (
    DatasetError,
    EpisodeDataset,
    episode_writer,
    load_episodes,
    open_episodes,
    save_episodes,
)

from .every_format import ALL, new_path

every_format = pytest.mark.parametrize("format", ALL)


def episode(*actions):
    return {"action": torch.tensor(actions), "next": {"reward": torch.ones(len(actions), 1)}}


def actions(path):
    return [each["action"].tolist() for each in EpisodeDataset(path).episodes()]


def contents(folder):
    return sorted(os.listdir(folder))


# ---- modes --------------------------------------------------------------------------------------


@every_format
def test_error_refuses_what_exists(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    save_episodes([episode(1)], path, format=format)
    with pytest.raises(FileExistsError, match="mode='append'"):
        open_episodes(path, format=format)
    assert actions(path) == [[1]]


@every_format
def test_append_makes_a_new_data_set_and_goes_on_with_it(format, tmp_path):
    path = new_path(tmp_path, format, "deep") / new_path(tmp_path, format, "a").name
    for i in range(3):
        save_episodes([episode(i), episode(i, i)], path, format=format, mode="append")
    assert actions(path) == [[0], [0, 0], [1], [1, 1], [2], [2, 2]]
    with pytest.raises(ValueError, match=r"'action' must be as in the first episode.*float32"):
        save_episodes([episode(0.5)], path, mode="append")
    assert len(actions(path)) == 6


@every_format
def test_overwrite_shows_the_new_episodes_only_when_it_is_closed(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    save_episodes([episode(1), episode(2)], path, format=format, mode="overwrite")
    with open_episodes(path, format=format, mode="overwrite") as out:
        out.write_episode(episode(3))
        assert actions(path) == [[1], [2]]
    assert actions(path) == [[3]]
    assert contents(tmp_path) == [path.name]


@every_format
@pytest.mark.parametrize("mode", ["error", "append", "overwrite"])
def test_an_exception_loses_the_open_episode_or_the_overwrite(format, mode, tmp_path):
    path = new_path(tmp_path, format, "a")
    if mode != "error":
        save_episodes([episode(1)], path, format=format)

    def play():
        yield episode(2)
        yield episode(3, 3)
        raise KeyError("the environment is gone")

    def write():
        with open_episodes(path, format=format, mode=mode) as out:
            out.write_episodes(play())

    with pytest.raises(KeyError):
        write()
    left = {"error": [[2], [3, 3]], "append": [[1], [2], [3, 3]], "overwrite": [[1]]}[mode]
    assert actions(path) == left
    with open_episodes(path, format=format, mode="overwrite"):
        pass  # Nothing is written, so nothing is replaced.
    assert actions(path) == left
    assert contents(tmp_path) == [path.name]


@every_format
def test_nothing_is_made_without_an_episode(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    with open_episodes(path, format=format):
        pass
    assert contents(tmp_path) == []
    with open_episodes(path, format=format) as out, pytest.raises(TypeError, match="step 1"):
        out.write_episode({"action": [1, 2], "item": [None, object()]})
    assert contents(tmp_path) == []


@every_format
def test_one_format_replaces_another(format, tmp_path):
    other = "jsonl" if format != "jsonl" else "folder"
    path = tmp_path / "data"
    save_episodes([episode(1)], path, format=other)
    with pytest.raises(ValueError, match=f"must be that of the data set to append to, '{other}'"):
        open_episodes(path, format=format, mode="append")
    save_episodes([episode(2)], path, format=format, mode="overwrite")
    assert actions(path) == [[2]]
    assert contents(tmp_path) == ["data"]


@every_format
def test_only_one_writer_at_a_time(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    with open_episodes(path, format=format) as out:
        out.write_episode(episode(1))
        with pytest.raises(BlockingIOError, match="another writer"):
            open_episodes(path, format=format, mode="append")
        assert actions(path) == [[1]]  # Reading is free.
        out.write_episode(episode(2))
    save_episodes([episode(3)], path, mode="append")
    assert actions(path) == [[1], [2], [3]]


@every_format
def test_what_is_no_data_set_is_not_replaced(format, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("everything")
    for mode in ("overwrite", "append"):
        with pytest.raises(DatasetError, match="no data set of a known format"):
            open_episodes(tmp_path / "home", format=format, mode=mode)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "everything"


@every_format
def test_an_empty_folder_may_become_a_data_set(format, tmp_path):
    if format in ("hdf5", "jsonl"):
        pytest.skip("a data set of this format is a file")
    save_episodes([episode(1)], tmp_path, format=format)
    assert actions(tmp_path) == [[1]]


# ---- what is refused ----------------------------------------------------------------------------


@every_format
def test_an_episode_that_does_not_fit_is_named_and_writes_nothing(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    refused = {
        "'action' must be as in": {**episode(1), "action": torch.ones(1, 2)},
        "'extra' is not among them": {**episode(1), "extra": [1]},
        "is missing": {"action": torch.tensor([1])},
        "one value per step in every entry": {**episode(1), "action": torch.tensor([1, 2])},
        "at least one step": episode(),
    }
    with open_episodes(path, format=format) as out:
        out.write_episode(episode(1))
        for match, odd in refused.items():
            with pytest.raises(ValueError, match=match):
                out.write_episode(odd)
        out.write_episode(episode(2))
    assert actions(path) == [[1], [2]]


def test_bad_arguments_are_named(tmp_path):
    said = "'folder' has no option 'jpeg_qualty'; it has 'jpeg_quality'"
    with pytest.raises(TypeError, match=said):
        open_episodes(tmp_path / "a", jpeg_qualty=90)
    with pytest.raises(TypeError, match="'jsonl' has no option 'crf'; it has none"):
        open_episodes(tmp_path / "a.jsonl", crf=3)
    with pytest.raises(ValueError, match=r"mode must be one of .* got 'w'"):
        open_episodes(tmp_path / "a", mode="w")
    with pytest.raises(ValueError, match=r"format must be one of .*'hdf5'.* got 'csv'"):
        open_episodes(tmp_path / "a", format="csv")
    with pytest.raises(ValueError, match=r"its suffix '\.csv' is none of \.h5"):
        open_episodes(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="can be read only"):
        open_episodes(tmp_path / "a", format="minari")
    with open_episodes(tmp_path / "a.jsonl") as out:
        with pytest.raises(TypeError, match="metadata must be a dict"):
            out.write_episode(episode(1), metadata=[1])
        with pytest.raises(TypeError, match="metadata: a set cannot be written"):
            out.write_episode(episode(1), metadata={"seen": {1}})
        with pytest.raises(TypeError, match="episode must be a TensorDict"):
            out.write_episode([1, 2])
        with pytest.raises(ValueError, match=r"batch size of \[T\], got \[1, 2\]"):
            out.write_episode(TensorDict({"action": torch.ones(1, 2)}, [1, 2]))
    with pytest.raises(ValueError, match="is closed"):
        out.write_episode(episode(1))
    assert contents(tmp_path) == []


# ---- into memory --------------------------------------------------------------------------------


def test_what_writes_to_disk_writes_to_a_buffer(tmp_path):
    def play(out):
        with out:
            out.write_episode(episode(1, 2), {"player": "Ann"})
            out.write_episodes([episode(3), (episode(4), {"player": "Bob"})])

    buffer = buffer_of(100, ClipSampler(slice_len=2), batch_size=2)
    play(episode_writer(buffer))
    play(open_episodes(tmp_path / "a.jsonl"))
    dataset = EpisodeDataset(tmp_path / "a.jsonl")
    for i, player in enumerate(["Ann", None, "Bob"]):
        assert buffer.storage.metadata(i).get("player") == player
        assert dataset.metadata(i).get("player") == player
        assert torch.equal(buffer.storage.episode(i)["action"], dataset.episode(i)["action"])
    assert buffer.sample()["action"].tolist() == [1, 2]


def test_a_key_filter_is_a_list_of_keys_or_a_function():
    for key_filter in (["action"], lambda data: {"action": data["action"]}):
        storage = EpisodeStorage(10)
        episode_writer(storage, key_filter).write_episode(episode(1, 2))
        assert set(storage.episode(0).keys(True, True)) == {"action"}
    with pytest.raises(TypeError, match="key_filter must be a list of keys"):
        episode_writer(EpisodeStorage(10), "action")
    with pytest.raises(TypeError, match="buffer must be an EpisodeStorage or a ReplayBuffer on"):
        episode_writer(ReplayBuffer())


@pytest.mark.parametrize("key", ["acton", ("next", "rewards")])
def test_a_key_filter_of_keys_that_are_not_there_is_named(key):
    storage, said = (
        EpisodeStorage(10),
        "key_filter names .* which is not among the entries: 'action'",
    )
    with pytest.raises(KeyError, match=said):
        episode_writer(storage, ["action", key]).write_episode(episode(1))
    assert storage.num_episodes == 0


def test_an_episode_is_no_list_of_episodes(tmp_path):
    one = TensorDict({"action": torch.ones(3)}, [3])
    for odd in (episode(1), one, None):
        with pytest.raises(TypeError, match=f"iterable of episodes, got {type(odd).__name__}"):
            episode_writer(EpisodeStorage(10)).write_episodes(odd)
        with pytest.raises(TypeError, match=f"iterable of episodes, got {type(odd).__name__}"):
            save_episodes(odd, tmp_path / "a.jsonl")
    with pytest.raises(TypeError, match=r"got list: episode_writer\(buffer\).write_episodes"):
        load_episodes([episode(1)], EpisodeStorage(10))
    assert contents(tmp_path) == []


def test_of_several_episodes_the_odd_one_is_named(tmp_path):
    with pytest.raises(ValueError, match="episode 2: 'action' must be as in the first episode"):
        save_episodes([episode(1), episode(2), episode(0.5)], tmp_path / "a.jsonl")
    with pytest.raises(TypeError, match="episode 0: episode must be a TensorDict"):
        save_episodes([[1]], tmp_path / "a.jsonl", mode="append")
    assert actions(tmp_path / "a.jsonl") == [[1], [2]]


def test_the_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_episodes([episode(1)], "~/a.jsonl")
    assert contents(tmp_path) == ["a.jsonl"]
    assert actions("~/a.jsonl") == [[1]]


# ---- the edges of a file system and of a program ------------------------------------------------


def test_a_path_is_the_same_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("a.jsonl", "link.jsonl")
    with open_episodes("a.jsonl") as out:
        out.write_episode(episode(1))
        with pytest.raises(BlockingIOError, match="another writer"):
            open_episodes("link.jsonl", mode="append")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        out.write_episode(episode(2))
    assert contents(tmp_path / "elsewhere") == []
    assert actions(tmp_path / "link.jsonl") == [[1], [2]]


def test_a_suffix_may_be_in_capitals(tmp_path):
    save_episodes([episode(1)], tmp_path / "A.JSONL")
    assert EpisodeDataset(tmp_path / "A.JSONL").format == "jsonl"


def test_a_file_is_no_folder_of_data_sets(tmp_path):
    (tmp_path / "notes").write_text("")
    with pytest.raises(NotADirectoryError, match=r"a\.jsonl cannot be made: .*notes is a file"):
        open_episodes(tmp_path / "notes" / "deep" / "a.jsonl")
    assert contents(tmp_path) == ["notes"]


@every_format
@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_writer_that_is_never_closed_is_named(format, mode, tmp_path):
    path = new_path(tmp_path, format, "a")
    save_episodes([episode(1)], path, format=format)
    out = open_episodes(path, format=format, mode=mode)
    out.write_episode(episode(2))
    with pytest.warns(ResourceWarning, match=f"the writer of {path} was never closed"):
        del out
    assert actions(path) == ([[1], [2]] if mode == "append" else [[1]])
    assert contents(tmp_path) == [path.name]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("end", [EpisodeDataset.close, lambda dataset: None])
@every_format
def test_no_file_stays_open(format, end, tmp_path, recwarn):
    path = new_path(tmp_path, format, "a")
    for _ in range(2):
        save_episodes([episode(1)], path, format=format, mode="append")
    dataset = EpisodeDataset(path)
    dataset.episode(0)
    end(dataset)
    del dataset
    gc.collect()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            assert str(tmp_path) not in os.readlink(each)
    assert not recwarn.list


def test_steps_of_several_episodes_are_refused(tmp_path):
    done = torch.tensor([False, True, False, True])
    steps = {"action": torch.arange(4), "next": {"done": done}}
    for out in (open_episodes(tmp_path / "a.jsonl"), episode_writer(EpisodeStorage(10))):
        with out, pytest.raises(ValueError, match=r"\('next', 'done'\) is true at step 1 of 4"):
            out.write_episode(steps)
    per_agent = torch.tensor([[True, False], [True, True]]).unsqueeze(-1)
    save_episodes([{"next": {"done": per_agent}}], tmp_path / "a.jsonl")


@every_format
def test_threads_write_whole_episodes(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    with open_episodes(path, format=format) as out:

        def write(k):
            for _ in range(5):
                out.write_episode(episode(*[k] * k))

        threads = [threading.Thread(target=write, args=(k,)) for k in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(actions(path)) == [[1]] * 5 + [[2] * 2] * 5 + [[3] * 3] * 5


def test_metadata_is_a_copy_and_the_same_from_memory_and_disk(tmp_path):
    storage, given = EpisodeStorage(10), {"seeds": [1], "score": np.float64(0.5)}
    for out in (episode_writer(storage), open_episodes(tmp_path / "a.jsonl")):
        with out:
            out.write_episode(episode(1), given)
    given["seeds"].append(2)
    for metadata in (storage.metadata(0), EpisodeDataset(tmp_path / "a.jsonl").metadata(0)):
        assert metadata == {"seeds": [1], "score": 0.5}
        assert type(metadata["score"]) is float
