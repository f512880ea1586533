"""Small runs of the trainer, and what two equal runs have in common."""

from __future__ import annotations

import torch

from torchrl_mt import pretrained
from torchrl_mt.envs import GuessNumber
from torchrl_mt.scoring.values import ValueModel
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.trainers import MultiTurnTrainer
from torchrl_mt.view.run_files import read_run

WORDS = ["guess", "1", "to", "4", "2", "3", "higher", "lower", "correct", "invalid"]
PROMPT = [{"role": "user", "content": "guess 1 to 4"}]
EVAL = [{"number": 1}, {"number": 3}]
TIMES = ("time/", "tokens_per_second", "weights/push_seconds", "waiting/")
"""Names of logged numbers that depend on the time."""


def tiny(words=WORDS):
    """A tiny model with random weights, and its tokenizer."""
    return tiny_chat_model(words, hidden_size=16, intermediate_size=32)


def save_tiny(folder, words=WORDS):
    """Save such a model, the same each time."""
    torch.manual_seed(0)
    for part in tiny(words):
        part.save_pretrained(folder)


def policy(seed=0, **kwargs):
    """A tiny model with random weights, in training as a whole unless ``kwargs`` say otherwise."""
    torch.manual_seed(seed)
    return pretrained.load(*tiny(), **{"lora": False, "lr": 1e-2, **kwargs})


def value_model(seed=0):
    torch.manual_seed(seed)
    return ValueModel.from_model(tiny()[0])


def is_low(messages, item):
    """A reward: whether the answer is 1 or 2."""
    return float(messages[-1]["content"] in ("1", "2"))


def trainer(folder, *, model=None, task=None, data=None, **kwargs):
    """A trainer of few short updates."""
    settings = {"updates": 3, "episodes_per_batch": 6, "loggers": ()}
    settings["limits"] = {"max_response_tokens": 1, "on_cut": "continue"}
    task = GuessNumber(4, 2) if task is None else task
    model = policy() if model is None else model
    return MultiTurnTrainer(model, task, data, folder=folder, **{**settings, **kwargs})


def weights(of):
    return {name: value.clone() for name, value in of.policy.model.state_dict().items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)


def logged(folder):
    """The numbers of each update, but times."""
    rows = read_run(folder).rows.items()
    return {step: {k: v for k, v in row.items() if not k.startswith(TIMES)} for step, row in rows}


class StopError(Exception):
    """Ends a run."""


def stop(made, update):
    """Have a run end with an error in an update: in its last optimizer step, before its checkpoint."""

    def act():
        if made.done["updates"] + 1 == update:
            raise StopError

    made.register_op("post_optim", act)
