"""The table of families in the documentation: rows of an episode of three answers.

``python -m tests.chat.families_table docs/families.inc`` writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .families import FAMILIES
from .families_in_play import kinds, play

COLUMNS = {
    "plain": "answers",
    "thoughts, plain": "with thoughts",
    "call": "calls",
    "thoughts, call": "calls, with thoughts",
}
HEAD = """.. list-table::
   :header-rows: 1
   :widths: 28 18 18 18 18

"""


def table() -> str:
    """The table, as reStructuredText."""
    lines = [line(["", *COLUMNS.values()])]
    for family in FAMILIES:
        known = kinds(family)
        cells = []
        for kind in COLUMNS:
            if kind not in known or (family.opens and "thoughts" not in kind):
                cells.append("")
                continue
            message = known[kind]
            told = [message, message, known["plain"]] if "call" in kind else [message] * 3
            cells.append(
                " / ".join(
                    str(play(family, told, template=template)[3]["forks"] + 1)
                    for template in ("original", "training")
                )
            )
        lines.append(line([family.name, *cells]))
    return HEAD + "".join(lines)


def line(cells: list[str]) -> str:
    """One row of the table."""
    first, *others = (f"- {cell}".rstrip() for cell in cells)
    return "".join([f"   * {first}\n", *(f"     {cell}\n" for cell in others)])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table(), encoding="utf-8")
