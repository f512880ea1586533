"""What trains to no avail, or with other numbers than was meant, is refused or said, and said once."""

import copy
import logging
from contextlib import closing

import pytest
import torch

from tests.buffers import buffer_of
from tests.objectives.helpers import MASK, WORDS, TokenCritic, refused
from tests.tiers import some_fast
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeWriter
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber, TextEnv, TextStep
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, RewardMix
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS, CRITIC_KINDS, GROUP_KINDS
from torchrl_mt.objectives.filters import dynamic_sampling
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns


@pytest.fixture
def said(caplog):
    """What the package's logger said so far, from its warnings on."""
    with caplog.at_level(logging.WARNING, logger="torchrl_mt"):
        yield lambda: [record.getMessage() for record in caplog.records]


def lone(batch):
    """Rows as a collector with group_size=1 makes them."""
    batch["group"] = batch["episode"] + 10
    return batch


# Groups of one


def test_the_default_learns_from_what_a_collector_makes_by_default(model, rows, said):
    out = ExperienceMaker(model)(lone(rows()).exclude("group"))
    assert out["advantage"].any()
    assert not said()


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_groups_of_one_are_refused_where_groups_are_compared(model, rows, kind):
    critic = TokenCritic() if kind in CRITIC_KINDS else None
    maker, batch = ExperienceMaker(model, advantage=kind, critic=critic), lone(rows())
    batch["rewards", "full"].abs_()
    if kind not in GROUP_KINDS:
        assert maker(batch)["advantage"].any()
        return
    refused(maker, batch, rf"advantage='{kind}' .*these 4 episodes.*group_size.*turn")
    batch["group"][batch["episode"] == 3] = batch["group"][0]
    assert maker(batch)["advantage"].any()


def test_copies_of_an_episode_are_no_group_and_rejected_members_are(model, rows):
    maker = ExperienceMaker(model, advantage="grpo")
    twice = torch.cat([lone(rows()), lone(rows())])
    twice["episode_index"] = torch.cat([twice["episode"][:6], twice["episode"][6:] + 10])
    with pytest.raises(ValueError, match="4 episodes is alone"):
        maker(twice)
    batch = rows()
    batch["group"] = (batch["episode"] > 2).long()
    batch["valid"] = (batch["episode"] == 0) | (batch["episode"] == 5)
    assert not maker(batch)["advantage"].any()


def test_one_episode_by_itself_is_said_but_not_refused(model, rows, said):
    maker, batch = ExperienceMaker(model, advantage="grpo"), rows()[:2]
    assert len(batch["episode"].unique()) == 1
    for _ in range(4):
        assert not maker(batch.clone())["advantage"].any()
    (message,) = said()
    assert "was 0 on all" in message


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_share_of_groups_without_spread(model, other_model, rows, seed, kl_coef):
    g = torch.Generator().manual_seed(seed)
    batch = rows(seed, n=18, suffix_padding=False)
    mask, turns, episode = batch[MASK], batch["turns", "full"], batch["episode"]
    reward = torch.randint(0, 2, mask.shape, generator=g).float()
    reward = torch.where(mask & (mask.cumsum(-1) == 1), reward, 0.0)
    batch["rewards", "full"] = reward
    batch["group"] = torch.randint(0, 6, (18,), generator=g)[episode] * 7
    batch["valid"] = torch.randint(0, 4, (18,), generator=g)[episode] > 0
    maker = ExperienceMaker(model, ref=other_model, advantage="dr_grpo", gamma=0.5, kl_coef=kl_coef)
    maker(batch)
    outcomes = {}
    for e in episode[batch["valid"]].unique().tolist():
        own = mask & (episode == e)[:, None]
        outcome = (0.5 ** (turns[own] - turns[own].min()) * reward[own]).sum()
        group = int(batch["group"][episode == e][0])
        outcomes.setdefault(group, set()).add(round(float(outcome), 4))
    flat = [group for group, found in outcomes.items() if len(found) < 2]
    expected = len(flat) / len(outcomes)
    assert maker.metrics["groups/without_spread"] == pytest.approx(expected)
    assert 0 < len(flat) < len(outcomes)


