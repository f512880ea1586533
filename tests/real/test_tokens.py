"""A ledger over 49,152 kinds of tokens: what was sampled is what is trained on, token for token."""

from __future__ import annotations

import random

import pytest

openai = pytest.importorskip("openai", reason="agents need the extra [agents]")

from tests.collectors.scripted import ScriptedEngine  # noqa: E402
from torchrl_mt.agents import openai_client  # noqa: E402
from torchrl_mt.collectors import Limits, MultiTurnCollector  # noqa: E402
from torchrl_mt.engines import TransformersEngine  # noqa: E402
from torchrl_mt.transforms import MergeTurns  # noqa: E402

from .helpers import QUESTIONS, asked  # noqa: E402

pytestmark = pytest.mark.slow

TURNS = 4
TEXTS = (
    "🦊👩‍👩‍👧‍👦🇫🇷 e\u0301 ﬁ \u200d\ufeff",
    "def f(x):\n\treturn {'a': [x] * 2}  # ok\r\n",
    "数学 עברית हिन्दी \\u0041 <|im_end> </s> ```json\n{}```",
)


class Recording(TransformersEngine):
    """Remembers what it was asked and what it answered."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    async def generate(self, prompt_ids, **kwargs):
        answer = await super().generate(prompt_ids, **kwargs)
        self.calls.append((list(prompt_ids), answer))
        return answer


async def converse(client, question):
    """Talk for some turns, and send the client's own messages back."""
    messages = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="any", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "Go on."}]
    return 1.0


class InProcess:
    async def arun_episode(self, engine, data):
        return await converse(openai_client(engine), data["question"])


class OverHTTP:
    async def run(self, data, *, base_url, api_key, http_client):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        return await converse(client, data["question"])


def rows_of(talk, engine, tokenizer, questions):
    with MultiTurnCollector(
        talk,
        engine,
        asked(*questions),
        episodes_per_batch=len(questions),
        total_episodes=len(questions),
        limits=Limits(max_response_tokens=16, on_cut="continue"),
        postproc=MergeTurns(pad_token_id=tokenizer.pad_token_id),
    ) as collector:
        (rows,) = collector
    return rows


def assert_nothing_is_lost(rows, calls, episodes):
    """Every episode is one row, which has the tokens and log-probs of all of its calls."""
    assert len(rows) == episodes
    assert len(calls) == episodes * TURNS
    found = {}
    for row in rows:
        length = int(row["masks", "all_attention_mask"].sum())
        found[tuple(row["tokens", "full"][:length].tolist())] = row
    sampled = 0
    for prompt, answer in calls:
        whole = (*prompt, *answer.token_ids)
        (row,) = (row for tokens, row in found.items() if tokens[: len(whole)] == whole)
        span = slice(len(prompt), len(whole))
        assert row["masks", "all_assistant_mask"][span].all()
        assert row["log_probs", "full"][span].tolist() == pytest.approx(answer.log_probs)
        sampled += len(answer.token_ids)
    assert rows["masks", "all_assistant_mask"].sum() == sampled


@pytest.mark.parametrize("talk", [InProcess(), OverHTTP()])
def test_a_models_own_conversations(talk, model, tokenizer):
    engine = Recording(model, tokenizer, seed=0)
    rows = rows_of(talk, engine, tokenizer, QUESTIONS)
    engine.close()
    assert_nothing_is_lost(rows, engine.calls, len(QUESTIONS))


@pytest.mark.parametrize("talk", [InProcess(), OverHTTP()])
@pytest.mark.parametrize("seed", range(8))
def test_answers_that_no_model_would_give(talk, seed, tokenizer):
    """Any tokens, among them parts of characters and bytes that are no text."""
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    broken = [i for i in ids if "\ufffd" in tokenizer.decode([i])]
    assert len(broken) > 100
    said = [tokenizer(text)["input_ids"] for text in TEXTS]

    def rule(_):
        kinds = rng.choices([ids, broken], k=rng.randint(0, 8))
        parts = [*([rng.choice(kind)] for kind in kinds), rng.choice(said)[: rng.randint(0, 12)]]
        rng.shuffle(parts)
        return [token for part in parts for token in part] + [tokenizer.eos_token_id]

    engine = ScriptedEngine(tokenizer, rule)
    rows = rows_of(talk, engine, tokenizer, [*QUESTIONS, *TEXTS])
    assert_nothing_is_lost(rows, engine.calls, len(QUESTIONS) + len(TEXTS))
