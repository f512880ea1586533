import copy
import gc
import pickle
import statistics
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from torchrl_mt.data import (
    ClipSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)
from torchrl_mt.data.priorities import reduce_by_clip
from torchrl_mt.data.priority_ring import PriorityRing

REDUCTIONS = {
    "max": max,
    "min": min,
    "mean": statistics.fmean,
    "median": statistics.median_low,
}


def buffer(cls=TensorDictReplayBuffer, max_steps=100, seed=0, prefetch=None, batch_size=None, **kw):
    return cls(
        storage=EpisodeStorage(max_steps),
        writer=EpisodeWriter(),
        sampler=PrioritizedClipSampler(**kw),
        generator=torch.Generator().manual_seed(seed),
        batch_size=batch_size,
        prefetch=prefetch,
    )


def ring(rb):
    """The priorities by number, brought up to what is stored."""
    with rb.storage.lock:
        rb.sampler._follow(rb.storage)
        return rb.sampler._priorities.ring


def leaves(rb):
    """The open leaves of the sum tree: {number of the step: weight}."""
    held = ring(rb)
    leaf = held._sum[torch.arange(held.capacity)].tolist()
    out = {}
    for slot, value in enumerate(leaf):
        if value:
            number = held.first + (slot - held.first) % held.capacity
            out[number] = value
    return out


def starts_of(rb, index):
    """The (episode, step) at storage indices."""
    stored = rb.storage[:]
    return list(zip(stored["episode"][index].tolist(), stored["step"][index].tolist(), strict=True))


def priorities(rb):
    """The priority of every stored step by (episode, step)."""
    held = ring(rb)
    steps = starts_of(rb, slice(None))
    return dict(zip(steps, held.stored()[1].tolist(), strict=True))


