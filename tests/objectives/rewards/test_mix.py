"""Mixing reward sources: the plain sum, once for each episode, whatever the order of the rows."""

import asyncio
import threading
from functools import partial

import pytest
import torch

from tests.objectives import helpers
from tests.refusals import check_refused, refused
from tests.waiting import PATIENCE
from torchrl_mt.objectives import ExperienceMaker
from torchrl_mt.objectives.functional.time.episodes import index_episodes
from torchrl_mt.objectives.rewards.mix import RewardMix
from torchrl_mt.objectives.rows.reading import read_episode


def mixed(recipe, batch, **options):
    time, mix = outcomes(batch), RewardMix(recipe, **options)
    reward, metrics = mix(batch, time)
    return mix.transformed(reward, time), metrics


def labelled(batch):
    """Every second episode is chat."""
    batch["label"] = ["chat" if int(e) % 2 else "maths" for e in batch["episode"]]
    return batch


def by_length(rows):
    return rows["masks", "all_attention_mask"].sum(-1).float()


def by_token(rows):
    return (rows["tokens", "full"] * 0.1).masked_fill(~rows["masks", "all_assistant_mask"], 0.0)


async def slowly(rows):
    await asyncio.sleep(0.01)
    return by_length(rows) - 7


def plain(recipe, batch):
    """The recipe in float64, place by place; also each episode's score by label and source."""
    mask, turns = batch["masks", "all_assistant_mask"], batch["turns", "full"]
    own = {"episode": batch["rewards", "full"], by_token: 0.1 * batch["tokens", "full"]}
    length, labels = by_length(batch), list(batch["label"])
    out, scores = torch.zeros(mask.shape, dtype=torch.float64), {}
    for e in set(batch["episode"].tolist()):
        places = [(n, t) for n, t in mask.nonzero().tolist() if int(batch["episode"][n]) == e]
        if not places:
            continue
        last = max(places, key=lambda place: (int(turns[place]), place[1]))
        label = labels[last[0]]
        for source, weight in recipe[label]:
            if source in own:
                rewards = {place: float(own[source][place]) for place in places}
            else:
                rewards = {last: float(length[last[0]]) - (7 if source is slowly else 0)}
            for place, reward in rewards.items():
                out[place] += weight * reward
            name = getattr(source, "__name__", source)
            scores.setdefault((label, name), []).append(sum(rewards.values()))
    return out, scores


@pytest.mark.parametrize("seed", range(5))
def test_the_recipe_is_the_plain_weighted_sum(rows, seed):
    recipe = {
        "maths": [("episode", 0.5), (by_length, 2.0), (slowly, -1.0)],
        "chat": [(by_token, 3.0), (by_length, 0.25)],
    }
    order = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
    batch = labelled(rows(seed, n=13))[order]
    reward, metrics = mixed(recipe, batch)
    expected, scores = plain(recipe, batch)
    torch.testing.assert_close(reward.double(), expected, atol=1e-4, rtol=1e-4)
    assert not reward[~batch["masks", "all_assistant_mask"]].any()
    sums = {}
    for (label, name), values in scores.items():
        weight = next(w for s, w in recipe[label] if getattr(s, "__name__", s) == name)
        weighted = weight * torch.tensor(values, dtype=torch.float64)
        sums[label,] = sums.get((label,), 0) + weighted
    assert len(metrics) == 3 * len(scores) + 3 * len(sums)
    for path, values in {**scores, **sums}.items():
        values = torch.as_tensor(values, dtype=torch.float64)
        prefix = "/".join(["reward", *path])
        assert metrics[f"{prefix}/count"] == len(values)
        assert metrics[f"{prefix}/mean"] == pytest.approx(float(values.mean()), abs=1e-4)
        assert metrics[f"{prefix}/std"] == pytest.approx(float(values.std(correction=0)), abs=1e-4)


def outcomes(batch):
    """Each episode's last sampled token, by episode; and which rows hold one."""
    mask, turns = batch["masks", "all_assistant_mask"], batch["turns", "full"]
    return index_episodes(mask, turns, read_episode(batch))


def skipping(source, skips, name):
    """The source, but ``None`` where ``skips`` (of the row's tokens) says so."""

    def ask(rows):
        answer, skipped = source(rows).tolist(), skips(rows["tokens", "full"].sum(-1)).tolist()
        return [None if skip else number for number, skip in zip(answer, skipped, strict=True)]

    ask.name = name
    return ask


