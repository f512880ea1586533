"""The trainer is the loop that one would write, and a run that was stopped goes on bit for bit."""

from __future__ import annotations

import functools
import inspect
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils import clip_grad_norm_

from tests.collectors.runs import collecting
from tests.tiers import first_fast, slow, some_fast
from tests.trainers.runs import (
    EVAL,
    PROMPT,
    WORDS,
    StopError,
    is_low,
    logged,
    policy,
    same,
    save_tiny,
    stop,
    tiny,
    trainer,
    value_model,
    weights,
)
from tests.waiting import wait_until
from torchrl_mt import pretrained
from torchrl_mt.collectors import CollectorOptions, Limits
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.trainers import MultiTurnTrainer
from torchrl_mt.trainers import trainer as module
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import check_run
from torchrl_mt.view.run_files import read_run

ITEMS = [{"messages": PROMPT}]


@pytest.fixture(autouse=True)
def without_curves(monkeypatch, request):
    """Importing matplotlib takes longer than a run."""
    if "curves" not in request.node.name:
        monkeypatch.setattr(module, "plot_run", lambda folder: "left out")


# ---- the loop -----------------------------------------------------------------------------------


def loop(*, updates, seed, num_epochs=1, optim_steps_per_batch=1, critic=None, **experience):
    """The loop that one would write."""
    torch.manual_seed(seed)
    one = policy()
    torch.manual_seed(seed)
    options = {"sampling": {"seed": seed}, "seed": seed, "total_episodes": 6 * updates}
    options["limits"] = Limits(max_response_tokens=1, on_cut="continue")
    options["postproc"] = MergeTurns(pad_token_id=one.tokenizer.pad_token_id)
    engine = TransformersEngine(one.model, one.tokenizer)
    collector = collecting(GuessNumber(4, 2), engine, n=6, **options)
    maker = ExperienceMaker(one.model, critic=critic, **experience)
    loss_module = MultiTurnLoss(one.model, critic=critic)
    parameters = [*one.model.parameters(), *([] if critic is None else critic.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    before = mean_reward(collector)
    for rows in collector:
        rows = maker(rows)
        for _ in range(num_epochs):
            parts = [torch.arange(len(rows))]
            if optim_steps_per_batch > 1:
                parts = torch.randperm(len(rows)).tensor_split(optim_steps_per_batch)
            for part in parts:
                losses = loss_module(rows[part])
                sum(v for k, v in losses.items() if k.startswith("loss")).backward()
                clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        collector.update_policy_weights_(one.model)
    results = {"before": before, "after": mean_reward(collector)}
    collector.shutdown()
    return one.model.state_dict(), results


def mean_reward(collector):
    played = collector.evaluate(EVAL)
    collector.engine.forget_cache()
    return (played["next", "reward"].sum() / played["next", "done"].sum()).item()


@pytest.mark.parametrize(
    ("num_epochs", "steps", "seed"),
    some_fast([(2, 3, 3)], [(1, 1, 0), (1, 2, 3), (1, 3, 0), (2, 1, 3), (2, 2, 0), (2, 3, 3)]),
)
def test_it_is_the_loop_that_one_would_write(num_epochs, steps, seed, tmp_path):
    settings = {
        "num_epochs": num_epochs,
        "optim_steps_per_batch": steps,
        "seed": seed,
        "gamma": 0.9,
    }
    expected, results = loop(updates=3, **settings)
    made = trainer(tmp_path, eval_data=EVAL, **settings)
    assert made.train() == pytest.approx(results, abs=0.0)
    assert same(weights(made), expected)
    assert not same(weights(made), policy().model.state_dict())


def test_a_critic_is_trained_as_in_the_loop(tmp_path):
    expected, mine = value_model(), value_model()
    actor, _ = loop(updates=2, seed=0, critic=expected, advantage="gae")
    made = trainer(tmp_path, updates=2, eval_data=EVAL, critic=mine, advantage="gae")
    made.train()
    assert same(weights(made), actor)
    assert same(mine.state_dict(), expected.state_dict())
    assert not same(mine.state_dict(), value_model().state_dict())


def test_evaluations_do_not_change_the_training(tmp_path):
    plain = trainer(tmp_path / "plain", updates=2)
    evaluated = trainer(tmp_path / "evaluated", updates=2, eval_data=EVAL, eval_every=1)
    assert plain.train() == {}
    evaluated.train()
    assert same(weights(plain), weights(evaluated))
    rows = logged(evaluated.folder)
    assert ["eval/reward" in row for row in rows.values()] == [True, False]
    for row in rows.values():
        row.pop("eval/reward", None)
    assert rows == logged(plain.folder)


@pytest.mark.slow
def test_it_learns(tmp_path):
    settings = {"eval_data": ITEMS * 20, "updates": 8, "episodes_per_batch": 24}
    results = trainer(tmp_path, task=is_low, data=ITEMS, **settings).train()
    assert results["after"] > results["before"] + 0.3


@pytest.mark.slow
def test_the_curves_are_drawn(tmp_path, capsys):
    trainer(tmp_path, updates=1).train()
    (path,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("curves: "))
    assert Path(path.removeprefix("curves: ")).exists()


def test_pages_of_training_have_the_advantage_of_each_token(tmp_path):
    trainer(tmp_path, updates=12).train()
    (page,) = (tmp_path / "episodes").glob("*.html")
    assert page.name == "10.html"
    assert '"advantage"' in page.read_text(encoding="utf-8")


def test_the_log_has_the_settings_and_the_result_is_printed(tmp_path, capsys):
    made = trainer(tmp_path / "run", eval_data=EVAL, loggers=("csv",), updates=1)
    made.train()
    expected = {"episodes_per_batch": 6, "group_size": 1, "num_epochs": 1, "seed": 0, "lr": 0.01}
    assert read_run(tmp_path / "run").facts["config"] == expected | {"optim_steps_per_batch": 1}
    assert "reward in evaluation 0." in capsys.readouterr().out


def test_plain_text_is_scored_if_the_words_are_known(tmp_path):
    words = " ".join([*WORDS, *pretrained.PLAIN_TEXT])
    made = trainer(tmp_path, model=pretrained.load(*tiny(words), lora=False), updates=1)
    assert sorted(made.train()) == ["nll_after", "nll_before"]


# ---- batches of any size ------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "sizes"), [(4, [2, 2, 1, 1]), slow(1, [6]), slow(9, [1] * 6)])
def test_every_row_is_in_one_minibatch_of_an_epoch(steps, sizes, tmp_path):
    settings = {"updates": 1, "num_epochs": 2, "optim_steps_per_batch": steps}
    made, seen = trainer(tmp_path, task=is_low, data=ITEMS, **settings), []
    forward = made.loss_module.forward
    made.loss_module.forward = lambda rows: seen.append(len(rows)) or forward(rows)
    made.train()
    assert seen == sizes * 2


def test_the_log_has_the_mean_of_all_steps_and_the_kl_of_the_first(tmp_path):
    made, seen = trainer(tmp_path, updates=1, num_epochs=3, optim_steps_per_batch=2), []
    forward = made.loss_module.forward
    made.loss_module.forward = lambda rows: seen.append(forward(rows)) or seen[-1].clone()
    made.train()
    (row,) = logged(tmp_path).values()
    kls = [float(losses["approx_kl"]) for losses in seen]
    assert len(kls) == 6
    assert float(row["approx_kl"]) == pytest.approx(sum(kls) / 6)
    assert float(row["approx_kl/first_step"]) == pytest.approx(kls[0])
    assert kls[0] < 1e-6 < kls[-1]


def test_it_ends_with_the_rewards_of_training_and_the_findings_in_full(tmp_path, capsys):
    trainer(tmp_path, task=lambda messages, item: 0.25, data=ITEMS, updates=2).train()
    findings = [each for each in check_run(tmp_path) if each.level != "good"]
    printed = capsys.readouterr().out
    assert findings
    for said in ("reward in training 0.25 -> 0.25", *map(str, findings)):
        assert said in printed


def test_a_run_ends_with_its_data_and_its_last_state_is_saved(tmp_path, capsys):
    data = iter([{"number": 1}, {"number": 2}] * 5)
    made = trainer(tmp_path, data=data, updates=9, save_every=5)
    made.train()
    assert "the data ended after 2 of 9 updates" in capsys.readouterr().out
    assert made.done["updates"] == 2
    assert list(logged(tmp_path)) == [1, 2]
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert made.run_checkpoint.restore(**{"done": {}}) == 2


@pytest.mark.parametrize("save_every", first_fast([2, 0, 1]))
def test_it_saves_as_often_as_it_is_told(save_every, tmp_path, monkeypatch):
    made, saved = trainer(tmp_path, save_every=save_every), []
    monkeypatch.setattr(made.run_checkpoint, "save", lambda step, **parts: saved.append(step))
    made.train()
    assert saved == {0: [], 1: [1, 2, 3], 2: [2, 3]}[save_every]
    assert not (tmp_path / "checkpoints").exists()


# ---- stopped runs -------------------------------------------------------------------------------

SHUFFLED = {"num_epochs": 2, "optim_steps_per_batch": 2, "eval_data": EVAL, "eval_every": 1}
RUNS = {
    "plain": {},
    "shuffled": {"num_epochs": 2, "optim_steps_per_batch": 3, "group_size": 2},
    "evaluated": {"eval_data": EVAL, "eval_every": 1},
    "seldom saved": {"save_every": 2, "eval_data": EVAL},
    "never saved": {"save_every": 0, "eval_data": EVAL},
    "critic": {"advantage": "gae"},
    "all at once": {"advantage": "gae", **SHUFFLED},
    "shuffled items": {
        "data": [{"number": k} for k in (1, 2, 3, 4)],
        "collector_kwargs": {"options": CollectorOptions(shuffle=True)},
    },
    "lora": {},
    "answers of many lengths": {
        **{"group_size": 3, "episodes_per_batch": 12},
        "limits": {"max_response_tokens": 12, "on_cut": "continue"},
    },
}


def prepared(kind, folder, *, seed=0, **kwargs):
    """A trainer of one of ``RUNS`` whose random weights follow from ``seed``."""
    settings = {**RUNS[kind], **kwargs}
    if settings.get("advantage") == "gae":
        settings["critic"] = value_model(seed + 7)
    if kind == "lora":
        settings["model"] = policy(lora=True)  # The base is what a model's name would give.
    else:
        settings["model"] = policy(seed)
    return trainer(folder, **settings)


THOROUGHLY = ("all at once", "seldom saved", "never saved")
STOPS = [*product(RUNS, (2,)), *product(THOROUGHLY, (1, 3))]


@pytest.mark.parametrize(("kind", "update"), some_fast([("all at once", 2)], STOPS))
def test_a_stopped_run_goes_on_bit_for_bit(kind, update, tmp_path):
    whole = prepared(kind, tmp_path / "whole")
    results = whole.train()
    stopped = prepared(kind, tmp_path / "stopped")
    stop(stopped, update)
    with pytest.raises(StopError):
        stopped.train()
    # What was saved replaces what the next process begins with; without, it begins anew.
    seed = 5 if (tmp_path / "stopped" / "checkpoints").exists() else 0
    again = prepared(kind, tmp_path / "stopped", seed=seed, resume=True)
    assert again.train() == results
    assert same(weights(again), weights(whole))
    if again.maker.critic is not None:
        assert same(again.maker.critic.state_dict(), whole.maker.critic.state_dict())
    assert logged(again.folder) == logged(whole.folder)
    assert again.done == whole.done


def test_a_run_goes_on_for_more_updates(tmp_path):
    whole = trainer(tmp_path / "whole", updates=2)
    whole.train()
    trainer(tmp_path / "longer", updates=1).train()
    longer = trainer(tmp_path / "longer", model=policy(5), updates=2, resume=True)
    longer.train()
    assert same(weights(longer), weights(whole))
    assert logged(longer.folder) == logged(whole.folder)


def test_a_run_that_is_done_is_only_evaluated(tmp_path, caplog):
    done = trainer(tmp_path, updates=2, eval_data=EVAL)
    results = done.train()
    again = trainer(tmp_path, model=policy(5), updates=2, eval_data=EVAL, resume=True)
    assert again.train() == results
    assert same(weights(again), weights(done))
    assert "yields nothing" not in caplog.text


def test_evaluations_play_as_they_are_told(tmp_path):
    likeliest = {"n": 3, "temperature": 0.0}
    made = trainer(tmp_path, updates=1, eval_data=EVAL, eval_kwargs=likeliest)
    results = made.train()
    assert made.collector.stats()["eval/accepted"] == 2 * len(EVAL) * 3
    # Of equal items, the likeliest answers are equal.
    assert {results["before"] * len(EVAL) % 1, results["after"] * len(EVAL) % 1} == {0}


def test_evaluations_may_begin_later(tmp_path, capsys):
    trainer(tmp_path, updates=1).train()
    later = trainer(tmp_path, updates=2, eval_data=EVAL, resume=True)
    assert list(later.train()) == ["after"]


def test_checkpoints_of_adapters_leave_out_the_base(tmp_path):
    made = trainer(tmp_path, model=policy(lora=True), updates=1)
    made.train()
    for part in ("trained", "maker"):
        names = made.parts[part].state_dict().keys() - {"_extra_state"}
        assert names
        assert all("lora_" in name for name in names)


def test_an_interrupted_run_ends_its_threads_and_begins_only_anew(tmp_path):
    made = trainer(tmp_path)

    def press():
        raise KeyboardInterrupt

    made.register_op("post_optim", press)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.collector._thread.closed
    with pytest.raises(ValueError, match="is closed: make a new"):
        made.train()


def test_a_new_run_may_take_the_folder_of_one_that_never_learned(tmp_path):
    def broken(messages, item):
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        trainer(tmp_path, task=broken, data=ITEMS, eval_data=ITEMS).train()
    trainer(tmp_path, task=is_low, data=ITEMS, eval_data=ITEMS, updates=1).train()


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    script = (
        "import sys; from pathlib import Path; from tests.trainers.test_trainer import *\n"
        "module.plot_run = lambda folder: None\n"
        "made = prepared('shuffled', Path(sys.argv[1]), updates=12, resume=True)\n"
        "made.train(); torch.save(weights(made), Path(sys.argv[1]) / 'end.pt')\n"
    )

    def begin(folder):
        command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2])

    assert begin(tmp_path / "whole").wait() == 0
    for updates in (1, 5, 9):
        run = begin(tmp_path / "killed")
        path = tmp_path / "killed" / "metrics.jsonl"
        wait_until(lambda at=updates, path=path: path.exists() and len(logged(path.parent)) >= at)
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert begin(tmp_path / "killed").wait() == 0
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed")]
    assert same(*ends)
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")


