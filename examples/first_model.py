"""Train a real language model for the first time: to call a function and to say what it returned.

A customer asks what something costs. The model writes ``price(lamp)``, is told what the function
returned, and says it. The prompt has one worked example; all else comes from the reward: 1 for the right
price, else 0. The model is evaluated on goods whose prices it was never asked for.

This is the README's program for a real model, with ``MultiTurnTrainer``. The folder of the
run gets the log, curves, checkpoints, and the dialogues before and after as pages for the browser.

Measured with SmolLM2-135M-Instruct on one core, 2.3 GiB of memory:

    seed | right before | after | NLL of plain text | CPU seconds
       0 |         0.28 |  0.91 |      3.65 -> 3.64 |         172
       1 |         0.25 |  0.84 |      3.65 -> 3.65 |         168
       2 |         0.41 |  0.88 |      3.65 -> 3.62 |         155

    pip install 'torchrl-mt[examples]'
    python examples/first_model.py
    python examples/first_model.py --resume    # goes on with a run that was stopped
"""

from __future__ import annotations

import argparse
import re
import resource
import time
from pathlib import Path
from typing import Any

from torchrl_mt.envs import ToolEnv
from torchrl_mt.trainers import MultiTurnTrainer

SEEN = ["lamp", "chair", "clock", "table", "radio", "mirror", "pear", "salt", "melon", "wheel"]
SEEN += ["camera", "kettle", "hammer", "basket", "cheese", "wallet"]
UNSEEN = ["rope", "soap", "onion", "pillow", "ladder", "bottle", "button", "shovel"]
PRICES = dict(zip(SEEN + UNSEEN, map(int, "475963285297463846389527"), strict=True))
ROLES = ("system", "user", "assistant", "tool", "assistant", "user")


def price(item: str) -> int:
    """Look up a price.

    Args:
        item: What is sold.
    """
    return PRICES[item]  # the model is told of a KeyError


def ask(item: str) -> dict[str, Any]:
    """The messages that open a dialogue: a worked example, and the question."""
    example = ("Say the price.", "What does the bread cost?", "price(bread)", "3", "3")
    said = (*example, f"What does the {item} cost?")
    messages = [{"role": role, "content": text} for role, text in zip(ROLES, said, strict=True)]
    return {"messages": messages, "item": item}


def parse(text: str) -> list[dict[str, Any]]:
    """Find the calls of tools in an answer. An answer without any ends the dialogue."""
    items = re.findall(r"price\((\w+)\)", text)
    return [{"name": "price", "arguments": {"item": item}} for item in items]


def reward(messages: list[dict[str, Any]], data: dict[str, Any]) -> float:
    """1 for the right price, else 0."""
    return float(messages[-1]["content"].strip() == str(PRICES[data["item"]]))


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    trainer = MultiTurnTrainer(
        args.model,
        ToolEnv([price], reward=reward, parser=parse),
        [ask(item) for item in SEEN],
        folder=args.out,
        eval_data=[ask(item) for item in UNSEEN * 4],
        updates=args.updates,
        episodes_per_batch=16,
        limits={"max_turns": 2, "max_response_tokens": 8},
        sampling={"stop": ["\n"]},
        passes={"packed": "tree"},  # what dialogues begin with in common is computed once
        seed=args.seed,
        device=args.device,
        resume=args.resume,
    )
    results = trainer.train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.process_time():.0f} CPU seconds, {memory:.1f} GiB")
    print(
        "right before {before:.2f} after {after:.2f}, "
        "plain text nll {nll_before:.2f} -> {nll_after:.2f}".format(**results)
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/first_model"), help="its folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--updates", type=int, default=8, help="each of 16 dialogues")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
