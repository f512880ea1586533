"""Experience in the background: whole weights, in order, with errors where they belong."""

import copy
import gc
import itertools
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

from tests.adapters import lora
from tests.objectives.helpers import MASK, log_probs
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.objectives import ExperienceMaker, ExperiencePipeline
from torchrl_mt.objectives.snapshot import Snapshot

TOKENS = ("tokens", "full")


def train(model, amount=0.1):
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += amount * torch.randn_like(p)


class Critic(nn.Module):
    """A value head on the actor's own embeddings."""

    def __init__(self, actor):
        super().__init__()
        self.embedding = actor.get_input_embeddings()
        self.head = nn.Linear(self.embedding.embedding_dim, 1)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embedding(input_ids))


def no_thread():
    return all(thread.name != "torchrl_mt-experience" for thread in threading.enumerate())


@pytest.mark.parametrize(("adapted", "depth"), [(False, 1), (False, 3), (True, 2)])
def test_each_batch_is_scored_with_the_weights_of_its_version(make_model, rows, depth, adapted):
    actor = make_model()
    if adapted:
        actor = lora(actor)
    critic = Critic(actor)
    maker = ExperienceMaker(
        actor,
        ref="base" if adapted else make_model(1),
        critic=critic,
        advantage="gae",
        old_log_probs="actor",
    )
    given = [rows(seed=seed, n=3, s=8) for seed in range(5)]
    versions = []
    with ExperiencePipeline(given, maker, depth=depth) as pipeline:
        for number in range(len(given)):
            versions.append(copy.deepcopy((actor, critic)))
            out = next(pipeline)
            assert torch.equal(out[TOKENS], given[number][TOKENS])
            scored = out["versions", "scored"]
            assert scored.tolist() == [max(0, number - depth)] * len(out)
            assert maker.metrics["staleness/scored"] == min(number, depth)
            used, valued = versions[int(scored[0])]
            torch.testing.assert_close(
                out["log_probs", "old"], log_probs(used, out), rtol=0, atol=0
            )
            options = {"critic": valued, "advantage": "gae", "old_log_probs": "actor"}
            expected = ExperienceMaker(used, ref=maker.ref, **options)(given[number].copy())
            for key in expected.keys(True, True):
                torch.testing.assert_close(out[key], expected[key], rtol=0, atol=0)
            train(nn.ModuleList([actor, critic]))
        with pytest.raises(StopIteration):
            next(pipeline)
    assert ("log_probs", "old") not in given[0].keys(True)
    assert all(p.requires_grad == q.requires_grad for p, q in pairs(actor, versions[0][0]))


def pairs(one, other):
    return zip(one.parameters(), other.parameters(), strict=True)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_weights_that_change_within_a_forward_pass_are_not_seen(make_model, rows, adapted):
    actor = lora(make_model()) if adapted else make_model()
    inner = actor.get_base_model() if adapted else actor
    within, trained, main = threading.Event(), threading.Event(), threading.get_ident()

    def wait(*_):
        if threading.get_ident() != main and held:
            within.set()
            assert trained.wait(PATIENCE)

    held = False
    inner.model.layers[1].register_forward_pre_hook(wait)
    maker = ExperienceMaker(actor, old_log_probs="actor")
    with ExperiencePipeline([rows(), rows(seed=1)], maker) as pipeline:
        next(pipeline)
        held = True
        before = copy.deepcopy(actor)
        wait_until(lambda: within.is_set() or pipeline._line[0].done())
        train(actor)
        trained.set()
        out = next(pipeline)
    held = False
    torch.testing.assert_close(out["log_probs", "old"], log_probs(before, out), rtol=0, atol=0)
    assert (log_probs(actor, out) - log_probs(before, out)).abs().max() > 1e-3


def test_frozen_parameters_are_shared_and_trained_ones_are_not(make_model):
    actor = lora(make_model())
    snapshot = Snapshot([actor])
    snapshot.load(snapshot.weights())
    for p, q in pairs(actor, snapshot.models[0]):
        assert (p.data_ptr() == q.data_ptr()) == (not p.requires_grad)
        assert p.requires_grad == q.requires_grad
    assert snapshot.is_of([actor])
    assert not snapshot.is_of([copy.copy(actor)])
    some = next(p for p in actor.parameters() if not p.requires_grad)
    some.requires_grad_(True)
    assert not snapshot.is_of([actor])


def test_settings_that_change_count_for_batches_begun_later(model, rows):
    maker = ExperienceMaker(model, critic=Critic(model), advantage="gae")
    given = [rows(seed=seed) for seed in range(3)]
    with ExperiencePipeline(given, maker) as pipeline:
        first = next(pipeline)
        maker.gamma, maker.critic = 0.5, Critic(model)
        rest = list(pipeline)
    later = maker(given[2].copy())
    assert torch.equal(rest[1]["advantage"], later["advantage"])
    assert not torch.equal(rest[0]["values"], maker(given[1].copy())["values"])
    assert torch.equal(first[TOKENS], given[0][TOKENS])