# ---- tasks, items and models --------------------------------------------------------------------


class Workflow:
    async def arun_episode(self, engine, data):
        completion = await engine.generate(engine.tokenizer.encode("guess 1"), max_new_tokens=1)
        return float(completion.token_ids[0] % 2)


class Agent:
    async def run(self, data, *, base_url, api_key, http_client):
        request = {"model": "policy", "messages": PROMPT, "max_tokens": 1}
        reply = await http_client.post("/chat/completions", json=request)
        return float("1" in reply.json()["choices"][0]["message"]["content"])


def with_default(messages, item, weight=0.5):
    return weight * is_low(messages, item)


class Grader:
    def __call__(self, messages, item):
        return is_low(messages, item)

    def grade(self, messages, item):
        return is_low(messages, item)


TASKS = {
    "environment": GuessNumber(4, 2),
    "class": GuessNumber,
    "factory": lambda: GuessNumber(4, 2),
    "factory with defaults": lambda numbers=4, turns=2: GuessNumber(numbers, turns),
    "name": "torchrl_mt.envs.GuessNumber",
    "workflow": Workflow(),
    "workflow class": Workflow,
    "agent": Agent(),
    "agent class": Agent,
}
REWARDS = {
    "function": is_low,
    "lambda": lambda messages, item: is_low(messages, item),
    "partial": functools.partial(with_default, weight=1.0),
    "default": with_default,
    "callable": Grader(),
    "method": Grader().grade,
}


