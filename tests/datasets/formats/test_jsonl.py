"""Format jsonl: what its lines say to people and other tools, and what damage does to it."""

from __future__ import annotations

import json
import math
import os
import random
import re

import pytest
import torch

from tests.datasets.episodes import assert_same, random_data
from tests.tiers import few_or_many
from torchrl_mt.datasets import (
    ClipDataset,
    DatasetError,
    EpisodeDataset,
    open_episodes,
    save_episodes,
)

TOOL = {"type": "function", "function": {"name": "look"}}


def conversation(*answers, log_prob=-0.25):
    """An episode of a language model: a question and an answer each turn."""
    return {
        "tokens": {
            "prompt": [torch.arange(t + 2) for t in range(len(answers))],
            "response": [torch.tensor([7] * (t + 1)) for t in range(len(answers))],
        },
        "log_probs": {"response": [torch.full((t + 1,), log_prob) for t in range(len(answers))]},
        "next": {"reward": torch.full((len(answers), 1), 0.5)},
        "text": [
            [{"role": "user", "content": "ünd?"}, {"role": "assistant", "content": answer}]
            for answer in answers
        ],
    }


def lines_of(path):
    """The lines, as strict JSON."""

    def refuse(name):
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().splitlines()]


def numbers(path):
    return [episode["number"].tolist() for episode in EpisodeDataset(path).episodes()]


def save_numbers(path, count):
    save_episodes(({"number": [i] * (i + 1)} for i in range(count)), path, format="jsonl")


# ---- for people and other tools -----------------------------------------------------------------


def test_a_line_is_a_conversation_that_anyone_can_read(tmp_path):
    path = tmp_path / "talk.jsonl"
    metadata = {"task": "look", "tools": [TOOL]}
    save_episodes([(conversation("one", "two"), metadata)], path)
    assert "ünd?" in path.read_text(encoding="utf-8")
    [line] = lines_of(path)
    assert re.fullmatch("[0-9a-f]{8}", line.pop("crc32"))
    assert line == {
        "length": 2,
        "messages": [
            {"role": "user", "content": "ünd?"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "ünd?"},
            {"role": "assistant", "content": "two"},
        ],
        "messages_per_turn": [2, 2],
        "tools": [TOOL],
        "reward": 1.0,
        "metadata": {"task": "look"},
        "steps": {
            "tokens": {
                "prompt": {"added": [[0, 1], [2]], "kept": [0, 2], "back": [0, 1]},
                "response": [[7], [7, 7]],
            },
            "log_probs": {"response": [[-0.25], [-0.25, -0.25]]},
            "next": {"reward": [[0.5], [0.5]]},
        },
        "dtypes": {
            "tokens": {
                "prompt": {"added": "int64[?]", "kept": "int64", "back": "int64"},
                "response": "int64[?]",
            },
            "log_probs": {"response": "float32[?]"},
            "next": {"reward": "float32[1]"},
            "text": "object",
        },
    }
    dataset = EpisodeDataset(path)
    assert dataset.metadata(0) == metadata
    texts = [list(turn) for turn in dataset.episode(0)["text"]]
    assert texts == conversation("one", "two")["text"]


def test_texts_that_are_no_messages_are_an_entry_like_others(tmp_path):
    path = tmp_path / "talk.jsonl"
    odd = [["hello", [{"content": "no role"}]], [[{"role": "user"}], ("a", "tuple")], [[], []]]
    save_episodes(({"text": text} for text in odd), path)
    assert [line["messages"] for line in lines_of(path)] == [[], [], []]
    got = [list(episode["text"]) for episode in EpisodeDataset(path).episodes()]
    assert got == odd


def test_datasets_reads_it_in_parts(tmp_path):
    """Lines of one data set have the same types, so that no part of a file contradicts another."""
    import datasets

    path = tmp_path / "talk.jsonl"
    log_probs = [-0.25, float("nan"), -0.5, float("-inf")] * 10
    with open_episodes(path) as out:
        for i, log_prob in enumerate(log_probs):
            out.write_episode(conversation(*"ab"[: 1 + i % 2], log_prob=log_prob), {"i": i})
    places = {"data_files": str(path), "cache_dir": str(tmp_path / "cache")}
    table = datasets.load_dataset("json", split="train", chunksize=4000, **places)
    assert path.stat().st_size > 4 * 4000
    assert table["metadata"][:] == [{"i": i} for i in range(40)]
    assert table["length"][:] == [1, 2] * 20
    assert table["messages"][1][3] == {"role": "assistant", "content": "b"}
    assert table["steps"][3]["log_probs"]["response"] == [[None], [None, None]]
    assert table["steps"][4]["log_probs"]["response"] == [[-0.5 / 2]]
    assert table["steps"][5]["tokens"]["prompt"]["added"] == [[0, 1], [2]]


