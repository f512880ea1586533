"""Every source tells the same of an episode."""

from __future__ import annotations

import math
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from tests.buffers import buffer_of
from tests.collectors.test_dump import played
from torchrl_mt.collectors import Episode, StopReason, Turn, episodes_to_tensordict
from torchrl_mt.collectors.dump import EpisodeDump
from torchrl_mt.datasets import save_episodes
from torchrl_mt.engines import Completion
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import Report, write_report
from torchrl_mt.view.episodes import join
from torchrl_mt.view.sources import read_source


def facts(episode):
    """What a source tells of each turn that sampled a token."""
    told = {turn.turn: turn for turn in episode.turns if len(turn.ids)}
    return {
        k: (
            list(turn.ids),
            turn.row,
            turn.parent,
            rounded(turn, "log_prob"),
            rounded(turn, "version"),
        )
        for k, turn in told.items()
    }


def rounded(turn, name):
    return np.round(turn.values[name].astype(float), 5).tolist()


def buffer_with(batch):
    buffer = buffer_of(100)
    buffer.extend(batch)
    return buffer


@settings(max_examples=40, deadline=None)
@given(episode=played())
def test_all_sources_agree(episode):
    for turn in episode.turns:
        ids = turn.completion.token_ids
        log_probs = [-0.125 * (k + 1) for k in range(len(ids))]
        turn.completion = Completion(ids, log_probs, turn.completion.versions, "stop")
    batch = episodes_to_tensordict([episode])
    with tempfile.TemporaryDirectory() as folder:
        EpisodeDump(f"{folder}/dump").write([episode])
        save_episodes(buffer_with(batch), f"{folder}/set.jsonl")
        rows = MergeTurns()(batch)
        rows.save(f"{folder}/rows")
        torch.save(rows.to_dict(), f"{folder}/rows.pt")
        sources = [[episode], f"{folder}/dump", batch, buffer_with(batch), f"{folder}/set.jsonl"]
        whole = [read_source(source) for source in sources]
        saved = [read_source(each) for each in (rows, f"{folder}/rows", f"{folder}/rows.pt")]
    parents = episode.parents()
    expected = {
        k: (
            *(said.token_ids, episode.rows().row[k], parents[k]),
            *(said.log_probs, [float(version) for version in said.versions]),
        )
        for k, said in enumerate(turn.completion for turn in episode.turns)
        if said.token_ids
    }
    if all(parents[k] == -1 or parents[k] in expected for k in expected):
        assert all(facts(told) == expected for (told,) in saved)  # Rows lack turns of no token.
    for (told,) in (*saved, *whole):
        assert (told.group, told.id) == (episode.group, episode.traj_id)
        assert math.isclose(told.reward, episode.reward, abs_tol=1e-6)
    for (told,) in whole:
        assert facts(told) == expected
        assert told.stop == episode.stop_reason.value
        assert [turn.reward for turn in told.turns] == [turn.reward for turn in episode.turns]
        said = [turn.given[0]["content"] for turn in told.turns]
        assert said == [str(k) for k in range(len(episode.turns))]


ASKED = [{"role": "assistant", "content": "Ask."}, {"role": "user", "content": "2 + 2?"}]
"""The opening; its first message is not the policy's."""


def an_episode(traj_id=3, tokens=(5, 6)):
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    asks = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    then = [
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "four", "reasoning_content": "easy"},
        {"role": "user", "content": "Right."},
    ]
    first = Completion(list(tokens), [-0.5, -0.25], [7, 7], "stop")
    second = Completion([4], [-1.0], [8], "length")
    turns = [
        Turn([1, 2], first, [dict(message) for message in ASKED] + [asks], reward=0.25),
        Turn([1, 2, *tokens, 9], second, then, reward=0.5),
    ]
    return Episode({"task_id": "sum"}, 1, traj_id, turns, StopReason.DONE)


