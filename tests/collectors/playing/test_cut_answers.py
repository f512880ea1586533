"""Answers that ``max_response_tokens`` cut, and episodes that go on behind them."""

from __future__ import annotations

import json
import random

import pytest

from tests.collectors.runs import first_batch
from tests.collectors.scripted import ScriptedEngine
from tests.tiers import first_fast
from torchrl_mt.collectors import Limits
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.transforms import MergeTurns

TURNS, LONGEST = 4, 3
LIMITS = Limits(max_response_tokens=LONGEST, on_cut="continue")
"""Cuts answers of random words, of which some end by themselves."""


@pytest.fixture(params=first_fast(range(8)))
def engine(request, tokenizer):
    rng = random.Random(request.param)
    words = [tokenizer(str(k))["input_ids"][0] for k in range(1, 9)]

    def answer(prompt):
        ends = [tokenizer.eos_token_id] * rng.randrange(2)
        return [*rng.choices(words, k=rng.randrange(LONGEST + 2)), *ends] or words[:1]

    return ScriptedEngine(tokenizer, answer)


class Hears(TextEnv):
    """Remembers what it heard."""

    inline = True

    def reset(self, data=None):
        self.heard = []
        return [{"role": "user", "content": "1 2"}]

    def step(self, response):
        self.heard.append(response)
        info = {"heard": response}
        done = len(self.heard) == TURNS
        return TextStep([{"role": "user", "content": "3"}], 1.0, done=done, info=info)


def is_cut(engine):
    return [answer.finish_reason == "length" for _, answer in engine.calls]


def play(env, engine, limits=LIMITS, **options):
    return first_batch(env, engine, limits=limits, **options)[0]


def rendered(tokenizer, dialogue):
    return tokenizer.apply_chat_template(
        dialogue, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def sampled_in(batch, tokenizer):
    """The sampled tokens of a batch's only row."""
    rows = MergeTurns(pad_token_id=tokenizer.pad_token_id)(batch)
    (tokens,), (mask,) = rows["tokens", "full"], rows["masks", "all_assistant_mask"]
    return tokens[mask].tolist()


def sampled_by(engine):
    return [token for _, answer in engine.calls for token in answer.token_ids]


def test_the_environment_hears_them_and_the_next_prompt_extends_them(engine, tokenizer, tmp_path):
    batch = play(Hears(), engine, dump_dir=tmp_path)
    assert len(batch) == len(engine.calls) == TURNS
    dialogue = [{"role": "user", "content": "1 2"}]
    for step, (prompt, answer) in zip(batch.unbind(0), engine.calls, strict=True):
        # What a template writes of the whole dialogue, so a cut turn ends as any other.
        assert step["tokens", "prompt"].tolist() == prompt == rendered(tokenizer, dialogue)
        assert step["tokens", "response"].tolist() == answer.token_ids
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert step["info"]["heard"] == text
        dialogue += [{"role": "assistant", "content": text}, {"role": "user", "content": "3"}]
    cut = ["length" if each else "stop" for each in is_cut(engine)]
    assert batch.get("finish_reason").tolist() == cut
    assert batch.get("stop_reason").tolist()[-1] == "done"
    assert sampled_in(batch, tokenizer) == sampled_by(engine)  # No end of a turn was made up.
    (line,) = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.open()]
    assert [turn["finish_reason"] for turn in line["turns"]] == cut
    spans = [turn["stop"] - turn["start"] for turn in line["turns"]]
    assert sum(spans) == len(sampled_by(engine))


def test_by_default_they_end_the_episode_unheard(engine):
    batch = play(Hears(), engine, Limits(max_response_tokens=LONGEST))
    cut = is_cut(engine)
    assert not any(cut[:-1])
    assert len(batch) == len(cut)
    heard = [info is not None and info["heard"] is not None for info in batch.get("info").tolist()]
    assert heard == [not each for each in cut]
    assert batch.get("stop_reason").tolist()[-1] == ("max_response_tokens" if cut[-1] else "done")


@pytest.mark.parametrize("on_cut", ["end", "continue"])
def test_one_that_fills_the_conversation_ends_the_episode(tokenizer, on_cut):
    engine = ScriptedEngine(tokenizer, lambda prompt: [5] * 9)
    limits = Limits(max_response_tokens=LONGEST, max_episode_tokens=7, on_cut=on_cut)
    batch = play(Hears(), engine, limits)
    assert batch.get("stop_reason").tolist() == ["max_episode_tokens"]


@pytest.mark.parametrize("on_cut", ["end", "continue"])
def test_workflows_go_on_as_they_like(engine, on_cut):
    class Workflow:
        async def arun_episode(self, engine, data):
            prompt = [5, 6]
            for _ in range(TURNS):
                answer = await engine.generate(prompt)
                prompt = [*prompt, *answer.token_ids, 7]
            return 1.0

    batch = play(Workflow(), engine, Limits(max_response_tokens=LONGEST, on_cut=on_cut))
    assert len(batch) == TURNS
    assert batch["turn", "parent"].tolist() == [*range(-1, TURNS - 1)]


@pytest.mark.parametrize("on_cut", ["end", "continue"])
def test_agents_are_told_and_go_on_as_they_like(engine, tokenizer, on_cut):
    class Agent:
        async def run(self, data, *, base_url, api_key, http_client):
            messages, reasons = [{"role": "user", "content": "1 2"}], []
            for _ in range(TURNS):
                reply = await http_client.post("/chat/completions", json={"messages": messages})
                (choice,) = reply.json()["choices"]
                reasons.append(choice["finish_reason"])
                messages += [choice["message"], {"role": "user", "content": "3"}]
            assert reasons == ["length" if each else "stop" for each in is_cut(engine)]
            return 1.0

    batch = play(Agent(), engine, Limits(max_response_tokens=LONGEST, on_cut=on_cut))
    assert batch["turn", "parent"].tolist() == [*range(-1, TURNS - 1)]
    assert sampled_in(batch, tokenizer) == sampled_by(engine)
