"""What of TorchRL composes with the storage, row by row as in docs/torchrl.rst.

Each combination gives the stored steps and never mixes episodes, or is refused by name.
"""

import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import StreamingSliceSampler
from torchrl.envs import PendulumEnv, RenameTransform, RewardScaling, StepCounter, TransformedEnv
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.buffers import buffer_of
from tests.data import makers
from tests.refusals import check_refused, refused
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

BUFFERS = [ReplayBuffer, TensorDictReplayBuffer]
KEY = "episode"


def buffer(sampler=None, *, cls=ReplayBuffer, max_steps=40, batch_size=12, **kwargs):
    return buffer_of(max_steps, sampler, cls=cls, batch_size=batch_size, **kwargs)


def check(make, rb, sample, span=1):
    """The sample holds stored steps, in runs of ``span`` that follow each other in one episode."""
    stored = {
        (int(step[KEY]), int(step["step"])): leaves
        for episode in rb.storage.episodes()
        for step, leaves in zip(episode, make.unmarked(make.steps(episode)), strict=True)
    }
    where = list(zip(sample[KEY].tolist(), sample["step"].tolist(), strict=True))
    assert where
    assert make.unmarked(make.steps(sample)) == [stored[each] for each in where]
    assert (sample[KEY].view(-1, span).diff() == 0).all()
    assert (sample["step"].view(-1, span).diff() == 1).all()


def writes(make, num=8):
    """Episodes of 3 to 7 steps in uneven pieces, more than the buffer holds."""
    data = make.vectors([3 + (5 * k) % 7 % 5 for k in range(3 * num)])
    bounds = [0, *sorted((k * 37) % (len(data) - 1) + 1 for k in range(num - 1)), len(data)]
    return [data[a:b] for a, b in pairwise(bounds) if b > a]


def staleness_aware(**kwargs):
    sampler = StalenessAwareSampler(**kwargs)
    sampler.consumer_version = 100
    return sampler


SLICES, GROUPS = {"slice_len": 3, "traj_key": KEY}, {"num_groups": 2, "group_key": KEY}
SAMPLERS = [
    (RandomSampler, {}),
    (SamplerWithoutReplacement, {}),
    (SamplerWithoutReplacement, {"drop_last": True}),
    (SliceSampler, SLICES),
    (SliceSampler, {"slice_len": 3, "end_key": ("next", "done")}),
    (SliceSampler, {"num_slices": 4}),
    (SliceSampler, SLICES | {"cache_values": True}),
    (SliceSamplerWithoutReplacement, SLICES),
    (PromptGroupSampler, GROUPS),
    (PromptGroupSampler, GROUPS | {"strategy": "reward"}),
    (staleness_aware, {"version_key": "action"}),
    (ClipSampler, {"slice_len": 3}),
    (PrioritizedClipSampler, {"slice_len": 3}),
    (EpisodeSampler, {}),
]


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(("sampler", "options"), SAMPLERS)
def test_samplers_give_stored_steps_while_episodes_come_and_go(
    make, sampler, options, cls, prefetch
):
    span = 3 if {"slice_len", "num_slices"} & options.keys() else 1
    batch_size = 3 if sampler is EpisodeSampler else 12
    rb = buffer(sampler(**options), cls=cls, prefetch=prefetch, batch_size=batch_size)
    left = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A group .or the set of groups. was smaller")
        for piece in writes(make):
            rb.extend(piece)
            left = rb.storage.table.oldest
            if len(rb.storage.lengths) < 3:
                continue
            if prefetch:
                rb.sample()  # What was chosen before the write is of before the write.
                continue
            for _ in range(4):
                check(make, rb, rb.sample(), span)
    assert left > 5
    if prefetch:
        for _ in range(prefetch + 1):
            rb.sample()
        check(make, rb, rb.sample(), span)


@pytest.mark.parametrize("cls", BUFFERS)
def test_samplers_without_replacement_give_each_step_once(make, cls):
    rb = buffer(SamplerWithoutReplacement(), cls=cls, batch_size=4)
    rb.extend(make.vectors([5, 4, 7]))
    for _ in range(2):
        seen = torch.cat([batch["step"] + 10 * batch[KEY] for batch in rb])
        assert sorted(seen.tolist()) == [*range(5), *range(10, 14), *range(20, 27)]


