"""What experience is made from: read wherever it lies, shown under its usual keys, or refused."""

from contextlib import nullcontext, suppress
from dataclasses import fields

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import AdaptiveKLController

from tests.objectives.helpers import Spoiled, TokenCritic, first_sampled, refused, rejecting
from tests.settings import grouped
from torchrl_mt.objectives import Advantage, ExperienceMaker, Passes, RewardMix
from torchrl_mt.objectives.rows.batch import read_batch
from torchrl_mt.objectives.rows.keys import EPISODE_SCORE, ExperienceKeys

USUAL = {field.name: getattr(ExperienceKeys, field.name) for field in fields(ExperienceKeys)}
NESTED = {name: key for name, key in USUAL.items() if isinstance(key, tuple)}


def complete(rows):
    """Rows that have every entry that is ever read."""
    batch = rows(n=9)
    batch["episode_index"] = batch["episode"] * 3
    batch["fork"] = (torch.arange(9) % 3 == 1).long()
    batch["label"] = ["a" if e % 2 else "b" for e in batch["episode"].tolist()]
    batch["valid"] = batch["episode"] != batch["episode"][-1]
    return batch


def everything(model, other_model, **options):
    """A maker that reads and writes all there is, and whose callables read the usual keys."""

    def source(rows):
        assert rows["rewards", "full"].shape == rows["turns", "full"].shape
        return (rows["tokens", "full"] * rows["masks", "all_attention_mask"]).sum(-1) / 50

    def one(rows):
        # Its own kind of score: the episode's, by the entries of the rows.
        assert rows[EPISODE_SCORE].shape == rows.batch_size
        rows["weights", "full"] = rows["weights", "full"] * rows[EPISODE_SCORE].abs().unsqueeze(-1)
        return rows

    reward = {"a": [("episode", 1.0), (source, 0.5)], "b": [("episode", 2.0)]}
    return ExperienceMaker(
        model,
        ref=other_model,
        critic=TokenCritic(),
        reward=RewardMix(reward, transform=lambda reward, mask: reward * 2.0),
        kl_coef=0.1,
        passes=Passes(with_entropy=True),
        process=["dynamic_sampling", "top_entropy", one],
        **grouped(whiten=True, **{"advantage": "gae", **options}),
    )


def renamed(batch, keys):
    """The same rows with entries elsewhere."""
    found = {name: batch.get(USUAL[name]) for name in keys if USUAL[name] in batch.keys(True)}
    batch = batch.exclude(*(USUAL[name] for name in keys))
    for node in ("tokens", "masks", "log_probs", "turns", "rewards"):
        if node in batch and batch[node].is_empty():
            del batch[node]
    for name, value in found.items():
        batch.set(keys[name], value)
    return batch


def clear_of(name):
    """The flat parent of a key's default, and the keys that lay below it elsewhere."""
    flat = USUAL[name][0]
    below = {other for other, key in NESTED.items() if key[0] == flat}
    return {other: f"moved_{other}" for other in below} | {name: flat}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_a_key_may_be_the_flat_parent_of_its_default(model, other_model, rows, name, advantage):
    expected = everything(model, other_model, advantage=advantage)(complete(rows))
    maker = everything(model, other_model, advantage=advantage)
    keys = clear_of(name)
    maker.set_keys(**keys)
    batch = renamed(complete(rows), keys)
    given = {key: batch.get(key) for key in batch.keys(True, True)}
    out = maker(batch)
    for field, usual in USUAL.items():
        if usual in expected.keys(True) and field != "label":
            got = out[getattr(maker.tensor_keys, field)]
            torch.testing.assert_close(got, expected[usual], equal_nan=True)
    assert set(out.keys(True, True)) == set(given) | set(maker.out_keys)
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(out.get(key), value)


def test_given_returns_may_lie_flat_too(model, rows):
    batch = rows()
    batch["rewards", "to_go"] = torch.randn(6, 12)
    options = {"advantage": "turn", "process": "dynamic_sampling"}
    expected = ExperienceMaker(model, **options)(batch.clone())
    maker, keys = ExperienceMaker(model, **options), clear_of("turn_return")
    maker.set_keys(**keys)
    out = maker(renamed(batch, keys))
    for key in ("advantage", ("weights", "full")):
        torch.testing.assert_close(out[key], expected[key])