class Model:
    """Slow and obvious: a priority by (episode, step), and what every index stood for."""

    def __init__(self, max_steps, reduction, least, within):
        self.max_steps, self.least, self.within = max_steps, least, within
        self.reduce = REDUCTIONS[reduction]
        self.span = None
        self.episodes = []
        self.priority = {}
        self.largest = 1.0
        self.came = 0
        self.draws = []

    def steps(self):
        return [(e, t) for e, length in self.episodes for t in range(length)]

    def clips(self, span):
        """Where clips begin; with ``least``, a shorter episode is one clip."""
        out = []
        for e, length in self.episodes:
            clips = max(length - span + 1, 0)
            if self.least is not None and length >= self.least:
                clips = max(clips, 1)
            out += [(e, t) for t in range(clips)]
        return out

    def open(self):
        return self.clips(self.span) if self.span else []

    def write(self, episode, length):
        self.episodes.append((episode, length))
        while sum(n for _, n in self.episodes) > self.max_steps:
            self.episodes.pop(0)
        self.came += length
        kept = set(self.steps())
        self.priority = {k: p for k, p in self.priority.items() if k in kept}
        default = self.largest
        if self.within and self.span:
            stored = [self.priority[k] for k in self.open() if k in self.priority]
            default = max(stored, default=1.0)
        for t in range(length):
            self.priority[episode, t] = default

    def means(self, values):
        """The steps that a copied or plain index stands for; None stands for none."""
        for full, starts, per_step, heads in reversed(self.draws):
            if len(values) > 1 and values == full:
                return per_step
            if len(values) > 1 and values == starts:
                return heads
        steps = self.steps()
        return [steps[i] if i >= 0 else None for i in values]

    def update(self, steps, values):
        grouped = {}
        for step, value in zip(steps, values, strict=True):
            if step in self.priority:
                grouped.setdefault(step, []).append(value)
        for step, each in grouped.items():
            self.priority[step] = self.reduce(each)
            self.largest = max(self.largest, self.priority[step])

    def forget_draws(self):
        self.draws = [
            (full, starts, [None] * len(per_step), [None] * len(heads))
            for full, starts, per_step, heads in self.draws
        ]

    def live_draws(self):
        return [draw for draw in self.draws if draw[3][0] is not None]


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
        least = self.stride if self.form == "short" else None
        self.model = Model(self.max_steps, reduction, least, within)
        self.model.span = 2 * self.stride if self.fixed else None
        self.samples = []
        """Sample, (episode, step) its entries' clips begin at, entries per clip, and whether its
        memory is "known", "unknown" or "forgotten"."""
        self.episode = 0

    def check(self):
        rb, model = self.rb, self.model
        steps = model.steps()
        first = model.came - len(steps)
        assert rb.storage.first_number == first
        assert steps == (starts_of(rb, slice(None)) if steps else [])
        number = {step: first + i for i, step in enumerate(steps)}
        expected = {number[k]: (model.priority[k] + 1e-3) ** self.alpha for k in model.open()}
        assert leaves(rb) == pytest.approx(expected, rel=1e-5)
        if steps:
            assert priorities(rb) == pytest.approx(model.priority, rel=1e-6)

    def values(self, n):
        return [x / 8 for x in self.choose(st.lists(st.integers(0, 40), min_size=n, max_size=n))]

    def write(self):
        for length in self.choose(st.lists(st.integers(1, 8), min_size=1, max_size=3)):
            self.rb.extend(self.make.vectors([length], first_id=self.episode))
            self.model.write(self.episode, length)
            self.episode += 1
            if self.model.within:  # the largest stored priority is that of when it is looked at
                ring(self.rb)

    def sample(self):
        model = self.model
        slice_len = 2 if self.fixed else self.choose(st.integers(1, 3))
        if not model.clips(slice_len * self.stride):
            with pytest.raises(RuntimeError):
                self.rb.sample(2 * slice_len)
            return
        model.span = slice_len * self.stride
        sample = self.rb.sample(2 * slice_len)
        flat = sample.reshape(-1)
        firsts = flat["next", "truncated"].flatten().roll(1).nonzero().flatten().tolist()
        heads = [(int(flat["episode"][i]), int(flat["step"][i])) for i in firsts]
        spans = [b - a for a, b in zip(firsts, [*firsts[1:], len(flat)], strict=True)]
        per_step = [h for h, n in zip(heads, spans, strict=True) for _ in range(n)]
        index = flat["index"].tolist()
        model.draws.append((index, [index[i] for i in firsts], per_step, heads))
        self.samples.append([sample, per_step, spans, "known"])
        weight = {k: (model.priority[k] + 1e-3) ** self.alpha for k in model.open()}
        least = min(weight.values())
        expected = [(weight[k] / least) ** -0.9 for k in per_step]
        assert flat["priority_weight"].tolist() == pytest.approx(expected, rel=1e-4)

    def update_sample(self):
        if not self.samples:
            return
        sample, per_step, spans, memory = self.choose(st.sampled_from(self.samples))
        index = sample["index"]
        flat = index.flatten().tolist()
        ways = ["td", "clone", "numpy"] if len(flat) > 1 else []
        ways += ["view"] if memory != "unknown" else []
        ways += ["starts"] if spans[0] == spans[1] and memory != "unknown" else []
        if not ways:
            return
        way, values = self.choose(st.sampled_from(ways)), self.values(len(flat))
        known = per_step if memory == "known" else [None] * len(per_step)
        update, shaped = self.rb.update_priority, torch.tensor(values).view(index.shape)
        if way == "view":
            ends = st.lists(st.integers(0, len(flat)), min_size=2, max_size=2)
            part = slice(*sorted(self.choose(ends)))
            values, known = values[part], known[part]
            given_ = index.view(-1)[part], torch.tensor(values)
        elif way == "starts":
            values, known = values[:2], known[:: spans[0]]
            given_ = index.view(2, -1)[:, 0], torch.tensor(values)
        elif way == "td":
            update, given_ = self.rb.update_tensordict_priority, (sample.set("td_error", shaped),)
            if self.form == "clips":  # TorchRL reduces each row by itself
                values = [self.model.reduce(row) for row in shaped.tolist()]
                known, flat = known[:: spans[0]], flat[:: spans[0]]
        else:
            given_ = (index.clone() if way == "clone" else index.numpy().copy()), shaped
        if way in ("clone", "numpy") or (way == "td" and memory == "unknown"):
            try:
                known = self.model.means(flat)
            except IndexError:
                with pytest.raises(IndexError, match="so many steps are stored"):
                    update(*given_)
                return
        update(*given_)
        self.model.update(known, values)

    def update_stored(self):
        n = len(self.model.steps())
        if n:
            index = self.choose(st.lists(st.integers(-1, n - 1), min_size=1, max_size=6))
            values = self.values(len(index))
            self.rb.update_priority(torch.tensor(index), torch.tensor(values))
            self.model.update(self.model.means(index), values)

    def anneal(self):
        self.alpha = self.choose(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
        self.rb.sampler.alpha = self.alpha

    def empty(self):
        self.rb.empty()
        self.model.episodes, self.model.priority, self.model.largest = [], {}, 1.0

    def restore(self):
        """In another buffer: only copies of whole indices are known there."""
        if self.choose(st.booleans()):
            self.rb = pickle.loads(pickle.dumps(self.rb))
        else:
            other = buffer(max_steps=self.max_steps, **self.kwargs)
            other.load_state_dict(self.rb.state_dict())
            self.rb = other
        self.model.draws = self.model.live_draws()
        self.samples = [[*sample[:3], "unknown"] for sample in self.samples]

    def reload(self):
        """In the same buffer: what the memory of an index stood for may be something else."""
        self.rb.load_state_dict(self.rb.state_dict())
        live = self.model.live_draws()
        self.model.forget_draws()
        self.model.draws += live
        self._forget_memory()

    def replace(self):
        """Another buffer loads the storage: nothing that the sampler knows is of that."""
        ring(self.rb)
        self.rb.storage.load_state_dict(self.rb.storage.state_dict())
        self.model.largest = 1.0
        self.model.priority = dict.fromkeys(self.model.steps(), 1.0)
        self.model.forget_draws()
        self._forget_memory()

    def _forget_memory(self):
        self.samples = [
            [*s[:3], "unknown" if s[3] == "unknown" else "forgotten"] for s in self.samples
        ]


OPERATIONS = [
    *["write"] * 3,
    *["sample"] * 4,
    *["update_sample"] * 4,
    "update_stored",
    "anneal",
    "empty",
    "restore",
    "reload",
    "replace",
]


@settings(deadline=None, max_examples=200)
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
    """Probability of each storage index that a clip begins at."""
    model = Model(rb.storage.max_size, "max", least, False)
    model.episodes = list(enumerate(rb.storage.lengths.tolist()))
    open_, steps = set(model.clips(span)), model.steps()
    weight = {i: (priority[i] + eps) ** alpha for i in range(len(steps)) if steps[i] in open_}
    return {i: w / sum(weight.values()) for i, w in weight.items()}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("strict", "stride"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_clips_are_drawn_by_their_priority(make, alpha, dtype, strict, stride):
    lengths, span, eps = [3, 4, 5, 1, 9, 2], 4, 0.01
    slice_len = span // stride
    rb = buffer(
        max_steps=sum(lengths),
        slice_len=slice_len,
        stride=stride,
        strict_length=strict,
        alpha=alpha,
        eps=eps,
        dtype=dtype,
        seed=3,
    )
    rb.extend(make.vectors([7] * 12))
    rb.sampler.sample(rb.storage, slice_len)
    rb.extend(make.vectors([*lengths], seed=1, first_id=12))
    priority = [((7 * i) % 11) / 4 for i in range(sum(lengths))]
    rb.update_priority(torch.arange(len(priority)), torch.tensor(priority))
    expected = law(rb, priority, alpha, eps, span, None if strict else stride)
    counts, draws = dict.fromkeys(expected, 0), 0
    for _ in range(40):
        index, info = rb.sampler.sample(rb.storage, 500 * slice_len)
        for i in index[info["next", "truncated"].squeeze(-1).roll(1)].tolist():
            counts[i] += 1
            draws += 1
    assert draws == 20000
    chi2 = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    # The 0.9999 quantile of chi-square with 12 degrees of freedom is 39.1.
    assert len(expected) <= 13
    assert chi2 < 39.1


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_make_up_for_the_draw(make, layout, beta):
    rb = buffer(slice_len=2, layout=layout, alpha=0.5, beta=beta, eps=0.0, batch_size=40)
    rb.extend(make.vectors([6]))
    # The clip at 5 does not exist, and the one at 3 is never drawn: neither is the least.
    rb.update_priority(torch.arange(6), torch.tensor([4.0, 9.0, 16.0, 0.0, 25.0, 1.0]))
    sample, info = rb.sample(return_info=True)
    weight = info["priority_weight"]
    assert weight.shape == info["index"].shape == sample.batch_size
    assert weight.dtype == torch.float32
    assert torch.equal(weight, sample["priority_weight"])
    first = info["index"].view(20, 2)[:, 0]
    expected = (torch.tensor([2.0, 3.0, 4.0, 0.0, 5.0])[first] / 2.0) ** -beta
    torch.testing.assert_close(weight.view(20, 2), expected[:, None].expand(20, 2))
    assert {0, 1, 2, 4} == set(first.tolist())


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensordict_buffer_takes_the_priorities_of_a_sample(make, layout, shape):
    rb = buffer(slice_len=3, layout=layout, batch_size=12)
    rb.extend(make.vectors([6, 7]))
    sample = rb.sample()
    error = torch.rand(*sample.batch_size, *shape)
    sample["td_error"] = error
    before = priorities(rb)
    rb.update_tensordict_priority(sample)
    heads = starts_of(rb, sample["index"].view(4, 3)[:, 0])
    for head, value in zip(heads, error.reshape(4, 3).amax(1).tolist(), strict=True):
        # A clip drawn twice has the largest of both.
        before[head] = max(value, before[head] if before[head] < 1 else 0.0)
    assert priorities(rb) == before


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("how", ["td", "view", "rows", "clone", "starts"])
def test_an_update_after_episodes_left_changes_no_other_clip(make, layout, how):
    rb = buffer(max_steps=12, slice_len=2, layout=layout, seed=2)
    rb.extend(make.vectors([4, 4, 4]))
    sample = rb.sample(12)
    drawn = starts_of(rb, sample["index"].view(6, 2)[:, 0])
    assert {e for e, _ in drawn} == {0, 1, 2}
    rb.extend(make.vectors([4], first_id=3))
    rb.extend(make.vectors([3], first_id=4))
    before = priorities(rb)
    assert {e for e, _ in before} == {2, 3, 4}
    index, new = sample["index"], torch.arange(6) + 2.0
    if how == "td":
        sample["td_error"] = new.repeat_interleave(2).view(index.shape)
        rb.update_tensordict_priority(sample)
    elif how == "view":
        for part, value in zip(index.view(-1).split(4), new.view(3, 2), strict=True):
            rb.update_priority(part, value.repeat_interleave(2))
    elif how == "rows":
        rb.update_priority(index.view(6, 2), new)
    elif how == "clone":
        rb.update_priority(index.clone(), new.repeat_interleave(2).view(index.shape))
    else:
        rb.update_priority(index.view(6, 2)[:, 0].clone(), new)
    expected = dict(before)
    for head, value in zip(drawn, new.tolist(), strict=True):
        if head in expected:
            expected[head] = value
    assert expected != before
    assert priorities(rb) == expected


@pytest.mark.parametrize("who", ["another buffer", "this buffer"])
@pytest.mark.parametrize("how", ["memory", "clone", "starts"])
def test_an_index_of_before_a_load_means_nothing_of_after_it(make, who, how):
    rb = buffer(max_steps=12, slice_len=2)
    rb.extend(make.vectors([6]))
    rb.sample(8)
    saved = rb.state_dict()
    rb.extend(make.vectors([6], first_id=1))
    index = rb.sample(8)["index"]
    # From here on other steps get the numbers that were sampled.
    if who == "this buffer":
        rb.load_state_dict(saved)
    else:
        rb.storage.load_state_dict(saved["_storage"])
    rb.extend(make.vectors([6], seed=5, first_id=2))
    before = priorities(rb)
    given_ = {"memory": index, "clone": index.clone(), "starts": index[::2].clone()}[how]
    rb.update_priority(given_, 5.0)
    assert priorities(rb) == before


def test_an_index_that_was_changed_means_what_it_says(make):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([6]))
    index, _ = rb.sampler.sample(rb.storage, 4)
    index.fill_(3)
    rb.update_priority(index, 5.0)
    assert [i for i, p in enumerate(priorities(rb).values()) if p == 5.0] == [3]


def test_only_so_many_copies_are_known_but_every_index_that_lives(make):
    rb = buffer(max_steps=40, slice_len=2, seed=2)
    rb.extend(make.vectors([40]))
    kept = [rb.sampler.sample(rb.storage, 4)[0] for _ in range(700)]
    heads = starts_of(rb, kept[0])[::2]
    log = rb.sampler._draws
    assert len(log._alive) == 700
    assert len(log._recent) == 256
    rb.extend(make.vectors([40], first_id=1))
    before = priorities(rb)
    rb.update_priority(kept[0], 5.0)
    assert priorities(rb) == before
    rb.update_priority(kept[-1].clone(), 5.0)
    assert priorities(rb) == before
    assert {e for e, _ in heads} == {0}
    kept.clear()
    gc.collect()
    for _ in range(1500):
        rb.sampler.sample(rb.storage, 4)
    assert len(log._alive) <= 1024


def test_the_window_wraps_around_many_times(make):
    rb = buffer(max_steps=17, slice_len=2, alpha=1.0, eps=0.0)
    expected = {}
    for k in range(200):
        length = 2 + (5 * k) % 7
        rb.extend(make.vectors([length], first_id=k))
        if k % 3 == 0:
            p = priorities(rb)
            expected = {key: p[key] for key in p}
            at = torch.tensor([len(rb) - length])
            rb.update_priority(at, float(k % 5 + 1))
            expected[k, 0] = float(k % 5 + 1)
            assert priorities(rb) == expected
    first, held = rb.storage.first_number, leaves(rb)
    assert first > 10 * 17
    steps = list(expected := priorities(rb))
    last = dict(steps)
    assert held == {first + i: expected[e, t] for i, (e, t) in enumerate(steps) if t < last[e]}


def test_a_write_touches_what_came_and_what_left(make, monkeypatch):
    rb = buffer(max_steps=1000, slice_len=4)
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
        weight = (info["index"][::2] + 1.0) ** now
        torch.testing.assert_close(info["priority_weight"][::2], weight ** -(k / 4))
    rb.sampler.alpha = 1.0
    assert leaves(rb) == {i: i + 1.0 for i in range(5)}


def test_the_generator_decides(make):
    data, draws = make.vectors([9, 9]), []
    for seed in (0, 0, 1):
        rb = buffer(slice_len=2, seed=seed)
        rb.extend(data)
        torch.manual_seed(len(draws))
        draws.append(rb.sample(40)["index"].tolist())
    assert draws[0] == draws[1] != draws[2]
    draws = []
    for seed in (0, 0, 1):
        rb = buffer(slice_len=2)
        rb.sampler._rng = None
        rb.extend(data)
        torch.manual_seed(seed)
        draws.append(rb.sample(40)["index"].tolist())
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("how", ["state_dict", "dumps", "pickle"])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("form", [{"slice_len": 2}, {"num_slices": 4}])
def test_a_saved_sampler_goes_on_where_it_was(make, how, prefetch, form, tmp_path):
    def new():
        return buffer(max_steps=30, prefetch=prefetch, batch_size=8, **form)

    def step(rb, k):
        sample = rb.sample()
        if prefetch:  # what is prefetched is drawn before the update
            rb.synchronize()
        sample["td_error"] = (sample["index"] * 7 % 5 + k).float()
        rb.update_tensordict_priority(sample)
        return make.steps(sample)

    rb = new()
    for k in range(12):
        rb.extend(make.vectors([7], seed=k, first_id=k))
        step(rb, k)
    rb.sampler.alpha, rb.sampler.beta = 0.3, 0.5
    rb.extend(make.vectors([6], seed=99, first_id=99))
    twin = new()
    if how == "state_dict":
        twin.load_state_dict(rb.state_dict())
    elif how == "dumps":
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
    else:
        twin = pickle.loads(pickle.dumps(rb))
    assert (twin.sampler.alpha, twin.sampler.beta) == (0.3, 0.5)
    assert twin.sampler._step == rb.sampler._step
    for k in range(12):
        assert step(twin, k) == step(rb, k)
        assert priorities(twin) == priorities(rb)
        assert leaves(twin) == leaves(rb)
        for each in (rb, twin):
            each.extend(make.vectors([5], seed=200 + k, first_id=200 + k))


def test_a_state_is_a_copy_and_can_be_deep_copied(make):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([6]))
    rb.update_priority([0], [3.0])
    state, twin = rb.sampler.state_dict(), copy.deepcopy(rb.sampler)
    rb.update_priority([0, 1], [9.0, 9.0])
    rb.sampler.load_state_dict(state)
    assert list(priorities(rb).values()) == [3.0, *[1.0] * 5]
    rb.set_sampler(twin)
    assert list(priorities(rb).values()) == [3.0, *[1.0] * 5]


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
    rb.update_priority(written, torch.tensor([7.0, 8.0, 9.0]))
    changed = {k: p for k, p in priorities(rb).items() if p != before[k]}
    assert changed == {(105, 0): 7.0, (105, 1): 8.0, (105, 2): 9.0}


