"""The code of the page on environments of other libraries plays episodes as it stands."""

from __future__ import annotations

import random
import re

import pytest

from tests.chat.families import QWEN25
from tests.chat.families_in_play import tokenizer_of
from tests.collectors.scripted import ScriptedEngine
from tests.pages import code_of
from torchrl_mt.bridges.gymnasium import GymTextEnv
from torchrl_mt.bridges.reasoning_gym import ReasoningGymEnv
from torchrl_mt.bridges.textarena import TextArenaEnv
from torchrl_mt.collectors import Limits, MultiTurnCollector

BLOCKS = {
    "TextArena": (0, "textarena", "[5]"),
    "TextArena with an opponent": (1, "textarena", "[4]"),
    "Gymnasium": (2, "gymnasium", "1"),
    "reasoning-gym": (3, "reasoning_gym", "<answer>7</answer>"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block(name):
    number, package, answer = BLOCKS[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    tokenizer = tokenizer_of(QWEN25)
    stop = tokenizer.convert_tokens_to_ids(QWEN25.stop)
    said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], stop]

    def small(*args, **kwargs):
        return MultiTurnCollector(
            *args, **{**kwargs, "episodes_per_batch": 2, "group_size": 2, "total_episodes": 4}
        )

    names = {
        "MultiTurnCollector": small,
        "engine": ScriptedEngine(tokenizer, lambda prompt: said, [stop]),
        **{
            each.__name__: each
            for each in (GymTextEnv, Limits, ReasoningGymEnv, TextArenaEnv, random, re)
        },
    }
    exec(code_of("bridges.rst", "Environments of other libraries", number), names)
    with names["collector"] as collector:
        batches = list(collector)
        assert collector.stats()["rejected"] == 0
    assert len(batches) == 2
    for batch in batches:
        assert batch["next", "done"].sum() == 2