@pytest.mark.parametrize("seed", range(6))
def test_sources_that_do_not_apply_leave_their_weight_to_others(rows, seed):
    """Scores of episodes, with ``None`` for some, against the formula in plain numbers."""
    batch = rows(seed, n=15)
    skips = [lambda x: x % 2 == 0, lambda x: x % 3 == 0, lambda x: x < 0]
    parts = [
        (skipping(by_length, skip, str(number)), weight)
        for number, (skip, weight) in enumerate(zip(skips, (2.0, -0.5, 0.0), strict=True))
    ]
    reward, metrics = mixed(parts, batch)
    kept, unscored, episodes = [0] * 3, 0, outcomes(batch)
    for last in episodes.last_token[episodes.last_token >= 0].tolist():
        row = last // reward.shape[1]
        tokens, length = int(batch["tokens", "full"][row].sum()), float(by_length(batch)[row])
        here = [number for number, skip in enumerate(skips) if not skip(tokens)]
        for number in here:
            kept[number] += 1
        weights = [parts[number][1] for number in here]
        same = episodes.of_row == episodes.of_row[row]
        if not any(weights):
            unscored += 1
            assert reward[same].isnan().all()
            continue
        expected = 2.5 / sum(map(abs, weights)) * sum(weights) * length
        assert reward[same].sum() == pytest.approx(expected)
        assert reward[same].flatten().nonzero().numel() == 1
    assert [metrics[f"reward/default/{number}/count"] for number in range(3)] == kept
    sampled = int((episodes.last_token >= 0).sum())
    assert metrics["reward/default/count"] == sampled - unscored


def test_a_reward_per_token_may_be_none_for_an_episode(rows):
    batch = rows(n=3)  # Rows 0 and 1 are one episode.

    def ask(rows):
        return [None, *rows["tokens", "full"][1:].float().tolist()]

    reward, _ = mixed([(ask, 1.0), ("episode", 3.0)], batch)
    own, _ = mixed("episode", batch)
    torch.testing.assert_close(reward[:2], 4.0 * own[:2])
    asked, _ = mixed(lambda rows: rows["tokens", "full"].float(), batch)
    torch.testing.assert_close(reward[2], asked[2] + 3.0 * own[2])


def test_weights_of_zero_reject_nothing(rows):
    reward, _ = mixed([(lambda rows: [None] * len(rows), 0.0), (by_length, 0.0)], rows())
    assert not reward.any()


def without_some(rows):
    score = rows["tokens", "full"].sum(-1)
    return [None if each % 3 == 0 else each / 9 for each in score.tolist()]


@pytest.mark.parametrize("process", [(), [lambda rows: rows[rows["episode"] > 0]]])
def test_the_maker_rejects_episodes_without_a_reward(rows, model, process):
    def batch(seed=1):
        out = rows(seed, n=12)
        out["label"] = [str(int(e) % 2) for e in out["episode"]]
        return out

    options = {"advantage": "grpo", "process": process}
    recipe = {"0": [(without_some, 1.0)], "1": [(by_length, 0.1)]}
    maker = ExperienceMaker(model, reward=recipe, **options)
    out = maker(batch())
    unscored = mixed(recipe, batch())[0].isnan().any(-1)
    assert 0 < int(unscored.sum()) < len(unscored)
    given = batch()
    given["valid"] = ~unscored
    plain = {"0": [(lambda rows: rows["tokens", "full"].sum(-1) / 9, 1.0)], "1": recipe["1"]}
    reference = ExperienceMaker(model, reward=plain, **options)
    expected = reference(given)
    for key in (*maker.out_keys, "valid"):
        torch.testing.assert_close(out[key], expected[key])
    told = {k: v for k, v in maker.metrics.items() if not k.startswith("reward/0/")}
    assert told == {k: v for k, v in reference.metrics.items() if not k.startswith("reward/0/")}


def test_rows_are_left_alone_if_a_maker_that_rejected_some_fails(rows, model):
    def fails(reward, mask):
        raise RuntimeError("no transform")

    given = rows(1, n=12)
    keys = set(given.keys(True))
    mix = RewardMix(without_some, transform=fails)
    maker = ExperienceMaker(model, reward=mix, advantage="batch")
    helpers.refused(maker, given, "no transform", RuntimeError)
    dropped = ExperienceMaker(
        model, reward=without_some, advantage="batch", process=lambda rows: rows[:9]
    )(given)
    assert not dropped["valid"].all()
    assert set(given.keys(True)) == keys


