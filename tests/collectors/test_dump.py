"""Every line says what the training row says, and no line is lost, torn or mixed with another."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.collectors.runs import first_batch
from tests.test_json_lines import read
from torchrl_mt.collectors import Episode, StopReason, Turn, episodes_to_tensordict
from torchrl_mt.collectors.dump import EpisodeDump, episode_records
from torchrl_mt.engines import Completion
from torchrl_mt.json_lines import append_lines, to_line
from torchrl_mt.transforms import MergeTurns

from .scripted import ScriptedEngine


def answer(tokens: list[int], version: int = 0) -> Completion:
    return Completion(tokens, [-0.5] * len(tokens), [version] * len(tokens), "stop")


def say(text: str) -> dict:
    return {"role": "user", "content": text}


@st.composite
def played(draw) -> Episode:
    """An episode that grows, forks, goes on with earlier rows, and answers with nothing at times."""
    tokens = st.lists(st.integers(0, 2), max_size=3)
    seen: list[list[int]] = []
    episode = Episode(
        draw(st.sampled_from([None, {"task_id": "t"}, {"other": 1}])),
        group=draw(st.integers(0, 3)),
        rank=2,
        traj_id=draw(st.integers(0, 9)),
        stop_reason=draw(st.sampled_from(list(StopReason))),
    )
    for k in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from([[], *seen, *seen[-1:], *seen[-1:]]))
        prompt = [*before, *draw(tokens)] or [1]
        sampled = draw(tokens)
        versions = draw(st.lists(st.integers(0, 4), min_size=len(sampled), max_size=len(sampled)))
        completion = Completion(sampled, [-0.5] * len(sampled), versions, "stop")
        episode.turns.append(
            Turn(prompt, completion, [say(f"{k}")], reward=draw(st.integers(-4, 4)) / 4)
        )
        seen.append([*prompt, *sampled])
    return episode


@settings(max_examples=40)
@given(episode=played())
def test_records_are_the_training_rows(episode):
    rows = MergeTurns()(episodes_to_tensordict([episode]))
    records = episode_records(episode)
    assert len(records) == len(rows)
    assert episode.rows().length == rows["masks", "all_attention_mask"].sum(-1).tolist()
    for fork, (record, row) in enumerate(zip(records, rows.unbind(0), strict=True)):
        kept = row["masks", "all_attention_mask"]
        tokens = row["tokens", "full"][kept].tolist()
        sampled = row["masks", "all_assistant_mask"][kept].tolist()
        versions = [v for v in row["versions", "full"][kept].tolist() if v >= 0]
        assert record["fork"] == fork == row["fork"]
        assert record["num_forks"] == episode.num_forks == len(rows) - 1
        assert record["seqlen"] == len(tokens)
        assert record["prompt"] + record["completion"] == tokens
        assert record["prompt_len"] == len(record["prompt"])
        assert not any(sampled[: record["prompt_len"]])
        assert sampled[record["prompt_len"] :][:1] in ([], [True])
        assert record["head_version"] == min(versions, default=-1)
        assert record["tail_version"] == max(versions, default=-1)
        marked = [False] * len(tokens)
        for span in record["turns"]:
            turn = episode.turns[span["turn"]]
            assert tokens[: span["start"]] == turn.prompt_ids
            assert tokens[span["start"] : span["stop"]] == turn.completion.token_ids
            assert span["reward"] == turn.reward
            marked[span["start"] : span["stop"]] = [True] * (span["stop"] - span["start"])
        assert marked == sampled
        told = [message["content"] for message in record["messages"]]
        assert told == [str(span["turn"]) for span in record["turns"]]
        assert record["rewards"] == [turn.reward for turn in episode.turns]
        assert record["reward"] == sum(record["rewards"])
        assert record["sample_idx"] == 2
        assert record["stop_reason"] == episode.stop_reason.value
        assert record["group"] == episode.group
        assert record["task_id"] == ("t" if episode.data == {"task_id": "t"} else episode.group)
    # Every turn, and with it its messages, lies on one line.
    told = [span["turn"] for record in records for span in record["turns"]]
    assert sorted(told) == list(range(len(episode.turns)))


def test_text_is_the_very_tokens(tokenizer, tmp_path):
    words = tokenizer("guess 1 to 16")["input_ids"]
    end = tokenizer.eos_token_id
    turns = [
        Turn(words, answer([words[1], end], 3), [say("guess 1 to 16")]),
        Turn([*words, words[1], end, words[2]], answer([words[3]], 5), [say("to")], reward=1.0),
    ]
    EpisodeDump(tmp_path, tokenizer).write([Episode(None, 4, 9, turns, StopReason.DONE)])
    (line,) = read(tmp_path / "5.jsonl")
    assert line["prompt"] == "guess 1 to 16"
    assert line["completion"] == " 1 <end> to 16"
    whole = tokenizer.decode([*words, words[1], end, *words[2:]])
    assert line["prompt"] + line["completion"] == whole
    assert (line["seqlen"], line["prompt_len"]) == (8, 4)
    assert (line["head_version"], line["tail_version"], line["reward"]) == (3, 5, 1.0)
    assert line["messages"] == [say("guess 1 to 16"), say("to")]
    assert [(s["start"], s["stop"]) for s in line["turns"]] == [(4, 6), (7, 8)]


def test_characters_that_are_cut_between_prompt_and_completion_are_decoded_apart():
    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode(errors="replace")

    tokens = list("aé".encode())
    turn = Turn(tokens[:2], answer(tokens[2:]), [])
    (record,) = episode_records(Episode(None, turns=[turn]), Bytes())
    assert (record["prompt"], record["completion"]) == ("a\ufffd", "\ufffd")


def test_episodes_are_filed_by_version_and_ranked_in_their_groups(tmp_path):
    dump = EpisodeDump(tmp_path / "new" / "folder")

    def played_by(version, group, rank=0):
        turns = [Turn([1], answer([2], version), [])]
        return Episode(None, group, 0, turns, StopReason.DONE, rank=rank)

    # Of group 1, the second member is missing.
    dump.write([played_by(1, 0), played_by(2, 1), played_by(2, 0, 1), played_by(2, 1, 2)])
    dump.write([played_by(2, 5)], is_eval=True)
    dump.write([Episode(None, 7, 0, [Turn([1], answer([]), [])], StopReason.DONE)])
    dump.write([Episode({"task_id": torch.tensor(3)}, 8)])
    files = {
        path.relative_to(dump.dump_dir).as_posix(): path for path in dump.dump_dir.rglob("*.jsonl")
    }
    found = {name: [(r["group"], r["sample_idx"]) for r in read(files[name])] for name in files}
    assert found == {
        "1.jsonl": [(0, 0)],
        "2.jsonl": [(1, 0), (0, 1), (1, 2)],
        "eval/2.jsonl": [(5, 0)],
        "-1.jsonl": [(7, 0), (8, 0)],
    }
    empty = read(dump.dump_dir / "-1.jsonl")[1]
    assert empty["task_id"] == 3
    assert empty["stop_reason"] is None
    assert (empty["seqlen"], empty["num_turns"], empty["completion"]) == (0, 0, [])


def test_the_task_id_of_a_tensordict_is_found():
    def task_id(data):
        episode = Episode(data, group=5)
        assert type(episode.task_id) is int
        assert episode_records(episode)[0]["task_id"] == episode.task_id
        return episode.task_id

    assert task_id(TensorDict({"task_id": torch.tensor(7)})) == 7
    assert task_id(TensorDict({"x": torch.tensor(7)})) == 5
    assert task_id("task_id") == 5


def test_an_episode_that_cannot_be_decoded_leaves_nothing_written(tmp_path):
    class Tokenizer:
        def decode(self, ids, **_):
            assert 7 not in ids
            return str(ids)

    good = Episode(None, 0, 0, [Turn([1], answer([2]), [])])
    bad = Episode(None, 0, 1, [Turn([1], answer([7]), [])])
    with pytest.raises(AssertionError):
        EpisodeDump(tmp_path, Tokenizer()).write([good, bad])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path):
    dump = EpisodeDump(tmp_path / "dump")
    (tmp_path / "dump").rmdir()
    dump.write([Episode(None, 0, 0, [Turn([1], answer([2]), [])])])
    assert len(read(tmp_path / "dump" / "0.jsonl")) == 1


@pytest.mark.parametrize("room", [0, 5, 30, 61, 100])
def test_a_disk_that_fills_up_leaves_all_lines_of_a_call_or_none(tmp_path, monkeypatch, room):
    """The first episode's file is whole before the disk is full, the second's never begun."""
    dump, write, left = EpisodeDump(tmp_path), os.write, 10**6

    def full(file, data):
        nonlocal left
        written = write(file, data[: min(left, 7)]) if left else 0
        left -= written
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    def forked(version, traj_id):
        turns = [Turn([1], answer([2], version)), Turn([3], answer([4], version))]
        return Episode(None, 0, traj_id, turns, StopReason.DONE)

    dump.write([forked(0, 0)])
    before = (tmp_path / "0.jsonl").read_bytes()
    monkeypatch.setattr(os, "write", full)
    left = len(before) + room
    with pytest.raises(OSError, match="No space"):
        dump.write([forked(0, 1), forked(1, 2)])
    monkeypatch.undo()
    assert [line["traj_id"] for line in read(tmp_path / "0.jsonl")] == [0, 0, 1, 1]
    assert (tmp_path / "1.jsonl").read_bytes() == b""
    dump.write([forked(1, 2)])
    assert [line["fork"] for line in read(tmp_path / "1.jsonl")] == [0, 1]


def test_rejected_episodes_are_dumped_with_their_cause(tokenizer, tmp_path):
    words = tokenizer("guess 1 to 16")["input_ids"]

    class Fails:
        async def arun_episode(self, engine, data):
            await engine.generate(words)
            if data % 2:
                raise OSError("gone")
            return 1.0

    engine = ScriptedEngine(tokenizer, lambda prompt: [words[0], tokenizer.eos_token_id])
    _, stats = first_batch(Fails(), engine, range(8), n=4, dump_dir=tmp_path)
    rejected = read(tmp_path / "rejected" / "0.jsonl")
    assert stats["dump_errors"] == 0
    assert {line["rejected"] for line in rejected} == {"OSError"}
    assert len(rejected) >= stats["rejected/OSError"] >= 1
    assert all("rejected" not in line for line in read(tmp_path / "0.jsonl"))
    assert rejected[0]["turns"][0]["pieces"] == [" guess", " <end>"]


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_):
        raise OSError("not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for i in range(3):
        append_lines(tmp_path / "0.jsonl", [to_line(i)])
    assert read(tmp_path / "0.jsonl") == [0, 1, 2]
