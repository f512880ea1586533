import gc
import weakref

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.refusals import check_refused, refused
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter


@pytest.mark.parametrize("flushed", [True, False])
def test_tensorclasses_below_the_root_have_memory_of_their_own(flushed):
    class Seen(TensorClass):
        x: torch.Tensor

    def steps(value, n=100):
        done = torch.arange(n)[:, None] == (n if flushed else n - 1)
        seen = Seen(x=torch.full((n,), value), batch_size=[n])
        data = TensorDict({"seen": seen, "next": {"done": done}}, [n])
        data["thing"] = NonTensorStack(*[NonTensorData(seen.x[i]) for i in range(n)])
        return data

    rb = ReplayBuffer(storage=EpisodeStorage(100), writer=EpisodeWriter())
    data = steps(1.0)
    rb.extend(data)
    data["seen"].x.zero_()
    if flushed:
        rb.writer.flush()
    for read in (rb[:], rb.storage.episode(0)):
        step = read["seen"][7]
        assert step.x == 1
        assert step.x.untyped_storage().nbytes() == 4
        step.x.fill_(9)
        assert not step.x.requires_grad
        read.get("thing")[7].data.fill_(9)
    assert (rb[:]["seen"].x == 1).all()
    assert rb[7].get("thing").data == 1


@pytest.mark.parametrize(
    ("here", "there", "agree"), [(0.0, -0.0, False), (float("nan"), float("nan"), True)]
)
def test_rows_are_shared_where_bits_agree(make, here, there, agree):
    storage = EpisodeStorage(10)
    episode = make.whole({"x": torch.full((2,), here), "next": {"x": torch.full((2,), there)}}, 2)
    storage.append(episode)
    assert (("next", "x") in storage.shared_keys) == agree
    assert make.steps(storage[:]) == make.steps(episode)


def test_images_take_half_the_bytes_of_a_plain_buffer(make):
    generator = torch.Generator().manual_seed(0)

    def episode(length):
        seen = torch.randint(256, (length + 1, 64, 64, 3), generator=generator, dtype=torch.uint8)
        return make.whole({"pixels": seen[:-1], "next": {"pixels": seen[1:]}}, length)

    storage, plain = EpisodeStorage(3000), LazyTensorStorage(3000)
    for _ in range(40):
        storage.append(episode(int(torch.randint(70, 101, (), generator=generator))))
    plain.set(torch.arange(3000), episode(1).expand(3000).contiguous())
    pixels = 2 * plain[:]["pixels"].numel()
    assert 0.5 * pixels <= storage.nbytes <= 0.53 * pixels


@examples(20)
@given(
    episodes=st.lists(
        st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), min_size=1, max_size=6), max_size=30
    ),
    budget=st.integers(6, 12),
)
@example(
    episodes=[[1, 1, 0, 0, 0, 0], [2], [0] * 3, [2], [0], [5], [0] * 3, [0] * 2, [2], [3, 0]],
    budget=10,
)
def test_tensors_without_elements_come_back(make, episodes, budget):
    storage, model, shapes = EpisodeStorage(budget), [], iter(range(10**6))
    for sizes in episodes:
        steps = [
            TensorDict({"t": torch.tensor([next(shapes) for _ in range(n)], dtype=torch.int64)})
            for n in sizes
        ]
        storage.append(lazy_stack(steps))
        model.append(steps)
        while sum(map(len, model)) > budget:
            model.pop(0)
        got = [t.tolist() for t in storage[:].get("t", as_list=True)]
        assert got == [step["t"].tolist() for e in model for step in e]


def test_tensors_that_cannot_be_stored_are_refused_before_anything_leaves(make):
    def steps(value, device="cpu"):
        rows = [torch.full((2 + i,), value, device=device if i else "cpu") for i in range(2)]
        data = lazy_stack([TensorDict({"a": row}) for row in rows])
        data["x"] = torch.zeros(2, 3)
        return data

    storage = EpisodeStorage(4)
    storage.append(steps(1.0))
    storage.append(steps(2.0))
    before = make.steps(storage[:])
    a, sparse, elsewhere = (
        torch.zeros(2, 2),
        torch.eye(2, 3).to_sparse(),
        torch.zeros(2, 3).to("meta"),
    )
    bad = {
        "'a'.* on device meta": steps(3.0, "meta"),
        "'x'.*sparse": TensorDict({"a": a, "x": sparse}, [2]),
        "'x'.*on device meta": TensorDict({"a": a, "x": elsewhere}, [2]),
    }
    for message, data in bad.items():
        with pytest.raises(ValueError, match=message):
            storage.append(data)
        assert make.steps(storage[:]) == before
        with pytest.raises(ValueError, match=message):
            EpisodeStorage(4).append(data)


