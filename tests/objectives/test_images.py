"""Learning from rows with images: losses, experience, rewards and the record of completed rows."""

import asyncio
import copy
import pickle

import pytest
import tensordict
import torch
from torch import nn

from tests.faulty_server import running
from tests.objectives.conftest import make_model
from tests.objectives.helpers import MASK, gradients_of, objective_of, value_model
from tests.objectives.rewards.reward_server import RewardServer
from tests.scoring.helpers import assert_same_gradients, entries
from tests.scoring.vision_rows import FAMILIES, by_transformers, rows_with_images, vl_model
from tests.tiers import some_fast
from torchrl_mt.bridges.lightrft import Experience
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, TextReward
from torchrl_mt.objectives.rewards.model import ModelReward
from torchrl_mt.scoring import row_values
from torchrl_mt.transforms import VisionInputs
from torchrl_mt.vision import RowImages, StoredImage
from torchrl_mt.vision.rows import COUNT, PIXELS, set_row_images

close = {"atol": 1e-5, "rtol": 1e-5}


def completed(family, counts=(1, 0, 3, 2), seed=0):
    """Rows with random advantages and returns, as a maker writes them."""
    rows, alone = rows_with_images(family, counts, seed)
    g, sampled = torch.Generator().manual_seed(seed), rows[MASK]
    old = -3 * torch.rand(sampled.shape, generator=g)
    rows["log_probs", "old"] = torch.where(sampled, old, 0.0)
    rows["advantage"] = torch.randn(*sampled.shape, 1, generator=g)
    rows["returns"] = torch.randn(sampled.shape, generator=g)
    return rows, alone


def minimise(loss, parts, total):
    loss.zero_grad(set_to_none=True)
    for part in parts:
        objective_of(loss(part, total=total)).backward()
    return gradients_of(loss)


@pytest.mark.parametrize("family", some_fast(["qwen2_5_vl"], FAMILIES))
def test_the_cut_into_micro_batches_changes_no_gradient(family):
    model, _ = vl_model(family)
    rows, _ = completed(family)
    options = {"critic": value_model(model), "entropy_coef": 0.1}
    loss, packed = (MultiTurnLoss(model, passes=Passes(packed=p), **options) for p in (False, True))
    expected = minimise(loss, [rows], loss.total(rows))
    assert any(".visual." in name or ".vision_tower." in name for name in expected)
    order = torch.tensor([3, 0, 2, 1])
    for way, size in ((loss, 1), (packed, 2)):
        assert_same_gradients(minimise(way, rows[order].split(size), loss.total(rows)), expected)


@pytest.mark.parametrize("family", some_fast(["qwen3_vl"], FAMILIES))
def test_the_loss_has_the_gradient_of_plain_forwards(family):
    model, _ = vl_model(family)
    rows, alone = completed(family, (1, 2))
    got = minimise(MultiTurnLoss(model, objective="reinforce"), [rows], None)
    model.zero_grad(set_to_none=True)
    _, attended, sampled = entries(rows)
    counted = sampled & (attended.cumsum(-1) > 1)
    log_prob = by_transformers(model, rows, alone)[0]
    advantage = rows["advantage"].squeeze(-1)
    (-(log_prob * advantage)[counted].sum() / counted.sum()).backward()
    assert_same_gradients(got, {f"actor_network.{n}": g for n, g in gradients_of(model).items()})


@pytest.mark.parametrize("family", some_fast(["qwen2_vl", "llava"], FAMILIES))
def test_a_frozen_vision_tower_gets_no_gradient_and_the_rest_gets_its_own(family):
    model, _ = vl_model(family)
    rows, _ = completed(family, (1, 2))
    critic = value_model(model)
    expected = minimise(MultiTurnLoss(model, critic=critic), [rows], None)
    rest = {n for n in expected if not ("visual." in n or "vision_tower." in n)}
    loss = MultiTurnLoss(model, critic=critic, freeze_vision=True)
    before = {n: p.detach().clone() for n, p in loss.named_parameters()}
    got = minimise(loss, [rows], None)
    assert got.keys() == rest
    if family == "llava":
        assert "actor_network.model.multi_modal_projector.linear_1.weight" in got
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], **close)
    torch.optim.AdamW(loss.parameters(), lr=0.1, weight_decay=0.1).step()
    moved = {n for n, p in loss.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert moved <= rest


@pytest.mark.parametrize("family", some_fast(["qwen2_5_vl"], FAMILIES))
def test_makers_score_images_with_all_models(family):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, (1, 0, 3, 2))
    ref, critic = copy.deepcopy(model), value_model(model)
    with torch.no_grad():
        for p in ref.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    maker = ExperienceMaker(
        model, ref=ref, critic=critic, old_log_probs="actor",
        passes=Passes(with_entropy=True, packed=True), advantage="gae", kl_coef=0.1,
    )  # fmt: skip
    # What the maker reads is enough.
    out = maker(rows.select(*maker.in_keys, *maker.optional_in_keys, strict=False))
    with torch.no_grad():
        for key, policy in ((("log_probs", "old"), model), (("log_probs", "ref"), ref)):
            expected = by_transformers(policy, rows, alone)[0]
            torch.testing.assert_close(out[key].double(), expected, **close)
        images = RowImages.of(rows)
        expected = row_values(critic, *entries(rows), images=images)
        torch.testing.assert_close(out["values"], expected, **close)
        assert out["values"].any()
    text = rows.select("tokens", "masks", "turns", "log_probs", "rewards", "episode", "group")
    with pytest.raises(ValueError, match="images do not fit tokens in row 0"):
        maker(text)
    with pytest.raises(TypeError, match="images: Qwen2ForCausalLM takes none"):
        ExperienceMaker(make_model(vocab_size=30), old_log_probs="actor")(rows)
    with pytest.raises(TypeError, match="images: Qwen2ForCausalLM takes none"):
        ExperienceMaker(model, ref=make_model(vocab_size=30))(rows)