@pytest.mark.parametrize("key", ["rewards", ("rewards", "episode"), ("rewards", "episode", "own")])
def test_the_score_that_filters_are_given_stands_above_all_else(model, rows, key):
    seen = []

    def one(rows):
        seen.append(rows[EPISODE_SCORE].clone())
        return rows

    ExperienceMaker(model, process=one)(rows())
    batch = rows()
    maker = ExperienceMaker(model, process=one)
    keys = {"reward": key, "turn_return": "to_go", "shaped_reward": "shaped"}
    maker.set_keys(**keys)
    maker(renamed(batch, keys))
    assert torch.equal(*seen)


def test_the_copy_shares_tensors_and_shows_the_usual_keys(rows):
    batch = rows()
    keys = ExperienceKeys()
    keys.action, keys.group = "tokens", ("group", "id")
    batch["tokens"] = batch["tokens", "full"]
    batch["group"] = TensorDict({"id": batch["group"], "size": torch.ones(6)}, [6])
    copy = read_batch(batch, keys).with_default_keys({"kl": torch.ones(6, 12)})
    assert copy["tokens", "full"] is batch["tokens"]
    assert copy["group"] is batch["group", "id"]
    assert copy["kl"].all()
    assert "kl" not in batch
    assert isinstance(batch["group"], TensorDict)


@pytest.mark.parametrize("advantage", ["gae", "turn_gae", "bilevel_gae", "grpo", "turn"])
@pytest.mark.parametrize("old_log_probs", ["actor", "sampler"])
def test_what_is_written_to_rejected_rows_is_finite(
    model, other_model, rows, advantage, old_log_probs
):
    batch = rejecting(rows(n=9), 2)
    kept, mask = batch["valid"], batch["masks", "all_assistant_mask"]
    tokens = batch["tokens", "full"]
    tokens[tokens == 5] = 6
    tokens[2, 0] = 5
    for key in ("log_probs", "rewards"):
        batch[key, "full"][~kept] = float("inf")
    options = {
        "advantage": advantage,
        "old_log_probs": old_log_probs,
        "reward": [("episode", 1.0)],
        "whiten": True,
        "kl_coef": 0.1,
        "with_entropy": True,
    }
    maker = ExperienceMaker(
        Spoiled(model),
        ref=Spoiled(other_model),
        critic=Spoiled(TokenCritic()),
        **grouped(**options),
    )
    out = maker(batch)
    sound = rows(n=9)[kept].clone()
    sound["tokens", "full"] = tokens[kept]
    expected = ExperienceMaker(
        model, ref=other_model, critic=Spoiled(TokenCritic()), **grouped(**options)
    )(sound)
    for key in maker.out_keys:
        assert out[key].isfinite().all(), key
        assert not out[key][~mask].any(), key
        torch.testing.assert_close(out[key][kept], expected[key], atol=1e-4, rtol=1e-4)
    assert not out["values"][2].any()
    assert not out["kl"][2].any()
    assert not out["entropy"][2].any()


def test_finite_log_probs_of_rejected_rows_stay(model, rows):
    batch, expected = rejecting(rows(), 2), rows()["log_probs", "full"]
    place = 2, first_sampled(batch, 2)
    batch["log_probs", "full"][place] = -torch.inf
    expected[place] = 0.0
    assert torch.equal(ExperienceMaker(model)(batch)["log_probs", "old"], expected)


def test_given_returns_of_rejected_rows_are_none(model, rows):
    batch = rejecting(rows(), 2)
    mask = batch["masks", "all_assistant_mask"]
    batch["rewards", "to_go"] = torch.where(mask, 3.0, 0.0)
    out = ExperienceMaker(model, advantage="turn")(batch)["returns"]
    assert torch.equal(out, torch.where(mask & batch["valid"][:, None], 3.0, 0.0))


@pytest.mark.parametrize("filters", [(), "top_entropy"])
def test_an_entropy_that_is_no_number_is_named(model, rows, filters):
    batch = rows()
    batch["tokens", "full"][3, 0] = 5
    maker = ExperienceMaker(Spoiled(model), passes=Passes(with_entropy=True), process=filters)
    refused(maker, batch, r"'entropy' must be finite where it counts, got nan in episode")


HUGE = 3e38
IMAGINARY = torch.ones(6, 12, dtype=torch.complex64) * 1j


@pytest.mark.parametrize(
    "kind",
    ["grpo", "dr_grpo", "rloo", "opo", "max_rl", "batch", "turn", "gae", "turn_gae", "bilevel_gae"],
)
def test_own_rewards_that_overflow_in_sum_are_named(model, rows, kind):
    batch = rows()
    batch["rewards", "full"] = torch.where(batch["masks", "all_assistant_mask"], HUGE, 0.0)
    maker = ExperienceMaker(model, critic=TokenCritic(), advantage=Advantage(kind, lmbda=1.0))
    refused(maker, batch, "must be finite where it counts, got .*inf.* in episode")


