"""What experience is made from: read wherever it lies, shown under its usual keys, or refused."""

from dataclasses import fields

import pytest
import torch
from tensordict import TensorDict

from torchrl_mt.objectives import ExperienceMaker
from torchrl_mt.objectives._rows import EPISODE_SCORE
from torchrl_mt.objectives.row_batch import ExperienceKeys, read_batch

USUAL = {field.name: getattr(ExperienceKeys, field.name) for field in fields(ExperienceKeys)}
NESTED = {name: key for name, key in USUAL.items() if isinstance(key, tuple)}


class Critic(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids.cumsum(-1) * 0.01


def complete(rows):
    """Rows that have every entry that is ever read."""
    batch = rows(n=9)
    batch["episode_index"] = batch["episode"] * 3
    batch["fork"] = (torch.arange(9) % 3 == 1).long()
    batch["label"] = ["a" if e % 2 else "b" for e in batch["episode"].tolist()]
    batch["valid"] = batch["episode"] != batch["episode"][-1]
    return batch


def everything(model, other_model, **options):
    """A maker that reads and writes all there is, and whose callables read the usual keys."""

    def source(rows):
        assert rows["rewards", "full"].shape == rows["turns", "full"].shape
        return (rows["tokens", "full"] * rows["masks", "all_attention_mask"]).sum(-1) / 50

    def one(rows):
        # Its own kind of score: the episode's, by the entries of the rows.
        assert rows[EPISODE_SCORE].shape == rows.batch_size
        return rows[EPISODE_SCORE].abs() + rows["log_probs", "old"].abs().sum(-1)

    reward = {"a": [("episode", 1.0), (source, 0.5)], "b": [("episode", 2.0)]}
    return ExperienceMaker(
        model,
        ref=other_model,
        critic=Critic(),
        reward=reward,
        reward_transform=lambda reward, mask: reward * 2.0,
        kl_coef=0.1,
        with_entropy=True,
        filters=["dynamic_sampling", "top_entropy", one],
        whiten=True,
        **{"advantage": "gae", **options},
    )


def renamed(batch, keys):
    """The same rows with entries elsewhere."""
    found = {name: batch.get(USUAL[name]) for name in keys if USUAL[name] in batch.keys(True)}
    batch = batch.exclude(*(USUAL[name] for name in keys))
    for node in ("tokens", "masks", "log_probs", "turns", "rewards"):
        if node in batch and batch[node].is_empty():
            del batch[node]
    for name, value in found.items():
        batch.set(keys[name], value)
    return batch


def clear_of(name):
    """The flat parent of a key's default, and the keys that lay below it elsewhere."""
    flat = USUAL[name][0]
    return {
        name: flat,
        **{
            other: f"moved_{other}"
            for other, key in NESTED.items()
            if key[0] == flat and other != name
        },
    }


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_a_key_may_be_the_flat_parent_of_its_default(model, other_model, rows, name, advantage):
    expected = everything(model, other_model, advantage=advantage)(complete(rows))
    maker = everything(model, other_model, advantage=advantage)
    keys = clear_of(name)
    maker.set_keys(**keys)
    batch = renamed(complete(rows), keys)
    given = {key: batch.get(key) for key in batch.keys(True, True)}
    out = maker(batch)
    for field, usual in USUAL.items():
        if usual in expected.keys(True) and field != "label":
            got = out[getattr(maker.tensor_keys, field)]
            torch.testing.assert_close(got, expected[usual], equal_nan=True)
    assert set(out.keys(True, True)) == set(given) | set(maker.out_keys)
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            assert out.get(key) is value


def test_given_returns_may_lie_flat_too(model, rows):
    batch = rows()
    batch["rewards", "to_go"] = torch.randn(6, 12)
    options = {"advantage": "turn", "filters": "dynamic_sampling"}
    expected = ExperienceMaker(model, **options)(batch.clone())
    maker = ExperienceMaker(model, **options)
    keys = clear_of("turn_return")
    maker.set_keys(**keys)
    out = maker(renamed(batch, keys))
    torch.testing.assert_close(out["advantage"], expected["advantage"])
    assert torch.equal(out["weights", "full"], expected["weights", "full"])


@pytest.mark.parametrize("key", ["rewards", ("rewards", "episode"), ("rewards", "episode", "own")])
def test_the_score_that_filters_are_given_stands_above_all_else(model, rows, key):
    seen = []

    def one(rows):
        seen.append(rows[EPISODE_SCORE].clone())
        return torch.ones(len(rows))

    ExperienceMaker(model, filters=one)(rows())
    batch = rows()
    maker = ExperienceMaker(model, filters=one)
    keys = {"reward": key, "turn_return": "to_go", "shaped_reward": "shaped"}
    maker.set_keys(**keys)
    maker(renamed(batch, keys))
    assert torch.equal(*seen)


def test_the_copy_shares_tensors_and_shows_the_usual_keys(rows):
    batch = rows()
    keys = ExperienceKeys()
    keys.action, keys.group = "tokens", ("group", "id")
    batch["tokens"] = batch["tokens", "full"]
    batch["group"] = TensorDict({"id": batch["group"], "size": torch.ones(6)}, [6])
    copy = read_batch(batch, keys).with_usual_keys({"kl": torch.ones(6, 12)})
    assert copy["tokens", "full"] is batch["tokens"]
    assert copy["group"] is batch["group", "id"]
    assert copy["kl"].all()
    assert "kl" not in batch
    assert isinstance(batch["group"], TensorDict)