def test_what_json_numbers_cannot_tell_follows_the_dtype(tmp_path):
    path = tmp_path / "odd.jsonl"
    payload = torch.tensor([0x7FA00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    flat = [torch.zeros(0, 5), torch.zeros(2, 0)]
    big = torch.tensor([2**63 - 1, -(2**63)]).view(torch.uint64)
    zero = torch.tensor([-0.0, 0.0])
    save_episodes([{"a": payload, "b": flat, "c": big, "d": zero}], path)
    [line] = lines_of(path)
    assert line["steps"]["a"] == [None, 1.0]
    assert line["dtypes"]["a"].startswith("float32 bytes=")
    assert line["dtypes"]["b"] == "float32[?, ?] shapes=[[0,5],[2,0]]"
    assert line["steps"]["c"] == [2**63 - 1, 2**63]
    assert line["dtypes"]["c"] == "uint64"
    assert line["dtypes"]["d"] == "float32"
    got = EpisodeDataset(path).episode(0)
    assert torch.equal(got["a"].view(torch.int32), payload.view(torch.int32))
    assert [x.shape for x in got.get("b", as_list=True)] == [(0, 5), (2, 0)]
    assert got["d"].signbit().tolist() == [True, False]


def test_objects_and_metadata_are_strict_json_too(tmp_path):
    path, odd = tmp_path / "a.jsonl", [math.nan, [math.inf], {"a": -math.inf, "b": "\ud800"}]
    save_episodes([({"x": odd}, {"x": odd})], path)
    assert len(lines_of(path)) == 1
    dataset = EpisodeDataset(path)
    assert repr(list(dataset.episode(0)["x"])) == repr(dataset.metadata(0)["x"]) == repr(odd)


@few_or_many(5, 15)
def test_lines_that_other_tools_wrote_again_joined_and_shuffled(examples, tmp_path):
    for seed in range(examples):
        rng = random.Random(seed)
        episodes, metadata = random_data(seed)
        path, other = tmp_path / f"{seed}.jsonl", tmp_path / f"{seed}"
        save_episodes(zip(episodes, metadata, strict=True), path)
        lines = [*enumerate(lines_of(path))] * 2
        rng.shuffle(lines)
        form = rng.choice([{}, {"separators": (",", ":")}])
        shuffled = [dict(rng.sample([*line.items()], len(line))) for _, line in lines]
        text = rng.choice(["\n", "\n\n", "\r\n"]).join(json.dumps(x, **form) for x in shuffled)
        other.write_text(text + rng.choice(["", "\n"]))
        dataset = EpisodeDataset(other, format="jsonl")
        assert len(dataset) == len(lines)
        for place, (i, _) in enumerate(lines):
            assert_same(dataset.episode(place), episodes[i])
            assert dataset.metadata(place) == metadata[i]


def test_it_is_found_by_its_content(tmp_path):
    save_numbers(tmp_path / "log.txt", 2)
    assert EpisodeDataset(tmp_path / "log.txt").format == "jsonl"
    (tmp_path / "empty.jsonl").touch()
    assert len(EpisodeDataset(tmp_path / "empty.jsonl")) == 0
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DatasetError, match="no data set of a known format"):
        EpisodeDataset(tmp_path / "empty.txt")


# ---- damage -------------------------------------------------------------------------------------


def test_a_torn_last_line_is_no_episode_and_the_next_writer_removes_it(tmp_path):
    path = tmp_path / "a.jsonl"
    save_numbers(path, 3)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(whole) + 1):
        path.write_bytes(whole[:end])
        # Only its line end may be missing.
        count = 3 if end >= len(whole) - 1 else 2
        assert len(EpisodeDataset(path)) == count
        if end % 20 == 0 or count == 3:
            save_episodes([{"number": [7]}], path, mode="append")
            assert numbers(path) == [*[[0], [1, 1], [2, 2, 2]][:count], [7]]


