"""Values of stored steps that are replaced where they are stored still."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.data import makers
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter


def buffer(max_steps=8, cls=TensorDictReplayBuffer, **kwargs):
    return buffer_of(
        EpisodeStorage(max_steps, **kwargs),
        ClipSampler(slice_len=2),
        cls=cls,
        writer=EpisodeWriter(track_generations=True),
        batch_size=4,
    )


def episode(first, steps):
    """Steps whose state is small, and whose picture does not go in a record."""
    number = torch.arange(first, first + steps)
    data = {
        "number": number,
        "state": number[:, None].float() * torch.ones(3),
        "picture": number[:, None].float() * torch.ones(200),
        "version": torch.zeros(steps, 1, dtype=torch.int64),
    }
    return makers.whole(data, steps)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_sample_is_patched_where_it_is_stored_still(cls):
    rb = buffer(cls=cls)
    rb.extend(episode(0, 4))
    _, info = rb.sample(return_info=True)
    rb.extend(episode(4, 4))
    kept = rb.extend(episode(8, 2))  # the first episode leaves
    patch = {"state": torch.full((4, 3), -1.0), "picture": torch.full((4, 200), -2.0)}
    result = rb.update_if_present(
        index=info["index"], generation=info["index_generation"], patch=patch
    )
    assert result.updated.tolist() == [False] * 4
    assert (rb[:]["state"] >= 0).all()
    result = rb.update_if_present(
        index=kept, generation=torch.zeros(2), patch={"state": torch.full((2, 3), -1.0)}
    )
    assert (result.updated_count, result.stale_count) == (2, 0)
    assert rb[:]["state"][:, 0].tolist() == [4, 5, 6, 7, -1, -1]
    assert rb[:]["number"].tolist() == [4, 5, 6, 7, 8, 9]


@examples(15)
@given(data=st.data())
def test_a_patch_changes_these_values_and_no_others(data):
    rb, numbers, taken = buffer(9), [], []
    values = {"state": {}, "picture": {}}  # of each step, by its number
    for _ in range(data.draw(st.integers(1, 6))):
        new = episode(len(numbers), data.draw(st.integers(1, 4)))
        index = rb.extend(new)
        numbers += new["number"].tolist()
        for held in values.values():
            held.update({n: float(n) for n in new["number"].tolist()})
        taken += zip(index.tolist(), new["number"].tolist(), strict=True)

        chosen = data.draw(st.lists(st.sampled_from(taken), min_size=1, max_size=6))
        fresh = torch.arange(len(chosen)) + 100.0 * len(numbers)
        index = torch.tensor([handle for handle, _ in chosen])
        key, width = data.draw(st.sampled_from([("state", 3), ("picture", 200)]))
        stored = rb[:]["number"].tolist()
        result = rb.update_if_present(
            index=index,
            generation=torch.zeros_like(index),
            patch={key: fresh[:, None].expand(-1, width)},
        )
        assert result.updated.tolist() == [number in stored for _, number in chosen]
        for (_, number), value in zip(chosen, fresh.tolist(), strict=True):
            if number in stored:
                values[key][number] = value
        rows = rb[:]
        for name, held in values.items():
            for number, row in zip(rows["number"].tolist(), rows[name].tolist(), strict=True):
                assert set(row) == {held[number]}


def test_versions_are_compared():
    rb = buffer()
    index = rb.extend(episode(0, 3))
    same = {"index": index, "generation": torch.zeros(3), "version_key": "version"}
    result = rb.update_if_present(
        **same, patch={"state": torch.ones(3, 3)}, version=torch.tensor([2, 0, 1])
    )
    assert result.updated.tolist() == [True] * 3
    result = rb.update_if_present(
        **same, patch={"state": torch.zeros(3, 3)}, version=1, require_newer=True
    )
    assert result.updated.tolist() == [False, True, False]
    assert rb[:]["version"].flatten().tolist() == [2, 1, 1]
    assert rb[:]["state"][:, 0].tolist() == [1, 0, 1]


def test_a_sample_that_is_drawn_is_as_it_was():
    rb = buffer()
    rb.extend(episode(0, 4))
    index, _ = rb.sampler.sample(rb.storage, 4)
    rb.update_if_present(
        index=index, generation=torch.zeros(4), patch={"state": torch.full((4, 3), -1.0)}
    )
    assert (rb.storage.get(index)["state"] >= 0).all()
    assert (rb.storage.get(index.clone())["state"] == -1).all()


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("nothing", torch.ones(3), KeyError, "'nothing' is not stored; the entries are 'number'"),
        ("state", torch.ones(3, 2), ValueError, r"'state' must be \(3, 3\) torch.float32, got"),
        ("state", torch.ones(3, 3).double(), ValueError, "torch.float32, got .* torch.float64"),
        ("seen", torch.ones(3, 2), ValueError, "'seen' shares its rows .*share_next=False"),
        (("next", "seen"), torch.ones(3, 2), ValueError, "shares its rows with another entry"),
        ("text", torch.ones(3), ValueError, "only entries of one shape .* a Python object"),
    ],
)
def test_a_refused_patch_changes_nothing(key, value, error, message):
    rb, data = buffer(), episode(0, 3)
    seen = torch.arange(4.0)[:, None].expand(4, 2)
    data["seen"], data["next", "seen"] = seen[:3], seen[1:]
    index = rb.extend(lazy_stack([step.set("text", "a") for step in data.unbind(0)]))
    before = rb[:]
    with pytest.raises(error, match=message):
        rb.update_if_present(
            index=index,
            generation=torch.zeros(3),
            patch={"picture": torch.zeros(3, 200), key: value},
        )
    assert torch.equal(rb[:]["picture"], before["picture"])


def test_generations_are_given_out_only_if_asked_for():
    rb = buffer_of(8, ClipSampler(slice_len=2), cls=TensorDictReplayBuffer, batch_size=4)
    index = rb.extend(episode(0, 4))
    assert "index_generation" not in rb.sample()
    assert rb.writer.generations_of(index).tolist() == [0] * 4
    assert rb.writer.generations_of(torch.tensor([0, -1])).tolist() == [-1, -1]
    with pytest.raises(RuntimeError, match="must track slot generations"):
        rb.update_if_present(index=index, generation=torch.zeros(4), patch={})
