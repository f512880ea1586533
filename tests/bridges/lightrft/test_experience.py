"""The record of completed rows: nothing lost, every field moved."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_mt.bridges.lightrft import Experience
from torchrl_mt.objectives import ExperienceMaker, Passes

FIELDS = [
    *("sequences", "attention_mask", "action_mask", "action_log_probs", "base_action_log_probs"),
    *("values", "returns", "advantages", "kl", "action_entropy"),
]


class Critic(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return (input_ids * attention_mask).cumsum(-1) / 10


@pytest.fixture
def completed(model, other_model, rows):
    passes = Passes(with_entropy=True)
    batch = ExperienceMaker(model, ref=other_model, critic=Critic(), passes=passes)(rows())
    batch["label"] = ["maths", "chat"] * 3
    batch["deep"] = TensorDict({"er": torch.randn(6, 2)}, [6])
    return batch


def leaves(experience):
    yield from ((name, getattr(experience, name)) for name in FIELDS)
    yield from experience.info.items(True, True, lambda kind: issubclass(kind, torch.Tensor))


def test_rows_go_in_and_come_out(completed):
    experience = Experience.from_rows(completed)
    for name in FIELDS:
        assert getattr(experience, name).shape == (6, 12), name
    back = experience.to_rows()
    assert set(back.keys(True, True)) == set(completed.keys(True, True))
    for key in completed.keys(True, True):
        if key == "label":
            assert back[key] == completed[key]
        else:
            assert back[key].data_ptr() == completed[key].data_ptr()
            torch.testing.assert_close(back[key], completed[key])
    assert set(completed["masks"].keys()) == {"all_attention_mask", "all_assistant_mask"}
    back["new"] = torch.ones(6)
    assert "new" not in completed
    assert "new" not in experience.info


def test_what_was_not_made_is_none(model, rows):
    experience = Experience.from_rows(ExperienceMaker(model)(rows()))
    for name in ["base_action_log_probs", "values", "kl", "action_entropy"]:
        assert getattr(experience, name) is None
    assert experience.to("meta").kl is None
    with pytest.raises(KeyError, match=r"'old'.*: complete them with ExperienceMaker"):
        Experience.from_rows(rows())


def test_to_moves_every_field(completed):
    experience = Experience.from_rows(completed)
    moved = dict(leaves(experience.to("meta")))
    assert {"group", ("deep", "er"), ("turns", "full"), *FIELDS} <= set(moved)
    assert all(value.device.type == "meta" for value in moved.values())
    assert all(value.device.type == "cpu" for _, value in leaves(experience))
    assert experience.to("meta").info["label"] == completed["label"]


@pytest.mark.parametrize(
    "how",
    [
        (torch.bfloat16,),
        (torch.bfloat16, True),
        ("cpu", torch.bfloat16, True),
        ("meta", torch.bfloat16),
        (torch.ones(1, dtype=torch.bfloat16),),
        (torch.ones(1, dtype=torch.bfloat16, device="meta"),),
    ],
)
def test_a_dtype_is_for_floating_fields_alone(completed, how):
    completed["group"] = torch.arange(6) + 151_001
    experience = Experience.from_rows(completed)
    cast = experience.to(*how)
    meta = "meta" in (how[0], getattr(getattr(how[0], "device", None), "type", None))
    assert isinstance(cast, Experience)
    assert cast.info["label"] == completed["label"]
    for (name, value), (_, before) in zip(leaves(cast), leaves(experience), strict=True):
        assert value.device.type == ("meta" if meta else "cpu")
        if before.is_floating_point():
            assert value.dtype is torch.bfloat16, name
        elif value.device.type == "cpu":
            assert torch.equal(value, before), name
        assert before.dtype in (torch.float32, torch.int64, torch.bool)
    assert dict(leaves(experience.to(dtype=torch.float64)))["kl"].dtype is torch.float64
    for name in ("half", "bfloat16", "float", "double"):
        cast = getattr(experience, name)()
        assert (cast.kl.dtype, cast.sequences.dtype) == (getattr(torch, name), torch.int64)
        assert torch.equal(cast.info["group"], completed["group"])
    assert experience.lock_().to(torch.float64).is_locked
    with pytest.raises(TypeError, match=r"dtype must be a floating one, got torch.int32"):
        experience.to(torch.int32)


def test_pin_memory_pins_every_field(completed, monkeypatch):
    experience = Experience.from_rows(completed)
    if torch.cuda.is_available():
        pinned = dict(leaves(experience.pin_memory()))
        assert all(value.is_pinned() for value in pinned.values())
        return
    pointers = set()

    def pin(tensor, *args):
        copy = tensor.clone()
        pointers.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    pinned = dict(leaves(experience.pin_memory()))
    assert {"group", ("deep", "er"), *FIELDS} <= set(pinned)
    assert all(value.data_ptr() in pointers for value in pinned.values())


def test_it_is_cut_and_joined_like_a_tensordict(completed):
    experience = Experience.from_rows(completed)
    again = torch.cat([experience[:2], experience[2:]])
    assert isinstance(again, Experience)
    for (name, value), (_, expected) in zip(leaves(again), leaves(experience), strict=True):
        assert torch.equal(value, expected), name
    assert again[3:].info["group"].shape == (3,)


def test_keys_that_were_set_are_kept_to(model, rows):
    maker = ExperienceMaker(model)
    maker.set_keys(advantage="adv", sample_log_prob=("behaviour", "log_prob"))
    batch = maker(rows())
    experience = Experience.from_rows(batch, maker.tensor_keys)
    torch.testing.assert_close(experience.advantages, batch["adv"].squeeze(-1))
    back = experience.to_rows(maker.tensor_keys)
    assert set(back.keys(True, True)) == set(batch.keys(True, True))