def test_steps_can_be_added_one_by_one(make):
    rb = buffer(max_steps=9, slice_len=2)
    for k in range(5):
        for step in make.vectors([4], first_id=k):
            rb.add(step)
    assert rb.storage.lengths.tolist() == [4, 4]
    assert set(priorities(rb).values()) == {1.0}
    assert rb.sample(8).batch_size == (8,)


def test_new_clips_get_the_largest_priority(make):
    for within in (False, True):
        rb = buffer(max_steps=8, slice_len=2, max_priority_within_buffer=within)
        rb.extend(make.vectors([4]))
        assert rb.sampler.default_priority == 1.0
        rb.update_priority(torch.arange(4), torch.tensor([5.0, 0.5, 0.25, 0.0]))
        rb.extend(make.vectors([4], first_id=1))
        assert priorities(rb)[1, 0] == 5.0
        rb.update_priority(torch.arange(8), 0.5)
        rb.extend(make.vectors([4], first_id=2))
        assert priorities(rb)[2, 0] == (0.5 if within else 5.0)
        rb.empty()
        assert rb.sampler.default_priority == 1.0


def test_a_buffer_on_a_filled_storage_can_sample(make):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([5, 6]))
    other = TensorDictReplayBuffer(
        storage=rb.storage, writer=EpisodeWriter(), sampler=PrioritizedClipSampler(slice_len=3)
    )
    assert set(priorities(other).values()) == {1.0}
    assert other.sample(9).batch_size == (9,)
    rb.set_sampler(PrioritizedClipSampler(slice_len=3))
    assert rb.sample(9).batch_size == (9,)


