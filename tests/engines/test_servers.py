"""Several servers: where requests go, and what becomes of those of a server that dies."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.helpers import completions
from tests.engines.sampling_servers import VLLMServer, cluster, slowly
from tests.faulty_server import silent, status
from tests.tiers import in_fast_tier
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.engines.completions.engine import CompletionsError
from torchrl_mt.engines.completions.prefixes import PrefixPlaces

pytest.importorskip("httpx")
pytest.importorskip("tenacity")


@pytest.fixture
def three():
    with cluster(VLLMServer, 3) as made:
        yield made


@pytest.fixture
def make(three, tokenizer):
    return partial(completions, three.urls, tokenizer, api="vllm", max_new_tokens=6)


async def conversation(engine, number, turns, between=lambda turn: None):
    """Play turns whose prompts go on from the answers; returns the prompts."""
    rng = random.Random(number)
    prompt, prompts = [rng.randrange(4, 26) for _ in range(8)], []
    for turn in range(turns):
        between(turn)
        prompts.append(prompt)
        answer = await asyncio.wait_for(engine.generate(prompt), PATIENCE)
        prompt = [*prompt, *answer.token_ids, rng.randrange(4, 26)]
    return prompts


def play(engine, count, turns, **kwargs):
    async def run():
        played = (conversation(engine, number, turns, **kwargs) for number in range(count))
        return await asyncio.gather(*played)

    return asyncio.run(run())


def places(servers):
    """Which server answered each prompt last."""
    return {tuple(prompt): k for k, server in enumerate(servers) for prompt in server.prompts}


# Prefixes


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.booleans()), max_size=30),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 12),
)
def test_the_longest_remembered_prefix_is_found(added, prompt, capacity):
    found = PrefixPlaces(capacity)
    known = {}
    for k, (tokens, is_turn) in enumerate(added):
        _, was_turn = known.pop(tuple(tokens), (0, False))
        known[tuple(tokens)] = (k, is_turn or was_turn)
        known = dict(list(known.items())[-capacity:])
        found.add(tokens, k, is_turn=is_turn)
    assert len(found) == len(known) <= capacity
    fitting = [tokens for tokens in known if tuple(prompt[: len(tokens)]) == tokens]
    assert found.find(prompt) == (known[max(fitting, key=len)] if fitting else None)


# Choice


def test_later_turns_go_to_the_server_of_the_earlier_ones(make, three):
    engine = make()
    dialogues = play(engine, in_fast_tier(16, 64), 5)
    at = places(three.servers)
    servers = [[at[tuple(prompt)] for prompt in prompts] for prompts in dialogues]
    stayed = [a == b for each in servers for a, b in itertools.pairwise(each)]
    assert sum(stayed) >= 0.9 * len(stayed)
    assert set(Counter(each[0] for each in servers)) == {0, 1, 2}
    stats = engine.stats()
    assert stats == {"running": 0, "servers": 3, "servers/live": 3, "servers/moved": 0}


def test_members_of_a_group_share_a_server_until_it_is_busy(make, three):
    engine = make(max_new_tokens=50)
    for server in three.servers:
        server.before_token = slowly(0.005)

    async def run(count):
        await asyncio.gather(*(engine.generate([7, 8, 9]) for _ in range(count)))

    asyncio.run(run(6))
    assert sorted(len(server.prompts) for server in three.servers) == [0, 0, 6]
    asyncio.run(run(30))
    assert min(len(server.prompts) for server in three.servers) > 0


async def test_other_requests_go_to_the_least_busy_server(make, three):
    engine = make()
    held = [True]
    for server in three.servers:
        server.before_token = lambda k: wait_until(lambda: not held[0])
    asked = [asyncio.create_task(engine.generate([5 + k])) for k in range(12)]
    await asyncio.to_thread(
        wait_until, lambda: sum(server.running for server in three.servers) == 12
    )
    assert [server.running for server in three.servers] == [4, 4, 4]
    assert engine.stats()["running"] == 12
    held[0] = False
    await asyncio.gather(*asked)


# Failures


def test_conversations_go_on_when_a_server_dies(make, three):
    engine = make(max_retries=0)
    count = in_fast_tier(16, 64)
    for server in three.servers:
        server.before_token = slowly(0.002)
    died = []

    def between(turn):
        if turn == 2 and not died:
            died.append(1)
            three.kill(1)

    dialogues = play(engine, count, 4, between=between)
    assert [len(prompts) for prompts in dialogues] == [4] * count
    assert engine.stats()["servers/live"] == 2
    at = places([three.servers[0], three.servers[2]])
    assert all(tuple(prompts[-1]) in at for prompts in dialogues)


def test_a_server_that_is_back_takes_requests_again(make, three, monkeypatch):
    engine = make(max_retries=0)
    engine._servers._pause = 0.2
    three.kill(0)
    play(engine, 4, 2)
    assert engine.stats()["servers/live"] == 2
    back = three.restart(0)
    number = 100
    while not back.prompts:
        asyncio.run(conversation(engine, number, 1))
        number += 1
    assert engine.stats()["servers/live"] == 3


@pytest.mark.parametrize("code", [502, 503, 504])
def test_requests_of_a_server_behind_a_proxy_go_to_the_others(make, three, code):
    engine = make(max_retries=0)
    three.servers[0].faults = [status(code)] * 100
    play(engine, 6, 2)
    assert not three.servers[0].prompts
    assert len(three.servers[0].seen) <= 6


def test_a_request_that_times_out_is_retried_elsewhere(make, three):
    engine = make(max_retries=1000, timeout=0.3)
    three.servers[0].faults = [silent] * 100
    asyncio.run(conversation(engine, 0, 3))
    assert len(three.servers[0].seen) >= 1
    assert not three.servers[0].prompts


def test_if_all_are_dead_the_error_names_them_and_waiting_helps(make, three, monkeypatch):
    monkeypatch.setattr("torchrl_mt.http_client._AWAY_PAUSE", 0.02)
    urls = three.urls
    for k in range(3):
        three.kill(k)
    engine = make(max_retries=1)
    with pytest.raises(CompletionsError, match="after 2 attempts") as caught:
        asyncio.run(engine.generate([5]))
    assert all(f"{url}: ConnectError" in str(caught.value) for url in urls)

    async def run():
        asked = asyncio.create_task(patient.generate([5]))
        await asyncio.sleep(0.1)
        assert not asked.done()
        three.restart(2)
        assert (await asyncio.wait_for(asked, PATIENCE)).token_ids

    patient = make(max_retries=0, wait_ready=PATIENCE)
    asyncio.run(run())


def test_an_error_of_one_server_is_not_asked_of_the_others(make, three):
    for server in three.servers:
        server.faults = [status(400, "too long")]
    with pytest.raises(CompletionsError, match="status 400: too long"):
        asyncio.run(make().generate([5]))
    assert sum(len(server.seen) for server in three.servers) == 1
