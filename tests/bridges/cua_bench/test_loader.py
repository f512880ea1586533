"""The loader of prompts: what loops are given, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bridges.cua_bench.loops import Plain, Scripted, answers, play
from tests.collectors.playing.worker_envs import Tells
from tests.idle_clock import LIMIT, Loop
from tests.pages import code_of
from tests.waiting import PATIENCE, in_thread, wait_until
from torchrl_mt.bridges.cua_bench import MultiTurnDataLoader, slots, waiting
from torchrl_mt.collectors import ChatOptions, CollectorOptions, Limits
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.envs import TextStep

END = 1
ONCE = CollectorOptions(cycle=False)
"""Each item is played once."""


def reply(row):
    return [5, END]


def prompt_of(batch, row=0):
    """The tokens of a prompt without its padding."""
    return batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()


@pytest.fixture(autouse=True)
def stable_template(monkeypatch):
    """The tiny template never rewrites what was said; to find that out takes longer than a test."""
    monkeypatch.setattr("torchrl_mt.chat.tokens.find_break", lambda template: None)


@pytest.fixture
def make(tokenizer):
    """Makes loaders, and closes them."""
    made = []

    def make(env=None, **options):
        options = {"batch_size": 1, "max_prompt_length": 64, "max_response_length": 8, **options}
        if env is None and "env_class" not in options:
            env = Scripted()
        made.append(MultiTurnDataLoader(env, tokenizer, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def event():
    """What hanging environments wait for; ask for it after ``make``, since it is set before closing."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(params=["text", "plain"])
def kind(request):
    """Options of an environment of either form, for some number of slots, with scripts of rewards."""

    def options(num_envs, scripts=((0.0, 0.0, 1.0),)):
        if request.param == "text":
            items = [{"rewards": list(script)} for script in scripts]
            return {"env": Scripted(), "num_envs": num_envs, "task_configs": items}
        configs = [{"scripts": [list(script) for script in scripts]} for _ in range(num_envs)]
        return {"env_class": Plain, "env_configs": configs}

    return options


# What is given out


def test_a_batch_has_the_prompts_of_different_slots_padded_on_the_left(make, tokenizer):
    loader = make(batch_size=3, num_envs=4)
    batch = next(loader)
    padded = ("input_ids", "attention_mask", "position_ids")
    assert set(batch) == {*padded, "worker_id", "meta_info", "raw_prompt_ids"}
    for name in padded:
        assert batch[name].dtype is torch.int64
        assert batch[name].shape == (3, 64)
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1"}], add_generation_prompt=True, return_dict=False
    )
    mask = batch["attention_mask"]
    for row in range(3):
        assert prompt_of(batch, row) == opening
        assert batch["input_ids"][row, -len(opening) :].tolist() == opening
    assert batch["raw_prompt_ids"].tolist() == [opening] * 3
    assert torch.equal(batch["position_ids"], (mask.cumsum(1) - 1).clamp(min=0) * mask)
    assert batch["worker_id"].dtype == np.int64
    assert len(set(batch["worker_id"].tolist())) == 3
    assert [info["turn"] for info in batch["meta_info"]] == [0] * 3
    assert [set(info) for info in batch["meta_info"]] == [{"uid", "turn", "data", "info"}] * 3


def test_what_an_environment_tells_is_beside_the_prompt(make):
    loader = make(task_configs=[{"rewards": [0.0, 1.0], "name": "x"}], num_envs=1)
    first = next(loader)["meta_info"][0]
    assert first["data"]["name"] == "x"
    assert first["info"] is None
    loader = make(num_envs=1)
    loader.async_step(answers(next(loader), reply))
    assert next(loader)["meta_info"][0]["info"] == {"turn": 1}


# What is stored


def test_only_outcomes_are_kept_if_asked_for(make, kind):
    options = kind(1, [[5.0, 0.5], [0.0, 0.0, 2.0]])
    loader = make(only_keep_outcome_in_replay=True, replay_capacity=2, **options)
    play(loader, reply, lambda: loader.stats()["accepted"] >= 2)
    assert loader.storage.lengths.tolist() == [1, 1]
    assert sorted(loader.storage[:]["next", "return"].reshape(-1).tolist()) == [0.5, 2.0]


def test_an_episode_longer_than_the_storage_is_rejected(make):
    items = [{"rewards": [0.0] * 3}, {"rewards": [1.0]}]
    loader = make(task_configs=items, options=ONCE, replay_capacity=2, num_envs=1)
    assert play(loader, reply, lambda: False) == 4
    assert loader.stats()["rejected/longer_than_replay"] == 1
    assert loader.storage.lengths.tolist() == [1]


