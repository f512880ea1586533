"""Rows with images are scored as transformers scores each of them alone, padded or packed."""

import copy
from itertools import product

import pytest
import torch
from tensordict import NonTensorData
from torch import nn

from tests.objectives.conftest import make_model
from tests.scoring.helpers import assert_same_gradients, attention_over_lengths, close, entries
from tests.scoring.vision_rows import FAMILIES, by_transformers, rows_with_images, vl_model
from tests.settings import grouped
from tests.tiers import first_fast, some_fast
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring import ValueModel, row_log_probs, row_values
from torchrl_mt.scoring.output_head import OutputStates, output_states
from torchrl_mt.scoring.packing_check import packing_fault
from torchrl_mt.scoring.row_vision import vision_towers
from torchrl_mt.vision import RowImages
from torchrl_mt.vision.model import VisionModel
from torchrl_mt.vision.rows import COUNT, FIRST, PIXELS

FORMS = [
    {},
    {"packed": True},
    {"micro_batch_size": 1},
    {"micro_batch_tokens": 40},
    {"packed": True, "micro_batch_tokens": 40},
    {"packed": True, "full_logits": True},
]
FEW = [("qwen3_vl", True), ("llava", False)]
QWEN = "qwen2_5_vl"


def scores(model, rows, **options):
    return row_log_probs(
        model, *entries(rows), images=RowImages.of(rows), **grouped(with_entropy=True, **options)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", first_fast(range(4)))
def test_rows_are_scored_as_transformers_scores_them_alone(family, seed):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, [1, 0, 3, 2, 0], seed)
    with torch.no_grad():
        expected = by_transformers(model, rows, alone, temperature=0.7)
        for form in FORMS:
            got = scores(model, rows, temperature=0.7, **form)
            close([x.double() for x in got], expected)


@pytest.mark.parametrize(("family", "packed"), some_fast(FEW, product(FAMILIES, [True, False])))
def test_an_image_changes_the_scores_of_its_row_alone(family, packed):
    model, _ = vl_model(family)
    rows, _ = rows_with_images(family, [1, 3, 0, 1], 3)
    images = RowImages.of(rows)
    pixels = images.pixel_values.clone()
    sizes = [1] * len(pixels) if images.grids is None else images.grids.prod(-1).tolist()
    pixels.split(sizes)[int(images.first[1]) + 1].add_(1.0)
    other = rows.copy()
    other[PIXELS] = NonTensorData(pixels, batch_size=rows.batch_size)
    with torch.no_grad():
        before, after = (scores(model, x, packed=packed)[0] for x in (rows, other))
    changed = (before != after).any(-1)
    assert changed.tolist() == [False, True, False, False]


@pytest.mark.parametrize("family", some_fast(["qwen2_5_vl", "llava"], FAMILIES))
def test_rows_without_images_are_scored_without_pixels(family):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, [0, 0, 0], 5)
    called = []
    (tower,) = vision_towers(model)
    handle = tower.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        expected = by_transformers(model, rows, alone)
        for packed in (False, True):
            assert packing_fault(model, rows["tokens", "full"]) is None
            called.clear()
            close([x.double() for x in scores(model, rows, packed=packed)], expected)
            assert not called
    handle.remove()


@pytest.mark.parametrize(("family", "packed"), some_fast(FEW, product(FAMILIES, [True, False])))
def test_gradients_are_those_of_plain_forwards_in_the_vision_tower_too(family, packed):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, [1, 0, 2], 6)
    gradients = []
    for way, given in ((scores, {"packed": packed}), (by_transformers, {"alone": alone})):
        model.zero_grad(set_to_none=True)
        log_prob, entropy = way(model, rows, **given)
        (log_prob.double().square().sum() + entropy.double().sum()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    got, expected = gradients
    assert any(".visual." in name or ".vision_tower." in name for name in got)
    assert_same_gradients(got, expected)


@pytest.mark.parametrize("family", some_fast(["qwen2_vl", "llava"], FAMILIES))
def test_values_see_the_images(family):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, [1, 0, 3], 7)
    critic = ValueModel.from_model(model)
    nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    tokens, attended, sampled = entries(rows)
    expected = torch.zeros(tokens.shape)
    with torch.no_grad():
        for k, row in enumerate(alone):
            states = model.model(**row.inputs).last_hidden_state[0]
            value = critic.head(states).squeeze(-1)
            for i, t in enumerate(attended[k].nonzero().squeeze(-1).tolist()):
                if i and sampled[k, t]:
                    expected[k, t] = value[i - 1]
        for form in ({}, {"packed": True}, {"micro_batch_size": 2}):
            given = {"images": RowImages.of(rows), **grouped(**form)}
            close([row_values(critic, tokens, attended, sampled, **given)], [expected])


