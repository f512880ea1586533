import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.buffers import buffer_of
from tests.data import makers
from tests.data.samplers.laws import chi_square
from tests.refusals import check_refused, refused
from tests.tiers import examples, in_fast_tier
from torchrl_mt.data import EpisodeSampler


def buffer(max_steps=1000, **kwargs):
    return buffer_of(max_steps, EpisodeSampler, seed=0, **kwargs)


def ids(make, sample):
    """The episodes of a sample, which must be whole."""
    split = make.split(sample)
    for episode in split:
        steps = episode["step"]
        assert torch.equal(steps, torch.arange(len(steps)))
    return [int(e["episode"][0]) for e in split]


def test_draws_with_replacement_are_uniform(make):
    rb = buffer()
    rb.extend(make.vectors([3, 1, 4, 2]))
    # The 0.9999 quantile of chi-square with 3 degrees of freedom is 21.1.
    assert chi_square(ids(make, rb.sample(8000)), dict.fromkeys(range(4), 1)) < 21.1


@examples(50, few=8)
@given(data=st.data(), grouped=st.booleans())
def test_an_epoch_gives_each_stored_episode_or_group_once(make, data, grouped):
    rb = buffer(
        max_steps=data.draw(st.integers(6, 30)),
        replacement=False,
        group_key="group" if grouped else None,
    )
    group_of, given_out = [], []
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) or not group_of:
            groups = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
            rb.extend(groups_of(make, groups, first_id=len(group_of)))
            group_of += groups if grouped else range(len(group_of), len(group_of) + len(groups))
            continue
        live = set(range(len(group_of) - rb.storage.num_episodes, len(group_of)))
        if live <= set(given_out):
            given_out = []
        left = live - set(given_out)
        n = data.draw(st.integers(1, 4))
        got = ids(make, rb.sample(n))
        drawn = list(dict.fromkeys(group_of[i] for i in got))
        assert len(drawn) == min(n, len({group_of[i] for i in left}))
        assert got == [i for g in drawn for i in sorted(left) if group_of[i] == g]
        given_out += got
        assert len(set(got)) == len(got)
        assert rb.sampler.ran_out == (live <= set(given_out))


def groups_of(make, groups, first_id=0):
    """Episodes of 1 to 3 steps that belong to these groups."""
    data = make.vectors([1 + g % 3 for g in groups], first_id=first_id)
    data["group"] = torch.tensor(groups)[data["episode"] - first_id]
    return data


@examples(25)
@given(data=st.data(), replacement=st.booleans())
def test_only_groups_of_the_size_asked_for_are_dealt(make, data, replacement):
    rb = buffer(
        max_steps=data.draw(st.integers(8, 30)),
        replacement=replacement,
        group_key="group",
        group_size=2,
    )
    group_of, dealt = [], set()
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) or not group_of:
            groups = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
            rb.extend(groups_of(make, groups, first_id=len(group_of)))
            group_of += groups
            continue
        live = range(len(group_of) - rb.storage.num_episodes, len(group_of))
        members = {g: [i for i in live if group_of[i] == g] for g in set(group_of)}
        whole = {g: tuple(ids) for g, ids in members.items() if len(ids) == 2}
        dealt &= set(live)
        left = {ids for ids in whole.values() if replacement or not dealt & set(ids)}
        if whole and not left:  # A refused draw begins no epoch.
            left, dealt = set(whole.values()), set()
        n = data.draw(st.integers(1, 4))
        assert rb.sampler.can_sample(rb.storage, n) == bool(whole)
        if not whole:
            with pytest.raises(RuntimeError, match="no group of group_size=2 episodes"):
                rb.sample(n)
            continue
        got = ids(make, rb.sample(n))
        drawn = list(zip(got[::2], got[1::2], strict=True))
        assert set(drawn) <= left
        assert len(drawn) == (n if replacement else min(n, len(left)))
        if not replacement:
            assert len(set(drawn)) == len(drawn)
            dealt |= set(got)
            assert rb.sampler.ran_out == all(dealt & set(ids) for ids in whole.values())


def test_iterating_deals_each_whole_group_once(make):
    rb = buffer(replacement=False, group_key="group", group_size=2, batch_size=1)
    rb.extend(groups_of(make, [0, 1, 2, 1, 0, 3, 3, 3]))
    for _ in range(2):
        assert sorted(ids(make, batch) for batch in rb) == [[0, 4], [1, 3]]


@pytest.mark.parametrize("size", [None, 3])
def test_an_epoch_of_groups_of_another_size_is_begun_anew(make, size):
    def fresh(size):
        rb = buffer(replacement=False, group_key="group", group_size=size, batch_size=1)
        rb.extend(groups_of(make, [0, 0, 1, 2, 2]))
        return rb

    old, new = fresh(size), fresh(2)
    if size is None:
        old.sample()
    new.sampler.load_state_dict(old.sampler.state_dict())
    assert all(len(ids(make, new.sample())) == 2 for _ in range(4))


@pytest.mark.parametrize("replacement", [True, False])
def test_a_refused_draw_of_groups_changes_nothing(make, replacement):
    rb = buffer(replacement=replacement, group_key="group", group_size=3)
    rb.extend(groups_of(make, [0, 0, 1, 2, 2, 2, 2]))
    before = str(rb.sampler.state_dict())
    with pytest.raises(
        RuntimeError,
        match=r"no group of group_size=3 episodes is stored: the 3 .* have 1 to 4 episodes",
    ):
        rb.sample(1)
    assert str(rb.sampler.state_dict()) == before
    rb.extend(groups_of(make, [1, 1], first_id=7))
    assert ids(make, rb.sample(1)) == [2, 7, 8]


