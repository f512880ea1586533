"""Train a real language model to call a function with PPO and a critic.

A customer asks what something costs. The model writes ``price(lamp)``, is told what the function
returned, and says it. The reward is 1 for the right price, else 0, and comes at the end. The critic
learns to expect it from what was said so far: after a wrong call there is little to hope for. What a
token is worth is how much more came than the critic expected.

The critic is the first third of the same pretrained model, with LoRA adapters and a head of its own. It
starts at zero and knows nothing. So ``lmbda`` is 1: its errors then add noise to the advantages, but no
bias.

Measured with SmolLM2-135M-Instruct on one core, 2.7 GiB of memory:

    seed | right before | after | NLL of plain text | CPU seconds
       0 |         0.28 |  0.94 |      3.65 -> 3.64 |         286
       1 |         0.25 |  0.72 |      3.65 -> 3.67 |         248
       2 |         0.41 |  0.84 |      3.65 -> 3.63 |         248

    pip install 'torchrl-mt[examples]'
    python examples/ppo_critic.py
    python examples/ppo_critic.py --resume    # goes on with a run that was stopped
"""

from __future__ import annotations

import argparse
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_mt import pretrained
from torchrl_mt.envs import ToolEnv
from torchrl_mt.objectives import Advantage, ValueModel
from torchrl_mt.trainers import MultiTurnTrainer
from torchrl_mt.view.run_files import read_run

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


def make_critic(args: argparse.Namespace) -> ValueModel:
    """The first third of the model's layers, with adapters and a head that are trained."""
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    base.model.layers = base.model.layers[: max(1, len(base.model.layers) // 3)]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return ValueModel.from_model(pretrained.load(base, tokenizer, device=args.device).model)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.manual_seed(args.seed)
    trainer = MultiTurnTrainer(
        args.model,
        ToolEnv([price], reward=reward, parser=parse),
        [ask(item) for item in SEEN],
        folder=args.out,
        eval_data=[ask(item) for item in UNSEEN * 4],
        updates=args.updates,
        episodes_per_batch=16,
        num_epochs=2,
        advantage=Advantage("gae", lmbda=1.0, whiten=True),
        objective="ppo",
        critic=make_critic(args),
        limits={"max_turns": 2, "max_response_tokens": 8},
        sampling={"stop": ["\n"]},
        passes={"packed": "tree"},  # what dialogues begin with in common is computed once
        seed=args.seed,
        device=args.device,
        resume=args.resume,
    )
    trainer.optimizer.param_groups[-1]["lr"] = 1e-3  # the critic's, which has more to learn
    results = trainer.train()
    explained = [row["explained_variance"] for row in read_run(args.out).rows.values()]
    print("of the returns' variance, the critic explains", *(f"{share:.2f}" for share in explained))
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
    parser.add_argument("--out", type=Path, default=Path("runs/ppo_critic"), help="its folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--updates", type=int, default=8, help="each of 16 dialogues")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
