"""Saving and loading: exactly, whole, and whole or not at all."""

import copy
import errno
import gc
import os
import pickle
import shutil
import subprocess
import sys
import time
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import Transform

from tests.buffers import buffer_of
from tests.data import versions
from tests.data.handles import HANDLES
from tests.data.saving import HOW, saved
from tests.failing_calls import Killed, spoil
from tests.tiers import examples, in_fast_tier, slow, some_fast
from tests.waiting import PATIENCE
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)


class Count(Transform):
    """Counts the batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tensordict):
        self.count += 1
        return tensordict


def in_turn(step, storage, num_slices, span):
    return torch.arange(step, step + num_slices) % storage.num_clips(span)


SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "clips in turn": lambda: ClipSampler(slice_len=2, selector=in_turn),
    "clips of episodes": lambda: ClipSampler(slice_len=2, weighting="episode", strict_length=False),
    "clips by priority": lambda: PrioritizedClipSampler(slice_len=2),
    "episodes": lambda: EpisodeSampler(),
    "each episode": lambda: EpisodeSampler(replacement=False),
    "groups": lambda: EpisodeSampler(group_key="group"),
    "each group": lambda: EpisodeSampler(group_key="group", replacement=False),
    "each whole group": lambda: EpisodeSampler(group_key="group", replacement=False, group_size=2),
    "steps": lambda: RandomSampler(),
    "each step": lambda: SamplerWithoutReplacement(),
    "each step, no rest": lambda: SamplerWithoutReplacement(drop_last=True),
    "slices": lambda: SliceSampler(slice_len=2, strict_length=False, cache_values=True),
    "each slice": lambda: SliceSamplerWithoutReplacement(slice_len=2, strict_length=False),
    "prompt groups": lambda: PromptGroupSampler(num_groups=2, group_key="group"),
}


def buffer(sampler="clips", *, max_steps=30, **kwargs):
    options = {"transform": Count(), "batch_size": 2, "seed": 0, **kwargs}
    return buffer_of(max_steps, SAMPLERS[sampler](), **options)


def parts(make, rb):
    """What every part of a buffer holds."""
    table, writer = rb.storage.table, rb.writer
    return {
        "steps": make.steps(rb.storage[:]) if len(rb) else [],
        "lengths": table.lengths.tolist(),
        "ordinals": (table.oldest, table.next),
        "schema": rb.storage.schema,
        "open": [(key, make.steps(steps)) for key, steps in writer.open_episodes.items()],
        "id source": writer._id_source,
        "written": rb.write_count,
        "generator": None if rb._rng is None else rb._rng.get_state().tolist(),
        "transform": rb.transform[0].count.item(),
        "batch_size": rb.batch_size,
    }


def grouped(make, turns, lengths, seed):
    data = (make.turns if turns else make.vectors)(lengths, seed=seed)
    if not turns:
        data["group"] = data["episode"] // 2
    return data


FAST = ["clips by priority", "each group", "each slice"]


@pytest.mark.parametrize("sampler", some_fast(FAST, SAMPLERS))
@examples(6)
@given(
    data=st.data(),
    how=st.sampled_from(HOW),
    turns=st.booleans(),
    cls=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
)
def test_a_loaded_buffer_goes_on_like_the_saved_one(
    make, tmp_path_factory, sampler, how, data, turns, cls
):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=8, max_size=16))
    episodes = grouped(make, turns, lengths, seed=len(lengths))
    cuts = data.draw(st.lists(st.integers(7, len(episodes) - 1), max_size=8, unique=True))
    bounds = [0, *sorted(cuts), len(episodes)]
    pieces = [episodes[a:b] for a, b in pairwise(bounds)]
    acts = data.draw(st.lists(st.sampled_from("wsss"), min_size=2, max_size=30))
    now = data.draw(st.integers(1, len(acts)))

    def step(rb, act, at):
        if act == "w":
            if at < len(pieces):
                rb.extend(pieces[at].clone())
        elif rb.can_sample():
            try:
                sample = rb.sample()
                if "index" in sample.keys():  # noqa: SIM118
                    # What is loaded has other handles than what it takes the place of.
                    index = sample["index"]
                    sample["index"] = index - (index >= HANDLES) * rb.storage.table.renumbered
                return make.steps(sample), rb.sampler.ran_out
            except RuntimeError as error:
                return str(error)
        return None

    def begun():
        rb, written = buffer(sampler, cls=cls), 1
        step(rb, "w", 0)
        for act in acts[:now]:
            step(rb, act, written)
            written += act == "w"
        return rb, written

    (rb, written), (undisturbed, _) = begun(), begun()
    other = buffer(sampler, cls=cls, seed=5)
    other.extend(grouped(make, turns, [3, 2], seed=1))
    other.sample()
    same = saved(rb, how, tmp_path_factory.mktemp("checkpoint") / "a", other)
    assert parts(make, same) == parts(make, rb)
    for act in acts[now:] + ["s"] * 6:
        expected = step(undisturbed, act, written)
        assert step(same, act, written) == step(rb, act, written) == expected
        written += act == "w"
        assert parts(make, same) == parts(make, rb) == parts(make, undisturbed)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("sampler", ["clips", "each episode", "each group", "each step", "slices"])
def test_prefetched_batches_are_saved(make, sampler, how, tmp_path):
    rb, other = (buffer(sampler, prefetch=1, seed=seed) for seed in (0, 1))
    rb.extend(grouped(make, False, [3, 2, 4, 1, 5, 2, 3], seed=0))
    other.extend(grouped(make, False, [3, 2, 4], seed=1))
    rb.sample(), other.sample()
    same = saved(rb, how, tmp_path, other)
    assert len(same._prefetch_queue) == 1
    for _ in range(9):
        assert make.steps(same.sample()) == make.steps(rb.sample())
    same.synchronize(), rb.synchronize()
    assert parts(make, same) == parts(make, rb)


def test_a_global_generator_is_not_saved(make, tmp_path):
    rb = buffer(seed=None)
    rb.extend(make.vectors([5, 4]))
    rb.dumps(tmp_path)
    rb.sample()
    state = torch.get_rng_state()
    same = buffer(seed=None)
    same.loads(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    first = make.steps(rb.sample())
    torch.set_rng_state(state)
    assert make.steps(same.sample()) == first


# ---- whole or not at all ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_other_processes_load_while_one_saves(tmp_path):
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, versions.__file__, str(tmp_path)],
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0
    assert versions.loaded_version(tmp_path) == 24
    versions.version(3).dumps(tmp_path)
    assert versions.loaded_version(tmp_path) == 3
    assert len(versions.folders(tmp_path)) == 1


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [FULL, Killed()])
def test_whichever_call_fails_or_is_the_last_the_checkpoint_is_whole(
    error, late, tmp_path, monkeypatch
):
    number, failures, at, reached = None, 0, 0, True
    while reached:
        following = versions.version((number or 0) + 1)
        with monkeypatch.context() as patch:
            count = spoil(patch, at, error, once=error is FULL, late=late)
            try:
                following.dumps(tmp_path / "new")
                done = True
            except type(error):
                done = False
            reached = next(count) > at
        try:
            found = versions.loaded_version(tmp_path / "new")
        except FileNotFoundError:
            found = None
        assert found == (number or 0) + 1 or (not done and found == number)
        failures += not done
        if error is FULL and not done and found == number:
            assert not versions.unfinished(tmp_path / "new")
        number = found
        at += in_fast_tier(13, 1)
    assert failures > 20 // in_fast_tier(13, 1)


def test_everything_is_on_the_disk_before_it_counts_and_the_old_goes_last(tmp_path, monkeypatch):
    versions.version(1).dumps(tmp_path)
    (old,) = versions.folders(tmp_path)
    flushed, log = set(), []
    fsync, rename, rmdir = os.fsync, os.rename, os.rmdir

    def note_fsync(file):
        flushed.add(os.fstat(file).st_ino)
        log.append(os.fstat(file).st_ino)
        fsync(file)

    def note_rename(source, target):
        if source.parent == tmp_path:
            for each in (source, *source.rglob("*")):
                assert each.stat().st_ino in flushed, each
            log.append("counts")
        rename(source, target)

    def note_rmdir(*args, **kwargs):
        log.append("deletes")
        rmdir(*args, **kwargs)

    for note in (note_fsync, note_rename, note_rmdir):
        monkeypatch.setattr(os, note.__name__.removeprefix("note_"), note)
    versions.version(2).dumps(tmp_path)
    after = log[log.index("counts") + 1 :]
    assert after[0] == tmp_path.stat().st_ino
    assert set(after[1:]) == {"deletes"}
    assert not old.exists()


def test_what_cannot_be_saved_leaves_the_old_checkpoint(tmp_path):
    versions.version(3).dumps(tmp_path)
    rb = versions.version(4)
    rb.transform.state_dict = lambda: {"f": lambda: None}
    with pytest.raises((pickle.PicklingError, AttributeError)):
        rb.dumps(tmp_path)
    assert versions.loaded_version(tmp_path) == 3
    assert len(versions.folders(tmp_path)) == 1


def test_other_files_stay_and_leftovers_go(tmp_path):
    (tmp_path / "model.pt").write_text("weights")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "a").write_text("mine")
    left_over = tmp_path / f"checkpoint-{'1' * 32}.tmp"
    (left_over / "storage").mkdir(parents=True)
    (left_over / "storage" / "000.rows").write_text("half")
    for number in (1, 2):
        versions.version(number).dumps(tmp_path)
        assert versions.loaded_version(tmp_path) == number
        assert len(versions.folders(tmp_path)) == 2
    assert not left_over.exists()
    assert (tmp_path / "model.pt").read_text() == "weights"
    assert (tmp_path / "checkpoint-best" / "a").read_text() == "mine"


def test_a_version_that_is_replaced_while_it_is_read_is_left_for_the_newer_one(tmp_path):
    versions.version(1).dumps(tmp_path)
    rb = versions.empty()
    load, loads = rb.writer.loads, []

    def slow_load(path):
        loads.append(path)
        if len(loads) == 1:
            versions.version(2).dumps(tmp_path)
        load(path)

    rb.writer.loads = slow_load
    rb.loads(tmp_path)
    assert len(loads) == 2
    assert versions.parts(rb) == versions.parts(versions.version(2))


@pytest.mark.parametrize("name", ["save", "dump", "dumps"])
def test_a_plain_checkpoint_is_loaded_and_replaced(name, tmp_path):
    ReplayBuffer.dumps(versions.version(5), tmp_path)
    with pytest.raises(ValueError, match=r"prefetched batches.*trust=True"):
        versions.loaded_version(tmp_path)
    assert versions.loaded_version(tmp_path, trust=True) == 5
    getattr(versions.version(6), name)(str(tmp_path))
    assert versions.loaded_version(tmp_path) == 6
    rb = versions.empty()
    rb.load(tmp_path)
    assert versions.parts(rb) == versions.parts(versions.version(6))


DAMAGE = {
    "missing": ("storage/000.rows", lambda file: file.unlink()),
    "cut": ("storage/000.rows", lambda file: file.write_bytes(file.read_bytes()[:-1])),
    "manifest": ("checkpoint.json", lambda file: file.write_text("{")),
    "content": ("writer/state.pt", lambda file: file.write_bytes(bytes(file.stat().st_size))),
    "transform": ("", lambda file: None),
    "nothing": ("", shutil.rmtree),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_cannot_be_loaded_changes_nothing(how, tmp_path):
    saved = versions.version(7)
    if how == "transform":
        saved.transform[0].register_buffer("more", torch.zeros(1))
    saved.dumps(tmp_path)
    name, spoil = DAMAGE[how]
    spoil(tmp_path / "checkpoint-1" / name)
    rb = versions.version(8)
    before, revision = versions.parts(rb), rb.storage.revision
    errors = dict.fromkeys(["missing", "nothing"], FileNotFoundError) | {"transform": RuntimeError}
    texts = {"transform": "more", "nothing": f"no checkpoint.*{tmp_path}"}
    with pytest.raises(errors.get(how, ValueError), match=texts.get(how, "damaged")) as caught:
        rb.loads(tmp_path)
    if how != "transform":
        assert str(tmp_path) in str(caught.value)
        assert rb.storage.revision == revision
    assert versions.parts(rb) == before
    rb.sample()


def test_a_state_that_cannot_be_loaded_changes_nothing():
    rb = versions.version(8)
    for part in ("_storage", "_sampler", "_writer", "_transforms", "_batch_size"):
        state = versions.version(7).state_dict()
        del state[part]
        before = versions.parts(rb)
        with pytest.raises(KeyError):
            rb.load_state_dict(state)
        assert versions.parts(rb) == before


def test_a_state_does_not_change_with_the_buffer(make):
    rb, same = buffer("each group"), buffer("each group")
    rb.extend(grouped(make, False, [3, 2, 4, 1, 5, 2, 3, 2, 1], seed=0)[:-1])
    rb.sample()
    state, before = rb.state_dict(), parts(make, rb)
    same.load_state_dict(state)
    for each in (rb, same):
        for _ in range(5):
            each.sample()
        each.extend(grouped(make, False, [4, 3], seed=1))
        each.writer.flush()
    same.load_state_dict(state)
    assert parts(make, same) == before


# ---- at one moment ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [slow(None), 2])
@pytest.mark.parametrize("how", ["dumps", "state_dict"])
def test_what_is_saved_is_of_one_moment(meanwhile, how, prefetch, tmp_path):
    rb = buffer("clips", max_steps=10**5, prefetch=prefetch)
    other = ReplayBuffer(storage=rb.storage, writer=EpisodeWriter())
    done = torch.tensor([False, False, True, False])

    def steps(first):
        step = torch.arange(first, first + 4)
        return TensorDict({"step": step, "next": {"done": done.clone()}}, [4])

    def write(k):
        rb.extend(steps(4 * k))
        if k % 2 == 0:
            rb.writer.flush()  # The open episode goes to the storage, without the buffer's lock.
        other.extend(steps(-3)[:3])

    def slow_state():
        time.sleep(0.005)  # Between the storage's state and the writer's.
        return state()

    state, rb.sampler.state_dict = rb.sampler.state_dict, slow_state
    rb.extend(steps(-4))
    rb.writer.flush()
    seen, seen_open = 0, 0
    with meanwhile(write, lambda _: rb.sample()):
        while seen < 20 or not seen_open:
            seen += 1
            same = buffer("clips", max_steps=10**5, prefetch=prefetch)
            saved(rb, how, tmp_path, same)
            stored = same.storage[:]["step"]
            still_open = [s["step"] for s in same.writer.open_episodes.values()]
            seen_open += len(still_open)
            mine = torch.cat([stored[stored >= 0], *still_open])
            assert torch.equal(mine, torch.arange(len(mine)))
            assert same.write_count == 4 + (stored >= 0).sum()


# ---- the buffer and its copies ------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_copies_save_themselves(make, cls, tmp_path):
    rb = buffer(cls=cls)
    rb.extend(make.vectors([3, 2]))
    for same in (pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb)):
        same.extend(make.vectors([4], first_id=2))
        same.dumps(tmp_path)
        assert len(versions.folders(tmp_path)) == 1
        other = buffer(cls=cls)
        other.loads(tmp_path)
        assert parts(make, other) == parts(make, same) != parts(make, rb)


def test_a_buffer_is_let_go():
    rb = versions.version(1)
    watch = weakref.ref(rb)
    del rb
    gc.collect()
    assert watch() is None


def test_a_buffer_with_another_storage_saves_that(make, tmp_path):
    rb = buffer()
    rb.extend(make.vectors([3]))
    storage = EpisodeStorage(20)
    storage.append(make.vectors([4]))
    rb.set_storage(storage)
    rb.dumps(tmp_path)
    other = buffer()
    other.loads(tmp_path)
    assert other.storage.lengths.tolist() == [4]


def test_a_buffer_that_is_not_made_yet_says_so(make, tmp_path):
    def late():
        return ReplayBuffer(
            storage=lambda: EpisodeStorage(20), writer=EpisodeWriter(), delayed_init=True
        )

    rb = late()
    rb.extend(make.vectors([3]))
    rb.dumps(tmp_path)
    for name in ("dumps", "loads"):
        other = late()
        with pytest.raises(RuntimeError, match="call this again"):
            getattr(other, name)(tmp_path)
    fresh = late()
    for each, load in ((other, other.loads), (fresh, fresh.load)):
        load(tmp_path)
        assert make.steps(each[:]) == make.steps(rb[:])


def test_every_buffer_is_told_of_every_change(make):
    class Told(RandomSampler):
        def mark_update(self, index, *, storage=None):
            told.append((index - HANDLES).tolist())

    told = []
    storage = EpisodeStorage(8)
    writer = ReplayBuffer(storage=storage, writer=EpisodeWriter())
    keep = ReplayBuffer(storage=storage, writer=EpisodeWriter(), sampler=Told())
    writer.extend(make.vectors([3, 2]))
    writer.extend(make.vectors([4]))
    state = writer.state_dict()
    writer.load_state_dict(state)
    storage.load_state_dict(state["_storage"])
    writer.empty()
    steps = [range(5), range(5, 9), range(9, 15), range(15, 21), ()]
    assert told == [[*each] for each in steps]
    assert len(keep) == 0


@pytest.mark.parametrize("how", ["load", "empty"])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: PromptGroupSampler(num_groups=2, group_key="episode"),
        lambda: SliceSampler(slice_len=3, traj_key="episode", cache_values=True),
        lambda: SliceSamplerWithoutReplacement(slice_len=3, traj_key="episode"),
        lambda: EpisodeSampler(group_key="episode"),
    ],
)
def test_every_sampler_is_told_that_other_steps_are_stored(make, sampler, how):
    rb, later = buffer_of(40, sampler(), batch_size=6), buffer_of(40)
    other = ReplayBuffer(storage=rb.storage, writer=EpisodeWriter())
    other.extend(make.vectors([3, 4, 5]))
    rb.sample()
    later.extend(make.vectors([5, 4, 3], first_id=7))
    if how == "load":
        rb.storage.load_state_dict(later.storage.state_dict())
    else:
        other.empty()
        for episode in later.storage.episodes():
            rb.storage.append(episode)
    for _ in range(10):
        batch = rb.sample()
        if not isinstance(rb.sampler, EpisodeSampler):
            assert (batch["episode"].view(-1, 3).diff() == 0).all()
        assert set(batch["episode"].tolist()) <= {7, 8, 9}
