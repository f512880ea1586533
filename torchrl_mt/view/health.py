"""What is wrong with a run, from its log alone: a table of rules, each a small function.

A rule whose metrics were not logged finds nothing, neither good nor bad. The page :doc:`/watching` says
what each means and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchrl_mt.view.run_files import Run, flat_numbers, read_run

__all__ = ["RULES", "Finding", "check_run", "judge_run"]

Level = Literal["bad", "watch", "good"]
Verdict = tuple[Level, str, str, np.ndarray]
"""Level, what was found, what to do unless all is good, and the steps that show it."""
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
        >>> with RunLog(tempfile.mkdtemp(), loggers=()) as run:
        ...     run.log(0, loss_objective=float("nan"))
        >>> for finding in check_run(run.folder):
        ...     print(finding.level, finding.rule)
        bad not-finite
    """
    return judge_run(read_run(folder))[0]


def judge_run(run: Run) -> tuple[list[Finding], list[str]]:
    """Apply all rules: the findings, and the names of the rules whose metrics are missing."""
    findings, missing = [], []
    for name, (title, judge) in RULES.items():
        verdict = judge(run) if run.rows else None
        if verdict is None:
            missing.append(name)
        else:
            level, text, advice, steps = verdict
            text += f" {advice}" if level != "good" else ""
            findings.append(Finding(level, name, title, text, tuple(steps.tolist())))
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
    if of == "mean" and "reward" in run.columns:
        return run.series("reward")
    names = run.matching(f"reward/*/{of}")
    rows = {step: [row[name] for name in names if name in row] for step, row in run.rows.items()}
    found = {step: float(np.mean(values)) for step, values in rows.items() if values}
    return np.array(list(found), dtype=np.int64), np.array(list(found.values()))


def _cut_responses(run: Run) -> Verdict | None:
    accepted = _grown(run, "accepted")
    if not accepted:
        return None
    ended = _grown(run, "stop/max_response_tokens") / accepted
    share = max(ended, _grown(run, "cut") / max(_grown(run, "turns"), 1))
    text = f"{share:.0%} of the responses were cut at their limit."
    advice = "Raise Limits(max_response_tokens=...)."
    if share == ended:
        text = (
            f"{share:.0%} of the accepted episodes ended because a response was cut at its limit."
        )
        advice = f"The environment never saw these. {advice}"
    return _level(share, 0.5, 0.9), text, advice, run.steps[-_WINDOW:]


def _no_spread(run: Run) -> Verdict | None:
    of, (steps, share) = "groups", _now(run, "groups/without_spread")
    if not len(share):
        steps, spread = (each[-_WINDOW:] for each in _rewards(run, "std"))
        of, share = "batches", spread == 0
    if not len(share):
        return None
    text = f"In {share.mean():.0%} of the {of} all episodes had the same reward."
    advice = "These taught nothing. Use other items, or a reward for partial answers."
    return _level(float(share.mean()), 0.5, 0.95), text, advice, steps


def _flat_reward(run: Run) -> Verdict | None:
    steps, reward = _rewards(run, "mean")
    _, drift = run.series("kl/mean", "kl_to_ref")
    third = min(len(reward), len(drift)) // 3
    if third < _FEWEST:
        return None
    first, last = reward[:third], reward[-third:]
    before, after = drift[:third].mean(), drift[-third:].mean()
    gain = last.mean() - first.mean()
    noise = 2 * np.sqrt((first.var() + last.var()) / third)
    flat = gain <= noise and after > 0.01 and after > 2 * before
    text = (
        f"The reward went from {first.mean():.3g} to {last.mean():.3g} while the KL to the reference "
        f"went from {before:.3g} to {after:.3g}."
    )
    advice = "The policy moves away and gains nothing. Lower the learning rate; read episodes."
    level: Level = "good" if not flat else "bad" if gain < -noise else "watch"
    return level, text, advice, steps[-third:]


def _entropy_gone(run: Run) -> Verdict | None:
    names = ("entropy", "entropy/mean")
    steps, values = _now(run, *names)
    if not len(values):
        return None
    before, now = np.median(run.series(*names)[1][:_FEWEST]), np.median(values)
    text = f"The entropy is {now:.3g} nats per token; it began at {before:.3g}."
    advice = "The policy hardly tries anything new. Add an entropy bonus or a KL."
    return _level(int(now < 0.01) + int(now < 0.2 * before), 1, 2), text, advice, steps


def _ratios_off(run: Run) -> Verdict | None:
    fresh = [step for step, age in zip(*run.series("staleness/max"), strict=True) if age == 0]
    for name, best, watch, bad in (
        ("correction_ess", 1, 0.05, 0.2),
        ("approx_kl/first_step", 0, 0.03, 0.1),
        ("approx_kl", 0, 0.03, 0.1),
    ):
        steps, values = run.series(name)
        equal = np.flatnonzero(np.isin(steps, fresh))[-_WINDOW:]
        if len(equal):
            now = float(np.median(values[equal]))
            text = f"On samples of the current version, {name} is {now:.3g}."
            advice = (
                f"It should be {best}: sampler and trainer disagree. Compare temperature, precision "
                "and chat template, and whether the engine got the weights; top_p, top_k and min_p make "
                "the sampler another policy."
            )
            return _level(abs(now - best), watch, bad), text, advice, steps[equal]
    return None


