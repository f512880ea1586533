"""A search for the reply that takes longest to parse, for every notation.

A reply is a unit of a few fragments many times over, between others: marks of the notation, marks that
lack a letter, spaces, quotes, brackets. The search keeps what takes longest, and changes it.

``python -m tests.chat.worst_replies [CHARACTERS] [TRIES]`` prints a table and never fails.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from time import process_time

from torchrl_mt.chat.replies import ReplyParser

from .families import FAMILIES, Family
from .families_in_play import kinds, tokenizer_of

PLAIN = (" " * 9, " ", "\n", *"a1\"'\\{}[]()<>:,=.")
LONGER = (
    *('{"a":', "[[", '"a":1,', "\\n", "f(", "a=1,", "true", '"""', "e9", "\\u0041", "-", ";"),
    "|>",
)
PLACE = re.compile(r"^|\n|\W(?=\w)|\W$|>")
Reply = tuple[str, str, str]
"""What comes first, what is repeated, and what comes last."""


def fragments(family: Family) -> list[str]:
    """What the family's replies consist of, and near misses of it."""
    said = [family.say(message) for message in kinds(family).values()]
    marks = {mark for text in said for mark in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+\(?|\n", text)}
    marks |= {text[: len(text) // 2] for text in said} | {*said, *family.special}
    near = {mark[:-1] for mark in marks}
    return [*sorted((marks | near) - {""}), *PLAIN, *LONGER]


def replies(family: Family, tries: int, worst: Callable[[], Reply | None]) -> Iterator[Reply]:
    """Replies to try: what the family says with a unit somewhere, then changes of the worst so far."""
    rng, parts = random.Random(0), fragments(family)
    said = sorted({family.say(message) for message in kinds(family).values()}, key=len)
    places = [
        (text[: mark.end()], text[mark.end() :]) for text in said for mark in PLACE.finditer(text)
    ]
    every = [
        (first, part, end) for first, last in places for part in parts for end in (last, last[:1])
    ]
    yield from rng.sample(every, min(tries, len(every)))
    for _ in range(tries // 4):
        first, unit, last = worst() or ("", "", "")
        part = "".join(rng.choices(parts, k=rng.randint(1, 3)))
        unit = rng.choice([part, part + unit, unit + part, unit])
        begin, end = rng.choice(places)
        yield rng.choice([(first, unit, last), (first, unit, ""), (begin, unit, end)])


def written(reply: Reply, size: int) -> str:
    """A reply of about ``size`` characters."""
    first, unit, last = reply
    return first + unit * (size // max(len(unit), 1)) + last


def search(family: Family, size: int, tries: int) -> tuple[float, Reply]:
    """Seconds of the slowest reply of ``size`` characters that was found, and the reply."""
    parser = ReplyParser(tokenizer_of(family))
    slowest: list[tuple[float, Reply]] = []
    for reply in replies(family, tries, lambda: slowest[0][1] if slowest else None):
        text = written(reply, size)
        begun = process_time()
        parser.parse(text, None)
        seconds = process_time() - begun
        if not slowest or seconds > slowest[0][0]:
            slowest[:] = [(seconds, reply)]
    return slowest[0]


def main(size: int = 3_000, tries: int = 2_000) -> None:
    print(f"{'family':<22}{'seconds at':>12}{'twice':>8}{'1 MB':>8}  worst reply")
    for family in FAMILIES:
        _, reply = search(family, size, tries)
        parser = ReplyParser(tokenizer_of(family))
        seconds = []
        for length in (size, 2 * size, 10**6):
            begun = process_time()
            parser.parse(written(reply, length), None)
            seconds.append(process_time() - begun)
        once, twice, whole = seconds
        print(
            f"{family.name:<22}{once:>12.4f}{twice / max(once, 1e-9):>7.1f}x{whole:>8.2f}  {reply!r:.90}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
