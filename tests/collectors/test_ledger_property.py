"""Whatever fails, forks, hangs or is cut: rows are what the engine saw, and no episode is lost.

A random engine and random workflows.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict

import pytest
import torch
from tensordict import TensorDict

from tests.collectors.runs import balanced, collecting, lists
from tests.collectors.scripted import TellingEngine
from tests.idle_clock import LIMIT, hang
from torchrl_mt.collectors import LimitReached, Limits
from torchrl_mt.transforms import MergeTurns

ITEMS = 10
TOKENS = ("tokens", "log_probs", "versions")


class RandomEngine(TellingEngine):
    """Samples anything, nothing at times; fails, hangs, and is trained in the middle of a response."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.begun = 0
        self.order: dict[float, int] = {}
        """When the calls began, by the log-probability of the first token."""
        self.watch = lambda: None

    async def generate(self, prompt_ids, *, max_new_tokens=None, **sampling):
        rng, prompt = self.rng, list(prompt_ids)
        self.begun += 1
        began = self.begun
        for _ in range(rng.randrange(4)):
            self.watch()
            await asyncio.sleep(0)
        chance = rng.random()
        if chance < 0.04:
            raise ConnectionError("the server is gone")
        if chance < 0.05:
            await hang()
        size = rng.choice([0, 1, 1, 2, 5])
        size = size if max_new_tokens is None else min(size, max_new_tokens)
        versions = []
        for _ in range(size):
            self.version += rng.random() < 0.1
            versions.append(self.version)
        answer = self.answer(prompt, [rng.randrange(3) for _ in range(size)], versions)
        if size:
            self.order[answer.log_probs[0]] = began
        return answer