@pytest.mark.parametrize("name", some_fast(["name", "agent class"], TASKS))
def test_whatever_a_collector_plays_is_a_task(name, tmp_path):
    kwargs = {}
    if name in ("class", "name"):
        given = {"numbers": 4, "turns": 2, "prompt": "guess 1 to 4"}
        kwargs["collector_kwargs"] = {"options": CollectorOptions(workflow_kwargs=given)}
    made = trainer(tmp_path, task=TASKS[name], updates=1, save_every=0, **kwargs)
    made.train()
    assert made.done["updates"] == 1
    assert logged(tmp_path)[1]["accepted"] == 6


@pytest.mark.parametrize("name", some_fast(["partial"], REWARDS))
def test_a_function_of_messages_and_item_is_a_reward(name, tmp_path):
    kwargs = {"updates": 1, "save_every": 0, "episodes_per_batch": 2}
    made = trainer(tmp_path, task=REWARDS[name], data=ITEMS, eval_data=iter(ITEMS), **kwargs)
    made.train()
    assert logged(tmp_path)[1]["turns_per_episode"] == 1


DATA = {"list": [{"number": 2}], "function": lambda: iter([{"number": 2}] * 4), "none": None}


@pytest.mark.parametrize("name", some_fast(["function"], DATA))
def test_items_in_any_form(name, tmp_path):
    made = trainer(tmp_path, data=DATA[name], group_size=2, advantage="grpo", updates=2)
    made.train()
    assert logged(tmp_path)[2]["accepted"] == 12


