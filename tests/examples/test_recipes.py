"""The recipes for real models run from end to end, here with a tiny one, and say what they reached."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from tests.chat.templates import CHATML, byte_level
from tests.test_readme import RESULTS
from torchrl_mt.datasets import ConversationDataset
from torchrl_mt.trainers import trainer as trainer_module
from torchrl_mt.view.run_files import read_run

from .conftest import save_model

pytest.importorskip("peft", reason="LoRA needs the extra [lora]")
httpx = pytest.importorskip("httpx", reason="agents need the extra [agents]")
pytest.importorskip("openai", reason="agents need the extra [agents]")

SUPERVISED = ("tool_agent", "offline_dialogues")
"""The recipes that begin with written dialogues."""
TRAINER = ("first_model", "ppo_critic", "openai_agent")
"""The recipes with the trainer. The first two have the same task."""


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_short_run_ends_with_its_results(load, name, tmp_path, capsys):
    out, model = tmp_path / "run", save_model(tmp_path, CHATML.on(byte_level()))
    args = ["--updates", "1", "--episodes", "2", "--held-out", "2", "--sft-steps", "1"]
    args += ["--model", model, "--out", str(out)]
    recipe = load(name, short=False)
    recipe.main(args)
    printed = capsys.readouterr().out
    assert re.fullmatch(RESULTS, printed.splitlines()[-1])
    assert "\nupdate 1: " in printed
    pages = [f"{when}.html" for when in ("after", "before", "run", "supervised")]
    assert sorted(path.name for path in out.glob("*.html")) == pages
    assert read_run(out).rows[1]["accepted"] == 2
    with pytest.raises(FileExistsError, match="--resume goes on"):
        recipe.main(args)


@pytest.mark.parametrize("name", TRAINER)
def test_a_run_of_the_trainer_goes_on(load, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trainer_module, "plot_run", lambda folder: "left out")
    recipe, out = load(name, short=False), tmp_path / "run"
    args = ["--model", save_model(tmp_path, CHATML.on(byte_level())), "--out", str(out)]
    recipe.main([*args, "--updates", "1"])
    with pytest.raises(FileExistsError):
        recipe.main([*args, "--updates", "2"])
    before = (out / "before.html").read_bytes()
    recipe.main([*args, "--updates", "2", "--resume"])
    assert re.fullmatch(RESULTS, capsys.readouterr().out.splitlines()[-1])
    assert list(read_run(out).rows) == [1, 2]
    assert (out / "before.html").read_bytes() == before


@pytest.mark.parametrize("name", TRAINER[:2])
def test_the_prices_are_found_by_a_call(load, name):
    recipe = load(name, short=False)
    assert len(recipe.PRICES) == 24
    item = recipe.ask("rope")
    (example,) = recipe.parse(item["messages"][2]["content"])
    assert example == {"name": "price", "arguments": {"item": "bread"}}
    (call,) = recipe.parse("price(rope)")
    said = str(recipe.price(**call["arguments"]))
    assert recipe.parse(said) == []
    assert recipe.reward([{"role": "assistant", "content": f" {said}"}], item) == 1.0
    assert recipe.reward([{"role": "assistant", "content": "price(rope)"}], item) == 0.0


def test_the_written_calls_of_tools_are_right(load):
    recipe = load("tool_agent", short=False)
    for item in itertools.islice(recipe.questions(recipe.GOODS, seed=0), 20):
        messages = recipe.written(item)["messages"]
        call, result, answer = messages[2:]
        (parsed,) = recipe.parse(call["content"])
        assert str(getattr(recipe, parsed["name"])(**parsed["arguments"])) == result["content"]
        assert recipe.parse(answer["content"]) == []
        assert recipe.reward(messages, item) == 1.0


def test_the_expert_of_the_dialogues_on_disk_is_right(load, tmp_path):
    recipe = load("offline_dialogues", short=False)
    items = list(itertools.islice(recipe.customers(recipe.GOODS, seed=0), 20))
    recipe.write_dialogues(tmp_path / "dialogues.jsonl", iter(items))
    lines = (tmp_path / "dialogues.jsonl").read_text().splitlines()
    for data, line in zip(items, lines, strict=True):
        env = recipe.Desk()
        messages = env.reset(data)
        said = [m["content"] for m in json.loads(line)["messages"] if m["role"] == "assistant"]
        steps = [env.step(answer) for answer in said]
        assert [step.done for step in steps] == [False] * (len(said) - 1) + [True]
        assert steps[-1].reward == 1.0
        assert messages[-1]["content"] == data["letter"]
    dialogues = ConversationDataset(tmp_path / "dialogues.jsonl", CHATML.on(byte_level()))
    assert len(dialogues) == 20


@pytest.mark.parametrize("wrong", [[], [1], [0, 2]])
async def test_each_call_of_the_agent_is_rewarded_for_its_field(load, wrong):
    recipe = load("openai_agent", short=False)
    data = next(recipe.orders(recipe.GOODS, recipe.CITIES, seed=0))
    asked = []

    def answer(request):
        asked.append(json.loads(request.content)["messages"])
        value = list(data["fields"].values())[len(asked) - 1]
        message = {"role": "assistant", "content": None if len(asked) - 1 in wrong else value}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        return httpx.Response(200, json={**body, "choices": [choice]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        connection = {"base_url": "http://model/v1", "api_key": "key", "http_client": client}
        rewards = await recipe.Clerk().run(data, **connection)
    assert rewards == [float(call not in wrong) for call in range(3)]
    questions = [f"{data['order']}\ngoods?", "number?", "city?"]
    assert [messages[-1]["content"] for messages in asked] == questions
