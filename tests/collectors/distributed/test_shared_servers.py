"""Workers whose engines share servers: no token is stamped newer than what sampled it."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest

from tests.collectors.distributed.played import Talk, items
from tests.collectors.runs import lists
from tests.engines.sampling_servers import cluster, version_of
from tests.engines.test_server_weights import KINDS, OLD, refuse, weights
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.engines import CompletionsEngine, VLLMWeights, WeightUpdateError
from torchrl_mt.engines.server_weights.saved_models import SavedModels
from torchrl_mt.testing import tiny_chat_tokenizer

pytest.importorskip("httpx")
pytest.importorskip("tenacity")


class Varied(Talk):
    """Each item has a prompt of its own, which goes to the server with the fewest requests."""

    def reset(self, data=None):
        super().reset(data)
        digits = (1 + data["k"] // 16**place % 16 for place in range(4))
        return [{"role": "user", "content": " ".join(map(str, digits))}]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("torchrl_mt.collectors.distributed.player._WATCH_SECONDS", 0.01)
    monkeypatch.setattr("torchrl_mt.collectors.distributed.shared_servers._PAUSE", 0.05)


@pytest.fixture(params=["vllm", "sglang", *OLD])
def kind(request):
    return request.param


@pytest.fixture
def servers(kind):
    with cluster(KINDS[kind][0], 2) as made:
        yield made


def make_engine(urls, api, retries, model="tiny"):
    tokenizer = tiny_chat_tokenizer(list(map(str, range(1, 17))))
    options = {"backoff": 0.01, "timeout": PATIENCE, "max_new_tokens": 8, "max_retries": retries}
    engine = CompletionsEngine(urls, model, tokenizer, api=api, **options)
    engine._servers._pause = 0.05
    return engine


@pytest.fixture
def collect(kind, servers, in_threads, tmp_path):
    """Make collectors of endless episodes."""

    def make(pause="abort", retries=0, make=in_threads, urls=None, **more):
        _, kind_of_weights, api = KINDS[kind]
        on_update = kind_of_weights(servers.urls, folder=tmp_path, pause=pause)
        factory = partial(make_engine, urls or servers.urls, api, retries)
        return make(Varied, factory, items(4096), on_update=on_update, n=4, **more)

    return make


def engines_of(in_threads):
    started = in_threads.backends[-1].started
    living = [each.host for each in started if each.gone is None and each.host is not None]
    return [host._object._engine for host in living]


def lacks(collector, url):
    """Whether the collector knows that a server lacks the weights."""
    return url in collector._player.workers.servers.lacking


def stamps(batch):
    """Version and true version of each sampled token."""
    columns = (
        chain.from_iterable(lists(batch, name, "response")) for name in ("versions", "log_probs")
    )
    return [(stamp, version_of(value)) for stamp, value in zip(*columns, strict=True)]


def test_updates_reach_every_worker_and_abort_no_episode(collect, servers):
    with collect() as collector:
        batches = iter(collector)
        for version in range(4):
            if version:
                collector.update_policy_weights_(weights(version))
            assert collector.policy_version == version
            found = stamps(next(batches))
            assert all(stamp <= true <= version for stamp, true in found)
        assert (3, 3) in stamps(next(batches))
        assert collector.stats()["rejected"] == 0


def test_a_server_that_is_started_again_gets_the_weights_first(collect, servers, in_threads):
    with collect(retries=20) as collector:
        collector.update_policy_weights_(weights(1))
        batches = iter(collector)
        servers.kill(1)
        first = servers.servers[0]
        places = [engine._servers.all[1] for engine in engines_of(in_threads)]

        def play():
            assert {true for _, true in stamps(next(batches))} == {1}

        while any(place.weights == "current" for place in places):  # one tells the others
            play()
        back = servers.restart(1)
        while any(place.weights != "current" for place in places):
            play()
        for _ in range(4):
            play()
        assert back.version == first.version == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_restart_that_no_request_sees_is_told_by_the_answers(collect, servers):
    with collect(retries=20) as collector:
        batches, workers = iter(collector), collector._player.workers
        collector.update_policy_weights_(weights(1))
        next(batches)
        states = workers.servers
        workers.tell_servers(replace(states, is_updating=True))  # no request begins
        wait_until(lambda: not any(server.running for server in servers.servers))
        for k in range(2):
            servers.kill(k)
            servers.restart(k)
        workers.tell_servers(states)
        while not all(server.version and server.prompts for server in servers.servers):
            assert all(stamp == true for stamp, true in stamps(next(batches)))


@pytest.mark.parametrize("kind", ["vllm"])
def test_workers_ask_for_the_version_of_an_adapter(servers, in_threads, tmp_path):
    on_update = VLLMWeights(servers.urls, lora_name="policy", folder=tmp_path)
    factory = partial(make_engine, servers.urls, "openai", 20, "policy")
    with in_threads(Varied, factory, items(4096), n=4, on_update=on_update) as collector:
        batches = None
        for version in range(1, 4):
            folder = SavedModels(tmp_path / "adapters").save(weights(version), version)
            (folder / "adapter_config.json").write_text("{}")
            collector.update_policy_weights_(str(folder))
            if version == 3:
                for k in range(2):
                    servers.kill(k)
                    servers.restart(k)
            batches = batches or iter(collector)  # before the first update, there is no adapter
            while (version, version) not in (found := stamps(next(batches))):
                assert all(stamp == true for stamp, true in found)
        assert all(list(server.adapters) == ["policy@3"] for server in servers.servers)


def test_a_server_that_misses_an_update_takes_no_request_until_it_has_the_weights(
    collect, servers, in_threads
):
    with collect() as collector:
        collector.update_policy_weights_(weights(1))
        first, second = servers.servers
        second.load_fault = refuse
        with pytest.raises(WeightUpdateError, match=r"1 of 2 servers, .*out of memory"):
            collector.update_policy_weights_(weights(2))
        assert collector.policy_version == 2
        assert not second.is_paused
        # Also a worker that is started later knows of it.
        in_threads.backends[-1].started[0].die()
        wait_until(lambda: [engine.version for engine in engines_of(in_threads)] == [2, 2])
        batches = iter(collector)
        for _ in range(4):
            assert set(stamps(next(batches))) == {(2, 2)}
        assert first.prompts
        assert not second.prompts
        second.load_fault = lambda: None
        while lacks(collector, second.url):
            assert set(stamps(next(batches))) == {(2, 2)}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_was_only_away_loads_nothing(collect, servers, in_threads):
    with collect(retries=20) as collector:
        collector.update_policy_weights_(weights(1))
        batches = iter(collector)
        servers.kill(1)
        while not lacks(collector, servers.urls[1]):
            next(batches)
        last = servers.servers[1]
        back = servers.restart(1, version=last.version, label=last.label)
        while lacks(collector, servers.urls[1]):
            assert set(stamps(next(batches))) == {(1, 1)}
    assert not {"/collective_rpc", "/update_weights_from_disk"} & set(back.calls)


def test_an_update_that_reaches_no_server_is_not_counted(collect, servers):
    with collect(max_consecutive_failures=1) as collector:
        with pytest.raises(TypeError, match="source must be a model"):
            collector.update_policy_weights_(None)
        collector.update_policy_weights_(weights(1))
        for server in servers.servers:
            server.load_fault = refuse
        with pytest.raises(WeightUpdateError, match="0 of 2 servers"):
            collector.update_policy_weights_(weights(2))
        assert collector.policy_version == 1
        with pytest.raises(RuntimeError, match=r"lacks the weights of version 1: .*out of memory"):
            list(collector)


def test_weights_sent_otherwise_are_counted(collect, servers):
    with collect() as collector:
        collector.update_policy_weights_(weights(1))
        for server in servers.servers:
            server.version, server.label = 2, "2"
        collector.increment_version()
        assert collector.policy_version == 2
        assert set(stamps(next(iter(collector)))) == {(2, 2)}


@pytest.mark.parametrize("kind", ["vllm"])
def test_servers_without_updates_are_refused(collect, in_threads):
    with pytest.raises(ValueError, match="on_update must update all servers of the engine"):
        collect(urls=["http://localhost:1", "http://localhost:2", "http://localhost:3"])
    assert all(worker.ended.done() for worker in in_threads.backends[-1].started)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_token_is_stamped_newer_than_it_is(collect, servers, in_threads, kind, seed):
    """Episodes during updates, while servers and workers are killed, started again and refuse."""
    rng = random.Random(seed)
    pause = "abort" if seed % 2 or "sglang" in kind else "keep"
    over = threading.Event()
    with collect(pause, retries=50, max_concurrency=8) as collector:

        def disturb():
            while not over.wait(rng.random() * 0.05):
                k = rng.randrange(2)
                action = rng.choice(["update", "update", "update", "refuse", "restart", "die"])
                if action == "die":
                    in_threads.backends[-1].started[-1].die()
                elif action == "restart":
                    url = servers.urls[k]
                    wait_until(lambda url=url: over.is_set() or not lacks(collector, url))
                    servers.kill(k)
                    # It is away for so long that all know; its first weights are of version 0.
                    while collector.policy_version and not over.wait(0.05):
                        if lacks(collector, url) and all(
                            engine._servers.all[k].weights != "current"
                            for engine in engines_of(in_threads)
                        ):
                            break
                    servers.restart(k)
                else:
                    servers.servers[k].load_fault = refuse if action == "refuse" else lambda: None
                    with contextlib.suppress(WeightUpdateError):
                        collector.update_policy_weights_(weights(collector.policy_version + 1))
                    servers.servers[k].load_fault = lambda: None

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            found = []
            for number, batch in enumerate(collector):
                found += stamps(batch)
                if number > 25 and collector.policy_version > 3:
                    break
        finally:
            over.set()
            thread.join(PATIENCE)
    assert all(stamp <= true for stamp, true in found)
    assert kind != "sglang" or all(stamp == true for stamp, true in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm"])
def test_workers_in_processes_and_actors_share_servers(collect, servers, distributed):
    with collect(make=distributed, retries=50) as collector:
        collector.update_policy_weights_(weights(1))
        batches = iter(collector)
        next(batches)
        servers.kill(1)
        while not lacks(collector, servers.urls[1]):
            assert set(stamps(next(batches))) == {(1, 1)}
        back = servers.restart(1)
        while lacks(collector, servers.urls[1]):
            assert set(stamps(next(batches))) == {(1, 1)}
        assert back.version == 1
        collector.update_policy_weights_(weights(2))
        assert all(stamp <= true for stamp, true in stamps(next(batches)))
