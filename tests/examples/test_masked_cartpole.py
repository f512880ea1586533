"""The program learns to balance the pole, and refuses or stops cleanly."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "masked_cartpole.py"
QUICK = ["--updates", "8", "--clips", "4", "--width", "8", "--episodes", "2"]


def load():
    spec = importlib.util.spec_from_file_location("masked_cartpole", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script():
    threads = torch.get_num_threads()
    yield load()
    torch.set_num_threads(threads)


def test_it_learns(script, tmp_path):
    """Within the first updates, from 20 steps at random to several times that."""
    args = ["--updates", "400", "--goal", "120", "--every", "50", "--episodes", "16"]
    reached = script.train(script.parse([*args, "--out", str(tmp_path)]))
    assert reached > 80
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_cart_moves_as_gymnasiums(script):
    gym = pytest.importorskip("gymnasium", reason="needs gymnasium")
    theirs = gym.make("CartPole-v1").unwrapped
    theirs.reset(seed=0)
    ours = script.MaskedCartPole(1)
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


def test_some_carts_begin_again_and_the_others_go_on(script):
    env = script.MaskedCartPole(3)
    td = env.reset()
    td["action"] = torch.tensor([1, 1, 0])
    env.step(td)
    before = env.state.clone()
    td["_reset"] = torch.tensor([[True], [False], [True]])
    env.reset(td)
    assert torch.equal(env.state[1], before[1])
    assert (env.state[::2] != before[::2]).all()
    assert (env.state[::2].abs() <= 0.05).all()


def test_returns_are_those_of_a_plain_loop(script):
    torch.manual_seed(0)
    reward, value = torch.rand(20, 7), torch.rand(20, 8)
    lengths = torch.randint(1, 8, (20,))
    mask = torch.arange(7) < lengths[:, None]
    returns = script.n_step_returns(reward, value, mask, gamma=0.9, n=3)
    for row in range(20):
        for t in range(int(lengths[row])):
            n = min(3, int(lengths[row]) - t)
            expected = sum(0.9**k * reward[row, t + k] for k in range(n))
            expected = expected + 0.9**n * value[row, t + n]
            torch.testing.assert_close(returns[row, t], expected)


@pytest.mark.usefixtures("script")
def test_without_matplotlib_it_is_said_how_to_get_the_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import fails
    assert load().main([*QUICK, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())
    assert "needs matplotlib: pip install 'torchrl-mt[examples]'" in capsys.readouterr().out


def test_an_unwritable_folder_is_refused_before_any_work(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "train", lambda *args: pytest.fail("work had begun"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_:
        script.main(["--out", str(tmp_path / "file" / "run")])
    assert exit_.value.code == 2
    assert "--out: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--updates", "0"], ["--clips", "x"]])
def test_bad_arguments_are_refused(script, arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        script.main(arguments)
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_control_c_stops_cleanly(script, tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "td_errors", interrupt)
    assert script.main([*QUICK, "--out", str(tmp_path)]) == 130
    assert "stopped" in capsys.readouterr().err


def test_help():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--updates", "--seed", "--out"):
        assert option in done.stdout