class Recording(GuessNumber):
    """A game that keeps the items it was played with."""

    seen: ClassVar[list] = []

    def reset(self, data):
        self.seen.append(data)
        return super().reset(data)


def test_the_seed_makes_the_items(tmp_path, monkeypatch):
    played = []
    for seed in (0, 0, 1):
        monkeypatch.setattr(Recording, "seen", [])
        made = trainer(tmp_path / str(len(played)), task=Recording(4, 2), seed=seed, updates=1)
        next(iter(made.collector))
        played.append(sorted(item["seed"] for item in Recording.seen))
    assert played[0] == played[1]
    assert played[0] != played[2]


def test_the_temperature_of_sampling_is_that_of_the_scores(tmp_path):
    made = trainer(tmp_path, sampling={"temperature": 0.5}, passes={"packed": False}, updates=1)
    made.train()
    assert logged(tmp_path)[1]["ess"] == pytest.approx(1.0, abs=1e-4)
    passes = Passes(temperature=0.5)
    made = trainer(tmp_path / "given", sampling={"temperature": 0.5}, passes=passes)
    assert made.maker.passes is passes


def test_a_loaded_model_and_one_with_adapters_are_taken(tmp_path):
    folder, (model, _) = str(tmp_path / "model"), tiny()
    save_tiny(folder)
    by_name = trainer(tmp_path / "a", model=folder, lora=False, lr=1e-3, device="cpu")
    assert by_name.optimizer.param_groups[0]["lr"] == 1e-3
    model.config.name_or_path = folder
    loaded = trainer(tmp_path / "b", model=model, lora=False)
    assert loaded.policy.model is model
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert trainer(tmp_path / "c", model=adapted).policy.model is adapted