def test_all_episodes_may_be_rejected(rows, model):
    maker = ExperienceMaker(model, reward=lambda rows: [None] * len(rows), advantage="batch")
    out = maker(rows())
    assert not out["valid"].any()
    assert not out["advantage"].any()
    assert maker.metrics["reward/default/count"] == 0


def test_rows_may_lie_in_memory_in_any_order(rows):
    """Columns of tokens that were made position by position are transposed."""
    batch = labelled(rows(n=12))
    first = batch["episode"] == 0
    # A row that sampled nothing: its rewards go to another row of its episode.
    batch["masks", "all_assistant_mask"][first.nonzero()[0]] = False
    recipe = {
        "maths": [(by_length, 1.0), (lambda rows: rows["tokens", "full"].float(), 1.0)],
        "chat": [("episode", 1.0)],
    }
    transposed = batch.clone()
    for key in (("masks", "all_assistant_mask"), ("turns", "full"), ("rewards", "full")):
        transposed[key] = batch[key].t().contiguous().t()
    for transform in (None, lambda reward, mask: reward.clamp(-2, 2)):
        expected, metrics = mixed(recipe, batch, transform=transform)
        reward, same = mixed(recipe, transposed, transform=transform)
        torch.testing.assert_close(reward, expected)
        assert metrics == same


def test_only_the_last_rows_are_shown_to_a_source_per_episode(rows):
    batch, seen = labelled(rows(n=6)), []

    class Judge:
        per_episode, name = True, "judge"

        def __call__(self, rows):
            seen.append(rows["tokens", "full"])
            return [1.0] * len(rows)

    _, metrics = mixed({"maths": [(Judge(), 1.0)], "chat": [("episode", 1.0)]}, batch)
    # Episodes 0 (rows 0 and 1), 2 and 3 (rows 3 and 4), 5: the even ones are maths.
    assert torch.equal(seen[0], batch["tokens", "full"][[1, 2]])
    assert metrics["reward/maths/judge/count"] == 2
    assert len(seen) == 1


def test_a_source_that_is_listed_twice_has_both_weights(rows):
    batch = rows(n=7)
    twice, metrics = mixed([(by_length, 0.5), ("episode", 1.0), (by_length, 2.0)], batch)
    once, expected = mixed([(by_length, 2.5), ("episode", 1.0)], batch)
    assert torch.equal(twice, once)
    assert metrics == expected


def test_a_bound_method_is_one_source_however_often_it_is_looked_up(rows):
    calls = []

    class Judge:
        __hash__ = None

        def __init__(self, score):
            self.result = score

        def score(self, rows):
            calls.append(len(rows))
            return torch.full((len(rows),), self.result)

        def __eq__(self, other):
            return True

    judge, other = Judge(1.0), Judge(3.0)
    recipe = {"maths": [(judge.score, 1.0), (other.score, 0.5)], "chat": [(judge.score, 2.0)]}
    _, metrics = mixed(recipe, labelled(rows(n=6)))
    assert sorted(calls) == [3, 6]
    means = {name[7:-5]: value for name, value in metrics.items() if name.endswith("/mean")}
    of_maths = {"maths/score": 1.0, "maths/score#2": 3.0, "maths": 2.5}
    assert means == {**of_maths, "chat/score": 1.0, "chat": 2.0}


def test_sources_that_wait_do_so_together_also_inside_a_loop(rows):
    both = threading.Barrier(2, timeout=PATIENCE)

    async def meet(rows):
        await asyncio.to_thread(both.wait)
        return [1.0] * len(rows)

    async def too(rows):
        return await meet(rows)

    batch = rows()

    async def main():
        return mixed([(meet, 1.0), (too, 1.0)], batch)

    for reward, metrics in (mixed([(meet, 1.0), (too, 1.0)], batch), asyncio.run(main())):
        assert metrics["reward/default/meet/mean"] == 1.0
        assert float(reward.sum()) == 2.0 * metrics["reward/default/too/count"]