@settings(max_examples=6)
@given(data=st.data())
def test_stored_are_the_tokens_that_were_given(tokenizer, data):
    """Whatever they are: tokens that decode and encode would change, cut or ended, in any order."""
    vocabulary = st.integers(0, len(tokenizer) - 1)
    plain = data.draw(st.booleans())
    num_envs = data.draw(st.integers(1, 3))
    batch_size = data.draw(st.integers(1, num_envs))
    heard, items = [], {"task_configs": [{}] * 4, "options": ONCE}
    options = {"env": Scripted(heard), "num_envs": num_envs, **items}
    if plain:
        configs = [{"heard": heard} for _ in range(num_envs)]
        options = {"env_class": Plain, "env_configs": configs, "total_episodes": 4}
    told = {}
    with MultiTurnDataLoader(
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_prompt_length=200,
        max_response_length=5,
        **options,
    ) as loader:
        for batch in loader:
            rows = len(batch["worker_id"])
            drawn = [data.draw(st.lists(vocabulary, min_size=1, max_size=5)) for _ in range(rows)]
            made = answers(batch, drawn.__getitem__)
            log_probs = -torch.rand(made["responses"].shape)
            for row in data.draw(st.permutations(range(rows))):
                one = {key: value[row : row + 1] for key, value in made.items()}
                info = one["meta_info"][0]
                ids, scores = drawn[row], log_probs[row, : len(drawn[row])].tolist()
                told[info["uid"], info["turn"]] = prompt_of(batch, row), ids, scores
                loader.async_step({**one, "log_probs": log_probs[row : row + 1]})
        stored = {}
        for episode in loader.storage.episodes():
            for turn, step in enumerate(episode.unbind(0)):
                stored[int(step["collector", "traj_ids"]), turn] = (
                    step["tokens", "prompt"].tolist(),
                    step["tokens", "response"].tolist(),
                    step["log_probs", "response"].tolist(),
                )
    assert len(stored) == 12
    assert stored == told
    without_end = [ids[:-1] if ids[-1] == END else ids for _, ids, _ in told.values()]
    assert Counter(heard) == Counter(map(tokenizer.decode, without_end))


def test_returns_balance_and_outcomes(make):
    items = [{"rewards": rewards} for rewards in ([0.0, 0.0, 1.0], [0.5], [-1.0, 1.0], [0.0, 0.0])]
    options = {"replay_reward_discount": 0.5, "balance_thres": 0.25, "num_envs": 1}
    loader = make(task_configs=items, options=ONCE, **options)
    assert play(loader, reply, lambda: False) == 8
    expected = [[0.25, 0.5, 1.0], [0.5], [-0.5, 1.0], [0.0, 0.0]]
    stored = [each["next", "return"].flatten().tolist() for each in loader.storage.episodes()]
    assert stored == expected
    assert loader.get_balance_stats() == (3, 5)
    assert loader.calculate_outcome_reward() == pytest.approx(2.5 / 4)
    running = 0.0
    for last in (1.0, 0.5, 1.0, 0.0):
        running = 0.99 * running + 0.01 * last
    assert loader.running_outcome_reward() == pytest.approx(running)
    loader.clear_replay_buffer()
    assert (len(loader.storage), loader.get_balance_stats()) == (0, (0, 0))
    assert loader.calculate_outcome_reward() == 0.0


