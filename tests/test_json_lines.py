"""JSON lines: what is JSON reads back equal, and no line is lost, torn or mixed with another."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import slow
from tests.waiting import wait_until
from torchrl_mt.collectors import StopReason
from torchrl_mt.json_lines import append_lines, line_of, to_json, to_line

FORK = multiprocessing.get_context("fork")


def read(path: Path) -> list[dict]:
    """Strict JSON, line by line, under every notion of a line."""

    def refuse(name):
        raise ValueError(name)

    text = path.read_bytes().decode()
    assert text.endswith("\n")
    lines = text.splitlines()
    assert lines == text[:-1].split("\n")
    return [json.loads(line, parse_constant=refuse) for line in lines]


_SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
_JSON = st.recursive(
    _SCALAR | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(value=_JSON)
def test_what_is_json_reads_back_equal_from_one_line(value):
    line = to_line(value)
    assert json.loads(line) == value
    assert line.decode().splitlines() == [line.decode()[:-1]]


def test_what_json_lacks():
    class Broken:
        def __repr__(self):
            raise ValueError

    endless: list = []
    endless.append(endless)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert to_json([math.nan, math.inf, -math.inf]) == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(float(to_json(np.float32("nan"))))
    assert to_json((np.int64(3), torch.ones(1), torch.tensor(True))) == [3, 1.0, True]
    read_back = {"done": "done", "1": {"__repr__": "{2}"}}
    assert to_json({StopReason.DONE: StopReason.DONE, 1: {2}}) == read_back
    assert to_json(endless) == [{"__repr__": "[[...]]"}]
    assert to_json(Broken()) == {"__repr__": "<Broken, whose repr raises ValueError>"}
    assert len(to_json(bytes(10**6))["__repr__"]) == 1000
    for value in (np.longdouble(1), torch.ones(2), torch.ones(1, device="meta"), deep):
        assert b"__repr__" in to_line(value)
    assert json.loads(to_line("\ud800")) == "\ud800"
    assert "Größe 大".encode() in to_line("Größe 大")


def many(path: Path, writer: int, number: int) -> None:
    for i in range(number):
        append_lines(path, [to_line({"writer": writer, "i": i, "text": "ä" * (997 * (i % 30))})])


@pytest.mark.parametrize(("processes", "number"), [(0, 10), slow(2, 60)])
def test_threads_and_processes_lose_nothing(processes, number, tmp_path):
    path = tmp_path / "0.jsonl"
    kinds = [FORK.Process] * processes + [threading.Thread] * 3
    writers = range(len(kinds))
    workers = [kinds[w](target=many, args=(path, w, number)) for w in writers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lines = read(path)
    assert Counter(line["writer"] for line in lines) == dict.fromkeys(writers, number)
    for writer in writers:
        assert [line["i"] for line in lines if line["writer"] == writer] == list(range(number))
    assert all(line["text"] == "ä" * (997 * (line["i"] % 30)) for line in lines)


def one_line_in_pieces(path: Path, pieces: Path) -> None:
    """Write a line of which the system takes a few bytes at a time, and after some no more."""
    write, written = os.write, itertools.count(1)

    def slow(file, data):
        if next(written) > 10:
            pieces.touch()
            threading.Event().wait()
        return write(file, data[:3])

    os.write = slow
    append_lines(path, [to_line("torn " * 10_000)])


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], ["first"], ["x" * 200_000]], ids=["new", "short", "long"])
def test_a_line_of_a_killed_process_is_cut_off(tmp_path, before):
    path, pieces = tmp_path / "0.jsonl", tmp_path / "begun"
    if before:
        append_lines(path, [to_line(before[0])])
    size = path.stat().st_size if before else 0
    process = FORK.Process(target=one_line_in_pieces, args=(path, pieces))
    process.start()
    wait_until(pieces.exists)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert path.stat().st_size > size
    assert not path.read_bytes().endswith(b"\n")
    append_lines(path, [to_line("second")])
    assert read(path) == [*before, "second"]


def test_torn_lines_of_any_length_are_cut_off(tmp_path):
    for whole in (b"", b"1\n", b"2" * 70_000 + b"\n"):
        for torn in (b"", b"[", b"[" * 65_536, b"[" * 200_000):
            path = tmp_path / "0.jsonl"
            path.write_bytes(whole + torn)
            append_lines(path, [b"3\n"])
            assert path.read_bytes() == whole + b"3\n"


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, monkeypatch):
    path, write = tmp_path / "0.jsonl", os.write

    def full(file, data):
        if len(data) < 8:
            raise OSError("No space left on device")
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append_lines(path, [to_line("a line that is cut")])
    monkeypatch.undo()
    assert path.read_bytes() == b""
    append_lines(path, [to_line(1)])
    assert read(path) == [1]


def test_numbers_that_json_lacks_are_no_line():
    with pytest.raises(ValueError, match="not JSON compliant"):
        line_of([math.nan])
