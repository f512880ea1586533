"""Given tokens scored by servers are those of the model here, and a server can be a teacher."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch

from tests.engines.completions_server import CompletionsServer
from tests.engines.helpers import completions
from tests.engines.sampling_servers import SGLangServer, VLLMServer
from tests.faulty_server import running, status
from tests.objectives.conftest import make_model, make_rows
from tests.waiting import PATIENCE
from torchrl_mt.engines import CompletionsEngine, TransformersEngine
from torchrl_mt.engines.completions.engine import CompletionsError
from torchrl_mt.objectives import Distillation, ExperienceMaker, MultiTurnLoss, Passes

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

KINDS = {"openai": VLLMServer, "vllm": VLLMServer, "sglang": SGLangServer}
DISTILL = {"advantage": "distill", "old_log_probs": "actor"}


@torch.no_grad()
def plain(model, prompt):
    logits = model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


@pytest.fixture(params=KINDS)
def server(request):
    with running(KINDS[request.param]()) as server:
        server.api, server.model = request.param, make_model(1)
        server.prompt_log_probs = lambda prompt: plain(server.model, prompt)
        yield server


def make(server, **options):
    return completions(server.url, None, api=server.api, **options)


def test_scores_are_the_models_whatever_the_engine_samples_with(server):
    sampling = {"top_p": 0.5, "stop": ["a"] * 9, "min_tokens": 3}
    engine = make(server, temperature=0.3, extra_body=sampling, logprobs_mode="raw_logprobs")
    tokens = [[5, 6, 7, 8], [9], [9]]
    together = threading.Barrier(len(tokens), timeout=PATIENCE)
    server.before_token = lambda k: together.wait()
    found = asyncio.run(engine.score(tokens))
    for given, got in zip(tokens, found, strict=True):
        torch.testing.assert_close(got, torch.tensor([0.0, *plain(server.model, given)]))
    params = server.seen[0].get("sampling_params", server.seen[0])
    assert (params["temperature"], params["top_p"], params.get("stop")) == (1.0, 1.0, None)


def test_a_served_teacher_teaches_as_one_here(server):
    actor, rows = make_model(), make_rows(suffix_padding=False)
    mask, first = rows["masks", "all_assistant_mask"], rows["masks", "all_attention_mask"].int()
    mask[2], mask[3, first[3].argmax()] = False, True
    expected = ExperienceMaker(actor, teacher=server.model, **DISTILL)(rows.clone())
    server.faults.append(status(503))
    got = ExperienceMaker(actor, teacher=make(server), **DISTILL)(rows.clone())
    for key in (("log_probs", "teacher"), "advantage"):
        torch.testing.assert_close(got[key], expected[key], atol=1e-5, rtol=0)
    assert got["log_probs", "teacher"].any()
    assert len(server.seen) == 6  # A row without sampled tokens is not sent; one failed once.
    MultiTurnLoss(actor)(got)["loss_objective"].backward()


def test_a_server_that_fails_is_named_and_leaves_the_rows(server):
    server.faults += [status(500)] * 99
    rows, before = make_rows(), make_rows()
    maker = ExperienceMaker(make_model(), teacher=make(server, max_retries=1), **DISTILL)
    with pytest.raises(CompletionsError, match=rf"{server.url}.* failed after 2 attempts"):
        maker(rows)
    assert set(rows.keys(True)) == set(before.keys(True))
    assert (rows == before).all()


def test_what_is_no_log_probability_is_refused(server):
    engine = make(server)
    server.prompt_log_probs = lambda prompt: [-9999.0]  # As vLLM writes minus infinity.
    assert asyncio.run(engine.score([[5, 6]]))[0].tolist() == [0.0, -math.inf]
    for value in (None, 0.5, math.nan):
        server.prompt_log_probs = lambda prompt, value=value: [value]
        with pytest.raises(CompletionsError, match=r"prompt_logprobs\[1\] must be a log-prob"):
            asyncio.run(engine.score([[5, 6]]))


def test_a_server_without_scores_is_refused():
    with running(CompletionsServer()) as server:
        engine = CompletionsEngine(server.url, "tiny", None)
        with pytest.raises(CompletionsError, match="does the server support prompt_logprobs"):
            asyncio.run(engine.score([[5, 6]]))


def test_engines_that_cannot_teach_are_refused(tokenizer, monkeypatch):
    actor, engine = make_model(), CompletionsEngine("http://a", "tiny", None)
    with pytest.raises(TypeError, match=r"got TransformersEngine\. If it has a model, give that"):
        ExperienceMaker(actor, teacher=TransformersEngine(actor, tokenizer), **DISTILL)
    with pytest.raises(ValueError, match=r"passes\.temperature must be 1 with an engine.*got 0\.7"):
        ExperienceMaker(actor, teacher=engine, passes=Passes(temperature=0.7), **DISTILL)
    with pytest.raises(TypeError, match="An engine can teach as an advantage"):
        Distillation(engine)
    monkeypatch.setattr("torchrl_mt.objectives.rows.batch.RowImages.of", lambda rows: object())
    with pytest.raises(ValueError, match="scores text alone, but the rows have images"):
        ExperienceMaker(actor, teacher=engine, **DISTILL)(make_rows())