@pytest.mark.parametrize("huge", [HUGE, -HUGE])
def test_sources_that_overflow_in_sum_are_named(model, rows, huge):
    def a(rows):
        return torch.full((len(rows),), huge)

    def b(rows):
        return a(rows) * (2 / 3)

    for reward, said in (([(a, 1.0), (b, 1.0)], "'a' and 'b'.*"), ([(a, 2.0)], "'a'")):
        message = f"label 'default': .*{said} must add up to finite"
        refused(ExperienceMaker(model, reward=reward), rows(), message)


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_that_overflow_are_named(model, rows, whiten):
    """Returns that are finite, the differences of which are not."""
    batch = rows(n=4)
    batch["episode"], batch["group"] = torch.arange(4), torch.tensor([0, 0, 1, 1])
    mask = batch["masks", "all_assistant_mask"]
    batch["rewards", "full"] = torch.zeros(mask.shape)
    for n, reward in enumerate((HUGE, -HUGE, 1.0, 2.0)):
        batch["rewards", "full"][n, first_sampled(batch, n)] = reward
    maker = ExperienceMaker(model, advantage=Advantage("rloo", whiten=whiten))
    refused(maker, batch, "'advantage' must be finite where it counts")


def test_what_a_function_says_of_tokens_that_are_never_trained_is_not_read(model, rows):
    batch = rows()
    batch["masks", "all_assistant_mask"][:, 0] = True

    def advantage(rows):
        out = torch.ones(rows["returns"].shape)
        out[:, 0] = float("nan")
        return out

    out = ExperienceMaker(model, advantage=advantage)(batch)["advantage"].squeeze(-1)
    expected = batch["masks", "all_assistant_mask"].float()
    expected[:, 0] = 0.0
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": lambda rows: IMAGINARY}, r"advantage\(rows\) must be real"),
        ({"advantage": lambda rows: None}, r"advantage\(rows\) must be a tensor or numbers"),
        ({"reward": lambda rows: IMAGINARY}, "reward source '<lambda>' must be real"),
        ({"reward_transform": lambda r, m: r * 1j}, "reward_transform.* must be real"),
        ({"reward_transform": lambda r, m: None}, "reward_transform.* must be a tensor"),
    ],
)
def test_callables_that_answer_with_no_real_numbers_are_named(model, rows, options, message):
    maker = ExperienceMaker(model, **grouped(**options))
    refused(maker, rows(), f"the result of .*{message}", TypeError)


def test_copies_of_an_episode_that_nothing_tells_apart_are_refused(model, rows):
    batch, maker = rows(), ExperienceMaker(model)
    batch["episode_index"] = batch["episode"].clone()
    batch["fork"] = (torch.arange(6) % 3 == 1).long()
    two = torch.cat([batch, batch])
    refused(maker, two, r"fork 0 of episode 0 .* more than once")
    turn = int(two["turns", "full"][0, first_sampled(two, 0)])
    message = rf"turn {turn} of episode 0 lies in row 0 and in row 6.*'episode_index'"
    refused(maker, two.select(*maker.in_keys), message)
    two["episode_index"][6:] += 100
    expected, once = maker(two.clone()), maker(batch)["returns"]
    torch.testing.assert_close(expected["returns"], torch.cat([once, once]))
    chosen = two.select(*maker.in_keys, *maker.optional_in_keys, strict=False)
    assert torch.equal(maker(chosen)["advantage"], expected["advantage"])


def test_rows_that_were_sampled_at_another_temperature_are_refused(model, rows):
    batch, key = rows(), ("sampling", "temperature")
    batch[key] = torch.full((len(batch),), 0.5)
    refused(ExperienceMaker(model), batch, r"'temperature'\) 0.5, but temperature is 1.0")
    batch[key][1] = torch.nan
    maker = ExperienceMaker(model, passes=Passes(temperature=0.5))
    refused(maker, batch, "at different temperatures")
    batch["valid"] = batch["episode"] != batch["episode"][1]
    assert maker(batch)["advantage"].isfinite().all()


