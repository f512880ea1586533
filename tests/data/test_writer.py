import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.collectors.utils import split_trajectories
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.data.handles import HANDLES
from tests.data.makers import ends
from tests.refusals import check_refused, refused
from tests.tiers import examples
from torchrl_mt.data import EpisodeStorage, EpisodeWriter

episode_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def buffer(cls=ReplayBuffer, max_steps=1000, **kwargs):
    return cls(storage=EpisodeStorage(max_steps), writer=EpisodeWriter(**kwargs))


def ages(rb, index):
    """The place by age of each step that handles were given for; -1 where none was."""
    known = index[index != -1]
    assert (known >= HANDLES).all()
    out = index.clone()
    out[index != -1] = rb.storage.places(known)
    return out.tolist()


@examples(20)
@given(data=st.data(), with_ids=st.booleans(), turns=st.booleans())
def test_rows_of_batches_are_environments(make, data, with_ids, turns):
    rows, maker, key = [], make.turns if turns else make.vectors, 0
    environments, total = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    for b in range(environments):
        lengths = []
        while sum(lengths) < total:
            lengths.append(data.draw(st.integers(1, 5)))
        row = maker(lengths, seed=b, first_id=key)
        key += len(lengths)
        if not with_ids:
            row = lazy_stack([s.exclude("episode", "collector") for s in row.unbind(0)])
        rows.append(row)
    rb, expected, t = buffer(), [], 0
    while t < total:
        n = data.draw(st.integers(1, total - t))
        batch = [row[t : t + n] for row in rows]
        rb.extend(lazy_stack(batch) if turns or not with_ids else torch.stack(batch))
        for row in rows:
            begins = 0
            for episode in make.split(row):
                begins += len(episode)
                if t < begins <= t + n:
                    expected.append(episode)
        t += n
    assert [make.steps(e) for e in rb.storage.episodes()] == [make.steps(e) for e in expected]


def test_steps_can_be_added_one_by_one(make):
    for maker in (make.vectors, make.turns):
        for cls in (ReplayBuffer, TensorDictReplayBuffer):
            rb, data = buffer(cls), maker([3, 2])
            index = [rb.add(step.clone()) for step in data.unbind(0)]
            assert index == [None, None, HANDLES + 2, None, HANDLES + 4]
            assert make.steps(rb[:]) == make.steps(data)


def test_flush_stores_open_episodes_as_truncated(make):
    rb = buffer()
    data = make.vectors([4, 4])
    rb.extend(torch.cat([data[:3], data[4:6]]))
    assert sorted(rb.writer.open_episodes) == [0, 1]
    assert make.steps(rb.writer.open_episodes[1]) == make.steps(data[4:6])
    assert ages(rb, rb.writer.flush()) == list(range(5))
    assert rb.writer.open_episodes == {}
    assert rb.storage.lengths.tolist() == [3, 2]
    for episode in rb.storage.episodes():
        for flag in ("done", "truncated"):
            assert episode["next", flag].squeeze(-1).nonzero().tolist() == [[len(episode) - 1]]
        assert not episode["next", "terminated"].any()
    assert not data["next", "done"][2]


@pytest.mark.parametrize("turns", [True, False])
def test_open_episodes_do_not_change_with_what_was_given_or_read(make, turns):
    rb, data = buffer(), (make.turns if turns else make.vectors)([4])
    first = data[:2].clone()
    rb.extend(first)
    first.zero_()
    if not turns:
        rb.writer.open_episodes[0].zero_()
    rb.extend(data[2:])
    assert make.steps(rb[:]) == make.steps(data)


@pytest.mark.parametrize("many", [True, False])
def test_a_transform_may_change_what_it_is_given(make, many):
    class Double:
        takes_many_episodes = many

        def __call__(self, data):
            data["next", "reward"].mul_(2)
            return data

    rb, data = buffer(max_steps=5, transform=Double()), make.vectors([4, 12])
    before = make.steps(data)
    rb.extend(data[:4])
    assert make.steps(data) == before
    assert torch.equal(rb[:]["next", "reward"], 2 * data[:4]["next", "reward"])
    rb.extend(data[4:9])
    rb.extend(data[9:14].clone())
    with pytest.raises(ValueError, match="10 steps does not fit"):
        rb.writer.flush()
    assert make.steps(rb.writer.open_episodes[1]) == before[4:14]


