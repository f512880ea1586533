"""Rows of one prefix get the scores and gradients that they get alone, from fewer tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.scoring.helpers import assert_within_limits, close, tiny
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.row_trees import row_trees, tree_ratio
from torchrl_mt.scoring.values import ValueModel, row_values
from torchrl_mt.testing import tiny_vl_model

TREE = Passes(packed="tree", with_entropy=True)
PADDED = Passes(with_entropy=True)
FAMILIES = [
    ("Qwen2", {}),
    ("Llama", {"attn_implementation": "eager"}),
    ("GPT2", {}),
    ("Mistral", {"sliding_window": 12}),
    ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
]


def random_rows(seed, n, s, words=3, density=0.9):
    """Rows of few words, so that many begin alike; padding and environment tokens anywhere."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 3 + words, (n, s), generator=g)
    lengths = torch.randint(0, s + 1, (n, 1), generator=g)
    attended = (torch.arange(s) < lengths) & (torch.rand(n, s, generator=g) < density)
    return tokens, attended, attended & (torch.rand(n, s, generator=g) < 0.6)


def texts(tokens, attended):
    return [row[seen].tolist() for row, seen in zip(tokens, attended, strict=True)]


def scores(model, rows, passes, weight=None, **kwargs):
    """Log-probabilities and entropies, and all gradients of a sum of them, weighed by token."""
    log_prob, entropy = row_log_probs(model, *rows, passes=passes, **kwargs)
    weight = torch.linspace(-1, 1, log_prob.numel()).view_as(log_prob) if weight is None else weight
    model.zero_grad()
    ((log_prob + 0.1 * entropy) * weight).sum().backward()
    found = [(p.grad, p) for p in model.parameters()]
    gradients = [torch.zeros_like(p) if grad is None else grad.clone() for grad, p in found]
    return (log_prob.detach(), entropy.detach()), gradients


def assert_same(got, expected):
    close(got[0], expected[0], 2e-5, 1e-5)
    for mine, theirs in zip(got[1], expected[1], strict=True):
        assert (mine - theirs).norm() <= 1e-5 * max(theirs.norm(), 1e-3)


@given(
    seed=st.integers(0, 999),
    n=st.integers(1, 12),
    s=st.integers(1, 8),
    width=st.sampled_from([0.0, 3.0, 100.0, math.inf]),
    most=st.sampled_from([None, 1, 6, 20]),
)
def test_trees_have_each_row_once_and_each_prefix_once(seed, n, s, width, most):
    tokens, attended, _ = random_rows(seed, n, s)
    rows = texts(tokens, attended)
    trees = row_trees(tokens, attended, width, most)
    assert sorted(row for tree in trees for row in tree.rows) == [i for i in range(n) if rows[i]]
    for tree in trees:
        prefixes = {tuple(rows[i][:k]) for i in tree.rows for k in range(1, len(rows[i]) + 1)}
        assert tree.size == len(prefixes)
        assert most is None or tree.size <= most or len(tree.rows) == 1
        alone = sum(len(rows[i]) * (len(rows[i]) + width) for i in tree.rows)
        assert math.isinf(width) or tree.size * (tree.size + width) <= alone
    if math.isinf(width) and most is None:
        # Rows without a common beginning are apart, all others together.
        assert len(trees) == len({row[0] for row in rows if row})


@pytest.mark.parametrize(
    ("family", "options"), FAMILIES, ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("limits", [{}, {"tokens": 16}, {"size": 2}], ids=str)
def test_scores_and_gradients_are_those_of_padded_rows(family, options, limits):
    model = tiny(family, **options)
    rows = random_rows(0, 14, 12)
    assert tree_ratio(*rows[:2]) > 1.4
    given = {f"micro_batch_{name}": value for name, value in limits.items()}
    passes = Passes(packed="tree", with_entropy=True, **given)
    expected = scores(model, rows, PADDED)
    assert_same(scores(model, rows, passes), expected)
    assert_same(scores(model, rows, passes, full_logits=True), expected)
    assert_within_limits(model, rows[1], lambda: scores(model, rows, passes), **limits)


def test_values_are_those_of_padded_rows():
    critic = ValueModel.from_model(tiny("Qwen2"))
    torch.nn.init.normal_(critic.head.weight)
    rows = random_rows(1, 14, 12)
    padded, tree = (row_values(critic, *rows, passes=passes) for passes in (PADDED, TREE))
    assert padded.any()
    close([tree], [padded])


def test_the_order_of_rows_and_their_padding_change_nothing():
    model, rows = tiny("Llama"), random_rows(2, 14, 12)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(14, 12)
    moved = [torch.nn.functional.pad(entry[order], (2, 1)) for entry in rows]
    got = scores(model, moved, TREE, torch.nn.functional.pad(weight[order], (2, 1)))
    expected = scores(model, rows, TREE, weight)
    expected = [torch.nn.functional.pad(x[order], (2, 1)) for x in expected[0]], expected[1]
    assert_same(got, expected)


def test_equal_rows_with_other_weights_and_a_row_that_is_anothers_prefix_count():
    model = tiny("Qwen2")
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 0], [5, 6, 7, 9]])
    attended = tokens > 0
    weight = torch.tensor([1.0, -3.0, 10.0, 0.5])[:, None].expand(4, 4)
    rows = tokens, attended, attended.clone()
    assert row_trees(tokens, attended, math.inf)[0].size == 5
    got = scores(model, rows, TREE, weight)
    assert_same(got, scores(model, rows, PADDED, weight))
    assert torch.equal(got[0][0][0], got[0][0][1])