def test_slices_without_replacement_give_each_episode_once(make):
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=3, traj_key=KEY), batch_size=6)
    rb.extend(make.vectors([5, 4, 7, 3]))
    for _ in range(2):
        assert sorted(torch.cat([batch[KEY][::3] for batch in rb]).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("cache_groups", [True, False])
@pytest.mark.parametrize("how", ["extend", "flush", "another buffer"])
def test_groups_are_never_mixed_after_a_write(make, how, cache_groups):
    sampler = PromptGroupSampler(num_groups=2, group_key=KEY, cache_groups=cache_groups)
    rb = buffer(sampler, max_steps=9, batch_size=6)
    other = ReplayBuffer(storage=rb.storage, writer=EpisodeWriter())
    writer = other if how == "another buffer" else rb
    writer.extend(make.vectors([4, 5]))
    writer.extend(make.vectors([5], first_id=7)[:4])
    rb.sample()
    if how == "flush":
        rb.writer.flush()
    else:
        writer.extend(make.vectors([4], first_id=8))
    for _ in range(10):
        groups = rb.sample()[KEY].view(2, 3)
        assert (groups == groups[:, :1]).all()


def test_stale_steps_are_left_out(make):
    sampler = StalenessAwareSampler(max_staleness=1, version_key=KEY)
    rb = buffer(sampler, cls=TensorDictReplayBuffer, max_steps=12)
    for k in range(6):
        rb.extend(make.vectors([4], first_id=k))
        sampler.consumer_version = k
        sample = rb.sample()
        assert set(sample[KEY].tolist()) <= {k - 1, k}
        assert (sample["staleness"] == k - sample[KEY]).all()


def tied(cls):
    # Made without its C++ trees, which not every build of TorchRL has.
    return object.__new__(cls)


def by_recency():
    return PromptGroupSampler(num_groups=1, group_key=KEY, strategy="recency")


def written(sampler, cls):
    rb = buffer(cls=cls)
    rb.set_sampler(sampler)
    rb.extend(makers.vectors([3]))


def sampled(cls, **parts):
    rb = cls(**{"storage": EpisodeStorage(20), **parts}, batch_size=4)
    rb.extend(makers.vectors([5]))
    rb.sample()


TIED = [PrioritizedSampler, PrioritizedSliceSampler, StreamingSliceSampler]
OURS = [ClipSampler(slice_len=2), PrioritizedClipSampler(slice_len=2), EpisodeSampler()]
OF_OURS, THEIRS = "samples from an EpisodeStorage, got LazyTensorStorage", LazyTensorStorage(20)
IN_RUNS = {"writer": EpisodeWriter(), "sample_unit": Sequence(length=3)}


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(
            refused("use ClipSampler, Prioritized… or", written, tied(kind), error=TypeError)
            for kind in TIED
        ),
        refused("from 2**52 on: use another strategy", written, by_recency(), error=TypeError),
        refused("ConsumingSampler requires a writer", buffer, ConsumingSampler(), error=TypeError),
        refused("Sequence requires …; got EpisodeStorage", sampled, **IN_RUNS, error=TypeError),
        *(
            refused(OF_OURS, sampled, storage=THEIRS, sampler=ours, error=TypeError)
            for ours in OURS
        ),
    ],
)
def test_what_does_not_compose_is_refused(cls, call, error, text):
    check_refused(partial(call, cls=cls), error, text)


@pytest.mark.parametrize("cls", BUFFERS)
def test_stored_steps_do_not_change(make, cls):
    rb = buffer(cls=cls)
    rb.extend(make.vectors([3]))
    before = make.steps(rb[:])
    with pytest.raises(TypeError, match="never changes stored steps"):
        rb[0] = rb[1]
    zeros = torch.zeros(3, dtype=torch.int32)
    rb.set_at_("action", zeros, torch.arange(3))
    rb.set_("action", zeros)
    rb.update_({"action": zeros})
    assert make.steps(rb[:]) == before


@pytest.mark.parametrize("cls", BUFFERS)
def test_query_gives_the_episodes(make, cls):
    rb = buffer(cls=cls, max_steps=12)
    for k in range(5):
        rb.extend(make.vectors([3 + k % 3], first_id=k))
    assert rb.stats()["utilization"] == 1.0
    found = {int(t.data[KEY][0]): t.data for t in rb.query(trajectory_key=KEY)}
    stored = {int(episode[KEY][0]): episode for episode in rb.storage.episodes()}
    assert found.keys() == stored.keys() == {2, 3, 4}
    for k, episode in stored.items():
        assert make.steps(found[k].select(*episode.keys(True, True))) == make.steps(episode)


