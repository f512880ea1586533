"""What advantages, objectives, aggregations and corrections learn in tiny games whose best is known.

Each cell is the share of the best possible score at the end of training, of untouched samples: mean
of the seeds / the worst seed; and after "@" the mean number of updates until the share is 95 % ("-" if
some seed never gets there). An update samples 128 episodes and makes 3 gradient steps on them. "4 old":
the sampler's weights are 4 updates old.

    OMP_NUM_THREADS=1 python benchmarks/learning.py [--only advantages,objectives] [--rst TABLES.rst]
"""

from __future__ import annotations

import argparse
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from tables import Part, Row, show
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS, CRITIC_KINDS
from torchrl_mt.objectives.functional.aggregation import Aggregation
from torchrl_mt.objectives.functional.corrections import CORRECTIONS
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES

EPISODES, GROUP, EVALUATED, EVERY, LAG = 128, 8, 256, 2, 4
Step = tuple[Tensor, Tensor, Tensor, Tensor]
"""Reward, score, whether the episode ends, and the environment's answer: ``[N]`` each."""


class Guess:
    """Find one of 3 numbers within 2 turns by "higher" and "lower"; 1 at the end if found."""

    vocabulary, turns, tokens, best, hidden = 6, 2, 1, 1.0, False
    updates, lr = 24, 0.005

    def begin(self, groups: int, size: int) -> Tensor:
        self.number = torch.randint(3, [groups]).repeat_interleave(size)
        return torch.full_like(self.number, 3)

    def step(self, said: Tensor, turn: int) -> Step:
        found = (said[:, 0] == self.number).float()
        answer = torch.where(said[:, 0] < self.number, 4, 5)
        return found, found, found.bool() | (turn == 1), answer


class Orders:
    """Four turns. Each answers the environment's last message; each right answer pays 1."""

    vocabulary, turns, tokens, best, hidden = 8, 4, 1, 4.0, False
    updates, lr, jackpot = 12, 0.003, 0.0

    def begin(self, groups: int, size: int) -> Tensor:
        self.asked = torch.randint(4, [groups]).repeat_interleave(size)
        return self.asked

    def step(self, said: Tensor, turn: int) -> Step:
        right = (said[:, 0] == 4 + (self.asked + 1) % 4).float()
        self.asked = torch.randint(4, self.asked.shape)
        luck = torch.rand(right.shape) if self.jackpot else torch.ones_like(right)
        pays = torch.where(luck < self.jackpot, 100 * right, right)
        return pays, right, torch.full([len(said)], turn == 3), self.asked


class Jackpots(Orders):
    """The same, but by chance one right answer in 50 pays 100. The score counts right answers."""

    updates, jackpot = 20, 0.02


class Tool:
    """Call the tool with the prompt's key, then answer with what it said: 1 if right.

    A turn is a word that nobody reads and a value. A wrong key makes the tool say "error".
    """

    vocabulary, turns, tokens, best, hidden = 5, 2, 2, 1.0, False
    updates, lr = 30, 0.005

    def begin(self, groups: int, size: int) -> Tensor:
        self.key, self.secret = (torch.randint(n, [groups]).repeat_interleave(size) for n in (2, 4))
        return self.key

    def step(self, said: Tensor, turn: int) -> Step:
        right = ((said[:, 1] == self.secret) & (turn == 1)).float()
        answer = torch.where(said[:, 1] == self.key, self.secret, 4)
        return right, right, torch.full([len(said)], turn == 1), answer


class StopOrGo:
    """Stopping at turn k pays 10, 0, 1, 2, 3, never stopping pays 4. The policy sees no turn."""

    vocabulary, turns, tokens, best, hidden = 3, 5, 1, 10.0, True
    updates, lr = 10, 0.003
    PAYS = torch.tensor([10.0, 0.0, 1.0, 2.0, 3.0])

    def begin(self, groups: int, size: int) -> Tensor:
        return torch.full([groups * size], 2)

    def step(self, said: Tensor, turn: int) -> Step:
        stops = said[:, 0] == 0
        pays = torch.where(stops, self.PAYS[turn], 4.0 * (turn == 4))
        return pays, pays, stops | (turn == 4), torch.full([len(said)], 2)


