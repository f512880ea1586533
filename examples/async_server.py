"""Train a real language model while a vLLM server plays its next dialogues: asynchronous learning.

A customer asks what something costs. The model writes ``price(lamp)``, is told what the function
returned, and says it. The server samples, and this process learns. The server keeps the pretrained
model; each update sends it a LoRA adapter under a name of its own, ``policy@3``.

A thread collects dialogues into a buffer, which gives out each once. When a batch is drawn, the next
one is begun, and is played while this one is learned from: its tokens are up to one update old. The
loss weighs each token by how much likelier it has become since it was sampled, at most twofold.

Measured with SmolLM2-135M-Instruct and vLLM 0.32, both on two cores that other programs used, too:

    seed | right before | after | NLL of plain text | mean age | CPU seconds here | seconds | waiting
       0 |         0.12 |  0.81 |      3.65 -> 3.61 |     0.81 |              103 |     330 |     126
       1 |         0.28 |  0.78 |      3.65 -> 3.63 |     0.83 |              103 |     385 |     158
       2 |         0.38 |  0.84 |      3.65 -> 3.62 |     0.83 |              104 |     221 |      80

No token was more than one update old. Seed 2 was killed after five updates, and resumed. The server also
had ``--dtype float32 --max-model-len 1024 --block-size 32``: on a CPU, only small blocks are shared.

    pip install 'torchrl-mt[examples,server]'
    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 \
    vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --port 8000 --enable-scale-out \
        --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 16 --max-loras 2
    python examples/async_server.py             # the server reads adapters in the folder --out
    python examples/async_server.py --resume    # goes on with a run that was stopped
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from torchrl.data import ReplayBuffer

from torchrl_mt import pretrained
from torchrl_mt.collectors import CollectorOptions, Limits, MultiTurnCollector, SampleRatio
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.datasets import RunCheckpoint, TrainedWeights
from torchrl_mt.engines import CompletionsEngine, VLLMWeights
from torchrl_mt.envs import ToolEnv
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import RunLog, plot_run, write_report
from torchrl_mt.view.run_files import read_run

SEEN = ["lamp", "chair", "clock", "table", "radio", "mirror", "pear", "salt", "melon", "wheel"]
SEEN += ["camera", "kettle", "hammer", "basket", "cheese", "wallet"]
UNSEEN = ["rope", "soap", "onion", "pillow", "ladder", "bottle", "button", "shovel"]
PRICES = dict(zip(SEEN + UNSEEN, map(int, "475963285297463846389527"), strict=True))
ROLES = ("system", "user", "assistant", "tool", "assistant", "user")
EPISODES = 16  # dialogues of an update


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
    torch.manual_seed(args.seed)
    policy = pretrained.load(args.model, device=args.device)
    model, tokenizer, optimizer = policy.model, policy.tokenizer, policy.optimizer
    # With "keep", open requests go on with the adapter that they began with.
    push = VLLMWeights(args.url, lora_name="policy", pause="keep", folder=args.out / "adapters")
    engine = CompletionsEngine(
        args.url, "policy", tokenizer, api="vllm", on_update=push, wait_ready=600
    )
    buffer = ReplayBuffer(
        storage=EpisodeStorage(max_steps=100 * EPISODES, max_episodes=2 * EPISODES),
        writer=EpisodeWriter(),
        sampler=EpisodeSampler(replacement=False, max_sample_count=1),
        transform=MergeTurns(pad_token_id=tokenizer.pad_token_id),
        batch_size=EPISODES,
    )
    collector = MultiTurnCollector(
        ToolEnv([price], reward=reward, parser=parse),
        engine,
        [ask(item) for item in SEEN],
        episodes_per_batch=EPISODES,
        total_episodes=args.updates * EPISODES,
        limits=Limits(max_turns=2, max_response_tokens=8),
        sampling={"stop": ["\n"], "seed": args.seed},
        replay_buffer=buffer,
        rate_limit=SampleRatio(1, 1),  # each dialogue is drawn once; the faster side waits
        options=CollectorOptions(seed=args.seed),
    )
    passes = Passes(packed="tree")  # what dialogues begin with in common is computed once
    maker = ExperienceMaker(model, advantage="turn", old_log_probs="actor", passes=passes)
    loss_module = MultiTurnLoss(model, objective="ppo", correction="token_tis", passes=passes)

    def evaluate(when: str) -> None:
        """Play with the goods that were never seen, and write a page of the dialogues."""
        played = collector.evaluate([ask(item) for item in UNSEEN * 4])
        results[when] = played["next", "reward"].sum().item() / (4 * len(UNSEEN))
        results[f"nll_{when}"] = policy.plain_text_nll()
        write_report(played, args.out / f"{when}.html", tokenizer=tokenizer)

    results: dict[str, float] = {}
    parts = {"model": TrainedWeights(model), "optimizer": optimizer, "buffer": buffer}
    parts |= {"collector": collector, "results": results}
    checkpoint = RunCheckpoint(args.out / "checkpoints")
    with RunLog(args.out, loggers=(), config=args, total_steps=args.updates) as log, collector:
        done = checkpoint.restore(**parts)  # which also sends the adapter
        if done is None:
            collector.update_policy_weights_(model)  # the server has no adapter before
            evaluate("before")
        collector.start()  # from here on, dialogues are played in the background
        for update in range((done or 0) + 1, args.updates + 1):
            begin = time.perf_counter()
            rows = buffer.sample()  # waits until a batch has been played
            versions = rows["versions", "full"]  # -1 where a token was not sampled
            ages = (collector.policy_version - versions)[versions >= 0].float()
            numbers = {"reward": rows["rewards", "full"].sum() / EPISODES}
            numbers |= {"age/mean": ages.mean(), "age/max": ages.max()}
            rows = maker(rows.to(args.device))
            losses = loss_module(rows)
            losses["loss_objective"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            collector.update_policy_weights_(model)
            numbers["seconds"] = time.perf_counter() - begin
            log.log(update, collector.stats(), maker.metrics, losses, numbers)
            checkpoint.save(update, **parts)
        evaluate("after")
    engine.close()
    print(f"curves: {plot_run(args.out)}")
    report(args.out)
    print(
        "right before {before:.2f} after {after:.2f}, "
        "plain text nll {nll_before:.2f} -> {nll_after:.2f}".format(**results)
    )


def report(folder: Path) -> None:
    """Say how stale the tokens were, and where the time went."""
    run = read_run(folder)
    age, oldest = run.columns["age/mean"][1].mean(), run.columns["age/max"][1].max()
    print(f"tokens were {age:.2f} updates old when they were learned from, at most {oldest:.0f}")
    total, push = (run.columns[name][1].sum() for name in ("seconds", "weights/push_seconds"))
    wait = run.growth("rate/waiting_sampler").sum()
    print(f"{total:.0f} seconds: {wait:.0f} without dialogues, {push:.0f} for sending adapters")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--url", default="http://localhost:8000", help="the server's address")
    parser.add_argument("--device", default="cpu", help="where this process learns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=10, help=f"each of {EPISODES} dialogues")
    parser.add_argument("--out", type=Path, default=Path("runs/async_server"), help="its folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    args = parser.parse_args(argv)
    if not args.resume and (args.out / "run.json").exists():
        parser.error(f"--out: {args.out} has a run, which --resume goes on with")
    return args


if __name__ == "__main__":
    main()
