"""Every kind of advantage is that of the pure functions, and rejected rows enter no statistic."""

from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn

from tests.objectives.conftest import make_model
from tests.objectives.helpers import TokenCritic, value_model
from tests.objectives.rewards.test_mix import by_length
from tests.settings import grouped
from torchrl_mt.objectives import Advantage, ExperienceMaker, Passes
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS, CRITIC_KINDS, GROUP_KINDS
from torchrl_mt.objectives.functional import (
    bilevel_gae,
    episode_gae,
    gdpo_advantage,
    gigpo_advantage,
    message_states,
    otb_advantage,
    outcome_advantage,
    turn_gae,
    turn_normalize,
    turn_returns,
)
from torchrl_mt.objectives.functional.group import GroupKind
from torchrl_mt.objectives.functional.time.episodes import index_episodes
from torchrl_mt.scoring.log_probs import row_scores


def make(model, kind, **options):
    critic = TokenCritic() if kind in CRITIC_KINDS else None
    return ExperienceMaker(model, **grouped(critic=critic, advantage=kind, **options))


def entries(batch):
    mask, turns = batch["masks", "all_assistant_mask"], batch["turns", "full"]
    return batch["rewards", "full"], mask, turns, batch["episode"]


def test_the_kinds_are_all_that_there_are():
    own = {"gdpo", "gigpo", "otb", "turn", "gae", "turn_gae", "bilevel_gae"}
    assert {*get_args(GroupKind), *own} == set(ADVANTAGE_KINDS)
    assert {"grpo", "opo", "max_rl", "reinforce_baseline", "gdpo", "gigpo", "otb"} <= set(
        GROUP_KINDS
    )
    assert not {"batch", "reinforce++"} & set(GROUP_KINDS)


@pytest.mark.parametrize("kind", [*get_args(GroupKind), "turn"])
def test_without_a_critic(model, rows, kind):
    batch = rows(n=12)
    reward, mask, turns, episode = entries(batch)
    out = make(model, kind, gamma=0.9)(batch)
    returns = turn_returns(reward, mask, turns, 0.9, episode=episode)
    torch.testing.assert_close(out["returns"], returns)
    if kind == "turn":
        expected = turn_normalize(returns, mask, turns, episode=episode)
    else:
        expected = outcome_advantage(returns, mask, turns, episode, batch["group"], kind)
    torch.testing.assert_close(out["advantage"].squeeze(-1), expected)
    assert expected.any()


