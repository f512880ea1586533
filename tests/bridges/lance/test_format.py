"""Lance: what `lance` reads alone, versions, other programs' data, processes."""

from __future__ import annotations

import os
import random

import lance as lance_library
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from tests.datasets.episodes import assert_same, random_bits
from torchrl_mt.bridges.lance import format as lance
from torchrl_mt.datasets import DatasetError, EpisodeDataset, open_episodes


def walk(T: int, *, agrees: bool = True) -> TensorDict:
    """An episode whose next observations are, or are not, the observations one step later."""
    observation = torch.arange((T + 1) * 2.0).reshape(T + 1, 2)
    following = observation[1:] if agrees else -observation[1:]
    data = {
        "observation": observation[:-1],
        "action": torch.arange(T),
        "next": {"observation": following, "reward": torch.ones(T, 1)},
    }
    return TensorDict(data, [T])


def write(path, episodes, mode="append"):
    with open_episodes(path, format="lance", mode=mode) as out:
        out.write_episodes(episodes)


def test_lance_alone_reads_every_column(tmp_path):
    path = tmp_path / "x.lance"
    half = torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    given = {
        "image": torch.arange(24, dtype=torch.uint8).reshape(2, 2, 2, 3),
        "flag": torch.tensor([True, False]),
        "signal": torch.tensor([1 + 2j, 3j]),
        "half": half,
        "nothing": torch.zeros(2, 0),
        "say": ["hi", "1"],
        "tokens": [[5, 6], [7]],
        "crops": [torch.tensor([[1, 2]]), torch.zeros(0, 3, dtype=torch.int64)],
    }
    write(path, [given])
    table = lance_library.dataset(path).to_table()
    assert table.to_pydict() == {
        "episode": [0, 0],
        "step": [0, 1],
        "length": [2, 2],
        "image": [[*range(12)], [*range(12, 24)]],
        "flag": [True, False],
        "signal": [[1.0, 2.0], [0.0, 3.0]],
        "half": half.view(torch.int16).tolist(),
        "say": ["hi", '"1"'],
        "tokens": [[5, 6], [7]],
        "crops": [[1, 2], []],
        "crops_shape": [[1, 2], [0, 3]],
    }


def test_observations_have_rows_beyond_the_steps(tmp_path):
    path = tmp_path / "x.lance"
    episodes = [walk(2), walk(3, agrees=False), walk(1)]
    write(path, episodes)
    data = lance_library.dataset(path)
    rows = data.to_table().to_pydict()
    assert rows["episode"] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]
    assert rows["step"] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]
    assert rows["action"] == [0, 1, 0, 0, 1, 2, 0, 0, 0, 0, 0]
    assert rows["observation"][2] == [4.0, 5.0]
    assert "next_observation" not in rows
    steps = data.to_table(filter="step < length")
    assert steps["action"].to_pylist() == [0, 1, 0, 1, 2, 0]
    dataset = EpisodeDataset(path)
    for i, episode in enumerate(episodes):
        assert_same(dataset.episode(i), episode)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.uint64])
def test_lance_alone_reads_every_bit(dtype, tmp_path):
    values = random_bits(random.Random(0), (1000, 3), dtype)
    write(tmp_path / "x.lance", [{"x": values}])
    column = lance_library.dataset(tmp_path / "x.lance").to_table()["x"].combine_chunks()
    assert column.flatten().to_numpy().tobytes() == values.numpy().tobytes()


def test_names_of_columns(tmp_path):
    keys = ["step", "a", "a_b", "a.b", "A_B", "_rowid", "é `x`"]
    data = {key: torch.tensor([i, -i]) for i, key in enumerate(keys)}
    episode = TensorDict({**data, "a": {"b": data["a"]}}, [2])
    write(tmp_path / "x.lance", [episode])
    assert_same(EpisodeDataset(tmp_path / "x.lance").episode(0), episode)
    names = lance_library.dataset(tmp_path / "x.lance").schema.names
    assert names[3:] == ["step_2", "a_b", "a_b_2", "a_b_3", "A_B_4", "rowid", "é__x_"]


def test_versions_overwrite_and_append(tmp_path):
    path = tmp_path / "x.lance"
    write(path, [walk(3)])
    before = lance_library.dataset(path)
    write(path, [walk(2)])
    assert lance_library.dataset(path).version > before.version
    write(path, [{"x": [1, 2, 3]}], "overwrite")
    data = lance_library.dataset(path)
    assert data.schema.names == ["episode", "step", "length", "x"]
    assert data.count_rows() == 3
    assert len(data.versions()) == 1
    assert len(os.listdir(path / "data")) == 1
    with pytest.raises(ValueError, match="'x' must"):
        write(path, [{"x": [4]}, {"x": ["five"]}], "overwrite")
    assert lance_library.dataset(path).to_table()["x"].to_pylist() == [1, 2, 3]
    assert len(os.listdir(path / "data")) == 1


def test_an_overwrite_of_several_files_is_one_version(tmp_path, monkeypatch):
    path = tmp_path / "x.lance"
    monkeypatch.setattr(lance._Writer, "fold_episodes", 2)
    write(path, [walk(1)])
    with open_episodes(path, mode="overwrite") as out:
        for T in range(1, 6):
            out.write_episode(walk(T))
            assert len(EpisodeDataset(path)) == 1
    assert EpisodeDataset(path).lengths.tolist() == [1, 2, 3, 4, 5]
    assert len(lance_library.dataset(path).get_fragments()) == 3


def test_the_format_is_told_by_content_or_suffix(tmp_path):
    write(tmp_path / "plain", [walk(2)])
    assert EpisodeDataset(tmp_path / "plain").format == "lance"
    with open_episodes(tmp_path / "x.lance") as out:
        assert out.format == "lance"
    assert not (tmp_path / "x.lance").exists()


def test_data_of_other_programs_is_refused(tmp_path):
    path = tmp_path / "x.lance"
    lance_library.write_dataset(pa.table({"a": [1, 2]}), path)
    for use in (lambda: EpisodeDataset(path), lambda: open_episodes(path, mode="append")):
        with pytest.raises(DatasetError, match="a Lance data set of another program"):
            use()
    write(path, [walk(2)], "overwrite")
    assert_same(EpisodeDataset(path).episode(0), walk(2))
    assert os.listdir(tmp_path) == ["x.lance"]


def test_rows_of_other_programs_are_noticed(tmp_path):
    path = tmp_path / "x.lance"
    write(path, [walk(2), walk(3)])
    lance_library.dataset(path).delete("episode = 0 AND step = 1")
    with pytest.raises(DatasetError, match="6 rows, which are no whole episodes: another program"):
        EpisodeDataset(path)


def test_a_fork_is_refused_before_lance_crashes_in_it(tmp_path, monkeypatch):
    write(tmp_path / "x.lance", [walk(4)])
    monkeypatch.setattr(lance, "_process", os.getpid() + 1)
    with pytest.raises(Exception, match=r"does not work in a fork .*context='forkserver'"):
        EpisodeDataset(tmp_path / "x.lance")
    with pytest.raises(RuntimeError, match="does not work in a fork"):
        open_episodes(tmp_path / "y.lance")
