"""The checks of rows against what was sampled.

Tokens are compared by what the sampler saw before them, however rows hold them: every sampled token is
trained exactly once, in any row of its episode. Where a row drifts from what was sampled, nothing can be
said of what follows, and nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrl_mt.audit.prefixes import ends_of, keys_of, mix, nth, spread
from torchrl_mt.audit.report import Finding, finding, not_checked
from torchrl_mt.audit.rows import Rows
from torchrl_mt.chat.encoding import decode

__all__ = ["checks_against", "not_against"]


def not_against() -> Iterator[Finding]:
    """What is not checked without the sampler."""
    for check in ("never trained", "never sampled", "left out", "retokenised"):
        yield not_checked(check, "there is no `sampled`")
    for value in ("log-probs", "versions"):
        yield not_checked(f"{value} as sampled", "there is no `sampled`")


def checks_against(
    rows: Rows, sampled: Rows, tokenizer: Any, tolerance: float
) -> Iterator[Finding]:
    """Compare rows with what was sampled.

    A row is of the sampler's episode with its id. If no id fits, or there are none, the longest common
    beginning tells.
    """
    none = np.zeros(0, np.int64)
    ids, other_ids = (none if each.episode is None else each.episode for each in (rows, sampled))
    by = ("episode",) * bool(np.isin(ids, other_ids).any())
    mine, theirs = keys_of(rows, *by), keys_of(sampled, *by)

    # A row drifts at its first token that no row of the sampler has there, though one goes on.
    inside, goes_on = rows.token > 0, ~ends_of(sampled)
    before = np.append(np.uint64(0), mine)[:-1]
    drift = ~np.isin(mine, theirs) & (~inside | np.isin(before, theirs[goes_on]))
    branch = np.isin(theirs, before[drift & inside])

    # Of tokens alike, which is which: those that the very same row has, then by value.
    order = {
        name: sign
        for name, sign in (("version", -1), ("log_prob", 1))
        if getattr(rows, name) is not None and getattr(sampled, name) is not None
    }
    places, other_places = (
        mix(keys[ends_of(each)][(each.token == 0).cumsum() - 1], each.token)
        for each, keys in ((rows, mine), (sampled, theirs))
    )

    def uses(each: Rows, keys: np.ndarray, elsewhere: np.ndarray, at: np.ndarray) -> np.ndarray:
        alike = mix(keys, each.of_tokens("copy"))[at] if by else keys[at]
        values = [np.nan_to_num(getattr(each, name)[at]) * sign for name, sign in order.items()]
        same = alike
        for value in values:
            same = mix(same, np.round(100 * value))
        # Of each value one, before a second one: what is there twice comes last.
        return mix(keys[at], nth(alike, elsewhere[at], nth(same, elsewhere[at]), *values))

    my = np.flatnonzero(rows.trained & ~drift & ~_after(drift, rows))
    their = np.flatnonzero(sampled.trained)
    my_use = uses(rows, mine, ~np.isin(places, other_places[their]), my)
    their_use = uses(sampled, theirs, ~np.isin(other_places, places[my]), their)
    was_sampled, is_trained = np.isin(mine[my], theirs[their]), np.isin(their_use, my_use)
    again = spread(rows, my[was_sampled & ~np.isin(my_use, their_use)])
    missing = spread(sampled, their[~is_trained]) & ~_after(branch, sampled)
    unit = sampled.row if sampled.episode is None else sampled.of_tokens("episode")
    found = ends_of(sampled) & np.isin(theirs, mine) | branch | spread(sampled, their[is_trained])
    if by:
        found |= np.isin(unit, ids)
    came = np.isin(unit, unit[found])
    yield finding("trained once", rows, again, "tokens that another row trains as well")
    text = "sampled tokens that no row trains; the row is of `sampled`"
    yield finding("never trained", sampled, missing & came, text)
    wrong = spread(rows, my[~was_sampled])
    yield finding("never sampled", rows, wrong, "trained tokens that the policy did not sample")
    text = "sampled tokens of episodes without any row; the row is of `sampled`"
    yield finding("left out", sampled, missing & ~came, text, ok=None)
    text = "rows whose tokens differ from those seen and sampled"
    if drift.any():
        k = int(drift.argmax())
        place = int((goes_on & (theirs == before[k])).argmax()) + 1 if inside[k] else None
        text += f", the first {_beside(rows, k, sampled, place, tokenizer)}"
    yield finding("retokenised", rows, drift, text)

    here, there = np.isin(my_use, their_use), np.argsort(their_use)
    pair = my[here], their[there[np.searchsorted(their_use[there], my_use[here])]]
    yield _as_sampled(
        "log-probs as sampled", rows.log_prob, sampled.log_prob, rows, pair, tolerance
    )
    yield _as_sampled("versions as sampled", rows.version, sampled.version, rows, pair, 0.0)


def _as_sampled(
    check: str, mine: Any, theirs: Any, rows: Rows, pair: tuple[Any, Any], limit: float
) -> Finding:
    """Values of trained tokens are those of the sampler, at pairs of places."""
    if mine is None or theirs is None:
        return not_checked(check, "rows and `sampled` do not both have them")
    same = np.isclose(mine[pair[0]], theirs[pair[1]], rtol=0, atol=limit, equal_nan=True)
    text = f"trained tokens that differ by more than {limit:g}"
    return finding(check, rows, spread(rows, pair[0][~same]), text)


def _after(flags: np.ndarray, rows: Rows) -> np.ndarray:
    """Whether a token of the row before this one is flagged, ``[M]`` bool."""
    before = flags.cumsum() - flags
    begins = rows.token == 0
    return before > before[begins][begins.cumsum() - 1]


def _beside(rows: Rows, k: int, sampled: Rows, place: int | None, tokenizer: Any) -> str:
    """What stands at token ``k`` and what was seen or sampled there."""
    mine = _shown(rows.id[k : k + 4], tokenizer)
    if place is None:
        return f"in {mine} at its beginning"
    verb = "sampled" if sampled.trained[place] else "given"
    return f"in {mine} where {_shown(sampled.id[place : place + 4], tokenizer)} was {verb}"


def _shown(ids: np.ndarray, tokenizer: Any) -> str:
    return str(ids.tolist()) if tokenizer is None else repr(decode(tokenizer, ids.tolist()))
