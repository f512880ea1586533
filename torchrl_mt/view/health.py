"""What is wrong with a run, from its log alone: a table of rules, each a small function.

A rule whose metrics were not logged finds nothing, neither good nor bad. The page :doc:`/watching` says
what each means and what to do.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from torchrl_mt.view.run_files import Run, read_run

__all__ = ["RULES", "Finding", "Rule", "check_run", "judge_run"]

Level = Literal["bad", "watch", "good"]
Verdict = tuple[Level, str, np.ndarray]
"""Level, text and steps of a finding."""
_LEVELS = ("bad", "watch", "good")
_WINDOW = 10
"""The last steps, which tell how the run is now."""
_FEWEST = 5
"""Steps that a comparison over time needs."""


@dataclass(frozen=True)
class Finding:
    """What a rule found in a run.

    Examples:
        >>> print(Finding("watch", "stale", "Old samples", "Tokens are 8 versions old.", (3, 4)))
        watch: Old samples. Tokens are 8 versions old. (steps 3 to 4; rule stale)
    """

    level: Level
    """``"bad"``, ``"watch"`` or ``"good"``."""
    rule: str
    """The rule's name, which has a section in the documentation: ``rule-<name>``."""
    title: str
    """What was checked."""
    text: str
    """What was found, and what to do about it, in sentences."""
    steps: tuple[int, ...]
    """The steps that show it, ascending; at least one."""

    def __str__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{self.level}: {self.title}. {self.text} ({steps}; rule {self.rule})"


class Rule(NamedTuple):
    """A rule of :data:`RULES`."""

    title: str
    """What it checks."""
    needs: str
    """The metrics that it reads."""
    judge: Callable[[Run], Verdict | None]
    """``None`` if the metrics are missing."""


def check_run(folder: str | os.PathLike[str]) -> list[Finding]:
    """Check a run by the rules of :doc:`/watching`; the worst findings come first.

    Most rules judge the last 10 logged steps, so a fault that was repaired is no longer found.

    Args:
        folder: the folder of a :class:`~torchrl_mt.view.RunLog`, which may still be written.

    Returns:
        A finding for each rule whose metrics the log has.

    Raises:
        FileNotFoundError: if it is no folder of a run.
        ValueError: if one of its files is damaged.

    Examples:
        >>> import tempfile
        >>> from torchrl_mt.view import RunLog
        >>> with RunLog(tempfile.mkdtemp(), loggers=()) as log:
        ...     log(0, loss_objective=float("nan"))
        >>> for finding in check_run(log.folder):
        ...     print(finding.level, finding.rule)
        bad not-finite
    """
    return judge_run(read_run(folder))[0]


def judge_run(run: Run) -> tuple[list[Finding], list[str]]:
    """Apply all rules: the findings, and the names of the rules whose metrics are missing."""
    findings, missing = [], []
    for name, rule in RULES.items():
        verdict = rule.judge(run) if len(run.rows) else None
        if verdict is None:
            missing.append(name)
            continue
        level, text, steps = verdict
        findings.append(Finding(level, name, rule.title, text, tuple(map(int, steps))))
    return sorted(findings, key=lambda each: _LEVELS.index(each.level)), missing


def _level(value: float, watch: float, bad: float) -> Level:
    """The level of a value that is worse the higher it is."""
    return "bad" if value >= bad else "watch" if value >= watch else "good"