def _stale(run: Run) -> Verdict | None:
    steps, oldest = _now(run, "staleness/max")
    if not len(oldest):
        return None
    dropped = _grown(run, "rejected/stale") / max(_grown(run, "accepted", "rejected"), 1)
    text = f"The oldest tokens of a batch are {np.median(oldest):.0f} versions old."
    if dropped >= 0.1:
        advice = f"{dropped:.0%} of the episodes were rejected as too old: sampling is too slow."
        return _level(dropped, 0.1, 0.5), text, advice, steps
    config = flat_numbers(run.facts.get("config") or {})
    bound = next((x for name, x in config if name.split("/")[-1] == "max_staleness"), 0)
    level: Level = "watch" if bound and np.mean(oldest >= bound) >= 0.8 else "good"
    return level, text, f"That is max_staleness={bound}: training is slower than sampling.", steps


def _slow_environment(run: Run) -> Verdict | None:
    (steps, environment), (_, engine) = _now(run, "time/environment"), _now(run, "time/engine")
    if not len(environment) or not len(engine):
        return None
    slow, fast = environment[-1], engine[-1]
    text = f"Of the episodes' time, the environment takes {slow:.0%} and the model {fast:.0%}."
    advice = "The model waits. Play more episodes at a time, or use more environment workers."
    return "watch" if slow > max(fast, 0.3) else "good", text, advice, steps


def _token_counts(run: Run) -> Verdict | None:
    steps, trained = (each[1:] for each in run.series("trained_tokens"))
    sampled = run.growth("tokens")[np.isin(run.steps, steps)].sum()
    # With a rate limit, tokens are meant to be trained several times.
    if len(steps) < _FEWEST or not sampled or "rate/ratio" in run.columns:
        return None
    times = trained.sum() / sampled
    text = f"Each sampled token was trained {times:.2g} times."
    advice = (
        "Is a batch trained twice, or are rows sampled anew from a buffer?"
        if times > 1
        else "The rest was never trained, or only the last part of each batch was logged."
    )
    return "good" if 0.67 <= times <= 1.5 else "watch", text, advice, steps


def _rejected_episodes(run: Run) -> Verdict | None:
    # Those that still ran when the run was stopped are no sign of anything.
    rejected = _grown(run, "rejected") - _grown(run, "rejected/cancelled")
    ended = rejected + _grown(run, "accepted")
    if not {"accepted", "rejected"} <= run.columns.keys() or ended <= 0:
        return None
    causes = {cause: _grown(run, name) for name, cause in run.matching("rejected/*").items()}
    causes.pop("cancelled", None)
    most = sorted(filter(causes.get, causes), key=lambda cause: -causes[cause])[:3]
    text = f"{rejected / ended:.0%} of the episodes that ended were rejected."
    advice = f"Most: {', '.join(f'{cause} ({causes[cause]:.0f})' for cause in most)}."
    return _level(rejected / ended, 0.2, 0.5), text, advice, run.steps[-_WINDOW:]


def _not_finite(run: Run) -> Verdict | None:
    shape = re.compile(r"(.*/)?(loss|grad_norm|reward|approx_kl|kl|entropy)([/_].*)?")
    checked = {name: run.series(name) for name in sorted(run.columns) if shape.fullmatch(name)}
    faults = {
        int(step): name
        for name, (steps, values) in checked.items()
        for step in steps[~np.isfinite(values)]
    }
    if not faults:
        text = "All losses and rewards are finite numbers."
        return ("good", text, "", run.steps[-_WINDOW:]) if checked else None
    first, is_now = min(faults), max(faults) in run.steps[-_WINDOW:]
    text = f"{faults[first]} is not a number or infinite, first at step {first}."
    advice = "The weights may be damaged since: go back to a checkpoint before it."
    return "bad" if is_now else "watch", text, advice, np.array(sorted(faults))


RULES: dict[str, tuple[str, Callable[[Run], Verdict | None]]] = {
    "not-finite": ("Numbers that are not finite", _not_finite),
    "cut-responses": ("Cut responses", _cut_responses),
    "rejected-episodes": ("Rejected episodes", _rejected_episodes),
    "no-spread": ("Equal rewards", _no_spread),
    "flat-reward": ("Reward and drift", _flat_reward),
    "entropy-gone": ("Entropy", _entropy_gone),
    "ratios-off": ("Agreement of sampler and trainer", _ratios_off),
    "stale": ("Age of the samples", _stale),
    "token-counts": ("Sampled and trained tokens", _token_counts),
    "slow-environment": ("Time of the environment", _slow_environment),
}
"""What each rule checks, and its function: ``None`` if the metrics that it reads are missing."""