def test_buffers_on_one_storage_keep_their_own_priorities(make):
    one = buffer(max_steps=12, slice_len=2)
    two = TensorDictReplayBuffer(
        storage=one.storage, writer=EpisodeWriter(), sampler=PrioritizedClipSampler(slice_len=3)
    )
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
            # The priority says which clip it is of.
            head = clips["episode"][:, 0] * 100.0 + clips["step"][:, 0]
            rb.update_priority(info["index"], head.repeat_interleave(3))
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


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None, max_examples=100)
@given(
    clips=st.lists(st.integers(0, 5), max_size=20),
    reduction=st.sampled_from(list(REDUCTIONS)),
    seed=st.integers(0, 1000),
)
def test_one_priority_is_left_for_each_clip(clips, reduction, seed):
    values = torch.randint(9, (len(clips),), generator=torch.Generator().manual_seed(seed)) / 4
    unique, reduced = reduce_by_clip(torch.tensor(clips).long(), values, reduction)
    grouped = {}
    for clip, value in zip(clips, values.tolist(), strict=True):
        grouped.setdefault(clip, []).append(value)
    expected = {clip: REDUCTIONS[reduction](each) for clip, each in sorted(grouped.items())}
    assert unique.tolist() == list(expected)
    assert reduced.tolist() == pytest.approx(list(expected.values()))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({}, TypeError, "exactly one of slice_len and num_slices"),
        ({"max_capacity": 0}, ValueError, "max_capacity must be a positive integer, got 0"),
        ({"max_capacity": 2.0}, ValueError, "max_capacity must be a positive integer, got 2.0"),
        ({"alpha": -0.1}, ValueError, "alpha must be a finite number of at least 0, got -0.1"),
        ({"beta": float("nan")}, ValueError, "beta must be a finite number of at least 0, got nan"),
        ({"eps": float("inf")}, ValueError, "eps must be a finite number of at least 0, got inf"),
        ({"reduction": "sum"}, ValueError, "reduction must be .*, got 'sum'"),
        ({"dtype": torch.int64}, ValueError, "dtype must be torch.float32 or .*, got torch.int64"),
        ({"layout": "x"}, ValueError, "layout must be"),
        ({"layout": "clips", "strict_length": False}, ValueError, "use strict_length=True"),
        ({"stride": 0}, ValueError, "stride must be a positive integer, got 0"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        PrioritizedClipSampler(**({"slice_len": 2} if kwargs else {}), **kwargs)


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
        (
            [[0, 1, 2], [3, 4, 5]],
            torch.ones(3, 2),
            ValueError,
            r"\(3, 2\) for index of .* \(2, 3\)",
        ),
        ([0, 9], [1.0, 2.0], IndexError, "index must be below 9: .* got values up to 9"),
        ([0.0, 1.0], [1.0, 2.0], TypeError, "index must hold integers, got torch.float32"),
        ([True, False], [1.0, 2.0], TypeError, "index must hold integers, got torch.bool"),
    ],
)
def test_a_refused_update_changes_nothing(make, index, priority, error, message):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([9]))
    rb.update_priority([2], 3.0)
    before = priorities(rb), leaves(rb), rb.sampler.default_priority
    with pytest.raises(error, match=message):
        rb.sampler.update_priority(index, priority, storage=rb.storage)
    assert (priorities(rb), leaves(rb), rb.sampler.default_priority) == before