@pytest.mark.parametrize("kind", CRITIC_KINDS)
def test_with_a_critic(model, rows, kind):
    batch = rows(n=12)
    reward, mask, turns, episode = entries(batch)
    out = make(model, kind, gamma=0.9, lmbda=0.8, turn_gamma=0.7, turn_lmbda=0.6)(batch)
    given = reward, out["values"], mask, turns, 0.9, 0.8
    if kind == "bilevel_gae":
        expected = bilevel_gae(*given, turn_gamma=0.7, turn_lmbda=0.6, episode=episode)
    else:
        expected = {"gae": episode_gae, "turn_gae": turn_gae}[kind](*given, episode=episode)
    torch.testing.assert_close(out["advantage"].squeeze(-1), expected[0])
    torch.testing.assert_close(out["returns"], expected[1])
    assert expected[0].any()


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_rejected_rows_enter_no_statistic(model, rows, kind, whiten):
    batch = rows(n=12)
    kept = ~torch.isin(batch["episode"], batch["episode"][[2, 4]])
    alone = make(model, kind, whiten=whiten)(rows(n=12)[kept])
    batch["valid"] = kept
    batch["rewards", "full"][~kept] = 1e6
    out = make(model, kind, whiten=whiten)(batch)
    assert not out["advantage"][~kept].any()
    torch.testing.assert_close(out["advantage"][kept], alone["advantage"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", CRITIC_KINDS)
def test_the_critics_targets_may_have_a_decay_of_their_own(model, rows, kind):
    options = {"gamma": 0.9, "lmbda": 0.8, "turn_lmbda": 0.6}
    out = make(model, kind, critic_lmbda=1.0, **options)(rows(n=12))
    same = make(model, kind, **options)(rows(n=12))
    slower = make(model, kind, gamma=0.9, lmbda=1.0, turn_lmbda=1.0)(rows(n=12))
    assert torch.equal(out["advantage"], same["advantage"])
    assert torch.equal(out["returns"], slower["returns"])
    assert not torch.equal(out["returns"], same["returns"])


@pytest.mark.parametrize("kind", CRITIC_KINDS)
@pytest.mark.parametrize("passes", [None, Passes(packed=True), Passes(packed="tree")], ids=str)
def test_what_would_have_come_after_a_truncated_episode_counts(model, rows, kind, passes):
    critic = value_model(make_model(1))
    options = {"gamma": 0.9, "critic": critic, "passes": passes}
    decays = {"lmbda": 0.8, "turn_gamma": 0.7, "turn_lmbda": 0.6}
    batch = rows(n=12, suffix_padding=False)
    ids, of_row = batch["episode"].unique(return_inverse=True)
    truncated = torch.arange(len(ids)) % 2 == 0
    batch["next", "truncated"] = truncated[of_row].unsqueeze(-1)
    expected = batch.clone()
    mask, turns = batch["masks", "all_assistant_mask"], batch["turns", "full"]
    index = index_episodes(mask, turns, batch["episode"])
    changed = 0
    for episode, last in enumerate(index.last_token.tolist()):
        if truncated[episode] and last >= 0:
            row, token = divmod(last, mask.shape[1])
            text = batch["tokens", "full"][row][batch["masks", "all_attention_mask"][row]]
            value = critic(text[None])[0, -1].detach()
            expected["rewards", "full"][row, token] += value * (
                0.7 if kind == "bilevel_gae" else 0.9
            )
            changed += 1
    assert changed > 2
    made = ExperienceMaker(model, advantage=Advantage(kind, bootstrap=True, **decays), **options)(
        batch
    )
    plain = ExperienceMaker(model, advantage=Advantage(kind, **decays), **options)(expected)
    for key in ("advantage", "returns", "values"):
        torch.testing.assert_close(made[key], plain[key], atol=1e-5, rtol=1e-5)
    del batch["next"]
    with pytest.raises(KeyError, match="carry="):
        ExperienceMaker(model, advantage=Advantage(kind, bootstrap=True), **options)(batch)


def test_turns_are_compared_where_the_environment_said_the_same(model, rows):
    batch = rows(n=12)
    batch["tokens", "full"] = batch["tokens", "full"] % 2  # Many messages are equal.
    reward, mask, turns, episode = entries(batch)
    out = make(model, "gigpo", gamma=0.9, step_weight=0.5)(batch)
    of = partial(turn_returns, reward, mask, turns, episode=episode)
    attended = batch["masks", "all_attention_mask"]
    state = message_states(batch["tokens", "full"], attended, mask, turns, episode)
    where = mask, turns, episode, batch["group"], state
    expected = gigpo_advantage(of(gamma=0.9), of(gamma=1.0), *where, step_weight=0.5)
    torch.testing.assert_close(out["advantage"].squeeze(-1), expected)
    whole = outcome_advantage(of(gamma=1.0), *where[:-1], "dr_grpo")
    assert not torch.allclose(expected, whole)


@pytest.mark.parametrize("old_log_probs", ["sampler", "actor"])
@pytest.mark.parametrize("packed", [False, True, "tree"])
def test_each_token_has_the_actors_optimal_baseline(model, rows, old_log_probs, packed):
    passes, batch = Passes(packed=packed, temperature=0.7), rows(n=12)
    reward, mask, turns, episode = entries(batch)
    given = batch["tokens", "full"], batch["masks", "all_attention_mask"], mask
    *_, norms = row_scores(model, *given, passes=Passes(temperature=0.7), with_norms=True)
    out = make(model, "otb", gamma=0.9, old_log_probs=old_log_probs, passes=passes)(batch)
    returns = turn_returns(reward, mask, turns, 0.9, episode=episode)
    expected = otb_advantage(returns, norms, mask, turns, episode, batch["group"])
    torch.testing.assert_close(out["advantage"].squeeze(-1), expected, atol=1e-4, rtol=1e-4)
    assert expected.any()


@pytest.mark.parametrize("advantage", [Advantage("otb"), Advantage("gae", bootstrap=True)], ids=str)
def test_functions_of_rows_are_not_shown_what_is_no_entry(model, rows, advantage):
    batch = rows(n=12)
    batch["next", "truncated"] = torch.ones(12, 1, dtype=torch.bool)
    options = {"critic": TokenCritic(), "advantage": advantage}
    expected = ExperienceMaker(model, **options)(batch.clone())
    out = ExperienceMaker(model, **options, process=lambda rows: rows)(batch)
    assert torch.equal(out["advantage"], expected["advantage"])


@pytest.mark.parametrize("process", [(), "dynamic_sampling"])
def test_sources_are_compared_one_by_one(model, rows, process):
    batch = rows(n=12)
    _, mask, turns, episode = entries(batch)
    recipe = {"a": [("episode", 2.0), (by_length, 0.5)], "b": [("episode", 1.0)]}
    label = ["ab"[int(k) % 2] for k in batch["group"]]
    batch["label"] = label
    out = make(model, "gdpo", reward=recipe, gamma=0.9, process=process)(batch)
    alone = [
        make(model, "dr_grpo", reward=source, gamma=0.9)(rows(n=12))["returns"]
        for source in ("episode", by_length)
    ]
    first = torch.tensor([x == "a" for x in label]).float()
    alone[1] = alone[1] * first.unsqueeze(-1)
    weight = torch.stack([1 + first, 0.5 * first])
    expected = gdpo_advantage(torch.stack(alone), weight, mask, turns, episode, batch["group"])
    torch.testing.assert_close(out["advantage"].squeeze(-1), expected)
    assert expected.any()


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coef": 0.1},
        {"process": lambda rows: rows},
        {"reward_transform": lambda reward, mask: reward},
    ],
)
def test_what_changes_the_sum_of_the_sources_does_not_go_with_gdpo(model, other_model, options):
    if "kl_coef" in options:
        options = options | {"ref": other_model}
    with pytest.raises(ValueError, match="one by one: it needs kl_coef=0"):
        make(model, "gdpo", **options)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, rows):
        return self.weight * rows["masks", "all_assistant_mask"]


def test_a_module_that_gives_advantages_is_a_part_of_the_maker(model, rows):
    maker = ExperienceMaker(model, advantage=Learned())
    assert "advantage_model.weight" in maker.state_dict()
    batch = rows()
    maker(batch)
    mask = batch["masks", "all_assistant_mask"]
    assert torch.equal(batch["advantage"].squeeze(-1), 2.0 * mask)


def test_discounts_may_change_between_calls(model, rows):
    maker = make(model, "dr_grpo", gamma=0.0)
    maker.gamma, maker.advantage = 1.0, Advantage("dr_grpo", whiten=True)
    expected = make(model, "dr_grpo", gamma=1.0, whiten=True)(rows(n=12))["advantage"]
    torch.testing.assert_close(maker(rows(n=12))["advantage"], expected)
    maker.gamma = 2.0
    with pytest.raises(ValueError, match="gamma must lie in"):
        maker(rows(n=12))