@pytest.mark.parametrize("transform", [None, lambda episode: episode])
@pytest.mark.parametrize("stored", [True, False])
def test_steps_unlike_the_first_of_their_episode_are_refused(make, transform, stored):
    def turned_lazy(data):
        return lazy_stack([step.clone() for step in data.unbind(0)])

    def spoilt(key, *shape):
        return lambda d: d.set(key, torch.zeros(len(d), *shape))

    data = make.vectors([4, 2])
    spoils = {
        r"keys of the first one: 'zzz'": spoilt("zzz"),
        r"'action' is missing": lambda d: d.exclude("action"),
        r"\('next', 'reward'\).*\(1,\).*\(2,\)": spoilt(("next", "reward"), 2),
        r"'action'.*int32.*float32": spoilt("action"),
        r"'action'.*Python object": lambda d: turned_lazy(d.set("action", ["a"] * len(d))),
    }
    for message, spoil in spoils.items():
        rb = buffer(transform=transform)
        if stored:
            rb.extend(data[4:])
        rb.extend(data[:1])
        with pytest.raises(ValueError, match=message):
            rb.extend(spoil(data[1:3].clone()))
        assert make.steps(rb.writer.open_episodes[0]) == make.steps(data[:1])
        rb.extend(turned_lazy(data[1:3]))
        rb.extend(data[3:4])
        assert make.steps(rb.storage.episode(-1)) == make.steps(data[:4])
        if stored and transform is None:
            with pytest.raises(ValueError, match=message):
                rb.extend(spoil(data[1:3].clone()))
            assert rb.writer.open_episodes == {}


def test_memory_is_in_proportion_to_the_open_steps(make):
    """Not to the slots times the longest, and not to what came before."""
    rb = buffer(max_steps=10_000)
    long, short = make.vectors([3_000]), make.vectors([1] * 200, first_id=1)
    row_bytes = sum(v.element_size() * v[0].numel() for v in long.values(True, True))
    for flag in ("done", "terminated", "truncated"):
        short["next", flag].zero_()
    for piece in (*long[:-1].split(100), *short.split(50)):
        rb.extend(piece)
        held = rb.writer._open
        columns = sum(c.held.numel() * c.held.element_size() for c in held.columns.values())
        tables = held.owner.nbytes + 5 * held.ids.nbytes
        assert columns + tables <= 4 * (row_bytes + 4) * (held.num_steps + 100) + 20_000
    rb.extend(long[-1:])
    assert rb.writer.stats()["open_steps"] == 200
    assert len(rb.writer._open.owner) <= 8 * 200
    assert make.steps(rb[:]) == make.steps(long)


def test_indices_are_given_only_where_a_transform_keeps_the_length(make):
    for part in (slice(1, None), slice(None, -1)):

        def cut(episode, part=part):
            return episode[part] if len(episode) == 4 else episode

        rb, data = buffer(TensorDictReplayBuffer, transform=cut), make.vectors([2, 4, 3])
        rb.extend(data[:3])
        assert ages(rb, rb.extend(data[3:])) == [-1, -1, -1, 5, 6, 7]
        assert make.steps(rb[5:].exclude("index")) == make.steps(data[6:])


class Cut:
    """Keeps the last ``keep`` steps of every episode; takes one episode or many."""

    def __init__(self, takes_many_episodes, keep=2):
        self.takes_many_episodes, self.keep, self.calls = takes_many_episodes, keep, 0

    def __call__(self, data):
        self.calls += 1
        stops = (data["next", "done"].squeeze(-1).nonzero().squeeze(-1) + 1).tolist()
        starts = [max(b, e - self.keep) for b, e in zip([0, *stops], stops, strict=False)]
        return torch.cat([data[b:e] for b, e in zip(starts, stops, strict=True)])


@examples(12)
@given(data=st.data(), lengths=episode_lengths, turns=st.booleans())
def test_a_transform_of_many_episodes_stores_what_one_by_one_would(make, data, lengths, turns):
    together, alone = buffer(transform=Cut(True)), buffer(transform=Cut(False))
    steps = (make.turns if turns else make.vectors)(lengths)
    while len(steps):
        n = data.draw(st.integers(1, len(steps)))
        piece, steps = steps[:n], steps[n:]
        assert together.extend(piece.clone()).tolist() == alone.extend(piece.clone()).tolist()
    assert make.steps(together[:]) == make.steps(alone[:])
    assert together.storage.lengths.tolist() == [min(n, 2) for n in lengths]
    assert alone.writer.transform.calls == len(lengths)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_padding_of_split_trajectories_is_left_out(make, cls):
    rb = buffer(cls)
    data = make.vectors([5, 2, 4])
    data["collector"] = TensorDict({"traj_ids": data["episode"]}, [11])
    for piece in (data[:4], data[4:9], data[9:]):
        split = split_trajectories(piece.clone(), prefix="collector")
        assert split.ndim == 2
        split["next", "done"] |= ~split["collector", "mask"][..., None]
        rb.extend(split)
    assert rb.writer.open_episodes == {}
    split["collector", "mask"].zero_()
    rb.extend(split)
    assert rb.write_count == 11
    kept = rb[:]
    assert kept["collector", "mask"].all()
    del kept["collector", "mask"]
    assert make.steps(kept) == make.steps(data)


