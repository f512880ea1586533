import pickle
import statistics
import threading
from itertools import pairwise
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from tests.buffers import buffer_of
from tests.data import makers
from tests.data.handles import HANDLES, PADDING, numbers_of
from tests.data.samplers.laws import chi_square, starts_drawn
from tests.data.saving import HOW, saved
from tests.refusals import check_refused, refused
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter, PrioritizedClipSampler
from torchrl_mt.data.samplers.priorities.priority_ring import PriorityRing

REDUCTIONS = {"max": max, "min": min, "mean": statistics.fmean, "median": statistics.median_low}


def buffer(cls=TensorDictReplayBuffer, max_steps=100, **kwargs):
    return buffer_of(max_steps, PrioritizedClipSampler, cls=cls, **{"seed": 0, **kwargs})


def ring(rb):
    """The priorities by number, brought up to what is stored."""
    with rb.storage.lock:
        rb.sampler._follow(rb.storage)
        return rb.sampler._priorities.ring


def leaves(rb):
    """The open leaves of the sum tree: {number of the step: weight}."""
    held = ring(rb)
    leaf = held._sum[torch.arange(held.capacity)].tolist()
    begin = int(held.slots(torch.tensor([held.first])))
    number = [held.first + (slot - begin) % held.capacity for slot in range(held.capacity)]
    return {n: value for n, value in zip(number, leaf, strict=True) if value}


def numbers(steps):
    """The (episode, step) of each."""
    return list(zip(steps["episode"].tolist(), steps["step"].tolist(), strict=True))


def priorities(rb):
    """The priority of every stored step by (episode, step)."""
    held = ring(rb)
    return dict(zip(numbers(rb[:]), held.stored()[1].tolist(), strict=True))


def plain(handle):
    """The handle of the step alone, without what it tells of a clip."""
    return HANDLES + numbers_of(handle)


class Model:
    """Slow and obvious: a priority by (episode, step), and the handle of each of them."""

    def __init__(self, max_steps, reduction, stride, strict, within):
        self.max_steps, self.stride, self.strict, self.within = max_steps, stride, strict, within
        self.reduce = REDUCTIONS[reduction]
        self.span = None
        self.episodes = []
        self.priority = {}
        self.largest = 1.0
        self.handle = {}
        """Of each stored (episode, step)."""
        self.next = HANDLES
        """The handle that the next step gets: lower ones that are no stored step's have left."""
        self.dropped = 0

    def steps(self):
        return [(e, t) for e, length in self.episodes for t in range(length)]

    def clips(self, span):
        """Where clips begin; unless they must have full length, a shorter episode is one clip."""
        out = []
        for e, length in self.episodes:
            clips = max(length - span + 1, 0)
            if not self.strict and length >= self.stride:
                clips = max(clips, 1)
            out += [(e, t) for t in range(clips)]
        return out

    def open(self):
        return self.clips(self.span) if self.span else []

    def write(self, episode, length):
        self.episodes.append((episode, length))
        while sum(n for _, n in self.episodes) > self.max_steps:
            self.episodes.pop(0)
        kept = set(self.steps())
        self.priority = {k: p for k, p in self.priority.items() if k in kept}
        default = self.largest
        if self.within and self.span:
            stored = [self.priority[k] for k in self.open() if k in self.priority]
            default = max(stored, default=1.0)
        for t in range(length):
            self.priority[episode, t] = default
            self.handle[episode, t] = self.next
            self.next += 1
        self.handle = {k: handle for k, handle in self.handle.items() if k in kept}

    def renumber(self):
        """The same steps are loaded: what was given out before is of none of them."""
        self.handle = {}
        for step in self.steps():
            self.handle[step] = self.next
            self.next += 1

    def entries(self, episode, t):
        """Steps in a sample of the clip that begins at a step; 1 if none does."""
        length = dict(self.episodes)[episode]
        if t + self.span <= length:
            return self.span // self.stride
        if not self.strict and t == 0 and length >= self.stride:
            return length // self.stride
        return 1

    def each(self, handles):
        """The (episode, step) of each handle; None for one that has left."""
        step_of = {handle: step for step, handle in self.handle.items()}
        return [step_of.get(plain(handle)) for handle in handles]

    def update(self, steps, values):
        grouped = {}
        for step, value in zip(steps, values, strict=True):
            if step is None:
                self.dropped += 1
            else:
                grouped.setdefault(step, []).append(value)
        for step, each in grouped.items():
            self.priority[step] = self.reduce(each)
            self.largest = max(self.largest, self.priority[step])