def test_log_probs_and_versions_are_those_of_the_prompts_batch(make):
    loader = make(num_envs=1)
    for _ in range(2):
        batch = next(loader)
        loader.increment_version()  # The batch was given out before.
        loader.async_step(answers(batch, reply))
    batch = {**answers(next(loader), reply), "log_probs": torch.tensor([[-0.5, -1.5]])}
    loader.async_step(batch)
    wait_until(lambda: len(loader.storage) == 3)
    steps = loader.storage[:]
    assert steps["versions", "response"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert steps["log_probs", "response"][:2].isnan().all()
    assert steps["log_probs", "response"][2].tolist() == [-0.5, -1.5]
    assert loader.stats()["policy_version"] == 2


# Samples


def test_a_sample_has_different_steps_with_the_rows_of_padded_loops(make, tokenizer):
    loader = make(batch_size=2, num_envs=3, replay_reward_discount=0.5)
    play(loader, lambda row: [5, 6, END], lambda: len(loader.storage) >= 9)
    steps = loader.sample_from_buffer(7)
    assert steps.batch_size == (7,)
    keys = list(zip(steps["collector", "traj_ids"].tolist(), steps["info"], strict=True))
    assert len({(uid, info["turn"]) for uid, info in keys}) == 7
    prompts = steps.get(("tokens", "prompt"), as_list=True)
    for row in range(7):
        ids = [*prompts[row].tolist(), 5, 6, END]
        hidden = ~steps["attention_mask"][row].bool()
        assert prompt_of(steps, row) == ids
        assert steps["input_ids"][row][hidden].unique().tolist() == [tokenizer.pad_token_id]
        assert steps["input_ids"][row, 61:67].tolist() == [*prompts[row][-3:].tolist(), 5, 6, END]
        assert steps["responses"][row].tolist() == [5, 6, END, 0, 0, 0, 0, 0]
        assert steps["meta_info"][row]["uid"] == keys[row][0]
    mask = steps["attention_mask"]
    assert torch.equal(steps["position_ids"], (mask.cumsum(1) - 1).clamp(min=0) * mask)
    assert torch.equal(steps["reward"], steps["next", "return"][:, 0])
    assert set(steps["worker_id"].tolist()) <= {0, 1, 2}
    assert len(loader.sample_from_buffer()) == loader.batch_size


def test_a_sample_waits_for_steps_and_says_if_none_can_come(make):
    loader = make(num_envs=2, batch_size=2, replay_capacity=100)
    with pytest.raises(ValueError, match="replay_capacity=100"):
        loader.sample_from_buffer(101)
    sampling = in_thread(lambda: loader.sample_from_buffer(6))
    play(loader, reply, lambda: loader.stats()["accepted"] >= 2)
    assert len(sampling()) == 6
    with pytest.raises(RuntimeError, match="all 2 environments wait for answers"):
        loader.sample_from_buffer(99)
    loader = make(task_configs=[{}], options=ONCE, num_envs=1)
    play(loader, reply, lambda: False)
    with pytest.raises(RuntimeError, match="the data has ended: 4 steps were asked for, and 3"):
        loader.sample_from_buffer(4)


def test_statistics_are_printed(make, capsys):
    items = [{"rewards": [1.0] * turns} for turns in (1, 2, 2)]
    loader = make(task_configs=items, options=ONCE, num_envs=1)
    play(loader, reply, lambda: False)
    loader.print_stats_in_replay_buffer()
    expected = (
        "Replay buffer size: 5. Number of uids: 3. Histogram of item counts per uid in replay "
        "buffer (x-y): 1-1, 2-2"
    )
    assert capsys.readouterr().out.strip() == expected
    loader.print_examples(2)
    assert capsys.readouterr().out.count("<user> 1 <end> <assistant> to <end>") == 2


# cua-bench's loops


def test_a_loop_of_cua_bench_runs_as_its_documentation_shows_it(tokenizer):
    env_configs = [{"task": k} for k in range(4)]
    dataloader = MultiTurnDataLoader(
        env_class=Plain,
        env_configs=env_configs,
        tokenizer=tokenizer,
        processor=None,
        is_multi_modal=False,
        batch_size=4,
        replay_capacity=1000,
        replay_reward_discount=0.9,
        max_prompt_length=512,
        max_response_length=256,
    )
    for batch in dataloader:
        dataloader.async_step(answers(batch, reply, width=256))
        if len(dataloader.replay) >= 32:
            break
    replay_batch = dataloader.sample_from_buffer(batch_size=32)
    assert replay_batch["input_ids"].shape == (32, 768)
    returns = {round(value, 4) for value in replay_batch["reward"].tolist()}
    assert returns <= {0.81, 0.9, 1.0}
    dataloader.print_stats_in_replay_buffer()
    dataloader.close()
    assert all(config["closed"] for config in env_configs)


def test_the_same_uid_from_two_workers_stays_two_episodes(make):
    loader = make(env_class=Plain, env_configs=[{"task": 0}, {"task": 1}], batch_size=2)
    batch = next(loader)
    assert [info["env_uid"] for info in batch["meta_info"]] == ["the same"] * 2
    assert len({info["uid"] for info in batch["meta_info"]}) == 2
    assert {info["task"] for info in batch["meta_info"]} == {0, 1}
    loader.async_step(answers(batch, reply))
    play(loader, reply, lambda: len(loader.storage) >= 6)
    assert set(loader.storage.lengths.tolist()) == {3}
    assert loader.storage[:]["info"][0]["uid"] == "the same"


def test_plain_prompts_are_the_observations_without_a_template(make, tokenizer):
    heard = []
    loader = make(env_class=Plain, env_configs=[{"heard": heard}])
    texts = []
    for _ in range(3):
        batch = next(loader)
        texts.append(tokenizer.decode(prompt_of(batch)))
        loader.async_step(answers(batch, lambda row: [5, 6, END]))
    wait_until(lambda: len(heard) == 3)
    assert texts == ["1", "1 1", "1 1 2"]
    assert heard == [tokenizer.decode([5, 6])] * 3


def test_items_are_put_into_configs_that_have_none(make):
    configs = [{}, {"task_configs": ["own"]}]
    seen = []

    class Reads(Plain):
        def __init__(self, config):
            super().__init__(config)
            seen.append(config["task_configs"])

    loader = make(env_class=Reads, env_configs=configs, task_configs=["a", "b"], batch_size=2)
    next(loader)
    assert sorted(seen) == [["a", "b"], ["own"]]


def test_a_text_env_class_takes_its_config_as_keywords(make):
    heard = [[], []]
    configs = [{"heard": heard[0], "rewards": [1.0]}, {"heard": heard[1], "rewards": [0.0, 3.0]}]
    loader = make(env_class=Scripted, env_configs=configs, batch_size=2)
    rewards = {}
    for batch in loader:
        for worker, info in zip(batch["worker_id"], batch["meta_info"], strict=True):
            rewards.setdefault(int(worker), set()).add(info["uid"])
        loader.async_step(answers(batch, reply))
        if len(loader.storage) > 12:
            break
    for episode in loader.storage.episodes():
        worker = 0 if len(episode) == 1 else 1
        assert episode["worker_id"].tolist() == [worker] * len(episode)
        assert int(episode["collector", "traj_ids"][0]) in rewards[worker]


# Long prompts


class Talks(Scripted):
    """Says many words: ``words`` at first, and ten after every response."""

    def reset(self, data=None):
        super().reset(data)
        return [{"role": "user", "content": " ".join(["1"] * (data or {}).get("words", 5))}]

    def step(self, response):
        step = super().step(response)
        return TextStep([{"role": "user", "content": "2 " * 9 + "2"}], step.reward, step.done)


def test_a_long_prompt_loses_its_oldest_turns_but_never_the_opening(make):
    item = {"rewards": [0.0] * 9 + [1.0]}
    loader = make(Talks(), task_configs=[item], num_envs=1, max_prompt_length=60)
    opening = None
    lengths = []
    for _ in range(10):
        batch = next(loader)
        prompt = prompt_of(batch)
        opening = opening or prompt[:-1]
        assert prompt[: len(opening)] == opening
        lengths.append(len(prompt))
        loader.async_step(answers(batch, reply))
    assert lengths != sorted(lengths)
    assert max(lengths) <= 60
    wait_until(lambda: len(loader.storage) == 10)


class Long(Plain):
    def reset(self):
        state, meta = super().reset()
        return {**state, "obs": "1 " * 100 if self.episodes % 2 else "1"}, meta


class Wide:
    async def arun_episode(self, engine, data):
        await engine.generate([5] * data["length"])
        return 1.0


TALKS = {"env": Talks(), "task_configs": [{"words": 90}, {"words": 3}]}


@pytest.mark.parametrize(
    "options",
    [
        TALKS,
        {**TALKS, "options": CollectorOptions(chat=ChatOptions(on_break="append"))},
        {"env_class": Long, "env_configs": [{}]},
        {"env": Wide(), "task_configs": [{"length": 65}, {"length": 64}]},
    ],
)
def test_a_prompt_that_is_too_long_rejects_the_episode_by_name(make, options):
    loader = make(**options, max_prompt_length=64)
    play(loader, reply, lambda: len(loader.storage) >= 3)
    assert loader.stats()["rejected/prompt_too_long"] >= 1


# Answers


def test_an_answer_to_what_does_not_wait_any_more_is_dropped_and_counted(make):
    loader = make(num_envs=1)
    first = answers(next(loader), reply)
    loader.async_step(first)
    loader.async_step(first)
    second = next(loader)
    loader.async_step(first)
    assert loader.stats()["answers/dropped"] == 2
    assert second["meta_info"][0]["turn"] == 1
    loader.async_step(answers(second, reply))
    loader.async_step(answers(next(loader), reply))
    wait_until(lambda: len(loader.storage) == 3)


def test_an_answer_to_a_rejected_episode_is_dropped(make, monkeypatch):
    monkeypatch.setattr("asyncio.new_event_loop", Loop)
    loader = make(num_envs=1, limits=Limits(turn_timeout=LIMIT))
    late = answers(next(loader), reply)
    loader._collector._thread.loop.jump(2 * LIMIT)
    wait_until(lambda: loader.stats().get("rejected/turn_timeout"))
    new = next(loader)
    assert new["meta_info"][0]["uid"] != late["meta_info"][0]["uid"]
    loader.async_step(late)
    assert loader.stats()["answers/dropped"] == 1
    loader.async_step(answers(new, reply))
    assert next(loader)["meta_info"][0]["turn"] == 1


def masked(batch, last):
    """The mask of an answer whose last row has these last places."""
    mask = batch["attention_mask"].clone()
    mask[-1, -3:] = torch.tensor(last)
    return {"attention_mask": mask}


def long(batch):
    mask = torch.cat([batch["attention_mask"][:, :-3], torch.ones(2, 9, dtype=torch.int64)], dim=1)
    return {"responses": torch.full((2, 9), 5), "attention_mask": mask}


WRONG = [
    (lambda b: {"responses": b["responses"][:1]}, "responses must have a row"),
    (lambda b: {"prompts": b["prompts"][0]}, "prompts must have two dimensions"),
    (lambda b: {"attention_mask": b["attention_mask"][:, 1:]}, "attention_mask must be of prompts"),
    (lambda b: {"attention_mask": b["attention_mask"] * 2}, "attention_mask must be 0 or 1"),
    (lambda b: masked(b, [1, 0, 1]), "attention_mask must be 1 within the response"),
    (lambda b: masked(b, [0, 0, 0]), "responses must have at least one token"),
    (lambda b: {"responses": b["responses"] + 10**6}, "responses must be token"),
    (lambda b: {"responses": b["responses"] - 100}, "responses must be token"),
    (lambda b: {"worker_id": [0, 9]}, "worker_id must be in 0..2, got 9"),
    (lambda b: {"worker_id": [0, -1]}, "worker_id must be in 0..2, got -1"),
    (lambda b: {"worker_id": [0, 0]}, "worker_id must name each slot once"),
    (lambda b: {"worker_id": [0]}, "worker_id must be one integer for each"),
    (lambda b: {"worker_id": b["worker_id"][::-1].copy()}, "worker_id must be that"),
    (lambda b: {"meta_info": b["meta_info"][:1]}, "meta_info must have a dict"),
    (lambda b: {"meta_info": [{}, {}]}, 'meta_info must be the dicts.*"uid"'),
    (lambda b: {"prompts": b["prompts"] * 0}, "prompts"),
    (lambda b: {"log_probs": torch.zeros(2, 1)}, "log_probs must have the shape"),
    (lambda b: {"log_probs": torch.full((2, 3), torch.nan)}, "log_probs must be finite"),
    (long, "max_response_length=8"),
]
"""Entries that make an answer wrong, and what is said of them."""


def test_a_wrong_answer_is_refused_by_name_and_changes_nothing(make):
    loader = make(batch_size=2, num_envs=3)
    batch = answers(next(loader), lambda row: [5, 6, END])
    for wrong, message in WRONG:
        with pytest.raises(ValueError, match=rf"{message}(.|\n)*\.$"):
            loader.async_step({**batch, **wrong(batch)})
    without = {name: value for name, value in batch.items() if name != "responses"}
    with pytest.raises(ValueError, match=r"got none of responses\.$"):
        loader.async_step(without)
    with pytest.raises(TypeError, match="responses must hold integers"):
        loader.async_step({**batch, "responses": batch["responses"].float()})
    for wrong in (None, 3, [batch], "batch"):
        with pytest.raises(TypeError, match=r"batch must be a dict with prompts, .*, got .*\.$"):
            loader.async_step(wrong)
    for name in ("prompts", "responses", "attention_mask", "worker_id", "meta_info"):
        for wrong in (None, "text", object()):
            with pytest.raises(TypeError, match=f"^{name} must be"):
                loader.async_step({**batch, name: wrong})
    with pytest.raises(TypeError, match="log_probs must be a tensor of floating numbers, got str"):
        loader.async_step({**batch, "log_probs": "text"})
    assert loader.stats()["prompts/unanswered"] == 2
    assert loader.stats()["waiting/longest"] > 0
    assert loader.stats()["answers/dropped"] == 0
    loader.async_step(batch)
    wait_until(lambda: loader.stats()["prompts/waiting"] == 3)


# What goes wrong, and ends


def test_the_data_ends_with_smaller_batches(make):
    items = [{"rewards": [0.0] * turns} for turns in (1, 2, 3, 4, 5)]
    loader = make(task_configs=items, options=ONCE, batch_size=3, num_envs=4)
    sizes = []
    for batch in loader:
        sizes.append(len(batch["worker_id"]))
        loader.async_step(answers(batch, reply))
    assert sum(sizes) == 15
    assert sizes == sorted(sizes, reverse=True)
    assert loader.stats()["accepted"] == 5
    with pytest.raises(StopIteration):
        next(loader)


class Dies(Plain):
    """Dies, hangs or works, as its config says."""

    def __init__(self, config):
        super().__init__(config)
        self.fate("init")

    def reset(self):
        self.fate("reset")
        return super().reset()

    def step(self, action):
        self.fate("step")
        return super().step(action)

    def fate(self, where):
        if self.config.get("dies") == where:
            raise ConnectionError("the worker is gone")
        if self.config.get("hangs") == where:
            self.config["hung"] = True
            self.config["event"].wait(PATIENCE)


def test_dead_and_hanging_environments_do_not_delay_the_others(make, event):
    configs = [{"dies": "init"}, {"dies": "step"}, {"hangs": "reset", "event": event}, {}, {}]
    loader = make(env_class=Dies, env_configs=configs, batch_size=2)
    play(loader, reply, lambda: len(loader.storage) >= 30)
    stats = loader.stats()
    assert stats["rejected/ConnectionError"] >= 2
    assert stats["waiting/longest"] > 0
    assert set(loader.storage[:]["worker_id"].tolist()) == {3, 4}


class Broken(Scripted):
    """Fails at ``reset``, before it answers, or never."""

    def __init__(self, fails_in="never"):
        super().__init__()
        self.fails_in = fails_in

    def __deepcopy__(self, memo):
        return Broken(self.fails_in)

    def reset(self, data=None):
        if self.fails_in == "reset" or (data or {}).get("bad"):
            raise OSError("gone")
        return super().reset(data)

    def step(self, response):
        if self.fails_in == "step":
            raise OSError("gone")
        return super().step(response)


@pytest.mark.parametrize(
    ("fails_in", "items", "group_size"), [("reset", 20, 1), ("step", 20, 1), ("reset", 4, 2)]
)
def test_a_dead_environment_uses_up_no_items_and_no_groups_that_are_refilled(
    make, monkeypatch, fails_in, items, group_size
):
    monkeypatch.setattr(slots, "_LONGEST_PAUSE", 0.02)
    loader = make(
        env_class=Broken,
        env_configs=[{"fails_in": fails_in}, {}],
        task_configs=[{"item": k} for k in range(items)],
        options=ONCE if group_size == 1 else replace(ONCE, incomplete_groups="refill"),
        group_size=group_size,
    )
    play(loader, reply, lambda: False)
    stored = Counter(data["item"] for data in loader.storage[:]["data"])
    assert stored == dict.fromkeys(range(items), 3 * group_size)
    assert loader.stats()["rejected/OSError"] >= 1
    assert not loader._slots._failed_items


def test_a_slot_that_fails_thousands_of_times_is_still_tried():
    slot = slots.Slots(1)._slots[0]
    slot.failures = 10**5
    episode = Episode({}, 0, 0)
    assert slots.Slots(1).give_back(slot, episode, OSError("gone"))
    assert slot.next_attempt > 0


def test_an_item_that_fails_in_all_environments_is_dropped(make, monkeypatch):
    monkeypatch.setattr(slots, "_LONGEST_PAUSE", 0.0)
    items = [{"item": k, "bad": k % 3 == 0} for k in range(12)]
    loader = make(Broken(), task_configs=items, options=ONCE, num_envs=3)
    play(loader, reply, lambda: False)
    assert {data["item"] for data in loader.storage[:]["data"]} == {*range(12)} - {0, 3, 6, 9}
    assert loader.stats()["accepted"] == 8
    assert loader.stats()["rejected/OSError"] >= 12


def test_an_environment_is_made_anew_after_a_failure(make):
    made = []

    class FailsOnce(Plain):
        def __init__(self, config):
            super().__init__(config)
            made.append(self)

        def step(self, action):
            if len(made) == 1:
                raise OSError("lost")
            return super().step(action)

    config = {}
    loader = make(env_class=FailsOnce, env_configs=[config])
    play(loader, reply, lambda: len(loader.storage) >= 6)
    assert len(made) == 2
    assert loader.stats()["rejected/OSError"] == 1
    wait_until(lambda: config.get("closed"))


HALF_DEAD = {"env_class": Dies, "env_configs": [{"dies": "reset"}, {}], "batch_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_class": Dies, "env_configs": [{"dies": "init"}] * 2}, "ConnectionError: the worker"),
        ({"env_class": Dies, "env_configs": [{"dies": "reset"}] * 2}, "ConnectionError: the wor"),
        ({"env": Broken("reset"), "num_envs": 3, "batch_size": 2}, "gone"),
        (
            {"env": Broken("reset"), "task_configs": [{}] * 3, "options": ONCE},
            r"all \d+ episodes were rejected, .* OSError: gone",
        ),
        ({**HALF_DEAD, "max_consecutive_failures": 3}, "3 episodes in a row were rejected"),
    ],
)
def test_without_any_environment_the_next_batch_raises_the_cause(
    make, options, message, monkeypatch
):
    monkeypatch.setattr(slots, "_FIRST_PAUSE", 0.0)
    loader = make(**options)
    for ask in (lambda: next(loader), lambda: next(loader), lambda: loader.sample_from_buffer(1)):
        with pytest.raises(RuntimeError, match=message) as caught:
            ask()
    assert caught.value.__cause__ is not None or "episodes" in message


