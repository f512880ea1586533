"""A token's score depends on the attended tokens before it and on nothing else."""

import copy

import pytest
import torch
from torch import nn
from torchrl.modules.llm import TransformersWrapper

from tests.scoring.helpers import DEVICES, assert_within_limits, close, entries
from tests.settings import grouped
from tests.tiers import pairs, some_fast
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring import linear_log_probs, token_log_probs
from torchrl_mt.scoring.forward import scoring_mode
from torchrl_mt.scoring.log_probs import row_log_probs, row_scores, scored_tokens
from torchrl_mt.scoring.values import ValueModel, row_values


def by_hand(model, rows, temperature=1.0):
    """One forward pass per row over its attended tokens alone."""
    tokens, attention, mask = entries(rows)
    log_prob, entropy = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
    for n in range(len(tokens)):
        where = attention[n].nonzero().flatten()
        logits = model(input_ids=tokens[n][where][None]).logits[0].float() / temperature
        logits = logits.log_softmax(-1)
        for i, t in enumerate(where.tolist()):
            if mask[n, t] and i:
                log_prob[n, t] = logits[i - 1, tokens[n, t]]
                entropy[n, t] = -(logits[i - 1].exp() * logits[i - 1]).sum()
    return log_prob, entropy


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("packed", [False, True, "tree"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_norms_are_those_of_whole_distributions(
    model, rows, monkeypatch, full_logits, packed, with_entropy
):
    for module in (linear_log_probs, token_log_probs):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 50)
    tokens, attention, mask = entries(rows(n=9))
    passes = Passes(packed, temperature=0.7, with_entropy=with_entropy, micro_batch_size=4)
    given = {"full_logits": full_logits, "passes": passes}
    *others, got = row_scores(model, tokens, attention, mask, **given, with_norms=True)
    *plain, none = row_scores(model, tokens, attention, mask, **given)
    assert none is None
    close(others[: 1 + with_entropy], plain[: 1 + with_entropy], 0, 0)
    p = (model(input_ids=tokens).logits / 0.7).softmax(-1)[:, :-1]
    own = p.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    expected = nn.functional.pad(1 - 2 * own + p.square().sum(-1), (1, 0)) * mask
    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("suffix_padding", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_the_attended_tokens_alone(
    model, rows, seed, suffix_padding, temperature
):
    batch = rows(seed, suffix_padding=suffix_padding)
    passes = Passes(temperature=temperature, with_entropy=True)
    close(row_log_probs(model, *entries(batch), passes=passes), by_hand(model, batch, temperature))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("limits", "packed"),
    pairs([{}, {"tokens": 1}, {"tokens": 15}, {"tokens": 30}, {"size": 2}], [False, True]),
)
@pytest.mark.parametrize("full_logits", some_fast([False], [False, True]))
def test_packing_and_cutting_change_nothing(
    model, rows, spread, device, packed, limits, full_logits
):
    batch = spread(rows(n=9, suffix_padding=False))
    expected = by_hand(model, batch)
    options = {f"micro_batch_{name}": value for name, value in limits.items()}
    options |= {"packed": packed, "full_logits": full_logits}
    got = row_log_probs(model.to(device), *entries(batch), **grouped(with_entropy=True, **options))
    close(got, expected, 1e-4, 1e-4)

    def score():
        assert row_log_probs(model, *entries(batch), **grouped(**options))[1] is None

    assert_within_limits(model, entries(batch)[1], score, **limits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [None, 15])
def test_packed_and_padded_gradients_are_those_of_the_rows_alone(model, rows, device, budget):
    batch, out, model = rows(n=9, suffix_padding=False), [], model.to(device)
    for packed in (None, False, True):
        options = {"with_entropy": True, "packed": packed, "micro_batch_tokens": budget}
        if packed is None:
            log_prob, entropy = by_hand(model, batch.to(device))
        else:
            log_prob, entropy = row_log_probs(model, *entries(batch), **grouped(**options))
        (log_prob.square().sum() + entropy.sum()).backward()
        out.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    norm = torch.stack([g.norm() for g in out[0]]).norm()
    for got in out[1:]:
        assert all((a - b).norm() < 1e-4 * norm for a, b in zip(got, out[0], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("full_logits", [False, True])
def test_mixed_precision_gives_float32_scores_nearby(make_model, rows, device, packed, full_logits):
    model, batch = make_model().to(device), entries(rows())
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    exact = row_log_probs(model, *batch, passes=Passes(with_entropy=True))
    options = {"packed": packed, "full_logits": full_logits, "dtype": torch.bfloat16}
    got = row_log_probs(model, *batch, **grouped(with_entropy=True, **options))
    for a, b in zip(got, exact, strict=True):
        assert a.dtype is torch.float32
        assert 0 < (a - b).norm() < 0.1 * b.norm()
    got[0].sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled(device)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_to_score_still_has_a_gradient(model, rows, packed):
    tokens, attention, mask = entries(rows())
    for attended in (attention, torch.zeros_like(attention)):
        none, passes = torch.zeros_like(mask), Passes(packed=packed, with_entropy=True)
        log_prob, entropy = row_log_probs(model, tokens, attended, none, passes=passes)
        assert not log_prob.any()
        assert not entropy.any()
        (log_prob.sum() + entropy.sum()).backward()
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    empty = (x[:0] for x in (tokens, attention, mask))
    log_prob = row_log_probs(model, *empty, passes=Passes(packed=packed))[0]
    assert log_prob.shape == (0, 12)
    log_prob.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


class Bigram(nn.Module):
    """Logits that depend on one token alone."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(24, 24, **options)

    def forward(self, input_ids, attention_mask):
        assert attention_mask.any(-1).all(), "attention over nothing is not a number"
        return self.table(input_ids)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_half_precision_logits_are_divided_in_float32(rows, with_entropy):
    model = Bigram(dtype=torch.bfloat16)
    nn.init.normal_(model.table.weight, std=5.0)
    tokens, attention, mask = entries(rows())
    passes = Passes(temperature=0.7, with_entropy=with_entropy)
    got = row_log_probs(model, tokens, attention, mask, passes=passes)[0]
    log_p = (model.table.weight.detach().double() / 0.7).log_softmax(-1)
    expected = torch.where(mask[:, 1:], log_p[tokens[:, :-1], tokens[:, 1:]], 0.0)
    torch.testing.assert_close(got[:, 1:].double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_padding_alone_are_harmless(model, rows):
    batch = rows()
    batch["masks", "all_attention_mask"][1] = False
    batch["masks", "all_assistant_mask"][1] = False
    log_prob = row_log_probs(model, *entries(batch))[0]
    log_prob.sum().backward()
    assert not log_prob[1].any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(log_prob[[0]], row_log_probs(model, *entries(batch[:1]))[0])


@pytest.mark.parametrize("seed", range(3))
def test_scored_are_the_sampled_tokens_but_a_rows_first(model, rows, spread, seed):
    batch = spread(rows(seed, suffix_padding=False))
    tokens, attention, _ = entries(batch)
    log_prob = row_log_probs(model, tokens, attention, attention)[0]
    assert torch.equal(scored_tokens(attention, attention), log_prob != 0)
    assert not scored_tokens(attention, torch.zeros_like(attention)).any()


def test_a_wrapper_is_its_model(model, rows, tokenizer):
    options = {"input_mode": "tokens", "generate": False, "pad_output": True}
    wrapper, batch = TransformersWrapper(model, tokenizer=tokenizer, **options), rows()
    expected = row_log_probs(model, *entries(batch))[0]
    got = row_log_probs(wrapper, *entries(batch))[0]
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    mask = entries(batch)[2]
    theirs = wrapper(batch.clone())["log_probs", "full"]
    torch.testing.assert_close(theirs[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_any_module_with_logits_will_do(rows):
    model, batch = Bigram(), rows()
    batch["masks", "all_attention_mask"][1] = False
    batch["masks", "all_assistant_mask"][1] = False
    tokens, _, mask = entries(batch)
    expected = model.table.weight.log_softmax(-1)[tokens[:, :-1], tokens[:, 1:]]
    got = row_log_probs(model, *entries(batch))[0]
    torch.testing.assert_close(got[:, 1:][mask[:, 1:]], expected[mask[:, 1:]])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"attention_mask": torch.zeros(6, 12).bool()}, ValueError, "false on padding"),
        ({"attention_mask": torch.ones(1, 12) > 0}, ValueError, "attention_mask must have shape"),
        ({"actor": print}, TypeError, "actor must be a causal language model"),
        ({"tokens": torch.zeros(12).long()}, ValueError, "tokens must have shape"),
        ({"actor": nn.Linear(2, 2), "packed": True}, ValueError, "pass packed=False"),
    ],
)
def test_bad_input_is_refused_by_name(model, rows, wrong, error, message):
    given = dict(zip(["tokens", "attention_mask", "mask"], entries(rows()), strict=True))
    with pytest.raises(error, match=message):
        row_log_probs(**grouped(**{"actor": model, **given, **wrong}))


def test_scoring_leaves_modes_and_random_state_alone(model, monkeypatch):
    # Whatever threads other tests have left.
    monkeypatch.setattr("torchrl_mt.scoring.forward.active_count", lambda: 1)
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()

    def fail_inside():
        with scoring_mode(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(3)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("token", [-1, 24, 10**9])
def test_tokens_that_the_model_does_not_know_are_refused(model, rows, packed, token):
    batch = rows()
    tokens, attention, mask = entries(batch)
    critic = ValueModel.from_model(model)
    tokens[~attention] = token  # Padding may be any number.
    row_log_probs(model, tokens, attention, mask, passes=Passes(packed=packed))
    row_values(critic, tokens, attention, mask)
    headed = ValueModel.from_model(copy.deepcopy(model))
    nn.init.normal_(headed.head.weight)
    row_values(headed, tokens, attention, mask, passes=Passes(packed=packed))
    tokens[2, attention[2].nonzero()[0]] = token
    with pytest.raises(ValueError, match=rf"in \[0, 24\), .* Qwen2ForCausalLM, got {token};"):
        row_log_probs(nn.DataParallel(model), tokens, attention, mask, passes=Passes(packed=packed))
    with pytest.raises(ValueError, match=rf"in \[0, 24\), .* ValueModel, got {token};"):
        row_values(critic, tokens, attention, mask)


def test_a_model_that_does_not_show_its_embedding_is_not_asked(model, rows, monkeypatch):
    batch = rows()
    expected = row_log_probs(model, *entries(batch))[0]

    def hidden(self):
        raise NotImplementedError

    monkeypatch.setattr(type(model), "get_input_embeddings", hidden)
    assert torch.equal(row_log_probs(model, *entries(batch))[0], expected)


class Hashing(nn.Embedding):
    """Any number has an embedding."""

    def forward(self, ids):
        return super().forward(ids % self.num_embeddings)


def test_embeddings_that_take_any_number_may(model, rows):
    batch = rows()
    tokens, attention, mask = entries(batch)
    expected = row_log_probs(model, tokens, attention, mask)[0]
    weight = model.get_input_embeddings().weight
    model.set_input_embeddings(Hashing(*weight.shape, _weight=weight.detach()))
    hashed = torch.where(attention & ~mask, tokens + 24, tokens)
    torch.testing.assert_close(row_log_probs(model, hashed, attention, mask)[0], expected)


def test_places_of_pictures_are_no_unknown_tokens(model, rows):
    """As in PaliGemma, which puts a known token where a picture is before it embeds."""
    batch = rows()
    tokens, attention, mask = entries(batch)
    places = attention & ~mask
    expected = row_log_probs(model, torch.where(places, 0, tokens), attention, mask)[0]
    embed = model.model.embed_tokens
    embed.register_forward_pre_hook(lambda _, args: (args[0].where(args[0] != 30, 0),))
    model.config.image_token_id, model.config.eos_token_id = 30, [2, 1]
    shown = torch.where(places, 30, tokens)
    torch.testing.assert_close(row_log_probs(model, shown, attention, mask)[0], expected)
    shown[places.nonzero()[0].unbind()] = 31
    with pytest.raises(ValueError, match="got 31; were they made with another model"):
        row_log_probs(model, shown, attention, mask)


def test_the_output_layer_may_be_in_float32(model, rows):
    batch = entries(rows())
    half = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        hidden = half.model(batch[0], attention_mask=batch[1].long()).last_hidden_state
        weight = half.get_output_embeddings().weight
        exact = (hidden.float() @ weight.float().T).log_softmax(-1)
    attended, mask = batch[1], batch[2] & (batch[1].cumsum(-1) > 1)
    expected = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        state = int(attended[i, :t].nonzero().max())
        expected[i, t] = exact[i, state, batch[0][i, t]]
    passes = Passes(head_dtype=torch.float32)
    got, _ = row_log_probs(half, *batch, passes=passes)
    rough, _ = row_log_probs(half, *batch)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (rough - expected).abs().max() > 1e-4
