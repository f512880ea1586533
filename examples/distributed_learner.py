"""Train one language model with several processes (ranks), DDP or FSDP2, on one rank's episodes.

Rank 0 plays the game of ``guess_number.py`` with a copy of the model and divides the rows among the
ranks. Each update is the one that a single process would make: run it alone, and compare. With seed 0,
the reward of an update's games rises from 0.02 to 0.98 of 1.

    python examples/distributed_learner.py    # --resume goes on with a run that was stopped
    torchrun --nproc-per-node 2 examples/distributed_learner.py --parallel fsdp
    accelerate launch --multi_gpu --num_processes 2 examples/distributed_learner.py

On a machine without GPUs the ranks use gloo; ``--multi_gpu`` makes accelerate start them even there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrl.data import ReplayBuffer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, micro_batches, split_rows
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import RunLog, plot_run

NUMBERS, TURNS = 4, 3
EPISODES_PER_UPDATE = 128
GROUP_SIZE = 8
MICRO_BATCH_TOKENS = 2048
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered from all ranks
WORDS = ["guess", "to", "higher", "lower", "correct", "invalid"]


def train(args: argparse.Namespace) -> None:
    """Play on rank 0 and learn on all ranks, in turns."""
    world = dist.group.WORLD  # None if this process is alone
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if world else (0, 1)
    torch.manual_seed(args.seed)  # all ranks build the same model
    model, tokenizer = tiny_chat_model([*WORDS, *map(str, range(1, NUMBERS + 1))])
    game = Game(model, tokenizer, args) if rank == 0 else None  # before the model is divided
    actor = parallel(model.to(args.device), args.parallel) if world else model

    maker = ExperienceMaker(
        actor,
        advantage="grpo",
        old_log_probs="actor",
        passes=Passes(micro_batch_tokens=MICRO_BATCH_TOKENS),
        process_group=world,  # statistics are those of all ranks' rows
    )
    loss_module = MultiTurnLoss(actor, clip_epsilon=0.2, entropy_coef=0.003)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0)

    saved: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "collector": {}}
    checkpoint = RunCheckpoint(args.out / "checkpoints")  # rank 0 saves, and all ranks restore
    done = checkpoint.restore(**saved) or 0
    if done:
        if game:
            game.collector.update_policy_weights_(saved["model"])
            game.collector.load_state_dict(saved["collector"])
        own = {"model_state_dict": {**saved["model"]}, "optim_state_dict": saved["optimizer"]}
        states.set_state_dict(actor, optimizer, **own, options=WHOLE)  # each rank takes its part

    for update in range(done + 1, args.updates + 1):
        rows = maker(scatter(game.play() if game else None, rank, ranks).to(args.device))
        total = loss_module.total(rows, process_group=world)
        for batch in micro_batches(
            rows, passes=Passes(micro_batch_tokens=MICRO_BATCH_TOKENS), process_group=world
        ):
            losses = loss_module(batch, total=total)
            # DDP and FSDP average gradients over the ranks: the sum is wanted.
            (ranks * (losses["loss_objective"] + losses["loss_entropy"])).backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        saved["model"], saved["optimizer"] = states.get_state_dict(actor, optimizer, options=WHOLE)
        if game:
            game.collector.update_policy_weights_(saved["model"])
            saved["collector"] = game.collector.state_dict()
            reward = maker.metrics["reward/default/mean"]
            print(f"update {update}: reward {reward:.3f}, {len(rows)} rows on rank 0")
            game.log.log(update, game.collector.stats(), maker.metrics)
            game.log.episodes(update, game.buffer, tokenizer)  # a page, every ten updates
            checkpoint.save(update, **saved)
    if game:
        torch.save(saved["model"], args.out / "weights.pt")
        print(f"written to {args.out / 'weights.pt'}")
        game.close()
        with contextlib.suppress(ImportError):  # matplotlib is an extra
            print(f"curves: {plot_run(args.out)}")


class Game:
    """Episodes of the game, played with a copy of the model, as training rows."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
    ) -> None:
        self.engine = TransformersEngine(model, tokenizer, share_weights=False)
        self.buffer = ReplayBuffer(
            storage=EpisodeStorage(EPISODES_PER_UPDATE * TURNS),
            writer=EpisodeWriter(),
            sampler=EpisodeSampler(replacement=False),
            transform=MergeTurns(pad_token_id=tokenizer.pad_token_id),
            batch_size=EPISODES_PER_UPDATE,
        )
        self.collector = MultiTurnCollector(
            GuessNumber(NUMBERS, TURNS),
            self.engine,
            GuessNumber.data(numbers=NUMBERS, seed=args.seed),
            episodes_per_batch=EPISODES_PER_UPDATE,
            group_size=GROUP_SIZE,
            total_episodes=args.updates * EPISODES_PER_UPDATE,
            limits=Limits(max_turns=TURNS, max_response_tokens=2),
            sampling={"seed": args.seed},
            replay_buffer=self.buffer,
        )
        self.batches: Iterator[None] = iter(self.collector)
        self.log = RunLog(args.out, loggers=(), config=args, progress=False)

    def play(self) -> TensorDictBase:
        """Play the episodes of one update with the current weights."""
        self.buffer.empty()
        next(self.batches)
        return self.buffer.sample()

    def close(self) -> None:
        self.collector.shutdown()
        self.engine.close()
        self.log.close()


def parallel(model: PreTrainedModel, kind: str) -> nn.Module:
    """The model as one that all ranks train."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def scatter(rows: TensorDictBase | None, rank: int, ranks: int) -> TensorDictBase:
    """Each rank's part of the rows, which rank 0 gives: whole groups, about as many tokens."""
    parts = split_rows(rows, ranks, keep="group") if rows is not None else None
    mine: list[TensorDictBase | None] = [parts[0] if parts else None]
    if ranks > 1:
        dist.scatter_object_list(mine, parts, src=0)
    return mine[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    parser.add_argument(
        "--parallel",
        choices=["ddp", "fsdp"],
        default="fsdp" if fsdp else "ddp",
        help="how several ranks train one model; by default as accelerate's config says",
    )
    parser.add_argument("--updates", type=int, default=60, help="rounds of play and training")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="each rank has its own")
    parser.add_argument("--out", type=Path, default=Path("runs/distributed_learner"), help="folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    args = parser.parse_args(argv)
    if args.updates < 1:
        parser.error(f"--updates must be at least 1, got {args.updates}")
    if not args.resume and (args.out / "checkpoints").exists():
        parser.error(f"--out: {args.out} has a run: --resume goes on with it")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    if args.device == "cuda":
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(args.device)
    if "RANK" in os.environ:  # a launcher started several processes
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    try:
        train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
