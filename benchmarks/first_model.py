"""What goes wrong in the first updates of a real language model, and how it looks: one run for each.

The model is to look up a price with a function and to say it, as in ``examples/tool_agent.py``. Numbers
are those of the batch played before the first and after the last update.

The first table has the memory of an update by the size of the model, computed, and measured on models of
that size with random weights. The last compares advantages and objectives: the share of
right answers in the last two batches, mean of the seeds / the worst seed, and the mean of all batches.

    OMP_NUM_THREADS=1 python benchmarks/first_model.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from real_model import apart
from tables import Part, Row, show
from tensordict import TensorDictBase
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.datasets import ConversationDataset
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import ToolEnv
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.pretrained import load
from torchrl_mt.testing import tiny_chat_tokenizer
from torchrl_mt.transforms import MergeTurns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tool_agent as task

EXAMPLE = [
    {"role": "system", "content": "Say the price."},
    {"role": "user", "content": "What does the bread cost?"},
    {"role": "assistant", "content": "price(bread)"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4"},
]
EPISODES = 16


@dataclass(frozen=True)
class Settings:
    """Those that are advised; the others change one or two."""

    lora: bool = True
    lr: float | None = None
    example: bool = True
    stop: tuple[str, ...] = ("\n",)
    max_response_tokens: int = 12
    entropy_coef: float = 0.0
    advantage: str = "turn"
    objective: str = "ppo"
    group_size: int = 1
    steps: int = 1


ADVISED = Settings()
RUNS = {
    "as advised": ADVISED,
    "all weights, ``lr=1e-5``": replace(ADVISED, lora=False),
    "all weights, ``lr=2e-3``": replace(ADVISED, lora=False, lr=2e-3),
    "LoRA, ``lr=3e-3``": replace(ADVISED, lr=3e-3),
    "LoRA, ``lr=1e-5``": replace(ADVISED, lr=1e-5),
    "no example in the prompt": replace(ADVISED, example=False),
    "``max_response_tokens=3``": replace(ADVISED, max_response_tokens=3),
    "``entropy_coef=0.3``": replace(ADVISED, entropy_coef=0.3),
}


def questions(settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
    """Items of the environment."""
    for item in task.questions(task.GOODS, seed):
        if item["call"].startswith("price"):
            messages = item["messages"]
            yield item | {"messages": EXAMPLE + messages[1:] if settings.example else messages}


def measured(rows: TensorDictBase, entropy: float) -> list[float]:
    """Share of right answers, cut ones, tokens an answer, entropy and KL, of a batch."""
    sampled = rows["masks", "all_assistant_mask"]
    answers = int((rows["turns", "full"].amax(-1) + 1).sum())
    cut = rows["stop_reason"].count("max_response_tokens")
    right = (rows["rewards", "full"].sum(-1) >= 1).float().mean().item()
    kl = rows["kl"][sampled].mean().item()
    return [right, cut / EPISODES, int(sampled.sum()) / answers, entropy, kl]


def train(
    settings: Settings, args: argparse.Namespace, seed: int
) -> Iterator[tuple[list[float], float]]:
    """Update after update, give the numbers of the batch, and the NLL of plain text before its step."""
    torch.manual_seed(seed)
    policy = load(args.model, lora=settings.lora, lr=settings.lr, dtype=torch.float32)
    model, tokenizer, nll = policy.model, policy.tokenizer, policy.plain_text_nll()
    ref = "base" if settings.lora else load(args.model, lora=False, dtype=torch.float32).model
    passes = Passes(packed="tree")
    maker = ExperienceMaker(model, ref=ref, advantage=settings.advantage, passes=passes)
    loss_module = MultiTurnLoss(
        model,
        objective=settings.objective,
        entropy_coef=settings.entropy_coef or None,
        passes=passes,
    )
    with MultiTurnCollector(
        ToolEnv([task.price], reward=task.reward, parser=task.parse),
        TransformersEngine(model, tokenizer, seed=seed),
        questions(settings, seed),
        group_size=settings.group_size,
        episodes_per_batch=EPISODES,
        total_episodes=EPISODES * (args.updates + 1),
        limits=Limits(max_turns=2, max_response_tokens=settings.max_response_tokens),
        sampling={"stop": list(settings.stop)},
        postproc=MergeTurns(
            pad_token_id=tokenizer.pad_token_id, carry=("label", "reference", "stop_reason")
        ),
    ) as collector:
        for rows in collector:
            rows = maker(rows)
            for step in range(settings.steps):
                losses = loss_module(rows)
                if step == 0:
                    yield measured(rows, losses["entropy"].item()), nll
                sum(loss for key, loss in losses.items() if key.startswith("loss_")).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                policy.optimizer.step()
                policy.optimizer.zero_grad()
            nll = policy.plain_text_nll()
            collector.update_policy_weights_(model)


def run(name: str, args: argparse.Namespace) -> Row:
    """Train for some updates."""
    (before, _), *_, (after, nll) = train(RUNS[name], args, args.seed)
    pairs = zip(before, after, strict=True)
    return (
        name,
        *(f"{round(a, 2) + 0.0:.2f} → {round(b, 2) + 0.0:.2f}" for a, b in pairs),
        f"{nll:.2f}",
    )


def runs(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each run."""
    for name in args.only or RUNS:
        yield run(name, args)
        gc.collect()