class Machine:
    """A buffer and its model, and what can be done to both."""

    def __init__(self, make, choose):
        self.make, self.choose = make, choose
        self.max_steps = choose(st.integers(8, 30), "max_steps")
        self.stride = choose(st.integers(1, 2), "stride")
        self.form = choose(st.sampled_from(["flat", "short", "clips"]), "form")
        self.fixed = choose(st.booleans(), "slice_len rather than num_slices")
        self.alpha = choose(st.sampled_from([0.0, 0.6, 1.0, 1.5]), "alpha")
        reduction = choose(st.sampled_from(list(REDUCTIONS)), "reduction")
        within = choose(st.booleans(), "within")
        self.kwargs = {
            "alpha": self.alpha,
            "eps": 1e-3,
            "stride": self.stride,
            "strict_length": self.form != "short",
            "layout": "clips" if self.form == "clips" else "flat",
            "reduction": reduction,
            "max_capacity": choose(st.sampled_from([None, self.max_steps, self.max_steps + 5])),
            "max_priority_within_buffer": within,
            "slice_len" if self.fixed else "num_slices": 2,
        }
        self.rb = buffer(max_steps=self.max_steps, **self.kwargs)
        self.model = Model(self.max_steps, reduction, self.stride, self.form != "short", within)
        self.model.span = 2 * self.stride if self.fixed else None
        self.samples = []
        """Sample, and entries of each of its clips."""
        self.given = []
        """Handles that were given out."""
        self.episode = 0

    def check(self):
        rb, model = self.rb, self.model
        steps = model.steps()
        first = model.next - HANDLES - len(steps)
        assert rb.storage.table.first == first
        assert steps == (numbers(rb[:]) if steps else [])
        number = {step: first + i for i, step in enumerate(steps)}
        assert model.handle == {step: HANDLES + n for step, n in number.items()}
        expected = {number[k]: (model.priority[k] + 1e-3) ** self.alpha for k in model.open()}
        assert leaves(rb) == pytest.approx(expected, rel=1e-5)
        assert rb.sampler.dropped == model.dropped
        if steps:
            assert priorities(rb) == pytest.approx(model.priority, rel=1e-6)

    def values(self, n):
        return [x / 8 for x in self.choose(st.lists(st.integers(0, 40), min_size=n, max_size=n))]

    def write(self):
        for length in self.choose(st.lists(st.integers(1, 8), min_size=1, max_size=3)):
            index = self.rb.extend(self.make.vectors([length], first_id=self.episode)).tolist()
            self.model.write(self.episode, length)
            assert index == [self.model.handle[self.episode, t] for t in range(length)]
            self.given += index
            self.episode += 1
            if self.model.within:  # the largest stored priority is that of when it is looked at
                ring(self.rb)

    def write_with_priorities(self):
        """Each of the steps written gets its own."""
        length = self.choose(st.integers(1, 8))
        values = self.values(length)
        way = self.choose(st.sampled_from(["at once", "column", "one by one"]))
        data = self.make.vectors([length], first_id=self.episode)
        index = self.rb.extend(data)
        self.model.write(self.episode, length)
        ring(self.rb)
        if way == "one by one":
            for i, value in zip(index.tolist(), values, strict=True):
                self.rb.update_priority(i, value)
        else:
            given_ = index if way == "at once" else index[:, None]
            self.rb.update_priority(given_, torch.tensor(values))
        self.model.update(self.model.each(index.tolist()), values)
        self.given += index.tolist()
        self.episode += 1

    def sample(self):
        model = self.model
        slice_len = 2 if self.fixed else self.choose(st.integers(1, 3))
        if not model.clips(slice_len * self.stride):
            with pytest.raises(RuntimeError):
                self.rb.sample(2 * slice_len)
            return
        model.span, sample = slice_len * self.stride, self.rb.sample(2 * slice_len)
        flat = sample.reshape(-1)
        ends = flat["next", "truncated"].flatten().nonzero().flatten().tolist()
        spans = [b - a for a, b in pairwise([-1, *ends])]
        steps = numbers(flat)
        assert plain(flat["index"]).tolist() == [model.handle[step] for step in steps]
        heads = [steps[end + 1 - n] for end, n in zip(ends, spans, strict=True)]
        assert spans == [model.entries(*head) for head in heads]
        per_step = [h for h, n in zip(heads, spans, strict=True) for _ in range(n)]
        self.samples.append((sample, spans))
        weight = {k: (model.priority[k] + 1e-3) ** self.alpha for k in model.open()}
        least = min(weight.values())
        expected = [(weight[k] / least) ** -0.9 for k in per_step]
        assert flat["priority_weight"].tolist() == pytest.approx(expected, rel=1e-4)

    def update_sample(self):
        """The whole sample, or a copy of its index."""
        if not self.samples:
            return
        sample, _ = self.choose(st.sampled_from(self.samples))
        index = sample["index"]
        values = torch.tensor(self.values(index.numel())).view(index.shape)
        way = self.choose(st.sampled_from(["td", *COPIES]))
        if way == "td":
            one = self.choose(st.booleans(), "a priority has a dimension of its own")
            self.rb.update_tensordict_priority(
                sample.set("td_error", values[..., None] if one else values)
            )
        else:
            self.rb.update_priority(COPIES[way](index), values)
        if index.ndim > 1 and way != "flat":
            values = [self.model.reduce(row) for row in values.tolist()]
            self.model.update(self.model.each(index[:, 0].tolist()), values)
        else:
            self.model.update(self.model.each(index.flatten().tolist()), values.flatten().tolist())

    def update_firsts(self):
        """A value per row: rows are clips, whatever steps the firsts of them are."""
        wide = [sample for sample, spans in self.samples if len(set(spans)) == 1]
        if not wide:
            return
        rows = self.choose(st.sampled_from(wide))["index"].reshape(2, -1)
        values = self.values(2)
        way = self.choose(st.sampled_from(["column", "view", "rows"]))
        index = {"column": rows[:, :1], "view": rows[:, 0], "rows": rows}[way]
        if rows.shape[1] == 1 and way != "column":
            return
        self.rb.update_priority(index, torch.tensor(values))
        self.model.update(self.model.each(rows[:, 0].tolist()), values)

    def update_any(self):
        """Handles that were ever given out, places, and what means no step, in any order."""
        if not self.given:
            return
        steps, handle = self.model.steps(), st.sampled_from(self.given)
        one = handle | handle.map(lambda h: h | PADDING) | st.integers(-1, len(steps) - 1)
        index = self.choose(st.lists(one, min_size=1, max_size=8))
        values = self.values(len(index))
        self.rb.update_priority(torch.tensor(index), torch.tensor(values))
        told = [(i, v) for i, v in zip(index, values, strict=True) if i >= 0 and not i & PADDING]
        meant = [steps[i] if i < HANDLES else self.model.each([i])[0] for i, _ in told]
        self.model.update(meant, [value for _, value in told])

    def anneal(self):
        self.alpha = self.choose(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
        self.rb.sampler.alpha = self.alpha

    def empty(self):
        self.rb.empty()
        self.model.episodes, self.model.priority, self.model.largest = [], {}, 1.0
        self.model.handle = {}

    def restore(self):
        """In another buffer: handles stay with their steps."""
        other = buffer(max_steps=self.max_steps, **self.kwargs)
        with TemporaryDirectory() as folder:
            same = saved(self.rb, self.choose(st.sampled_from(HOW)), folder, other)
        self.model.dropped = 0 if same is other else self.model.dropped
        self.rb = same

    def reload(self):
        """In the same buffer: what was given out before is of no step of now."""
        self.rb.load_state_dict(self.rb.state_dict())
        self.model.renumber()

    def replace(self):
        """The storage alone is loaded: nothing that the sampler knows is of that."""
        ring(self.rb)
        self.rb.storage.load_state_dict(self.rb.storage.state_dict())
        self.model.largest = 1.0
        self.model.priority = dict.fromkeys(self.model.steps(), 1.0)
        self.model.renumber()


COPIES = {
    "itself": lambda index: index,
    "clone": torch.clone,
    "numpy": lambda index: index.numpy().copy(),
    "list": torch.Tensor.tolist,
    "flat": torch.Tensor.flatten,
    "pickle": lambda index: pickle.loads(pickle.dumps(index)),
}

RARE = "update_firsts write_with_priorities anneal empty restore reload replace"
OPERATIONS = [
    *(["write"] * 3 + ["sample"] * 4 + ["update_sample"] * 2 + ["update_any"] * 2),
    *RARE.split(),
]


@examples(100, few=20)
@given(data=st.data())
def test_every_priority_stays_with_its_clip(make, data):
    """Whatever is done: each clip's leaf is of its own priority, and every other leaf is 0."""
    machine = Machine(make, data.draw)
    for name in data.draw(
        st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=40), "operations"
    ):
        getattr(machine, name)()
        machine.check()


