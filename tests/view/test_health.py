"""Rules: each finds its fault in a run that has it, and none in a run that has not."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import RunLog, check_run
from torchrl_mt.view.health import RULES

STEPS = 30
PAGE = Path(__file__).parents[2] / "docs" / "watching.rst"


def healthy(step: int) -> dict[str, float]:
    """The numbers of a step without any fault."""
    done = step + 1
    return {
        "accepted": 16 * done,
        "rejected": done,
        "rejected/TimeoutError": done,
        "stop/done": 15 * done,
        "stop/max_response_tokens": done,
        "tokens": 1000 * done,
        "trained_tokens": 1000,
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
        "time/engine": 0.7,
        "time/environment": 0.2,
        "reward/default/mean": 0.1 + 0.02 * step,
        "reward/default/std": 0.3,
        "groups/without_spread": 0.2,
        "kl/mean": 0.001 * step,
        "entropy": 0.5,
        "approx_kl": 0.001,
        "loss_objective": 0.1,
    }


def check(folder, change=lambda step: {}, config=None) -> dict:
    """Log healthy numbers with changes, where ``None`` removes one; findings by rule."""
    with RunLog(folder, loggers=(), config=config) as run:
        for step in range(STEPS):
            run.log(step, healthy(step) | change(step))
    return {finding.rule: finding for finding in check_run(folder)}


FAULTS = {
    "cut-responses": [
        ("bad", lambda s: {"stop/max_response_tokens": 16 * (s + 1)}),
        ("watch", lambda s: {"turns": 20 * (s + 1), "cut": 12 * (s + 1)}),
    ],
    "no-spread": [
        ("bad", lambda s: {"groups/without_spread": 1.0}),
        ("watch", lambda s: {"groups/without_spread": 0.6}),
        ("bad", lambda s: {"groups/without_spread": None, "reward/default/std": 0.0}),
    ],
    "flat-reward": [
        ("watch", lambda s: {"reward/default/mean": 0.3 + 0.1 * (s % 2)}),
        ("bad", lambda s: {"reward/default/mean": 0.9 - 0.02 * s}),
        ("watch", lambda s: {"reward": 0.5, "kl/mean": None, "kl_to_ref": 0.01 * s}),
    ],
    "entropy-gone": [
        ("bad", lambda s: {"entropy": math.exp(-s)}),
        ("watch", lambda s: {"entropy": None, "entropy/mean": 0.005}),
    ],
    "ratios-off": [
        ("bad", lambda s: {"approx_kl": 0.3}),
        ("watch", lambda s: {"correction_ess": 0.9}),
    ],
    "stale": [
        ("watch", lambda s: {"staleness/max": 4.0}),
        ("bad", lambda s: {"rejected/stale": 40 * s, "rejected": 41 * s + 1}),
    ],
    "slow-environment": [("watch", lambda s: {"time/engine": 0.1, "time/environment": 0.8})],
    "token-counts": [
        ("watch", lambda s: {"trained_tokens": 2000}),
        ("watch", lambda s: {"trained_tokens": 300}),
    ],
    "rejected-episodes": [
        ("bad", lambda s: {"rejected": 20 * s, "rejected/TimeoutError": 20 * s}),
        ("watch", lambda s: {"rejected": 8 * s, "rejected/declined": 7 * s}),
    ],
    "not-finite": [
        ("bad", lambda s: {"loss_objective": math.nan} if s > 25 else {}),
        ("watch", lambda s: {"grad_norm": math.inf} if s == 3 else {}),
        ("bad", lambda s: {"critic": {"loss": math.nan}}),
    ],
}


def without(change, step: int) -> dict:
    """A change in which ``None`` removes a number: text is left out of a log."""
    return {name: "none" if value is None else value for name, value in change(step).items()}


@pytest.mark.parametrize(
    ("rule", "level", "change"), [(rule, *case) for rule, cases in FAULTS.items() for case in cases]
)
def test_a_rule_finds_its_fault_alone(tmp_path, rule, level, change):
    found = check(tmp_path, lambda step: without(change, step), {"collector": {"max_staleness": 4}})
    assert found[rule].level == level, str(found[rule])
    others = {name for name, finding in found.items() if finding.level != "good"} - {rule}
    if rule == "stale":  # these episodes were rejected, too
        others -= {"rejected-episodes"}
    assert not others
    assert next(iter(found)) in ({rule} | {"rejected-episodes"})  # the worst comes first
    assert set(found[rule].steps) <= set(range(STEPS))
    assert re.fullmatch(rf"{level}: .+[.?] \(steps? [^;]+; rule {rule}\)", str(found[rule]))


def test_a_run_without_faults_has_only_good_findings(tmp_path):
    found = check(tmp_path)
    assert {finding.level for finding in found.values()} == {"good"}
    assert set(found) == set(RULES) == set(FAULTS)


def test_a_repaired_fault_is_no_longer_found(tmp_path):
    found = check(tmp_path, lambda step: {"groups/without_spread": float(step < 20)})
    assert found["no-spread"].level == "good"


def test_without_its_numbers_a_rule_finds_nothing(tmp_path):
    with RunLog(tmp_path, loggers=()) as run:
        assert check_run(tmp_path) == []
        run.log(0, mine=1.0)
    assert check_run(tmp_path) == []


def test_rules_that_would_mislead_stay_silent(tmp_path):
    drawn_several_times_on_purpose = {"trained_tokens": 4000, "rate/ratio": 4.0}
    old_samples_whose_ratios_may_differ = {"approx_kl": 0.5, "staleness/max": 2.0}
    stopped_not_rejected = {"rejected": 100, "rejected/cancelled": 99}
    changes = drawn_several_times_on_purpose | old_samples_whose_ratios_may_differ
    found = check(tmp_path, lambda step: changes | stopped_not_rejected)
    assert {"token-counts", "ratios-off"} & set(found) == set()
    assert {finding.level for finding in found.values()} == {"good"}


def test_ratios_are_those_of_the_first_of_several_steps_on_a_batch(tmp_path):
    found = check(tmp_path, lambda step: {"approx_kl": 0.5, "approx_kl/first_step": 0.001})
    assert found["ratios-off"].level == "good"


def test_counters_that_begin_anew_count_from_zero(tmp_path):
    change = lambda step: {"accepted": 16 * (step % 25 + 1), "stop/max_response_tokens": 0}  # noqa: E731
    assert check(tmp_path, change)["cut-responses"].level == "good"


def test_each_rule_has_a_section_of_a_short_page():
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\.\. _rule-([\w-]+):$", text, re.MULTILINE) == list(RULES)
    assert len(text.split()) <= 1500


def test_the_package_emits_the_numbers_that_rules_read(tmp_path, tokenizer, model):
    sizes = {"episodes_per_batch": 8, "group_size": 4, "total_episodes": 48}
    sizes |= {"limits": Limits(max_response_tokens=2), "postproc": MergeTurns()}
    engine = TransformersEngine(model, tokenizer)
    collector = MultiTurnCollector(GuessNumber(16, turns=2), engine, **sizes)
    maker = ExperienceMaker(model, ref=model, advantage="grpo", old_log_probs="actor")
    loss_module = MultiTurnLoss(model, objective="ppo", correction="token_tis")
    with RunLog(tmp_path, loggers=()) as run:
        for step, rows in enumerate(collector):
            losses = loss_module(maker(rows))
            run.log(step, collector.stats(), maker.metrics, losses)
            collector.update_policy_weights_(model)
    found = {finding.rule: finding for finding in check_run(tmp_path)}
    # A comparison over time needs more steps.
    assert set(found) == set(RULES) - {"flat-reward"}
    assert found["ratios-off"].level == "good", str(found["ratios-off"])
    assert found["token-counts"].level == "good", str(found["token-counts"])
    assert torch.isfinite(losses["loss_objective"])