def test_draws_without_replacement_are_in_random_order(make):
    rb, first = buffer(replacement=False), []
    for k in range(600 // in_fast_tier(5, 1)):
        rb.extend(make.vectors([1, 1], first_id=4 * k))
        got = ids(make, rb.sample(1))
        rb.extend(make.vectors([1, 1], first_id=4 * k + 2))
        got += ids(make, rb.sample(9))
        assert rb.sampler.ran_out
        first.append((got[0] % 4, got[1] % 4))
        rb.empty()
    law = {(a, b): 1 for a in (0, 1) for b in range(4) if a != b}
    # The 0.9999 quantile of chi-square with 5 degrees of freedom is 25.7.
    assert chi_square(first, law) < 25.7


@pytest.mark.parametrize("group_key", [None, "episode"])
def test_the_storage_may_go_back_to_an_older_state(make, group_key):
    rb = buffer(replacement=False, group_key=group_key)
    rb.extend(make.vectors([2, 1, 3]))
    given_out = ids(make, rb.sample(1))
    state = rb.storage.state_dict()
    rb.extend(make.vectors([1] * 20, first_id=3))
    rb.sample(20)
    rb.storage.load_state_dict(state)
    seen = ids(make, rb.sample(9))
    assert len(set(seen)) == len(seen) <= 3
    assert not set(seen) & set(given_out) or len(seen) == 3
    assert rb.sampler.ran_out
    assert sorted(ids(make, rb.sample(9))) == [0, 1, 2]
    rb.extend(make.vectors([4, 1], first_id=3))
    assert sorted(ids(make, rb.sample(9))) == [3, 4]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_on_policy_loop(make, prefetch):
    rb = buffer(replacement=False, batch_size=3, prefetch=prefetch)
    for k in range(4):
        rb.extend(make.vectors([2, 3, 1, 4, 2, 2, 5], seed=k, first_id=7 * k))
        got = [ids(make, batch) for batch in rb]
        assert sorted(len(batch) for batch in got) == [1, 3, 3]
        assert sorted(i for batch in got for i in batch) == list(range(7 * k, 7 * k + 7))
        rb.empty()
        assert len(rb) == 0


@pytest.mark.parametrize("kind", ["tensor", "object"])
@pytest.mark.parametrize("replacement", [True, False])
def test_groups_are_sampled_whole(make, kind, replacement):
    rb = buffer(replacement=replacement, group_key="group", batch_size=1)
    data = groups_of(make, [5, 9, 5, 7, 9, 5, 3])
    if kind == "object":
        data["group"] = [f"g{g}" for g in data["group"].tolist()]
    rb.extend(data)
    groups = [[0, 2, 5], [1, 4], [3], [6]]
    epochs = [[ids(make, rb.sample()) for _ in groups] for _ in range(2)]
    for got in epochs:
        assert all(group in groups for group in got)
        assert replacement or sorted(got) == groups
    assert replacement or (rb.sampler.ran_out and epochs[0] != epochs[1])


def test_replacement_is_kept_by_the_metaclass():
    assert type(EpisodeSampler(replacement=False)) is EpisodeSampler
    assert not EpisodeSampler(replacement=False).replacement
    assert EpisodeSampler(replacement=True).replacement


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("trial", range(5))
def test_which_groups_are_drawn_does_not_depend_on_their_ids(replacement, trial):
    """Ids of collectors are random: a run that is repeated, or goes on, has others."""
    draw = torch.Generator().manual_seed(trial)
    group = torch.randint(6, (20,), generator=draw)
    found = []
    for _ in range(3):
        names = torch.randint(2**53, (6,), generator=draw)
        rb = buffer(replacement=replacement, group_key="group", batch_size=2)
        done = torch.ones(20, dtype=torch.bool)
        rb.extend(
            TensorDict({"group": names[group], "k": torch.arange(20), "next": {"done": done}}, [20])
        )
        found.append([rb.sample()["k"].tolist() for _ in range(6)])
    assert found[0] == found[1] == found[2]


def grouped(group, key):
    """Sample by this key from a buffer whose episode has this group."""
    rb, data = buffer(group_key=key), makers.vectors([2])
    if group is not None:
        data.set_non_tensor("group", group)
    rb.extend(data)
    return rb.sample(1)


POSITIVE = "max_sample_count must be a positive integer, got"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(
            refused(
                f"group_size must … got {size!r}", EpisodeSampler, group_key="g", group_size=size
            )
            for size in (0, 1.5, True, "2")
        ),
        refused("group_size=2 needs group_key", EpisodeSampler, group_size=2),
        refused(f"{POSITIVE} 0", EpisodeSampler, max_sample_count=0, replacement=False),
        refused(f"{POSITIVE} True", EpisodeSampler, max_sample_count=True, replacement=False),
        refused("use it with replacement=False", EpisodeSampler, max_sample_count=1),
        refused("one value per step", grouped, None, "observation"),
        refused("'group' is not stored", grouped, None, "group", error=KeyError),
        refused("'group' must … by hash", grouped, {"a": 1}, "group"),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)