def law(rb, priority, alpha, eps, span, least=None):
    """Weight of each storage index that a clip begins at."""
    model = Model(rb.storage.max_size, "max", least or 1, least is None, False)
    model.episodes = list(enumerate(rb.storage.lengths.tolist()))
    open_, steps = set(model.clips(span)), model.steps()
    return {i: (priority[i] + eps) ** alpha for i in range(len(steps)) if steps[i] in open_}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("strict", "stride"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_clips_are_drawn_by_their_priority(make, alpha, dtype, strict, stride):
    lengths, span, eps = [3, 4, 5, 1, 9, 2], 4, 0.01
    slice_len = span // stride
    options = {
        "stride": stride,
        "strict_length": strict,
        "alpha": alpha,
        "eps": eps,
        "dtype": dtype,
    }
    rb = buffer(max_steps=sum(lengths), slice_len=slice_len, seed=3, **options)
    rb.extend(make.vectors([7] * 12))
    rb.sampler.sample(rb.storage, slice_len)
    rb.extend(make.vectors([*lengths], seed=1, first_id=12))
    priority = [((7 * i) % 11) / 4 for i in range(sum(lengths))]
    rb.update_priority(torch.arange(len(priority)), torch.tensor(priority))
    expected = law(rb, priority, alpha, eps, span, None if strict else stride)
    # The 0.9999 quantile of chi-square with 12 degrees of freedom is 39.1.
    assert len(expected) <= 13
    assert chi_square(starts_drawn(rb, slice_len), expected) < 39.1


def test_an_index_that_was_changed_means_what_it_says(make):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([6]))
    index, _ = rb.sampler.sample(rb.storage, 4)
    for value, given_ in ((5.0, 3), (6.0, HANDLES + 4)):
        index.fill_(given_)
        rb.update_priority(index, value)
        changed = [i for i, p in enumerate(priorities(rb).values()) if p == value]
        assert changed == [given_ % HANDLES]


