"""The collector's settings: one place each, shared between collectors, and refused where wrong."""

from __future__ import annotations

import inspect
import threading
from dataclasses import FrozenInstanceError
from functools import partial

import pytest
from torchrl.collectors import BaseCollector

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting, played
from tests.refusals import check_refused, refused
from torchrl_mt.collectors import ChatOptions, CollectorOptions, Limits, MultiTurnCollector

DATA = [{"turns": 1, "k": k} for k in range(4)]


def collector(engine, *, data=DATA, n=4, **options):
    return collecting(Chat, engine, data, n=n, **options)


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
        first = played(next(iter(one)))
        assert sorted(first) == [*range(4)]
        assert played(next(iter(two))) == first
    with pytest.raises(FrozenInstanceError):
        options.seed = 4


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("argument 'shufle'", collector, shufle=True, error=TypeError),
        refused("Limits, got …give Limits(", collector, limits={"max_turns": 3}, error=TypeError),
        refused("Options, got …give Collector", collector, options={"seed": 3}, error=TypeError),
        refused("data must hold at least one item, got none", collector, data=[]),
        refused("episodes_per_batch must be at least 1, got 0", collector, n=0),
        refused("group_size must be at least 1, got 0", collector, group_size=0),
        refused("batch must be a multiple of group_size=3, got 4", collector, group_size=3),
        refused("total_episodes must be a multiple", collector, group_size=2, total_episodes=5),
        refused("max_concurrency must be at least 1, got 0", collector, max_concurrency=0),
        refused("max_retries must be at least 0, got -1", collector, max_retries=-1),
        refused("max_consecutive_failures must be at", collector, max_consecutive_failures=0),
    ],
)
def test_what_a_collector_cannot_mean_is_refused(engine, call, error, text):
    threads = threading.active_count()
    check_refused(partial(call, engine), error, text)
    assert threading.active_count() == threads


SIZE = "max_prompt_tokens must be a positive integer, got "
AT_LEAST = "must be at least 1, or None for no limit, got 0"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("must be one of …lose", CollectorOptions, incomplete_groups="lose"),
        refused("got 'delivry'. Did you mean 'delivery'?", CollectorOptions, staleness="delivry"),
        refused("total_attempts must be at least 1", CollectorOptions, total_attempts=0),
        refused("env_workers must be at least 1, got 0", CollectorOptions, env_workers=0),
        refused("seed must be an int, got 'x'", CollectorOptions, seed="x", error=TypeError),
        refused("chat must be of class ChatOptions", CollectorOptions, chat={}, error=TypeError),
        refused("on_break must be one of …got 'raise'", ChatOptions, on_break="raise"),
        refused("template must be one of …got 'own'", ChatOptions, template="own"),
        *(refused(SIZE, ChatOptions, max_prompt_tokens=bad) for bad in (0, -1, 1.5, True, "8")),
        refused(f"max_turns {AT_LEAST}", Limits, max_turns=0),
        refused(f"max_response_tokens {AT_LEAST}", Limits, max_response_tokens=0),
        refused(f"max_episode_tokens {AT_LEAST}", Limits, max_episode_tokens=0),
        refused("on_timeout must be one of …, got 'keep'", Limits, on_timeout="keep"),
        refused("on_cut must be one of 'end', 'continue', got 'go'", Limits, on_cut="go"),
    ],
)
def test_a_record_refuses_what_it_cannot_mean(call, error, text):
    check_refused(call, error, text)