def test_fewer_environments_than_a_batch_are_an_error_that_can_be_mended(make, monkeypatch):
    monkeypatch.setattr(slots, "_FIRST_PAUSE", 0.0)
    configs = [{}, {"dies": "reset"}]
    loader = make(env_class=Dies, env_configs=configs, batch_size=2)
    with pytest.raises(RuntimeError, match=r"only 1 of 2 environments are left.*\[1\]"):
        next(loader)
    del configs[1]["dies"]
    wait_until(lambda: loader.stats()["prompts/waiting"] == 2)
    assert len(next(loader)["worker_id"]) == 2


def threads_of_loaders():
    names = ("torchrl_mt-rollout", "torchrl_mt-collect", "torchrl_mt-call")
    return [thread for thread in threading.enumerate() if thread.name in names]


def test_closing_wakes_who_waits_and_leaves_no_thread(make):
    before = set(threads_of_loaders())
    loader = make(batch_size=2, num_envs=2)
    next(loader)
    waiting = in_thread(lambda: next(loader))
    sampling = in_thread(lambda: loader.sample_from_buffer(1))
    wait_until(lambda: len(loader._callers.takers) == 2)
    loader.close()
    for outcome in (waiting(), sampling()):
        assert isinstance(outcome, RuntimeError)
        assert "closed" in str(outcome)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    wait_until(lambda: not set(threads_of_loaders()) - before)


