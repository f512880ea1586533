"""Where updates point, in the limit of large batches, when turns and prompts share parameters.

A batch with every episode of a small game as often as it occurs gives expectations exactly. Each kind of
advantage is compared with the gradient of the expected return, and those that maximise something else
with the gradient of that.
"""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from tests.objectives.conftest import make_model
from tests.settings import grouped
from tests.tiers import examples
from torchrl_mt.objectives import ExperienceMaker
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS, CRITIC_KINDS
from torchrl_mt.objectives.functional import RewardNormalizer, aggregate
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES

PARTS = 4
"""Probabilities are multiples of a quarter: whole numbers of episodes have exactly them."""
WEIGHTS = {
    "gdpo": lambda mean, std: 1 / std,
    "grpo": lambda mean, std: 1 / std,
    "max_rl": lambda mean, std: 1 / mean if mean > 0 else 0.0,
}
"""Kinds that weight prompts, by definition, by the mean and spread of their episodes' returns."""
KINDS = [kind for kind in ADVANTAGE_KINDS if kind != "pass_at_k"]
"""Kinds that maximise the return of single episodes, not the best of several."""
UNWEIGHTED = [kind for kind in KINDS if kind not in WEIGHTS]
OVER_TIME = ("turn", "otb", *CRITIC_KINDS)
"""Kinds with a return for each turn; others have one for each episode."""


def random_game(generator, turns=3):
    """A prompt: (what the policy sees, rewards of actions 0 and 1, whether they end it) by history."""
    game = {}
    for k in range(turns):
        for history in product((0, 1), repeat=k):
            sees = int(torch.randint(2, (), generator=generator))
            scale = 10 ** float(torch.rand((), generator=generator))
            rewards = (scale * torch.randn(2, generator=generator)).tolist()
            game[history] = sees, rewards, (torch.rand(2, generator=generator) < 0.3).tolist()
    return game


def stop_or_go(stop, never):
    """Action 0 stops at turn ``k`` for ``stop[k]``; the turn is hidden."""
    last = len(stop) - 1
    return {
        (1,) * k: (0, [pays, never if k == last else 0.0], [True, k == last])
        for k, pays in enumerate(stop)
    }


def choices(*rewards):
    """Turns without end, whose actions 0 and 1 pay ``rewards[k]``; the turn is hidden."""
    return {
        history: (0, list(pays), [False, False])
        for k, pays in enumerate(rewards)
        for history in product((0, 1), repeat=k)
    }


def episodes(game, history=()):
    """The histories at which episodes end."""
    for action in (0, 1):
        after = (*history, action)
        if game[history][2][action] or after not in game:
            yield after
        else:
            yield from episodes(game, after)


