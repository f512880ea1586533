"""Wrong arguments are refused by name, with what was expected and what was given."""

import math
from functools import partial

import pytest
import torch

from tests.refusals import check_refused, refused
from torchrl_mt.objectives.functional import (
    CORRECTIONS,
    OBJECTIVES,
    RewardNormalizer,
    aggregate,
    bilevel_gae,
    clip_cov,
    clip_filter_weight,
    clip_reward,
    correct,
    dynamic_sampling_mask,
    entropy_mask,
    episode_gae,
    geometric,
    group_advantage,
    icepop,
    kl_cov,
    kl_estimate,
    m2po,
    masked_gae,
    masked_returns,
    masked_whiten,
    merge_totals,
    off_policy_mask,
    outcome_advantage,
    overlong_penalty,
    ppo,
    reinforce,
    sapo,
    sequence_mis,
    token_tis,
    turn_gae,
    turn_normalize,
    turn_returns,
    value_loss,
    vespo,
)
from torchrl_mt.objectives.functional.aggregation import aggregation_total
from torchrl_mt.objectives.functional.corrections import find_corrections
from torchrl_mt.objectives.functional.policy.objectives import clip_bounds, compares, takes
from torchrl_mt.objectives.functional.whitening import masked_moments

X, MASK, TURNS = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3).long()
IDS, RETURNS, LONG_IDS = torch.arange(2), torch.zeros(2), torch.arange(3)
MASK_TYPE = "mask must be a bool tensor, got torch.float32"
MASK_SHAPE = "mask must have shape (2, 3), got (2, 2)"
TURNS_SHAPE = "turns must have shape (2, 3), got (2, 2)"
GROUP_SHAPE = "group must have shape (2,), got (3,)"
NO_TURN = "turns must be 0 or more on every sampled token, got -1"
GAMMA, LMBDA = "gamma must lie in [0, 1], got 1.1", "lmbda must lie in [0, 1], got -0.1"
CLIP = "clip_epsilon must be a number"
TABLE = aggregation_total(MASK, "prompt_mean", group=IDS)
prompts = partial(aggregate, X, MASK, "prompt_mean")
bilevel = partial(bilevel_gae, turn_gamma=1.0, turn_lmbda=1.0)
objectives = [
    partial(f, sampler_log_prob=X) if takes(f, "sampler_log_prob") else f
    for f in OBJECTIVES.values()
]

