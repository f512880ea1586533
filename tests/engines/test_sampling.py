"""Each request's own distribution and random numbers."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.tiers import few_or_many
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.engines.sampling import Sampling, draw, probabilities, random_word
from torchrl_mt.engines.transformers import batch_scheduler

from .helpers import (
    ask,
    assert_sampled_by,
    check,
    generate_all,
    idle,
    outcomes,
    plain_logits,
    prompts,
    until,
)

laws = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([5e-324, 1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.1, 0.5, 1.0]),
)


def reference(logits: torch.Tensor, law: Sampling) -> torch.Tensor:
    """The log-probabilities of a law by the host's processors for whole batches, one by one."""
    if law.temperature == 0:
        return torch.full_like(logits, -math.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    scores = logits.double()
    for wanted, processor in (
        (law.temperature != 1, lambda: TemperatureLogitsWarper(float(law.temperature))),
        (law.top_k > 0, lambda: TopKLogitsWarper(law.top_k)),
        (law.top_p < 1, lambda: TopPLogitsWarper(law.top_p)),
        (law.min_p > 0, lambda: MinPLogitsWarper(law.min_p)),
    ):
        if wanted:
            scores = processor()(None, scores)
    return scores.log_softmax(-1).float()


def drawn(logits: torch.Tensor, requests) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of requests, each a law, a seed and a position."""
    words = [random_word(seed, position) for _, seed, position in requests]
    return draw(logits, [law for law, _, _ in requests], words)


@few_or_many(40, 80)
def test_each_rows_log_prob_is_that_of_its_own_law(examples):
    request = st.tuples(laws, st.integers(), st.integers(0, 9999))
    check(each_row_has_its_law, examples, requests=st.lists(request, min_size=1, max_size=6))


def each_row_has_its_law(requests):
    generator = torch.Generator().manual_seed(len(requests))
    logits = 3 * torch.randn(len(requests), 11, generator=generator)
    tokens, log_probs = drawn(logits, requests)
    for row, (law, _, _) in enumerate(requests):
        expected = reference(logits[row : row + 1], law)[0, tokens[row]]
        assert expected.isfinite()
        torch.testing.assert_close(log_probs[row], expected, atol=1e-4, rtol=0)


def kept_of(probs: torch.Tensor, law: Sampling) -> torch.Tensor:
    """The tokens that are left of one row, by sorting it: equal ones in their own order."""
    order = probs.sort(descending=True, stable=True).indices[: law.top_k or None]
    ranked = probs[order].double()
    before = ranked.cumsum(0) - ranked
    count = int((before < law.top_p * ranked.sum()).sum()) if law.top_p < 1 else len(order)
    order = order[: max(count, 1)]
    return order[probs[order] >= law.min_p * probs.max()].sort().values


@few_or_many(20, 75)
def test_rows_are_truncated_as_if_they_were_sorted(examples):
    check(
        rows_are_truncated,
        examples,
        size=st.sampled_from([2, 3, 7, 50, 256, 257, 2048, 49152]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
        barred=st.sampled_from([0.0, 0.3, 1.0]),
        cuts=st.lists(
            st.builds(
                Sampling,
                top_k=st.sampled_from([0, 1, 2, 50, 1000]),
                top_p=st.sampled_from([5e-324, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
                min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
            ),
            min_size=1,
            max_size=4,
        ),
        seed=st.integers(0, 2**32),
        device="cpu",
    )


def rows_are_truncated(size, dtype, spread, barred, cuts, seed, device):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(len(cuts), size, generator=generator)).to(dtype)
    out = torch.rand(logits.shape, generator=generator) < barred
    out[:, seed % size] = False
    logits[out] = -math.inf
    logits = logits.to(device)
    probs = probabilities(logits.float(), cuts).cpu()
    words = [random_word(seed, row) for row in range(len(cuts))]
    tokens, log_probs = draw(logits, cuts, words)
    for row, law in enumerate(cuts):
        whole = logits.float().softmax(-1)[row].cpu()
        kept = kept_of(whole, law)
        kept = kept[whole[kept] > 0]
        assert probs[row].nonzero()[:, 0].tolist() == kept.tolist()
        assert torch.equal(probs[row, kept], whole[kept])
        expected = whole[kept].double() / whole[kept].double().sum()
        place = kept.tolist().index(int(tokens[row]))
        assert log_probs[row].item() == pytest.approx(float(expected[place].log()), abs=1e-5)
        # The token that the number falls on, up to rounding.
        share = (words[row] >> 32) / 2**32
        assert expected[:place].sum() - 1e-5 < share < expected[: place + 1].sum() + 1e-5
        alone = draw(logits[row : row + 1], [law], [words[row]])
        assert alone[0][0] == tokens[row]
        torch.testing.assert_close(alone[1][0], log_probs[row], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "law", [Sampling(), Sampling(0.7, 6), Sampling(1.5, 0, 0.8), Sampling(1.2, 0, 1.0, 0.2)]
)
def test_tokens_are_drawn_as_often_as_their_law_says(law):
    logits = 1.5 * torch.randn(1, 13, generator=torch.Generator().manual_seed(3))
    count = 40_000
    requests = [(law, seed, position) for seed in range(40) for position in range(count // 40)]
    tokens, _ = drawn(logits.expand(count, -1), requests)
    seen = torch.bincount(tokens, minlength=13)
    expected = reference(logits, law)[0].exp() * count
    assert not seen[expected == 0].any()
    kept = expected > 0
    chi_squared = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_squared < 40  # of at most 12 degrees of freedom: one in 10,000 seeds fails


def test_random_words_are_those_of_the_paper_and_differ():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [random_word(1234567, i) for i in range(3)] == published
    words = {random_word(seed, index) for seed in range(-20, 80) for index in range(100)}
    assert len(words) == 10_000


def test_no_temperature_is_too_low():
    logits = torch.tensor([[1.0, 3.0, 2.0], [88.0, -1e30, 5.0]])
    requests = [(Sampling(1e-45), 1, 1), (Sampling(5e-324), 1, 1)]
    tokens, log_probs = drawn(logits, requests)
    assert tokens.tolist() == [1, 0]
    assert log_probs.tolist() == [0, 0]


def test_logits_that_are_no_numbers_are_seen_in_the_log_prob():
    laws = [Sampling(), Sampling(0), Sampling(0.5, 3), Sampling(1.0, 0, 0.5), Sampling(min_p=0.1)]
    wrong = [[math.nan, 0.0], [-math.nan, 1.0], [math.inf, 0.0], [-math.inf, -math.inf]]
    logits = torch.tensor([[0.0, 1.0], *wrong]).repeat_interleave(300, 1)
    for law in laws:
        tokens, log_probs = draw(logits, [law] * 5, [2**64 - 1] * 5)
        assert log_probs.isfinite().tolist() == [True, False, False, False, False]
        assert ((tokens >= 0) & (tokens < 600)).all()


def test_what_truncates_one_row_leaves_the_tail_of_another():
    """The likeliest token has a probability that rounds to 1, and is not the only one all the same."""
    logits = torch.tensor([[0.0, -17.0], [0.0, -17.0]])
    tokens, log_probs = draw(logits, [Sampling(), Sampling(1.0, 0, 0.5)], [2**64 - 1] * 2)
    assert tokens.tolist() == [1, 0]
    assert log_probs[0] == pytest.approx(-17)


def test_the_tokens_of_an_answer_do_not_depend_on_each_other(model, tokenizer):
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely, whatever came before
    engine = TransformersEngine(model, tokenizer, seed=0)
    (answer,) = generate_all(engine, prompts(1), max_new_tokens=300, stop_token_ids=[])
    tokens = torch.tensor(answer.token_ids)
    pairs = torch.bincount(tokens[:-1] // 6 * 5 + tokens[1:] // 6, minlength=25).float()
    share = torch.tensor([6, 6, 6, 6, 2]) / 26  # of 26 tokens, six in each of four classes
    expected = 299 * torch.outer(share, share).flatten()
    assert ((pairs - expected) ** 2 / expected).sum() < 60  # of 24 degrees of freedom


def test_requests_of_one_batch_have_their_own_laws(engine, model):
    cases = [
        {},
        {"temperature": 0.4},
        {"temperature": 2.0, "top_k": 4},
        {"top_p": 0.5},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.7},
        {"temperature": 0},
        {"temperature": 0, "top_k": 3},
        {"top_k": 26, "top_p": 1.0},
        {"min_p": 0.3},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.2},
    ] * 4
    requests = prompts(len(cases))

    answers = generate_all(engine, requests, cases)
    for prompt, case, answer in zip(requests, cases, answers, strict=True):
        expected = reference(plain_logits(model, prompt, answer), Sampling().changed(**case))
        expected = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)
        record = {k: v for k, v in case.items() if (k, v) not in {("top_k", 26), ("top_p", 1.0)}}
        assert answer.sampling == ({"temperature": 0.0} if case.get("temperature") == 0 else record)


def test_the_engines_law_is_its_requests_unless_they_say_otherwise(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, temperature=0.5, top_k=2, top_p=0.9)
    assert ask(engine).sampling == {"temperature": 0.5, "top_k": 2, "top_p": 0.9}
    answer = ask(engine, prompts(1)[0], temperature=1, top_k=0, top_p=1.0)
    assert answer.sampling == {}
    assert_sampled_by(model, prompts(1)[0], answer)


def test_a_seed_gives_the_same_answers_again(model, tokenizer):
    def run(seed):
        engine = TransformersEngine(model, tokenizer, seed=seed, max_new_tokens=6)
        return [ask(engine, p).token_ids for p in prompts(3) * 2]

    first = run(3)
    assert first == run(3)
    assert first != run(4)
    assert first[:3] != first[3:]  # each request has random numbers of its own


def test_a_requests_seed_is_all_that_its_answer_depends_on(engine, model, tokenizer):
    (alone,) = generate_all(engine, prompts(1), seed=11)
    generate_all(engine, prompts(7))
    *_, crowded = generate_all(engine, [*prompts(5) * 3, *prompts(1)], [{}] * 15 + [{"seed": 11}])
    other = TransformersEngine(model, tokenizer, max_batch_tokens=5, max_new_tokens=8)
    (elsewhere,) = generate_all(other, prompts(1), seed=11)
    assert alone.token_ids == crowded.token_ids == elsewhere.token_ids


def test_the_global_generator_is_neither_read_nor_moved(model, tokenizer):
    def run(torch_seed):
        engine = TransformersEngine(model, tokenizer, seed=5)
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        answers = generate_all(engine, prompts(8))
        assert torch.equal(torch.get_rng_state(), before)
        return [answer.token_ids for answer in answers]

    assert run(0) == run(1)


def test_without_a_seed_torchs_own_decides(model, tokenizer):
    def run():
        torch.manual_seed(9)
        engines = [TransformersEngine(model, tokenizer) for _ in range(2)]
        return [answer.token_ids for e in engines for answer in generate_all(e, prompts(3))]

    first = run()
    assert first == run()
    assert first[:3] != first[3:]


def test_a_request_may_have_its_own_stop_tokens(engine):
    assert engine.stop_token_ids == {1}
    stops = [4, 5, 6, 7, 8, 9, 10]
    answers = generate_all(engine, prompts(48), max_new_tokens=6, stop_token_ids=stops)
    for answer in answers:
        assert not set(answer.token_ids[:-1]) & set(stops)
        stopped = answer.token_ids[-1] in stops
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(answer.token_ids) == 6
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert any(1 in answer.token_ids[:-1] for answer in answers)  # the engine's own does not count
    for answer in generate_all(engine, prompts(16), stop_token_ids=[]):
        assert len(answer.token_ids) == 8
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("how", ["raises", "no numbers"])
def test_a_row_that_cannot_be_drawn_for_fails_alone(model, tokenizer, monkeypatch, how):
    engine = TransformersEngine(model, tokenizer, max_new_tokens=8)
    alone = [ask(engine, p, seed=k).token_ids for k, p in enumerate(prompts(3))]
    plain = batch_scheduler.draw

    def draw(logits, params, words):
        bad = [k for k, row in enumerate(params) if row.temperature == 0.5]
        if bad and how == "raises":
            raise ArithmeticError("a bad row")
        tokens, log_probs = plain(logits, params, words)
        log_probs[bad] = math.nan
        return tokens, log_probs

    monkeypatch.setattr(batch_scheduler, "draw", draw)
    own = [*({"seed": k} for k in range(3)), {"temperature": 0.5}]
    *answers, failed = outcomes(engine, prompts(3) + prompts(1), own)
    assert [answer.token_ids for answer in answers] == alone
    message = "a bad row" if how == "raises" else "logits must be finite"
    assert isinstance(failed, RuntimeError)
    assert message in str(failed)
    asyncio.run(until(lambda: idle(engine)))