def test_a_write_touches_what_came_and_what_left(make, monkeypatch):
    """Of the private ring: nothing else tells how many of its leaves a write sets."""
    rb = buffer(max_steps=1000, slice_len=4, layout="clips")
    rb.extend(make.vectors([50] * 20))
    rb.sample(40)
    touched, held = [], ring(rb)
    enter = held._enter
    monkeypatch.setattr(
        held, "_enter", lambda slots, *values: touched.append(len(slots)) or enter(slots, *values)
    )
    monkeypatch.setattr(held, "_build", None)
    for k in range(10):
        rb.extend(make.vectors([10, 20], first_id=20 + k))
        rb.update_tensordict_priority(rb.sample(40))
        assert sum(touched) <= 50 + 30 + 10
        touched.clear()


def test_exponents_are_annealed(make):
    rb = buffer(slice_len=2, alpha=1.0, beta=0.0, eps=0.0)
    rb.extend(make.vectors([6]))
    given_ = torch.arange(1.0, 7.0)
    rb.update_priority(torch.arange(6), given_)
    alpha = LinearScheduler(rb, "alpha", final_value=0.0, num_steps=4)
    beta = LinearScheduler(rb.sampler, "beta", final_value=1.0, num_steps=4)
    for k in range(1, 5):
        alpha.step()
        beta.step()
        now = 1 - k / 4
        assert type(rb.sampler.alpha) is type(rb.sampler.beta) is float
        assert (rb.sampler.alpha, rb.sampler.beta) == (now, k / 4)
        expected = {i: (i + 1.0) ** now for i in range(5)}
        assert leaves(rb) == pytest.approx(expected)
        _, info = rb.sample(20, return_info=True)
        weight = (rb.storage.places(info["index"])[::2] + 1.0) ** now
        torch.testing.assert_close(info["priority_weight"][::2], weight ** -(k / 4))
        assert info["priority_weight"].dtype == torch.float32
        same = buffer(slice_len=2)
        same.load_state_dict(rb.state_dict())
        assert (same.sampler.alpha, same.sampler.beta) == (now, k / 4)
    rb.sampler.alpha = 1.0
    assert leaves(rb) == {i: i + 1.0 for i in range(5)}


