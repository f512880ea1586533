"""Train a language model to play a multi-turn game by reinforcement learning.

The model guesses a hidden number, and each reply is "higher", "lower" or "correct". Finding the number
at turn k returns 0.9 ** (k - 1). The best expected return is known, so the run ends with the share of it
that the model reached.

Without ``--model``, the program builds a small model and tokenizer, and teaches the model the rules on
random games. From then on, the model learns from the game's replies alone.

A pretrained chat model is told the rules by an example, and trains LoRA adapters with settings of its
own (``REAL``): 1 to 8 in four turns, which the best player always wins. Measured with
SmolLM2-135M-Instruct on one core, 3.8 GiB of memory:

    seed | won before | after | NLL of plain text | CPU seconds
       0 |       0.34 |  0.70 |      3.65 -> 3.64 |         382
       1 |       0.34 |  0.80 |      3.65 -> 3.65 |         367
       2 |       0.47 |  0.72 |      3.65 -> 3.64 |         397

    python examples/guess_number.py
    python examples/guess_number.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_mt import pretrained
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.datasets import ConversationDataset, RunCheckpoint
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber, optimal_return, play_guess_number
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns
from torchrl_mt.view import RunLog, plot_run, write_report

GAMMA = 0.9
CONCURRENCY = 64
MAX_RESPONSE_TOKENS = 8
WORDS = ["guess", "to", "higher", "lower", "correct", "invalid"]
SMALL: dict[str, Any] = {
    "numbers": 16,
    "turns": 5,
    "updates": 150,
    "episodes": 128,
    "epochs": 2,
    "eval_episodes": 1024,
    "lr": 1e-3,
    "entropy_coef": 0.003,
    "prompt": "guess 1 to {numbers}",
    "stop": [],
}
"""Settings of the small model."""
ROLES = ("user", "assistant") * 3 + ("user",)
GAME = ("I think of a number from 1 to {numbers}. Guess it.", "2", "higher", "4", "lower", "3")
REAL: dict[str, Any] = {
    "numbers": 8,
    "turns": 4,
    "updates": 10,
    "episodes": 32,
    "epochs": 1,
    "eval_episodes": 64,
    "lr": None,  # as suits the model: see torchrl_mt.pretrained
    "entropy_coef": None,
    "prompt": [
        {"role": role, "content": content}
        for role, content in zip(ROLES, (*GAME, "correct. " + GAME[0]), strict=True)
    ],
    "stop": ["\n"],
}
"""Settings of a pretrained model, whose prompt shows a whole game."""


def train(args: argparse.Namespace) -> dict[str, float]:
    """Alternate between collecting episodes and training on them; return the scores."""
    if args.checkpoints:
        check_same_arguments(args)
    torch.manual_seed(args.seed)
    if args.model:
        policy = pretrained.load(args.model, lr=args.lr, device=args.device)
        model, tokenizer, optimizer = policy.model, policy.tokenizer, policy.optimizer
        nll = policy.plain_text_nll()
    else:
        torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
        model, tokenizer = tiny_chat_model([*WORDS, *map(str, range(1, args.numbers + 1))])
        optimizer = adamw(model.to(args.device), args.lr)

    env = GuessNumber(args.numbers, args.turns, prompt=args.prompt)
    limits = Limits(max_turns=args.turns, max_response_tokens=MAX_RESPONSE_TOKENS)
    engine = TransformersEngine(model, tokenizer)
    buffer = ReplayBuffer(
        storage=EpisodeStorage(args.episodes * args.turns),
        writer=EpisodeWriter(transform=DiscountedReturn(GAMMA)),
        sampler=EpisodeSampler(replacement=False),
        transform=MergeTurns(pad_token_id=tokenizer.pad_token_id),
        batch_size=args.episodes,
    )
    collector = MultiTurnCollector(
        env,
        engine,
        GuessNumber.data(numbers=args.numbers, seed=args.seed),
        episodes_per_batch=args.episodes,
        total_episodes=args.updates * args.episodes,
        max_concurrency=CONCURRENCY,
        limits=limits,
        sampling={"seed": args.seed, "stop": args.stop},
        replay_buffer=buffer,
    )
    maker = ExperienceMaker(model, advantage="turn", gamma=GAMMA)
    loss_module = MultiTurnLoss(
        model, objective="ppo", clip_epsilon=0.2, entropy_coef=args.entropy_coef
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_decay(args.updates))
    optimum = optimal_return(args.numbers, args.turns, GAMMA)
    before, seconds = dict[str, float](), {"rollout": 0.0, "training": 0.0}
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "buffer": buffer}
    parts |= {"collector": collector, "maker": maker, "before": before, "seconds": seconds}
    checkpoint = RunCheckpoint(args.checkpoints) if args.checkpoints else None
    done = checkpoint.restore(**parts) if checkpoint else None
    if done is None:
        (args.out / "metrics.jsonl").unlink(missing_ok=True)  # of an earlier run
        if not args.model:
            warm_start(model, tokenizer, args)
        played = evaluate(collector, args)
        before |= scores(played)
        write_report(played, args.out / "before.html", tokenizer=tokenizer)
        print(
            f"start: return {before['return']:.3f}, success {before['success']:.3f} "
            f"(optimum {optimum:.3f})"
        )

    log = RunLog(args.out, loggers=(), config=args, total_steps=args.updates, progress=True)
    with log, contextlib.suppress(KeyboardInterrupt):
        start = time.perf_counter()
        for update, _ in enumerate(collector, (done or 0) + 1):
            collected = time.perf_counter()
            rows = maker(buffer.sample().to(args.device))
            for _ in range(args.epochs):
                for batch in rows[torch.randperm(len(rows))].split(len(rows) // 2):
                    losses = loss_module(batch)
                    sum(x for key, x in losses.items() if key.startswith("loss_")).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            schedule.step()
            collector.update_policy_weights_(model)
            last = losses.select("entropy", "clip_fraction")
            log.log(update, collector.stats(), maker.metrics, last, scores(buffer.storage[:]))
            buffer.empty()
            seconds["rollout"] += collected - start
            start = time.perf_counter()
            seconds["training"] += start - collected
            if checkpoint:
                checkpoint.save(update, **parts)

    stats = collector.stats()
    engine.update_weights(model)  # an interrupt may have come between a step and its update
    played = evaluate(collector, args)
    after = scores(played)
    page = write_report(played, args.out / "after.html", tokenizer=tokenizer)
    collector.shutdown()
    engine.close()
    print(f"return      {after['return']:.3f}  (before: {before['return']:.3f})")
    print(f"success     {after['success']:.3f}  (before: {before['success']:.3f})")
    print(f"optimum     {optimum:.3f}")
    print(f"of optimum  {after['return'] / optimum:.1%}")
    print(f"episodes    {stats['accepted']}")
    print(f"tokens      {stats['tokens']} generated")
    print(f"seconds     {seconds['rollout']:.0f} rollout, {seconds['training']:.0f} training")
    try:
        print(f"curves      {plot_run(args.out)}  (as a picture: run.png)")
    except ImportError as error:
        print(f"no curves   {error}")
    print(f"games       {page}  (before: {args.out / 'before.html'})")
    if args.model:
        print(
            f"right before {before['success']:.2f} after {after['success']:.2f}, "
            f"plain text nll {nll:.2f} -> {policy.plain_text_nll():.2f}"
        )
    return {"before": before["return"], "after": after["return"], "optimum": optimum}


def check_same_arguments(args: argparse.Namespace) -> None:
    """Write the arguments beside a new run's checkpoints; refuse others than an old run's."""
    free = ("checkpoints", "out", "device")
    own = {name: value for name, value in vars(args).items() if name not in free}
    file = args.checkpoints / "arguments.json"
    if not file.exists():
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(own), encoding="utf-8")
        unfinished.replace(file)  # whole or not at all
    began = json.loads(file.read_text(encoding="utf-8"))
    other = [f"{name}={value!r}" for name, value in began.items() if own.get(name) != value]
    if other:
        raise ValueError(
            f"--checkpoints: the run in {args.checkpoints} began with {', '.join(other)}: give the "
            "same arguments, or another folder."
        )


# Before reinforcement learning


def warm_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> None:
    """Teach the rules by imitating random players, who guess any number that the hints allow."""
    rng = random.Random(args.seed)

    def random_game() -> dict[str, Any]:
        """The messages of a game, up to the last guess."""
        number = rng.randint(1, args.numbers)
        game = play_guess_number(rng.randint, number, numbers=args.numbers, turns=args.turns)
        return {"messages": game.messages[:-1]}

    steps = args.warm_start_steps
    games = ConversationDataset([random_game() for _ in range(16 * steps)], tokenizer)
    rows = games.collate(list(games)).to(args.device)
    loss_module = MultiTurnLoss(model, objective="sft")
    optimizer = adamw(model, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_decay(steps))
    for _ in trange(steps, desc="warm start"):
        batch = rows[torch.randint(len(rows), (64,))]
        loss_module(batch)["loss_objective"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def adamw(model: PreTrainedModel, lr: float) -> torch.optim.Optimizer:
    """The optimizer of all weights of the small model."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)