def test_a_damaged_line_loses_only_its_episode(tmp_path):
    path = tmp_path / "a.jsonl"
    save_numbers(path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    damages = {
        0: lines[0].replace(b'"int64"', b"[64]"),
        1: b"\xff" + lines[1].replace(b"2", b"9" * 30),
        2: lines[2].replace(b"[2, 2, 2]", b"[2, 2]"),
        3: b"[" * 100_000 + b"\n",
        4: lines[4].replace(b"int64", b"int128"),
    }
    torn = (3, lines[3][:20] + b"\n" + lines[3][21:])
    for damaged, line in [*damages.items(), torn]:
        path.write_bytes(b"".join([*lines[:damaged], line, *lines[damaged + 1 :]]))
        at = sum(map(len, lines[:damaged]))
        dataset = EpisodeDataset(path)
        assert len(dataset) == 5
        for i in range(5):
            if i != damaged:
                assert dataset.episode(i)["number"].tolist() == [i] * (i + 1)
        said = rf"a\.jsonl.* episode {damaged}, at byte {at}, is damaged"
        with pytest.raises(DatasetError, match=said):
            dataset.episode(damaged)
        assert len(list(dataset.episodes(skip_unreadable=True))) == 4
        save_episodes([{"number": [7]}], path, mode="append")
        assert EpisodeDataset(path).episode(5)["number"].tolist() == [7]


def test_a_line_of_another_schema_is_named(tmp_path):
    save_numbers(tmp_path / "a.jsonl", 2)
    save_episodes([{"number": [0.5]}], tmp_path / "b.jsonl")
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write((tmp_path / "b.jsonl").read_bytes())
    said = r"episode 2.*'number'.*expected \(\) torch.int64.*float32"
    with pytest.raises(DatasetError, match=said):
        EpisodeDataset(tmp_path / "a.jsonl").episode(2)


def test_conversations_of_others_are_for_another_class(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DatasetError, match=r"chat\.jsonl.*ConversationDataset"):
        EpisodeDataset(tmp_path / "chat.jsonl")
    (tmp_path / "log.jsonl").write_text('{"loss": 1.5}\n[3]\n')
    with pytest.raises(DatasetError, match=r"log\.jsonl.*no line of it is an episode"):
        EpisodeDataset(tmp_path / "log.jsonl")
    for mode in ("append", "overwrite"):
        with pytest.raises(DatasetError, match="no line of it is an episode"):
            open_episodes(tmp_path / "log.jsonl", mode=mode)
    assert (tmp_path / "log.jsonl").read_text() == '{"loss": 1.5}\n[3]\n'


# ---- what is read -------------------------------------------------------------------------------


def test_clips_of_a_batch_come_from_lines_that_are_parsed_once(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    save_episodes(({"x": torch.arange(9), "y": torch.arange(9.0)} for _ in range(2)), path)
    clips = ClipDataset(path, 3)
    parsed, read = [], os.pread
    clips[0]
    monkeypatch.setattr(os, "pread", lambda *args: parsed.append(1) or read(*args))
    batch = clips.__getitems__([1, 2, 3, 4, 8, 9])
    assert [clip["x"].tolist() for clip in batch][-1] == [2, 3, 4]
    assert len(parsed) == 1  # of the second episode; the first one is known


NUMBERS = {
    "whole": [0, 1, 2],
    "rows": [[1], [2, 3], []],
    "real": [0.5, 1.0, 2.0],
    "flags": [True, False, True],
    "small": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("written", "edited"),
    [
        ('"whole": [0, 1, 2]', '"whole": [0, 1.7, 2]'),
        ('"whole": [0, 1, 2]', '"whole": [0, "1", 2]'),
        ('"rows": [[1], [2, 3], []]', '"rows": [[1], [2.5, 3], []]'),
        ('"flags": [true, false, true]', '"flags": [true, 0.5, true]'),
        ('"flags": [true, false, true]', '"flags": [true, 7, true]'),
        ('"small": [1, 2, 3]', '"small": [1, 300, 3]'),
        ('"small": [1, 2, 3]', '"small": [1, -1, 3]'),
        ('"real": [0.5, 1.0, 2.0]', '"real": [0.5, null, 2.0]'),
        ('"real": [0.5, 1.0, 2.0]', '"real": [0.5, "1.0", 2.0]'),
    ],
)
def test_numbers_that_an_entry_cannot_hold_are_refused(written, edited, tmp_path):
    path = tmp_path / "set.jsonl"
    save_episodes([NUMBERS], path)
    text = path.read_text(encoding="utf-8")
    assert written in text
    EpisodeDataset(path).episode(0)
    unsigned = re.sub(r', "crc32": "\w+"', "", text)
    path.write_text(unsigned.replace(written, edited), encoding="utf-8")
    with pytest.raises(DatasetError, match=r"episode 0 .*damaged"):
        EpisodeDataset(path).episode(0)
