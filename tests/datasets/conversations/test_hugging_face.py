"""Episodes leave as a Hugging Face data set that says all of them, and come back as conversations."""

from __future__ import annotations

import sys

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.data import ReplayBuffer

from tests.buffers import buffer_of
from tests.chat.families import QWEN3
from tests.chat.templates import byte_level
from torchrl_mt.datasets import (
    ConversationDataset,
    EpisodeDataset,
    open_episodes,
    save_episodes,
    to_hf_dataset,
)

from .games import played

datasets = pytest.importorskip("datasets")

FUNCTIONS = [{"name": "f", "arguments": {"q": None}}, {"name": "f", "arguments": {"n": [1, "a"]}}]
NUMBERS = [7, 10, 3]
GUESSES = ["8", "4", "7", "10", "1", "2", "3"]


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Three games of the same player."""
    return played(tokenizer, GUESSES, NUMBERS)


def stored(batch):
    buffer = buffer_of(100)
    buffer.extend(batch)
    return buffer.storage


def split(batch):
    ends = (batch["next", "done"].flatten().nonzero().flatten() + 1).tolist()
    return [batch[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def test_a_row_is_an_episode(batch, tokenizer):
    table = to_hf_dataset(batch)
    assert isinstance(table, datasets.Dataset)
    assert table.num_rows == 3
    rows = [dict(row) for row in table]
    assert [row["num_turns"] for row in rows] == [3, 1, 3]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 1.0]
    assert rows[0]["rewards"] == [0.0, 0.0, 1.0]
    assert {row["stop_reason"] for row in rows} == {"done"}
    assert [row["group"] for row in rows] == batch["group"].unique().tolist()
    assert [row["episode"] for row in rows] == batch["collector", "traj_ids"].unique().tolist()
    assert rows[1]["messages"] == [
        {"role": "user", "content": "guess 1 to 16"},
        {"role": "assistant", "content": "10"},
        {"role": "user", "content": "correct"},
    ]
    first = split(batch)[0]
    for name, key in (
        ("prompt_ids", ("tokens", "prompt")),
        ("response_ids", ("tokens", "response")),
        ("versions", ("versions", "response")),
        ("log_probs", ("log_probs", "response")),
    ):
        assert rows[0][name] == [value.tolist() for value in first.get(key, as_list=True)]


def test_all_that_has_episodes_is_the_same_table(batch):
    expected = to_hf_dataset(batch).to_list()
    for episodes in (
        [batch],
        split(batch),
        iter(split(batch)),
        stored(batch),
        ReplayBuffer(storage=stored(batch)),
        stored(batch).episodes(),
    ):
        assert to_hf_dataset(episodes).to_list() == expected


def test_it_becomes_rows_and_survives_a_file(batch, tokenizer, tmp_path):
    table = to_hf_dataset(batch)
    table.to_parquet(tmp_path / "games.parquet")
    places = {"data_files": str(tmp_path / "games.parquet"), "cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("parquet", split="train", **places)
    assert loaded.to_list() == table.to_list()
    for source in (table, loaded, tmp_path / "games.parquet"):
        dataset = ConversationDataset(source, tokenizer)
        rows = dataset.collate(list(dataset))
        said = rows["tokens", "full"][rows["masks", "all_assistant_mask"]]
        assert tokenizer.decode(said) == " ".join(f"{guess} <end>" for guess in GUESSES)


@pytest.mark.parametrize(("name", "format"), [("games.jsonl", "jsonl"), ("games", "arrow")])
def test_episodes_on_disk_are_conversations_too(batch, tokenizer, tmp_path, name, format):
    save_episodes(stored(batch), tmp_path / name, format=format)
    expected = ConversationDataset(to_hf_dataset(batch), tokenizer)
    for source in (tmp_path / name, to_hf_dataset(EpisodeDataset(tmp_path / name))):
        for row, other in zip(ConversationDataset(source, tokenizer), expected, strict=True):
            assert torch.equal(row["tokens", "full"], other["tokens", "full"])


@pytest.mark.parametrize("has_json", [True, False])
def test_calls_thoughts_weights_and_tools_come_back_from_every_file(
    tmp_path, has_json, monkeypatch
):
    """As they are in the episodes, also where episodes differ in what they have."""
    if not has_json:
        monkeypatch.delattr(datasets, "Json", raising=False)
    calls = [{"id": f"c{k}", "type": "function", "function": f} for k, f in enumerate(FUNCTIONS)]
    asked = {"role": "user", "content": "a"}
    talks = [
        [asked, {"role": "assistant", "content": "", "tool_calls": calls, "weight": 0.5}],
        [asked, {"role": "assistant", "content": "b", "reasoning_content": "hm", "train": False}],
        [asked, {"role": "assistant", "content": "c"}],
    ]
    tools = [{"type": "function", "function": {"name": "f", "default": None}}]
    episodes = [(episode(talk), {"tools": tools} if k else {}) for k, talk in enumerate(talks)]
    tokenizer = QWEN3.on(byte_level())
    expected = [
        {"messages": talk, "tools": data.get("tools")}
        for talk, (_, data) in zip(talks, episodes, strict=True)
    ]
    expected = list(ConversationDataset(expected, tokenizer))
    assert "weights" in expected[0]
    for format in ("arrow", "jsonl", "folder"):
        path = tmp_path / (format + ".jsonl" * (format == "jsonl"))
        with open_episodes(path, format=format) as out:
            for each, metadata in episodes:
                out.write_episode(each, metadata)
            assert len(ConversationDataset(path, tokenizer)) == 3  # Also before it is closed.
    loaded = datasets.load_dataset(
        str(tmp_path / "arrow"), split="train", cache_dir=str(tmp_path / "cache")
    )
    sources = [tmp_path / "arrow", tmp_path / "folder", tmp_path / "jsonl.jsonl", loaded]
    sources += [list(loaded), to_hf_dataset(EpisodeDataset(tmp_path / "arrow"))]
    for source in sources:
        for row, other in zip(ConversationDataset(source, tokenizer), expected, strict=True):
            assert set(row.keys(True, True)) == set(other.keys(True, True))
            assert (row == other).all()


def test_older_releases_get_arguments_as_text(monkeypatch):
    monkeypatch.delattr(datasets, "Json", raising=False)
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"q": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call], "parts": [1]}]
    row = to_hf_dataset([episode(messages)])[0]["messages"][0]
    assert row["tool_calls"][0]["function"]["arguments"] == '{"q": 1}'
    assert row["parts"] == "[1]"
    assert call["function"]["arguments"] == {"q": 1}  # The episode is as it was.


def episode(messages, *, steps=1):
    ends = torch.zeros(steps, 1, dtype=torch.bool)
    ends[-1] = True
    next = TensorDict({"reward": torch.ones(steps, 1), "done": ends}, [steps])
    return TensorDict({"text": NonTensorStack(*[messages] * steps), "next": next}, [steps])


def test_plain_episodes_have_what_they_have():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table = to_hf_dataset([episode(talk, steps=2), episode(talk)])
    names = ["messages", "reward", "rewards", "num_turns", "stop_reason", "episode", "group"]
    assert table.column_names == names
    assert table["stop_reason"][0] is None
    assert list(table["episode"]) == list(table["group"]) == [0, 1]
    assert table[0]["messages"] == talk * 2
    assert to_hf_dataset([]).column_names == names


@pytest.mark.parametrize(
    ("episodes", "error", "match"),
    [
        (3, TypeError, "episodes must be TED TensorDicts or something with episodes"),
        (ReplayBuffer(), TypeError, "episodes must be an EpisodeStorage or a ReplayBuffer on one"),
        ([3], TypeError, r"episode 0 must be a TED TensorDict of shape \[T\], got int"),
        ([TensorDict({}, [])], TypeError, r"episode 0 must be .* of shape \[\]"),
        ([TensorDict({"a": torch.zeros(2)}, [2])], ValueError, "episode 0 must have messages"),
    ],
)
def test_what_is_no_episode_is_refused(episodes, error, match):
    with pytest.raises(error, match=match):
        to_hf_dataset(episodes)


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path, tokenizer):
    monkeypatch.setitem(sys.modules, "datasets", None)  # Its import fails.
    (tmp_path / "a.parquet").touch()
    for use in (to_hf_dataset, lambda _: ConversationDataset(tmp_path / "a.parquet", tokenizer)):
        with pytest.raises(ImportError, match=r"pip install 'torchrl-mt\[arrow\]'"):
            use([])
    talk = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "8"}]
    assert len(ConversationDataset([{"messages": talk}], tokenizer)) == 1


def test_several_rewards_of_a_turn_add_up():
    talk = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    done = torch.tensor([[False], [True]])
    following = TensorDict({"reward": rewards, "done": done}, [2])
    episode = TensorDict({"text": NonTensorStack(*talk), "next": following}, [2])
    row = to_hf_dataset([episode])[0]
    assert (row["rewards"], row["reward"]) == ([3.0, 7.0], 10.0)
