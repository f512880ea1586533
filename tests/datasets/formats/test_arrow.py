"""Parquet files: what `datasets` reads of them, names, strings, damage."""

from __future__ import annotations

import json
import random

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tensordict import TensorDict

from tests.datasets.episodes import (
    Objects,
    Rows,
    Steps,
    assert_same,
    pack,
    random_bits,
    random_data,
)
from tests.tiers import examples
from torchrl_mt.datasets import EpisodeDataset, open_episodes, save_episodes
from torchrl_mt.datasets.formats import arrow


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Keep `datasets` quiet and in its place."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def load(path, tmp_path):
    return datasets.load_dataset(str(path), cache_dir=str(tmp_path / "cache"), split="train")


def turns(*messages):
    return Objects([list(each) for each in messages])


def test_datasets_shows_what_a_person_expects(tmp_path):
    path = tmp_path / "chats"
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    columns = {
        ("text",): turns([ask, answer], [ask, call]),
        ("tokens", "response"): Rows([torch.tensor([5]), torch.tensor([6, 7])]),
        ("log_probs", "response"): Rows([torch.tensor([-0.5]), torch.tensor([-0.25, -1.0])]),
        ("next", "reward"): torch.tensor([[0.0], [1.0]]),
        ("next", "done"): torch.tensor([[False], [True]]),
        ("image",): torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3),
        ("crops",): Rows([torch.zeros(1, 2), torch.ones(2, 1)]),
        ("signal",): torch.tensor([1 + 2j, 3j]),
        ("observation",): torch.tensor([1, 2]),
        ("next", "observation"): torch.tensor([2, 3]),
        ("stop_reason",): Objects(["", "eos"]),
        ("info",): Objects([{"a": 1}, None]),
    }
    save_episodes([(pack(Steps(2, columns), unread=True), {"task": "é"})], path, format="arrow")
    loaded = load(path, tmp_path)
    assert loaded[0] == {
        "length": 2,
        "metadata": '{"task": "é"}',
        "messages": [ask, answer, ask, {"role": "assistant", "content": None}],
        "text": [json.dumps([ask, answer]), json.dumps([ask, call])],
        "tokens.response": [[5], [6, 7]],
        "log_probs.response": [[-0.5], [-0.25, -1.0]],
        "next.reward": [0.0, 1.0],
        "next.done": [False, True],
        "image": [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]],
        "crops": [[0.0, 0.0], [1.0, 1.0]],
        "crops.shape": [[1, 2], [2, 1]],
        "signal": [[1.0, 2.0], [0.0, 3.0]],
        "observation": [1, 2, 3],
        "stop_reason": ["", "eos"],
        "info": ['{"a": 1}', "null"],
    }
    files = datasets.load_dataset(
        "parquet", data_files=f"{path}/*/*.parquet", cache_dir=str(tmp_path / "cache")
    )
    assert files["train"][0] == loaded[0]


@examples(20, few=3)
@given(st.integers(0, 2**32))
def test_datasets_reads_every_episode_of_any_schema(tmp_path_factory, seed):
    tmp_path = tmp_path_factory.mktemp("any")
    episodes, _ = random_data(seed)
    save_episodes(episodes, tmp_path / "x", format="arrow")
    loaded = load(tmp_path / "x", tmp_path)
    assert loaded["length"][:] == [len(episode) for episode in episodes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_datasets_reads_every_bit(dtype, tmp_path):
    values = random_bits(random.Random(0), (1000,), dtype)
    values[:3] = torch.tensor([-0.0, 0.0, float("nan")])
    save_episodes([{"x": values}], tmp_path / "x", format="arrow")
    column = load(tmp_path / "x", tmp_path).with_format("arrow")[:]["x"].combine_chunks()
    assert column.flatten().to_numpy().tobytes() == values.numpy().tobytes()


def test_columns_have_names_of_their_own(tmp_path):
    data = {key: torch.tensor([i, -i]) for i, key in enumerate(["length", "a", "a.b", "A", ""])}
    episode = TensorDict({**data, "a": {"b": data["a"]}}, [2])
    save_episodes([episode], tmp_path / "x", format="arrow")
    assert_same(EpisodeDataset(tmp_path / "x").episode(0), episode)
    names = ["length", "metadata", "length_2", "a.b", "a.b_2", "A", "entry"]
    assert load(tmp_path / "x", tmp_path).column_names == names


ODD = ["null", "-0.5", "NaN", '"', '"a"', "[1]", "{}", " 1 ", '"a\nb"', "\ufeff1"]
LONG = ["9" * 5000, "[" * 100_000]
"""More than Python's reader of JSON takes."""


@examples(15, few=3)
@given(strings=st.lists(st.text() | st.text(alphabet='"[]{}:,0-eNan\\ \n'), max_size=20))
def test_a_string_is_itself_unless_it_reads_as_something_else(strings, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("strings")
    strings = [*strings, *ODD, *LONG]
    save_episodes([{"x": strings}], tmp_path / "x", format="arrow")
    assert list(EpisodeDataset(tmp_path / "x").episode(0)["x"]) == strings
    (shown,) = load(tmp_path / "x", tmp_path)["x"]
    for string, told in zip(strings, shown, strict=True):
        if told != string:
            if string not in LONG:
                json.loads(string.lstrip("\ufeff"))  # It would read as something else.
            assert json.loads(told) == string


def test_row_groups_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_ROW_GROUP", 2000)
    episodes = ({"x": torch.arange(50) + i, "y": [str(i)] * 50} for i in range(12))
    save_episodes(episodes, tmp_path / "x", format="arrow")
    (file,) = (tmp_path / "x").glob("*/*.parquet")
    assert parquet.ParquetFile(file).num_row_groups == 4
    dataset = EpisodeDataset(tmp_path / "x")
    for i in (5, 0, 11, 4, 3):
        assert dataset.episode(i)["x"].tolist() == list(range(i, i + 50))
        assert dataset.episode(i)["y"] == [str(i)] * 50


def test_too_much_for_one_episode_is_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "x"
    tokens = [[1, 2], [3]]
    with open_episodes(path, format="arrow") as out:
        out.write_episode({"tokens": tokens, "x": [1, 2]})
        monkeypatch.setattr("torchrl_mt.datasets._encoding.arrow_columns._MOST_VALUES", 5)
        said = r"'tokens' has 6 values .* takes 5: use format='hdf5'"
        with pytest.raises(ValueError, match=said):
            out.write_episode({"tokens": [[1, 2, 3], [4, 5, 6]], "x": [1, 2]})
        out.write_episode({"tokens": tokens, "x": [3, 4]})
    dataset = EpisodeDataset(path)
    assert [episode["x"].tolist() for episode in dataset.episodes()] == [[1, 2], [3, 4]]
