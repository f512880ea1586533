import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import PendulumEnv, TransformedEnv

from tests.buffers import buffer_of
from tests.data.makers import ends, whole
from tests.refusals import check_refused, refused
from torchrl_mt.data import ClipSampler, EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.transforms import DiscountedReturn
from torchrl_mt.transforms.discounted_return import discounted_returns


def slow_returns(reward, end, gamma):
    total, following = reward.double().clone(), torch.zeros_like(reward[0], dtype=torch.float64)
    for t in reversed(range(len(reward))):
        following = reward[t].double() + (0.0 if end[t] else gamma * following)
        total[t] = following
    return total


def episodes(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    reward = torch.randn(sum(lengths), 1, generator=generator)
    return whole({"collector": {"traj_ids": ids}, "next": {"reward": reward}}, *lengths)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    gamma=st.sampled_from([0.0, 1e-6, 0.3, 0.99, 1.0]),
    width=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_returns_equal_a_slow_loop(lengths, gamma, width, seed):
    end = ends(*lengths).flatten()
    reward = torch.randn(len(end), width, generator=torch.Generator().manual_seed(seed))
    got = discounted_returns(reward, end, gamma)
    torch.testing.assert_close(got.double(), slow_returns(reward, end, gamma), rtol=1e-5, atol=1e-5)


def test_long_episodes_with_small_gamma_stay_exact():
    reward = torch.ones(5000, 1)
    end = torch.zeros(5000, dtype=torch.bool)
    for gamma in (1e-12, 0.5, 0.999):
        got = discounted_returns(reward, end, gamma)
        expected = slow_returns(reward, end, gamma)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_a_bad_reward_stays_in_its_episode(bad, gamma):
    reward = torch.tensor([1.0, 1.0, bad, 1.0, 1.0])
    end = torch.tensor([False, True, False, True, True])
    got = discounted_returns(reward, end, gamma)
    assert torch.isfinite(got[[0, 1, 3, 4]]).all()
    assert not torch.isfinite(got[2])


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_bad_reward_is_handed_on_when_the_discount_underflows(bad):
    reward = torch.ones(1200)
    reward[-1] = bad
    end = torch.zeros(1200, dtype=torch.bool)
    end[599] = True
    got = discounted_returns(reward, end, 0.5)
    expected = slow_returns(reward, end, 0.5).float()
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert not torch.isfinite(got[600:]).any()


def test_rewards_of_agents_end_with_the_nearest_flags_around_them():
    data = episodes(3, 1, 5)
    expected = slow_returns(data["next", "reward"], data["next", "done"], 0.9)
    data["next", "agents", "reward"] = data["next", "reward"].unsqueeze(1).repeat(1, 2, 1)
    transform = DiscountedReturn(
        0.9, in_key=("next", "agents", "reward"), out_key=("next", "agents", "return")
    )
    own = data.clone()
    own["next", "agents", "done"] = torch.ones(9, 2, 1, dtype=torch.bool)
    assert torch.equal(transform(own)["next", "agents", "return"], own["next", "agents", "reward"])
    for flag in ("done", "terminated", "truncated"):
        out = transform(data.clone().rename_key_(("next", "done"), ("next", flag)))
        for agent in range(2):
            got = out["next", "agents", "return"][:, agent].double()
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(KeyError, match=r"\('next', 'agents', 'done'\) nor \('next', 'done'\)"):
        transform(data.exclude(("next", "done")))


def check(data):
    """The returns at 0.9 are those of the rewards."""
    expected = slow_returns(data["next", "reward"], data["next", "done"], 0.9)
    torch.testing.assert_close(data["next", "return"].double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_a_batch_do_not_mix():
    data = torch.stack([episodes(2, 3, seed=1), episodes(4, 1, seed=2)])
    data["collector", "traj_ids"][1] += 2
    out = DiscountedReturn(0.9)(data.clone())
    assert torch.equal(out["next", "reward"], data["next", "reward"])
    for row in out:
        check(row)


def test_outcome_only_keeps_the_last_step_with_its_own_reward():
    data = episodes(3, 1, 5)
    out = DiscountedReturn(0.9, outcome_only=True, out_key="outcome")(data.clone())
    assert out.batch_size == (3,)
    assert (out["outcome"] == data["next", "reward"][[2, 3, 8]]).all()
    assert (out["next", "done"]).all()


def test_as_the_writers_transform_on_data_in_pieces():
    data = episodes(3, 4)
    writer = EpisodeWriter(transform=DiscountedReturn(0.9))
    rb = ReplayBuffer(storage=EpisodeStorage(100), writer=writer)
    for piece in data.split(2):
        rb.extend(piece)
    assert torch.equal(rb[:]["next", "reward"], data["next", "reward"])
    check(rb[:])


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_in_a_buffer_of_whole_episodes(cls):
    rb = buffer_of(100, EpisodeSampler(), cls=cls, transform=DiscountedReturn(0.9), batch_size=2)
    for piece in episodes(3, 4).split(2):
        rb.extend(piece)
    check(rb.sample())


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_returns_of_strided_clips_hold_the_rewards_of_all_their_steps(stride):
    data, gamma = episodes(7, 4, 9), 0.9
    rb = buffer_of(
        20,
        ClipSampler(slice_len=2, stride=stride, layout="clips"),
        writer=EpisodeWriter(transform=DiscountedReturn(gamma, out_key="return")),
        batch_size=200,
    )
    rb.extend(data)
    clips, info = rb.sample(return_info=True)
    reward, end = (data["next", key].squeeze(-1) for key in ("reward", "done"))
    expected = slow_returns(reward, end, gamma)
    index = rb.storage.places(info["index"])
    torch.testing.assert_close(clips["return"].squeeze(-1).double(), expected[index])
    # A step's return is what its own rewards and the next step's return make.
    steps = index[:, :1] + torch.arange(stride)
    own = (reward[steps] * gamma ** torch.arange(stride)).sum(-1)
    first, second = clips["return"].squeeze(-1).unbind(1)
    torch.testing.assert_close(first, own + gamma**stride * second)


@pytest.mark.parametrize("ids", [True, False])
def test_partial_data_is_refused_and_told_where_to_go(ids):
    piece = episodes(3, 4)[:5]
    if not ids:
        del piece["collector"]
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.append_transform(DiscountedReturn(0.9), invert=True)
    with pytest.raises(NotImplementedError, match="EpisodeWriter"):
        rb.extend(piece)
    assert len(rb) == 0
    with pytest.raises(ValueError, match=r"breaks off.*EpisodeWriter"):
        DiscountedReturn(0.9)(piece)
    with pytest.raises(NotImplementedError, match="EpisodeWriter"):
        DiscountedReturn(0.9).inv(piece)


AGENTS = {"in_key": ("next", "agents", "reward"), "out_key": ("next", "agents", "return")}


def agents(lengths, early, root=True):
    """Episodes of two agents, the first of which is done ``early`` steps before the last."""
    data = episodes(*lengths)
    n, last = len(data), data["next", "done"].flatten()
    own = last[:, None, None].repeat(1, 2, 1)
    for before in range(early + 1):
        own[: n - before, 0, 0] |= last[before:]
    reward = torch.randn(n, 2, 1, generator=torch.Generator().manual_seed(0))
    data["next", "agents"] = TensorDict({"reward": reward, "done": own}, [n])
    return data if root else data.exclude(("next", "done"))


@pytest.mark.parametrize("root", [True, False])
def test_agents_end_on_their_own_and_episodes_for_all_of_them(root):
    data = agents([5, 4, 6], 2, root)
    transform = DiscountedReturn(0.9, **AGENTS)
    out = transform(data.clone())["next", "agents", "return"]
    for agent in range(2):
        slow = slow_returns(
            data["next", "agents", "reward"][:, agent],
            data["next", "agents", "done"][:, agent],
            0.9,
        )
        torch.testing.assert_close(out[:, agent].double(), slow, rtol=1e-5, atol=1e-6)
    kept = DiscountedReturn(0.9, outcome_only=True, **AGENTS)(data.clone())
    assert torch.equal(
        kept["next", "agents", "return"], data["next", "agents", "reward"][[4, 8, 14]]
    )
    with pytest.raises(ValueError, match="breaks off"):
        transform(data[:3])


def test_an_episode_that_ends_for_all_ends_for_agents_that_are_not_done():
    data = agents([3, 2], 0)
    data["next", "agents", "done"].zero_()
    out = DiscountedReturn(1.0, **AGENTS)(data.clone())["next", "agents", "return"]
    reward = data["next", "agents", "reward"]
    torch.testing.assert_close(out[0], reward[:3].sum(0))
    torch.testing.assert_close(out[3], reward[3:].sum(0))


def test_agents_ended_by_different_flags_end_the_episode():
    data = agents([3, 2], 0, root=False)
    done = data.pop(("next", "agents", "done"))
    data["next", "agents", "terminated"] = done & torch.tensor([True, False])[:, None]
    data["next", "agents", "truncated"] = done & torch.tensor([False, True])[:, None]
    assert len(DiscountedReturn(1.0, outcome_only=True, **AGENTS)(data)) == 2


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("width", [1, 3])
def test_sums_that_stay_finite_step_by_step_are_finite(gamma, width):
    generator = torch.Generator().manual_seed(width)
    for _ in range(50):
        n = int(torch.randint(1, 40, (), generator=generator))
        reward = 3e38 * (torch.randint(3, (n, width), generator=generator) - 1).float()
        end = torch.rand(n, width, generator=generator) < 0.2
        expected = torch.zeros_like(reward)
        following = torch.zeros(width, dtype=torch.float64)
        for t in reversed(range(n)):
            following = reward[t] + gamma * following.where(~end[t], 0.0)
            expected[t] = following
        got = discounted_returns(reward, end, gamma)
        torch.testing.assert_close(got, expected, equal_nan=True)
        assert torch.equal(got.isfinite(), expected.isfinite())


@pytest.mark.parametrize("outcome_only", [True, False])
def test_no_episodes_have_no_returns(outcome_only):
    data = episodes(2)[:0]
    out = DiscountedReturn(0.9, outcome_only=outcome_only)(data)
    assert out["next", "return"].shape == (0, 1)


def test_what_returns_are():
    """Data, of the dtype of the rewards or of floats."""
    reward, end = torch.ones(3, requires_grad=True), torch.tensor([False, False, True])
    returns = discounted_returns(reward, end, 1.0)
    assert (returns.tolist(), returns.requires_grad) == ([3.0, 2.0, 1.0], False)
    assert discounted_returns(reward.bfloat16(), end, 0.5).dtype == torch.bfloat16
    assert discounted_returns(reward.long(), end, 0.5).tolist() == [1.75, 1.5, 1.0]
    for shape in ((0,), (0, 1), (3, 0)):
        assert discounted_returns(torch.zeros(shape), end[: shape[0]], 0.9).shape == shape


ODD = agents([3, 2], 0)
ODD["next", "agents", "done"] = torch.zeros(5, 3, 1, dtype=torch.bool)
returns = DiscountedReturn(0.9)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("gamma must lie in", DiscountedReturn, 1.5),
        refused("reward", returns, episodes(3).exclude(("next", "reward")), error=KeyError),
        refused("done", returns, episodes(3).exclude(("next", "done")), error=KeyError),
        refused(
            "'done') must … got (3, 1) per step, … of (2, 1)", DiscountedReturn(1.0, **AGENTS), ODD
        ),
        refused("inside an environment", TransformedEnv, PendulumEnv(), returns),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)