def test_indices_of_nothing_are_skipped(make):
    rb = buffer(slice_len=2)
    rb.extend(make.vectors([4]))
    for index, priority in (([], []), ([], 3.0), ([-1, -1], [4.0, 5.0]), (-1, 4.0)):
        rb.sampler.update_priority(index, priority, storage=rb.storage)
    assert set(priorities(rb).values()) == {1.0}
    assert rb.sampler.default_priority == 1.0
    rb.update_priority(2, 4)
    assert list(priorities(rb).values()) == [1.0, 1.0, 4.0, 1.0]


def test_what_cannot_be_sampled_is_said(make):
    rb = buffer(slice_len=4, eps=0.0)
    with pytest.raises(RuntimeError, match="nothing is stored"):
        rb.sample(8)
    with pytest.raises(IndexError, match="index must be below 0"):
        rb.update_priority([0], [1.0])
    rb.extend(make.vectors([3]))
    with pytest.raises(RuntimeError, match="a clip of 4 steps: the longest has 3"):
        rb.sample(8)
    rb.extend(make.vectors([6]))
    with pytest.raises(RuntimeError, match="batch_size=6 and slice_len=4"):
        rb.sample(6)
    rb.update_priority(torch.arange(9), 0.0)
    with pytest.raises(RuntimeError, match="all priorities are zero; use eps > 0"):
        rb.sample(8)
    rb.update_priority(torch.arange(9), 3e38)
    rb.sampler.alpha = 1.5
    with pytest.raises(RuntimeError, match=r"more than torch.float32 holds: .*dtype=torch.float64"):
        rb.sample(8)
    with pytest.raises(TypeError, match="EpisodeStorage, got LazyTensorStorage"):
        PrioritizedClipSampler(slice_len=2).sample(LazyTensorStorage(10), 4)
    with pytest.raises(TypeError, match="EpisodeStorage, got NoneType"):
        PrioritizedClipSampler(slice_len=2).update_priority([0], [1.0])


def test_the_capacity_must_hold_the_storage(make):
    rb = buffer(max_steps=20, slice_len=2, max_capacity=19)
    rb.extend(make.vectors([5]))
    with pytest.raises(ValueError, match="at least the storage's max_steps=20, got 19"):
        rb.sample(4)
    assert rb.sampler.max_size == 19
    rb = buffer(max_steps=20, slice_len=2)
    assert rb.sampler.max_size is None
    rb.extend(make.vectors([5] * 4))
    rb.sample(4)
    assert rb.sampler.max_size == 20


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
        ids = torch.full((len(done),), episode)
        ends = torch.tensor(done, dtype=torch.bool)
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
        with pytest.raises(IndexError):
            rb.update_priority(index, torch.zeros(2))
        return
    rb.update_priority(index, torch.zeros(2))
    with storage.lock:
        sampler._priorities.follow(storage)
        ring = sampler._priorities.ring
        priority = ring.priority[ring.slots(torch.arange(ring.first, ring.end))]
    assert (priority == 0).tolist() == (storage[:]["episode"] == 3).tolist()