# Who waits for whom


def test_a_loop_that_forgets_to_answer_is_told(make, kind):
    loader = make(batch_size=2, **kind(5))
    with pytest.raises(RuntimeError, match=r"all 4 prompts wait for your answers.*async_step"):
        for _ in loader:
            pass
    with pytest.raises(RuntimeError, match="4 steps were asked for and 0 are stored, but all 5"):
        loader.sample_from_buffer(4)


def test_a_sample_of_a_loader_whose_prompts_nobody_took_is_refused(make):
    loader = make(batch_size=2, num_envs=3)
    with pytest.raises(RuntimeError, match="all 3 environments wait for answers: take batches"):
        loader.sample_from_buffer(1)


@pytest.fixture
def warned(monkeypatch, caplog):
    """Waits until a warning with some words is logged; waiting counts as long from the first look."""
    monkeypatch.setattr(waiting, "_WARN_AFTER", 0.0)
    monkeypatch.setattr(waiting, "_CERTAIN_AFTER", 0.0)
    return lambda words: wait_until(lambda: words in caplog.text)


def test_a_loop_waits_for_a_thread_that_has_not_answered_yet(make, warned):
    loader = make(batch_size=2, num_envs=2)
    batch, go = next(loader), threading.Event()

    def answer():
        go.wait(PATIENCE)
        loader.async_step(answers(batch, reply))

    answered = in_thread(answer)
    following = in_thread(lambda: next(loader))
    warned("all 2 prompts wait for your answers")
    go.set()
    assert answered() is None
    assert len(following()["worker_id"]) == 2