@pytest.mark.parametrize("packed", [False, True])
def test_a_worker_without_rows_runs_the_model(packed):
    model, _ = vl_model(QWEN)
    none = torch.zeros(0, 5, dtype=torch.long)
    log_prob, _ = row_log_probs(model, none, none.bool(), none.bool(), passes=Passes(packed=packed))
    assert log_prob.shape == (0, 5)


@pytest.mark.parametrize("family", some_fast(["qwen3_vl"], FAMILIES))
def test_probabilities_add_up_without_the_image_tokens(family):
    model, processor = vl_model(family)
    (_, row), size = rows_with_images(family, [0, 1], 8)[1], len(processor.tokenizer)
    ids = row.inputs["input_ids"]
    barred = VisionModel.of(model.config).barred
    kept = [token for token in range(size) if token not in barred]
    tokens = torch.cat([ids.expand(len(kept), -1), torch.tensor(kept)[:, None]], -1)
    attended = torch.ones_like(tokens).bool()
    sampled = torch.arange(tokens.shape[1]).expand_as(tokens) == tokens.shape[1] - 1
    grids = row.inputs.get("image_grid_thw")
    first = torch.zeros(len(kept), dtype=torch.long)
    images = RowImages(row.inputs["pixel_values"], grids, first, first + 1)
    with torch.no_grad():
        got, _ = row_log_probs(model, tokens, attended, sampled, images=images)
    assert abs(float(got.sum(-1).exp().sum()) - 1) < 1e-5
    tokens[3, -1] = barred[0]
    with pytest.raises(ValueError, match=r"mask .* images and videos.*row 3 has"):
        row_log_probs(model, tokens, attended, sampled, images=images)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_show_videos_are_refused(packed):
    model, processor = vl_model(QWEN)
    rows, _ = rows_with_images(QWEN, [1, 0], 9)
    tokens, attended, sampled = entries(rows)
    place = (attended & (tokens != processor.image_token_id))[0].nonzero()[0]
    tokens, sampled = tokens.clone(), sampled.clone()
    tokens[0, place], sampled[0, place] = processor.video_token_id, False
    given = {"images": RowImages.of(rows), "passes": Passes(packed=packed)}
    with pytest.raises(ValueError, match=r"tokens must have none of the tokens .* videos"):
        row_log_probs(model, tokens, attended, sampled, **given)


def swapped(rows):
    """The same rows, with each other's images."""
    rows = rows.copy()
    rows[COUNT], rows[FIRST] = rows[COUNT].flip(0), rows[FIRST].flip(0)
    return RowImages.of(rows)


def first_two(rows):
    return RowImages.of(rows[:2])


def text_model():
    return make_model(vocab_size=30)


@pytest.mark.parametrize(
    ("family", "make", "images", "error", "message"),
    [
        (QWEN, None, None, ValueError, "images do not fit tokens in row 0: .*VisionInputs"),
        (QWEN, None, swapped, ValueError, "do not fit tokens in row 0: the images have"),
        ("llava", None, swapped, ValueError, r"row 2: it has 32 image tokens \(23\) and 1 images"),
        (QWEN, None, first_two, ValueError, "images must be those of the 3 rows"),
        (QWEN, text_model, RowImages.of, TypeError, "Qwen2ForCausalLM takes none.*2 of 3 rows"),
    ],
)
def test_rows_whose_images_do_not_fit_are_refused_by_name(family, make, images, error, message):
    model = make() if make else vl_model(family)[0]
    rows, _ = rows_with_images(family, [1, 0, 2], 9)
    with pytest.raises(error, match=message):
        row_log_probs(model, *entries(rows), images=images and images(rows))