def warmup_then_decay(steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: warmup over the first tenth, then decay to zero."""
    return lambda step: min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)


# Evaluation


def evaluate(collector: MultiTurnCollector, args: argparse.Namespace) -> TensorDictBase:
    """Play games whose hidden numbers are the same each time, and differ from the training's."""
    games = list(GuessNumber.data(args.eval_episodes, numbers=args.numbers, seed=2**32))
    size = 2 * CONCURRENCY
    starts = trange(0, len(games), size, desc="evaluation", unit="batch")
    played = torch.cat([collector.evaluate(games[i : i + size]) for i in starts])
    return DiscountedReturn(GAMMA)(played)


def scores(steps: TensorDictBase) -> dict[str, float]:
    """Mean discounted return and share of games won, of whole episodes with returns."""
    done = steps["next", "done"][:, 0]
    first = torch.cat([done.new_ones(1), done[:-1]])
    returns, rewards = steps["next", "return"][:, 0], steps["next", "reward"][:, 0]
    return {"return": returns[first].mean().item(), "success": (rewards.sum() / first.sum()).item()}


# The command line


def positive(text: str) -> int:
    """An argument that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    numbers = {
        "numbers": "the number is from 1 to this",
        "turns": "guesses a game allows",
        "updates": "rounds of play and training",
        "episodes": "games per update",
        "eval_episodes": "games to measure with",
    }
    for name, help in numbers.items():
        help += f" (default: {SMALL[name]}; with --model {REAL[name]})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=help)
    parser.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        help="a Hugging Face causal LM with a chat template; without it, a small model is built and "
        "taught the rules first",
    )
    parser.add_argument(
        "--prompt",
        help="what the model is told first; {numbers} is filled in. Default: as suits it",
    )
    parser.add_argument("--lr", type=float, help="learning rate. Default: as suits the model")
    parser.add_argument("--device", default="cpu", help="where the model lives (default: cpu)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/guess_number"), help="folder for the results"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save every update there; with the same arguments, a stopped run goes on from the last",
    )
    parser.add_argument(
        "--warm-start-steps",
        type=positive,
        default=300,
        help="steps of imitation, without --model (default: 300)",
    )
    args = parser.parse_args(argv)
    for name, value in (REAL if args.model else SMALL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    try:
        GuessNumber(args.numbers, args.turns, prompt=args.prompt)
    except ValueError as error:
        parser.error(f"--prompt: {error}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        parser.error(f"--device: cannot use {args.device}: {str(error).splitlines()[0]}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(f"--out: cannot write into {args.out}: {error.strerror}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        train(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
