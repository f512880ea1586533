"""A teacher's token-level signals, and cross-entropy of chosen tokens, as their definitions say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.conftest import make_model, make_rows
from tests.scoring.helpers import close, entries
from torchrl_mt.objectives import Distillation, ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.scoring.distillation import top_divergence
from torchrl_mt.scoring.log_probs import row_scores

KINDS = ("reverse", "forward", "jsd")


def divergence(p, q, kind):
    """Divergence of the policy ``p`` from the teacher ``q``, both log-probabilities, float64."""
    if kind == "jsd":
        mean = (0.5 * p.exp() + 0.5 * q.exp()).log()
        return 0.5 * divergence(mean, p, "forward") + 0.5 * divergence(mean, q, "forward")
    p, q = (p, q) if kind == "reverse" else (q, p)
    return (p.exp() * (p - q)).sum(-1)


@torch.no_grad()
def all_log_probs(model, rows):
    """After each attended token, by row: log-probabilities of all tokens, float64; place and mask."""
    masks = rows["masks"]
    for i, tokens in enumerate(rows["tokens", "full"]):
        place = masks["all_attention_mask"][i].nonzero().flatten()
        logits = model(input_ids=tokens[place][None]).logits[0].double()
        yield i, place.tolist(), logits.log_softmax(-1), masks["all_assistant_mask"][i]


def reference(actor, teacher, rows, kind):
    out = torch.zeros(rows["tokens", "full"].shape, dtype=torch.float64)
    pairs = zip(all_log_probs(actor, rows), all_log_probs(teacher, rows), strict=True)
    for (i, place, mine, mask), (_, _, theirs, _) in pairs:
        for k, t in enumerate(place):
            if mask[t] and k:
                out[i, t] = divergence(mine[k - 1], theirs[k - 1], kind)
    return out


@given(st.integers(0, 999), st.sampled_from(KINDS), st.floats(0.1, 5))
def test_a_few_tokens_and_the_rest_diverge_less_than_all(seed, kind, scale):
    g = torch.Generator().manual_seed(seed)
    p, q = (scale * torch.randn(2, 5, 9, generator=g, dtype=torch.float64)).log_softmax(-1)
    whole = divergence(p, q, kind)
    before = torch.zeros(5)
    for k in (1, 3, 9):
        top = q.topk(k).indices
        got = top_divergence(p.gather(-1, top), q.gather(-1, top), kind)
        assert (got <= whole + 1e-6).all()
        assert (got >= before - 1e-5).all()
        before = got
    torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True, "tree"])
def test_the_divergence_is_that_of_whole_distributions(kind, packed):
    actor, teacher, rows = make_model(), make_model(1), make_rows()
    expected = reference(actor, teacher, rows, kind)
    for full_logits in (False, True):
        *_, got, _ = row_scores(
            actor,
            *entries(rows),
            passes=Passes(packed=packed),
            full_logits=full_logits,
            distillation=Distillation(teacher, kind, top_k=1000),
        )
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)


def test_a_loss_draws_the_actor_to_the_teacher_and_leaves_the_teacher_alone():
    actor, teacher, rows = make_model(), make_model(1).train(), make_rows()
    weights = [p.clone() for p in teacher.parameters()]
    rows = ExperienceMaker(actor)(rows)
    loss = MultiTurnLoss(actor, distillation=Distillation(teacher, coef=2.0, top_k=8))
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in loss.parameters()}
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    found = []
    for _ in range(15):
        losses = loss(rows)
        found.append(float(losses["divergence"]))
        assert float(losses["loss_distill"]) == pytest.approx(2 * found[-1], rel=1e-5)
        losses["loss_distill"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found[-1] < 0.5 * found[0]
    assert teacher.training
    assert all(p.grad is None for p in teacher.parameters())
    close(weights, teacher.parameters(), 0, 0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
@pytest.mark.parametrize("packed", [False, "tree"])
def test_parts_and_shards_have_the_losses_of_the_whole(packed, aggregation):
    actor, teacher, rows = make_model(), make_model(1), make_rows(n=7)
    rows["masks", "sft"] = rows["masks", "all_attention_mask"].clone()
    rows = ExperienceMaker(actor)(rows)
    options = {"distillation": Distillation(teacher, "jsd", top_k=5), "sft_coef": 0.3}
    options["aggregation"] = aggregation
    names = ("loss_objective", "loss_distill", "loss_sft")

    def gradient(loss, parts, total):
        loss.zero_grad()
        values = []
        for part in parts:
            out = loss(part, total=total)
            sum(out[name] for name in names).backward()
            values.append(torch.stack([out[name].detach() for name in names]))
        return sum(values), torch.cat([p.grad.flatten() for p in loss.parameters()])

    whole = MultiTurnLoss(actor, **options, passes=Passes(packed=packed))
    total = whole.total(rows)
    expected = gradient(whole, [rows], total)
    small = MultiTurnLoss(actor, **options, passes=Passes(packed=packed, micro_batch_tokens=20))
    close(gradient(small, [rows], total), expected)
    close(gradient(whole, [rows[:3], rows[3:]], total), expected)


def test_chosen_tokens_have_their_cross_entropy():
    actor, rows = make_model(), make_rows()
    masks = rows["masks"]
    chosen = masks["all_attention_mask"] & ~masks["all_assistant_mask"]
    chosen &= torch.rand(chosen.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    rows["masks", "sft"] = chosen
    rows["valid"] = torch.ones(len(rows), dtype=torch.bool)
    rows["valid"][rows["episode"] == rows["episode"][0]] = False
    rows = ExperienceMaker(actor)(rows)
    plain = MultiTurnLoss(actor)(rows)
    mixed = MultiTurnLoss(actor, sft_coef=0.5)(rows)
    expected = 0.0
    for i, place, log_probs, _ in all_log_probs(actor, rows):
        for k, t in enumerate(place):
            if k and chosen[i, t] and rows["valid"][i]:
                expected -= float(log_probs[k - 1, rows["tokens", "full"][i, t]])
    expected *= 0.5 / float(plain["trained_tokens"])
    assert float(mixed["loss_sft"]) == pytest.approx(expected, rel=1e-4)
    for name in ("loss_objective", "entropy", "approx_kl", "trained_tokens"):
        torch.testing.assert_close(mixed[name], plain[name], atol=1e-6, rtol=1e-5)
    del rows["masks", "sft"]
    with pytest.raises(KeyError, match="sft"):
        MultiTurnLoss(actor, sft_coef=0.5)(rows)


def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token():
    actor, teacher, rows = make_model(), make_model(1), make_rows()
    rows = ExperienceMaker(actor, teacher=teacher, advantage="distill", old_log_probs="actor")(rows)
    mask = rows["masks", "all_assistant_mask"]
    own = rows["log_probs", "teacher"] - rows["log_probs", "old"]
    torch.testing.assert_close(rows["advantage"][..., 0], torch.where(mask, own, 0.0))
    assert rows["advantage"].any()
    for i, place, log_probs, mask in all_log_probs(teacher, rows):
        for k, t in enumerate(place):
            if k and mask[t]:
                expected = float(log_probs[k - 1, rows["tokens", "full"][i, t]])
                got = float(rows["log_probs", "teacher"][i, t])
                assert got == pytest.approx(expected, abs=1e-4)
