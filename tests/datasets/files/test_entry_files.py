"""Names of files: clear to a person, and safe on every file system.

Of a private function: this system's files tell nothing of what others do with names.
"""

from __future__ import annotations

import re
import unicodedata

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.episodes import ODD_NAMES
from tests.tiers import examples
from torchrl_mt.datasets import open_episodes
from torchrl_mt.datasets._files.entry_files import entry_name

SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]*[A-Za-z0-9_-]|[a-z0-9_]")
PORTS = {f"{port}{n}" for port in ("com", "lpt") for n in range(10)}
DEVICES = {"con", "prn", "aux", "nul", *PORTS}
SUFFIXES = ["", ".npy", ".jsonl", ".mp4"]
PARTS = st.sampled_from(ODD_NAMES) | st.text(st.characters(), max_size=5)
KEYS = st.lists(PARTS, min_size=1, max_size=4).map(tuple)


def test_plain_keys_are_the_names():
    assert entry_name(("observation",)) == "observation"
    assert entry_name(("next", "agent_0", "top-camera")) == "next.agent_0.top-camera"


@examples(250, few=30)
@given(st.sets(KEYS, min_size=2, max_size=30))
def test_names_are_safe_and_differ_wherever_case_or_accents_do_not_count(keys):
    files = set()
    for key in keys:
        name = entry_name(key)
        assert SAFE.fullmatch(name)
        assert len(name) <= 100
        assert name.split(".")[0].lower() not in DEVICES
        files |= {unicodedata.normalize("NFKD", name + suffix).casefold() for suffix in SUFFIXES}
    assert len(files) == len(keys) * len(SUFFIXES)


def test_files_lie_in_the_folder_of_their_episode(tmp_path):
    keys = [("x", part) for part in ODD_NAMES] + [("..", "..", "escaped")]
    path = tmp_path / "deep" / "er" / "set"
    with open_episodes(path) as out:
        out.write_episode({key: torch.zeros(2) for key in keys})
    (folder,) = path.glob("data-*/chunk-000/episode-000000")
    files = [file for file in tmp_path.rglob("*.npy") if file.is_file()]
    assert len(files) == len(keys)
    assert {file.parent for file in files} == {folder}
