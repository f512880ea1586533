"""The program learns to balance the pole, and refuses or stops cleanly."""

import pytest
import torch


@pytest.mark.slow
def test_it_learns(example, tmp_path):
    """Within the first updates, from 20 steps at random to several times that."""
    args = ["--updates", "400", "--goal", "120", "--every", "50", "--episodes", "16"]
    reached = example.train(example.parse([*args, "--out", str(tmp_path)]))
    assert reached > 80
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_cart_moves_as_gymnasiums(example):
    gym = pytest.importorskip("gymnasium", reason="needs gymnasium")
    theirs = gym.make("CartPole-v1").unwrapped
    theirs.reset(seed=0)
    ours = example.MaskedCartPole(1)
    td = ours.reset()
    ours.state = torch.tensor(theirs.state, dtype=torch.float32)[None]
    for step in range(200):
        action = step // 3 % 2
        state, _, ended, _, _ = theirs.step(action)
        td["action"] = torch.tensor([action])
        after = ours.step(td)["next"]
        torch.testing.assert_close(ours.state[0], torch.from_numpy(state), atol=1e-4, rtol=1e-3)
        assert torch.equal(after["observation"][0], ours.state[0, ::2] * torch.tensor([2.0, 20.0]))
        assert bool(after["terminated"]) == bool(after["done"]) == ended
        if ended:
            return
    pytest.fail("the pole never fell")


def test_some_carts_begin_again_and_the_others_go_on(example):
    env = example.MaskedCartPole(3)
    td = env.reset()
    td["action"] = torch.tensor([1, 1, 0])
    env.step(td)
    before = env.state.clone()
    td["_reset"] = torch.tensor([[True], [False], [True]])
    env.reset(td)
    assert torch.equal(env.state[1], before[1])
    assert (env.state[::2] != before[::2]).all()
    assert (env.state[::2].abs() <= 0.05).all()


def test_returns_are_those_of_a_plain_loop(example):
    torch.manual_seed(0)
    reward, value = torch.rand(20, 7), torch.rand(20, 8)
    lengths = torch.randint(1, 8, (20,))
    mask = torch.arange(7) < lengths[:, None]
    returns = example.n_step_returns(reward, value, mask, gamma=0.9, n=3)
    for row in range(20):
        for t in range(int(lengths[row])):
            n = min(3, int(lengths[row]) - t)
            expected = sum(0.9**k * reward[row, t + k] for k in range(n))
            expected = expected + 0.9**n * value[row, t + n]
            torch.testing.assert_close(returns[row, t], expected)
