"""A run is saved whole, restored whole, and goes on exactly where it was."""

import errno
import os
import random
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.buffers import buffer_of
from tests.collectors.scripted import ScriptedEngine
from tests.failing_calls import Killed, spoil
from tests.tiers import examples, in_fast_tier, slow
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.data import ClipSampler, EpisodeSampler, EpisodeStorage
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.datasets.runs.run_parts import state_of
from torchrl_mt.envs import GuessNumber


def episode(length, value):
    done = (torch.arange(length) == length - 1)[:, None]
    observation = torch.full((length, 2), float(value))
    return TensorDict({"observation": observation, "next": {"done": done}}, [length])


class Engine:
    """An engine that keeps the sum of the weights that it was given."""

    version, weights = 0, None

    async def generate(self, prompt_ids, **sampling):
        raise NotImplementedError

    def update_weights(self, source):
        self.version += 1
        self.weights = sum(float(p.detach().sum()) for p in source.parameters())
        return self.version


class Collector:
    """Has an engine, and a version that goes on from the engine's."""

    def __init__(self, engine):
        self.engine, self.offset = engine, 0

    @property
    def version(self):
        return self.engine.version + self.offset

    def state_dict(self):
        return {"version": self.version}

    def load_state_dict(self, state):
        self.offset = state["version"] - self.engine.version