CHOSEN = Settings(lr=2e-4, group_size=4, steps=2)
CHOICES = {
    '``"turn"``, ``"ppo"``': CHOSEN,
    '``"grpo"``, ``"ppo"``': replace(CHOSEN, advantage="grpo"),
    '``"max_rl"``, ``"ppo"``': replace(CHOSEN, advantage="max_rl"),
    '``"turn"``, ``"reinforce"``': replace(CHOSEN, objective="reinforce"),
    '``"turn"``, ``"cispo"``': replace(CHOSEN, objective="cispo"),
}


def choices(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each choice: the same run with several seeds."""
    for name, settings in CHOICES.items():
        curves = [[numbers[0] for numbers, _ in train(settings, args, seed)] for seed in range(3)]
        ends = [sum(curve[-2:]) / 2 for curve in curves]
        every = sum(map(sum, curves)) / sum(map(len, curves))
        yield name, f"{sum(ends) / len(ends):.2f}/{min(ends):.2f}", f"{every:.2f}"
        gc.collect()


# Memory

CONFIGS = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
}
KINDS = {
    "LoRA, bfloat16": (True, torch.bfloat16),
    "LoRA": (True, torch.float32),
    "all weights": (False, torch.float32),
}
BUDGET = 0.5
"""GiB of activations that MultiTurnLoss keeps on a CPU."""
MOST_MEASURED = 8.0
"""GiB: larger models are computed only."""


def memory(args: argparse.Namespace) -> Iterator[Row]:
    """What an update takes."""
    for (name, config), (kind, (lora, dtype)) in product(CONFIGS.items(), KINDS.items()):
        with torch.device("meta"), redirect_stdout(None):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model = load(empty, tiny_chat_tokenizer("a b"), lora=lora).model
        parameters = list(model.parameters())
        weights = sum(p.numel() * p.element_size() for p in parameters) / 2**30
        # A gradient and two averages of Adam, of four bytes each.
        trained = sum(12 * p.numel() for p in parameters if p.requires_grad) / 2**30
        width = config.hidden_size // config.num_attention_heads
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * width
        cache = 1000 * cached * dtype.itemsize / 2**30
        total = weights + trained + cache + BUDGET
        found = ""
        if total < MOST_MEASURED:
            found = f"{apart(partial(one_update, config, lora, dtype))[2] / 2**10:.2f}"
        cells = (weights, trained, cache, BUDGET, total)
        yield f"{name}, {kind}", *(f"{x:.2f}" for x in cells), found


def one_update(config: PretrainedConfig, lora: bool, dtype: torch.dtype) -> None:
    """Train on four dialogues of 100 tokens."""
    tokenizer = tiny_chat_tokenizer("a b")
    with redirect_stdout(None):
        policy = load(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer, lora=lora)
    messages = [
        {"role": "user", "content": "a " * 50},
        {"role": "assistant", "content": "b " * 40},
    ]
    dataset = ConversationDataset([{"messages": messages}] * 4, tokenizer)
    rows = dataset.collate(list(dataset))
    MultiTurnLoss(policy.model, objective="sft")(rows)["loss_objective"].backward()
    policy.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="a folder or a name on the Hugging Face Hub")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=RUNS, help="some of the runs")
    parser.add_argument("--tables", nargs="*", help="memory, runs, choices; all by default")
    parser.add_argument("--rst", type=Path, help="write each table to RST_NAME.inc")
    args = parser.parse_args()
    header = ("run", "right", "cut", "tokens an answer", "entropy", "KL to the base", "NLL after")
    sizes = ("GiB", "weights", "trained", "1,000 tokens of cache", "activations", "sum", "measured")
    ends = ("advantage, objective", "right at the end", "right in all batches")
    wide, narrow = (28, 12, 12, 12, 12, 12, 12), (40, 30, 30)
    tables = {
        "memory": Part(sizes, wide, memory),
        "runs": Part(header, wide, runs),
        "choices": Part(ends, narrow, choices),
    }
    for name in args.tables or tables:
        rst = args.rst and args.rst.with_name(f"{args.rst.name}_{name}.inc")
        show([tables[name]], args, rst)


if __name__ == "__main__":
    main()