def test_filters_that_compare_groups_show_the_share_by_what_they_compare(model, rows):
    batch = rows()
    batch["group"] = (batch["episode"] > 2).long()
    batch["rewards", "full"][batch["episode"] > 2] = 0.0
    maker = ExperienceMaker(model, process=dynamic_sampling)
    maker(batch)
    assert maker.metrics["groups/without_spread"] == 0.5


# Advantages that are all zero


@pytest.mark.parametrize("options", [{}, {"process": "dynamic_sampling"}])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_batches_in_a_row_that_teach_nothing_are_said_once(model, rows, said, options, reward):
    maker = ExperienceMaker(model, **options)
    batch = rows()
    if options:
        batch = lone(batch)
    else:
        batch["rewards", "to_go"] = torch.full((6, 12), reward)
    for _ in range(2):  # As at the beginning of a run, before the first right answer.
        for _ in range(3):
            maker(batch.clone())
        maker(rows())
    for k in range(6):
        assert len(said()) == (k > 3)
        maker(batch.clone())
    assert "was 0 on all trained tokens of 4 batches in a row" in said()[0]
    assert "If all are right, the task is solved" in said()[0]


def test_a_batch_of_which_nothing_is_trained_is_not_said_to_teach_nothing(model, rows, said):
    batch = rows()
    batch["valid"] = torch.zeros(6, dtype=torch.bool)
    batch["rewards", "to_go"] = torch.zeros(6, 12)
    maker = ExperienceMaker(model, gamma=0.5)
    for _ in range(5):
        maker(batch.clone())
    assert not said()


# A discount that is not used


def returned(batch, gamma):
    """Rows with returns, of that discount per turn."""
    maker = ExperienceMaker(torch.nn.Embedding(24, 24), gamma=gamma)
    batch["rewards", "to_go"] = maker(batch.clone())["returns"]
    return batch


def test_a_discount_that_the_rows_returns_stand_for_is_said_once(model, rows, said):
    for options in (
        {},
        {"gamma": 0.5},
        {"gamma": 0.9, "advantage": "dr_grpo"},
        {"gamma": 0.9, "reward": RewardMix("episode", transform=lambda reward, mask: reward)},
    ):
        ExperienceMaker(model, **options)(returned(rows(), 0.5))
    maker = ExperienceMaker(model, gamma=1.0)
    maker(rows())
    assert not said()
    for seed in range(2):
        batch = returned(rows(seed), 0.5)
        assert torch.equal(maker(batch)["returns"], batch["rewards", "to_go"])
        (message,) = said()
    for part in ("gamma=1.0 does not discount", "('rewards', 'to_go')", "DiscountedReturn"):
        assert part in message


def test_a_discount_that_cannot_be_compared_is_said(model, rows, said):
    ExperienceMaker(model, gamma=0.5)(returned(rows(), 0.5).exclude(("rewards", "full")))
    assert len(said()) == 1


class Talk(TextEnv):
    """Three turns, each of which earns as much as was said."""

    def reset(self, data=None):
        self.turns = 0
        return [{"role": "user", "content": "guess 1"}]

    def step(self, response):
        self.turns += 1
        reward = float(len(response))
        return TextStep([{"role": "user", "content": "2"}], reward=reward, done=self.turns == 3)


def test_returns_of_the_same_discount_from_a_writer_are_the_same(said):
    torch.manual_seed(0)
    model, tokenizer = tiny_chat_model(WORDS)
    writer = EpisodeWriter(transform=DiscountedReturn(0.5))
    merge = MergeTurns(pad_token_id=tokenizer.pad_token_id)
    sampler = EpisodeSampler(replacement=False)
    buffer = buffer_of(100, sampler, writer=writer, transform=merge, batch_size=8)
    options = {"episodes_per_batch": 8, "total_episodes": 8, "replay_buffer": buffer}
    with (
        closing(TransformersEngine(model, tokenizer)) as engine,
        MultiTurnCollector(Talk(), engine, **options) as collector,
    ):
        list(collector)
    rows = buffer.sample()
    ExperienceMaker(model, gamma=0.5)(rows.clone())
    assert not said()
    ExperienceMaker(model, gamma=0.9)(rows)
    assert "gamma=0.9" in said()[0]