def test_a_pending_conjugation_or_negation_is_carried_out(make):
    z = torch.randn(3, 2, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    after = torch.cat([x[1:], x[:1]])
    for lazy in (False, True):
        storage = EpisodeStorage(20)
        for following in (after, after + 1):
            data = make.whole({"x": x, "z": z.conj(), "next": {"x": following}}, 3)
            storage.append(lazy_stack(list(data.unbind(0))) if lazy else data)
        assert torch.equal(storage[:]["x"], torch.cat([x, x]))
        assert torch.equal(storage[:]["z"], torch.cat([z.conj(), z.conj()]))


def test_objects_of_episodes_that_left_are_let_go(make):
    class Thing:
        pass

    storage, thing = EpisodeStorage(4), Thing()
    watch = weakref.ref(thing)
    for item in (thing, None, None):
        data = make.whole({}, 2)
        data["thing"] = [item, item]
        storage.append(data)
        del data
    del thing, item
    gc.collect()
    assert watch() is None


def test_a_foreign_writer_is_refused(make):
    for cls in (ReplayBuffer, TensorDictReplayBuffer):
        rb = cls(storage=EpisodeStorage(20))
        for write, data in ((rb.extend, make.vectors([3])), (rb.add, make.vectors([3])[0])):
            with pytest.raises(TypeError, match="writer=EpisodeWriter"):
                write(data)
        assert len(rb) == 0


@pytest.mark.parametrize("turns", [True, False])
def test_inference_mode_and_default_devices_do_not_matter(make, turns):
    maker = make.turns if turns else make.vectors
    with torch.inference_mode():
        storage = EpisodeStorage(20)
    storage.append(maker([3]))
    rb = buffer_of(storage, ClipSampler(slice_len=2), batch_size=4)
    data = [maker([4, 3], seed=k, first_id=2 * k) for k in range(6)]
    with torch.inference_mode():
        rb.extend(data[0].clone())
        rb.sample()
        rb.extend(data[1][:2].clone())
    rb.extend(data[1][2:])
    with torch.device("meta"):
        for piece in data[2:]:
            rb.extend(piece)
            rb.sample()
            assert len(rb.storage.state_dict()["lengths"]) == rb.storage.num_episodes
    assert make.steps(rb[:])[-7:] == make.steps(data[-1])


def test_tensors_that_require_grad_or_share_memory_are_copied(make):
    storage, weight = EpisodeStorage(20), torch.ones(1, 2, requires_grad=True)
    for _ in range(3):
        storage.append(make.whole({"x": weight.expand(2, 2)}, 2))
    assert not storage[:]["x"].requires_grad
    assert storage[:]["x"].tolist() == [[1.0, 1.0]] * 6


def test_tensorclasses_come_back_as_such():
    class Step(TensorClass):
        x: torch.Tensor
        next: TensorDict

    def step(n):
        done = torch.arange(n) == n - 1
        return Step(x=torch.randn(n), next=TensorDict({"done": done}, [n]), batch_size=[n])

    rb = buffer_of(20, ClipSampler(slice_len=2), batch_size=4)
    data = step(5)
    for piece in (data[:2], data[2:]):
        rb.extend(piece)
    assert isinstance(rb[:], Step)
    assert torch.equal(rb[:].x, data.x)
    assert isinstance(rb.sample(), Step)
    with pytest.raises(ValueError, match="expected Step, got TensorDict"):
        rb.extend(data.to_tensordict())


def test_the_next_of_a_next_has_rows_of_its_own(make):
    x = torch.arange(4.0)
    last = {"x": x[2:], "done": torch.tensor([False, True])}
    data = TensorDict({"x": x[:2], "next": {"x": x[1:3], "next": last}}, [2])
    for order in (("x", "next"), ("next", "x")):
        storage = EpisodeStorage(10)
        storage.append(data.select(*order))
        assert storage.shared_keys == [("next", "x")]
        assert make.steps(storage[:]) == make.steps(data)


def steps(*shape):
    return TensorDict({"x": torch.zeros(*shape, 1)}, list(shape))


append, with_, SCRATCH = EpisodeStorage(9).append, EpisodeStorage, {"scratch_dir": "folder"}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(
            refused(f"{name} must be a positive integer, got {bad!r}", with_, **given_)
            for name in ("max_steps", "max_tokens", "max_episodes")
            for bad in (0, -1, 2.5, True, "9")
            for given_ in [{"max_steps": 5, name: bad}]
        ),
        refused("no argument max_size: give max_steps", with_, max_size=1, error=TypeError),
        refused("scratch_dir … use device='cpu', got 'meta'", with_, 8, device="meta", **SCRATCH),
        refused("span must be", EpisodeStorage(3).num_clips, 0),
        refused("nothing is stored", EpisodeStorage(3).__getitem__, slice(None), error=IndexError),
        refused("must be a TensorDict", append, None, error=TypeError),
        refused("size of [T], got [2, 3]", append, steps(2, 3)),
        refused("size of [T], got []", append, steps()),
        refused("why…in some steps only", append, lazy_stack([steps(), steps().set("why", "end")])),
        refused("EpisodeStorage", buffer_of, LazyTensorStorage(20), error=TypeError),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)