class Reader(nn.Module):
    """A causal language model of one block of attention, or, if ``hidden``, of the last token only."""

    def __init__(self, game: Any, outputs: int, hidden: bool) -> None:
        super().__init__()
        width, length = 32, 1 + game.turns * (game.tokens + 1)
        self.embed, self.place = nn.Embedding(game.vocabulary, width), nn.Embedding(length, width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.block = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head, self.hidden = nn.Linear(width, outputs), hidden
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits ``[N, L, outputs]``, or values ``[N, L, 1]``. Padding may only be on the right."""
        x = self.embed(input_ids)
        if not self.hidden:
            x = x + self.place.weight[: x.shape[1]]
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return self.head(x + self.block(x))


@torch.no_grad()
def play(game: Any, policy: nn.Module, groups: int) -> tuple[TensorDict, float]:
    """Rows of one batch of episodes, and their mean score."""
    tokens = game.begin(groups, GROUP)[:, None]
    score = none = torch.zeros(len(tokens))
    alive = none == 0
    columns = [(alive, ~alive, none, none, -1)]
    for turn in range(game.turns):
        for _ in range(game.tokens):
            said = policy(tokens)[:, -1].log_softmax(-1)
            token = said.exp().multinomial(1)
            tokens = torch.cat([tokens, token], -1)
            columns.append((alive, alive, said.gather(-1, token)[:, 0], none, turn))
        reward, gained, done, answer = game.step(tokens[:, -game.tokens :], turn)
        columns[-1] = (*columns[-1][:3], reward * alive, turn)
        score = score + gained * alive
        alive = alive & ~done
        tokens = torch.cat([tokens, answer[:, None]], -1)
        columns.append((alive, torch.zeros_like(alive), none, none, -1))
    *entries, turns = zip(*columns, strict=True)
    attended, mask, log_probs, rewards = (torch.stack(entry, -1) for entry in entries)
    rows = TensorDict(batch_size=[len(tokens)])
    rows["tokens", "full"], rows["rewards", "full"] = tokens, rewards
    rows["masks"] = {"all_attention_mask": attended, "all_assistant_mask": mask}
    rows["log_probs", "full"] = log_probs * mask
    rows["turns", "full"] = torch.where(mask, torch.tensor(turns), -1)
    rows["episode"] = torch.arange(len(rows))
    rows["group"] = rows["episode"] // GROUP
    return rows, float(score.mean())


def learn(game: Any, seed: int, args: argparse.Namespace, **choice: Any) -> list[float]:
    """Shares of the best score, every second update."""
    torch.manual_seed(seed)
    policy, sampler = (Reader(game, game.vocabulary, game.hidden) for _ in range(2))
    advantage, lag = choice.pop("advantage", "turn"), choice.pop("lag", 0)
    old = choice.pop("old_log_probs", "sampler")
    critic = Reader(game, 1, False) if advantage in CRITIC_KINDS else None
    maker = ExperienceMaker(policy, advantage=advantage, critic=critic, old_log_probs=old)
    module = MultiTurnLoss(policy, critic=critic, **choice)
    optimizer = torch.optim.Adam(module.parameters(), lr=game.lr)
    versions: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    curve = []
    for update in range(1, (args.updates or (18 if lag else game.updates)) + 1):
        versions.append({name: value.clone() for name, value in policy.state_dict().items()})
        sampler.load_state_dict(versions[0])
        rows = maker(play(game, sampler, EPISODES // GROUP)[0])
        for _ in range(args.steps):
            losses = module(rows)
            optimizer.zero_grad()
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            optimizer.step()
        if update % EVERY == 0:
            curve.append(play(game, policy, EVALUATED // GROUP)[1] / game.best)
    return curve


def cells(games: Any, args: argparse.Namespace, **choice: Any) -> Iterator[str]:
    """The summary of all seeds, for each game."""
    for game in games:
        curves = [learn(game(), seed, args, **choice) for seed in range(args.seeds)]
        ends = [curve[-1] for curve in curves]
        reached = [[n for n, x in enumerate(curve, 1) if x >= 0.95][:1] for curve in curves]
        steps = f"{EVERY * sum(n for (n,) in reached) / len(curves):.0f}" if all(reached) else "-"
        yield f"{sum(ends) / len(ends):.2f}/{min(ends):.2f} @ {steps}"


GAMES = Guess, Orders, Tool, StopOrGo, Jackpots
LATE = "turn", "max_rl"


def advantages(args: argparse.Namespace) -> Iterator[Row]:
    for kind in ADVANTAGE_KINDS:
        if kind not in ("gdpo", "reinforce++"):  # The same here as "grpo" and "batch".
            yield f'``"{kind}"``', *cells(GAMES, args, advantage=kind)


def objectives(args: argparse.Namespace) -> Iterator[Row]:
    for name in OBJECTIVES:
        if name not in ("sft", "decoupled_ppo"):  # The second needs old_log_probs="actor".
            late = {"objective": name, "lag": LAG}
            old = [c for kind in LATE for c in cells([Orders], args, advantage=kind, **late)]
            yield f'``"{name}"``', *cells([Guess], args, objective=name), *old


def aggregations(args: argparse.Namespace) -> Iterator[Row]:
    for name in get_args(Aggregation):
        yield f'``"{name}"``', *cells((Guess, StopOrGo), args, aggregation=name)


def corrections(args: argparse.Namespace) -> Iterator[Row]:
    yield '``"sampler"``', *cells([Orders], args, lag=LAG)
    for name in (None, *CORRECTIONS):
        label = f'``"actor"``, ``"{name}"``' if name else '``"actor"``'
        choice = {"lag": LAG, "correction": name, "old_log_probs": "actor"}
        yield label, *cells([Orders], args, **choice)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    every = "advantages,objectives,aggregations,corrections"
    parser.add_argument("--only", default=every, help="which tables, by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="default: each game's own number")
    parser.add_argument("--steps", type=int, default=3, help="gradient steps on each batch")
    parser.add_argument("--rst", type=Path, help="also write the tables for the documentation here")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # A solved game has advantages of 0.
    tables: dict[str, Any] = {
        "advantages": (advantages, "advantage", *(game.__name__ for game in GAMES)),
        "objectives": (objectives, "objective", "Guess", *(f"4 old, {kind}" for kind in LATE)),
        "aggregations": (aggregations, "aggregation", "Guess", "StopOrGo"),
        "corrections": (corrections, "old policy, correction", "Orders, 4 old"),
    }
    parts = []
    for name in args.only.split(","):
        rows, first, *header = tables[name]
        widths = 30, *[70 // len(header)] * len(header)
        parts.append(Part((first, *header), widths, rows))
    show(parts, args, args.rst)


if __name__ == "__main__":
    main()