def test_what_is_written_with_a_priority_has_it(make):
    rb = buffer(max_steps=12, slice_len=2)
    for k in range(6):
        data = make.vectors([4], first_id=k)
        data["td_error"] = torch.arange(4.0)[:, None] + 10 * k
        rb.extend(data[:3])
        rb.extend(data[3:])
        # Of the first piece it was not known yet where the steps would be stored.
        held = priorities(rb)
        assert held[k, 3] == 3.0 + 10 * k
        written = rb.extend(make.vectors([3], first_id=100 + k).set("td_error", torch.ones(3, 1)))
        assert [priorities(rb)[100 + k, t] for t in range(3)] == [1.0, 1.0, 1.0]
    rb.extend(make.vectors([3], first_id=200).set("td_error", torch.ones(3, 1)))
    before = priorities(rb)
    rb.update_priority(written[:, None], torch.tensor([7.0, 8.0, 9.0]))
    changed = {k: p for k, p in priorities(rb).items() if p != before[k]}
    assert changed == {(105, 0): 7.0, (105, 1): 8.0, (105, 2): 9.0}


def test_a_buffer_on_a_filled_storage_can_sample(make):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([5, 6]))
    other = buffer_of(rb.storage, PrioritizedClipSampler(slice_len=3), cls=TensorDictReplayBuffer)
    assert set(priorities(other).values()) == {1.0}
    assert other.sample(9).batch_size == (9,)
    rb.set_sampler(PrioritizedClipSampler(slice_len=3))
    assert rb.sample(9).batch_size == (9,)


