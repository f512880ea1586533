"""Train the real language model behind an agent that is written with OpenAI's SDK.

The agent fills in a form: it shows the model an order and asks for one field after another. It knows
nothing of training. The collector gives it an address, samples its replies with the model, and records
them. The model has one example in its prompt, and learns from the rewards alone: 1 for a field that is
right, else 0. It is evaluated on orders with goods and cities that it never saw.

Measured with SmolLM2-135M-Instruct on one core, 3.0 GiB of memory:

    seed | right before | after | NLL of plain text | CPU seconds
       0 |         0.15 |  0.89 |      3.65 -> 3.65 |         429
       1 |         0.27 |  0.71 |      3.65 -> 3.67 |         455
       2 |         0.19 |  0.85 |      3.65 -> 3.65 |         435

    pip install 'torchrl-mt[agents,lora]'
    python examples/openai_agent.py
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import time
from collections.abc import Iterator
from typing import Any

import openai
import torch

from torchrl_mt import pretrained
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.transforms import MergeTurns

GOODS = ["lamps", "chairs", "tables", "mirrors", "clocks", "rulers", "hammers", "kettles"]
CITIES = ["Paris", "Rome", "Madrid", "Vienna", "Berlin", "Prague", "Athens", "Dublin", "London"]
UNSEEN_GOODS = ["pillows", "bottles", "ladders", "shovels", "tickets", "candles"]
UNSEEN_CITIES = ["Oslo", "Cairo", "Tokyo", "Boston", "Lima", "Moscow"]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]
ORDERS = [
    "Please send {number} {good} to {city}.",
    "We need {number} {good} in {city}.",
    "Ship to {city}: {number} {good}.",
]
EXAMPLE = [
    ("system", "Fill in the form."),
    ("user", "Please send two pens to Riga.\ngoods?"),
    *(("assistant", "pens"), ("user", "number?"), ("assistant", "2")),
    *(("user", "city?"), ("assistant", "Riga")),
]


class Clerk:
    """Asks for the fields of an order, one call each."""

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> list[float]:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": role, "content": content} for role, content in EXAMPLE]
        question, rewards = data["order"] + "\n", []
        for field, value in data["fields"].items():
            messages.append({"role": "user", "content": f"{question}{field}?"})
            reply = await client.chat.completions.create(model="policy", messages=messages)
            message, question = reply.choices[0].message, ""
            messages.append(message)
            said = message.content or ""  # None if the model said nothing
            rewards.append(float(said.strip() == value))
        return rewards


def orders(goods: list[str], cities: list[str], seed: int) -> Iterator[dict[str, Any]]:
    """Endless items: the text of an order, and its fields."""
    rng = random.Random(seed)
    while True:
        good, city, number = rng.choice(goods), rng.choice(cities), rng.randrange(len(NUMBERS))
        text = rng.choice(ORDERS).format(number=NUMBERS[number], good=good, city=city)
        fields = {"goods": good, "number": str(number + 2), "city": city}
        yield {"order": text, "fields": fields}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.manual_seed(args.seed)
    policy = pretrained.load(args.model, device=args.device)
    model, tokenizer, optimizer = policy.model, policy.tokenizer, policy.optimizer
    engine = TransformersEngine(model, tokenizer, seed=args.seed)
    collector = MultiTurnCollector(
        Clerk(),
        engine,
        orders(GOODS, CITIES, args.seed),
        episodes_per_batch=args.episodes,
        total_episodes=args.updates * args.episodes,
        limits=Limits(max_response_tokens=8),
        sampling={"stop": ["\n"]},
        postproc=MergeTurns(pad_token_id=tokenizer.pad_token_id),
    )
    held_out = list(itertools.islice(orders(UNSEEN_GOODS, UNSEEN_CITIES, 2**32), args.held_out))
    nll_before, before = policy.plain_text_nll(), evaluate(collector, held_out, "before")

    # With gamma=0, a call is judged by its own reward alone, not by those of later calls.
    maker = ExperienceMaker(model, advantage="turn", gamma=0.0)
    loss_module = MultiTurnLoss(model, objective="ppo", clip_epsilon=0.2)
    for update, rows in enumerate(collector, 1):
        rows = maker(rows.to(args.device))
        for _ in range(2):
            loss_module(rows)["loss_objective"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        collector.update_policy_weights_(model)
        share = rows["rewards", "full"].sum().item() / (3 * args.episodes)
        print(f"update {update}: {share:.2f} of the fields are right")

    after, nll_after = evaluate(collector, held_out, "after"), policy.plain_text_nll()
    collector.shutdown()
    engine.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.process_time():.0f} CPU seconds, {memory:.1f} GiB")
    print(
        f"right before {before:.2f} after {after:.2f}, "
        f"plain text nll {nll_before:.2f} -> {nll_after:.2f}"
    )


def evaluate(collector: MultiTurnCollector, items: list[dict[str, Any]], title: str) -> float:
    """Play items, print the first dialogue, and return the share of right fields."""
    played = collector.evaluate(items)
    share = played["next", "reward"].mean().item()
    print(f"\n{title}: {share:.2f} of the fields are right in orders never seen. A dialogue:")
    for messages, done in zip(played["text"], played["next", "done"], strict=True):
        print("\n".join(f"{message['role']:>9}: {message['content']}" for message in messages))
        if done:
            break
    return share


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--episodes", type=int, default=16, help="orders of an update")
    parser.add_argument("--held-out", type=int, default=32, help="orders of an evaluation")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
