"""What every storage of episodes promises, whatever its options, alone or in a buffer.

Of the promises that TorchRL's storages make too, theirs are tested beside it.
"""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.llm import History

from tests.data.conversations import play, turns_of
from tests.data.handles import HANDLES
from tests.data.makers import ends
from tests.data.saving import HOW, saved
from tests.tiers import examples, some_fast
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

# ---- episodes of every kind ---------------------------------------------------------------------

DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.complex128, torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def conversations(lengths, seed=0, first_id=0):
    """Turns whose prompt extends the prompt and the response of the turn before."""
    generator, steps = torch.Generator().manual_seed(seed), []

    def tokens(n):
        return torch.randint(1000, (n,), generator=generator).tolist()

    for i, length in enumerate(lengths, first_id):
        talk = [(tokens(1 + i % 3), tokens(t % 4), "extend", 0) for t in range(length)]
        steps.extend(turns_of(*play(talk), episode=lambda _, i=i: torch.tensor(i)))
    return lazy_stack(steps)


def things(lengths, seed=0, first_id=0, most=1):
    """Steps with Python objects: text, nested lists and dicts, None, and up to ``most`` messages."""
    steps = []
    for i, length in enumerate(lengths, first_id):
        for t in range(length):
            name = f"{seed}.{i}.{t}"
            n = 1 + t % most
            calls = [[{"name": name, "arguments": {"a": t}}]] * n if t % 2 else None
            message = History(["user"] * n, [name] * n, tool_calls=calls, batch_size=[n])
            entries = {"text": name, "plan": [["a", [t]], [], {"k": (t, None)}], "message": message}
            entries |= {"both": lazy_stack([message, message[:1]])}
            done = torch.tensor([t + 1 == length])
            entries |= {"none": None, "episode": torch.tensor(i), "next": {"done": done}}
            steps.append(TensorDict(entries))
    return lazy_stack(steps)


def dtypes(lengths, seed=0, first_id=0):
    """Bits of every dtype, NaN and negative zeros, and tensors without elements."""
    data = TensorDict(batch_size=[sum(lengths)])
    bits = torch.randint(256, (len(data), 48), generator=torch.Generator().manual_seed(seed))
    for dtype in DTYPES:
        values = bits % 2 if dtype == torch.bool else bits
        data[str(dtype)] = values.to(torch.uint8).view(dtype)
    data["nan"] = torch.tensor([float("nan"), -0.0, 0.0, float("inf")])[bits[:, 0] % 4]
    data["empty"] = torch.zeros(len(data), 0)
    data["episode"] = first_id + torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    data["next"] = {"nan": data["nan"].roll(-1), "done": ends(*lengths)}
    return data


KINDS = ["vectors", "turns", "conversations", "things", "dtypes"]
OTHERS = {"conversations": conversations, "things": things, "dtypes": dtypes}


@pytest.fixture
def episodes(make, kind):
    """Makes episodes of one kind."""
    return maker(make, kind)


def maker(make, kind):
    return OTHERS.get(kind) or getattr(make, kind)


# ---- storages of every configuration ------------------------------------------------------------


class Kit:
    """Makes storages with these options: alone, or in buffers of a class."""

    def __init__(self, cls=None, **options):
        self.cls, self.options = cls, options

    def new(self, max_steps=20):
        if self.cls is None:
            return EpisodeStorage(max_steps, **self.options)
        return self.buffer(ClipSampler(slice_len=2), max_steps)

    def buffer(self, sampler, max_steps=20):
        return (self.cls or ReplayBuffer)(
            storage=EpisodeStorage(max_steps, **self.options),
            writer=EpisodeWriter(),
            sampler=sampler,
            generator=torch.Generator().manual_seed(0),
            batch_size=4,
        )


