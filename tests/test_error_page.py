"""The page of errors quotes messages that the package has."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "errors.rst").read_text(encoding="utf-8")
QUOTED = re.findall(r"^``(.+)``\n(?= {4}\S)", PAGE, re.M)
GAP = "…"


@cache
def texts() -> str:
    """The texts of the package's source, one a line; what an f-string fills in is left out."""
    found = set()
    for path in (ROOT / "torchrl_mt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else GAP for p in node.values)
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def test_the_page_has_messages_each_once():
    assert len(QUOTED) >= 40
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_each_is_in_the_source(quoted):
    """The fixed parts stand in one text, in this order."""
    assert len(quoted.replace(GAP, "")) >= 12
    assert re.search(".*".join(map(re.escape, quoted.split(GAP))), texts())


def test_what_is_not_in_the_source_is_found_out():
    assert not re.search(re.escape("must be a multiple of group_sizes="), texts())