def test_the_transform_sees_where_rewards_lie(rows):
    batch, seen = rows(n=3), []

    def clip(reward, mask):
        seen.append(mask)
        return reward.clamp(-2, 2)

    outcome, _ = mixed(lambda rows: by_length(rows) - by_length(rows)[-1], batch, transform=clip)
    # Also an outcome of 0 is one.
    assert int(seen[0].sum()) == 2
    assert float(outcome.abs().max()) <= 2
    mixed("episode", batch, transform=clip)
    assert torch.equal(seen[1], batch["rewards", "full"] != 0)
    # What is made of tokens without a reward is not read.
    shifted, _ = mixed("episode", batch, transform=lambda reward, mask: reward + 1)
    original = batch["rewards", "full"]
    assert torch.equal(shifted, torch.where(original != 0, original + 1, 0.0))
    with pytest.raises(ValueError, match=r"reward_transform\(reward, mask\) must have shape"):
        mixed("episode", batch, transform=lambda reward, mask: reward[:1])
    with pytest.raises(ValueError, match="must return finite numbers"):
        mixed("episode", batch, transform=lambda reward, mask: reward / 0)


def test_a_failing_source_is_an_error_and_stops_the_others(rows):
    stopped = []

    async def fails(rows):
        raise RuntimeError("judge is ill")

    async def waits(rows):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    with pytest.raises(RuntimeError, match="judge is ill"):
        mixed([(waits, 1.0), (fails, 1.0)], rows())
    assert stopped == [True]


ROW_5 = [1.0] * 5 + [torch.nan]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ([1.0] * 5, ValueError, r"one number for each of the 6 rows, \[6\]"),
        (torch.zeros(6, 13), ValueError, r"of their tokens, \[6, 12\], got shape"),
        (torch.zeros(6, 1), ValueError, r"each of the 6 rows, \[6\], .* got shape \(6, 1\)"),
        (torch.zeros(6, 12, 1), ValueError, r"got shape \(6, 12, 1\)"),
        (ROW_5, ValueError, "finite numbers, got nan for row 5"),
        (None, TypeError, "the result of reward source 'judge' must be a tensor or numbers"),
        (["good"] * 6, TypeError, "got list"),
    ],
)
def test_bad_answers_are_refused(rows, answer, error, message):
    def judge(rows):
        return answer

    with pytest.raises(error, match=message):
        mixed(judge, rows())


OWN = [("episode", 1.0)]
EACH_KNOWN = {"maths": OWN, "chat": OWN}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("a recipe for each label", RewardMix, {}),
        refused("label 'a' must have a list", RewardMix, {"a": []}),
        refused("label 'a' must have a list", RewardMix, {"a": "episode"}),
        refused(
            "a reward source must be 'episode', a callable",
            *(RewardMix, [("other", 1.0)]),
            error=TypeError,
        ),
        refused("weight of 'episode' must be a finite", RewardMix, [("episode", float("inf"))]),
        refused("(source, weight) pairs", RewardMix, ["episode"], error=TypeError),
    ],
)
def test_bad_recipes_are_refused(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize(
    ("recipe", "label", "error", "text"),
    [
        (EACH_KNOWN, None, KeyError, "rows lack the entry 'label'"),
        *(
            (
                *(given, ["maths"] * 3 + ["chat"] * 3, ValueError),
                f"'label' of row {n} must be one of {known}, got '{unknown}': no recipe stands in "
                f"for another…reward={{'{unknown}': [(source, weight)], ...}}",
            )
            for given, known, n, unknown in (
                ({"maths": OWN}, "'maths'", 3, "chat"),
                ({"default": OWN}, "'default'", 0, "maths"),
                ({"default": OWN, "chat": OWN}, "'default', 'chat'", 0, "maths"),
            )
        ),
        ({"maths": OWN}, [None] * 6, ValueError, "got None: … reward={'default': "),
        ({"default": OWN}, [3] * 6, ValueError, "got 3: … reward={'3': …, a str"),
        (EACH_KNOWN, ["maths", "chat"] * 3, ValueError, "the same on all rows of an episode"),
    ],
)
def test_labels_without_a_recipe_are_refused(rows, recipe, label, error, text):
    batch = rows()
    if label is not None:
        batch["label"] = label
    check_refused(partial(mixed, recipe, batch), error, text)


def test_without_a_label_the_default_recipe_is_meant(rows):
    batch = rows()
    batch["label"] = [None] * len(batch)
    got, expected = mixed({"default": OWN, "maths": OWN}, batch)[0], mixed(OWN, rows())[0]
    torch.testing.assert_close(got, expected)