def test_a_loss_reads_the_images_by_its_own_keys():
    model, _ = vl_model("qwen3_vl")
    rows, _ = completed("qwen3_vl", (1, 2))
    loss = MultiTurnLoss(model)
    read = rows.select(*loss.in_keys, *loss.optional_in_keys, strict=False)
    assert torch.equal(loss(read)["loss_objective"], loss(rows)["loss_objective"])
    assert PIXELS not in MultiTurnLoss(make_model()).optional_in_keys


class Judge(nn.Module):
    """A reward model: the last state's mean."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model.model
        self.score = nn.Linear(32, 1, bias=False)
        self.config = model.config
        self.config.num_labels = 1
        nn.init.ones_(self.score.weight)


@pytest.mark.parametrize("family", some_fast(["qwen3_vl", "llava"], FAMILIES))
def test_reward_models_see_the_images(family):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, (1, 0, 3, 2))
    judge = Judge(copy.deepcopy(model))
    with torch.no_grad():
        states = [model.model(**row.inputs).last_hidden_state for row in alone]
    expected = torch.stack([state[0, -1].sum() for state in states])
    for size in (None, 1, 3):
        got = ModelReward(judge, passes=Passes(micro_batch_size=size))(rows)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    with pytest.raises(TypeError, match="images: Qwen2ForCausalLM takes none"):
        ModelReward(make_model(vocab_size=30))(rows)


def test_functions_of_text_may_ask_for_the_images():
    _, processor = vl_model("llava")
    rows, alone = rows_with_images("llava", (1, 0, 3))
    seen, got = [], []

    def bright(images):
        return [sum(float(image.array().mean()) for image in shown) for shown in images]

    def brightness(prompts, completions, images):
        seen.extend(images)
        return bright(images)

    def anything(**given):
        got.append("images" in given)
        return [0.0] * 3

    reward = TextReward(brightness, processor.tokenizer)(rows).sum(-1)
    assert seen == [row.images for row in alone]
    assert reward.tolist() == pytest.approx(bright([row.images for row in alone]))
    with pytest.raises(KeyError, match="images"):
        TextReward(brightness, processor.tokenizer)(rows.exclude("images"))
    TextReward(anything, processor.tokenizer)(rows.exclude("images"))
    assert got == [False]


def test_callables_get_the_images_of_their_rows():
    model, _ = vl_model("llava")
    rows, alone = rows_with_images("llava", (1, 0, 3))
    seen = []

    def count(asked):
        seen.append(asked["images", "raw"])
        return asked[COUNT].float()

    out = ExperienceMaker(model, reward=count, advantage="dr_grpo")(rows)
    assert [tuple(shown) for shown in seen[0]] == [row.images for row in alone]
    assert out["rewards", "shaped"].sum(-1).tolist() == [1.0, 0.0, 3.0]
    with pytest.raises(ValueError, match="tokens, which do not tell images apart"):
        ExperienceMaker(model, reward=count, advantage="gigpo")(rows)


def test_servers_are_sent_the_images_as_data_uris():
    pytest.importorskip("httpx")
    from torchrl_mt.objectives import RemoteReward

    _, processor = vl_model("llava")
    rows, alone = rows_with_images("llava", (1, 0, 3))
    with running(RewardServer()) as server:

        def sent(rows, **options):
            before = len(server.seen)
            source = RemoteReward(server.url, processor.tokenizer, max_concurrency=1, **options)
            asyncio.run(source(rows))
            return server.seen[before:]

        shown = [uris for body in sent(rows, batch_size=2) for uris in body["images"]]
        assert not any("images" in body for body in sent(rows, images=False))
        assert not any("images" in body for body in sent(rows.exclude("images")))
    for uris, row in zip(shown, alone, strict=True):
        pixels = [StoredImage.of(uri).array() for uri in uris]
        assert all((a == i.array()).all() for a, i in zip(pixels, row.images, strict=True))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_an_experience_has_the_images_of_its_rows(family):
    rows, alone = completed(family, (1, 0, 3, 2))
    rows["group"] = torch.arange(4)
    experience = Experience.from_rows(rows)
    # The same images in a table of their own.
    other = Experience.from_rows(rows.clone())
    joined = torch.cat([experience, other[1:]])
    parts = [experience, experience[2:], experience[torch.tensor([3, 0])], joined]
    parts += [*joined.split(3), torch.stack(list(experience.unbind(0)))]
    parts += [part.to("cpu").double() for part in parts]
    for part in parts:
        shown = [alone[i] for i in part.info["group"].tolist()]
        assert part.raw_images == [row.images for row in shown]
        for field in ("pixel_values", "image_grid_thw"):
            expected = [r.inputs[field] for r in shown if field in r.inputs]
            got = getattr(part, field)
            if expected:
                torch.testing.assert_close(got.to(expected[0]), torch.cat(expected))
            else:
                assert got is None
    assert experience[1:2].pixel_values is None
    half = experience.half()
    assert half.pixel_values.dtype is torch.float16
    assert experience.pixel_values.dtype is torch.float32
    moved = experience.to("meta")
    assert moved.info[PIXELS].device.type == "meta"
    assert experience.info[PIXELS] is rows[PIXELS]
    back = experience.to_rows()
    assert back[PIXELS] is rows[PIXELS]
    model, _ = vl_model(family)
    assert torch.equal(
        MultiTurnLoss(model)(back)["loss_objective"], MultiTurnLoss(model)(rows)["loss_objective"]
    )


def test_a_part_of_an_experience_is_pickled_with_its_own_images(monkeypatch):
    rows, alone = completed("qwen2_5_vl", (1, 0, 3, 2))
    experience = Experience.from_rows(torch.cat([rows, rows.clone()]))
    for k in (0, 1, 6):
        part = experience[k : k + 1]
        again = pickle.loads(pickle.dumps(part))
        shown = alone[k % 4]
        assert torch.equal(again.sequences, part.sequences)
        assert again.raw_images == [shown.images]
        if shown.images:
            assert torch.equal(again.pixel_values, shown.inputs["pixel_values"])
            assert again.info[PIXELS].shape == again.pixel_values.shape
            assert torch.equal(again.image_grid_thw, shown.inputs["image_grid_thw"])
        else:
            assert again.pixel_values is None
    text = Experience.from_rows(completed("llava", (0, 0))[0].exclude("images"))
    assert text.pixel_values is text.image_grid_thw is text.raw_images is None
    assert pickle.loads(pickle.dumps(text)).raw_images is None
    grids = experience.image_grid_thw
    monkeypatch.setattr(RowImages, "of", None)  # It joins the pixels, which grids do not need.
    assert torch.equal(experience.image_grid_thw, grids)


def test_an_experience_with_rows_that_fill_it_up_is_moved():
    rows, _ = completed("qwen2_5_vl", (1, 2))
    filled, plain = Experience.from_rows(tensordict.pad(rows, [0, 2])), Experience.from_rows(rows)
    assert torch.equal(filled.half().pixel_values, plain.pixel_values.half())


@pytest.mark.parametrize("family", some_fast(["qwen3_vl"], FAMILIES))
def test_rows_learn_from_the_inputs_that_vision_inputs_makes(family):
    model, processor = vl_model(family)
    rows, alone = rows_with_images(family, (1, 0, 3, 2))
    made = rows.exclude("images")
    set_row_images(made, [row.images for row in alone])
    with pytest.raises(KeyError, match="VisionInputs"):
        ExperienceMaker(model, old_log_probs="actor")(made)
    made = VisionInputs(processor)(made)
    # Other rows' table, joined, shuffled and cut again.
    made = torch.cat([made[2:], made[:2].clone()])[torch.tensor([3, 1, 0])]
    maker = ExperienceMaker(
        model, old_log_probs="actor", passes=Passes(packed=True, micro_batch_size=1)
    )
    out = maker(made.select(*maker.in_keys, *maker.optional_in_keys, strict=False))
    with torch.no_grad():
        expected = by_transformers(model, rows, alone)[0][torch.tensor([1, 3, 2])]
    torch.testing.assert_close(out["log_probs", "old"].double(), expected, **close)
