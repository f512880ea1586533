"""The collector's settings: one place each, shared between collectors, and refused where wrong."""

from __future__ import annotations

import inspect
import threading
from dataclasses import FrozenInstanceError

import pytest
from torchrl.collectors import BaseCollector

from tests.collectors.chats import Chat
from torchrl_mt.collectors import ChatOptions, CollectorOptions, Limits, MultiTurnCollector


def collector(engine, **kwargs):
    data = [{"turns": 1, "k": k} for k in range(4)]
    return MultiTurnCollector(Chat, engine, **{"data": data, "episodes_per_batch": 4, **kwargs})


def test_each_setting_has_one_place():
    parameters = inspect.signature(MultiTurnCollector).parameters
    assert list(parameters)[:3] == ["env", "policy", "data"]
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    records = (CollectorOptions, ChatOptions, Limits)
    names = [*parameters, *(name for record in records for name in vars(record()))]
    assert len(names) == len(set(names))
    assert issubclass(MultiTurnCollector, BaseCollector)


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
        ({"data": []}, ValueError, "data must hold at least one item, got none"),
        ({"episodes_per_batch": 0}, ValueError, "episodes_per_batch must be at least 1, got 0"),
        ({"group_size": 0}, ValueError, "group_size must be at least 1, got 0"),
        (
            {"group_size": 3},
            ValueError,
            "episodes_per_batch must be a multiple of group_size=3, got 4",
        ),
        ({"group_size": 2, "total_episodes": 5}, ValueError, "total_episodes must be a multiple"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be at least 1, got 0"),
        ({"max_retries": -1}, ValueError, "max_retries must be at least 0, got -1"),
        (
            {"max_consecutive_failures": 0},
            ValueError,
            "max_consecutive_failures must be at least 1",
        ),
    ],
)
def test_what_a_collector_cannot_mean_is_refused(engine, kwargs, error, match):
    threads = threading.active_count()
    with pytest.raises(error, match=match):
        collector(engine, **kwargs)
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("record", "kwargs", "error", "match"),
    [
        (CollectorOptions, {"incomplete_groups": "lose"}, ValueError, "must be one of .*lose"),
        (
            CollectorOptions,
            {"staleness": "delivry"},
            ValueError,
            "must be one of .*got 'delivry'. Did you mean 'delivery'?",
        ),
        (CollectorOptions, {"total_attempts": 0}, ValueError, "must be at least 1"),
        (CollectorOptions, {"env_workers": 0}, ValueError, "must be at least 1, got 0"),
        (CollectorOptions, {"seed": "x"}, TypeError, "must be an int, got 'x'"),
        (CollectorOptions, {"chat": {}}, TypeError, "must be of class ChatOptions, got {}"),
        (ChatOptions, {"on_break": "raise"}, ValueError, "must be one of .*got 'raise'"),
        (ChatOptions, {"template": "own"}, ValueError, "must be one of .*got 'own'"),
        *(
            (
                ChatOptions,
                {"max_prompt_tokens": bad},
                ValueError,
                "must be a positive integer, got ",
            )
            for bad in (0, -1, 1.5, True, "8")
        ),
        *(
            (Limits, {name: 0}, ValueError, "must be at least 1, or None for no limit, got 0")
            for name in ("max_turns", "max_response_tokens", "max_episode_tokens")
        ),
        (Limits, {"on_timeout": "keep"}, ValueError, "must be one of .*, got 'keep'"),
        (Limits, {"on_cut": "go"}, ValueError, "must be one of 'end', 'continue', got 'go'"),
    ],
)
def test_a_record_refuses_what_it_cannot_mean(record, kwargs, error, match):
    (name,) = kwargs
    with pytest.raises(error, match=f"{name} {match}"):
        record(**kwargs)
