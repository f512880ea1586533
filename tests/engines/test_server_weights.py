"""Updates of servers: no token is stamped newer than what sampled it, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.engines.helpers import ask, completions
from tests.engines.sampling_servers import (
    Refused,
    SGLangServer,
    VLLMServer,
    cluster,
    until,
    version_of,
)
from tests.engines.test_servers import conversation
from tests.waiting import PATIENCE, ctrl_c, in_thread, wait_until
from torchrl_mt.engines import CompletionsEngine, SGLangWeights, VLLMWeights, WeightUpdateError
from torchrl_mt.engines.completions.engine import CompletionsError
from torchrl_mt.engines.server_weights import base
from torchrl_mt.engines.server_weights.saved_models import SavedModels, named_weights

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

KINDS = {
    "vllm": (VLLMServer, VLLMWeights, "vllm"),
    "old vllm": (partial(VLLMServer, has_version=False), VLLMWeights, "openai"),
    "sglang": (SGLangServer, SGLangWeights, "sglang"),
    "old sglang": (partial(SGLangServer, has_spans=False), SGLangWeights, "sglang"),
}


OLD = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("old vllm", "old sglang")]


@pytest.fixture(params=["vllm", "sglang", *OLD])
def kind(request):
    return request.param


@pytest.fixture
def servers(kind):
    with cluster(KINDS[kind][0], 2) as made:
        yield made


@pytest.fixture
def make(kind, servers, tokenizer, tmp_path):
    def make(pause="abort", **kwargs):
        _, weights, api = KINDS[kind]
        on_update = weights(servers.urls, folder=tmp_path, pause=pause)
        engine = completions(servers.urls, tokenizer, api=api, on_update=on_update, **kwargs)
        engine._servers._pause = 0.05
        return engine

    return make


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"version": torch.tensor([float(version)])}


def restart_unseen(servers):
    for k in range(len(servers.servers)):
        servers.kill(k)
        servers.restart(k)


def truth(answer) -> list[int]:
    return [version_of(value) for value in answer.log_probs]


def assert_answers_of(engine, version, count=4, first=5) -> None:
    """A version sampled the answers, and they say so."""
    answers = [ask(engine, [first, k + 6]) for k in range(count)]
    assert {each for answer in answers for each in answer.versions} == {version}
    assert {each for answer in answers for each in truth(answer)} == {version}


def test_updates_reach_every_server_and_only_the_last_is_kept(make, servers, tmp_path):
    engine = make()
    for version in (1, 2, 3):
        assert engine.update_weights(weights(version)) == engine.version == version
        assert [server.version for server in servers.servers] == [version] * 2
        assert not any(server.is_paused for server in servers.servers)
        assert_answers_of(engine, version)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("version-3-")


async def test_a_request_that_an_update_aborts_is_sent_again_with_the_new_version(make, servers):
    engine = make(max_retries=0)
    for server in servers.servers:
        server.before_token = lambda k, server=server: wait_until(
            lambda: engine.version == 2 or server.is_paused
        )
    asked = [asyncio.create_task(engine.generate([5, 6 + k])) for k in range(6)]
    for version in (1, 2):
        for server in servers.servers:
            await asyncio.to_thread(until, server, 3)
        await asyncio.to_thread(engine.update_weights, weights(version))
    answers = await asyncio.gather(*asked)
    for answer in answers:
        assert set(answer.versions) == set(truth(answer)) == {2}


@pytest.mark.parametrize(
    ("kind", "pause"), [("vllm", "keep"), ("vllm", "wait"), ("sglang", "retract")]
)
async def test_a_request_may_go_on_with_the_new_weights(make, servers, kind, pause):
    engine = make(pause=pause)
    servers.kill(1)
    server = servers.servers[0]
    at_3 = threading.Event()
    updated = threading.Event()

    def before_token(k):
        if k == 3 and not at_3.is_set():
            at_3.set()
            wait_until(lambda: pause == "wait" or updated.is_set() or server.is_paused)

    server.before_token = before_token
    asked = asyncio.create_task(engine.generate([5, 6], max_new_tokens=8))
    await asyncio.to_thread(at_3.wait, PATIENCE)
    with pytest.raises(WeightUpdateError):  # the other server is dead
        await asyncio.to_thread(engine.update_weights, weights(1))
    updated.set()
    answer = await asked
    versions = truth(answer)
    if pause == "wait":
        assert set(versions) == {0}
    else:
        assert versions[:3] == [0] * 3
        assert set(versions[4:]) == {1}
    assert list(answer.versions) == versions


@pytest.mark.parametrize("kind", ["vllm"])
def test_an_engine_whose_servers_would_miss_updates_is_refused(servers, tokenizer):
    def make(urls, on_update, model="tiny"):
        CompletionsEngine(urls, model, tokenizer, on_update=on_update).close()

    first, second = servers.urls
    for of_weights in ([first], ["http://other:8000"], [first, "http://other:8000"]):
        with pytest.raises(ValueError, match=r"on_update must update all servers.* lacks .*same"):
            make([first, second], VLLMWeights(of_weights))
    make([first], VLLMWeights([first, second]))
    make(["http://router:8000"], VLLMWeights([first, second]))
    with pytest.raises(ValueError, match="model must be the lora_name of on_update, 'policy'"):
        make([first, second], VLLMWeights(servers.urls, lora_name="policy"))


# Failures


def refuse(code=500):
    raise Refused(code, "out of memory")


def test_a_server_that_misses_an_update_takes_no_request_until_it_has_the_weights(make, servers):
    engine = make(max_retries=0)
    engine.update_weights(weights(1))
    first, second = servers.servers
    second.load_fault = refuse
    with pytest.raises(WeightUpdateError, match=r"1 of 2 servers, .*out of memory") as caught:
        engine.update_weights(weights(2))
    assert caught.value.updated == (first.url,)
    assert list(caught.value.failed) == [second.url]
    assert pickle.loads(pickle.dumps(caught.value)).failed == caught.value.failed
    assert engine.version == 2
    assert not second.is_paused
    assert_answers_of(engine, 2, 8)
    assert not second.prompts
    # It loads them as soon as it can.
    second.load_fault = lambda: None
    wait_until(lambda: ask(engine, [random.randrange(4, 26)]) and second.prompts)
    assert second.version == 2


def test_an_interrupt_does_not_wait_for_a_server_that_hangs(make, servers, monkeypatch):
    engine = make(max_retries=0)
    engine.update_weights(weights(1))
    first, second = servers.servers
    hangs, may_go_on = threading.Event(), threading.Event()

    class Early(ThreadPoolExecutor):
        """Begins before the caller knows of it, if it may."""

        def submit(self, *args):
            future = super().submit(*args)
            if hangs.wait(0.5):
                threading.Event().wait(0.2)  # and is interrupted
            return future

    second.load_fault = lambda: (hangs.set(), may_go_on.wait(PATIENCE))
    monkeypatch.setattr(base, "ThreadPoolExecutor", Early)
    try:
        with pytest.raises(KeyboardInterrupt), ctrl_c(hangs.is_set):
            engine.update_weights(weights(2))
        assert engine.version == 1
        wait_until(lambda: not engine._on_update._interrupted(first.url))
        # The first may have the new weights, so it loads those of the version again.
        assert_answers_of(engine, 1, 8)
        assert not second.prompts
        updated = in_thread(engine.update_weights, weights(2))
        second.load_fault = lambda: None
    finally:
        may_go_on.set()
    assert updated() == engine.version == 2
    assert_answers_of(engine, 2, 8, first=7)
    assert second.prompts
    assert not any(server.is_paused for server in servers.servers)


def test_an_update_that_reaches_no_server_is_not_counted(make, servers):
    engine = make(max_retries=0)
    for server in servers.servers:
        server.load_fault = refuse
    with pytest.raises(WeightUpdateError, match="0 of 2 servers"):
        engine.update_weights(weights(1))
    assert engine.version == 0
    with pytest.raises(CompletionsError, match="lacks the weights of version 0"):
        ask(engine)
    for server in servers.servers:
        server.load_fault = lambda: None
    engine.update_weights(weights(1))
    assert_answers_of(engine, 1, 1)


def test_what_cannot_be_saved_touches_no_server(make, servers, tmp_path):
    engine = make()
    for source, error, message in (
        (None, TypeError, "source must be a model, a state dict"),
        ({}, ValueError, "source must hold tensors"),
        (tmp_path / "none", ValueError, "source must be a folder with safetensors"),
    ):
        with pytest.raises(error, match=message):
            engine.update_weights(source)
    assert engine.version == 0
    assert not any(server.calls for server in servers.servers)
    assert truth(ask(engine))


def test_a_server_that_is_started_again_gets_the_weights_first(make, servers):
    engine = make(max_retries=0)
    engine.update_weights(weights(1))
    servers.kill(1)
    number = 0
    while engine.stats()["servers/live"] == 2:  # until a request finds that out
        ask(engine, [5, 6, number])
        number += 1
    back = servers.restart(1)
    while not back.prompts:
        answer = ask(engine, [5, 7, number])
        assert set(answer.versions) == set(truth(answer)) == {1}
        number += 1
    assert back.version == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang", OLD[1]])
def test_answers_tell_that_a_server_was_started_again(make, servers):
    engine = make(max_retries=0)
    engine.update_weights(weights(1))
    restart_unseen(servers)
    assert_answers_of(engine, 1, 6)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_never_has_the_weights_fails_its_requests(make, servers, kind):
    engine = make(max_retries=0)
    engine.update_weights(weights(1))
    restart_unseen(servers)
    for server in servers.servers:
        server.load = lambda folder: None
        server.set_label = lambda body, query: None
        server.update_from_disk = lambda body, query: {"success": True}
    with pytest.raises(CompletionsError, match=r"version 0, not 1: it was started again"):
        ask(engine)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_update_waits_for_a_server_that_starts_again(make, servers, monkeypatch):
    monkeypatch.setattr("torchrl_mt.engines.server_weights.base._AWAY_PAUSE", 0.01)
    engine = make(max_retries=0, wait_ready=PATIENCE)
    engine.update_weights(weights(1))
    servers.kill(1)
    updated = in_thread(engine.update_weights, weights(2))
    wait_until(lambda: servers.servers[0].version == 2)
    assert engine.version == 1
    servers.restart(1)
    assert updated() == engine.version == 2
    assert [server.version for server in servers.servers] == [2, 2]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_update_waits_no_longer_than_it_may(servers, kind):
    servers.kill(0)
    make_weights = KINDS[kind][1]
    with pytest.raises(WeightUpdateError, match="1 of 2 servers"):
        make_weights(servers.urls, wait_ready=0.01).update(weights(1), 1)
    servers.servers[1].load_fault = refuse  # it is up, so nothing is waited for
    with pytest.raises(WeightUpdateError, match="out of memory"):
        make_weights(servers.urls[1], wait_ready=PATIENCE).update(weights(1), 1)
    with pytest.raises(ValueError, match="wait_ready must be at least 0"):
        make_weights(servers.urls, wait_ready=-1.0)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_interrupt_ends_the_wait_for_a_server(make, servers):
    engine = make(wait_ready=10 * PATIENCE)
    servers.kill(1)
    with pytest.raises(KeyboardInterrupt), ctrl_c(lambda: servers.servers[0].version == 1):
        engine.update_weights(weights(1))
    wait_until(lambda: not engine._on_update._interrupted())
    assert engine.version == 0


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_part_of_the_weights_is_no_version(make, servers, tmp_path):
    whole = {"version": torch.ones(1), "a": torch.zeros(1), "b": torch.zeros(1)}
    served = SavedModels(tmp_path / "served").save(whole, 0)
    for server in servers.servers:
        server.folder = str(served)
    engine = make()
    for version in (0, 1):  # of what the servers started with, and of the last update
        for part in (weights(1), TensorDict(weights(1), [])):
            with pytest.raises(
                ValueError, match=r"must have all 3 weights.*got 1 without \['a', 'b'\]"
            ):
                engine.update_weights(part)
        assert engine.version == version
        if not version:
            assert not any(server.calls for server in servers.servers)
            # Another name of a tensor is no weight of its own.
            assert engine.update_weights({**whole, "tied": whole["a"]}) == 1
            whole["tied"] = whole["a"]
            served.rename(tmp_path / "gone")
            with pytest.raises(ValueError, match="all 4 weights"):
                engine.update_weights({**weights(1), "a": whole["a"]})
            assert engine.update_weights(whole) == 2
            return


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_weights_of_another_run_are_named(make, servers):
    for server in servers.servers:
        server.version, server.label = 7, "7"
    engine = make()
    with pytest.raises(CompletionsError, match=r"at most 1, got 7: .*Call update_weights first"):
        ask(engine)
    engine.update_weights(weights(1))
    assert set(ask(engine).versions) == {1}


@pytest.mark.slow
def test_no_token_is_stamped_newer_than_it_is(kind, servers, make):
    """Conversations during updates, while servers are killed, started again, slow and refuse."""
    for seed in range(4):
        engine = make(max_retries=50, pause="abort" if seed % 2 or "sglang" in kind else "keep")
        _disturbed(engine, servers, random.Random(seed), exact=kind == "sglang")
        for k in range(2):
            servers.kill(k)
            servers.restart(k)


def _disturbed(engine, servers, rng, *, exact):
    answers, plain = [], engine.generate

    async def generate(prompt):
        answers.append(await plain(prompt))
        return answers[-1]

    engine.generate = generate
    for server in servers.servers:
        server.before_token = lambda k: threading.Event().wait(rng.random() * 0.004)
    over = threading.Event()

    def noticed(place, away):
        is_lost = place.weights != "current" and not place.restored
        return not engine.version or (place.away_until != away and is_lost)

    def disturb():
        version = 0
        while not over.wait(rng.random() * 0.05):
            k = rng.randrange(2)
            server = servers.servers[k]
            action = rng.choice(["update", "update", "update", "refuse", "restart"])
            if action == "restart":
                place = engine._servers.all[k]
                servers.kill(k)
                # It is away for so long that a request notices, and what it was loading has failed; its
                # first weights are of version 0.
                wait_until(lambda p=place, away=place.away_until: over.is_set() or noticed(p, away))
                servers.restart(k).before_token = server.before_token
                continue
            server.load_fault = refuse if action == "refuse" else lambda: None
            with contextlib.suppress(WeightUpdateError):
                engine.update_weights(weights(version + 1))
            server.load_fault = lambda: None
            version = engine.version

    async def run():
        played = (conversation(engine, number, 4) for number in range(12))
        await asyncio.gather(*played)

    disturbed = in_thread(disturb)
    try:
        asyncio.run(run())
    finally:
        over.set()
    assert disturbed() is None
    assert answers
    for answer in answers:
        stamps, true = list(answer.versions), truth(answer)
        assert all(a <= b for a, b in zip(stamps, true, strict=True))
        assert not exact or stamps == true


# LoRA


@pytest.fixture(params=["openai", "vllm"])
def tuned(request, servers, tokenizer, tmp_path, monkeypatch):
    """Make engines of an adapter; what saves it writes its version alone."""

    def save(self, source, version, *, adapter=False):
        assert adapter
        return plain(self, weights(source.version), version)

    plain = SavedModels.save
    monkeypatch.setattr(SavedModels, "save", save)
    for module in ("base", "vllm"):
        where = f"torchrl_mt.engines.server_weights.{module}.peft_model"
        monkeypatch.setattr(where, lambda model: model)

    def make(pause="abort", **kwargs):
        on_update = VLLMWeights(servers.urls, lora_name="policy", folder=tmp_path, pause=pause)
        given = {"api": request.param, "on_update": on_update, **kwargs}
        engine = completions(servers.urls, tokenizer, "policy", **given)
        engine._servers._pause = 0.05
        return engine

    return make


class Tuned(torch.nn.Module):
    def __init__(self, version):
        super().__init__()
        self.version = version


@pytest.mark.parametrize("kind", ["vllm"])
def test_folders_of_adapters_are_loaded(servers, tmp_path, tokenizer):
    on_update = VLLMWeights(servers.urls, lora_name="policy", folder=tmp_path / "out")
    engine = CompletionsEngine(servers.urls, "policy", tokenizer, on_update=on_update)
    folder = tmp_path / "adapter"
    SavedModels(tmp_path).save(weights(5), 0).rename(folder)
    with pytest.raises(TypeError, match=r"adapter_config.json.*got .*adapter"):
        engine.update_weights(str(folder))
    (folder / "adapter_config.json").write_text("{}")
    assert engine.update_weights(str(folder)) == 1
    assert set(truth(ask(engine))) == {5}
    assert folder.exists()
    with pytest.raises(TypeError, match="got dict"):
        engine.update_weights(weights(2))


@pytest.mark.parametrize("kind", ["vllm", OLD[0]])
def test_an_adapter_is_loaded_once_a_version_and_needs_no_folder_that_is_gone(
    tuned, servers, tmp_path
):
    engine = tuned()
    for version in range(1, 5):
        assert engine.update_weights(Tuned(version)) == version
        assert_answers_of(engine, version)
        assert [list(server.adapters) for server in servers.servers] == [[f"policy@{version}"]] * 2
        assert [server.adapter_loads for server in servers.servers] == [version] * 2
    # The last one too: requests that came during the update may need it.
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", ["vllm"])
async def test_requests_that_are_kept_go_on_with_their_adapter(tuned, servers, tmp_path):
    engine = tuned("keep", max_retries=0)
    engine.update_weights(Tuned(1))
    pushed = threading.Semaphore(0)
    for server in servers.servers:
        server.before_token = lambda k: pushed.acquire(timeout=PATIENCE)
    asked = [asyncio.create_task(engine.generate([5, 6 + k])) for k in range(4)]
    for server in servers.servers:
        await asyncio.to_thread(until, server, 2)
    most = 0
    for version in range(2, 20):
        await asyncio.to_thread(engine.update_weights, Tuned(version))
        most = max(most, len(list(tmp_path.iterdir())))
        pushed.release(2)
    pushed.release(1000)
    assert most <= 9
    for answer in await asyncio.gather(*asked):
        assert list(answer.versions) == truth(answer)
        assert len(set(answer.versions)) == 1
    assert not any(server.is_dead for server in servers.servers)


@pytest.mark.parametrize("kind", ["vllm", OLD[0]])
def test_an_adapter_that_is_gone_is_loaded_again(tuned, servers):
    engine = tuned(max_retries=0)
    engine.update_weights(Tuned(1))
    engine.update_weights(Tuned(2))
    restart_unseen(servers)
    assert_answers_of(engine, 2, 6)
    assert all(server.prompts for server in servers.servers)


@pytest.mark.parametrize("kind", ["vllm"])
def test_a_server_that_never_has_the_adapter_fails_its_requests(tuned, servers):
    engine = tuned(max_retries=0)
    engine.update_weights(Tuned(1))
    restart_unseen(servers)
    for server in servers.servers:  # such as one of several processes behind one port
        server.load_adapter = lambda body, query: None
    with pytest.raises(CompletionsError, match="status 404: The model `policy@1` does not exist"):
        ask(engine)


def test_adapters_are_merged_or_saved_alone(tmp_path, model):
    peft = pytest.importorskip("peft")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    actor = peft.get_peft_model(model, config)
    saved = SavedModels(tmp_path)
    found = named_weights(saved.save(actor, 1))
    changed = {name for name, value in found.items() if not torch.equal(value, base[name])}
    assert changed == {name for name in base if "q_proj.weight" in name}
    alone = saved.save(actor, 2, adapter=True)
    assert (alone / "adapter_config.json").exists()
    assert all("lora" in name for name in named_weights(alone))


@pytest.mark.parametrize("kind", ["sglang"])
def test_a_server_without_development_mode_is_named(servers, tokenizer):
    with pytest.raises(WeightUpdateError, match="VLLM_SERVER_DEV_MODE=1"):
        VLLMWeights(servers.urls).update(weights(1), 1)


# Sources


def test_sources_of_all_kinds_are_saved_by_name(tmp_path, model):
    saved = SavedModels()
    state = dict(model.state_dict())
    sources = [model, state, TensorDict.from_module(model), torch.nn.Linear(2, 1)]
    for version, source in enumerate(sources):
        path = saved.save(source, version)
        found = named_weights(path)
        expected = named_weights(source)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])
        # Tied weights have both names: servers may read either.
        assert found.keys() == expected.keys()
        assert not any("inv_freq" in name for name in found)
    assert saved.save(str(path), 9) == path
    saved.keep(9)
    assert path.exists()
    assert saved.path(0) is None
    assert not list(path.parent.glob(".*"))


def test_runs_may_share_a_folder(tmp_path):
    one, other = SavedModels(tmp_path), SavedModels(tmp_path)
    paths = [saved.save(weights(k), 1) for k, saved in enumerate((one, other))]
    assert [named_weights(path)["version"].item() for path in paths] == [0, 1]
    other.save(weights(2), 2)
    other.keep(2)
    assert paths[0].exists()
    assert not paths[1].exists()


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path):
    class Broken(torch.nn.Module):
        def save_pretrained(self, folder):
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError("disk full")

    saved = SavedModels(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        saved.save(Broken(), 1)
    assert saved.path(1) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: VLLMWeights("http://a", transport="gloo"), "transport must be"),
        (lambda: VLLMWeights("http://a", pause="retract"), "pause must be"),
        (lambda: SGLangWeights("http://a", pause="keep"), "pause must be"),
        (lambda: SGLangWeights("http://a", timeout=0), "timeout must be positive"),
        (lambda: SGLangWeights([]), "at least one server"),
        (lambda: VLLMWeights("http://a", transport="nccl", lora_name="x"), "transport must be"),
    ],
)
def test_bad_arguments_are_refused(make, error):
    with pytest.raises(ValueError, match=error):
        make()
