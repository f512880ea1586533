"""The pixel agent sees the game it plays, and learns it."""

import numpy as np
import pytest
import torch


@pytest.mark.slow
def test_it_learns(example, tmp_path):
    """On a grid of four cells, from a random walk to nearly the shortest ones in a minute."""
    args = f"--side 2 --turns 3 --updates 40 --out {tmp_path}"
    reached = example.train(example.parse(args.split()))
    assert reached["before"] < 0.6 * reached["optimum"]
    assert reached["after"] > 0.9 * reached["optimum"]
    assert "image/png" in (tmp_path / "after.html").read_text()


def test_the_picture_is_the_state(example):
    env = example.Grid(4, 4)
    (message,) = env.reset({"agent": (0, 1), "goal": (3, 1)})
    pixels = message["content"][-1]["image"]
    assert pixels.shape == (16, 16, 3)
    assert (pixels[0, 4] == example.BLUE).all()
    assert (pixels[12:, 4:8] == example.GREEN).all()
    rewards = [env.step(said).reward for said in ("up", "left", "down", "nonsense", "down down")]
    assert rewards == [0, -1, 1, 0, 1]
    step = [env.step("right"), env.step("down")][-1]
    assert (step.done, step.reward, step.messages) == (True, 1, [])


@pytest.mark.parametrize("side", [2, 3, 4])
def test_the_best_return_is_that_of_the_shortest_walks(example, side):
    distances = [
        abs(a - c) + abs(b - d)
        for a, b, c, d in np.ndindex(side, side, side, side)
        if (a, b) != (c, d)
    ]
    assert example.optimal_return(side) == pytest.approx(np.mean(distances))
    assert len(example.starts(side)) == len(distances)
    assert torch.tensor(example.optimal_return(2)) == pytest.approx(4 / 3)
