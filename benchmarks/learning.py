"""Learning curves of advantages, objectives and corrections in small games of several turns.

A tiny model plays 128 episodes per update, in groups of 4 that share what is hidden. An action is one
token. Each cell has the mean reward of the last 15 updates as a share of the best player's: the seeds'
mean, the worst seed, and the updates until the mean was 95 % five times in a row. In "stale", the
sampler's weights are four updates old.

    OMP_NUM_THREADS=1 python benchmarks/learning.py
    OMP_NUM_THREADS=1 python benchmarks/learning.py --only objectives --seeds 5
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tables import Part, Row, show
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, ValueModel
from torchrl_mt.objectives.credit import CRITIC_KINDS

EPISODES, GROUP, NUMBERS, SIZE, LR = 128, 4, 4, 10, 3e-3
HIGHER, LOWER, START, CALL, NOTHING = range(NUMBERS, NUMBERS + 5)
"""Tokens after the numbers 0 to 3."""

State = dict[str, Tensor]


class Game(NamedTuple):
    """A game: what is hidden in each episode, and what the environment says and pays."""

    turns: int
    best: float
    """Mean reward of the best player."""
    hide: Callable[[Callable[[], Tensor]], State]
    """From a function that draws a number for each group."""
    say: Callable[[State, int, Tensor | None], Tensor]
    """Token before a turn, from the last action."""
    pay: Callable[[State, int, Tensor], tuple[Tensor, Tensor]]
    """Reward, and whether the episode is over."""
    stale: int = 0
    """Updates by which the sampler's weights are old."""


def guess_says(state: State, turn: int, action: Tensor | None) -> Tensor:
    if action is None:
        return torch.full_like(state["number"], START)
    return torch.where(action < state["number"], HIGHER, LOWER)


def guess_pays(state: State, turn: int, action: Tensor) -> tuple[Tensor, Tensor]:
    right = action == state["number"]
    return right * (1 - 0.1 * turn), right


def tool_says(state: State, turn: int, action: Tensor | None) -> Tensor:
    if turn != 1 or action is None:
        return torch.full_like(state["number"], START)
    return torch.where(action == CALL, state["number"], NOTHING)


def tool_pays(state: State, turn: int, action: Tensor) -> tuple[Tensor, Tensor]:
    state.setdefault("called", action == CALL)
    right = state["called"] & (action == state["number"]) & (turn == 1)
    return right.float(), torch.zeros_like(right)


def copies_say(state: State, turn: int, action: Tensor | None) -> Tensor:
    return state[f"number{turn}"]


def copies_pay(state: State, turn: int, action: Tensor) -> tuple[Tensor, Tensor]:
    right = action == (state[f"number{turn}"] + 3) % NUMBERS
    return right.float(), torch.zeros_like(right)


def jackpots_pay(state: State, turn: int, action: Tensor) -> tuple[Tensor, Tensor]:
    reward, over = copies_pay(state, turn, action)
    return reward * torch.where(torch.rand(len(action)) < 0.01, 100.0, 1.0), over


def one(draw: Callable[[], Tensor]) -> State:
    return {"number": draw()}


def each_turn(draw: Callable[[], Tensor]) -> State:
    return {f"number{turn}": draw() for turn in range(3)}


GUESS = Game(3, (1 + 2 * 0.9 + 0.8) / 4, one, guess_says, guess_pays)
GAMES = {
    "guess": GUESS,
    "turns": Game(3, 3.0, each_turn, copies_say, copies_pay),
    "tool": Game(2, 1.0, one, tool_says, tool_pays),
    "jackpots": Game(3, 3.0 * 1.99, each_turn, copies_say, jackpots_pay),
    "stale": GUESS._replace(stale=4),
}
FEW = ("guess", "tool", "stale")


