"""Train a real language model on dialogues from disk, and then on dialogues of its own.

A customer writes to a shop. The model asks for the order number where it is missing, and then writes a
ticket: what to do, with what, for which order. A scripted expert has left dialogues in a file of JSON
lines. The model imitates some of them, and then learns from the reward of its own dialogues: 1 for the
right ticket. It is evaluated on goods that it never saw.

Measured with SmolLM2-135M-Instruct on one core, 3.4 GiB of memory:

    seed | right before | after the dialogues on disk | after | NLL of plain text | CPU seconds
       0 |         0.00 |                        0.62 |  0.91 |      3.65 -> 3.79 |         643
       1 |         0.00 |                        0.72 |  1.00 |      3.65 -> 3.72 |         596
       2 |         0.00 |                        0.47 |  0.84 |      3.65 -> 3.81 |         614

The sampling of these runs was seeded in another way than today; their program is the same.

    pip install 'torchrl-mt[lora]'
    python examples/offline_dialogues.py    # --resume goes on with a run that was stopped
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchrl_mt import pretrained
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.datasets import ConversationDataset, RunCheckpoint, TrainedWeights
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import RunLog, plot_run, write_report

GOODS = ["lamp", "chair", "table", "mirror", "clock", "kettle", "hammer", "radio", "camera"]
UNSEEN_GOODS = ["pillow", "bottle", "ladder", "shovel", "helmet", "wallet"]
LETTERS = {
    "refund": ["I want a refund for my {}.", "I send the {} back, please pay me."],
    "repair": ["Can you repair my {}?", "My {} is broken, please mend it."],
    "cancel": ["Please cancel the {}.", "I ordered the {} by mistake."],
}
SYSTEM = (
    "Ask for the order number if it is missing. Then write: refund, repair or cancel, item, number."
)


class Desk(TextEnv):
    """A customer, who answers once and then expects the ticket."""

    inline = True

    def reset(self, data: dict[str, Any]) -> list[dict[str, str]]:
        self.data, self.knows_number = data, data["number"] in data["letter"]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": data["letter"]},
        ]

    def step(self, response: str) -> TextStep:
        if "number" in response and not self.knows_number:
            self.knows_number = True
            return TextStep([{"role": "user", "content": f"It is {self.data['number']}."}])
        return TextStep(reward=float(response.strip() == ticket(self.data)), done=True)


def ticket(data: dict[str, Any]) -> str:
    """What the model is to write in the end."""
    return f"{data['wish']} {data['good']} {data['number']}"


def customers(goods: list[str], seed: int) -> Iterator[dict[str, Any]]:
    """Endless items; half of the letters have the number of the order."""
    rng = random.Random(seed)
    while True:
        wish, good, number = (
            rng.choice(list(LETTERS)),
            rng.choice(goods),
            str(rng.randint(100, 999)),
        )
        letter = rng.choice(LETTERS[wish]).format(good) + rng.choice(["", f" Order {number}."])
        yield {"letter": letter, "wish": wish, "good": good, "number": number}


def write_dialogues(path: Path, items: Iterator[dict[str, Any]]) -> None:
    """Let the expert answer customers, and write the dialogues to a file, one per line."""
    with path.open("w", encoding="utf-8") as file:
        for data in items:
            env, done = Desk(), False
            messages = env.reset(data)
            while not done:
                said = ticket(data) if env.knows_number else "What is the order number?"
                step = env.step(said)
                messages += [{"role": "assistant", "content": said}, *step.messages]
                done = step.done
            file.write(json.dumps({"messages": messages}) + "\n")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if not args.resume and (args.out / "checkpoints").exists():
        raise FileExistsError(f"--out has a run, {args.out}: --resume goes on with it.")
    torch.manual_seed(args.seed)
    policy = pretrained.load(args.model, device=args.device)
    model, tokenizer, optimizer = policy.model, policy.tokenizer, policy.optimizer
    engine = TransformersEngine(model, tokenizer)
    collector = MultiTurnCollector(
        Desk(),
        engine,
        customers(GOODS, args.seed),
        episodes_per_batch=args.episodes,
        total_episodes=args.updates * args.episodes,
        limits=Limits(max_turns=3, max_response_tokens=12),
        sampling={"seed": args.seed, "stop": ["\n"]},
        postproc=MergeTurns(pad_token_id=tokenizer.pad_token_id),
    )

    def step(losses: Any) -> None:
        losses["loss_objective"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    held_out = list(itertools.islice(customers(UNSEEN_GOODS, 2**32), args.held_out))
    parts = {"trained": TrainedWeights(model), "optimizer": optimizer, "collector": collector}
    parts["results"] = results = dict[str, float]()
    checkpoint = RunCheckpoint(args.out / "checkpoints")
    done = checkpoint.restore(**parts) or 0
    if not done:
        results["nll_before"] = policy.plain_text_nll()
        results["before"] = evaluate(collector, held_out, args.out / "before.html")
        # The dialogues on disk: their answers become likelier.
        with tempfile.TemporaryDirectory() as folder:
            path = args.dialogues or Path(folder, "dialogues.jsonl")
            if not args.dialogues:
                write_dialogues(path, itertools.islice(customers(GOODS, args.seed + 1), 200))
            dataset = ConversationDataset(path, tokenizer)
            loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=dataset.collate)
            imitation = MultiTurnLoss(model, objective="sft")
            for rows in itertools.islice(loader, args.sft_steps):
                step(losses := imitation(rows.to(args.device)))
                print(f"supervised: loss {losses['loss_objective'].item():.2f}")
        optimizer.state.clear()  # Adam's averages are of larger gradients than those to come
        collector.update_policy_weights_(model)
        evaluate(collector, held_out, args.out / "supervised.html")

    # Dialogues of its own: what had a higher reward than the rest becomes likelier.
    maker = ExperienceMaker(model, advantage="turn")
    loss_module = MultiTurnLoss(model, objective="ppo", clip_epsilon=0.2)
    with RunLog(args.out, loggers=(), config=args, progress=False) as log:
        for update, rows in enumerate(collector, done + 1):
            rows = maker(rows.to(args.device))
            for _ in range(2):
                step(losses := loss_module(rows))
            collector.update_policy_weights_(model)
            share = rows["rewards", "full"].sum().item() / args.episodes
            print(f"update {update}: {share:.2f} of the tickets are right")
            log.log(update, collector.stats(), maker.metrics, losses.select("entropy"))
            checkpoint.save(update, **parts)
    results["after"] = evaluate(collector, held_out, args.out / "after.html")
    results["nll_after"] = policy.plain_text_nll()
    collector.shutdown()
    engine.close()
    try:
        print(f"curves: {plot_run(args.out)}")
    except ImportError as error:
        print(f"no curves: {error}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.process_time():.0f} CPU seconds, {memory:.1f} GiB")
    print(
        "right before {before:.2f} after {after:.2f}, "
        "plain text nll {nll_before:.2f} -> {nll_after:.2f}".format(**results)
    )


def evaluate(collector: MultiTurnCollector, items: list[dict[str, Any]], page: Path) -> float:
    """Play items, write them to a page, and return the share of right tickets."""
    played = collector.evaluate(items)
    write_report(played, page, tokenizer=collector.engine.tokenizer)
    share = played["next", "reward"].sum().item() / len(items)
    print(f"{page.stem}: {share:.2f} right on goods that were never seen ({page})")
    return share


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/offline_dialogues"), help="folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument(
        "--dialogues", type=Path, help="JSON lines to imitate (an expert writes some)"
    )
    parser.add_argument("--sft-steps", type=int, default=20, help="each with 8 dialogues from disk")
    parser.add_argument("--updates", type=int, default=14)
    parser.add_argument("--episodes", type=int, default=32, help="dialogues of an update")
    parser.add_argument("--held-out", type=int, default=32, help="dialogues of an evaluation")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