def test_buffers_on_one_storage_keep_their_own_priorities(make):
    one = buffer(max_steps=12, slice_len=2)
    two = buffer_of(one.storage, PrioritizedClipSampler(slice_len=3), cls=TensorDictReplayBuffer)
    for k in range(8):
        (one, two)[k % 2].extend(make.vectors([5], first_id=k))
        for rb, span in ((one, 2), (two, 3)):
            at = len(rb) - 5
            rb.update_priority([at], [float(k + span)])
            assert priorities(rb)[k, 0] == k + span
            assert len(leaves(rb)) == sum(n - span + 1 for n in rb.storage.lengths.tolist())
            assert {e for e, _ in priorities(rb)} == ({k - 1, k} if k else {0})


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_one_thread_learns_while_another_writes(make, meanwhile, cls):
    rb = buffer(cls, max_steps=40, slice_len=3, prefetch=3, batch_size=12)
    rb.extend(make.vectors([6, 5]))
    with meanwhile(lambda k: rb.extend(make.vectors([3 + k % 5], seed=k, first_id=k + 2))):
        for k in range(150):
            sample, info = rb.sample(return_info=True)
            clips = sample.view(4, 3)
            assert (clips["episode"].diff() == 0).all()
            assert (clips["step"].diff() == 1).all()
            assert torch.equal(clips["next", "observation"][:, :-1], clips["observation"][:, 1:])
            # The priority says which clip it is of.
            head = clips["episode"][:, 0] * 100.0 + clips["step"][:, 0]
            rb.update_priority(info["index"].view(4, 3), head)
            rb.sampler.alpha = 0.5 + k % 3 / 10
    largest = rb.sampler.default_priority
    own = {k: p for k, p in priorities(rb).items() if p == k[0] * 100 + k[1]}
    default = {k: p for k, p in priorities(rb).items() if k not in own}
    assert all(p == 1.0 or p <= largest for p in default.values())
    # What is not its own is what new clips got: the largest priority at that time, of no later clip.
    assert all(p == 1.0 or p < k[0] * 100 for k, p in default.items())


def test_gradients_and_inference_mode_do_no_harm(make):
    rb = buffer(slice_len=2)
    with torch.inference_mode():
        rb.extend(make.vectors([6]))
        sample = rb.sample(4)
        rb.update_priority(sample["index"], torch.rand(4))
    rb.extend(make.vectors([6], first_id=1))
    rb.update_priority(sample["index"], torch.rand(4, requires_grad=True))
    sample = rb.sample(4)
    with torch.inference_mode():
        rb.update_priority(sample["index"], torch.rand(4))
        rb.sample(4)
    assert not any(p.requires_grad for p in ring(rb).stored()[1:])


@examples(25)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 300),
    spread=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_only_open_steps_of_positive_weight_are_drawn(seed, size, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    held = PriorityRing(size, dtype)
    first = int(torch.randint(1000, (), generator=generator))
    weight = 10.0 ** (torch.rand(size, generator=generator, dtype=dtype) * spread - spread)
    weight[torch.rand(size, generator=generator) < 0.5] = 0
    held.load(first, weight, weight)
    is_open = torch.rand(size, generator=generator) < 0.5
    held.open((first + torch.arange(size))[is_open])
    good = is_open & (weight > 0)
    if not good.any():
        with pytest.raises(RuntimeError, match="all priorities are zero"):
            held.draw(5, generator)
        return
    drawn = held.draw(2000, generator)
    assert good[drawn - first].all()
    assert held.least == weight[good].min()
    assert held.largest == weight[is_open].max()


def test_rounded_sums_end_on_no_closed_step():
    held = PriorityRing(8, torch.float32)
    weight = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0])
    held.load(0, weight, weight)
    held.open(torch.arange(8))
    # What a rounded sum can come to: nothing, or more than there is.
    masses = [torch.tensor([0.0, 2.0, 1.0]), torch.tensor([1.2, 0.0]), torch.tensor([0.5])]
    held._scan = lambda *_: held._sum.find(masses.pop(0))
    assert held.draw(3, None).tolist() == [4, 1, 1]