class Table(nn.Module):
    """A critic with a value for each history, which is told by the last token."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, input_ids, attention_mask):
        return self.value[input_ids]


class World:
    """Prompts played by a policy with one parameter for each of the two things that it sees.

    Rows have a token that tells the history before each action, for critics; the policy does not see it.
    """

    def __init__(self, games, parts):
        self.games, self.turns = games, max(len(h) for game in games for h in game) + 1
        self.p = torch.tensor(parts).double() / PARTS
        self.logit = torch.logit(self.p).requires_grad_()
        each = [(g, h) for g, game in enumerate(games) for h in game]
        self.token = {each[i]: 3 + i for i in range(len(each))}
        played = [
            (g, end)
            for g, game in enumerate(games)
            for end in episodes(game)
            for _ in range(self.copies(game, end, parts))
        ]
        n, s = len(played), 2 * self.turns
        self.sees, self.action = torch.zeros(2, n, s, dtype=torch.long)
        tokens, turns = torch.zeros(n, s, dtype=torch.long), torch.full((n, s), -1)
        reward = torch.zeros(n, s)
        for i, (g, end) in enumerate(played):
            for k, action in enumerate(end):
                sees, rewards, _ = games[g][end[:k]]
                tokens[i, 2 * k], tokens[i, 2 * k + 1] = self.token[g, end[:k]], 1 + action
                turns[i, 2 * k : 2 * k + 2] = k
                self.sees[i, 2 * k + 1], self.action[i, 2 * k + 1] = sees, action
                reward[i, 2 * k + 1] = rewards[action]
        self.mask = (turns >= 0) & (torch.arange(s) % 2 == 1)
        self.turn_ids = turns
        self.group = torch.tensor([g for g, _ in played])
        self.rows = TensorDict(
            {
                "tokens": {"full": tokens},
                "masks": {"all_attention_mask": turns >= 0, "all_assistant_mask": self.mask},
                "log_probs": {"full": torch.where(self.mask, -0.5, 0.0)},
                "turns": {"full": turns},
                "rewards": {"full": reward},
                "episode": torch.arange(n),
                "group": self.group,
            },
            [n],
        )

    @staticmethod
    def random(seed, prompts):
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randint(1, PARTS, (2,), generator=generator).tolist()
        return World([random_game(generator) for _ in range(prompts)], parts)

    def copies(self, game, end, parts):
        number = PARTS**self.turns
        for k, action in enumerate(end):
            part = parts[game[end[:k]][0]]
            number = number * (part if action else PARTS - part) // PARTS
        return number

    def log_prob(self, sees, action):
        return -nn.functional.softplus(torch.where(action == 1, -1, 1) * self.logit[sees])

    def outcomes(self, g, gamma=1.0):
        """Probability, with its gradient, and return of each episode of a prompt."""
        game, out = self.games[g], []
        for end in episodes(game):
            steps = [game[end[:k]] for k in range(len(end))]
            sees = torch.tensor([step[0] for step in steps])
            log_prob = self.log_prob(sees, torch.tensor(end)).sum()
            total = sum(gamma**k * step[1][end[k]] for k, step in enumerate(steps))
            out.append((log_prob.exp(), total))
        return out

    def gradient(self, weight=lambda mean, std: 1.0, gamma=1.0):
        """The gradient of the expected return, summed over prompts with weights."""
        total = 0.0
        for g in range(len(self.games)):
            mean = sum(p * x for p, x in self.outcomes(g, gamma))
            square = sum(p * (x - mean.detach()) ** 2 for p, x in self.outcomes(g, gamma))
            total += weight(mean.item(), square.item() ** 0.5) * mean
        return torch.autograd.grad(total, self.logit)[0]

    def values(self, gamma=1.0):
        """The exact value of each history, by its token."""
        value = torch.zeros(3 + len(self.token))
        for (g, history), token in reversed(self.token.items()):  # Longer histories come later.
            sees, rewards, ends = self.games[g][history]
            for action, p in enumerate((1 - self.p[sees], self.p[sees])):
                after = self.token.get((g, (*history, action)))
                later = 0.0 if ends[action] or after is None else gamma * value[after]
                value[token] += p * (rewards[action] + later)
        return Table(value)

    def update(self, kind, aggregation="token_mean", critic=None, objective=None, **options):
        """The expected step of the parameters; ``objective(log_prob, old, advantage, mask)``."""
        if kind in CRITIC_KINDS:
            options["critic"] = self.values(options.get("gamma", 1.0)) if critic is None else critic
        maker = ExperienceMaker(MODEL, **grouped(advantage=kind, **options))
        advantage = maker(self.rows.clone())["advantage"].squeeze(-1).double()
        log_prob = self.log_prob(self.sees, self.action)
        loss = -advantage * log_prob
        if objective is not None:
            loss = objective(log_prob, log_prob.detach(), advantage, self.mask)[0]
        total = aggregate(loss, self.mask, aggregation, group=self.group)
        return -torch.autograd.grad(total, self.logit)[0]


MODEL = make_model()
"""Called for ``"otb"`` only, which any model's norms must leave right."""


def assert_same_direction(got, expected):
    size = expected.norm()
    if size > 1e-3:
        assert got @ expected > 0
    torch.testing.assert_close(got / got.norm().clamp(1e-9) * size, expected, atol=2e-4, rtol=1e-3)


@examples(12)
@given(st.integers(0, 10_000), st.integers(1, 3), st.booleans())
def test_an_update_is_the_gradient_of_the_expected_return(seed, prompts, whiten):
    world = World.random(seed, prompts)
    for kind in UNWEIGHTED:
        assert_same_direction(world.update(kind, whiten=whiten), world.gradient())
    for kind, weight in WEIGHTS.items():
        assert_same_direction(world.update(kind, whiten=whiten), world.gradient(weight))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weighted_prompts_can_point_downhill(kind):
    small = choices((0.0, 0.1))
    world = World([small, small, choices((1.0, 0.0))], [2, 2])
    assert world.gradient()[0] < 0 < world.update(kind)[0]
    for game in world.games:
        alone = World([game], [2, 2])
        assert alone.gradient()[0] * alone.update(kind)[0] > 0


@pytest.mark.parametrize("part", [1, 2, 3])
def test_stop_or_go(part):
    """With a standard deviation for each turn, ``"turn"`` would learn never to stop."""
    world = World([stop_or_go([10.0, 0.0, 1.0, 2.0, 3.0], never=4.0)], [part, part])
    for kind in KINDS:
        assert_same_direction(world.update(kind), world.gradient())


