"""Where a pass has the rotary frequencies of its longest row, rows score as they do alone."""

import copy
import re

import pytest
import torch

from tests.scoring.helpers import tiny
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring.forward import scoring_mode
from torchrl_mt.scoring.log_probs import row_log_probs

ORIGINAL = 16
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"initializer_range": 0.4, "rope_theta": 10000.0}
# As transformers 4 has it; 5 makes its rope_parameters of it.
DYNAMIC = {"rope_type": "dynamic", "factor": 8.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
KINDS = {
    "longrope": (
        "Phi3",
        {"max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL},
        LONG,
    ),
    "dynamic": ("Llama", {"max_position_embeddings": ORIGINAL}, DYNAMIC),
    "layers": (
        "Gemma3Text",
        {"max_position_embeddings": ORIGINAL, "head_dim": 8, "sliding_window": 64}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        DYNAMIC,
    ),
}
SHORT, EDGE, LONGER, LONGEST = 9, ORIGINAL, 20, 24


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def build(kind):
    family, options, rope = KINDS[kind]

    def make():
        return tiny(family, **SIZES | options, rope_scaling=copy.deepcopy(rope))

    return make


def rows_of(*lengths):
    tokens = torch.randint(3, 64, (4, LONGEST), generator=torch.Generator().manual_seed(0))
    attended = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    return tokens[: len(lengths)], attended, attended


def alone(build, rows):
    """Each row's scores under a model that has seen nothing else."""
    return torch.cat(
        [row_log_probs(build(), *(x[[n]] for x in rows))[0] for n in range(len(rows[0]))]
    )


def state(model):
    tensors = {name: value.clone() for name, value in model.named_buffers()}
    cached = [
        (name, key, int(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key.endswith("max_seq_len_cached")
    ]
    return tensors, cached


def assert_same_state(model, before):
    tensors, cached = state(model)
    assert cached == before[1]
    assert tensors.keys() == before[0].keys()
    for name, value in tensors.items():
        assert torch.equal(value, before[0][name]), name


def test_rows_of_their_own_passes_score_as_they_do_alone(build):
    rows = rows_of(LONGEST, SHORT, LONGER, EDGE)
    model = build()
    before = state(model)
    expected = alone(build, rows)
    for _ in range(2):
        with torch.no_grad():
            got = row_log_probs(model, *rows, passes=Passes(micro_batch_size=1))[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert_same_state(model, before)
    # The lengths matter to the model: the test could fail.
    with torch.no_grad():
        long, short = (model(rows[0][:, :n]).logits[:, :SHORT] for n in (LONGEST, SHORT))
    assert (long - short).abs().max() > 0.001


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_would_change_each_other_are_refused(build, packed):
    model = build()
    before = state(model)
    for lengths in ((LONGER, SHORT), (SHORT, LONGER, EDGE)):
        with (
            pytest.raises(ValueError, match=re.escape("pass packed=False and micro_batch_size=1")),
            scoring_mode(model),
        ):
            row_log_probs(model, *rows_of(*lengths), passes=Passes(packed=packed))
        assert_same_state(model, before)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [(SHORT, EDGE, 5, 12), (LONGER, 1, LONGER)])
def test_rows_of_one_kind_share_passes(build, packed, lengths):
    rows = rows_of(*lengths)
    model = build()
    expected = alone(build, rows)
    with torch.no_grad():
        got = row_log_probs(model, *rows, passes=Passes(packed=packed))[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_long_rows_share_passes_if_each_has_the_same_frequencies(build, kind):
    rows = rows_of(LONGER, LONGEST)
    if kind == "longrope":
        got = row_log_probs(build(), *rows)[0]
        torch.testing.assert_close(got, alone(build, rows), atol=1e-5, rtol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"here of 24 tokens with one of 20 beside it"):
            row_log_probs(build(), *rows)


def test_what_a_model_computed_before_counts_neither_way(build):
    model = build()
    with torch.no_grad():
        # As generating a long answer does.
        model(rows_of(LONGEST)[0])
        before = state(model)
        rows = rows_of(LONGER)
        got = row_log_probs(model, *rows)[0]
    torch.testing.assert_close(got, alone(build, rows), atol=1e-5, rtol=1e-5)
    assert_same_state(model, before)


def test_gradients_are_those_of_the_row_alone(build):
    rows = rows_of(LONGER)
    gradients = []
    for model in (build(), build()):
        before = state(model)
        for _ in gradients:
            row_log_probs(model, *rows_of(LONGEST))
            row_log_probs(model, *rows_of(SHORT))
        row_log_probs(model, *rows)[0].sum().backward()
        assert_same_state(model, before)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_frequencies_that_inference_mode_has_made_are_no_obstacle(build):
    rows, model = rows_of(LONGER), build()
    with torch.inference_mode():
        model(input_ids=rows[0])
    got = row_log_probs(model, *rows, full_logits=True)[0]
    torch.testing.assert_close(got, alone(build, rows), atol=1e-5, rtol=1e-4)
