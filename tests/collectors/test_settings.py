"""Records of settings: shared, refused where they are wrong, and given in one way at a time."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from tests.collectors.chats import Chat
from torchrl_mt.collectors import ChatOptions, FailurePolicy, ItemOrder, MultiTurnCollector

RECORDS = [
    ("failures", FailurePolicy(max_retries=2, incomplete_groups="keep")),
    ("failures", FailurePolicy(max_consecutive_failures=7)),
    ("order", ItemOrder(shuffle=True, cycle=False, seed=3)),
    ("chat", ChatOptions(template_kwargs={"enable_thinking": False})),
]


def collector(engine, **kwargs):
    data = [{"turns": 1, "k": k} for k in range(4)]
    return MultiTurnCollector(Chat, engine, data, episodes_per_batch=4, **kwargs)


def settings_of(made):
    made.shutdown()
    return made.failures, made._order, made._player._chat_options


@pytest.mark.parametrize(("name", "record"), RECORDS)
def test_a_record_and_its_fields_mean_the_same(engine, name, record):
    assert settings_of(collector(engine, **{name: record})) == settings_of(
        collector(engine, **vars(record))
    )


@pytest.mark.parametrize(("name", "record"), RECORDS)
def test_one_record_serves_several_collectors_and_does_not_change(engine, name, record):
    with collector(engine, **{name: record}) as one, collector(engine, **{name: record}) as two:
        assert sorted(item["k"] for item in next(iter(one))["data"]) == [*range(4)]
        assert next(iter(two))["data"] == next(iter(collector(engine, **{name: record})))["data"]
    with pytest.raises(FrozenInstanceError):
        setattr(record, next(iter(vars(record))), None)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (
            {"failures": FailurePolicy(), "max_retries": 1},
            "failures and max_retries must not both be given",
        ),
        ({"order": ItemOrder(), "seed": 0}, "order and seed must not both be given"),
        ({"chat": ChatOptions(), "on_break": "fork"}, "chat and on_break must not both"),
        ({"order": FailurePolicy()}, "order must be of class ItemOrder, got FailurePolicy"),
        ({"shufle": True}, "MultiTurnCollector has no argument shufle"),
    ],
)
def test_what_is_given_twice_or_unknown_is_refused(engine, kwargs, match):
    with pytest.raises(TypeError, match=match):
        collector(engine, **kwargs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FailurePolicy(max_retries=-1), "max_retries must be at least 0, got -1"),
        (lambda: FailurePolicy(max_consecutive_failures=0), "must be at least 1, got 0"),
        (
            lambda: FailurePolicy(incomplete_groups="lose"),
            "incomplete_groups must be one of .*lose",
        ),
        (lambda: ChatOptions(on_break="raise"), "on_break must be one of .*got 'raise'"),
        (lambda: ChatOptions(template="own"), "template must be one of .*got 'own'"),
    ],
)
def test_a_record_refuses_what_it_cannot_mean(make, match):
    with pytest.raises(ValueError, match=match):
        make()
