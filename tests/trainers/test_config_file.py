"""A run from a TOML file is the run that its keys describe, and a wrong file is told what is wrong."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from tests.tiers import slow
from tests.trainers.runs import same, save_tiny, weights
from torchrl_mt.__main__ import main
from torchrl_mt.trainers import MultiTurnTrainer
from torchrl_mt.trainers import config_file as module
from torchrl_mt.trainers import trainer as trainer_module

TASK = """
from torchrl_mt.envs import GuessNumber

items = [{"number": 1}, {"number": 2}]


class Task(GuessNumber):
    def __init__(self):
        super().__init__(4, 2)


def many():
    yield from items


def rewarded():
    yield {"messages": [{"role": "user", "content": "guess 1"}]}


def reward(messages, item):
    import tasks_of_a_run_later
    return tasks_of_a_run_later.VALUE
"""
ITEMS = [{"number": 1}, {"number": 2}]
BASE = """
model = "model"
task = "tasks_of_a_run.Task"
folder = "run"
lora = false
lr = 0.01
updates = 1
episodes_per_batch = 2
loggers = []
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a TOML file beside a model and a module; makes the changes that are asked for."""
    monkeypatch.setattr(trainer_module, "plot_run", lambda folder: "left out")
    monkeypatch.syspath_prepend(tmp_path)  # and so it is removed
    monkeypatch.delitem(sys.modules, "tasks_of_a_run", raising=False)
    save_tiny(tmp_path / "model")
    (tmp_path / "tasks_of_a_run.py").write_text(TASK)
    (tmp_path / "tasks_of_a_run_later.py").write_text("VALUE = 1.0\n")

    def written(more="", **changes):
        text = BASE
        for key, value in changes.items():
            line = "" if value is None else f"{key} = {value}"
            text = re.sub(rf"^{key} = .*$", line, text, flags=re.M)
        (tmp_path / "run.toml").write_text(text + more)
        return tmp_path / "run.toml"

    return written


def error_of(capsys, *arguments):
    """What a command says that ends at once."""
    with pytest.raises(SystemExit):
        main(["train", *map(str, arguments)])
    return capsys.readouterr().err


def test_a_file_is_the_call_with_its_keys(write, tmp_path):
    path = write(
        'data = "tasks_of_a_run.items"\neval_data = "tasks_of_a_run.many"\nseed = 3\n'
        "[limits]\nmax_response_tokens = 1\n[sampling]\ntemperature = 0.9\n"
        "[passes]\nmicro_batch_size = 1\n[collector_kwargs]\nmax_concurrency = 1\n"
        "[collector_kwargs.options]\nshuffle = true\n"
        '[maker_kwargs]\nold_log_probs = "actor"\n[loss_kwargs]\nclip_epsilon = 0.1\n'
    )
    made = module.trainer_from_file(path)
    assert made.folder == tmp_path / "run"
    assert made.eval_data == ITEMS
    assert (made.collector.options.shuffle, made.collector.options.seed) == (True, 3)
    assert made.collector.limits.max_response_tokens == 1
    assert (made.maker.passes.temperature, made.maker.passes.micro_batch_size) == (0.9, 1)
    assert made.maker.old_log_probs == "actor"
    from tasks_of_a_run import Task

    kwargs = {"lora": False, "lr": 0.01, "updates": 1, "episodes_per_batch": 2, "loggers": ()}
    kwargs |= {"limits": {"max_response_tokens": 1}, "sampling": {"temperature": 0.9}, "seed": 3}
    kwargs |= {"passes": {"micro_batch_size": 1}, "loss_kwargs": {"clip_epsilon": 0.1}}
    kwargs |= {"maker_kwargs": {"old_log_probs": "actor"}, "eval_data": ITEMS}
    collecting = {"max_concurrency": 1, "options": made.collector.options}
    kwargs |= {"folder": tmp_path / "other", "collector_kwargs": collecting}
    other = MultiTurnTrainer(str(tmp_path / "model"), Task, ITEMS, **kwargs)
    assert made.train() == other.train()
    assert same(weights(made), weights(other))


GIVEN = ['"items.jsonl"', '"tasks_of_a_run.items"', '"tasks_of_a_run.many"']


@pytest.mark.parametrize("key", ["data", slow("eval_data")])
@pytest.mark.parametrize("given", [*GIVEN, "[{number = 1}, {number = 2}]"])
def test_items_are_named_or_listed_or_in_a_file(key, given, write, tmp_path):
    (tmp_path / "items.jsonl").write_text('{"number": 1}\n\n{"number": 2}')
    made = module.trainer_from_file(write(f"{key} = {given}\n"))
    data = made.eval_data if key == "eval_data" else made.collector._data
    assert list(data() if callable(data) else data) == ITEMS


def test_adapters_may_be_a_table(write):
    made = module.trainer_from_file(write(lora="{r = 2}"))
    assert made.policy.model.active_peft_config.r == 2


def test_the_folder_may_be_at_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert module.trainer_from_file(write(folder='"~/run"')).folder == tmp_path / "home" / "run"


def test_modules_beside_the_file_are_found_from_anywhere(write, tmp_path, monkeypatch):
    path = write()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    assert module.trainer_from_file(path).folder == tmp_path / "run"


def test_functions_of_the_task_may_import_later(write):
    path = write('data = "tasks_of_a_run.rewarded"\n', task='"tasks_of_a_run.reward"')
    made = module.trainer_from_file(path)
    made.train()
    assert made.done["updates"] == 1


def test_the_command_trains_and_goes_on(write, tmp_path, capsys):
    assert main(["train", str(write())]) == 0
    assert "give resume=True to go on" in error_of(capsys, write())
    assert main(["train", str(write(updates=2)), "--resume"]) == 0
    assert "checkpoint-2" in {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()}


def test_an_interrupted_command_says_how_to_go_on(write, monkeypatch, capsys):
    def press(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(MultiTurnTrainer, "train", press)
    assert main(["train", str(write())]) == 130
    assert "--resume goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ("updats = 3", {}, "Did you mean 'updates'"),
        ("resume = true", {}, "a key must be one of"),
        ("critic = 3", {}, "a key must be one of"),
        ("[limits]\nmax_turn = 3", {}, "a key of [limits] must be one of"),
        ("[limits]\nmax_turn = 3", {}, "Did you mean 'max_turns'"),
        ("[passes]\npackd = true", {}, "Did you mean 'packed'"),
        ("[collector_kwargs]\nmax_concurency = 3", {}, "Did you mean 'max_concurrency'"),
        ("[collector_kwargs.options]\nshufle = true", {}, "Did you mean 'shuffle'"),
        ("[maker_kwargs]\nkl_coeff = 0.1", {}, "Did you mean 'kl_coef'"),
        ("[loss_kwargs]\nclip_epsilom = 0.1", {}, "Did you mean 'clip_epsilon'"),
        ("limits = 3", {}, "limits must be a table, got 3"),
        ("collector_kwargs = 3", {}, "collector_kwargs must be a table, got 3"),
        ("[collector_kwargs]\noptions = 3", {}, "collector_kwargs.options must be a table, got 3"),
        ("", {"model": None}, "must have model = \"...\", got 'nothing'"),
        ("", {"task": None}, 'must have task = "..."'),
        ("", {"folder": 3}, 'must have folder = "...", got 3'),
        ("updates = = 3", {}, "must be a TOML file"),
        ("", {"task": '"no_such_module.Task"'}, "importing the module 'no_such_module' failed"),
        ("", {"task": '"tasks_of_a_run.Tusk"'}, "has no 'Tusk'"),
        ("", {"task": '"Task"'}, 'must be named as "package.module.Class"'),
        ('data = "no_such.jsonl"', {}, "No such file"),
        ('data = "broken.jsonl"', {}, "broken.jsonl is no JSON in line 2"),
        ("data = 3", {}, "data must be a list"),
        ("eval_every = 2", {}, "eval_every needs eval_data"),
        ("", {"updates": '"3"'}, "updates must be a positive integer, got '3'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(more, changes, message, write, tmp_path, capsys):
    (tmp_path / "broken.jsonl").write_text('{"number": 1}\n{"number": \n')
    error = error_of(capsys, write(more + "\n", **changes))
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_missing_file_is_named(tmp_path, capsys):
    assert "none.toml" in error_of(capsys, tmp_path / "none.toml")


def test_the_help_explains_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for key in inspect.signature(MultiTurnTrainer).parameters:
        assert (f"\n{key}: " in printed) == (key not in ("critic", "resume"))
    assert ":class:" not in printed
    assert "``" not in printed
    assert printed.endswith(f"{module.explain_keys()}\n")
