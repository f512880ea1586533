"""An episode goes on exactly after a stop string: no sampled token is lost, and its turn is ended."""

from __future__ import annotations

from collections import Counter, deque

import pytest
import torch
from torch import nn

from tests.chat.templates import CHATML, byte_level
from tests.collectors.runs import first_batch
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns

TURNS = 3
LIKELY = ("\n", " the", "<|im_end|>")


class Hears(TextEnv):
    """Remembers what it hears."""

    inline = whole_text = True

    def reset(self, data=None):
        self.heard = data["heard"]
        self.turn = 0
        return [{"role": "user", "content": "guess"}]

    def step(self, response):
        self.turn += 1
        self.heard.append(response)
        return TextStep([{"role": "user", "content": "higher"}], done=self.turn == TURNS)


@pytest.fixture
def tokenizer():
    return CHATML.on(byte_level())


@pytest.fixture
def engine(tokenizer):
    torch.manual_seed(0)
    words = [f"w{i}" for i in range(len(tokenizer))]
    model = tiny_chat_model(
        words, hidden_size=32, intermediate_size=64, eos_token_id=tokenizer.eos_token_id
    )[0]
    model.lm_head = nn.Linear(32, len(tokenizer))
    with torch.no_grad():
        for text in LIKELY:
            model.lm_head.bias[tokenizer(text)["input_ids"][0]] = 4.0
    engine = TransformersEngine(model, tokenizer, max_new_tokens=60, seed=0)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("stop", "ends"),
    [
        # The template itself ends a turn with the token of "\n", behind another.
        ("\n", {"\n": False, "<|im_end|>": True}),
        (["he", "\n\n"], {" the": False, "<|im_end|>": True}),
        (["\n<|im_end|>", " the"], {" the": False, "<|im_end|>": True}),
    ],
)
def test_the_next_prompt_ends_the_turn_that_a_stop_string_ended(engine, tokenizer, stop, ends):
    heard = deque[str]()  # not copied, as a list would be
    batch, _ = first_batch(Hears, engine, [{"heard": heard}], n=30, sampling={"stop": stop})
    prompts = batch.get(("tokens", "prompt"), as_list=True)
    answers = batch.get(("tokens", "response"), as_list=True)
    reasons = batch["finish_reason"]
    between = "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    added, seen, said = tokenizer(between)["input_ids"], {}, []
    for t, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if reasons[t] == "length":
            continue
        end = tokenizer.decode(answer[-1])
        ended = end == "<|im_end|>"
        seen[end] = ended
        said.append(tokenizer.decode(answer[: len(answer) - ended]))
        if not batch["next", "done"][t]:
            expected = [*prompt.tolist(), *answer.tolist(), *added[ended:]]
            assert prompts[t + 1].tolist() == expected
    assert ends.items() <= seen.items()
    assert Counter(said) <= Counter(heard)  # other episodes are under way
    rows = MergeTurns(pad_token_id=0)(batch)
    assert len(rows) == int(batch["next", "done"].sum())
    assert int(rows["masks", "all_assistant_mask"].sum()) == sum(map(len, answers))
    ended = batch["next", "done"].flatten().nonzero().flatten().tolist()
    for row, last in zip(rows, ended, strict=True):
        whole = [*prompts[last].tolist(), *answers[last].tolist()]
        assert row["tokens", "full"][: len(whole)].tolist() == whole