def test_a_leaf_has_no_influence_on_another():
    model = tiny("Llama", attn_implementation="eager")
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 10, 11, 12], [5, 6, 10, 13, 14]])
    attended = torch.ones_like(tokens, dtype=torch.bool)
    mask = torch.zeros_like(attended)
    mask[1] = True
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        log_prob, _ = row_log_probs(model, tokens, attended, mask, passes=TREE)
        log_prob.sum().backward()
        gradient = model.get_input_embeddings().weight.grad
        assert gradient[[5, 6, 10, 11]].any(-1).all()
        assert not gradient[[7, 8, 9, 13, 14]].any()
        changed = tokens.clone()
        changed[0, 2:] = changed[2, 3:].repeat(2)[:3] + 1
        again, _ = row_log_probs(model, changed, attended, mask, passes=TREE)
        torch.testing.assert_close(again, log_prob, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tiny("Mamba"), "MambaForCausalLM takes no attention_mask of shape"),
        (lambda: tiny("Lfm2", layer_types=["conv", "full_attention"]), "packed='tree' .* Lfm2"),
        (lambda: tiny("Bloom"), "BloomForCausalLM takes no attention_mask of shape"),
        (
            lambda: tiny("Bert", is_decoder=False),
            "BertLMHeadModel (computes a packed row otherwise|takes no attention_mask)",
        ),
        (lambda: tiny("Mistral", sliding_window=3), r"row of 6 tokens .* slides over 3"),
        (lambda: tiny_vl_model("qwen2_5_vl")[0], "takes images, which rows"),
    ],
)
def test_models_that_cannot_be_right_are_refused_by_name(make, match):
    tokens = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 10, 9, 3]])
    attended = torch.ones_like(tokens, dtype=torch.bool)
    with pytest.raises(ValueError, match=match):
        row_log_probs(make(), tokens, attended, attended, passes=TREE)


def test_a_flash_attention_is_refused_by_name():
    model = tiny("Llama")
    model.config._attn_implementation = "flash_attention_2"
    tokens = torch.tensor([[5, 6]])
    attended = torch.ones_like(tokens, dtype=torch.bool)
    with pytest.raises(ValueError, match="flash_attention_2, which takes no mask"):
        row_log_probs(model, tokens, attended, attended, passes=TREE)


def test_rows_that_need_other_frequencies_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("Llama", max_position_embeddings=4, rope_scaling=rope)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 10, 0, 0]])
    with pytest.raises(ValueError, match="rotary frequencies of the longest"):
        row_log_probs(model, tokens, tokens > 0, tokens > 0, passes=TREE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_block_masks_of_flex_attention_are_those_of_trees():
    model = tiny("Llama", hidden_size=32, attn_implementation="flex_attention")
    rows = random_rows(3, 10, 8)
    with torch.no_grad():
        got = row_log_probs(model, *rows, passes=TREE)
        model.set_attn_implementation("sdpa")
        close(got, row_log_probs(model, *rows, passes=PADDED))


def test_the_number_of_tokens_in_a_group_and_in_turns_whose_thoughts_are_left_out():
    def draw(n, s):
        return torch.randint(0, 1000, (n, s))

    group = torch.cat([draw(1, 512).expand(8, -1), draw(8, 128)], 1)
    assert tree_ratio(group, group >= 0) == pytest.approx(10 / 3, 0.01)
    seen, rows = draw(1, 128)[0], []
    for _ in range(6):
        seen = torch.cat([seen, draw(1, 32)[0]])
        answer = draw(1, 32)[0]
        rows.append(torch.cat([seen, draw(1, 64)[0], answer]))
        seen = torch.cat([seen, answer])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    assert tree_ratio(tokens, tokens >= 0) > 2.2
