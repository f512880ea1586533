"""HDF5 files: what h5py alone sees, files of other writers, damage, and writers that were killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import h5py
import numpy as np
import pytest
import torch

from tests.datasets.episodes import assert_same, random_data
from torchrl_mt.datasets import (
    ClipDataset,
    DatasetError,
    EpisodeDataset,
    open_episodes,
    save_episodes,
)
from torchrl_mt.datasets._files import hdf5_rows


def episode(length, first=0):
    """An episode whose every value is told by its step."""
    t = np.arange(first, first + length)
    return {
        "observation": np.stack([t, -t], 1).astype(np.float32),
        "action": t.astype(np.int16),
        "tokens": [np.arange(i % 4) for i in t],
        "text": [f"stép {i}" for i in t],
        "next": {"reward": t[:, None] / 2, "done": (t == t[-1])[:, None]},
    }


def steps_of(path):
    return [each["action"].tolist() for each in EpisodeDataset(path).episodes()]


# ---- what h5py alone sees -----------------------------------------------------------------------


def test_h5py_alone_reads_it(tmp_path):
    path = tmp_path / "a.h5"
    save_episodes([(episode(3), {"task": 7}), (episode(2, 10), {})], path)
    with h5py.File(path) as file:
        assert file["ep_len"][:].tolist() == [3, 2]
        assert file["ep_offset"][:].tolist() == [0, 3]
        t = np.array([0, 1, 2, 10, 11])
        assert file["action"].dtype == np.int16
        assert file["action"][:].tolist() == t.tolist()
        np.testing.assert_array_equal(file["observation"][:], np.stack([t, -t], 1))
        np.testing.assert_array_equal(file["next/reward"][:], t[:, None] / 2)
        assert file["next/done"].dtype == bool
        tokens = np.split(file["tokens/values"][:], file["tokens/ends"][:-1])
        assert [each.tolist() for each in tokens] == [list(range(i % 4)) for i in t]
        text = np.split(file["text/values"][:], file["text/ends"][:-1])
        assert [json.loads(each.tobytes()) for each in text] == [f"stép {i}" for i in t]
        about = file["ep_metadata/values"][: file["ep_metadata/ends"][0]]
        assert json.loads(about.tobytes()) == {"task": 7}
        assert json.loads(file.attrs["schema"])["fields"]


def test_a_shared_next_has_one_row_more(tmp_path):
    path, seen = tmp_path / "a.h5", torch.arange(5)
    agreeing = {"observation": seen[:4], "next": {"observation": seen[1:]}}
    own = {"observation": seen[:4], "next": {"observation": seen[:4] * 10}}
    save_episodes([agreeing, own], path)
    with h5py.File(path) as file:
        assert file["observation"][:].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 10, 20, 30]
        assert "next" not in file
    for got, written in zip(EpisodeDataset(path).episodes(), (agreeing, own), strict=True):
        assert torch.equal(got["next", "observation"], written["next"]["observation"])


def test_small_data_sets_are_small_files(tmp_path):
    save_episodes([{"action": torch.zeros(20, 2)}], tmp_path / "a.h5")
    assert os.path.getsize(tmp_path / "a.h5") < 50_000


# ---- files of other writers ---------------------------------------------------------------------

LAYOUTS = {
    "one row per chunk": {"chunks": (1, 2)},
    "odd chunks": {"chunks": (7, 1)},
    "compressed": {"chunks": (5, 2), "compression": "gzip"},
    "contiguous": {"chunks": None},
    "big endian": {"dtype": ">f4"},
    "unwritten": {"chunks": (5, 2), "fillvalue": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_without_a_schema_are_read(layout, tmp_path):
    path, rng = tmp_path / "flat", np.random.default_rng(0)
    lengths = rng.integers(3, 9, 12)
    total = int(lengths.sum())
    values = rng.standard_normal((total, 2)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file["ep_len"] = lengths.astype(np.int32)
        file["ep_offset"] = lengths.cumsum() - lengths
        if layout == "unwritten":
            file.create_dataset("observation", (total, 2), np.float32, **LAYOUTS[layout])
            values[:] = 3
        else:
            file.create_dataset("observation", data=values, **LAYOUTS[layout])
        file["next/flag"] = np.arange(total) % 5 == 0
        file["reward"] = np.arange(total, dtype=np.float32)
        file["task"] = [f"tásk {i}" for i in range(total)]
        file["about"] = "no column"
    dataset = EpisodeDataset(path)
    assert dataset.lengths.tolist() == lengths.tolist()
    assert dataset.keys == [("next", "flag"), "observation", ("next", "reward"), "task"]
    end = 0
    for got, length in zip(dataset.episodes(), lengths.tolist(), strict=True):
        begin, end = end, end + length
        np.testing.assert_array_equal(got["observation"], values[begin:end])
        assert got["next", "flag"].tolist() == [i % 5 == 0 for i in range(begin, end)]
        assert got["next", "reward"].tolist() == [*range(begin, end)]
        assert got["task"] == [f"tásk {i}" for i in range(begin, end)]
    clips = ClipDataset(EpisodeDataset(path, ["observation"]), 2)
    begins = [i for i in range(total - 1) if i + 1 not in lengths.cumsum()]
    for clip, begin in zip(clips.__getitems__(range(len(clips))), begins, strict=True):
        np.testing.assert_array_equal(clip["observation"], values[begin : begin + 2])
    with pytest.raises(DatasetError, match="save_episodes"):
        open_episodes(path, mode="append")
    assert save_episodes(dataset, tmp_path / "copy.h5") == len(lengths)


# ---- rows ---------------------------------------------------------------------------------------


def test_long_rows_of_several_lengths_are_read(tmp_path):
    rows = [np.arange(100 * (i % 3), 100 * (i % 3) + 50 * i) for i in range(12)]
    save_episodes([{"tokens": rows[:5]}, {"tokens": rows[5:]}], tmp_path / "a.h5")
    clips = ClipDataset(tmp_path / "a.h5", 2)
    order = [7, 2, 0, 9, 4]
    starts = [*range(4), *range(5, 11)]
    for clip, i in zip(clips.__getitems__(order), order, strict=True):
        found = clip.get("tokens", as_list=True)
        for got, row in zip(found, rows[starts[i] : starts[i] + 2], strict=True):
            np.testing.assert_array_equal(got, row)


# ---- writers that were killed, and others -------------------------------------------------------


def test_what_a_killed_writer_leaves_is_whole_and_goes_on(tmp_path):
    path = tmp_path / "a.h5"
    for seed in range(2):
        episodes, metadata = random_data(seed)
        with open_episodes(path, mode="overwrite") as out:
            out.write_episode(episodes[0], metadata[0])
        with open_episodes(path, mode="append") as out:
            for i, each in enumerate(episodes):
                if i:
                    out.write_episode(each, metadata[i])
                left = tmp_path / f"{seed}-{i}.h5"
                shutil.copyfile(path, left)  # What a reader sees now, and after a kill.
                dataset = EpisodeDataset(left)
                assert len(dataset) == i + 1
                for written, got in zip(episodes, dataset.episodes(), strict=False):
                    assert_same(got, written)
                with pytest.raises(OSError, match=r"already open"):
                    h5py.File(left)  # As if the writer still had it open.
                save_episodes([(episodes[0], {"last": True})], left, mode="append")
                dataset = EpisodeDataset(left)
                for j, written in enumerate([*episodes[: i + 1], episodes[0]]):
                    assert_same(dataset.episode(j), written)
                assert dataset.metadata(i) == metadata[i]
                assert dataset.metadata(-1) == {"last": True}
                h5py.File(left).close()


def test_a_write_that_fails_anywhere_is_undone(tmp_path, monkeypatch):
    """Of a private class: a disk is not full at each of its writes in turn."""
    path, expected, write = tmp_path / "a.h5", [], hdf5_rows.GrowingRows.write
    until = 0

    def failing(self, rows, at):
        nonlocal until
        until -= 1
        if not until:
            raise OSError("no space left on device")
        write(self, rows, at)

    monkeypatch.setattr(hdf5_rows.GrowingRows, "write", failing)
    with open_episodes(path) as out:
        for number in range(2 * 14):
            until = 0 if number % 2 else number // 2 + 1  # Every other episode fails, ever later.
            steps = episode(2 + number % 3, 10 * number)
            with contextlib.suppress(OSError):
                out.write_episode(steps)
                expected.append(steps["action"].tolist())
            assert not expected or steps_of(path) == expected
            assert path.exists() == bool(expected)
    assert len(expected) == 14
    assert os.listdir(tmp_path) == ["a.h5"]


# ---- damage -------------------------------------------------------------------------------------


def test_other_files_are_named(tmp_path):
    path = tmp_path / "a.h5"
    path.write_bytes(b"not HDF5")
    with pytest.raises(DatasetError, match=r"a\.h5"):
        EpisodeDataset(path, format="hdf5")
    with h5py.File(path, "w") as file:
        file["x"] = [1]
    with pytest.raises(DatasetError, match="no 'ep_len'"):
        EpisodeDataset(path)
    path.unlink()
    save_episodes([episode(3)], path)
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 99
    with pytest.raises(DatasetError, match="upgrade torchrl_mt"):
        EpisodeDataset(path)
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 1
        del file["action"]
    with pytest.raises(DatasetError, match=r"a\.h5"):
        EpisodeDataset(path)