def test_it_is_the_sampler_that_torchrl_looks_for():
    sampler = PrioritizedClipSampler(slice_len=2, layout="clips", alpha=0.5)
    assert isinstance(sampler, PrioritizedSampler)
    assert isinstance(sampler, ClipSampler)
    assert repr(sampler) == (
        "PrioritizedClipSampler(slice_len=2, num_slices=None, stride=1, strict_length=True, "
        "layout='clips', alpha=0.5, beta=0.9, eps=1e-08, reduction='max')"
    )


@pytest.mark.parametrize("other", ["flush", "buffer", "load"])
def test_a_written_index_means_its_steps_whatever_others_write_before_it_is_noted(other):
    def steps(episode, done):
        ids, ends = torch.full((len(done),), episode), torch.tensor(done, dtype=torch.bool)
        return TensorDict({"episode": ids, "next": {"done": ends}}, [len(done)])

    class Interrupted(PrioritizedClipSampler):
        between = None

        def extend(self, index):
            if self.between is not None:
                thread = threading.Thread(target=self.between)
                thread.start()
                thread.join()
            super().extend(index)

    storage, sampler = EpisodeStorage(8), Interrupted(slice_len=1, alpha=1.0, eps=0.0)
    rb = ReplayBuffer(storage=storage, writer=EpisodeWriter(), sampler=sampler)
    second = ReplayBuffer(storage=storage, writer=EpisodeWriter())
    for episode in (1, 2):
        rb.extend(steps(episode, [0, 0, 1]))
    rb.extend(steps(9, [0, 0, 0]))
    rb.sample(1)
    state = storage.state_dict()
    sampler.between = {
        "flush": rb.writer.flush,
        "buffer": lambda: second.extend(steps(8, [0, 0, 1])),
        "load": lambda: storage.load_state_dict(state),
    }[other]
    index = rb.extend(steps(3, [0, 1]))
    sampler.between = None
    if other == "load":
        # Other steps are stored now: none of them has the index of what was written.
        rb.update_priority(index, torch.zeros(2))
        assert (ring(rb).stored()[1] != 0).all()
        assert sampler.dropped == 2
        with pytest.raises(IndexError, match="not stored"):
            rb[index]
        return
    rb.update_priority(index, torch.zeros(2))
    assert torch.equal(ring(rb).stored()[1] == 0, storage[:]["episode"] == 3)


# ---- what is refused ----------------------------------------------------------------------------

END = HANDLES + 9


@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        ([0, 1], [1.0, -2.0], ValueError, r"finite and not negative, .* got -2.0: use"),
        ([0, 1], [float("nan"), 0.0], ValueError, "got nan"),
        ([0, 1], float("inf"), ValueError, "got inf"),
        ([0, 1], torch.tensor(1e300, dtype=torch.float64), ValueError, "in torch.float32; got inf"),
        ([0, 1], [True, False], ValueError, "real numbers, got torch.bool"),
        ([0, 1], [1.0, 2.0, 3.0], ValueError, r"shape \(3,\) for index of shape \(2,\)"),
        ([0, 1], [], ValueError, r"shape \(0,\) for index of shape \(2,\)"),
        ([[0, 1], [3, 4]], torch.ones(2, 3), ValueError, r"\(2, 3\) for index of .* \(2, 2\)"),
        ([0, 9], [1.0, 2.0], IndexError, "index must be below 9, the number of .*; got 9"),
        ([END], [1.0], IndexError, r"index must be below 9, .* or the handle of one"),
        ([HANDLES, END + 5], [1.0, 2.0], IndexError, "index must be below 9"),
        ([[END - 2, END - 1], [END, END + 1]], 9.0, IndexError, "index must be below 9"),
        ([0.0, 1.0], [1.0, 2.0], TypeError, "index must be of an integer dtype, got torch.float32"),
        ([True, False], [1.0, 2.0], TypeError, "index must be of an integer dtype, got torch.bool"),
        # Those of nothing are skipped.
        ([], [], None, None),
        ([], 3.0, None, None),
        ([-1, -1], [4.0, 5.0], None, None),
        (-1, 4.0, None, None),
        *(
            (torch.zeros(n, dtype=torch.int64), torch.zeros(n), None, None)
            for n in ((0, 3), (3, 0), (0, 0))
        ),
    ],
)
def test_a_refused_update_changes_nothing(make, index, priority, error, message):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([9]))
    rb.update_priority([2], 3.0)
    before = priorities(rb), leaves(rb), rb.sampler.default_priority, rb.sampler.dropped
    if error is None:
        rb.sampler.update_priority(index, priority, storage=rb.storage)
    else:
        with pytest.raises(error, match=message):
            rb.sampler.update_priority(index, priority, storage=rb.storage)
    assert (priorities(rb), leaves(rb), rb.sampler.default_priority, rb.sampler.dropped) == before