@pytest.mark.parametrize("flag", ["done", "terminated", "truncated"])
def test_an_id_that_comes_back_after_an_end_starts_another_episode(make, flag):
    rb, end = buffer(traj_key=("my", "id")), torch.tensor([0, 0, 1, 0, 1])[:, None] > 0
    data = TensorDict({"my": {"id": torch.zeros(5, 1).int()}, "next": {flag: end}}, [5])
    data["episode"] = torch.arange(5)
    rb.extend(data[:4])
    assert rb.storage.lengths.tolist() == [3]
    assert rb.writer.open_lengths == {0: 1}
    rb.extend(data[4:])
    assert rb.storage.lengths.tolist() == [3, 2]


def rows(*done):
    """One row of steps per environment; nothing but the done flags tells episodes apart."""
    done = torch.tensor(done, dtype=torch.bool)[..., None]
    x = torch.arange(done.numel()).view(done.shape[:2])
    return TensorDict({"x": x, "next": {"done": done}}, done.shape[:2])


def test_an_open_episode_longer_than_the_storage_is_stored_in_parts(caplog):
    rb = buffer(max_steps=5)
    rb.extend(rows([0, 0, 0, 0], [0, 1, 0, 1]))
    for _ in range(2):
        rb.extend(rows([0, 0, 0], [0, 0, 1]))
        # The others' steps are taken.
        assert rb.storage.lengths.tolist()[-1] == 3
    assert rb.writer.open_lengths == {0: 3}
    assert rb.writer.stats()["truncated"] == 2
    (said,) = [r.getMessage() for r in caplog.records if "reset_at_each_iter" in r.getMessage()]
    assert "max_open_steps=5" in said
    assert "episode 0 was ended as truncated" in said
    with pytest.raises(KeyError, match=r"no episode 7 is open; the open ones are \[0\]"):
        rb.writer.discard(7)
    rb.writer.discard(0)
    rb.extend(rows([0, 0], [0, 1]))
    assert ages(rb, rb.writer.flush()) == [2, 3]
    assert rb.writer.open_episodes == {}
    with pytest.raises(ValueError, match=r"episode 1 .* 6 steps does not fit in max_steps=5"):
        rb.extend(rows([1] * 6, [0] * 6))


@pytest.mark.parametrize("many", [True, False])
def test_a_flush_that_is_refused_names_the_episode_and_it_can_be_discarded(many):
    class Twice:
        takes_many_episodes = many

        def __call__(self, data):
            stops = (data["next", "done"].nonzero().squeeze(1) + 1).tolist()
            parts = [data[b:e] for b, e in zip([0, *stops], stops, strict=False)]
            for part in parts:
                part["next", "done"][-1] = len(part) < 4
            longer = [torch.cat([p, p.clone()]) if len(p) > 3 else p for p in parts]
            for part in longer:
                part["next", "done"][-1] = True
            return torch.cat(longer)

    rb, ids = buffer(max_steps=5, transform=Twice(), max_open_steps=10), [1] * 2 + [2] * 4 + [3] * 2
    rb.extend(
        TensorDict({"episode": torch.tensor(ids), "next": {"done": torch.zeros(8).bool()}}, [8])
    )
    with pytest.raises(ValueError, match=r"episode 2 .*8 steps .*max_steps=5.*discard\(2\)"):
        rb.writer.flush()
    assert len(rb) == 0
    assert list(rb.writer.open_episodes) == [1, 2, 3]
    rb.writer.discard(2)
    rb.writer.flush()
    assert rb[:]["episode"].tolist() == [1, 1, 3, 3]


def test_a_transform_may_yet_make_a_long_open_episode_short():
    rb = buffer(max_steps=3, transform=lambda episode: episode[-1:])
    rb.extend(rows([0] * 9))
    rb.extend(rows([0, 1]))
    assert rb.storage.lengths.tolist() == [1]


def test_emptying_waits_for_the_batch_that_is_being_written():
    begun, emptied = threading.Event(), threading.Event()

    def slow(episode):
        begun.set()
        emptied.wait(0.3)
        return episode

    rb = buffer(transform=slow)
    rb.extend(rows([0, 0, 0], [0, 0, 0]))
    writing = threading.Thread(target=lambda: rb.extend(rows([0, 0], [0, 1])))
    writing.start()
    begun.wait()
    rb.empty()
    emptied.set()
    writing.join()
    assert len(rb) == 0
    assert rb.writer.open_episodes == {}


def test_a_writer_without_a_storage_yet_has_a_state():
    writer = EpisodeWriter()
    writer.load_state_dict(writer.state_dict())
    writer._empty()
    assert writer.open_episodes == {}


