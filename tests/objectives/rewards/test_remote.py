"""Remote rewards over real HTTP: the right number for every row, or an error that names the server."""

import asyncio
import copy
import pickle
from contextlib import closing

import pytest
import torch
from tensordict import NonTensorStack

from tests.faulty_server import after, dripping, half, nothing, running, silent, status, success
from tests.idle_clock import LIMIT, Loop
from tests.objectives.rewards.reward_server import RewardServer
from tests.waiting import PATIENCE
from torchrl_mt.objectives import ExperienceMaker
from torchrl_mt.objectives.rewards.remote import RemoteReward, RewardError

pytest.importorskip("httpx")
pytest.importorskip("tenacity")


@pytest.fixture
def server():
    with running(RewardServer()) as server:
        yield server


@pytest.fixture
def remote(server, tokenizer):
    def make(**options):
        return RemoteReward(
            server.url, tokenizer, **{"backoff": 0.01, "timeout": PATIENCE, **options}
        )

    return make


def ask(source, rows):
    return asyncio.run(source(rows))


def texts(batch, tokenizer):
    """Each row's text and prompt, decoded token by token."""
    queries, prompts = [], []
    for n in range(len(batch)):
        words, prompt = [], None
        for t in range(batch["tokens", "full"].shape[1]):
            if batch["masks", "all_assistant_mask"][n, t] and prompt is None:
                prompt = " ".join(words)
            if batch["masks", "all_attention_mask"][n, t]:
                words.append(tokenizer.decode([int(batch["tokens", "full"][n, t])]))
        queries.append(" ".join(words))
        prompts.append(" ".join(words) if prompt is None else prompt)
    return queries, prompts


def test_texts_and_references_are_sent_in_batches(server, remote, rows, spread, tokenizer):
    batch = spread(rows(n=7))
    batch["reference"] = [{"answer": n} for n in range(7)]
    queries, prompts = texts(batch, tokenizer)
    assert any(prompts)
    assert ask(remote(batch_size=3), batch) == [len(query.split()) for query in queries]
    sent = sorted(server.seen, key=lambda body: body["references"][0]["answer"])
    assert [len(body["queries"]) for body in sent] == [3, 3, 1]
    for key, expected in [("queries", queries), ("prompts", prompts)]:
        assert [text for body in sent for text in body[key]] == expected
    assert [r["answer"] for body in sent for r in body["references"]] == list(range(7))


def test_no_references_are_sent_where_there_are_none(server, remote, rows):
    ask(remote(headers={"Authorization": "Bearer x"}), rows())
    assert set(server.seen[0]) == {"queries", "prompts"}
    assert server.headers[0]["Authorization"] == "Bearer x"
    with pytest.raises(
        KeyError, match=r"lack the entry 'gold', which 'http://127.*sends as references"
    ):
        ask(remote(reference_key="gold"), rows())
    batch = rows()
    batch["gold"] = ["right"] * 6
    ask(remote(reference_key="gold"), batch)
    assert server.seen[-1]["references"] == ["right"] * 6


def test_requests_are_under_way_together_up_to_the_limit(server, remote, rows):
    server.delay = 0.05
    ask(remote(batch_size=1, max_concurrency=3), rows(n=9))
    assert server.most_open == 3


@pytest.mark.parametrize(
    "fault",
    [status(503), status(500), status(429, Retry_After="0.01"), nothing, half],
    ids=["503", "500", "429", "nothing", "half"],
)
def test_what_may_pass_is_tried_again(server, remote, rows, fault):
    batch = rows()
    expected = ask(remote(), batch)
    server.faults = [fault, fault]
    assert ask(remote(max_retries=2), batch) == expected
    server.faults = [fault] * 3
    with pytest.raises(RewardError, match="failed after 3 attempts") as caught:
        ask(remote(max_retries=2), batch)
    assert server.url in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(404), "1 attempt: status 404.*not now"),
        (status(503, Retry_After="100000"), "1 attempt: status 503"),
        (success(b"<html>"), "the reply is no JSON.*<html>"),
        (success(b""), "the reply is no JSON"),
        (success({"scores": [1.0]}), r"must be {'rewards': \[...\]}.*scores"),
        (success([1.0] * 6), r"must be {'rewards': \[...\]}"),
        (success({"rewards": 1.0}), r"must be {'rewards': \[...\]}"),
        (success({"rewards": [1.0] * 5}), "6 queries were sent and 5 rewards came back"),
        (success({"rewards": [1.0] * 7}), "6 queries were sent and 7 rewards came back"),
        (success({"rewards": []}), "6 queries were sent and 0 rewards"),
        (success({"rewards": ["1"] * 6}), "reward 0 must be a number, got '1'"),
        (success({"rewards": [True] * 6}), "reward 0 must be a number, got True"),
        (success({"rewards": [float("nan")] * 6}), "reward 0 must be a finite number, got nan"),
        (success({"rewards": [float("-inf")] * 6}), "must be a finite number, got -inf"),
        (success({"rewards": [1e39] * 6}), "must be a finite number, got 1e"),
        (success({"rewards": [10**400] * 6}), "must be a finite number"),
    ],
)
def test_wrong_answers_are_refused_at_once(server, remote, rows, fault, message):
    server.faults = [fault]
    with pytest.raises(RewardError, match=message) as caught:
        ask(remote(), rows())
    assert f"reward server {server.url} failed" in str(caught.value)
    assert len(server.seen) == 1