def filled(lengths, priority=None, **kwargs):
    rb = buffer(max_steps=20, **kwargs)
    rb.extend(makers.vectors(lengths))
    if priority is not None:
        rb.update_priority(torch.arange(len(rb)), priority)
    return rb


def sample(length, batch_size, priority=None, alpha=0.7, **kwargs):
    rb = filled([length], priority, **kwargs)
    rb.sampler.alpha = alpha
    return rb.sample(batch_size)


TOO_MUCH = "more than torch.float32 holds: …dtype=torch.float64"
LEAST_CAPACITY = "at least the storage's max_steps=20"
update_unknown = PrioritizedClipSampler(slice_len=2).update_priority
update_empty = buffer(slice_len=4).update_priority
NOT_NEGATIVE, ZERO = "must be a finite … of at least 0, got", "are zero; use eps > 0"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("exactly one of slice_len and", PrioritizedClipSampler, error=TypeError),
        *(
            refused(text, PrioritizedClipSampler, slice_len=2, **kwargs)
            for kwargs, text in [
                ({"max_capacity": 0}, "max_capacity must be a positive integer, got 0"),
                ({"max_capacity": 2.0}, "max_capacity must be a positive integer, got 2.0"),
                ({"alpha": -0.1}, f"alpha {NOT_NEGATIVE} -0.1"),
                ({"beta": float("nan")}, f"beta {NOT_NEGATIVE} nan"),
                ({"eps": float("inf")}, f"eps {NOT_NEGATIVE} inf"),
                ({"reduction": "sum"}, "reduction must be …, got 'sum'"),
                ({"dtype": torch.int64}, "dtype must be torch.float32 or … torch.int64"),
                ({"layout": "x"}, "layout must be"),
                ({"stride": 0}, "stride must be a positive integer, got 0"),
            ]
        ),
        refused("the longest has 3", sample, 3, 8, slice_len=4, error=RuntimeError),
        refused("batch_size=6 and sli", sample, 6, 6, slice_len=4, error=RuntimeError),
        refused(ZERO, sample, 6, 8, 0.0, slice_len=4, eps=0.0, error=RuntimeError),
        refused(TOO_MUCH, sample, 9, 8, 3e38, slice_len=4, alpha=1.5, error=RuntimeError),
        refused(f"{LEAST_CAPACITY}, got 19", sample, 5, 4, slice_len=2, max_capacity=19),
        refused("EpisodeStorage, got NoneType", update_unknown, [0], [1.0], error=TypeError),
        refused("must be below 0", update_empty, [0], [1.0], error=IndexError),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)


def test_the_capacity_is_that_of_the_storage_by_default(make):
    assert filled([5], slice_len=2, max_capacity=29).sampler.max_size == 29
    rb = buffer(max_steps=20, slice_len=2)
    assert rb.sampler.max_size is None
    rb.extend(make.vectors([5] * 4))
    rb.sample(4)
    assert rb.sampler.max_size == 20