def test_nothing_is_copied_that_is_not_scored_with(model, other_model, rows, monkeypatch):
    monkeypatch.setattr(Snapshot, "__init__", lambda *_: pytest.fail("copied"))
    given = [rows(seed=seed) for seed in range(3)]
    maker = ExperienceMaker(model, ref=other_model)
    expected = [maker(batch.copy()) for batch in given]
    version = itertools.count(10)
    with ExperiencePipeline(iter(given), maker, version=lambda: next(version)) as pipeline:
        for out, alone in zip(pipeline, expected, strict=True):
            for key in alone.keys(True, True):
                torch.testing.assert_close(out[key], alone[key], rtol=0, atol=0)
    assert out["versions", "scored"].unique().tolist() == [11]
    assert maker.metrics["staleness/scored"] == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_is_made_ahead_than_asked_for(model, rows, depth):
    pulled, made = itertools.count(), 0

    def source():
        nonlocal made
        for made in pulled:
            yield rows(seed=made)

    with ExperiencePipeline(source(), ExperienceMaker(model), depth=depth) as pipeline:
        for taken in range(1, 6):
            next(pipeline)
            wait_until(lambda: all(made.done() for made in pipeline._line))
            assert made == taken + depth - 1
    wait_until(no_thread)


def failing_source(rows):
    yield rows()
    yield rows(seed=1)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("depth", [1, 3])
def test_errors_come_in_their_turn_with_their_traceback(model, rows, depth, caplog):
    pipeline = ExperiencePipeline(failing_source(rows), ExperienceMaker(model), depth=depth)
    assert len([next(pipeline), next(pipeline)]) == 2
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(pipeline)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "failing_source" in frames
    with pytest.raises(StopIteration):
        next(pipeline)

    def stop(shown):
        raise StopIteration

    maker = ExperienceMaker(model, process=stop)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(ExperiencePipeline([rows()], maker, depth=depth))
    lacking = rows().exclude(MASK)
    with pytest.raises(KeyError, match="all_assistant_mask"):
        list(ExperiencePipeline([rows(), lacking], ExperienceMaker(model), depth=depth))
    wait_until(no_thread)
    with ExperiencePipeline([rows(), lacking], ExperienceMaker(model)) as pipeline:
        next(pipeline)
        wait_until(lambda: pipeline._line[0].done())
    assert "the batch after the last that was taken failed" in caplog.text


def test_the_thread_ends_with_its_consumer(model, rows):
    maker = ExperienceMaker(model)
    endless = (rows(seed=seed) for seed in itertools.count())
    pipeline = ExperiencePipeline(endless, maker)

    def consume():
        with pipeline:
            for _ in pipeline:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    wait_until(no_thread)
    assert list(pipeline) == []
    assert len(next(endless))  # It is the caller's: it was not closed.
    left = ExperiencePipeline(endless, maker)
    next(left)
    gone = weakref.ref(left)
    del left
    gc.collect()
    assert gone() is None
    wait_until(no_thread)


def test_closing_does_not_wait_for_a_source(model, rows):
    asked, go_on = threading.Event(), threading.Event()
    closed = []

    class Source:
        def __iter__(self):
            try:
                yield rows()
                asked.set()
                assert go_on.wait(PATIENCE)
                yield rows()
            finally:
                closed.append(threading.current_thread().name)

    pipeline = ExperiencePipeline(Source(), ExperienceMaker(model))
    next(pipeline)
    assert asked.wait(PATIENCE)
    rest = []
    waiting = threading.Thread(target=lambda: rest.append(list(pipeline)))
    waiting.start()
    pipeline.close()
    pipeline.close()
    waiting.join()
    assert rest == [[]]
    go_on.set()
    wait_until(no_thread)
    assert closed == ["torchrl_mt-experience"]


def test_what_cannot_be_exact_is_refused(model, rows):
    class Shared:
        engine = type("Engine", (), {"shares_weights": True})

    with pytest.raises(ValueError, match="make its engine with share_weights=False"):
        ExperiencePipeline(Shared(), ExperienceMaker(model))
    with pytest.raises(ValueError, match="depth must be a positive integer, got 0"):
        ExperiencePipeline([], ExperienceMaker(model), depth=0)
    with pytest.raises(ValueError, match="ref must not have parameters of actor or critic"):
        next(ExperiencePipeline([rows()], ExperienceMaker(model, ref=model)))
    with pytest.raises(TypeError, match="batch must be a TensorDict of rows or episodes"):
        next(ExperiencePipeline([None], ExperienceMaker(model)))