KITS = {
    "memory": Kit(),
    "scratch_dir": Kit(scratch_dir="a folder"),
    "max_tokens": Kit(max_tokens=10**6),
    "max_episodes": Kit(max_episodes=10**6),
    "share_next=False": Kit(share_next=False),
    "ReplayBuffer": Kit(ReplayBuffer),
    "TensorDictReplayBuffer": Kit(TensorDictReplayBuffer),
}
SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "clips by priority": lambda: PrioritizedClipSampler(slice_len=2),
    "episodes": lambda: EpisodeSampler(),
    "each episode": lambda: EpisodeSampler(replacement=False),
    "steps": lambda: RandomSampler(),
}


@pytest.fixture(scope="module", params=KITS)
def kit(request, tmp_path_factory):
    made = KITS[request.param]
    if "scratch_dir" in made.options:
        made = Kit(scratch_dir=tmp_path_factory.mktemp("scratch"))
    return made


def across(*names):
    """A test of all kits and all of these; of the fast tier once for each kit."""
    fives = {"kind": KINDS, "how": [*HOW, "load_memmap"], "sampler": list(SAMPLERS)}
    others = [fives[name] for name in names]
    fast = {
        (one, *(other[(i + j * (i + 4 + i // 5)) % 5] for j, other in enumerate(others)))
        for i, one in enumerate(KITS)
    }
    table = product(KITS, *others)
    table = [each for each in table if each[1:] != ("pickle", "dtypes")]  # torch pickles no float8
    return pytest.mark.parametrize(("kit", *names), some_fast(fast, table), indirect=["kit"])


each_kind = across("kind")
each_storage = pytest.mark.parametrize("cls", [EpisodeStorage, LazyTensorStorage, ListStorage])


def on(cls):
    """A buffer on TorchRL's storage of this class, or on ours."""
    if cls is EpisodeStorage:
        return KITS["ReplayBuffer"].new()
    return ReplayBuffer(storage=cls(20), batch_size=4)


def storage_of(held):
    return held if isinstance(held, EpisodeStorage) else held.storage


def write(make, held, data):
    """Write whole episodes; return the handles of those steps that are stored."""
    if isinstance(held, EpisodeStorage):
        episodes = make.split(data)
        return torch.cat([held.append(each, {"steps": [len(each)]}) for each in episodes])
    index = held.extend(data.copy())  # A TensorDictReplayBuffer adds an entry.
    return index[index >= 0]


def empty(held):
    held._empty() if isinstance(held, EpisodeStorage) else held.empty()


def everything(make, held):
    """All that a storage tells of what it holds."""
    storage = storage_of(held)
    return {
        "steps": [make.steps(episode) for episode in storage.episodes()],
        "lengths": storage.lengths.tolist(),
        "schema": storage.schema,
        "tokens": storage.num_tokens,
        "metadata": [storage.metadata(i) for i in range(storage.num_episodes)],
    }


def ruin(data):
    for step in data.unbind(0):
        for value in step.values(True, True):
            if isinstance(value, torch.Tensor):
                value.zero_()


# ---- what is read -------------------------------------------------------------------------------


@each_storage
@pytest.mark.parametrize("kind", ["vectors", "turns"])
def test_ours_and_torchrls_are_read_alike(make, cls, kind):
    if (cls, kind) == (LazyTensorStorage, "turns"):
        pytest.skip("LazyTensorStorage has one shape for all")
    held = on(cls)
    data = maker(make, kind)([3, 1, 4])
    held.extend(data.clone())
    assert len(held) == len(list(held.storage)) == 8
    stored = make.steps(data)
    assert make.steps(held[:]) == stored
    assert make.steps(held[2:7:2]) == stored[2:7:2]
    assert make.steps(held[torch.tensor([4, 0, 4])]) == [stored[4], stored[0], stored[4]]
    assert make.steps(held[[1, -1]]) == [stored[1], stored[-1]]
    assert make.steps(held[-1].unsqueeze(0)) == stored[-1:]
    assert 7 in held.storage
    assert 8 not in held.storage
    for beyond in (8, 20):
        with pytest.raises(IndexError):
            held[beyond]
    sample = held.sample()
    held.extend(sample.clone())
    assert make.unmarked(make.steps(held[8:])) == make.unmarked(make.steps(sample))
    held.empty()
    assert len(held) == 0
    held.extend(data.clone())
    assert make.steps(held[:]) == stored


@each_kind
def test_every_index_form_reads_the_same_steps(make, kit, episodes):
    held = kit.new()
    storage = storage_of(held)
    data = episodes([5, 4])
    write(make, held, data)
    stored = make.steps(data)
    for form in (slice(2, 7, 2), slice(None, None, -1), slice(-1, 3, -2), slice(-3, None)):
        assert make.steps(held[form]) == stored[form]
    assert make.steps(held[torch.tensor([4, 0, 4])]) == [stored[4], stored[0], stored[4]]
    assert make.steps(held[torch.arange(9) > 6]) == stored[7:]
    assert make.steps(storage[[1, -1]]) == [stored[1], stored[-1]]
    assert make.steps(storage[range(3)]) == stored[:3]
    assert make.steps(storage[torch.tensor([1, 3]).numpy()]) == [stored[1], stored[3]]
    assert make.steps(storage[(torch.tensor([4]),)]) == [stored[4]]
    square = storage[torch.tensor([[1, 2], [3, 4]])]
    assert square.batch_size == (2, 2)
    assert make.steps(square.reshape(-1)) == stored[1:5]
    assert [make.steps(step.unsqueeze(0))[0] for step in storage] == stored
    assert make.steps(storage[3].unsqueeze(0)) == stored[3:4]
    keys = set(held[:].keys(True, True))
    for nothing in ([], slice(5, 2), slice(2, 5, -1), slice(9, None), torch.arange(9) < 0):
        assert storage[nothing].batch_size == (0,)
        assert set(storage[nothing].keys(True, True)) == keys
    assert 8 in storage
    assert 9 not in storage
    for bad in (9, -10, [0, 9]):
        with pytest.raises(IndexError, match="9 steps are stored"):
            storage[bad]
    with pytest.raises(TypeError, match="integer dtype"):
        storage[torch.tensor([0.5])]
    with pytest.raises(IndexError, match="mask must have shape"):
        storage[torch.tensor([True])]


@each_kind
def test_what_was_written_and_what_is_read_are_copies(make, kit, episodes):
    held, data = kit.new(), episodes([3, 4])
    stored = make.steps(data)
    write(make, held, data)
    storage = storage_of(held)
    for mine in (data, held[:], held[torch.arange(7)], storage.episode(0)):
        ruin(mine)
        assert make.steps(held[:]) == stored
    storage.lengths.zero_()
    assert storage.lengths.tolist() == [3, 4]
    assert make.steps(storage.episode(1)) == stored[3:]


# ---- what is stored -----------------------------------------------------------------------------


@examples(15)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=15),
    budget=st.integers(12, 30),
)
def test_it_is_a_queue_of_whole_episodes(make, kit, kind, lengths, budget):
    held, model = kit.new(budget), []
    storage = storage_of(held)
    for k, length in enumerate(lengths):
        data = maker(make, kind)([length], seed=k, first_id=k)
        index = write(make, held, data)
        model.append(make.steps(data))
        while sum(map(len, model)) > budget:
            model.pop(0)
        steps = sum(map(len, model))
        assert len(held) == len(storage) == steps
        assert storage.num_episodes == len(model)
        assert storage.lengths.tolist() == [len(episode) for episode in model]
        assert index.tolist() == [HANDLES + storage.table.end - length + t for t in range(length)]
        assert storage.places(index).tolist() == list(range(steps - length, steps))
        for span in (1, 4):
            assert storage.num_clips(span) == sum(max(0, len(e) - span + 1) for e in model)
    assert [make.steps(episode) for episode in storage.episodes()] == model
    assert make.steps(storage.episode(-1)) == model[-1]
    stored = [step for episode in model for step in episode]
    assert make.steps(held[:]) == stored
    picks = torch.randint(-steps, steps, (7,), generator=torch.Generator().manual_seed(steps))
    assert make.steps(held[picks]) == [stored[i] for i in picks.tolist()]


@each_kind
def test_many_episodes_at_once_are_stored_as_one_by_one(make, kit, episodes):
    together, one_by_one, data = kit.new(6), kit.new(6), episodes([3, 4, 2, 1, 3])
    if kit.cls is None:
        ReplayBuffer(storage=together, writer=EpisodeWriter()).extend(data.copy())
    else:
        write(make, together, data)
    for episode in make.split(data):
        write(make, one_by_one, episode)
    without = {"metadata": None}
    assert everything(make, together) | without == everything(make, one_by_one) | without
    assert storage_of(together).lengths.tolist() == [2, 1, 3]
    table = storage_of(together).table
    assert (table.oldest, table.first, table.end) == (2, 7, 13)


def breakages(episode):
    n = len(episode)
    shape, dtype, kind, longer = (episode.clone() for _ in range(4))
    shape["next", "reward"] = torch.zeros(n, 2)
    dtype["next", "reward"] = dtype["next", "reward"].double()
    kind["next", "reward"] = ["a"] * n
    longer["zzz"] = torch.zeros(n)
    as_before = (
        r"\('next', 'reward'\) must be as in the first episode: expected \(1,\) torch.float32"
    )
    return {
        "must have the keys of the first one: 'zzz' is not among them": longer,
        "must have the keys of the first one: 'action' is missing": episode.exclude("action"),
        rf"{as_before} per step, got \(2,\) torch.float32": shape,
        rf"{as_before} per step, got \(1,\) torch.float64": dtype,
        rf"{as_before} .*got a Python object": kind,
    }


def test_a_refused_write_changes_nothing(make, kit):
    held = kit.new(8)
    index = write(make, held, make.vectors([5, 3]))
    storage, before = storage_of(held), everything(make, held)
    revision = storage.revision
    refused = breakages(make.vectors([4], first_id=2))
    refused["an episode of 9 steps does not fit in max_steps=8"] = make.vectors([9], first_id=2)
    for message, bad in refused.items():
        with pytest.raises(ValueError, match=message):
            write(make, held, bad)
        # Made by a transform, it is refused with all that was written together.
        writer = EpisodeWriter(transform=lambda e, bad=bad: bad if e["episode"][0] else e)
        rb = ReplayBuffer(storage=storage, writer=writer)
        with pytest.raises(ValueError, match=r"zzz|action|reward|9 steps"):
            rb.extend(make.vectors([2, 4]))
        assert rb.writer.open_episodes == {}
        assert everything(make, held) == before
    assert storage.revision == revision
    assert make.steps(held[index]) == [step for episode in before["steps"] for step in episode]


@each_kind
def test_emptying_keeps_the_schema(make, kit, episodes):
    held = kit.new()
    index = write(make, held, episodes([3, 4]))
    storage = storage_of(held)
    schema, size = storage.schema, storage.nbytes
    empty(held)
    assert (len(held), storage.num_episodes, storage.nbytes) == (0, 0, size)
    assert storage.schema == schema
    assert held[:].batch_size == (0,)
    with pytest.raises(IndexError, match="not stored"):
        storage.get(index)
    with pytest.raises(ValueError, match="keys of the first one"):
        write(make, held, make.whole({"other": torch.zeros(2)}, 2))
    data = episodes([2, 5], seed=3)
    write(make, held, data)
    assert make.steps(held[:]) == make.steps(data)


# ---- saving -------------------------------------------------------------------------------------


@across("how", "kind")
def test_what_is_loaded_is_what_was_saved(make, kit, how, kind, tmp_path):
    episodes, held, other = maker(make, kind), kit.new(), kit.new()
    write(make, held, episodes([6, 3, 5, 4, 7]))
    write(make, other, episodes([7, 2], seed=1, first_id=50))
    trust = kind == "things"  # TorchRL's History is an object of a class
    if how == "load_memmap":
        held.dumps(tmp_path)
        same = EpisodeStorage.load_memmap(tmp_path, trust=trust)
        if kit.cls is not None:  # What a writer stores has no metadata.
            same = ReplayBuffer(storage=same, writer=EpisodeWriter())
    else:
        same = saved(held, how, tmp_path, other, trust=trust)
    before = everything(make, held)
    assert everything(make, same) == before
    more = episodes([2, 9], seed=2, first_id=60)
    write(make, same, more)
    assert everything(make, held) == before
    write(make, held, more)
    assert everything(make, same) == everything(make, held) != before


@pytest.mark.parametrize("how", HOW)
def test_histories_of_any_length_are_loaded(make, how, tmp_path):
    held, data = KITS["ReplayBuffer"].new(), things([4, 1, 3], most=3)
    held.extend(data)
    same = saved(held, how, tmp_path, KITS["ReplayBuffer"].new(), trust=True)
    for each in (held, same):
        assert make.steps(each[:]) == make.steps(data)
        assert isinstance(each[2]["message"], History)


def test_a_refused_load_changes_nothing(make, kit):
    held, small = kit.new(), kit.new(5)
    index = write(make, held, make.vectors([6]))
    write(make, small, make.vectors([2], seed=1))
    before, small_before = everything(make, held), everything(make, small)
    with pytest.raises(ValueError, match=r"newest .* 6 steps, more than max_steps=5"):
        small.load_state_dict(held.state_dict())
    assert everything(make, small) == small_before
    for spoil in (
        lambda state: state.pop("oldest"),
        lambda state: state["columns"].pop(("action",)),
        lambda state: state["columns"].update({("action",): {"values": torch.zeros(3)}}),
    ):
        state = held.state_dict()
        spoil(state.get("_storage", state))
        with pytest.raises((KeyError, ValueError)):
            held.load_state_dict(state)
        assert everything(make, held) == before
        assert make.steps(held[index]) == before["steps"][0]
    assert write(make, held, make.vectors([2], first_id=1)).tolist() == [HANDLES + 6, HANDLES + 7]


# ---- sampling -----------------------------------------------------------------------------------


@across("sampler", "kind")
def test_samples_are_stored_steps(make, kit, sampler, kind):
    rb, episodes = kit.buffer(SAMPLERS[sampler](), 12), maker(make, kind)
    nothing = "nothing is stored yet" if sampler != "steps" else "empty storage"
    for k in range(2):
        assert not rb.can_sample()
        with pytest.raises(RuntimeError, match=nothing):
            rb.sample()
        write(make, rb, episodes([3, 6, 2, 3], seed=k))  # the first leaves
        stored = make.unmarked(make.steps(rb[:]))
        runs = [set(range(6)), {6, 7}, {8, 9, 10}]
        for _ in range(5):
            sample, info = rb.sample(return_info=True)
            places = rb.storage.places(info["index"]).tolist()
            assert make.unmarked(make.steps(sample)) == [stored[i] for i in places]
            assert make.unmarked(make.steps(rb[info["index"]])) == [stored[i] for i in places]
            ends = [i for i, end in enumerate(sample["next", "done"].flatten().tolist()) if end]
            if sampler.startswith("clips"):
                assert ends == [1, 3]
                assert all(b == a + 1 for a, b in zip(places[::2], places[1::2], strict=True))
            elif sampler != "steps":
                parts = [places[a + 1 : b + 1] for a, b in zip([-1, *ends], ends, strict=False)]
                assert all(set(part) in runs and sorted(part) == part for part in parts)
        rb.empty()


@each_kind
def test_a_sample_can_be_written_back(make, kit, episodes):
    for sampler in SAMPLERS.keys() - {"steps"}:  # single steps are no episodes
        rb = kit.buffer(SAMPLERS[sampler](), 50)
        write(make, rb, episodes([3, 6, 2]))
        before, sample = make.steps(rb[:]), rb.sample()
        expected = make.unmarked(make.steps(sample))
        rb.extend(sample)
        assert make.steps(rb[:11]) == before
        assert make.unmarked(make.steps(rb[11:])) == expected