# A sampler that nobody tells of new weights


def batch_of(rows, k, *, version=0):
    """The ``k``-th batch of a collector, of new episodes."""
    batch = rows(k)
    batch["episode"] += 10 * k
    batch["versions", "full"][batch["masks", "all_assistant_mask"]] = version
    return batch


def step(model):
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3


@pytest.mark.parametrize("old_log_probs", ["sampler", "actor"])
def test_new_episodes_of_an_old_version_are_said_once(model, rows, said, old_log_probs):
    maker = ExperienceMaker(model, old_log_probs=old_log_probs)
    for k in range(8):
        maker(batch_of(rows, k, version=5))
        assert len(said()) == (k >= 3)
        step(model)
    (message,) = said()
    assert "('versions', 'full') has been 5 in 4 batches" in message
    assert "update_policy_weights_" in message
    assert "share_weights=True" in message


@pytest.mark.parametrize(
    ("batches", "trained"),
    [
        ([(k, k // 3) for k in range(12)], True),  # an update after every third batch
        ([(k, max(0, k - 2)) for k in range(8)], True),  # two batches ahead
        ([(0, 0)] * 8, True),  # the same episodes again and again
        ([(k, 0) for k in range(8)], False),  # nothing is trained
        ([(0, 2), *[(k, 1) for k in range(1, 8)]], True),  # a mixture of versions
        ([(k, -1) for k in range(8)], True),  # versions are not known
        ([(8 - k, 0) for k in range(8)], True),  # what is stored, in whatever order
    ],
)
def test_what_is_no_sign_of_a_forgotten_update_is_not_said(model, rows, said, batches, trained):
    maker = ExperienceMaker(model)
    for k, version in batches:
        maker(batch_of(rows, k, version=version))
        if trained:
            step(model)
    assert not said()


def test_random_draws_from_one_collection_are_no_new_episodes(model, rows, said):
    """Also where there are many updates before the first of the sampler's."""
    stored = torch.cat([batch_of(rows, k) for k in range(20)])
    g = torch.Generator().manual_seed(0)
    maker = ExperienceMaker(model)
    for _ in range(30):
        drawn = stored["episode"].unique()
        drawn = drawn[torch.randperm(len(drawn), generator=g)[:10]]
        maker(stored[torch.isin(stored["episode"], drawn)].clone())
        step(model)
    assert not said()


def test_rows_without_versions_are_complete(model, rows, said):
    maker = ExperienceMaker(model)
    for k in range(6):
        maker(batch_of(rows, k).exclude("versions"))
        step(model)
    assert not said()


@pytest.mark.parametrize(
    ("update", "share_weights"),
    some_fast([(False, False)], [(False, False), (False, True), (True, False), (True, True)]),
)
def test_training_without_updates_is_noticed_from_end_to_end(said, share_weights, update):
    torch.manual_seed(0)
    model, tokenizer = tiny_chat_model(WORDS)
    engine = TransformersEngine(model, tokenizer, share_weights=share_weights)
    env = GuessNumber(8, 2, prompt="guess 1 to {numbers}")
    options = {"episodes_per_batch": 16, "limits": Limits(max_response_tokens=4)}
    merge = MergeTurns(pad_token_id=tokenizer.pad_token_id)
    maker, loss_module = ExperienceMaker(model), MultiTurnLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        closing(engine),
        MultiTurnCollector(env, engine, total_episodes=96, **options) as collector,
    ):
        for turns in collector:
            rows = maker(merge(turns))
            for _ in range(2):
                loss_module(rows)["loss_objective"].backward()
                optimizer.step()
                optimizer.zero_grad()
            if update:
                collector.update_policy_weights_(model)
    assert sum("update_policy_weights_" in message for message in said()) == (not update)


def test_a_maker_that_has_seen_something_can_be_copied(model, rows, said):
    maker = ExperienceMaker(model)
    for k in range(3):
        maker(batch_of(rows, k))
        step(model)
    maker = copy.deepcopy(maker)
    maker(batch_of(rows, 3))
    assert len(said()) == 1