def test_transforms_run_on_what_is_sampled(make):
    plain, scaled = buffer(ClipSampler(slice_len=3)), buffer(ClipSampler(slice_len=3))
    scaled.append_transform(RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]))
    for rb in (plain, scaled):
        rb.extend(make.vectors([5, 6]))
    sample, info = scaled.sample(return_info=True)
    expected = 2.0 * plain[scaled.storage.places(info["index"])]["next", "reward"] + 1.0
    torch.testing.assert_close(sample["next", "reward"], expected)
    # The stored steps stay as they are.
    torch.testing.assert_close(scaled.storage[:]["next", "reward"], plain[:]["next", "reward"])


def test_inverse_transforms_run_on_what_is_written(make):
    rb = buffer(ClipSampler(slice_len=3))
    rb.append_transform(RenameTransform(["act"], ["action"], ["act"], ["action"]))
    data = make.vectors([5, 6])
    rb.extend(data.clone())
    assert "act" in rb.storage[:]
    assert torch.equal(rb.storage[:]["act"], data["action"])
    sample = rb.sample().view(4, 3)
    assert (sample["step"].diff() == 1).all()
    assert "action" in sample


class Pendulum(nn.Module):
    """What a pendulum's angle and speed are worth, or how to push it."""

    def __init__(self, out, head=None):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, out), head or nn.Identity()
        )

    def forward(self, angle, speed):
        return self.body(torch.stack([angle, speed], -1))


@pytest.mark.parametrize("layout", ["flat", "clips"])
def test_ppo_on_clips(layout):
    torch.manual_seed(0)
    seen = ["th", "thdot"]
    policy = TensorDictModule(Pendulum(2, NormalParamExtractor()), seen, ["loc", "scale"])
    bounds = {"low": -2.0, "high": 2.0}
    actor = ProbabilisticActor(
        policy,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    critic = ValueOperator(Pendulum(1), in_keys=seen)
    sampler = ClipSampler(slice_len=3, layout=layout)  # of episodes of 5
    rb = buffer(sampler, cls=TensorDictReplayBuffer, batch_size=60)
    for _ in Collector(
        env_maker()(), actor, frames_per_batch=50, total_frames=50, replay_buffer=rb
    ):
        pass
    clips = rb.sample()
    GAE(gamma=0.9, lmbda=0.8, value_network=critic)(clips)
    loss = ClipPPOLoss(actor, critic)
    out = loss(clips)
    (out["loss_objective"] + out["loss_critic"]).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (*actor.parameters(), *critic.parameters()))
    torch.testing.assert_close(out["mean_ratio"], torch.tensor(1.0))

    clips = clips.reshape(20, 3)
    with torch.no_grad():
        now, after = (critic(each.select(*seen))["state_value"] for each in (clips, clips["next"]))
    flags = clips["next"]
    error = flags["reward"] + 0.9 * after * ~flags["terminated"] - now
    advantage, following = torch.zeros_like(now), torch.zeros_like(now[:, 0])
    for t in reversed(range(3)):
        advantage[:, t] = following = error[:, t] + 0.9 * 0.8 * following
    torch.testing.assert_close(clips["advantage"], advantage, atol=1e-4, rtol=1e-4)


def env_maker():
    # A local function is sent to other processes by value: they cannot import the tests.
    def env():
        return TransformedEnv(PendulumEnv(), StepCounter(max_steps=5))

    return env


def check_pendulum(rb):
    """Every stored episode is a whole one, and every clip a part of it."""
    assert rb.storage.num_episodes
    for episode in rb.storage.episodes():
        assert episode["step_count"].squeeze(-1).tolist() == list(range(5))
        assert torch.equal(episode["next", "th"][:-1], episode["th"][1:])
        assert len(episode["collector", "traj_ids"].unique()) == 1
    clips = rb.sample().view(4, 3)
    assert (clips["step_count"].squeeze(-1).diff() == 1).all()
    assert torch.equal(clips["next", "th"][:, :-1], clips["th"][:, 1:])


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_collectors_of_several_processes_cannot_share_the_buffer(make, cls):
    rb = buffer(ClipSampler(slice_len=3))
    with pytest.raises(RuntimeError, match="write to it in the process that samples from it"):
        cls([env_maker()], frames_per_batch=12, total_frames=24, replay_buffer=rb)
    rb.extend(make.vectors([5, 4]))
    check(make, rb, rb.sample(), 3)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_batches_of_several_processes_are_put_together(cls):
    rb = buffer(ClipSampler(slice_len=3))
    collector = cls([env_maker()] * 2, frames_per_batch=12, total_frames=48)
    try:
        for batch in collector:
            rb.extend(batch)
    finally:
        collector.shutdown()
    # Each worker made 24 steps or so, the last of which belong to an unfinished episode.
    assert rb.write_count >= 40
    check_pendulum(rb)