class Run:
    """A run that draws from every random generator, and whose every part goes on changing."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        layers = nn.Sequential(nn.Linear(2, 4), nn.Dropout(), nn.Linear(4, 1))
        model = TensorDictModule(layers, ["observation"], ["value"])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        engine = Engine()
        self.parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
            "engine": engine,
            "collector": Collector(engine),
            "buffer": buffer_of(12, EpisodeSampler(replacement=False), batch_size=2, seed=seed),
            "plain": ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2),
            "noise": torch.Generator().manual_seed(seed),
            "choice": np.random.default_rng(seed),
            "shuffle": random.Random(seed),
            "scores": [],
            "best": {"loss": 0.0},
        }
        self.parts["plain"].extend(episode(1, seed))  # TorchRL saves no empty one.

    def update(self):
        p = self.parts
        draws = [torch.rand(()), np.random.rand(), random.random()]  # noqa: NPY002
        draws += [p["choice"].random(), p["shuffle"].random(), torch.rand((), generator=p["noise"])]
        for _ in range(2):
            p["buffer"].extend(episode(random.randint(1, 4), draws[1]))
        p["plain"].extend(episode(3, draws[2]))
        batch = p["buffer"].sample()
        loss = p["model"](batch)["value"].square().mean()
        loss = loss + 0.0 * p["plain"].sample()["observation"].sum()
        p["scaler"].scale(loss).backward()
        p["scaler"].step(p["optimizer"])
        p["scaler"].update()
        p["optimizer"].zero_grad()
        p["scheduler"].step()
        p["engine"].update_weights(p["model"])
        p["scores"].append(float(loss.detach()))
        p["best"] |= {"loss": max(p["best"]["loss"], p["scores"][-1])}
        numbers = [*map(float, draws), p["scores"][-1], p["best"]["loss"], p["engine"].weights]
        numbers += [*p["scheduler"].get_last_lr(), p["scaler"].get_scale(), p["collector"].version]
        return numbers, batch["observation"].tolist()


def restored(folder, seed=1, order=lambda parts: parts):
    """A run made anew and restored."""
    run = Run(seed)
    return run, RunCheckpoint(folder).restore(**{k: run.parts[k] for k in order([*run.parts])})


@examples(20, few=2)
@given(seed=st.integers(0, 99), before=st.integers(0, 4), order=st.randoms(use_true_random=False))
def test_a_restored_run_goes_on_exactly(tmp_path_factory, seed, before, order):
    folder = tmp_path_factory.mktemp("run")
    run = Run(seed)
    for _ in range(before):
        run.update()
    names = order.sample([*run.parts], len(run.parts))
    RunCheckpoint(folder).save(before, **{name: run.parts[name] for name in names})
    expected = [run.update() for _ in range(3)]
    again, step = restored(folder, seed + 1, lambda names: order.sample(names, len(names)))
    assert step == before
    assert [again.update() for _ in range(3)] == expected
    assert again.parts["scores"] == run.parts["scores"]


def test_nothing_saved_is_a_new_run(tmp_path):
    run = Run()
    assert RunCheckpoint(tmp_path / "missing").restore(**run.parts) is None
    assert RunCheckpoint(tmp_path).restore(**run.parts) is None
    assert run.update() == Run().update()


def test_the_newest_are_kept_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    model, counts = nn.Linear(1, 1), {}
    checkpoint = RunCheckpoint(tmp_path, keep=2)
    for step in range(5):
        counts["step"] = step
        checkpoint.save(step, model=model, counts=counts)
        found = {x.name for x in tmp_path.iterdir()} - {"notes.txt"}
        assert found == {f"checkpoint-{n}" for n in range(max(1, step), step + 2)}
    shutil.rmtree(tmp_path / "checkpoint-5")
    assert RunCheckpoint(tmp_path).restore(model=model, counts=counts) == 3
    assert counts == {"step": 3}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_parts_share_is_saved_once(tmp_path):
    model = nn.Linear(100, 100)
    RunCheckpoint(tmp_path).save(1, model=model, all=nn.ModuleDict({"actor": model}))
    size = sum(x.stat().st_size for x in tmp_path.rglob("*") if x.is_file())
    assert size < 1.5 * 4 * 100 * 100


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux")
def test_restored_parts_need_no_file(tmp_path):
    run = Run()
    run.update()
    RunCheckpoint(tmp_path).save(1, **run.parts)
    expected = run.update()
    again, _ = restored(tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    shutil.rmtree(tmp_path)
    assert again.update() == expected


# ---- whole or not at all ------------------------------------------------------------------------


def small_parts(number):
    """Parts of each kind, made of ``number``."""
    buffer = buffer_of(10, ClipSampler(slice_len=1), batch_size=1)
    buffer.extend(episode(1 + number % 3, number))
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, number)
    return {"model": model, "buffer": buffer, "table": {"x": np.array(number)}, "plain": [number]}


def found_number(folder):
    """The number that the parts of the last checkpoint are made of, and its step; of one piece."""
    parts = small_parts(-1)
    step = RunCheckpoint(folder).restore(**parts)
    if step is None:
        return None
    number = parts["plain"][0]
    assert parts["model"].weight.item() == number
    assert parts["buffer"].storage[:]["observation"].tolist() == [[number] * 2] * (1 + number % 3)
    assert int(parts["table"]["x"]) == number
    assert step == number
    return number


def resumed(folder, **kwargs):
    """A ``RunCheckpoint`` that goes on from the last checkpoint."""
    checkpoint = RunCheckpoint(folder, **kwargs)
    checkpoint.restore(**small_parts(0))
    return checkpoint


def files_of(folder):
    return sorted(x.relative_to(folder) for x in folder.rglob("*") if x.is_file())


@pytest.fixture(scope="module")
def saved_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    checkpoint = RunCheckpoint(folder)
    for number in (1, 2, 3):
        checkpoint.save(number, **small_parts(number))
    return folder


@pytest.fixture
def three(saved_three, tmp_path):
    """A folder with steps 1, 2 and 3."""
    return shutil.copytree(saved_three, tmp_path / "run")


@pytest.mark.parametrize("how", ["flipped", slow("missing"), slow("cut")])
def test_a_damaged_checkpoint_is_skipped_and_named(how, three, caplog):
    newest = three / "checkpoint-3"
    whole = three / "whole"
    shutil.copytree(newest, whole)
    files = files_of(newest)
    assert {"run.json", "states.pt", "parts/table.pt"} <= {x.as_posix() for x in files}
    for file in files:
        damaged, content = newest / file, (newest / file).read_bytes()
        if how == "missing":
            damaged.unlink()
        elif how == "cut":
            damaged.write_bytes(content[:-1])
        else:
            at = len(content) // 2
            damaged.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        caplog.clear()
        assert found_number(three) == 2, file
        assert "checkpoint-3 is skipped" in caplog.text
        damaged.write_bytes(content)
    assert found_number(three) == 3
    checkpoint, parts = RunCheckpoint(three), small_parts(0)
    (newest / "states.pt").unlink()
    assert checkpoint.restore(**parts) == 2
    checkpoint.save(3, **parts)  # The damaged one has gone.
    assert len(files_of(newest)) == len(files)
    assert sorted(os.listdir(three)) == [*(f"checkpoint-{n}" for n in (1, 2, 3)), "whole"]


def test_if_all_are_damaged_the_run_is_not_new(three):
    for each in three.iterdir():
        (each / "states.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: checkpoint-3, .* damaged"):
        RunCheckpoint(three).restore(**small_parts(0))


def test_a_version_with_a_missing_file_does_not_count_as_kept(three):
    checkpoint = resumed(three, keep=2)
    (three / "checkpoint-3" / "states.pt").unlink()
    checkpoint.save(4, **small_parts(4))
    assert sorted(x.name for x in three.iterdir()) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("how", ["killed", "fails", "fails late"])
def test_whichever_call_is_the_last_earlier_checkpoints_remain(how, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # It takes long, and only a crash needs it.
    number, at, kept, ended = 1, 0, {"checkpoint-1"}, 0
    RunCheckpoint(tmp_path, keep=2).save(number, **small_parts(number))
    while True:
        following, checkpoint = number + 1, resumed(tmp_path, keep=2)
        parts = small_parts(following)
        with monkeypatch.context() as patch:
            if how == "killed":
                count = spoil(patch, at, Killed(), once=False)
            else:
                error = OSError(errno.ENOSPC, "No space left on device")
                count = spoil(patch, at, error, once=True, late=how == "fails late")
            try:
                checkpoint.save(following, **parts)
                done = True
            except (Killed, OSError):
                done = False
            reached = next(count) > at
        found = found_number(tmp_path)
        assert found == following if done else found in (number, following)
        left = {x.name for x in tmp_path.iterdir()}
        if not done and found == number:
            assert kept <= left
            assert how == "killed" or left == kept
        number, kept, ended = found, {x for x in left if not x.endswith(".tmp")}, ended + (not done)
        if not reached:  # The last save was not disturbed, and deleted what the others left.
            assert len(left) == 2
            assert kept == left
            break
        at += in_fast_tier(29, 1)
    assert ended > 30 // in_fast_tier(15, 1)


def test_what_a_killed_save_left_goes_before_the_next_one_writes(three, monkeypatch):
    left = three / f"checkpoint-{'a' * 32}.tmp"
    (left / "parts").mkdir(parents=True)
    (left / "parts" / "big").write_text("half")
    seen = []
    parts = small_parts(4)
    monkeypatch.setattr(parts["model"], "state_dict", lambda: seen.append(left.exists()) or {})
    resumed(three).save(4, **parts)
    assert seen == [False]


def test_a_part_that_cannot_be_saved_is_named_and_nothing_is_left(three):
    class Broken:
        def state_dict(self):
            raise KeyError("weights are gone")

        def load_state_dict(self, state):
            pass

    before = files_of(three)
    for part in (Broken(), {"f": lambda: None}):
        with pytest.raises(RuntimeError, match=r"part 'broken' \((Broken|dict)\) cannot be saved"):
            resumed(three).save(4, **small_parts(4), broken=part)
        assert files_of(three) == before
        assert found_number(three) == 3


def test_a_part_without_a_state_is_refused(tmp_path):
    for part, name in ((3, "int"), (None, "NoneType"), ("a", "str"), (torch.ones(1), "Tensor")):
        for call in (RunCheckpoint(tmp_path).restore, partial(RunCheckpoint(tmp_path).save, 1)):
            with pytest.raises(TypeError, match=f"part 'epoch' must have state_dict.*got {name}"):
                call(epoch=part)
    with pytest.raises(ValueError, match="names like those of arguments, got 'a/b'"):
        RunCheckpoint(tmp_path).save(1, **{"a/b": {}})
    with pytest.raises(ValueError, match="part 'step' has the name of save"):
        RunCheckpoint(tmp_path).restore(step={})
    with pytest.raises(TypeError, match=r"step must be an integer, got 1\.5"):
        RunCheckpoint(tmp_path).save(1.5)
    with pytest.raises(ValueError, match="keep must be a positive integer, got 0"):
        RunCheckpoint(tmp_path, keep=0)
    assert not any(tmp_path.iterdir())


# ---- what is restored into what -----------------------------------------------------------------


def values(parts):
    return [
        parts["model"].weight.item(),
        parts["buffer"].storage[:]["observation"].tolist(),
        parts["table"]["x"].tolist(),
        list(parts["plain"]),
        torch.get_rng_state().tolist(),
    ]


def test_wrong_names_are_refused_and_missing_ones_named(three, caplog):
    parts, other = small_parts(0), nn.Linear(2, 1)
    before = values(parts)
    parts["modle"] = parts.pop("model")
    with pytest.raises(ValueError, match=r"part 'modle' was not saved.*Did you mean 'model'\?"):
        RunCheckpoint(three).restore(**parts)
    parts["model"] = parts.pop("modle")
    with pytest.raises(ValueError, match=r"part 'plain' must be .* a data, got a state"):
        RunCheckpoint(three).restore(**parts | {"plain": other})
    assert values(parts) == before
    assert not caplog.text
    assert RunCheckpoint(three).restore(model=parts["model"]) == 3
    assert "not given buffer, plain, table of step 3" in caplog.text
    assert parts["model"].weight.item() == 3
    assert parts["plain"] == [0]


def named(names, **options):
    return nn.ModuleDict({name: nn.Linear(1, 1, **options) for name in names})


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        (named("a"), named("b", bias=False), "lacks a.bias, a.weight, and has b.weight besides"),
        (nn.Linear(1, 1), nn.Linear(2, 1), r"weight must be \(1, 1\), got \(1, 2\)"),
        (nn.Linear(1, 1), nn.Linear(1, 1, bias=False), "lacks bias, and has nothing besides"),
        (named("ab"), named(""), "lacks a.bias, a.weight, b.bias and 1 more, and"),
        ({"x": 1}, [1], "a dict, got a list"),
        ([1], {"x": 1}, "a list, got a dict"),
    ],
)
def test_a_state_of_something_else_changes_nothing(saved, given, message, tmp_path):
    RunCheckpoint(tmp_path).save(1, **small_parts(1), other=saved)
    parts = small_parts(0)
    before = values(parts), repr(state_of(given))
    with pytest.raises(ValueError, match=f"part 'other' must .*{message}"):
        RunCheckpoint(tmp_path).restore(**parts, other=given)
    assert (values(parts), repr(state_of(given))) == before


def test_a_collector_of_other_data_changes_nothing(tmp_path, tokenizer):
    def collector(data):
        engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
        return MultiTurnCollector(GuessNumber(4), engine, data, episodes_per_batch=2)

    with collector(range(3)) as first, collector(range(4)) as other:
        RunCheckpoint(tmp_path).save(1, **small_parts(1), collector=first)
        parts = small_parts(0)
        before = values(parts)
        with pytest.raises(ValueError, match=r"part 'collector' .* must be of the same data"):
            RunCheckpoint(tmp_path).restore(**parts, collector=other)
        assert values(parts) == before


class Picky(dict):
    def update(self, state):
        raise KeyError("other data")


def test_a_part_that_refuses_its_state_is_named(tmp_path):
    RunCheckpoint(tmp_path).save(2, **small_parts(2))
    parts, small = small_parts(0), buffer_of(1, batch_size=1)
    before = values(parts)
    with pytest.raises(ValueError, match=r"'buffer' cannot be restored(.|\n)*it: nothing;"):
        RunCheckpoint(tmp_path).restore(**parts | {"buffer": small})
    assert values(parts) == before
    with pytest.raises(ValueError, match=r"'table' cannot be restored(.|\n)*it: buffer, model;"):
        RunCheckpoint(tmp_path).restore(**parts | {"table": Picky()})


def test_collectors_are_loaded_after_their_engine_took_the_weights(tmp_path):
    first, second, other = Run(0), Run(1), Engine()
    for _ in range(3):
        first.update()
    RunCheckpoint(tmp_path).save(3, **first.parts)
    parts = dict(reversed(second.parts.items())) | {"other": other}
    RunCheckpoint(tmp_path).restore(**parts)
    engine = second.parts["engine"]
    assert engine.version == other.version == 1  # Once, though a collector has it as well.
    assert engine.weights == other.weights == first.parts["engine"].weights
    assert second.parts["collector"].version == 3


def test_an_engine_that_takes_no_weights_is_told_of(tmp_path, caplog):
    class Server(Engine):
        def update_weights(self, source):
            raise NotImplementedError("pass on_update=")

    parts = {"model": nn.Linear(1, 1), "collector": Collector(Server())}
    RunCheckpoint(tmp_path).save(1, **parts)
    assert RunCheckpoint(tmp_path).restore(**parts) == 1
    assert "Server keeps its weights, pass it the restored ones: pass on_update=" in caplog.text


# ---- several who save ---------------------------------------------------------------------------


def test_another_runs_steps_are_not_pushed_out(three):
    forgot, parts, before = RunCheckpoint(three), small_parts(0), files_of(three)
    for step in (1, 3, 10):
        with pytest.raises(ValueError, match=r"has step 3 from another run .* call restore\(\)"):
            forgot.save(step, **parts)
    assert files_of(three) == before
    forgot.restore(**parts)
    forgot.save(1, **parts)  # This object knows what it does.
    forgot.save(1, **parts)
    zombie = RunCheckpoint(three)
    assert zombie.restore(**parts) == 1  # The last that was saved.
    forgot.save(2, **parts)
    with pytest.raises(ValueError, match="another run or process"):
        zombie.save(3, **parts)


def test_a_folder_of_something_else_is_refused(tmp_path):
    small_parts(1)["buffer"].dumps(tmp_path)
    before = files_of(tmp_path)
    for call in (RunCheckpoint(tmp_path).restore, lambda: RunCheckpoint(tmp_path).save(1)):
        with pytest.raises(ValueError, match="folder must hold checkpoints of runs"):
            call()
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("part", ["buffer", "storage"])
def test_a_buffer_is_not_saved_over_checkpoints(part, three):
    buffer, before = small_parts(4)["buffer"], files_of(three)
    with pytest.raises(ValueError, match=r"path .* the checkpoints of a run.*give another folder"):
        (buffer if part == "buffer" else buffer.storage).dumps(three)
    assert files_of(three) == before
    assert found_number(three) == 3


def test_a_buffer_in_a_checkpoint_is_loaded_by_itself(three):
    buffer = small_parts(0)["buffer"]
    folder = three / "checkpoint-3" / "parts" / "buffer"
    buffer.loads(folder)
    assert buffer.storage[:]["observation"].tolist() == [[3.0, 3.0]]
    mapped = EpisodeStorage.load_memmap(folder)
    assert mapped[:]["observation"].tolist() == [[3.0, 3.0]]
    assert not list(folder.rglob("checkpoint*"))  # No versions within a version.


class WatchedLock:
    """A lock that tells when another thread asks for it."""

    def __init__(self, lock):
        self.lock, self.asked, self.owner = lock, threading.Event(), threading.get_ident()

    def __enter__(self):
        if threading.get_ident() != self.owner:
            self.asked.set()
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


def test_nothing_is_delivered_while_a_collector_is_saved(tmp_path, tokenizer):
    buffer = buffer_of(100, EpisodeSampler(), batch_size=1)
    collector = MultiTurnCollector(
        GuessNumber(4, turns=1),
        ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id]),
        episodes_per_batch=2,
        total_episodes=8,
        replay_buffer=buffer,
    )
    lock = collector._delivering = WatchedLock(collector._delivering)

    class First:
        """Is saved before the others; meanwhile, the collector is about to deliver."""

        def state_dict(self):
            collector.start()
            assert lock.asked.wait(PATIENCE)
            return {}

        def load_state_dict(self, state):
            pass

    with collector:
        RunCheckpoint(tmp_path).save(1, first=First(), collector=collector, buffer=buffer)
        wait_until(lambda: collector.stats()["accepted"] == 8)
    assert buffer.storage.num_episodes == 8
    version = tmp_path / "checkpoint-1"
    saved = torch.load(version / "states.pt", weights_only=True)["parts"]["collector"]
    assert saved["counts"]["accepted"] == 0
    buffer.loads(version / "parts" / "buffer")
    assert buffer.storage.num_episodes == 0