@torch.no_grad()
def play(game: Game, model: nn.Module) -> tuple[TensorDict, float]:
    """Rows of a batch of episodes, and their mean reward without luck."""
    state = game.hide(lambda: torch.randint(NUMBERS, (EPISODES // GROUP,)).repeat_interleave(GROUP))
    tokens = torch.empty(EPISODES, 0, dtype=torch.long)
    alive, action, said = torch.ones(EPISODES, dtype=torch.bool), None, []
    columns: dict[str, list[Tensor]] = {"log_prob": [], "reward": [], "alive": []}
    for turn in range(game.turns):
        said = game.say(state, turn, action)[:, None]
        tokens = torch.cat([tokens, said], 1)
        log_probs = model(input_ids=tokens).logits[:, -1].log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1)[:, 0]
        reward, over = game.pay(state, turn, action)
        tokens = torch.cat([tokens, action[:, None]], 1)
        columns["log_prob"].append(log_probs.gather(1, action[:, None])[:, 0] * alive)
        columns["reward"].append(reward * alive)
        columns["alive"].append(alive)
        alive = alive & ~over

    def spread(name: str) -> Tensor:
        """On the actions' tokens, zero on the environment's."""
        value = torch.stack(columns[name], 1)
        return torch.stack([torch.zeros_like(value), value], -1).flatten(1)

    lived = torch.stack(columns["alive"], 1).repeat_interleave(2, 1)
    mask = spread("alive")
    rows = TensorDict(
        {
            "tokens": {"full": torch.where(lived, tokens, 0)},
            "masks": {"all_attention_mask": lived, "all_assistant_mask": mask},
            "log_probs": {"full": spread("log_prob")},
            "rewards": {"full": spread("reward").float()},
            "turns": {"full": torch.where(mask, torch.arange(2 * game.turns) // 2, -1)},
            "episode": torch.arange(EPISODES),
            "group": torch.arange(EPISODES) // GROUP,
        },
        [EPISODES],
    )
    mean = float(torch.stack(columns["reward"], 1).clamp(max=1).sum(1).mean())
    return rows, mean * (1.99 if game.pay is jackpots_pay else 1.0)


def tiny_model() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


def learn(
    game: Game, seed: int, updates: int, maker: dict[str, Any], loss: dict[str, Any]
) -> list[float]:
    """The mean reward of each update as a share of the best player's."""
    torch.manual_seed(seed)
    model = tiny_model()
    critic = None
    if maker.get("advantage") in CRITIC_KINDS:
        critic = ValueModel.from_model(tiny_model())
    make = ExperienceMaker(model, critic=critic, **maker)
    loss_module = MultiTurnLoss(model, critic=critic, **loss)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LR)
    old = deque([copy.deepcopy(model)], maxlen=game.stale + 1)
    curve = []
    for _ in range(updates):
        rows, share = play(game, old[0] if game.stale else model)
        curve.append(share / game.best)
        rows = make(rows)
        for batch in rows[torch.randperm(len(rows))].split(EPISODES // 2):
            losses = loss_module(batch)
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if game.stale:
            old.append(copy.deepcopy(model))
    return curve


def cell(args: argparse.Namespace, game: str, maker: Any, loss: Any) -> str:
    """Share of the best, the worst seed's, and the updates to 95 %."""
    curves = [learn(GAMES[game], seed, args.updates, maker, loss) for seed in range(args.seeds)]
    ends = [statistics.mean(curve[-15:]) for curve in curves]
    mean = [statistics.mean(each) for each in zip(*curves, strict=True)]
    runs = (k for k in range(len(mean) - 4) if min(mean[k : k + 5]) >= 0.95)
    return f"{statistics.mean(ends):.2f} ({min(ends):.2f}) {next(runs, '–')}"


KINDS = (
    "turn", "grpo", "dr_grpo", "rloo", "reinforce_baseline", "max_rl", "opo", "pass_at_k", "gigpo",
    "batch", "gae", "turn_gae", "bilevel_gae",
)  # fmt: skip
OBJECTIVES = (
    "ppo", "cispo", "gspo", "gspo_token", "gmpo", "sapo", "reinforce", "dppo_tv", "dppo_kl", "vespo",
    "clip_cov", "kl_cov",
)  # fmt: skip
CORRECTIONS = (None, "token_tis", "sequence_tis", "icepop", "sequence_mis", "geometric", "m2po")


def advantages(args: argparse.Namespace) -> Iterator[Row]:
    for kind in KINDS:
        yield f'``"{kind}"``', *(cell(args, game, {"advantage": kind}, {}) for game in GAMES)


def objectives(args: argparse.Namespace) -> Iterator[Row]:
    for name in OBJECTIVES:
        yield f'``"{name}"``', *(cell(args, game, {}, {"objective": name}) for game in FEW)
    for name in ("seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"):
        yield f'``"{name}"``', *(cell(args, game, {}, {"aggregation": name}) for game in FEW)


def corrections(args: argparse.Namespace) -> Iterator[Row]:
    for name in CORRECTIONS:
        maker = {"old_log_probs": "actor"}
        said = "none" if name is None else f'``"{name}"``'
        yield f"the actor's, {said}", cell(args, "stale", maker, {"correction": name})
    yield "the sampler's", cell(args, "stale", {}, {})
    yield (
        'the sampler\'s, ``"decoupled_ppo"``',
        cell(args, "stale", {"old_log_probs": "actor"}, {"objective": "decoupled_ppo"}),
    )


PARTS = {
    "advantages": Part(("advantage", *GAMES), (20, 16, 16, 16, 16, 16), advantages),
    "objectives": Part(("objective or aggregation", *FEW), (40, 20, 20, 20), objectives),
    "corrections": Part(("old log-probabilities, correction", "stale"), (60, 40), corrections),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()
    show([PARTS[name] for name in args.only], args, args.rst)


if __name__ == "__main__":
    main()
