"""One update of a real language model with LoRA, beside ``generate()`` and a loss written by hand.

Every measurement runs in a process of its own, forked once the model is loaded; every answer has one
length. Seconds are the processor's: on a quiet machine, with one thread, they are the clock's. Memory
is the peak beyond libraries and model; MALLOC_MMAP_THRESHOLD_=1048576 takes less of it, and more time.

    OMP_NUM_THREADS=1 python benchmarks/real_model.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import pickle
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from rollout_model import FixedLength
from tables import Part, Row, show
from tensordict import TensorDictBase

from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, micro_batches
from torchrl_mt.pretrained import Pretrained, load
from torchrl_mt.transforms import MergeTurns

EPISODES, GROUP, TURNS = 16, 4, 2
"""Of the update: episodes, how many of them share a prompt, and turns of each."""
MICRO_BATCH, CLIP = 8, 0.2
"""Rows, and how far PPO lets the ratio go."""
STORIES = [
    f"Tell me a story about a {one} and a {other}. Make it long, detailed and funny, and end with a "
    "moral that a child can follow without help."
    for one in ("fox", "king", "robot", "ship", "tree", "cat", "judge", "river")
    for other in ("shoe", "train", "moon", "garden")
]


class Story(TextEnv):
    """Asks for a story and for its next part; rewards different words."""

    inline = True

    def reset(self, data: Any = None) -> list[dict[str, str]]:
        self.turn = 0
        return [{"role": "user", "content": data["story"]}]

    def step(self, response: str) -> TextStep:
        self.turn += 1
        asked = [{"role": "user", "content": "Go on, with a surprise. What does the moral become?"}]
        return TextStep(asked, reward=len(set(response.split())), done=self.turn == TURNS)


def apart(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run ``work`` in a process of its own.

    Returns:
        Its result, its seconds, and its peak memory in MiB beyond what there was.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()

    def run() -> None:
        before, begin = peak(), time.process_time()
        result = work()
        sender.send_bytes(pickle.dumps((result, time.process_time() - begin, peak() - before)))

    child = context.Process(target=run)
    child.start()
    sender.close()
    found = pickle.loads(receiver.recv_bytes())
    child.join()
    return cast(tuple[Any, float, float], found)


def peak() -> float:
    """Peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def compared(tokens: int, contenders: Mapping[str, Callable[[], float | None]]) -> Iterator[Row]:
    """Rows of a table, each compared with the first; results, if any, must be the same."""
    first: tuple[float | None, float] | None = None
    for name, work in contenders.items():
        result, seconds, memory = apart(work)
        first = first or (result, seconds)
        torch.testing.assert_close(result, first[0], rtol=0.02, atol=0)
        yield name, f"{tokens / seconds:.1f}", f"{seconds / first[1]:.2f}×", f"{memory:,.0f}"


# An update