def test_trainers_share_nothing(tmp_path):
    one, other = trainer(tmp_path / "1", updates=1), trainer(tmp_path / "2")
    one.train()
    assert (one.collected_frames, one._optim_count) == (6, 1)
    assert other.collected_frames == other._optim_count == 0
    assert not one._last_log
    assert not one._log_dict


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"updates": 0}, ValueError, "updates"),
        ({"updates": 1.5}, ValueError, "updates"),
        ({"num_epochs": 0}, ValueError, "num_epochs"),
        ({"optim_steps_per_batch": 0}, ValueError, "optim_steps_per_batch"),
        ({"eval_every": -1}, ValueError, "eval_every"),
        ({"eval_data": []}, ValueError, "eval_data must have at least one item, got none"),
        ({"save_every": -1}, ValueError, "save_every"),
        ({"eval_every": 2}, ValueError, "eval_every needs eval_data, got eval_every=2"),
        ({"group_size": 4}, ValueError, "episodes_per_batch must be a multiple of group_size=4"),
        ({"advantage": "gea"}, ValueError, "Did you mean 'gae'"),
        ({"advantage": "gae"}, ValueError, "needs a critic"),
        ({"objective": "ppoo"}, ValueError, "ppo"),
        ({"lr": 1e-4}, ValueError, "lr and device are for pretrained.load, got lr=0.0001"),
        ({"device": "cpu"}, ValueError, "device='cpu'"),
        ({"sampling": {"temperature": 0.0}}, ValueError, "temperature must be positive"),
        ({"task": 3}, TypeError, "env must be a TextEnv"),
        ({"task": lambda messages: 1.0}, TypeError, r"the item, got <lambda>\(messages\)"),
        ({"data": []}, ValueError, "data must hold at least one item"),
        ({"limits": 3}, TypeError, "limits must be"),
    ],
)
def test_wrong_arguments_are_named(kwargs, error, message, tmp_path):
    with pytest.raises(error, match=message):
        trainer(tmp_path / "run", **kwargs)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limits", "judged"),
    [
        ({"max_response_tokens": 1}, True),
        ({"max_response_tokens": 1, "on_cut": "end"}, False),
        (Limits(max_response_tokens=1), False),
    ],
)
def test_a_reward_function_judges_cut_answers_unless_told_otherwise(limits, judged, tmp_path):
    made = trainer(tmp_path, task=lambda said, item: 1.0, data=ITEMS, updates=1, limits=limits)
    made.train()
    stats = logged(tmp_path)[1]
    assert stats["reward"] == float(judged)
    assert stats["cut"] == stats["turns"] == 6