def test_prompts_that_a_time_limit_ends_may_stay_unanswered(make, warned, monkeypatch):
    monkeypatch.setattr("asyncio.new_event_loop", Loop)
    loader = make(num_envs=1, limits=Limits(turn_timeout=LIMIT))
    loader.async_step(answers(next(loader), reply))
    first = next(loader)["meta_info"][0]["uid"]

    def jump():
        warned("all 1 prompts wait for your answers")
        loader._collector._thread.loop.jump(2 * LIMIT)

    jumped = in_thread(jump)
    assert next(loader)["meta_info"][0]["uid"] != first
    assert jumped() is None


def test_environments_that_do_not_begin_are_told_of(make, warned, event):
    configs = [{}, {}, {"hangs": "reset", "event": event}, {"hangs": "reset", "event": event}]
    loader = make(env_class=Dies, env_configs=configs, batch_size=4)
    wait_until(lambda: loader.stats()["prompts/waiting"] == 2)
    batch = in_thread(lambda: next(loader))
    warned("only 2 of num_envs=4 environments have begun their episode")
    event.set()
    assert len(batch()["worker_id"]) == 4


def test_a_hanging_environment_does_not_keep_a_loader_from_closing(make, event):
    configs = [{"hangs": "reset", "event": event}, {}]
    loader = make(env_class=Dies, env_configs=configs)
    next(loader)
    loader.close()  # The test ends.
    stats = loader.stats()
    assert stats["running"] == 0
    assert stats["started"] == stats["rejected/cancelled"]