def update(policy: Pretrained, count: int) -> tuple[TensorDictBase, dict[str, float]]:
    """Play, complete the rows and train once; returns the rows and the seconds of each part."""
    engine = TransformersEngine(policy.model, policy.tokenizer)
    marks = [time.process_time()]
    with MultiTurnCollector(
        Story(),
        FixedLength(engine, count),
        [{"story": story} for story in STORIES[: EPISODES // GROUP]],
        episodes_per_batch=EPISODES,
        group_size=GROUP,
        total_episodes=EPISODES,
    ) as collector:
        (batch,) = collector
        (thread,) = (t for t in threading.enumerate() if t.name == "torchrl_mt-generation")
        sampled = time.clock_gettime(time.pthread_getcpuclockid(cast(int, thread.ident)))
    rows = MergeTurns()(batch)
    marks.append(time.process_time())
    rows = ExperienceMaker(policy.model, advantage="grpo")(rows)
    marks.append(time.process_time())
    backward(policy.model, rows, MICRO_BATCH)
    marks.append(time.process_time())
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    engine.update_weights()
    marks.append(time.process_time())
    engine.close()
    played, made, trained, done = (b - a for a, b in pairwise(marks))
    return rows, {
        "sampling: the engine": sampled,
        "the rest of playing, and MergeTurns": played - sampled,
        "ExperienceMaker": made,
        f"MultiTurnLoss and backward, {MICRO_BATCH} rows at a time": trained,
        "optimizer and engine.update_weights()": done,
    }


def update_parts(policy: Pretrained, args: argparse.Namespace) -> Iterator[Row]:
    """Share of each part of an update."""
    (args.rows, seconds), _, memory = apart(partial(update, policy, args.tokens))
    seconds["together"] = whole = sum(seconds.values())
    for name, taken in seconds.items():
        used = f"{memory:,.0f}" if name == "together" else ""
        yield name, f"{taken:.2f}", f"{taken / whole:.1%}", used


# Sampling


def by_engine(policy: Pretrained, prompts: list[list[int]], count: int) -> None:
    """Sample with our engine."""
    engine = FixedLength(TransformersEngine(policy.model, policy.tokenizer), count)

    async def run() -> list[Any]:
        return await asyncio.gather(*map(engine.generate, prompts))

    assert all(len(answer.token_ids) == count for answer in asyncio.run(run()))
    engine.close()


def by_generate(policy: Pretrained, prompts: list[list[int]], count: int) -> None:
    """Sample with transformers' method."""
    policy.model.generation_config.eos_token_id = None  # every answer has its full length
    inputs = policy.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    found = policy.model.generate(
        **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=count
    )
    assert found.shape[1] == inputs["input_ids"].shape[1] + count


def sampling(policy: Pretrained, args: argparse.Namespace) -> Iterator[Row]:
    """Sample answers to different prompts."""
    chats = [[{"role": "user", "content": story}] for story in STORIES]
    template = partial(policy.tokenizer.apply_chat_template, add_generation_prompt=True)
    prompts = [cast(Any, template(chat))["input_ids"] for chat in chats]
    contenders = {"model.generate()": by_generate, "TransformersEngine": by_engine}
    runs = {name: partial(work, policy, prompts, args.tokens) for name, work in contenders.items()}
    yield from compared(len(prompts) * args.tokens, runs)


# Training


def by_hand(model: Any, rows: TensorDictBase, size: int) -> None:
    """PPO's loss as one would write it down."""
    total = rows["masks", "all_assistant_mask"].sum()
    for part in rows.split(size):
        tokens, attended = part["tokens", "full"], part["masks", "all_attention_mask"]
        logits = model(input_ids=tokens, attention_mask=attended.long()).logits
        log_probs = logits[:, :-1].float().log_softmax(-1)
        log_prob = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = (log_prob - part["log_probs", "full"][:, 1:]).exp()
        advantage = part["advantage"][:, 1:, 0]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        (-(gain * part["masks", "all_assistant_mask"][:, 1:]).sum() / total).backward()


def backward(model: Any, rows: TensorDictBase, size: int) -> None:
    """Our loss."""
    loss = MultiTurnLoss(model, clip_epsilon=CLIP)
    total = loss.total(rows)
    for part in micro_batches(rows, passes=Passes(micro_batch_size=size)):
        loss(part, total=total)["loss_objective"].backward()


def by_loss(model: Any, rows: TensorDictBase, size: int) -> None:
    """Our maker and loss."""
    backward(model, ExperienceMaker(model, advantage="grpo")(rows), size)


def training(policy: Pretrained, args: argparse.Namespace) -> Iterator[Row]:
    """Compute gradients of the update's rows."""

    def norm(work: Callable[..., None], size: int) -> float:
        work(policy.model, args.rows, size)
        return float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), torch.inf))

    tokens = int(args.rows["masks", "all_attention_mask"].sum())
    for name, size in (("all rows", EPISODES), (f"{MICRO_BATCH} rows at a time", MICRO_BATCH)):
        contenders = {"by hand": by_hand, "ExperienceMaker, MultiTurnLoss": by_loss}
        runs = {f"{name}, {each}": partial(norm, work, size) for each, work in contenders.items()}
        yield from compared(tokens, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="a folder or a name on the Hugging Face Hub")
    parser.add_argument("--tokens", type=int, default=32, help="of every answer")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()

    torch.set_num_threads(1)  # a process that used more must not be forked
    torch.manual_seed(0)
    policy = load(args.model, dtype=getattr(torch, args.dtype))
    parts = [
        Part((title, *columns, "peak, MiB"), (55, 15, 15, 15), partial(rows, policy))
        for title, *columns, rows in (
            (f"update of {EPISODES} episodes, {TURNS} turns", "s", "share", update_parts),
            (f"sampling {len(STORIES)} answers", "tokens/s", "time", sampling),
            ("training on the update's rows", "tokens/s", "time", training),
        )
    ]
    show(parts, args, args.rst)


if __name__ == "__main__":
    main()
