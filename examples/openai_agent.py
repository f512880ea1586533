"""Train the real language model behind an agent that is written with OpenAI's SDK.

The agent fills in a form: it shows the model an order and asks for one field after another. It knows
nothing of training. The collector gives it an address, samples its replies with the model, and records
them. The model has one example in its prompt, and learns from the rewards alone: 1 for a field that is
right, else 0. It is evaluated on orders with goods and cities that it never saw.

The folder of the run gets the log, curves, checkpoints, and the dialogues before and after as pages for
the browser.

Measured with SmolLM2-135M-Instruct on one core, 3.0 GiB of memory:

    seed | right before | after | NLL of plain text | CPU seconds
       0 |         0.18 |  0.82 |      3.65 -> 3.63 |         368
       1 |         0.14 |  0.88 |      3.65 -> 3.69 |         380
       2 |         0.20 |  0.86 |      3.65 -> 3.68 |         342

    pip install 'torchrl-mt[agents,lora]'
    python examples/openai_agent.py
    python examples/openai_agent.py --resume    # goes on with a run that was stopped
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from torchrl_mt.trainers import MultiTurnTrainer

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
    unseen = orders(UNSEEN_GOODS, UNSEEN_CITIES, 2**32)
    trainer = MultiTurnTrainer(
        args.model,
        Clerk(),
        orders(GOODS, CITIES, args.seed),
        folder=args.out,
        eval_data=itertools.islice(unseen, args.held_out),
        updates=args.updates,
        episodes_per_batch=16,
        num_epochs=2,
        gamma=0.0,  # a call is judged by its own reward alone, not by those of later calls
        limits={"max_response_tokens": 8},
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
        f"right before {results['before'] / 3:.2f} after {results['after'] / 3:.2f}, "  # of 3 fields
        "plain text nll {nll_before:.2f} -> {nll_after:.2f}".format(**results)
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/openai_agent"), help="its folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--updates", type=int, default=12, help="each of 16 orders")
    parser.add_argument("--held-out", type=int, default=32, help="orders of an evaluation")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