@pytest.mark.parametrize("kind", ["episodes", "batch", "dump"])
def test_a_turn_has_what_was_said(kind, tmp_path):
    episode = an_episode()
    EpisodeDump(tmp_path).write([episode])
    sources = {"episodes": [episode], "batch": episodes_to_tensordict([episode])}
    (told,) = read_source(sources.get(kind, tmp_path / "8.jsonl"))
    assert (told.task, told.stop, told.reward) == ("sum", "done", 0.75)
    first, second, end = told.turns
    assert first.given == ASKED
    assert first.said["tool_calls"] == [{"name": "add", "arguments": {"a": 2, "b": 2}}]
    assert second.given == [{"role": "tool", "content": "4", "name": "add"}]
    assert second.said == {"role": "assistant", "content": "four", "reasoning": "easy"}
    assert (first.finish, second.finish) == ("stop", "length")
    assert end.given == [{"role": "user", "content": "Right."}]
    assert (end.said, list(end.ids)) == (None, [])


def test_what_training_computed_stands_on_the_token_that_was_sampled():
    batch = episodes_to_tensordict([an_episode(3), an_episode(4)])
    rows = MergeTurns()(batch)
    rows["advantage"] = torch.randn(*rows["tokens", "full"].shape, 1)
    rows["log_probs", "old"] = rows["log_probs", "full"] + 0.5
    order = torch.tensor([1, 0])
    one, two = join([read_source(batch), read_source(rows[order])])
    assert (one.id, two.id, one.sample, two.sample) == (3, 4, 0, 1)
    for episode, row in zip((one, two), rows.unbind(0), strict=True):
        at = row["masks", "all_assistant_mask"]
        advantages = np.concatenate(
            [turn.values["advantage"] for turn in episode.turns if turn.ids]
        )
        assert advantages.tolist() == row["advantage"][at].flatten().tolist()
        assert np.allclose(episode.turns[0].values["ratio"], math.exp(0.5))
        assert episode.turns[0].given == ASKED


def test_other_tokens_of_the_same_id_stay_apart():
    sources = [[an_episode(3)], [an_episode(3, tokens=(5, 8))]]
    assert len(join(read_source(source) for source in sources)) == 2


def test_rejected_episodes_have_their_cause(tmp_path):
    dump = EpisodeDump(tmp_path)
    dump.write([an_episode(0)])
    dump.write([an_episode(1)], rejected="TimeoutError")
    dump.write([an_episode(2)], is_eval=True)
    told = {each.id: (each.rejected, each.is_eval) for each in read_source(tmp_path)}
    assert told == {0: (None, False), 1: ("TimeoutError", False), 2: (None, True)}


def test_a_dump_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    EpisodeDump(tmp_path).write([an_episode(0), an_episode(1)])
    file = tmp_path / "8.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert [each.id for each in read_source(tmp_path)] == [0]


def test_steps_without_tokens_are_shown():
    ends = {"reward": torch.ones(3, 1), "done": torch.arange(3)[:, None] == 2}
    seen = {"observation": torch.rand(3, 2), "pixels": torch.rand(3, 8, 8)}
    (told,) = read_source(TensorDict({**seen, "action": torch.arange(3), "next": ends}, [3]))
    assert told.reward == 3
    assert [turn.turn for turn in told.turns] == [0, 1, 2]
    assert "observation = [" in told.turns[0].given[0]["content"]
    assert "pixels = (8, 8) float32" in told.turns[0].given[0]["content"]
    assert told.turns[2].said == {"role": "action", "content": "action = 2"}


@pytest.mark.parametrize("source", [3, {"a": 1}, [[1]]])
def test_what_is_no_source_is_refused(source):
    with pytest.raises(TypeError, match=r"source must be a path, .* got (int|dict|list)"):
        Report(source)


def test_nothing_to_show_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        write_report(tmp_path / "missing", tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one episode"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_numbers_that_json_lacks_and_halves_of_characters_are_shown(tmp_path):
    episode = an_episode(2**53 + 1)
    for turn, reward in zip(episode.turns, (math.nan, math.inf), strict=True):
        turn.reward, turn.completion.log_probs[0] = reward, -reward
    episode.turns[0].messages[1]["content"] = episode.data["task_id"] = "half \ud83d</script>"
    EpisodeDump(tmp_path).write([episode])
    for source in (tmp_path, [episode], episodes_to_tensordict([episode])):
        page = write_report(source, tmp_path / "report.html").read_text(encoding="utf-8")
        assert "half" in page
        assert "half ?</script>" not in page
        assert '"id": 9007199254740993' in page