def test_a_critic_of_text_refuses_images_by_name():
    rows, _ = rows_with_images(QWEN, [1, 0, 2], 9)
    with pytest.raises(TypeError, match="images: ValueModel takes none"):
        row_values(ValueModel.from_model(text_model()), *entries(rows), images=RowImages.of(rows))


class Wrapped(nn.Module):
    """Has no config, and takes what the model inside takes."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        return self.inside(input_ids, attention_mask, position_ids=position_ids, **kwargs)


def test_a_module_without_config_around_a_vision_model_does_not_score_images_as_text():
    model, _ = vl_model(QWEN)
    rows, _ = rows_with_images(QWEN, [1, 0, 2], 9)
    wrapped = Wrapped(model)
    for images in (None, RowImages.of(rows)):
        with pytest.raises(TypeError, match=r"images: Wrapped .*config.*2 of 3 rows"):
            row_log_probs(wrapped, *entries(rows), images=images)
    wrapped.config = model.config
    with torch.no_grad():
        got, expected = scores(wrapped, rows), scores(model, rows)
    torch.testing.assert_close(got, expected)


def test_a_text_model_scores_rows_that_show_no_images():
    model = text_model()
    rows, _ = rows_with_images("llava", [0, 0], 10)
    none = torch.zeros(2, dtype=torch.long)
    images = RowImages(torch.zeros(0, 4), None, none, none)
    got = row_log_probs(model, *entries(rows), images=images)[0]
    assert torch.equal(got, row_log_probs(model, *entries(rows))[0])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("fault", ["no text positions", "mask of the time axis", "leak"])
def test_models_that_do_not_keep_packed_images_apart_are_refused(family, fault):
    model = vl_model(family)[0]
    inner = model.model.language_model

    def spoil(module, args, kwargs):
        position = kwargs["position_ids"]
        if position is not None and len(position) == 4:
            if fault == "no text positions":
                position = position[1:]
            elif fault == "mask of the time axis":
                position = torch.cat([position[1:2], position[1:]])
            else:
                text = torch.arange(position.shape[-1]).expand_as(position[:1])
                position = torch.cat([text, position[1:]])
            kwargs["position_ids"] = position
        return args, kwargs

    inner.register_forward_pre_hook(spoil, with_kwargs=True)
    assert packing_fault(model, torch.arange(20)) is not None
    rows, _ = rows_with_images(family, [1, 1], 11)
    with pytest.raises(ValueError, match="packed=True needs a model that keeps packed rows apart"):
        scores(model, rows, packed=True)


@pytest.mark.parametrize("family", some_fast(["qwen2_5_vl"], FAMILIES))
def test_flash_attention_finds_packed_rows_in_the_positions_of_text(family):
    found, (model, _) = [], vl_model(family)
    attention_over_lengths(found)
    rows, alone = rows_with_images(family, [1, 0, 3], 12)
    with torch.no_grad():
        expected = by_transformers(model, rows, alone)
        for config in (model.config, model.config.text_config, model.config.vision_config):
            config._attn_implementation = "lengths_flash"
        got = scores(model, rows, packed=True)
    close([x.double() for x in got], expected)
    assert found[-1] == 3


@pytest.mark.parametrize("family", some_fast(["llava"], FAMILIES))
def test_logits_are_those_of_sampled_tokens_alone_also_in_half_precision(family):
    model, _ = vl_model(family)
    rows, alone = rows_with_images(family, [3], 13)
    with torch.no_grad():
        assert isinstance(output_states(model, dict(alone[0].inputs)), OutputStates)
        expected, entropy = scores(model, rows)
        half = copy.deepcopy(model).bfloat16()
        for policy, dtype in ((model, torch.bfloat16), (half, None)):
            got = scores(policy, rows, packed=True, dtype=dtype)
            close(got, (expected, entropy), 0.3, 0.1)