def test_scores_of_given_returns_are_those_of_first_turns(model, rows):
    """Of each episode its own, whatever the last turns return."""
    batch = rows(n=6, suffix_padding=False)
    batch["episode"] = torch.tensor([4, 4, 1, 1, 0, 2])
    batch["group"] = torch.tensor([0, 0, 0, 0, 7, 7])
    batch["turns", "full"][[1, 3]] += 30
    mask, turns = batch["masks", "all_assistant_mask"], batch["turns", "full"]
    first = {}
    for n, t in mask.nonzero().tolist():
        e = int(batch["episode"][n])
        first[e] = min(first.get(e, 999), int(turns[n, t]))
    start = torch.tensor([first[e] for e in batch["episode"].tolist()])[:, None]
    # Both episodes of group 0 begin with 0, those of group 7 do not; all differ later.
    worth = 100.0 * batch["episode"][:, None] * (turns - start)
    worth = worth + 5.0 * (batch["episode"] == 2)[:, None]
    batch["rewards", "to_go"] = torch.where(mask, worth, 0.0)
    out = ExperienceMaker(model, advantage="turn", process="dynamic_sampling")(batch)
    assert out["weights", "full"].any(-1).tolist() == [False] * 4 + [True] * 2


def test_scores_add_up_in_double_precision(model, rows):
    """Rewards that cancel, between which a small one would be lost."""
    batch, seen = rows(n=2, s=40, suffix_padding=False), []
    batch["episode"], batch["group"] = torch.tensor([0, 1]), torch.tensor([0, 0])
    batch["rewards", "full"].zero_()
    for n, parts in enumerate(([1e8, 1.0, -1e8], [1.0, 1e8, -1e8])):
        places = batch["masks", "all_assistant_mask"][n].nonzero()[: len(parts), 0]
        batch["rewards", "full"][n, places] = torch.tensor(parts)

    def one(rows):
        seen.extend(rows[EPISODE_SCORE].tolist())
        return rows

    ExperienceMaker(model, process=one)(batch)
    assert seen == [1.0, 1.0]


def test_a_kl_with_a_reference_that_gives_no_number_is_none(model, other_model, rows):
    """On a rejected row: not the difference to the 0 that is written for the reference."""
    batch = rejecting(rows(), 2)
    batch["tokens", "full"][batch["tokens", "full"] == 5] = 6
    batch["tokens", "full"][2, 0] = 5
    out = ExperienceMaker(model, ref=Spoiled(other_model))(batch)
    assert out["log_probs", "old"][2].any()
    assert not out["log_probs", "ref"][2].any()
    assert not out["kl"][2].any()
    assert out["kl"][0].any()


@pytest.mark.parametrize("huge", [1e30, 3e38])
def test_whitened_advantages_are_finite_or_refused(model, rows, huge):
    def advantage(rows):
        # One token far below all others.
        out = torch.full(rows["returns"].shape, huge)
        out[2, first_sampled(rows, 2)] = -huge
        return out

    maker = ExperienceMaker(model, advantage=Advantage(advantage, whiten=True))
    with suppress(ValueError) if huge > 1e35 else nullcontext():
        assert maker(rows())["advantage"].isfinite().all()


def test_scores_that_overflow_are_named_though_returns_do_not(model, rows):
    batch = rows(n=2, suffix_padding=False)
    batch["episode"], batch["group"] = torch.tensor([3, 7]), torch.tensor([0, 0])
    mask, turns = batch["masks", "all_assistant_mask"], batch["turns", "full"]
    turns[1] = turns[1] - turns[1][mask[1]].min() + torch.arange(12)
    batch["rewards", "full"] = torch.where(mask, 0.5, 0.0)
    batch["rewards", "full"][1] = torch.where(mask[1], HUGE, 0.0)
    assert int(mask[1].sum()) > 1
    ExperienceMaker(model, gamma=0.01)(batch.clone())
    maker = ExperienceMaker(model, gamma=0.01, process="dynamic_sampling")
    refused(maker, batch, "rewards of an episode must add up to a finite score.*episode 7")


def test_what_is_known_of_the_temperature_is_as_exact_as_its_type(model, rows):
    batch, maker = rows(), ExperienceMaker(model, passes=Passes(temperature=0.7))
    batch["sampling", "temperature"] = torch.full((len(batch),), 0.7, dtype=torch.bfloat16)
    assert "advantage" in maker(batch.clone())
    batch["masks", "all_assistant_mask"][0] = False
    batch["sampling", "temperature"][0] = torch.nan
    assert "advantage" in maker(batch)


def test_a_controller_that_fails_leaves_the_rows_alone(model, other_model, rows):
    class Broken(AdaptiveKLController):
        def update(self, kl_values):
            raise RuntimeError("broken")

    controller = Broken(init_kl_coef=0.1, target=1.0, horizon=10)
    maker = ExperienceMaker(model, ref=other_model, kl_coef=controller)
    refused(maker, rows(), "broken", RuntimeError)
