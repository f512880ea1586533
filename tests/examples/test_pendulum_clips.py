"""The pendulum example learns, and refuses or stops cleanly."""

import re

import pytest
import torch


@pytest.mark.slow
def test_the_error_falls_and_the_curve_is_drawn(example, tmp_path, capsys):
    out = tmp_path / "a" / "b"
    arguments = f"--steps 150 --episodes 8 --slice-len 8 --clips 32 --out {out}"
    assert example.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    first, last = map(float, re.search(r"open loop: (\S+) -> (\S+)", printed).groups())
    still = float(re.search(r"nothing moves: (\S+)", printed).group(1))
    assert last < first / 4
    assert last < still
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_buffer_holds_whole_episodes_that_the_collector_cut(example):
    buffer = example.collect(episodes=6, slice_len=5, clips=3, seed=0)
    assert set(buffer.storage.lengths.tolist()) == {example.EPISODE_LENGTH}
    clips = buffer.sample().reshape(3, 5)
    steps = clips["step_count"].squeeze(-1)
    assert (steps.diff(dim=1) == 1).all()
    assert torch.equal(clips["next", "th"][:, :-1], clips["th"][:, 1:])


def test_the_same_seed_gives_the_same_episodes(example):
    def episodes(seed):
        torch.manual_seed(seed)
        return example.collect(episodes=1, slice_len=5, clips=3, seed=seed).storage[:]

    first, again, other = episodes(0), episodes(0), episodes(1)
    assert torch.equal(first["th"], again["th"])
    assert not torch.equal(first["th"], other["th"])
