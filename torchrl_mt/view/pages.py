"""Pages in one HTML file each: a template, a style and a script of ``assets``, filled with data."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from torchrl_mt.json_lines import to_json

__all__ = ["render", "script_json"]


def render(name: str, **values: Any) -> str:
    """Render a page.

    Args:
        name: name of its files in ``assets``.
        **values: values of the template; only ``Markup`` is taken for markup.
    """
    folder = files("torchrl_mt.view") / "assets"
    template, css, js = (
        (folder / f"{name}.{end}").read_text(encoding="utf-8") for end in ("html.j2", "css", "js")
    )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(css=Markup(css), js=Markup(js), **values)


def script_json(value: Any) -> Markup:
    """Write JSON that may stand within a script element: only ``<`` could end it."""
    return Markup(json.dumps(to_json(value)).replace("<", "\\u003c"))
