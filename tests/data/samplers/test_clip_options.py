"""Clips that are padded, reach beyond their episode or begin with steps that only warm up a state."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.modules import GRUModule, set_recurrent_mode

from tests.buffers import buffer_of
from tests.tiers import examples, slow
from torchrl_mt.data import ClipSampler, PrioritizedClipSampler

SAMPLERS = [ClipSampler, PrioritizedClipSampler]
MASK = ("collector", "mask")


def buffer(sampler, *, max_steps=60, seed=0):
    return buffer_of(max_steps, sampler, cls=TensorDictReplayBuffer, seed=seed)


def vectors(make, lengths):
    """Episodes whose next states tell, too, whether they are the first of one: none is."""
    data = make.vectors(lengths)
    data["next", "is_init"] = torch.zeros_like(data["is_init"])
    return data


def clips_of(sample):
    """The clips of a flat sample: where they end is marked."""
    ends = (sample["next", "truncated"].reshape(-1).nonzero().flatten() + 1).tolist()
    return [sample[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


# ---- padding ------------------------------------------------------------------------------------


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    slice_len=st.integers(1, 6),
    stride=st.integers(1, 2),
    sampler=st.sampled_from(SAMPLERS),
    layout=st.sampled_from(["flat", "clips"]),
    burn_in=st.integers(0, 2),
    turns=st.booleans(),
)
def test_padding_repeats_the_last_step_of_shorter_clips(
    make, lengths, slice_len, stride, sampler, layout, burn_in, turns
):
    turns = turns and stride == 1
    burn_in = min(burn_in, slice_len - 1)
    options = {"slice_len": slice_len, "stride": stride, "strict_length": False, "burn_in": burn_in}
    plain = buffer(sampler(**options))
    padded = buffer(sampler(**options, pad_output=True, layout=layout))
    data = make.turns(lengths) if turns else vectors(make, lengths)
    for each in (plain, padded):
        each.extend(data.clone())
    if max(plain.storage.lengths) < stride:
        return
    num = 5
    expected, sample = (each.sample(num * slice_len) for each in (plain, padded))
    shape = (num, slice_len) if layout == "clips" else (num * slice_len,)
    assert sample.batch_size == sample[MASK].shape == shape
    assert sample[MASK].dtype == torch.bool
    mask = sample[MASK].view(num, slice_len)
    rows = sample if layout == "clips" else sample.split(slice_len)
    marks = ("next", "truncated"), ("next", "done"), ("next", "is_init"), "burn_in", "is_init"
    for row, kept, clip in zip(rows, mask, clips_of(expected), strict=True):
        n = len(clip)
        assert kept.tolist() == [i < n for i in range(slice_len)]
        assert make.steps(row.exclude(MASK)[:n]) == make.steps(clip)
        *_, last = make.steps(clip.exclude(*marks, "index"))
        assert make.steps(row.exclude(MASK, *marks, "index")[n:]) == [last] * (slice_len - n)


@pytest.mark.parametrize(("length", "padded"), [(2, True), (3, True), (7, True), (5, False)])
def test_padding_and_marks_are_those_of_slice_sampler(make, length, padded):
    """Of the only episode there is, which clips at least as long hold whole."""
    options = {"slice_len": 5, "strict_length": not padded, "pad_output": padded}
    ours = buffer(ClipSampler(**options))
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SliceSampler(**options, traj_key="episode")
    )
    for rb in (ours, theirs):
        rb.extend(make.vectors([length]))
    if length > 5:  # theirs tells that nothing is padded by giving no mask
        assert ours.sample(10)[MASK].all()
        return
    ours, theirs = (rb.sample(10).exclude("index") for rb in (ours, theirs))
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert torch.equal(ours[key], theirs[key].view_as(ours[key])), key


@pytest.mark.parametrize("layout", ["flat", "clips"])
@pytest.mark.parametrize("reduction", ["max", "mean", "min", "median"])
def test_priorities_of_padding_are_left_out(make, layout, reduction):
    options = {"slice_len": 4, "strict_length": False, "pad_output": True, "layout": layout}
    rb = buffer(PrioritizedClipSampler(**options, reduction=reduction, alpha=1.0, beta=1.0))
    rb.extend(vectors(make, [1, 2, 3, 6]))
    for _ in range(16):  # until every clip was drawn
        sample = rb.sample(24)
        # The priority of each step is that of its episode; that of padding is far off.
        given = torch.where(sample[MASK], 1.0 + sample["episode"], 1e6 if reduction == "max" else 0)
        if layout == "flat":
            sample["td_error"] = given
            rb.update_tensordict_priority(sample)
        else:  # that reduces rows by itself
            rb.update_priority(sample["index"], given)
    sample = rb.sample(24)
    # Weights are as the inverse of the priorities, which go from 1, of the first episode, to 4.
    expected = 1.0 / (1 + sample["episode"])
    torch.testing.assert_close(sample["priority_weight"], expected)


# ---- beyond the episode -------------------------------------------------------------------------


def reach(side, clip):
    return clip - 1 if side is True else min(int(side), clip - 1)


def all_clips(lengths, slice_len, span, strict):
    """Every clip that may be drawn: its episode, first step and one past its last."""
    found = []
    for i, length in enumerate(lengths):
        if strict and length < slice_len:
            continue
        clip = min(slice_len, length)
        for begin in range(-reach(span[0], clip), length - clip + reach(span[1], clip) + 1):
            found.append((i, max(begin, 0), min(begin + clip, length)))
    return Counter(found)


SPANS = [True, slow(1), slow(2), *map(slow, [(True, False), (False, True)]), (1, 3), slow((0, 2))]


@pytest.mark.parametrize("weighting", ["clip", "episode"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("span", SPANS)
def test_clips_reach_beyond_their_episode(make, span, strict, weighting):
    lengths, slice_len = [2, 7, 1, 4, 5], 4
    options = {"span": span, "strict_length": strict, "weighting": weighting}
    rb = buffer(ClipSampler(slice_len=slice_len, **options))
    rb.extend(vectors(make, lengths))
    sides = span if isinstance(span, tuple) else (span, span)
    expected = all_clips(lengths, slice_len, sides, strict)
    drawn = Counter()
    for clip in clips_of(rb.sample(4000 * slice_len)):
        steps = clip["step"].tolist()
        assert steps == list(range(steps[0], steps[-1] + 1))
        assert len(clip["episode"].unique()) == 1
        assert bool(clip["is_init"][0])
        drawn[int(clip["episode"][0]), steps[0], steps[-1] + 1] += 1
    assert drawn.keys() == expected.keys()
    per_episode = Counter()
    for (i, _, _), ways in expected.items():
        per_episode[i] += ways
    if weighting == "clip":
        assert rb.sampler._sampleable_count(rb.storage, slice_len) == sum(expected.values())
    for clip, ways in expected.items():
        chance = ways / expected.total()
        if weighting == "episode":
            chance = ways / per_episode[clip[0]] / len(per_episode)
        expectation = 4000 * chance
        assert abs(drawn[clip] - expectation) < 5 * max(expectation, 1) ** 0.5


def test_clips_beyond_their_episode_are_padded_to_rows(make):
    options = {"strict_length": False, "pad_output": True, "layout": "clips"}
    rb = buffer(ClipSampler(slice_len=4, span=True, **options))
    rb.extend(vectors(make, [2, 7, 5]))
    sample = rb.sample(4 * 500)
    assert sample.batch_size == (500, 4)
    length = sample[MASK].sum(1)
    assert set(length.tolist()) == {1, 2, 3, 4}
    last = sample["next", "truncated"].squeeze(-1).nonzero()
    assert torch.equal(last[:, 1] + 1, length)
    assert (sample["step"].diff(dim=1)[sample[MASK][:, 1:]] == 1).all()
    assert (sample["step"].diff(dim=1)[~sample[MASK][:, 1:]] == 0).all()


# ---- burn-in ------------------------------------------------------------------------------------


@examples(15)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    slice_len=st.integers(2, 6),
    burn_in=st.integers(1, 5),
    sampler=st.sampled_from(SAMPLERS),
    strict=st.booleans(),
    layout=st.sampled_from(["flat", "clips"]),
)
def test_the_first_steps_of_a_clip_warm_up_unless_its_episode_begins_there(
    make, lengths, slice_len, burn_in, sampler, strict, layout
):
    burn_in = min(burn_in, slice_len - 1)
    strict = strict or layout == "clips"
    if strict and max(lengths) < slice_len:
        return
    rb = buffer(
        sampler(slice_len=slice_len, burn_in=burn_in, strict_length=strict, layout=layout),
        max_steps=100,
    )
    rb.extend(vectors(make, lengths))
    sample = rb.sample(8 * slice_len)
    assert sample["burn_in"].shape == sample.batch_size
    assert sample["burn_in"].dtype == torch.bool
    for clip in clips_of(sample.reshape(-1)):
        begins = int(clip["step"][0]) == 0
        expected = [not begins and t < burn_in for t in range(len(clip))]
        assert clip["burn_in"].tolist() == expected


def test_clips_of_a_number_have_a_burn_in_below_their_length(make):
    rb = buffer(ClipSampler(num_slices=2, burn_in=2))
    rb.extend(vectors(make, [9]))
    assert rb.sample(6)["burn_in"].view(2, 3)[:, 2].tolist() == [False, False]
    with pytest.raises(ValueError, match="burn_in must be less than the steps of a clip, 2"):
        rb.sample(4)


# ---- what the next states begin with ------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_recurrent_network_begins_afresh_with_each_clip_on_both_branches(make, sampler, strict):
    torch.manual_seed(0)
    gru = GRUModule(3, 4, in_keys=["observation", "state"], out_keys=["out", ("next", "state")])
    rb = buffer(sampler(slice_len=5, strict_length=strict))
    rb.extend(vectors(make, [3, 9, 6, 2]))
    sample = rb.sample(50)

    def run(branch):
        data = branch.select("observation", "is_init").clone()
        with set_recurrent_mode(True), torch.no_grad():
            return gru(data)["out"]

    for of in (lambda data: data, lambda data: data["next"]):
        alone = [run(of(clip)) for clip in clips_of(sample)]
        torch.testing.assert_close(run(of(sample)), torch.cat(alone))


def test_the_stored_flags_of_next_states_stay(make):
    rb = buffer(ClipSampler(slice_len=2))
    rb.extend(vectors(make, [5]))
    rb.sample(20)
    assert not rb[:]["next", "is_init"].any()
    rb = buffer(ClipSampler(slice_len=2, init_key=None))
    rb.extend(vectors(make, [5]))
    assert not rb.sample(20)["next", "is_init"].any()


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_output": True}, "pad_output=True pads .* strict_length=False or with span"),
        ({"span": True, "layout": "clips"}, 'layout="clips" needs .* pad_output=True'),
        ({"strict_length": False, "layout": "clips"}, 'layout="clips" needs'),
        ({"span": 4}, "span must be .* below slice_len.* got 4"),
        ({"span": (1, 4)}, r"span must be .* got \(1, 4\)"),
        ({"span": (1,)}, "span must be"),
        ({"span": -1}, "span must be"),
        ({"span": 1.0}, "span must be"),
        ({"span": True, "stride": 2}, "span needs stride=1, got span=True and stride=2"),
        ({"span": True, "selector": lambda *_: None}, "selector chooses .* no span"),
        ({"burn_in": -1}, "burn_in must be an integer of at least 0, got -1"),
        ({"burn_in": True}, "burn_in must be an integer"),
        ({"burn_in": 4}, "burn_in must be less than the steps of a clip, 4"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClipSampler(slice_len=4, **options)


def test_the_mask_takes_the_place_of_a_stored_one(make):
    data = vectors(make, [2, 6])
    data["collector"] = TensorDict({"mask": torch.ones(8, dtype=torch.bool)}, [8])
    rb = buffer(ClipSampler(slice_len=4, strict_length=False, pad_output=True))
    rb.extend(data)
    sample = rb.sample(400)
    short = (sample["episode"] == 0).view(-1, 4)[:, 0]
    assert (sample[MASK].view(-1, 4)[short] == torch.tensor([True, True, False, False])).all()
