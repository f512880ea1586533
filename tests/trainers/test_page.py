"""The code of the trainer's page and of the front page runs as it stands, and does what they say."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import torchrl_mt as mt
from tests.pages import code_of
from tests.trainers.runs import is_low, policy, same, save_tiny, trainer, weights
from torchrl_mt.__main__ import main
from torchrl_mt.trainers import trainer as module
from torchrl_mt.trainers.config_file import trainer_from_file
from torchrl_mt.view.run_files import read_run

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WORDS = [*map(str, range(19)), "+", "=", "to", "guess", "higher", "lower", "correct", "invalid"]
PAGE = "trainer.rst"


@pytest.fixture(autouse=True)
def beside_a_model(tmp_path, monkeypatch):
    """Work in a folder with a tiny model, which stands for the pages' one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "plot_run", lambda folder: "left out")
    save_tiny("model", WORDS)


def code(section, page=PAGE, number=0, language="python"):
    """A block of a page, with the tiny model and few updates."""
    text = code_of(page, section, number, language).replace(NAME, "model")
    return re.sub(r"\bupdates( ?= ?)(40|10)\b", r"updates\g<1>1", text)


@pytest.mark.parametrize(
    ("page", "section"), [(PAGE, "A reward function"), ("index.rst", "Train a model")]
)
def test_a_reward_function_is_enough(page, section):
    text = code(section, page)
    assert page == PAGE or len(list(filter(None, text.splitlines()))) <= 12
    names = {}
    exec(text, names)
    made = names["trainer"]
    assert made.done["updates"] == 1
    assert {"before", "after"} <= made.results.keys()
    assert (made.folder / "after.html").exists()
    assert names["reward"]([{"role": "assistant", "content": " 7 "}], {"answer": "7"}) == 1.0


def test_the_loop_of_the_front_page_runs(capsys):
    text = code("Write the loop", "index.rst")
    assert "total_episodes=12_800" in text
    exec(text.replace("12_800", "256"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_environment_takes_further_arguments():
    names = {"mt": mt}
    exec(code("An environment"), names)
    with names["trainer"].collector:
        assert names["trainer"].updates == 100
        assert names["trainer"].collector.limits.max_response_tokens == 4


def test_the_file_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "sums", raising=False)
    (tmp_path / "sums.py").write_text(
        code("A reward function").split("trainer =")[0].replace("import torchrl_mt as mt\n", "")
    )
    item = {"messages": [{"role": "user", "content": "1 + 2 ="}], "answer": "3"}
    (tmp_path / "eval.jsonl").write_text(json.dumps(item) + "\n")
    path = tmp_path / "sums.toml"
    path.write_text(code("A file", language="toml"))
    with trainer_from_file(path).collector as collector:
        assert collector.options.shuffle
        assert collector.group_size == 8
    assert main(["train", str(path)]) == 0
    assert (tmp_path / "runs" / "sums" / "checkpoints").is_dir()


def test_the_loop_is_that_of_the_trainer(tmp_path):
    made = trainer(tmp_path / "made")
    made.train()
    mine = trainer(tmp_path / "mine")
    exec(code("Leaving the trainer"), {"torch": torch, "trainer": mine})
    assert same(weights(made), weights(mine))
    assert not same(weights(made), policy().model.state_dict())


def test_the_folder_has_the_files_of_the_table(tmp_path, monkeypatch):
    monkeypatch.undo()
    items = [{"messages": [{"role": "user", "content": "guess 1"}]}]
    made = trainer(
        tmp_path / "run", task=is_low, data=items, eval_data=items, loggers=("csv",), updates=4
    )
    made.train()
    found = {path.name for path in made.folder.iterdir()}
    assert found == {
        *("metrics.jsonl", "run.json", "before.html", "after.html", "run.html", "run.png"),
        *("checkpoints", "csv", "episodes", "model"),
    }
    saved = AutoModelForCausalLM.from_pretrained(made.folder / "model")
    assert same(weights(made), saved.state_dict())
    assert len(list((made.folder / "checkpoints").iterdir())) == 3


def test_hooks_see_what_the_table_says(tmp_path):
    made = trainer(tmp_path, updates=2)
    exec(code("Hooks"), names := {"torch": torch, "trainer": made})
    seen = []

    def after_update():
        logged = max(read_run(made.folder).rows)
        saved = made.run_checkpoint.folder / f"checkpoint-{logged}"
        seen.append((logged, made.collector.policy_version, saved.exists()))

    def see(rows):
        seen.append("advantage" in rows)
        return rows

    made.register_op("batch_process", see)
    made.register_op("post_steps", after_update)
    made.register_op("shutdown", lambda: seen.append("end"))
    made.train()
    assert seen == [True, (1, 1, True), True, (2, 2, True), "end"]
    assert names["scheduler"].last_epoch == 2


def test_a_scheduler_goes_on_with_its_run(tmp_path):
    def make(**kwargs):
        kwargs |= {"limits": {"max_response_tokens": 1, "on_cut": "continue"}, "loggers": ()}
        kwargs |= {"folder": tmp_path / "run", "episodes_per_batch": 4}
        made = trainer(**kwargs)
        exec(code("Hooks"), names := {"torch": torch, "trainer": made})
        return made, names["scheduler"]

    make(updates=2)[0].train()
    made, scheduler = make(updates=3, resume=True)
    made.train()
    assert scheduler.last_epoch == 3
    assert made.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 1e-2