class RandomWorkflow:
    """Goes on from any earlier turn, cuts and rewrites histories, and calls two at once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    async def arun_episode(self, engine, data):
        rng = self.rng
        seen = [self.tokens(1, 3)]
        turns = 0

        async def call():
            nonlocal turns
            prompt = list(rng.choice(seen))
            how = rng.random()
            if how < 0.15:
                prompt = prompt[: rng.randint(1, len(prompt))]
            elif how < 0.3:
                prompt = prompt[rng.randrange(len(prompt)) :]
            elif how < 0.4:
                prompt[rng.randrange(len(prompt))] = 3
            answer = await engine.generate(prompt)
            turns += 1
            seen.append([*prompt, *answer.token_ids, *self.tokens(0, 2)])

        for _ in range(rng.randint(1, 6)):
            try:
                await asyncio.gather(*(call() for _ in range(rng.choice([1, 1, 1, 2]))))
            except LimitReached:
                if rng.random() < 0.5 or not turns:
                    raise
                break
        chance = rng.random()
        if chance < 0.08:
            raise ValueError("the workflow failed")
        if chance < 0.16:
            return None
        rewards = [float(rng.randrange(4)) for _ in range(turns)]
        if chance < 0.4:
            return rewards
        if chance < 0.6:
            return TensorDict({("next", "reward"): torch.tensor(rewards)}, [turns])
        return rewards[-1]

    def tokens(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(3) for _ in range(self.rng.randint(least, most))]


def check_ledger(batch, engine: RandomEngine, limits: Limits) -> None:
    """Every turn is a call of the engine, token for token, in the order in which they began."""
    columns = [lists(batch, name, "response") for name in TOKENS]
    prompts = lists(batch, "tokens", "prompt")
    ids = batch["collector", "traj_ids"].tolist()
    last: Counter[int] = Counter()
    for episode, prompt, *turn in zip(ids, prompts, *columns, strict=True):
        tokens, log_probs, versions = turn
        assert len(tokens) == len(log_probs) == len(versions)
        assert len(tokens) <= (limits.max_response_tokens or 99)
        assert len(prompt) + len(tokens) <= (limits.max_episode_tokens or 999)
        if tokens:
            seen, answer = engine.calls[log_probs[0]]
            assert prompt == seen
            assert (tokens, versions) == (list(answer.token_ids), list(answer.versions))
            assert log_probs == list(answer.log_probs)
            assert engine.order[log_probs[0]] > last[episode]
            last[episode] = engine.order[log_probs[0]]
    assert max(Counter(ids).values()) <= (limits.max_turns or 99)


def check_rows(batch, rows, engine: RandomEngine) -> None:
    """Each sampled token is in one row, behind all that the engine was given and nothing else."""
    sampled, kept = (rows["masks", f"all_{name}_mask"] for name in ("assistant", "attention"))
    log_probs, versions = rows["log_probs", "full"], rows["versions", "full"]
    assert not (sampled & ~kept).any()
    assert (log_probs[~sampled] == 0).all()
    assert (versions[~sampled] == -1).all()
    assert (rows["turns", "full"][~kept] == -1).all()
    given = torch.cat(batch.get(("log_probs", "response"), as_list=True))
    assert log_probs[sampled].sort().values.tolist() == given.sort().values.tolist()
    place, number = {}, Counter()  # the episode and the turn of each call
    sampled_by = zip(
        batch["collector", "traj_ids"].tolist(), lists(batch, "log_probs", "response"), strict=True
    )
    for episode, values in sampled_by:
        if values:
            place[values[0]] = episode, number[episode]
        number[episode] += 1
    for n, row in enumerate(rows.unbind(0)):
        columns = sampled[n].nonzero().flatten().tolist()
        starts = [c for c in columns if log_probs[n, c].item() in engine.calls]
        tokens, mine = row["tokens", "full"].tolist(), []
        for start in starts:
            prompt, answer = engine.calls[log_probs[n, start].item()]
            stop = start + len(answer.token_ids)
            assert tokens[:start] == prompt
            assert tokens[start:stop] == list(answer.token_ids)
            assert log_probs[n, start:stop].tolist() == list(answer.log_probs)
            assert versions[n, start:stop].tolist() == list(answer.versions)
            episode, turn = place[log_probs[n, start].item()]
            assert row["episode"] == episode
            assert set(row["turns", "full"][start:stop].tolist()) == {turn}
            mine += range(start, stop)
        assert mine == columns
        seen = versions[n][sampled[n]].tolist()
        assert row["versions", "oldest"] == min(seen, default=-1)
        assert row["versions", "newest"] == max(seen, default=-1)
    assert rows["rewards", "full"].sum() == batch["next", "reward"].sum()


def check_parents(batch, rows) -> None:
    """Recorded parents are the turns whose tokens prompts go on from: comparing finds the same rows."""
    ids = batch["collector", "traj_ids"].tolist()
    prompts, answers = (lists(batch, "tokens", name) for name in ("prompt", "response"))
    for k, parent in enumerate(batch["turn", "parent"].tolist()):
        first = ids.index(ids[k])
        told = [prompts[j] + answers[j] for j in range(first, k)]
        fitting = [j for j, line in enumerate(told) if prompts[k][: len(line)] == line]
        assert parent == max(fitting, key=lambda j: (len(told[j]), j), default=-1)
    compared = MergeTurns(pad_token_id=1)(batch.exclude("turn"))
    for key in compared.keys(True, True):
        if isinstance(compared[key], torch.Tensor):
            assert torch.equal(rows[key], compared[key])


def check_dump(folder, rows_of) -> None:
    """A line for every row, with its very tokens."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.open()]
    found = {(line["traj_id"], line["fork"]): line for line in lines}
    assert len(found) == len(lines)
    assert found.keys() == rows_of.keys()
    for key, (tokens, oldest, newest, reward) in rows_of.items():
        line = found[key]
        assert line["prompt"] + line["completion"] == tokens
        assert (line["head_version"], line["tail_version"]) == (oldest, newest)
        assert line["reward"] == reward


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
@pytest.mark.parametrize("incomplete", ["drop", "keep", "refill"])
def test_the_invariants_of_the_ledger(incomplete, seed, tmp_path, idle_clock):
    rng = random.Random(f"{incomplete} {seed}")
    engine = RandomEngine(rng)
    size = rng.choice([1, 2, 3])
    limits = Limits(
        max_turns=rng.choice([None, 4]),
        max_response_tokens=rng.choice([None, 3]),
        max_episode_tokens=rng.choice([None, 12]),
        turn_timeout=LIMIT,
    )
    options = {
        **{"n": 2 * size, "group_size": size, "incomplete_groups": incomplete, "cycle": False},
        **{"max_concurrency": rng.choice([1, 4, 9]), "max_retries": rng.choice([0, 2])},
        **{"max_staleness": rng.choice([None, 1]), "max_consecutive_failures": 10**6},
    }
    data, player = [{"task_id": k} for k in range(ITEMS)], RandomWorkflow(rng)
    collector = collecting(player, engine, data, limits=limits, dump_dir=tmp_path, **options)
    unbalanced = []

    def watch():
        if not balanced(stats := collector.stats()):
            unbalanced.append(stats)

    engine.watch = watch
    totals: Counter[str] = Counter()
    members: defaultdict[int, set[int]] = defaultdict(set)
    task: dict[int, int] = {}
    rows_of = {}
    with collector:
        for batch in collector:
            engine.version += 10
            watch()
            check_ledger(batch, engine, limits)
            rows = MergeTurns(pad_token_id=1)(batch)
            check_rows(batch, rows, engine)
            check_parents(batch, rows)
            ids, group = batch["collector", "traj_ids"].tolist(), batch["group"].tolist()
            rewards: Counter[int] = Counter()
            turns = batch["next", "reward"].flatten().tolist()
            for episode, reward in zip(ids, turns, strict=True):
                rewards[episode] += reward
            assert not any(members[g] for g in set(group)), "a group is given out once"
            for episode, g, item in zip(ids, group, batch["data"], strict=True):
                members[g].add(episode)
                assert task.setdefault(g, item["task_id"]) == item["task_id"]
            for row in rows.unbind(0):
                episode, kept = int(row["episode"]), row["masks", "all_attention_mask"]
                rows_of[episode, int(row["fork"])] = (
                    row["tokens", "full"][kept].tolist(),
                    row["versions", "oldest"],
                    row["versions", "newest"],
                    rewards[episode],
                )
            totals["accepted"] += int(batch["next", "done"].sum())
            totals["turns"] += len(batch)
            totals["tokens"] += int(rows["masks", "all_assistant_mask"].sum())
            totals["forks"] += int((rows["fork"] > 0).sum())
    stats = collector.stats()
    assert not unbalanced
    assert {name: stats[name] for name in totals} == totals
    assert balanced(stats, running=0)
    assert stats["rejected"] == sum(n for name, n in stats.items() if name.startswith("rejected/"))
    episodes = [episode for group in members.values() for episode in group]
    assert len(episodes) == len(set(episodes)) == stats["accepted"]
    assert len(set(task.values())) == len(task)
    if incomplete != "keep":
        assert all(len(episodes) == size for episodes in members.values())
    if incomplete == "refill":
        assert sorted(task.values()) == list(range(ITEMS))
    check_dump(tmp_path, rows_of)