def test_a_hanging_step_is_ended_by_a_time_limit(make, event, monkeypatch):
    monkeypatch.setattr("asyncio.new_event_loop", Loop)
    configs = [{"hangs": "step", "event": event}]
    loader = make(env_class=Dies, env_configs=configs, limits=Limits(tool_timeout=LIMIT))
    loader.async_step(answers(next(loader), reply))
    wait_until(lambda: configs[0].get("hung"))
    del configs[0]["hangs"]
    loader._collector._thread.loop.jump(2 * LIMIT)
    wait_until(lambda: loader.stats().get("rejected/tool_timeout"))
    play(loader, reply, lambda: len(loader.storage) >= 3)


# Many, and other forms of environments


def test_sixty_four_environments_in_threads_each_play_their_own_episodes(make):
    class Threaded(Scripted):
        inline = False

    heard = []
    items = [{}] * 128
    loader = make(Threaded(heard), task_configs=items, options=ONCE, batch_size=32, num_envs=64)
    rng = random.Random(0)
    given = play(loader, lambda row: [rng.randrange(4, 8), END], lambda: False)
    assert given == len(heard) == len(loader.storage) == 3 * 128
    stats = loader.stats()
    assert (stats["accepted"], stats["rejected"]) == (128, 0)


def test_a_workflow_may_ask_several_prompts_at_once(make):
    class Both:
        async def arun_episode(self, engine, data):
            one, two = await asyncio.gather(
                engine.generate([5, 6], temperature=0.5), engine.generate([7])
            )
            return [float(one.token_ids[0]), float(two.token_ids[0])]

    loader = make(Both(), task_configs=[{}], options=ONCE)
    sampling = []
    for batch in loader:
        sampling.append(batch["meta_info"][0].get("sampling"))
        first = batch["input_ids"][0, -1].item()
        loader.async_step(answers(batch, lambda row, first=first: [first + 1, END]))
    assert sampling == [{"temperature": 0.5}, None]
    assert loader.storage[:]["next", "reward"].tolist() == [[7.0], [8.0]]


def test_calls_of_an_agent_wait_in_the_slot_of_their_episode(make, tokenizer):
    class Asks:
        async def run(self, data, *, base_url, api_key, http_client):
            async def ask(word):
                request = {"messages": [{"role": "user", "content": word}]}
                reply = await http_client.post("/chat/completions", json=request)
                return reply.json()["choices"][0]["message"]["content"]

            first = await ask("1")
            others = await asyncio.gather(ask("2"), ask("3"))
            return float([first, *others] == ["2"] * 3)

    options = {"task_configs": [{}] * 6, "options": ONCE, "max_response_length": 20}
    loader = make(Asks(), batch_size=2, num_envs=3, **options)
    two = tokenizer.convert_tokens_to_ids("2")
    slots_of = {}
    for batch in loader:
        for worker, info in zip(batch["worker_id"].tolist(), batch["meta_info"], strict=True):
            slots_of.setdefault(info["uid"], set()).add(worker)
        loader.async_step(answers(batch, lambda row: [two, END]))
    assert loader.storage.lengths.tolist() == [3] * 6
    assert float(loader.storage[:]["next", "reward"].sum()) == 6
    assert {len(each) for each in slots_of.values()} == {1}
    for episode in loader.storage.episodes():
        uid = int(episode["collector", "traj_ids"][0])
        assert set(episode["worker_id"].tolist()) == slots_of[uid]


@pytest.mark.slow
def test_environments_may_run_in_processes(make):
    options = CollectorOptions(cycle=False, env_workers=2)
    loader = make(Tells, batch_size=2, num_envs=4, task_configs=[{}] * 6, options=options)
    assert play(loader, reply, lambda: False) == 12
    assert len({info["pid"] for info in loader.storage[:]["info"]}) == 2


