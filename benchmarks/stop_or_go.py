"""What each kind of advantage learns in a game whose turns share all parameters of the policy.

At each turn the policy stops or goes on. Stopping at turn k pays 10, 0, 1, 2, 3, never stopping pays 4.
The policy does not see the turn: its one parameter is the logit of going on. *Slope* is the expected
step of the logit at p = 0.7, summed over an episode. It should be negative: stopping at once pays most.
*Return* is the expected return at the end of training from p = 0.65, for each seed.

    OMP_NUM_THREADS=1 python benchmarks/stop_or_go.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tables import Part, Row, show
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_mt.objectives import ExperienceMaker
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS, CRITIC_KINDS
from torchrl_mt.objectives.functional import aggregate, group_advantage
from torchrl_mt.objectives.functional.time.episodes import index_turns
from torchrl_mt.testing import tiny_chat_model

PAYS = torch.tensor([10.0, 0.0, 1.0, 2.0, 3.0, 4.0])
TURNS = len(PAYS) - 1
EPISODES, GROUP, SEEDS = 64, 8, 3
MODEL = tiny_chat_model("never called")[0]
"""The maker needs an actor, but takes the sampler's log-probabilities (all kinds but ``"otb"``)."""


def shares(p: Tensor) -> Tensor:
    """Probabilities of going on 0 to 5 times, ``[6]``."""
    k = torch.arange(TURNS + 1)
    return p**k * torch.where(k < TURNS, 1 - p, 1.0)


def expected_return(logit: Tensor) -> Tensor:
    return shares(logit.sigmoid()) @ PAYS


class Values(nn.Module):
    """The exact critic: the value of each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.value = PAYS.clone()

    def learn(self, p: float) -> None:
        for k in range(TURNS - 1, -1, -1):
            self.value[k] = (1 - p) * PAYS[k] + p * self.value[k + 1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.value[input_ids]


def rows_of(goes: Tensor) -> TensorDict:
    """Rows of a prompt and one token a turn, from how often each episode goes on ``[N]``."""
    turn = torch.arange(-1, TURNS).expand(len(goes), -1)
    last = goes.clamp(max=TURNS - 1)[:, None]
    sampled = (turn >= 0) & (turn <= last)
    return TensorDict(
        {
            "tokens": {"full": turn + 1},
            "masks": {"all_attention_mask": turn <= last, "all_assistant_mask": sampled},
            "log_probs": {"full": torch.zeros(turn.shape)},
            "turns": {"full": torch.where(sampled, turn, -1)},
            "rewards": {"full": torch.where(turn == last, PAYS[goes][:, None], 0.0)},
            "episode": torch.arange(len(goes)),
            "group": torch.arange(len(goes)) // GROUP,
        },
        [len(goes)],
    )


class Learner:
    """Makes steps of the logit from batches of episodes."""

    def __init__(self, advantage: Any) -> None:
        self.critic = Values()
        critic = self.critic if advantage in CRITIC_KINDS else None
        self.maker = ExperienceMaker(MODEL, advantage=advantage, critic=critic)

    def step(self, logit: Tensor, goes: Tensor) -> Tensor:
        """A step from how often each episode of a batch goes on, ``[N]``."""
        self.critic.learn(float(logit.sigmoid()))
        rows = rows_of(goes)
        advantage = self.maker(rows)["advantage"].squeeze(-1)
        went = rows["turns", "full"] < goes[:, None]
        score = went.float() - logit.sigmoid()  # The slope of the action's log-probability.
        return aggregate(advantage * score, rows["masks", "all_assistant_mask"])


def slope(advantage: Any, p: float = 0.7, episodes: int = 20_000) -> float:
    """The step without sampling noise, from each episode as often as it is expected."""
    goes = torch.arange(TURNS + 1).repeat_interleave(
        (episodes * shares(torch.tensor(p))).round().long()
    )
    goes = goes[torch.randperm(len(goes), generator=torch.Generator().manual_seed(0))]
    turns = (goes + 1).clamp(max=TURNS).double().mean()
    return float(turns * Learner(advantage).step(torch.logit(torch.tensor(p)), goes))


def learned(advantage: Any, seed: int, updates: int, lr: float) -> float:
    """The expected return after training."""
    generator = torch.Generator().manual_seed(seed)
    logit = torch.logit(torch.tensor(0.65)).requires_grad_()
    optimizer = torch.optim.Adam([logit], lr=lr)
    learner = Learner(advantage)
    for _ in range(updates):
        uniform = torch.rand(EPISODES, TURNS, generator=generator)
        goes = (uniform < logit.detach().sigmoid()).long().cumprod(-1).sum(-1)
        logit.grad = -learner.step(logit.detach(), goes)
        optimizer.step()
    return float(expected_return(logit.detach()))


def std_for_each_turn(rows: TensorDictBase) -> Tensor:
    """Returns whitened among the turns of one id, with a standard deviation for each id."""
    index = index_turns(rows["masks", "all_assistant_mask"], rows["turns", "full"])
    return index.write(group_advantage(index.read(rows["returns"]), index.turn, "grpo"))


def lines(args: argparse.Namespace) -> Iterator[Row]:
    logit = torch.logit(torch.tensor(0.7)).requires_grad_()
    (exact,) = torch.autograd.grad(expected_return(logit), logit)
    yield "the gradient of the expected return", f"{exact:+.2f}", *["at best 10"] * SEEDS
    # The others are here the same as "batch" and "turn_gae".
    kinds = [kind for kind in ADVANTAGE_KINDS if kind not in ("reinforce++", "bilevel_gae")]
    contenders: dict[str, Any] = {f'``"{kind}"``': kind for kind in kinds}
    contenders["a standard deviation for each turn id"] = std_for_each_turn
    for name, advantage in contenders.items():
        ends = [learned(advantage, seed, args.updates, args.lr) for seed in range(SEEDS)]
        yield name, f"{slope(advantage):+.2f}", *(f"{end:.2f}" for end in ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of Adam")
    parser.add_argument("--rst", type=Path, help="also write the table for the documentation here")
    args = parser.parse_args()
    header = "advantage", "slope at 0.7", *(f"return, seed {seed}" for seed in range(SEEDS))
    show([Part(header, (40, 15, 15, 15, 15), lines)], args, args.rst)


if __name__ == "__main__":
    main()
