"""The collector's settings: one place each, shared between collectors, and refused where wrong."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError

import pytest

from tests.collectors.chats import Chat
from torchrl_mt.collectors import ChatOptions, CollectorOptions, Limits, MultiTurnCollector


def collector(engine, **kwargs):
    data = [{"turns": 1, "k": k} for k in range(4)]
    return MultiTurnCollector(Chat, engine, data, **{"episodes_per_batch": 4, **kwargs})


def test_each_setting_has_one_place():
    parameters = inspect.signature(MultiTurnCollector).parameters
    assert list(parameters)[:3] == ["env", "policy", "data"]
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    records = (CollectorOptions, ChatOptions, Limits)
    names = [*parameters, *(name for record in records for name in vars(record()))]
    assert len(names) == len(set(names))


def test_one_record_serves_several_collectors_and_does_not_change(engine):
    options = CollectorOptions(shuffle=True, seed=3)
    with collector(engine, options=options) as one, collector(engine, options=options) as two:
        first = next(iter(one))["data"]
        assert sorted(item["k"] for item in first) == [*range(4)]
        assert next(iter(two))["data"] == first
    with pytest.raises(FrozenInstanceError):
        options.seed = 4


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"shufle": True}, TypeError, "argument 'shufle'"),
        ({"limits": {"max_turns": 3}}, TypeError, r"class Limits, got .*give Limits\("),
        ({"options": {"seed": 3}}, TypeError, r"CollectorOptions, got .*give CollectorOptions\("),
        ({"max_retries": -1}, ValueError, "max_retries must be at least 0, got -1"),
        ({"max_consecutive_failures": 0}, ValueError, "must be at least 1, got 0"),
    ],
)
def test_what_a_collector_cannot_mean_is_refused(engine, kwargs, error, match):
    with pytest.raises(error, match=match):
        collector(engine, **kwargs)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: CollectorOptions(incomplete_groups="lose"),
            ValueError,
            "incomplete_groups must be one of .*lose",
        ),
        (
            lambda: CollectorOptions(staleness="delivry"),
            ValueError,
            "staleness must be one of .*got 'delivry'. Did you mean 'delivery'?",
        ),
        (
            lambda: CollectorOptions(total_attempts=0),
            ValueError,
            "total_attempts must be at least 1",
        ),
        (lambda: CollectorOptions(seed="x"), TypeError, "seed must be an int, got 'x'"),
        (lambda: CollectorOptions(chat={}), TypeError, "chat must be of class ChatOptions, got {}"),
        (
            lambda: ChatOptions(on_break="raise"),
            ValueError,
            "on_break must be one of .*got 'raise'",
        ),
        (lambda: ChatOptions(template="own"), ValueError, "template must be one of .*got 'own'"),
    ],
)
def test_a_record_refuses_what_it_cannot_mean(make, error, match):
    with pytest.raises(error, match=match):
        make()
