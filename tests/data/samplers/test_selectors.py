"""Which clips the ready-made selectors choose, and at which step."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.buffers import buffer_of
from tests.data.samplers.laws import chi_square
from tests.data.saving import HOW, saved
from tests.tiers import examples, pairs
from torchrl_mt.data import (
    ClipSampler,
    EpisodeStorage,
    PrioritizedClipSampler,
    linear_mix,
    recent,
    uniform,
)


def buffer(selector=None, storage=None, seed=0, **kwargs):
    return buffer_of(
        EpisodeStorage(100) if storage is None else storage,
        ClipSampler(slice_len=3, selector=selector, **kwargs),
        seed=seed,
        batch_size=12,
    )


def always(clip, step, storage, num_slices, span):
    """Choose one clip."""
    return torch.full((num_slices,), clip)


# ---- laws ---------------------------------------------------------------------------------------


def test_recent_and_uniform_draw_uniformly(make):
    rb = buffer()
    rb.extend(make.vectors([9, 2, 7]))  # 7 and 5 clips
    for selector, step, clips in [
        (uniform, 0, range(12)),
        (recent(4), 10**9, range(8, 12)),
        (recent(6, until=7), 6, range(6, 12)),
        (recent(6, until=7), 7, range(12)),
        (recent(40), 0, range(12)),
        (linear_mix(recent(6), recent(6), 10), 5, range(6, 12)),
    ]:
        drawn = selector(step, rb.storage, 6000, 3)
        # The 0.9999 quantile of chi-square with 11 degrees of freedom is 37.4.
        assert drawn.dtype == torch.int64
        assert chi_square(drawn.tolist(), dict.fromkeys(clips, 1)) < 37.4


@examples()
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda x: max(x) > 2),
    n=st.integers(1, 30),
    until=st.none() | st.integers(0, 9),
    step=st.integers(0, 9),
)
def test_recent_draws_from_the_newest_clips_until_its_step(make, lengths, n, until, step):
    rb = buffer(recent(n, until))
    rb.extend(make.vectors(lengths))
    clips = [(i, k) for i, length in enumerate(lengths) for k in range(length - 2)]
    if until is None or step < until:
        clips = clips[-n:]
    index, _ = rb.sampler.sample(rb.storage, 90 * len(clips), step=step)
    drawn = rb.storage.get(index)[::3]
    found = zip(drawn["episode"].tolist(), drawn["step"].tolist(), strict=True)
    assert chi_square(found, dict.fromkeys(clips, 1)) < 100


@examples(30)
@given(step=st.integers(0, 60), steps=st.integers(1, 50), num=st.integers(1, 9))
def test_linear_mix_gives_each_its_share(make, step, steps, num):
    storage = EpisodeStorage(100)
    storage.append(make.vectors([9]))
    selector = linear_mix(partial(always, 1), partial(always, 5), steps)
    torch.manual_seed(0)
    share = min(step / steps, 1) * num
    draws = 100
    counts, places = [], torch.zeros(num)
    for _ in range(draws):
        chosen = selector(step, storage, num, 3)
        assert set(chosen.tolist()) <= {1, 5}
        counts.append(int((chosen == 5).sum()))
        places += chosen == 5
    assert set(counts) <= {math.floor(share), math.ceil(share)}
    # Five standard deviations of the mean, and of how often a place has the second's clip.
    part = share % 1
    assert abs(sum(counts) / draws - share) <= 5 * math.sqrt(part * (1 - part) / draws) + 1e-9
    p = share / num
    assert bool(((places / draws - p).abs() <= 5 * math.sqrt(p * (1 - p) / draws) + 1e-6).all())


def test_selectors_nest(make):
    rb = buffer(linear_mix(partial(always, 0), linear_mix(uniform, recent(1), 20), 10))
    rb.extend(make.vectors([9]))
    steps = [rb.sample()["step"][::3].tolist() for _ in range(30)]
    assert steps[0] == [0] * 4
    assert len({clip for clips in steps[10:15] for clip in clips}) > 2
    assert steps[20:] == [[6] * 4] * 10


# ---- generators ---------------------------------------------------------------------------------


def drawing(step, storage, num_slices, span):
    """A selector of a user."""
    high = storage.num_clips(span)
    return torch.randint(high, (num_slices,), generator=storage.generator)


SELECTORS = {
    "uniform": uniform,
    "recent": recent(5, until=4),
    "linear_mix": linear_mix(recent(2), uniform, 8),
    "own": drawing,
}


def test_uniform_is_what_a_sampler_without_a_selector_draws(make):
    plain, selected = buffer(), buffer(uniform)
    for rb in (plain, selected):
        rb.extend(make.vectors([9, 8, 2]))
    for _ in range(5):
        assert torch.equal(plain.sample()["step"], selected.sample()["step"])


@pytest.mark.parametrize(("name", "how"), pairs(SELECTORS, HOW))
def test_samples_go_on_as_they_would_have(make, name, how, tmp_path):
    rb, other = buffer(SELECTORS[name]), buffer(SELECTORS[name], seed=9)
    rb.extend(make.vectors([9, 8, 2]))
    for _ in range(3):
        rb.sample()
    same = saved(rb, how, tmp_path, other)
    assert same.sampler.step == 3
    torch.rand(5)
    for _ in range(6):
        expected, found = rb.sample(), same.sample()
        assert make.steps(found) == make.steps(expected)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("others", [None, 7])
def test_each_buffer_on_a_storage_has_its_own_generator(make, name, others):
    alone, rb = buffer(SELECTORS[name]), buffer(SELECTORS[name])
    for each in (alone, rb):
        each.extend(make.vectors([9, 8, 2]))
    beside = buffer(SELECTORS[name], storage=rb.storage, seed=others)
    assert rb.storage.generator is beside.storage._rng
    for _ in range(6):
        beside.sample()
        assert torch.equal(rb.sample()["step"], alone.sample()["step"])
    rb.sampler.selector = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        rb.sample()
    assert rb.storage.generator is beside.storage._rng


# ---- the step -----------------------------------------------------------------------------------


def test_the_step_is_counted_set_and_given(make):
    def selector(step, *args):
        told.append(step)
        return always(0, step, *args)

    told, sampler, rb = [], PrioritizedClipSampler(slice_len=3), buffer(selector)
    rb.extend(make.vectors([9]))
    assert rb.sampler.step == 0
    rb.sample(), rb.sample()
    assert rb.sampler.step == 2
    rb.sampler.step = 70
    rb.sample(), rb.sample()
    assert rb.sampler.step == 72
    for learner in range(100, 130, 3):  # It never drifts from the learner's.
        rb.sampler.sample(rb.storage, 12, step=learner)
        assert rb.sampler.step == learner + 1
    rb.sample()
    rb.sampler.sample(rb.storage, 12, step=np.int64(5))
    rb.sample()
    assert told == [0, 1, 70, 71, *range(100, 130, 3), 128, 5, 6]
    assert rb.sampler.state_dict() == {"step": 7}
    sampler.sample(rb.storage, 12, step=4)
    assert sampler.step == sampler.state_dict()["step"] == 5


def test_a_refused_sample_leaves_the_step(make):
    rb = buffer(lambda *_: None)
    rb.extend(make.vectors([9]))
    rb.sampler.step = 3
    sample = partial(rb.sampler.sample, rb.storage, 12)
    for call in (rb.sample, partial(sample, step=9)):
        with pytest.raises(TypeError, match="selector must give clip indices"):
            call()
    for step in (-1, 1.0, True, "4", torch.tensor(2)):
        for call in (partial(setattr, rb.sampler, "step", step), partial(sample, step=step)):
            with pytest.raises(ValueError, match="step must be an integer of at least 0, got"):
                call()
    assert rb.sampler.step == 3


# ---- bad arguments ------------------------------------------------------------------------------


OF_TWO = r"integers of shape \(2,\), got torch.float32 and \(1,\)"


def of_floats(*_):
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("make_selector", "error", "message"),
    [
        (lambda: recent(0), ValueError, "n must be a positive integer, got 0"),
        (lambda: recent(2.0), ValueError, "n must be a positive integer, got 2.0"),
        (lambda: recent(2, until=-1), ValueError, "until must be an integer of at least 0, got -1"),
        (lambda: linear_mix(uniform, uniform, 0), ValueError, "steps must be a positive integer"),
        (lambda: linear_mix(3, uniform, 9), TypeError, "first must be a function .* got int"),
        (lambda: linear_mix(uniform, None, 9), TypeError, "second must be a function .* NoneType"),
        (lambda: uniform, RuntimeError, "no stored episode holds a clip of 5 steps"),
        (lambda: recent(3), RuntimeError, "no stored episode holds a clip of 5 steps"),
        (
            lambda: linear_mix(uniform, of_floats, 2),
            ValueError,
            r"\(2,\), got torch.float32 and \(1,\)",
        ),
    ],
)
def test_wrong_calls_are_refused(make, make_selector, error, message):
    storage = EpisodeStorage(10)
    storage.append(make.vectors([4]))
    with pytest.raises(error, match=message):
        make_selector()(1, storage, 4, 5 if error is RuntimeError else 3)