@settings(max_examples=6)
@given(
    items=st.lists(
        st.fixed_dictionaries({"turns": st.integers(1, 4), "fails_at": st.integers(0, 6)}),
        min_size=1,
        max_size=8,
    ),
    num_envs=st.integers(1, 4),
    num_loops=st.integers(1, 3),
)
def test_every_episode_is_accepted_or_rejected_whoever_answers(
    tokenizer, items, num_envs, num_loops
):
    """Several loops at once, and environments that fail: nothing is lost, mixed up or left waiting."""

    class Fails(Scripted):
        def reset(self, data=None):
            self.fails_at = data["fails_at"]
            return super().reset({"rewards": [1.0] * data["turns"]})

        def step(self, response):
            if self.turn + 1 == self.fails_at:
                raise OSError("lost")
            return super().step(response)

    items = [*items, {"turns": 1, "fails_at": 0}]  # If none were accepted, the loops would raise.
    told = {}

    def loop():
        for batch in loader:
            workers = batch["worker_id"].tolist()
            made = answers(batch, lambda row, of=workers: [4 + of[row], random.randrange(4, 9)])
            for info, ids in zip(batch["meta_info"], made["responses"], strict=True):
                told[info["uid"], info["turn"]] = ids.tolist()
            loader.async_step(made)

    with MultiTurnDataLoader(
        Fails(),
        tokenizer,
        task_configs=items,
        options=ONCE,
        num_envs=num_envs,
        batch_size=1,
        max_prompt_length=64,
    ) as loader:
        outcomes = [in_thread(loop) for _ in range(num_loops)]
        assert [outcome() for outcome in outcomes] == [None] * num_loops
        stats = loader.stats()
        failing = [item for item in items if 0 < item["fails_at"] <= item["turns"]]
        again = [item for item in failing if item["fails_at"] == 1]  # In another environment.
        assert (stats["started"], stats["running"]) == (stats["accepted"] + stats["rejected"], 0)
        assert stats.get("rejected/OSError", 0) == stats["rejected"]
        assert stats["rejected"] >= len(failing)
        assert again or stats["rejected"] == len(failing)
        assert stats["accepted"] == len(items) - len(failing) == loader.storage.num_episodes
        assert stats["prompts/unanswered"] == stats["prompts/waiting"] == 0
        for episode in loader.storage.episodes():
            uid = int(episode["collector", "traj_ids"][0])
            given = [told[uid, turn] for turn in range(len(episode))]
            assert episode["tokens", "response"].tolist() == given
            assert {ids[0] - 4 for ids in given} == {int(episode["worker_id"][0])}


@pytest.mark.slow
def test_the_pages_loop_runs_as_it_stands():
    torch.manual_seed(0)
    names = {}
    exec(code_of("bridges.rst", "A loop that asks for prompts").replace("== 100", "== 20"), names)
    assert names["loader"].stats()["policy_version"] > 3
    assert names["loss"].isfinite()


# Arguments


OF_CLASS = {"env": None, "env_class": Plain, "env_configs": [{}], "batch_size": 1}
UNKNOWN = {**OF_CLASS, "env_class": Scripted, "env_configs": [{}, {"turns": 3}]}
NO_DICTS = {**OF_CLASS, "env_configs": [3], "task_configs": [1]}
OWN_LENGTH = CollectorOptions(chat=ChatOptions(max_prompt_tokens=3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 3, "num_envs": 2}, ValueError, "batch_size must be at most num_envs=2"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"env": None}, ValueError, "env or env_class must be given"),
        ({**OF_CLASS, "env": Scripted()}, ValueError, "one of the two, got both"),
        ({**OF_CLASS, "env_configs": None}, ValueError, "must be given together"),
        ({**OF_CLASS, "num_envs": 2}, ValueError, "num_envs must be the number of env_configs, 1"),
        ({**OF_CLASS, "env_class": int}, TypeError, "reset and step"),
        ({**OF_CLASS, "env_class": 3}, TypeError, "env_class must be a class"),
        (
            UNKNOWN,
            TypeError,
            r"env_configs\[1\] must be the keyword arguments of Scripted.*'turns'",
        ),
        (NO_DICTS, TypeError, "env_configs must be dicts"),
        ({"tokenizer": None}, TypeError, "tokenizer must be that of the policy, got None"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer must be .* got 'gpt2': .*from_pretrained"),
        ({"tokenizer": Scripted}, TypeError, r"tokenizer must be .* got <class .*\(env, tokenizer"),
        ({"tokenizer": Scripted()}, TypeError, r"tokenizer must be .* got <.*\(env, tokenizer"),
        ({"processor": object()}, TypeError, "processor must be one of Qwen2VLProcessor"),
        ({"is_multi_modal": True}, ValueError, "is_multi_modal"),
        ({"replay_capacity": 0}, ValueError, "replay_capacity"),
        ({"replay_reward_discount": 1.5}, ValueError, "replay_reward_discount"),
        ({"max_prompt_length": 0}, ValueError, "max_prompt_length"),
        ({"max_response_length": -1}, ValueError, "max_response_length"),
        ({"balance_thres": float("nan")}, ValueError, "balance_thres"),
        ({"max_concurrency": 3}, TypeError, "max_concurrency itself"),
        ({"options": OWN_LENGTH}, ValueError, "max_prompt_length"),
        ({"limits": Limits(max_response_tokens=3)}, ValueError, "max_response_length"),
        ({"no_such": 3}, TypeError, "no_such"),
    ],
)
def test_wrong_arguments_are_refused_by_name(tokenizer, options, error, message):
    with pytest.raises(error, match=message):
        MultiTurnDataLoader(**{"env": Scripted(), "tokenizer": tokenizer, **options})
