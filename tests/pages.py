"""The code that pages of the documentation show."""

from __future__ import annotations

import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code_of(page: str, section: str, number: int = 0, language: str = "python") -> str:
    """A block of code in a section: the first one, unless a number is given."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"\n{section}\n")[1]
    lines = text.split(f".. code-block:: {language}\n")[1 + number].splitlines()
    ends = (k for k, line in enumerate(lines) if line and not line.startswith("    "))
    end = next(ends, len(lines))
    return textwrap.dedent("\n".join(lines[:end]))
