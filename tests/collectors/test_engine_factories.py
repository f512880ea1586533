"""A collector makes and closes the engine of a factory; an engine itself stays in its process."""

from __future__ import annotations

import pickle
import sys
from functools import partial

import pytest
from torch import nn

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.engines import CompletionsEngine, PolicyEngine, TransformersEngine
from torchrl_mt.testing import tiny_chat_tokenizer


def test_the_collector_owns_the_engine_that_a_factory_makes(tokenizer):
    made = []

    def factory(word=5):
        made.append(ScriptedEngine(tokenizer, lambda prompt: [word, tokenizer.eos_token_id]))
        return made[-1]

    for policy in (factory, partial(factory, 6)):
        with collecting(Chat, policy) as collector:
            next(iter(collector))
            (engine,) = made
            assert collector.engine is engine
            assert not engine.closed
        assert made.pop().closed


class FivesEngine(ScriptedEngine):
    def __init__(self):
        tokenizer = tiny_chat_tokenizer(list(map(str, range(10))))
        super().__init__(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])


def test_a_class_may_be_a_factory_also_by_name():
    for policy in (FivesEngine, f"{__name__}.FivesEngine"):
        with collecting(Chat, policy) as collector:
            next(iter(collector))
            engine = collector.engine
            assert type(engine) is FivesEngine
        assert engine.closed


def test_an_engine_that_was_given_stays_open(engine):
    with collecting(Chat, engine):
        pass
    assert not engine.closed


class Shouting(nn.Module):
    def forward(self):
        raise AssertionError("a module is no factory")


@pytest.mark.parametrize(
    ("policy", "got"),
    [
        (Shouting(), "got Shouting: wrap a model"),
        (3, "got int: wrap a model"),
        (lambda td: td, "got function: it needs arguments"),
        (ScriptedEngine, "got the class ScriptedEngine: it needs arguments"),
        (lambda: Chat(), "got Chat from function"),
        (lambda: FivesEngine, "got type from function"),
        (Chat, "got Chat from the class Chat"),
    ],
)
def test_what_makes_no_engine_is_refused(policy, got):
    with pytest.raises(TypeError, match=got):
        collecting(Chat, policy)


def test_engines_and_collectors_say_why_they_cannot_be_pickled(tokenizer, model, engine):
    engines = [
        TransformersEngine(model, tokenizer),
        PolicyEngine(lambda td: td, tokenizer=tokenizer, check=False),
        CompletionsEngine("http://127.0.0.1:1", "m", tokenizer),
    ]
    for each in engines:
        name = type(each).__name__
        advice = rf"{name} cannot be pickled .* give a factory.* policy=lambda: {name}\(\.\.\.\)"
        with pytest.raises(TypeError, match=advice):
            pickle.dumps(each)
        each.close()
    with (
        collecting(Chat, engine) as collector,
        pytest.raises(TypeError, match=r"make it where it runs.* MultiTurnCollector\.as_remote"),
    ):
        pickle.dumps(collector)


def test_an_actor_class_needs_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-mt\[ray\]'"):
        MultiTurnCollector.as_remote()