corrections = [
    partial(f, advantage=X) if takes(f, "advantage") else f for f in CORRECTIONS.values()
]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused(MASK_TYPE, masked_returns, X, X, 0.9, error=TypeError),
        refused(MASK_SHAPE, masked_returns, X, MASK[:, :2], 0.9),
        refused(GAMMA, masked_returns, X, MASK, 1.1),
        refused("gamma must lie in [0, 1], got nan", masked_returns, X, MASK, math.nan),
        refused("value must have shape (2, 3), got (1, 3)", masked_gae, X, X[:1], MASK, 0.9, 0.9),
        refused(GAMMA, masked_gae, X, X, MASK, 1.1, 0.9),
        refused(LMBDA, masked_gae, X, X, MASK, 0.9, -0.1),
        refused("[N, S], got (2,)", episode_gae, RETURNS, RETURNS, IDS > 2, IDS, 1, 1),
        refused(NO_TURN, turn_returns, X, MASK, TURNS - 1, 0.9),
        refused(GAMMA, turn_returns, X, MASK, TURNS, 1.1),
        refused("episode must have", turn_returns, X, MASK, TURNS, 0.9, episode=LONG_IDS),
        refused(MASK_TYPE, turn_normalize, X, X, TURNS, error=TypeError),
        refused("turn_gamma must", bilevel, X, X, MASK, TURNS, 1.0, 1.0, turn_gamma=2.0),
        refused("turn_lmbda must", bilevel, X, X, MASK, TURNS, 1.0, 1.0, turn_lmbda=2.0),
    ],
)
def test_returns_and_estimates(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize("estimate", [episode_gae, turn_gae, bilevel])
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"mask": X}, TypeError, MASK_TYPE),
        ({"value": X[:1]}, ValueError, "value must have shape (2, 3), got (1, 3)"),
        ({"turns": TURNS[:, :2]}, ValueError, TURNS_SHAPE),
        ({"turns": TURNS - 1}, ValueError, NO_TURN),
        ({"gamma": 1.1}, ValueError, GAMMA),
        ({"lmbda": -0.1}, ValueError, LMBDA),
    ],
)
def test_estimates_over_episodes(estimate, wrong, error, text):
    good = {"reward": X, "value": X, "mask": MASK, "turns": TURNS, "gamma": 0.9, "lmbda": 0.9}
    check_refused(partial(estimate, **good | wrong), error, text)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("kind must be one of", group_advantage, RETURNS, IDS, "median"),
        refused(GROUP_SHAPE, group_advantage, RETURNS, LONG_IDS),
        refused("shape (2,), got None", group_advantage, RETURNS, None, error=TypeError),
        refused("group must hold integer ids", group_advantage, IDS, RETURNS, error=TypeError),
        refused("pass_k must be", group_advantage, RETURNS, IDS, "pass_at_k", pass_k=0),
        refused("lengths must be given for kind 'opo'", group_advantage, RETURNS, IDS, "opo"),
        refused("lengths must have", group_advantage, RETURNS, IDS, "opo", lengths=LONG_IDS),
        refused(NO_TURN, outcome_advantage, X, MASK, TURNS - 1, IDS, IDS),
        refused(TURNS_SHAPE, outcome_advantage, X, MASK, TURNS[:, :2], IDS, IDS),
        refused("(2, 3), got None", outcome_advantage, X, MASK, None, IDS, IDS, error=TypeError),
        refused("group must be the same", outcome_advantage, X, MASK, TURNS, IDS * 0, IDS),
        refused(GROUP_SHAPE, dynamic_sampling_mask, RETURNS, LONG_IDS),
        refused("valid must be", clip_filter_weight, RETURNS, IDS, valid=IDS, error=TypeError),
        refused("max_weight must be positive", clip_filter_weight, RETURNS, IDS, max_weight=0.0),
    ],
)
def test_groups(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(refused("rho must lie in", entropy_mask, X, MASK, x) for x in (0.0, 1.5, math.nan)),
        refused(MASK_SHAPE, entropy_mask, X, MASK[:, :2]),
        refused("entropy must not be NaN on sampled tokens", entropy_mask, X * math.nan, MASK),
        refused("kind must be one of 'k1', 'k2', 'k3', 'k3+', 'k3_is'", kl_estimate, X, X, "k4"),
        refused("ref_log_prob must have shape (2, 3), got (2,)", kl_estimate, X, RETURNS),
        refused("old_log_prob must be given for kind 'k3_is'", kl_estimate, X, X, "k3_is"),
        refused("buffer must be positive", overlong_penalty, X, 10, 0),
        refused("buffer must be at most max_length", overlong_penalty, X, 10, 11),
        refused(MASK_TYPE, masked_whiten, X, X, error=TypeError),
        refused(MASK_SHAPE, masked_moments, X, MASK[:, :2]),
        refused("weight must have shape (2, 3), got (2,)", masked_moments, X, MASK, weight=IDS),
        refused("low must be at most high", clip_reward, X, 1.0, 0.0),
        refused("clip must be positive", RewardNormalizer, clip=0.0),
    ],
)
def test_tokens_and_rewards(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(refused(MASK_TYPE, f, X, X, X, X, error=TypeError) for f in objectives),
        *(
            refused("advantage must have shape (2, 3), got (2, 1)", f, X, X, X[:, :1], MASK)
            for f in filter(compares, objectives)
        ),
        *(
            refused(CLIP, f, X, X, X, MASK, clip)
            for f in objectives
            for clip in (-0.1, (0.1, -0.1), (0.1,))
            if clip_bounds(f)
        ),
        *(
            refused("old_log_prob must have shape (2, 3), got (2, 2)", f, X, X[:, :2], X, MASK)
            for f in filter(compares, objectives)
            if f is not reinforce
        ),
        refused("dual_clip must be above 1", ppo, X, X, X, MASK, dual_clip=1.0),
        refused("tau_pos must be positive", sapo, X, X, X, MASK, tau_pos=0.0),
        refused("tau_neg must be positive", sapo, X, X, X, MASK, tau_neg=0.0),
        refused("shape_pos must be positive", vespo, X, X, X, MASK, shape_pos=(0.0, 1.0)),
        refused("shape_neg must be positive", vespo, X, X, X, MASK, shape_neg=(1.0, 0.0)),
        refused("bounds must be", clip_cov, X, X, X, MASK, bounds=(5.0, 1.0)),
        *(
            refused("share must lie in (0, 1], got 0", f, X, X, X, MASK, share=0.0)
            for f in (clip_cov, kl_cov)
        ),
        *(
            refused("weight_cap must be positive", f, X, X, X, MASK, weight_cap=0.0)
            for f in objectives
            if takes(f, "weight_cap")
        ),
        refused("old_value must be given", value_loss, X, X, MASK, clip_value=0.2),
        refused("clip_value must be", value_loss, X, X, MASK, clip_value=0.0, old_value=X),
        refused("returns must have shape (2, 3), got (1, 3)", value_loss, X, X[:1], MASK),
    ],
)
def test_losses(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("cap must be positive", token_tis, X, X, MASK, cap=0.0),
        refused("threshold must be positive", m2po, X, X, MASK, threshold=0.0),
        refused("delta must be", off_policy_mask, X, X, MASK, advantage=X, delta=math.nan),
        refused("advantage must have", off_policy_mask, X, X, MASK, advantage=X[:1]),
        refused("bounds must be", icepop, X, X, MASK, bounds=(2.0, 1.0)),
        refused("bounds must be", geometric, X, X, MASK, bounds=(-1.0, 1.0)),
        refused(TURNS_SHAPE, sequence_mis, X, X, MASK, turns=TURNS[:, :2]),
        *(
            refused("sampler_log_prob must have shape (2, 3), got (1, 3)", f, X, X[:1], MASK)
            for f in corrections
        ),
        refused("correction must be one of", find_corrections, ["geometric", "tis"]),
        refused("corrections must be one or more, got none", correct, [], X, X, MASK),
        refused("kind must be one of", aggregate, X, MASK, "median"),
        refused("group must be each row", prompts),
        refused("group must have shape (2,), got (3,)", prompts, group=LONG_IDS),
        refused("group must hold integer ids", prompts, group=RETURNS, error=TypeError),
        refused("total must be a table", prompts, group=IDS, total=3),
        refused("total has no tokens of group 1", prompts, group=IDS, total=TABLE[:1]),
        refused(
            "total has fewer tokens of group 0",
            prompts,
            group=IDS,
            total=TABLE // torch.tensor([1, 2]),
        ),
        refused("merge_totals", prompts, group=IDS, total=torch.cat([TABLE, TABLE])),
        *(
            refused("total must be finite and at least 6", aggregate, X, MASK, total=total)
            for total in (0, 5.5, torch.tensor(5), torch.nan, torch.inf)
        ),
        refused("total must be one number", aggregate, X, MASK, total=torch.tensor([6, 6])),
        refused("norm is for 'seq_mean_token_sum' alone", aggregate, X, MASK, norm=3.0),
        refused("norm must be positive", aggregate, X, MASK, "seq_mean_token_sum", norm=0.0),
        refused("totals must be one or more, got none", merge_totals),
    ],
)
def test_corrections_and_aggregations(call, error, text):
    check_refused(call, error, text)
