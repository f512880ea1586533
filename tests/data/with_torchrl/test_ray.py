"""A buffer in a Ray actor answers every call as one in this process does.

These tests need ``ray`` (``pip install 'torchrl-mt[ray]'``), and are skipped without it.
"""

import random
from functools import partial

import pytest
import torch
from tensordict import TensorDict, is_tensor_collection, lazy_stack
from torch import Tensor
from torchrl.collectors.distributed import RayCollector
from torchrl.data import RayReplayBuffer, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import PendulumEnv, StepCounter, TransformedEnv

from torchrl_mt.collectors import UniqueTrajIds
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)
from torchrl_mt.transforms import DiscountedReturn, MergeTurns

ray = pytest.importorskip("ray", reason="needs ray: pip install 'torchrl-mt[ray]'")
pytestmark = pytest.mark.slow

SPAN = 3
LIGHT = {"num_cpus": 0}
CALLS = 40


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False
    )
    yield
    ray.shutdown()


def with_images():
    from torchrl.envs.transforms import Compose

    from tests.vision.episodes import family
    from torchrl_mt.transforms import VisionInputs

    return Compose(MergeTurns(), VisionInputs(family("qwen2_vl")[1]))


KINDS = {
    "priorities": (
        TensorDictReplayBuffer,
        {
            "storage": partial(EpisodeStorage, 40),
            "writer": partial(EpisodeWriter, transform=DiscountedReturn(0.9)),
            "sampler": partial(PrioritizedClipSampler, slice_len=SPAN),
            "batch_size": 4 * SPAN,
        },
    ),
    "clips": (
        ReplayBuffer,
        {
            "storage": partial(EpisodeStorage, 40, max_episodes=5),
            "writer": EpisodeWriter,
            "sampler": partial(ClipSampler, slice_len=2, stride=2, layout="clips"),
            "batch_size": 6,
        },
    ),
    "rows": (
        ReplayBuffer,
        {
            "storage": partial(EpisodeStorage, 40, max_tokens=150),
            "writer": EpisodeWriter,
            "sampler": partial(EpisodeSampler, replacement=False),
            "batch_size": 2,
            "transform_factory": MergeTurns,
        },
    ),
}


def served(kind):
    cls, parts = KINDS[kind]
    if kind == "priorities":  # the other way to have one
        return cls(**parts, service_backend="ray", service_backend_options={"remote_config": LIGHT})
    return RayReplayBuffer(replay_buffer_cls=cls, remote_config=LIGHT, **parts)


def local(kind):
    cls, parts = KINDS[kind]
    return cls(**parts)


@pytest.fixture(scope="module", params=KINDS)
def both(request):
    """The buffer of an actor and one of this process, with the same parts."""
    there = served(request.param)
    yield request.param, there, local(request.param)
    there.shutdown()


def plain(value, make):
    """What can be compared by ``==``."""
    if is_tensor_collection(value):
        return make.steps(value if value.batch_dims else value.unsqueeze(0))
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: plain(each, make) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, make) for each in value]
    return value


def contents(kind, state, make):
    """What a buffer holds that loads a state."""
    rb = local(kind)
    rb.load_state_dict(state)
    episodes = [make.steps(episode) for episode in rb.storage.episodes()]
    opened = {label: make.steps(steps) for label, steps in rb.writer.open_episodes.items()}
    return [episodes, opened, rb.writer.state_dict()["counts"], rb.sampler.state_dict()]


def with_prompt(turn):
    """The turn, with a prompt that is not empty."""
    prompt = turn["tokens", "prompt"]
    return turn.set(("tokens", "prompt"), torch.cat([prompt.new_ones(1), prompt]))


class Pieces:
    """What two collectors write: episodes cut anywhere, of both in turn, with the same ids."""

    def __init__(self, make, draw, kind):
        self.make, self.draw = make, draw
        self.maker = make.turns if kind == "rows" else make.vectors
        self.queues = [[], []]
        self.counts = [0, 0]

    def next(self):
        at = self.draw.randrange(2)
        queue = self.queues[at]
        if not queue:
            # The ids of episodes of turns differ: no observation tells them apart.
            first = self.counts[at] + (1000 * at if self.maker is self.make.turns else 0)
            self.counts[at] += 1
            length = self.draw.randint(1, 9)
            steps = self.maker([length], seed=self.draw.randrange(10**6), first_id=first)
            if self.maker is self.make.turns:
                steps = lazy_stack([with_prompt(step) for step in steps.unbind(0)])
            cut = self.draw.randint(1, length)
            queue += [part for part in (steps[:cut], steps[cut:]) if len(part)]
        return queue.pop(0)


def a_call(draw, pieces, known, folders):
    """A random call, as a function of a buffer; ``known`` are handles given out earlier."""
    name = draw.choice(
        ["extend"] * 6
        + ["sample"] * 5
        + ["priority"] * 3
        + ["read", "slice", "add", "state", "dumps", "loads", "empty", "batch"]
    )
    if name == "extend":
        piece = pieces.next()
        return lambda rb: rb.extend(piece)
    if name == "add":
        step = pieces.next()[0]
        return lambda rb: rb.add(step)
    if name == "sample":
        return lambda rb: rb.sample()
    if name == "batch":
        size = draw.choice([1, 2, 6, 12])
        return lambda rb: rb.sample(size)
    if name == "priority" and known:
        index = draw.choice(known)  # Some of it may have been evicted.
        index = draw.choice([index, index.clone(), index.flatten()[::2], index.reshape(1, -1)])
        values = torch.tensor([draw.random() for _ in range(index.numel())]).reshape(index.shape)
        return lambda rb: rb.update_priority(index, values)
    if name == "slice":
        return lambda rb: rb[:]
    if name == "state":
        return lambda rb: rb.state_dict()
    if name == "empty" and draw.random() < 0.3:
        return lambda rb: rb.empty()
    if name == "dumps":
        folders.append(len(folders))
        return lambda rb, place=folders[-1]: rb.dumps(rb.folder / str(place))
    if name == "loads" and folders:
        place = draw.choice(folders)
        return lambda rb: rb.loads(rb.folder / str(place))
    at = draw.randint(-50, 50)
    return lambda rb: rb[at]


