"""A storage in files: exactly what was stored, whatever it is loaded into, and damage is found."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

from tests.buffers import buffer_of
from tests.tiers import examples, in_fast_tier, slow
from tests.waiting import PATIENCE
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

KINDS = ["vectors", "turns", "odd"]
HOW = ["dumps", "state_dict", "load_memmap"]


def episodes(make, kind, lengths, seed=0):
    """Episodes of a kind; of ``odd`` ones, the third has a next observation of its own."""
    if not lengths:
        return []
    data = make.split(getattr(make, "vectors" if kind == "odd" else kind)(lengths, seed=seed))
    if kind == "odd" and len(data) > 2 and lengths[2] > 1:
        data[2]["next", "observation"][0] += 1
    return data


def contents(make, storage):
    """The steps and the metadata of each episode."""
    steps = [make.steps(episode) for episode in storage.episodes()]
    facts = [storage.metadata(i) for i in range(len(steps))]
    assert len(storage.table.metadata) == sum(map(bool, facts))  # that of others is not kept
    return list(zip(steps, facts, strict=True))


def fitting(stored, max_steps, max_episodes):
    """The newest episodes that fit, one by one."""
    kept = []
    for episode in reversed(stored):
        steps = sum(len(steps) for steps, _ in [episode, *kept])
        if steps > max_steps or len(kept) == max_episodes:
            break
        kept.insert(0, episode)
    return kept


@examples(40)
@given(
    kind=st.sampled_from(KINDS),
    how=st.sampled_from(HOW),
    lengths=st.lists(st.integers(1, 7), max_size=14),
    max_steps=st.integers(7, 30),
    budgets=st.tuples(st.integers(7, 40), st.none() | st.integers(1, 6)),
    scratch=st.tuples(st.booleans(), st.booleans()),
    share=st.tuples(st.booleans(), st.booleans()),
    emptied=st.booleans(),
)
def test_what_is_loaded_is_what_was_stored(
    make, tmp_path_factory, kind, how, lengths, max_steps, budgets, scratch, share, emptied
):
    folder = tmp_path_factory.mktemp("storage")

    def storage(max_steps, max_episodes, part):
        return EpisodeStorage(
            max_steps,
            max_episodes=max_episodes,
            scratch_dir=folder / "scratch" if scratch[part] else None,
            share_next=share[part],
        )

    saved = storage(max_steps, None, 0)
    stored = []
    for i, episode in enumerate(episodes(make, kind, lengths)):
        facts = {"number": i, "tags": ["a"] * i} if i % 3 else None
        saved.append(episode, facts)
        stored = fitting([*stored, (make.steps(episode), facts or {})], max_steps, None)
        if emptied and i == 4:
            saved._empty()
            stored = []
        assert contents(make, saved) == stored
    kept = fitting(stored, *budgets)
    if how == "load_memmap":
        saved.dumps(folder / "saved")
        same = EpisodeStorage.load_memmap(
            folder / "saved",
            max_steps=budgets[0],
            max_episodes=budgets[1],
            scratch_dir=folder / "scratch" if scratch[1] else None,
        )
    else:
        same = storage(*budgets, 1)
        if how == "dumps":
            saved.dumps(folder / "saved")
            same.loads(folder / "saved")
        else:
            same.load_state_dict(saved.state_dict())
    assert contents(make, saved) == stored
    assert contents(make, same) == kept
    assert same.num_tokens == sum(map(int, saved.table.tokens[len(stored) - len(kept) :]))
    assert same.table.next == saved.table.next
    assert same.table.end == saved.table.end
    if share[0] and (share[1] or how == "load_memmap"):
        assert same.schema == saved.schema
    # It goes on like any other, and what was saved stays as it is.
    for more in episodes(make, kind, [3, 7, 1, 4, 5, 2], seed=1):
        same.append(more, {"more": 1})
        kept = fitting([*kept, (make.steps(more), {"more": 1})], *budgets)
        assert contents(make, same) == kept
    if how != "state_dict":
        again = storage(max_steps, None, 1)
        again.loads(folder / "saved")
        assert contents(make, again) == stored


def test_rows_longer_than_a_chunk_come_back(make, tmp_path):
    storage, same = EpisodeStorage(20), EpisodeStorage(2)
    pixels = torch.randint(256, (4, 5 << 20), dtype=torch.uint8)
    for k in range(2):
        storage.append(TensorDict({"pixels": pixels[2 * k : 2 * k + 2]}, [2]))
    storage.dumps(tmp_path)
    same.loads(tmp_path)
    assert torch.equal(same[:]["pixels"], pixels[2:])


# ---- damage -------------------------------------------------------------------------------------


def buffer(sampler=None, *, max_steps=30, cls=ReplayBuffer, **kwargs):
    return buffer_of(
        EpisodeStorage(max_steps, **kwargs),
        sampler or PrioritizedClipSampler(slice_len=2),
        cls=cls,
        seed=0,
        batch_size=2,
        prefetch=1,
    )


@pytest.mark.parametrize("kind", [slow("vectors"), "turns"])
def test_a_flipped_bit_is_found_and_its_file_named(make, kind, tmp_path):
    rb = buffer()
    rb.extend(getattr(make, kind)([3, 4, 2, 5, 3, 4])[:-1])
    rb.sample()
    rb.dumps(tmp_path)
    other = buffer()
    other.extend(getattr(make, kind)([5, 4], seed=1))
    before = make.steps(other.storage[:])
    draw = random.Random(0)
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert len(files) > 12
    for file in files:
        whole = file.read_bytes()
        places = [draw.randrange(len(whole)) for _ in range(3)]
        for place in {0, len(whole) - 1, *places} if in_fast_tier(2, 1) == 1 else places[:1]:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=f"damaged: .*{file.name}"):
                other.loads(tmp_path)
            with pytest.raises(ValueError, match=f"damaged: .*{file.name}"):
                EpisodeStorage.load_memmap(tmp_path, verify=True)
            assert make.steps(other.storage[:]) == before
        file.write_bytes(whole)
    other.loads(tmp_path)
    assert make.steps(other.storage[:]) == make.steps(rb.storage[:])


# ---- mapped -------------------------------------------------------------------------------------


def test_mapped_files_are_not_read_and_never_changed(make, tmp_path):
    rb = buffer()
    rb.extend(make.vectors([3, 4, 2, 5]))
    rb.dumps(tmp_path)
    files = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    storage = EpisodeStorage.load_memmap(tmp_path, max_steps=14)
    assert storage.max_size == 14
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert mapped.read_text().count(".rows\n") == storage_files(tmp_path)
    same = ReplayBuffer(storage=storage, writer=EpisodeWriter(), sampler=ClipSampler(slice_len=2))
    assert make.steps(same[:]) == make.steps(rb[:])
    assert len(same.sample(8)) == 8
    # The oldest leave: what comes lies where they lay.
    same.extend(make.vectors([2], seed=1))
    same.extend(make.vectors([1, 1], seed=2))
    expected = make.steps(rb[:])[7:] + make.steps(make.vectors([2], seed=1))
    assert make.steps(same[:]) == expected + make.steps(make.vectors([1, 1], seed=2))
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == files
    # Not read: damage is not seen.
    some = next(each for each in files if each.suffix == ".rows" and each.stat().st_size > 50)
    some.write_bytes(bytes(some.stat().st_size))
    EpisodeStorage.load_memmap(tmp_path)
    # What is mapped stays when the checkpoint goes.
    again = EpisodeStorage.load_memmap(tmp_path)
    stored = make.steps(again[:])
    rb.dumps(tmp_path)
    assert not some.exists()
    assert make.steps(again[:]) == stored


def storage_files(path):
    """How many files of rows a checkpoint has that are not empty."""
    return sum(each.stat().st_size > 0 for each in path.rglob("*.rows"))


# ---- other configurations -----------------------------------------------------------------------


def test_a_checkpoint_loads_under_another_sampler(make, said, tmp_path):
    samplers = [
        lambda: ClipSampler(slice_len=2),
        lambda: PrioritizedClipSampler(slice_len=2),
        lambda: EpisodeSampler(replacement=False),
        RandomSampler,
        SamplerWithoutReplacement,
    ][:: in_fast_tier(2, 1)]
    data = make.vectors([3, 4, 2, 5])
    for i, first in enumerate(samplers):
        rb = buffer(first())
        rb.extend(data)
        rb.sample()
        rb.dumps(tmp_path / str(i))
        for j, second in enumerate(samplers):
            for how in ("loads", "load_state_dict"):
                other = buffer(second())
                other.extend(make.vectors([2, 6], seed=1))
                other.sample()
                before = len(said())
                getattr(other, how)(tmp_path / str(i) if how == "loads" else rb.state_dict())
                messages = said()[before:]
                assert len(messages) == (i != j)
                if i != j:
                    assert f"of a {type(rb.sampler).__name__}" in messages[0]
                    assert not other._prefetch_queue
                assert make.steps(other[:]) == make.steps(rb[:])
                for _ in range(9):
                    assert set(other.sample()["episode"].tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: PrioritizedClipSampler(slice_len=2),
        lambda: PrioritizedClipSampler(slice_len=2, max_capacity=30),
        lambda: EpisodeSampler(replacement=False),
        SamplerWithoutReplacement,
    ],
)
def test_a_checkpoint_loads_into_a_smaller_budget(make, said, sampler, tmp_path):
    rb = buffer(sampler())
    rb.extend(make.vectors([3, 4, 2, 5]))
    if isinstance(rb.sampler, PrioritizedClipSampler):
        rb.update_priority(torch.tensor([0, 9]), torch.tensor([50.0, 7.0]))
    rb.sample()
    rb.dumps(tmp_path)
    small = sampler()
    if getattr(small, "max_size", None) == 30:
        small = PrioritizedClipSampler(slice_len=2, max_capacity=8)
    other = buffer(small, max_steps=8)
    other.loads(tmp_path)
    assert other.storage.lengths.tolist() == [2, 5]
    assert make.steps(other[:]) == make.steps(rb[7:])
    assert "the newest 2 of 4 saved episodes are loaded" in said()[0]
    assert len(said()) == 1 + isinstance(small, SamplerWithoutReplacement)
    if other._prefetch_queue:
        other.sample()  # What was drawn before is given out.
    for _ in range(9):
        assert set(other.sample()["episode"].tolist()) <= {2, 3}
    if isinstance(small, PrioritizedClipSampler):
        assert small.state_dict()["priorities"]["stored"][1][2] == 7


def test_what_is_no_checkpoint_is_named(make, tmp_path):
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=2, prefetch=1)
    theirs.extend(make.vectors([3]))
    theirs.dumps(tmp_path / "theirs")
    rb = buffer(RandomSampler())
    with pytest.raises(ValueError, match=r"EpisodeStorage: .*theirs/storage holds action\.memmap"):
        rb.loads(tmp_path / "theirs")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.pt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"replay buffer: .*other holds model\.pt"):
        rb.loads(tmp_path / "other")
    for load in (rb.storage.loads, EpisodeStorage.load_memmap):
        with pytest.raises(ValueError, match=r"EpisodeStorage: .*other holds model\.pt"):
            load(tmp_path / "other")
    rb.extend(make.vectors([3]))
    rb.dumps(tmp_path / "buffer")
    alone = EpisodeStorage(30)
    alone.loads(tmp_path / "buffer")  # A storage is found in a buffer's checkpoint.
    assert make.steps(alone[:]) == make.steps(rb[:])
    rb.storage.dumps(tmp_path / "storage")
    with pytest.raises(FileNotFoundError, match=r"replay buffer: .*storage holds checkpoint-"):
        rb.loads(tmp_path / "storage")
    assert len(rb) == 3


def test_what_was_on_a_gpu_loads_without_one(make, said, tmp_path, monkeypatch):
    rb = buffer()
    rb.extend(make.turns([3, 4])[:-1])
    rb.storage._store.columns["text",].data[1] = TensorDict({"a": torch.arange(3)})
    rb.sample()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        rb.dumps(tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    other = buffer()
    other.loads(tmp_path, trust=True)
    assert other.storage._store.columns["text",].data[1]["a"].tolist() == [0, 1, 2]
    assert make.steps(other[:].exclude("text")) == make.steps(rb[:].exclude("text"))
    assert other.writer.open_lengths == rb.writer.open_lengths
    (message,) = said()
    assert "prefetched batches are left out" in message


# ---- memory and disk ----------------------------------------------------------------------------

PROGRAM = """
import sys, threading, torch
from tensordict import TensorDict
from torchrl_mt.data import EpisodeStorage

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

def peak(work):
    seen, stop = [anonymous()], threading.Event()
    def watch():
        while not stop.wait(0.002):
            seen.append(anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    stop.set()
    thread.join()
    return max(seen) - seen[0]

scratch, saved = sys.argv[1:]
storage = EpisodeStorage(100_000, scratch_dir=scratch)
seen = torch.randn(1001, 250)
for _ in range(100):
    storage.append(TensorDict({
        "observation": seen[:-1], "action": torch.randn(1000, 30), "next": {"observation": seen[1:]}
    }, [1000]))
storage.dumps(saved)
same = EpisodeStorage(100_000, scratch_dir=scratch)
print(peak(lambda: storage.dumps(saved)), peak(lambda: same.loads(saved)), storage.nbytes)
print(peak(lambda: EpisodeStorage.load_memmap(saved)[-1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for memory")
def test_saving_and_loading_take_little_memory_and_disk(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "scratch"), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    saving, loading, stored, mapping = map(int, run.stdout.split())
    assert stored > 100 << 20
    assert max(saving, loading) < 32 << 20
    assert mapping < 4 << 20
    on_disk = sum(each.stat().st_size for each in (tmp_path / "saved").rglob("*"))
    assert on_disk < 1.05 * stored
