"""How the documentation is built: ``python -m sphinx -W --keep-going -b html docs docs/_build/html``.

The reference pages follow each package's ``__all__``; the tutorials are run when they are built.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Protocol

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import torchrl_mt

# Tutorials use small models: threads that wait for each other only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each of an agent's requests

project = "torchrl_mt"
author = "The torchrl_mt developers"
version = release = torchrl_mt.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates", "tutorials", "**/README.*"]
default_role = "py:obj"

autosummary_imported_members = True
autosummary_ignore_module_all = False
# What two packages export is described once: these under collectors.
autosummary_context = {"described_elsewhere": {"torchrl_mt.chat": ("Answer", "ChatTokens")}}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # the host's docstrings are in the host's documentation
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "auto_tutorials",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 3600,
    "remove_config_comments": True,
}
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = "torchrl_mt"
html_show_sphinx = False
html_copy_source = False


def describe_variable(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Fetch the docstring of a variable that a package passes on, from where it is defined."""
    if what != "data":
        return
    package, _, variable = name.rpartition(".")
    folder = Path(torchrl_mt.__file__).parent.joinpath(*package.split(".")[1:])
    for path in sorted(folder.rglob("*.py")):
        module = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
        docs = ModuleAnalyzer.for_module(module.removesuffix(".__init__")).find_attr_docs()
        if ("", variable) in docs:
            lines[:] = docs["", variable]
            return


def name_bases(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Say under a class's first paragraph which of the host's classes it is."""
    if what != "class":
        return
    hosts = [b for b in obj.__bases__ if b.__module__.startswith(("torchrl.", "tensordict."))]
    summary_end = lines.index("") if "" in lines else len(lines)
    lines[summary_end:summary_end] = [
        line for b in hosts for line in ("", f"It is a ``{b.__module__}.{b.__qualname__}``.")
    ]


def keep_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading a variable's ``a sentence: and more`` as ``type: description``."""
    if what in ("attribute", "property") and not lines[0].startswith("`"):
        lines[:0] = ["..", ""]  # an empty comment, which has no colon


def skip_host_members(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out what a class has of the host: ``tensorclass`` puts all of a TensorDict's on it."""
    home = getattr(getattr(obj, "fget", obj), "__module__", None) or ""
    return True if home.startswith(("tensordict", "torchrl.")) else None


def hide_protocol_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, args: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Show a protocol without arguments: it has no constructor."""
    return ("", None) if what == "class" and Protocol in obj.__bases__ else None


def setup(app: Sphinx) -> None:
    """Connect the above to Sphinx."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # napoleon comes at 500
    app.connect("autodoc-process-docstring", describe_variable)
    app.connect("autodoc-process-docstring", name_bases)
    app.connect("autodoc-process-signature", hide_protocol_signature)
    app.connect("autodoc-skip-member", skip_host_members)