def outcome(call, rb):
    try:
        return call(rb)
    except Exception as error:
        return error


def index_of(value):
    """Handles of a sample or a write."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value
    if is_tensor_collection(value) and isinstance(value.get("index", None), Tensor):
        return value["index"]
    return None


@pytest.mark.parametrize("seed", range(2))
def test_every_call_is_answered_as_here(make, both, seed, tmp_path):
    kind, there, here = both
    draw = random.Random(seed)
    for rb, name in ((there, "there"), (here, "here")):
        rb.folder = tmp_path / name
        rb.folder.mkdir()
        rb.empty()
        rb.set_rng(torch.Generator().manual_seed(seed))
    pieces, known, folders, answered = Pieces(make, draw, kind), [], [], 0
    for _ in range(CALLS):
        call = a_call(draw, pieces, known, folders)
        got, expected = outcome(call, there), outcome(call, here)
        if isinstance(expected, Exception):
            assert isinstance(got, type(expected))
            assert str(expected) in str(got)
        else:
            answered += 1
            if isinstance(expected, dict):
                got, expected = (contents(kind, state, make) for state in (got, expected))
            assert plain(got, make) == plain(expected, make)
            index = index_of(expected)
            known += [index] if index is not None and index.numel() else []
        assert len(there) == len(here)
        assert there.write_count == here.write_count
    assert answered > CALLS // 3
    states = [contents(kind, rb.state_dict(), make) for rb in (there, here)]
    assert plain(states[0], make) == plain(states[1], make)


def test_two_processes_that_write_at_once_tear_no_episode(make):
    rb = served("clips")
    lengths = [3, 1, 7, 2, 5, 4]

    @ray.remote(num_cpus=0)
    def write(client, steps, cuts):
        for piece in steps.split(cuts):
            client.extend(piece)

    # The same ids, as of collectors that both count from 0.
    written = [make.vectors(lengths, seed=seed) for seed in range(2)]
    ray.get([write.remote(rb.client(), steps, [1, 2, 4, 1, 6, 3, 5]) for steps in written])
    state = rb.state_dict()
    rb.shutdown()
    stored = local("clips")
    stored.load_state_dict(state)
    assert stored.writer.stats()["open_episodes"] == 0
    whole = [make.steps(each) for steps in written for each in make.split(steps)]
    for episode in stored.storage.episodes():
        assert make.steps(episode) in whole
    assert stored.write_count == 2 * sum(lengths)


def test_images_reach_the_rows_of_an_actor():
    from tests.vision.episodes import family, random_steps

    steps, _ = random_steps(family("qwen2_vl")[1], seed=0, episodes=4)
    parts = {
        "storage": partial(EpisodeStorage, 100),
        "writer": EpisodeWriter,
        "sampler": partial(EpisodeSampler, replacement=False),
        "batch_size": 2,
        "transform_factory": with_images,
    }
    there = RayReplayBuffer(replay_buffer_cls=ReplayBuffer, remote_config=LIGHT, **parts)
    here = ReplayBuffer(**parts)
    for rb in (there, here):
        rb.set_rng(torch.Generator().manual_seed(0))
        rb.extend(steps)
    for _ in range(2):
        got, expected = there.sample(), here.sample()
        assert isinstance(got, TensorDict)
        for name in ("pixel_values", "grid_thw"):
            assert torch.equal(got["images", name], expected["images", name])
        for key in (("images", "count"), ("tokens", "full"), "episode"):
            assert torch.equal(got[key], expected[key])
    there.shutdown()


def test_a_collector_of_several_processes():
    # A local function is sent to other processes by value: they cannot import the tests.
    def env():
        return TransformedEnv(PendulumEnv(), StepCounter(max_steps=5))

    cls, parts = KINDS["priorities"]
    options = {"remote_config": LIGHT}
    parts = parts | {"writer": EpisodeWriter}
    rb = cls(**parts, service_backend="ray", service_backend_options=options)
    collector = RayCollector(
        [env, env],
        None,
        frames_per_batch=10,
        total_frames=40,
        trajs_per_batch=2,
        replay_buffer=rb,
        remote_configs=LIGHT,
        sync=True,
        collector_kwargs={"postproc": UniqueTrajIds()},
    )
    try:
        for _ in collector:
            pass
    finally:
        collector.shutdown(shutdown_ray=False)
    stored, clips = rb[:], rb.sample().view(4, SPAN)
    rb.shutdown()
    assert len(stored) >= 20
    assert stored["step_count"].view(-1, 5).tolist() == [list(range(5))] * (len(stored) // 5)
    episodes = stored["th"].view(-1, 5)
    assert torch.equal(stored["next", "th"].view(-1, 5)[:, :-1], episodes[:, 1:])
    assert (clips["step_count"].squeeze(-1).diff() == 1).all()
    ids = stored["collector", "traj_ids"].view(-1, 5)
    assert (ids == ids[:, :1]).all()
    assert len(ids[:, 0].unique()) == len(ids)
