"""Loads the example programs, made short."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from torchrl_mt.testing import tiny_chat_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {
    "guess_number": "--updates 2 --episodes 8 --warm-start-steps 2 --eval-episodes 8",
    "masked_cartpole": "--updates 8 --clips 4 --width 8 --episodes 2",
    "pendulum_clips": "--steps 2 --episodes 4 --slice-len 8 --clips 4",
    "pixel_agent": "--updates 2 --side 2 --turns 2",
}
"""Arguments of a short run of each."""
SHORTENED = {
    "async_server": {"EPISODES": 4, "UNSEEN": ["rope"]},
    "distributed_learner": {"EPISODES_PER_UPDATE": 64},
    "masked_cartpole": {"MAX_STEPS": 20, "RANDOM_FRAMES": 500},
    "pendulum_clips": {"EPISODE_LENGTH": 20},
    "pixel_agent": {"EPISODES_PER_UPDATE": 4},
}
"""Constants of each that are too large for a short run."""


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    """Write a tiny model for a ChatML tokenizer, and return where."""
    words = map("w{}".format, range(len(tokenizer)))
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model, _ = tiny_chat_model(words, hidden_size=16, eos_token_id=end_of_turn)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.fixture
def load():
    """Loads an example's module anew, for a short run; puts back the number of threads it sets."""

    def load_module(name, short=True):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(module).update(SHORTENED.get(name, {}) if short else {})
        return module

    threads = torch.get_num_threads()
    yield load_module
    torch.set_num_threads(threads)


@pytest.fixture
def example(load, request):
    """The example that a test's module is named after; in slow tests as long as it is."""
    name = request.module.__name__.rpartition("test_")[2]
    return load(name, short=request.node.get_closest_marker("slow") is None)