def test_a_discount_per_turn_is_of_one_return_only_for_whole_episodes():
    """Compared in turns, each turn maximises its own discounted return, as if it came first."""
    world = World([choices((0.0, 0.75), (1.0, 0.0))], [2, 2])
    assert world.gradient(gamma=0.5)[0] > 0
    for kind in KINDS:
        assert (world.update(kind, gamma=0.5)[0] > 0) == (kind not in (*OVER_TIME, "gigpo"))
        assert_same_direction(world.update(kind), world.gradient())


@pytest.mark.parametrize("kind", CRITIC_KINDS)
@examples(20)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 0.95]))
def test_a_critic_is_exact_or_lmbda_is_1(kind, seed, lmbda):
    world = World.random(seed, 2)
    shorter = {"lmbda": lmbda, "turn_lmbda": lmbda}
    assert_same_direction(world.update(kind, **shorter), world.gradient())
    values = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    wrong = {"critic": Table(values), "lmbda": 1.0, "turn_lmbda": 1.0}
    assert_same_direction(world.update(kind, **wrong), world.gradient())


@pytest.mark.parametrize("kind", CRITIC_KINDS)
def test_a_wrong_critic_can_point_downhill(kind):
    late = {(): (0, [0.0, 0.6], [False, True]), (0,): (1, [1.0, 1.0], [True, True])}
    world = World([late], [2, 2])
    untrained = Table(torch.zeros(5))
    assert world.gradient()[0] < 0
    assert world.update(kind, critic=untrained, lmbda=0.5, turn_lmbda=0.5)[0] > 0
    assert world.update(kind, critic=untrained)[0] < 0  # by default 0.95


@examples(8)
@given(st.integers(0, 10_000))
def test_objectives_keep_the_direction_while_the_policy_is_the_samplers(seed):
    world = World.random(seed, 2)
    log_prob = world.log_prob(world.sees, world.action).detach()
    for name in OBJECTIVES.keys() - {"sft", "clip_cov"}:
        objective = OBJECTIVES[name]
        if name == "decoupled_ppo":
            objective = partial(objective, sampler_log_prob=log_prob)
        assert_same_direction(world.update("batch", objective=objective), world.gradient())
        if name in ("gspo", "gmpo"):
            objective = partial(objective, turns=world.turn_ids)
        assert_same_direction(world.update("turn", objective=objective), world.gradient())


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_one_ratio_for_turns_of_several_advantages_can_point_downhill(name):
    world = World([choices((0.0, 1.5), (1.0, 0.0))], [2, 2])
    for kind in OVER_TIME:
        assert world.update(kind, objective=OBJECTIVES[name])[0] < 0 < world.gradient()[0]


@pytest.mark.parametrize("kind", ["turn", "batch", "dr_grpo", "gae"])
@examples(10)
@given(st.integers(0, 10_000))
def test_aggregations_that_keep_the_direction(kind, seed):
    world = World.random(seed, 3)
    assert_same_direction(world.update(kind, "seq_mean_token_sum"), world.gradient())
    alone = World.random(seed, 1)
    assert_same_direction(alone.update(kind, "prompt_mean"), alone.gradient())


@pytest.mark.parametrize("kind", ["turn", "batch", "dr_grpo", "gae"])
def test_aggregations_that_divide_by_lengths_can_point_downhill(kind):
    """A row's mean divides by its own number of tokens, which the policy chooses."""
    world = World([stop_or_go([1.0, 3.0], never=0.9)], [2, 2])
    assert world.gradient()[0] < 0 < world.update(kind, "seq_mean_token_mean")[0]
    short, long = choices((1.0, 0.0)), choices(*[(0.0, 0.4)] * 3)
    world = World([short, long], [2, 2])
    assert world.update(kind, "prompt_mean")[0] < 0 < world.gradient()[0]


@pytest.mark.parametrize("kind", ["turn", "batch"])
def test_a_mean_taken_off_each_turns_reward_can_point_downhill(kind):
    """Going on pays at every turn, but less than the mean of the rewards."""
    game = {(1,) * k: (0, [2.0, 1.0], [True, False]) for k in range(3)}
    world = World([game], [2, 2])
    centered = RewardNormalizer(center=True)
    assert world.update(kind, reward_transform=centered)[0] < 0 < world.gradient()[0]
    scaled = world.update(kind, reward_transform=RewardNormalizer())
    assert_same_direction(scaled, world.gradient())