def test_a_model_without_a_name_needs_its_tokenizer(tmp_path):
    model, _ = tiny()
    with pytest.raises(TypeError, match="tokenizer must be given"):
        trainer(tmp_path, model=model)


def test_a_folder_with_a_run_is_refused(tmp_path):
    trainer(tmp_path, updates=1).train()
    with pytest.raises(FileExistsError, match="give resume=True"):
        trainer(tmp_path)


def test_a_run_goes_on_only_as_it_began(tmp_path):
    trainer(tmp_path, updates=1).train()
    began = {"episodes_per_batch": 6, "group_size": 1, "num_epochs": 1, "seed": 0}
    for name, value in began.items():
        text = f"{name} must be {value} as in the run in .*, got {value + 2}"
        with pytest.raises(ValueError, match=text):
            trainer(tmp_path, resume=True, **{name: value + 2})


def test_a_run_does_not_go_back(tmp_path):
    trainer(tmp_path, updates=2).train()
    with pytest.raises(ValueError, match=r"updates must be at least 2, which .* made, got 1"):
        trainer(tmp_path, updates=1, resume=True).train()


def test_every_argument_is_explained():
    text = MultiTurnTrainer.__doc__.split("Args:\n")[1].split("\n\n")[0]
    named = [line.strip().split(":")[0] for line in text.splitlines() if line[8:9].strip()]
    assert named == [*inspect.signature(MultiTurnTrainer).parameters]