def test_the_form_of_the_indices_is_that_of_the_buffer_that_writes():
    storage = EpisodeStorage(100)
    plain = ReplayBuffer(storage=storage, writer=EpisodeWriter())
    marked = TensorDictReplayBuffer(storage=storage, writer=EpisodeWriter())
    assert ages(plain, plain.extend(rows([0, 1, 0]))) == [0, 1]
    assert ages(marked, marked.extend(rows([0, 1, 0]))) == [[2, 3, -1]]
    marked.set_writer(EpisodeWriter())
    assert ages(marked, marked.extend(rows([0, 1, 0]))) == [[4, 5, -1]]
    assert ages(plain, plain.extend(rows([1, 1, 0]))) == [6, 7, 8]


FIRST = [  # Steps of an open episode, and a whole episode that they cannot be stored beside.
    (torch.arange(2), torch.rand(3)),
    (torch.zeros(2, 3), torch.zeros(4, 4)),
    (torch.zeros(2, 3), torch.arange(3)),
]


def of_one(episode, values, *, done):
    """Steps of one episode, that ends if ``done``."""
    ids, flags = torch.full((len(values),), episode), ends(len(values)) & done
    return TensorDict({"episode": ids, "value": values, "next": {"done": flags}}, [len(values)])


@pytest.mark.parametrize(("held", "whole"), FIRST)
def test_a_whole_episode_fixes_no_schema_that_open_ones_lack(held, whole):
    rb = buffer()
    rb.extend(of_one(0, held, done=False))
    with pytest.raises(ValueError, match=r"open episode 0 .*'value'.*discard"):
        rb.extend(of_one(1, whole, done=True))
    assert len(rb) == 0
    rb.extend(of_one(0, held, done=True))
    assert rb.storage.episode(0)["value"].tolist() == 2 * held.tolist()
    other = buffer()
    other.extend(of_one(0, held, done=False))
    other.writer.discard(0)
    other.extend(of_one(1, whole, done=True))
    assert other.storage.num_episodes == 1


def test_a_whole_episode_of_varying_shapes_may_be_the_first():
    rb = buffer()
    rb.extend(of_one(0, torch.zeros(2, 3), done=False))
    steps = [of_one(1, torch.zeros(1, size), done=size == 2)[0] for size in (3, 2)]
    rb.extend(lazy_stack(steps))
    rb.extend(of_one(0, torch.zeros(2, 3), done=True))
    assert rb.storage.num_episodes == 2


# ---- what is refused ----------------------------------------------------------------------------


def nested():
    batch = rows([0, 1], [0, 1])
    ragged = [torch.zeros(2, 3), torch.zeros(2, 5)]
    batch._tensordict["y"] = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    return batch


def without_truncated():
    rb = buffer()
    rb.extend(TensorDict({"next": {"terminated": torch.zeros(2, 1).bool()}}, [2]))
    return rb.writer.flush()


HELD, WHOLE = of_one(0, torch.arange(2), done=False), of_one(7, torch.arange(3), done=True)


def write(data, **kwargs):
    buffer(**kwargs).extend(data)


def on_open(data):
    """Write beside open steps that were told apart by ids."""
    rb = buffer()
    rb.extend(HELD.clone().set("more", torch.arange(2)))
    before = rb.writer.open_episodes[0]
    try:
        rb.extend(data)
    finally:
        assert (rb.writer.open_episodes[0] == before).all()
        assert len(rb) == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("use add", on_open, WHOLE[0]),
        refused("are open that were told apart by", on_open, HELD.exclude("episode")),
        refused("one integer id per step", on_open, WHOLE.clone().set("episode", torch.ones(3, 2))),
        refused("open episode 0 …'more'", on_open, WHOLE),
        refused("traj_key 'traj' is not in the d", write, WHOLE, traj_key="traj", error=KeyError),
        refused('need ("next", "truncated")', without_truncated),
        refused("got list: …torch.stack…lazy_stack", write, [*WHOLE], error=TypeError),
        refused("'y' is a nested tensor…lazy_stack", write, nested()),
        refused("must return an episode", write, WHOLE, transform=lambda _: None, error=TypeError),
        refused(
            "given 2 whole episodes and must return as many, got 0",
            write,
            torch.cat([WHOLE, WHOLE]),
            transform=Cut(True, keep=0),
        ),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)


def test_the_error_of_a_transform_names_the_episode():
    def failing(episode):
        raise RuntimeError("no reward model")

    with pytest.raises(RuntimeError, match="no reward model") as caught:
        write(WHOLE, transform=failing)
    assert "episode 7" in "".join(getattr(caught.value, "__notes__", ["episode 7"]))