@pytest.mark.parametrize("fault", [silent, dripping])
def test_an_attempt_has_a_time_limit(server, remote, rows, fault):
    source = remote(timeout=LIMIT, max_retries=1)
    with closing(Loop()) as loop:
        late = after(loop.jump, fault)
        server.faults = [late, late]
        with pytest.raises(RewardError, match=f"after 2 attempts: no reply within {LIMIT}"):
            loop.run_until_complete(source(rows()))
        server.faults = [late]
        assert len(loop.run_until_complete(source(rows()))) == 6


def test_nobody_there(tokenizer, rows):
    with running(RewardServer()) as server:
        url = server.url
    source = RemoteReward(url, tokenizer, max_retries=1, backoff=0.0)
    with pytest.raises(RewardError, match="after 2 attempts: ConnectError") as caught:
        ask(source, rows())
    assert url in str(caught.value)


def test_null_is_no_reward(server, remote, rows):
    rewards = [1.0, None, 2, None, 0, 5]
    server.faults = [success({"rewards": rewards})]
    assert ask(remote(), rows()) == rewards


def test_the_rows_of_a_failed_request_have_no_reward(server, remote, rows, caplog):
    expected = ask(remote(batch_size=1), rows())
    server.faults = [status(404)]
    found = ask(remote(batch_size=1, max_concurrency=2), rows())
    assert found.count(None) == 1
    assert all(one in (None, other) for one, other in zip(found, expected, strict=True))
    assert "1 of 6 requests failed, and their rows have no reward" in caplog.text
    assert "404" in caplog.text


def test_a_server_that_fails_altogether_is_an_error(server, remote, rows):
    server.faults = [status(404)] * 6
    with pytest.raises(RewardError, match="404"):
        ask(remote(batch_size=1, max_concurrency=2), rows())
    # Once it has failed twice, further requests are not waited for.
    assert len(server.seen) < 6
    server.faults = [status(404)] * 6  # a request of before may still take one
    with pytest.raises(RewardError, match="404"):
        ask(remote(batch_size=2), rows())


def test_the_maker_asks_and_leaves_the_rows_alone_when_it_fails(server, remote, rows, model):
    batch = rows()
    maker = ExperienceMaker(model, reward=[(remote(name="judge"), 2.0)], advantage="dr_grpo")
    server.faults = [success({"rewards": [0.0]})]
    with pytest.raises(RewardError, match="1 rewards came back") as caught:
        maker(batch)
    assert bool((batch == rows()).all())
    assert set(batch.keys(True)) == set(rows().keys(True))
    assert maker.metrics == {}
    said = f"reward server 'judge' at {server.url} failed after 1 attempt: 4 queries were sent"
    assert str(caught.value).startswith(said)
    assert caught.value.name == "judge"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied), copied.name) == (RewardError, str(caught.value), "judge")
    out = maker(batch)
    # One query for each of four episodes, those with two rows included.
    assert len(server.seen[-1]["queries"]) == len(set(batch["episode"].tolist())) == 4
    lengths = batch["masks", "all_attention_mask"].sum(-1)[[1, 2, 4, 5]].float()
    assert float(out["rewards", "shaped"].sum()) == float(2 * lengths.sum())
    assert maker.metrics["reward/default/judge/mean"] == pytest.approx(float(lengths.mean()))


def test_bad_arguments_are_refused_by_name(tokenizer, rows, remote):
    for options, message in [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
        ({"timeout": 0.0}, "timeout must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            remote(**options)
    with pytest.raises(ValueError, match="url must begin with http"):
        RemoteReward("127.0.0.1:80", tokenizer)
    with pytest.raises(TypeError, match="batch_size must be an integer, got '8'"):
        remote(batch_size="8")
    with pytest.raises(TypeError, match="tokenizer must have a method decode, got None"):
        RemoteReward("http://localhost", None)
    batch = rows()
    batch["reference"] = NonTensorStack(*[{n} for n in range(6)])
    with pytest.raises(TypeError, match="'reference' of rows must be fit for JSON"):
        ask(remote(), batch)
    with pytest.raises(KeyError, match="assistant"):
        ask(remote(), rows().exclude(("masks", "all_assistant_mask")))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_maker_that_asks_a_server_can_be_copied(server, remote, rows, model, copied):
    source = remote(name="judge", batch_size=2, max_concurrency=3)
    asyncio.run(source(rows()))
    maker = ExperienceMaker(model, reward=[(source, 0.5)])
    twin = copied(maker)
    assert torch.equal(twin(rows())["advantage"], maker(rows())["advantage"])
    assert twin.reward.names == ["judge"]
    assert twin.reward.sources[0]._client is not source._client
