"""Text in the servers' own forms: what is sent, and what comes back."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.engines.helpers import DROP, ask, completions, edited
from tests.engines.sampling_servers import SGLangServer, VLLMServer, log_prob_of
from tests.faulty_server import running, silent, status
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.engines.completions.engine import CompletionsError

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

KINDS = {"openai": VLLMServer, "vllm": VLLMServer, "sglang": SGLangServer}


@pytest.fixture(params=KINDS)
def api(request):
    return request.param


@pytest.fixture
def server(api, tokenizer):
    with running(KINDS[api]()) as server:
        server.decode = tokenizer.decode
        yield server


@pytest.fixture
def make(api, server, tokenizer):
    return partial(completions, server.url + "/v1", tokenizer, api=api)


def test_answers_are_what_the_server_sampled(make, server):
    engine = make(extra_body={"top_p": 1.0})
    reasons = set()
    for k in range(8):
        answer = ask(engine, [5, k + 6])
        assert server.prompts[-1] == [5, k + 6]
        assert 1 <= len(answer.token_ids) <= 20
        assert set(answer.log_probs) == {log_prob_of(0)}
        assert set(answer.versions) == {0}
        assert answer.stop_token == (1 if answer.finish_reason == "stop" else None)
        assert (answer.token_ids[-1] == 1) == (answer.finish_reason == "stop")
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_strings_end_the_answer(make, server, tokenizer):
    word = tokenizer.decode([ask(make()).token_ids[2]])
    answer = ask(make(), stop=[word])
    assert answer.finish_reason == "stop"
    assert (answer.stop_string, answer.stop_token) == (word, None)
    assert word in tokenizer.decode(answer.token_ids)


def test_what_may_pass_is_tried_again(make, server):
    server.faults += [status(503), status(500)]
    aborted: list[int] = []

    def abort(k: int) -> None:
        if k == 1 and not aborted:
            aborted.append(k)
            server.pause("abort")
            server.resume()

    server.before_token = abort
    ask(make())
    assert aborted
    assert len(server.seen) == 4


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_request_that_is_given_up_frees_the_server(make, server, how):
    held = [True]
    server.before_token = lambda k: wait_until(lambda: not held[0] or server.freed)
    # A server that waits for its next token notices when it comes.
    if not isinstance(server, SGLangServer):
        server.before_token = lambda k: None if k < 5 else wait_until(server.hung_up)
    engine = make(timeout=0.3 if how == "timeout" else PATIENCE, max_retries=0)
    task = asyncio.create_task(engine.generate([5, 6]))
    await asyncio.to_thread(wait_until, lambda: server.running)
    if how == "cancel":
        task.cancel()
    with pytest.raises((asyncio.CancelledError, CompletionsError)):
        await task
    wait_until(lambda: server.freed and not server.running)
    held[0] = False


def test_a_server_that_does_not_take_the_abort_is_left_alone(make, server, api, monkeypatch):
    monkeypatch.setattr("torchrl_mt.http_client._ABORT_TIMEOUT", 0.1)
    if api != "sglang":
        pytest.skip("only SGLang is asked to abort")
    server.faults += [silent, silent]
    engine = make(timeout=0.1, max_retries=0)
    with pytest.raises(CompletionsError, match="no reply within"):
        ask(engine)
    assert server.seen[1].keys() == {"rid"}
    assert server.seen[1]["rid"] == server.seen[0]["rid"]


BROKEN = [
    ("vllm", ["choices"], [], "choices must be a list of one"),
    ("vllm", ["choices", 0, "logprobs"], None, "logprobs must be an object"),
    ("vllm", ["choices", 0, "token_ids", 0], 25, "must be those of"),
    ("vllm", ["choices", 0, "logprobs", "content", 0, "logprob"], None, "a log-probability"),
    ("vllm", ["choices", 0, "finish_reason"], "tool", "finish_reason must be"),
    ("sglang", ["meta_info"], DROP, "the reply lacks"),
    ("sglang", ["meta_info", "output_token_logprobs"], DROP, "logprobs must be"),
    ("sglang", ["meta_info", "output_token_logprobs", 0], [None, 3, None], "output_ids must be"),
    ("sglang", ["meta_info", "prompt_tokens"], 1, "must be the 2 that were sent, got 1"),
    ("sglang", ["meta_info", "finish_reason"], None, "finish_reason must be"),
]


@pytest.mark.parametrize(("form", "path", "value", "error"), BROKEN)
def test_malformed_answers_are_named(tokenizer, form, path, value, error):
    with running(KINDS[form]()) as server:
        post = server.generate
        server.generate = lambda body, query: edited(path, value)(post(body, query))
        engine = completions(server.url, tokenizer, api=form, max_new_tokens=5)
        with pytest.raises(CompletionsError, match=error):
            ask(engine)
        assert len(server.prompts) == 1