def _now(run: Run, *names: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the last steps that have a number, without those that are not finite."""
    steps, values = run.series(*names)
    steps, values = steps[-_WINDOW:], values[-_WINDOW:]
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _grown(run: Run, *names: str) -> float:
    """By how much counters grew in the last steps."""
    return float(run.growth(*names)[-_WINDOW:].sum())


def _rewards(run: Run, of: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and mean over the labels of ``"mean"`` or ``"std"`` of the reward."""
    if of == "mean" and "reward" in run.names:
        return run.series("reward")
    names = run.matching(f"reward/*/{of}")
    found = {
        step: float(np.mean([row[name] for name in names if name in row]))
        for step, row in run.rows.items()
        if any(name in row for name in names)
    }
    return np.array(list(found), dtype=np.int64), np.array(list(found.values()))


def _cut_responses(run: Run) -> Verdict | None:
    accepted = _grown(run, "accepted")
    if not accepted:
        return None
    share = _grown(run, "stop/max_response_tokens") / accepted
    text = f"{share:.0%} of the accepted episodes ended because a response was cut at its limit."
    if share >= 0.5:
        text += " The environment never saw these. Raise Limits(max_response_tokens=...)."
    return _level(share, 0.5, 0.9), text, run.steps[-_WINDOW:]


def _no_spread(run: Run) -> Verdict | None:
    steps, share = _now(run, "groups/without_spread")
    if len(share):
        text = f"In {share.mean():.0%} of the groups all episodes had the same reward"
        level = _level(float(share.mean()), 0.5, 0.95)
    else:
        steps, spread = (each[-_WINDOW:] for each in _rewards(run, "std"))
        if not len(spread):
            return None
        flat = float((spread == 0).mean())
        text = f"In {flat:.0%} of the batches all episodes had the same reward"
        level = _level(flat, 0.5, 0.95)
    what = " and taught nothing. Use other items, or a reward for partial answers."
    return level, text + ("." if level == "good" else what), steps


def _flat_reward(run: Run) -> Verdict | None:
    steps, reward = _rewards(run, "mean")
    _, drift = run.series("kl/mean", "kl_to_ref")
    third = min(len(reward), len(drift)) // 3
    if third < _FEWEST:
        return None
    first, last = reward[:third], reward[-third:]
    gain = float(last.mean() - first.mean())
    noise = math.sqrt(float(first.var() + last.var()) / third)
    before, after = float(drift[:third].mean()), float(drift[-third:].mean())
    moved = after > 0.01 and after > 2 * before
    text = (
        f"The reward went from {first.mean():.3g} to {last.mean():.3g} while the KL to the reference "
        f"went from {before:.3g} to {after:.3g}."
    )
    if moved and gain <= 2 * noise:
        text += " The policy moves away and gains nothing. Lower the learning rate; read episodes."
        return ("bad" if gain < -2 * noise else "watch"), text, steps[-third:]
    return "good", text, steps[-third:]


def _entropy_gone(run: Run) -> Verdict | None:
    names = ("entropy", "entropy/mean")
    steps, now = _now(run, *names)
    before = run.series(*names)[1][:_FEWEST]
    if not len(now):
        return None
    level, fell = float(np.median(now)), float(np.median(now)) < 0.2 * float(np.median(before))
    text = f"The entropy is {level:.3g} nats per token."
    if level < 0.01 or fell:
        text += f" It began at {np.median(before):.3g}: the policy hardly tries anything new."
        return ("bad" if level < 0.01 and fell else "watch"), text, steps
    return "good", text, steps


def _ratios_off(run: Run) -> Verdict | None:
    staleness = dict(zip(*map(np.ndarray.tolist, run.series("staleness/max")), strict=True))
    for name, what, watch, bad in (
        ("correction_ess", "1 - correction_ess", 0.05, 0.2),
        ("approx_kl", "approx_kl", 0.03, 0.1),
    ):
        steps, values = run.series(name)
        equal = np.array([staleness.get(step) == 0 for step in steps.tolist()], dtype=bool)
        steps, values = steps[equal][-_WINDOW:], values[equal][-_WINDOW:]
        if len(values):
            off = float(np.median(1 - values if name == "correction_ess" else values))
            level = _level(off, watch, bad)
            text = f"On samples of the current version, {what} is {off:.2g}."
            if level != "good":
                text += (
                    " Sampler and trainer disagree about the same weights: compare temperature, "
                    "precision and chat template, and whether the engine got the weights."
                )
            return level, text, steps
    return None


def _stale(run: Run) -> Verdict | None:
    steps, oldest = _now(run, "staleness/max")
    if not len(oldest):
        return None
    dropped = _grown(run, "rejected/stale") / max(_grown(run, "accepted", "rejected"), 1)
    text = f"The oldest tokens of a batch are {np.median(oldest):.0f} versions old."
    if dropped >= 0.1:
        text += f" {dropped:.0%} of the episodes were rejected as too old: sampling is too slow."
        return _level(dropped, 0.1, 0.5), text, steps
    bound = _setting(run.facts.get("config"), "max_staleness")
    if bound and float((oldest >= bound).mean()) >= 0.8:
        text += f" That is the bound, max_staleness={bound:g}: training is slower than sampling."
        return "watch", text, steps
    return "good", text, steps


def _slow_environment(run: Run) -> Verdict | None:
    steps, environment = _now(run, "time/environment")
    _, engine = _now(run, "time/engine")
    if not len(environment) or not len(engine):
        return None
    env, model = float(environment[-1]), float(engine[-1])
    text = f"Of the episodes' time, the environment takes {env:.0%} and the model {model:.0%}."
    if env > model and env > 0.3:
        text += " The model waits. Play more episodes at a time, or use more environment workers."
        return "watch", text, steps
    return "good", text, steps


def _token_counts(run: Run) -> Verdict | None:
    trained = [row.get("trained_tokens") for row in run.rows.values()]
    sampled = run.growth("tokens")
    both = [i for i, count in enumerate(trained) if i and count is not None]
    total = float(sampled[both].sum()) if both else 0.0
    # With a rate limit, tokens are meant to be trained several times.
    if len(both) < _FEWEST or not total or "rate/ratio" in run.names:
        return None
    times = sum(trained[i] or 0.0 for i in both) / total
    text = f"Each sampled token was trained {times:.2g} times."
    if times > 1.5:
        text += " Is a batch trained twice, or are rows sampled anew from a buffer?"
    elif times < 0.67:
        text += " The rest was never trained, or only the last part of each batch was logged."
    return ("good" if 0.67 <= times <= 1.5 else "watch"), text, run.steps[both]


def _rejected_episodes(run: Run) -> Verdict | None:
    # Those that still ran when the run was stopped are no sign of anything.
    rejected = _grown(run, "rejected") - _grown(run, "rejected/cancelled")
    ended = rejected + _grown(run, "accepted")
    if not {"accepted", "rejected"} <= run.names or ended <= 0:
        return None
    share = rejected / ended
    causes = {cause: _grown(run, name) for name, cause in run.matching("rejected/*").items()}
    causes = {cause: count for cause, count in causes.items() if count and cause != "cancelled"}
    most = sorted(causes, key=lambda cause: -causes[cause])[:3]
    text = f"{share:.0%} of the episodes that ended were rejected"
    text += ": " + ", ".join(f"{causes[each]:.0f} for {each}" for each in most) if most else ""
    return _level(share, 0.2, 0.5), text + ".", run.steps[-_WINDOW:]


def _not_finite(run: Run) -> Verdict | None:
    shape = re.compile(r"(.*/)?(loss|grad_norm|reward|approx_kl|kl|entropy)([/_].*)?")
    names = [name for name in sorted(run.names) if shape.fullmatch(name)]
    if not names:
        return None
    faults: dict[int, str] = {}
    for name in names:
        steps, values = run.series(name)
        for step in steps[~np.isfinite(values)].tolist():
            faults.setdefault(step, name)
    if not faults:
        return "good", "All losses and rewards are finite numbers.", run.steps[-_WINDOW:]
    first = min(faults)
    level: Level = "bad" if max(faults) in run.steps[-_WINDOW:] else "watch"
    text = (
        f"{faults[first]} is not a number or infinite, first at step {first}. The weights may be "
        "damaged since: go back to a checkpoint before it."
    )
    return level, text, np.array(sorted(faults))


def _setting(config: Any, name: str) -> float | None:
    """A number of a nested config, by its name."""
    if not isinstance(config, Mapping):
        return None
    found = config.get(name)
    if isinstance(found, (int, float)):
        return found
    inner = (_setting(each, name) for each in config.values())
    return next((each for each in inner if each is not None), None)


RULES: dict[str, Rule] = {
    "not-finite": Rule("Numbers that are not finite", "loss_*, grad_norm", _not_finite),
    "cut-responses": Rule("Cut responses", "accepted, stop/max_response_tokens", _cut_responses),
    "rejected-episodes": Rule("Rejected episodes", "accepted, rejected", _rejected_episodes),
    "no-spread": Rule("Equal rewards", "groups/without_spread or reward/*/std", _no_spread),
    "flat-reward": Rule(
        "Reward and drift", "reward, kl/mean or kl_to_ref, of 15 steps", _flat_reward
    ),
    "entropy-gone": Rule("Entropy", "entropy or entropy/mean", _entropy_gone),
    "ratios-off": Rule(
        "Agreement of sampler and trainer",
        "correction_ess or approx_kl, at staleness/max of 0",
        _ratios_off,
    ),
    "stale": Rule("Age of the samples", "staleness/max", _stale),
    "token-counts": Rule("Sampled and trained tokens", "tokens, trained_tokens", _token_counts),
    "slow-environment": Rule(
        "Time of the environment", "time/environment, time/engine", _slow_environment
    ),
}
"""The rules by name."""
