"""Calls to the file system that fail, or end the process, at a chosen one."""

from __future__ import annotations

import builtins
import io
import os

import torch


class Killed(BaseException):
    """Stands for the end of the process."""


CALLS = [
    *((os, name) for name in ("open", "fsync", "mkdir", "replace", "rename", "unlink", "rmdir")),
    (os, "scandir"),
    (builtins, "open"),
    (io, "open"),
    (torch, "save"),
]


def spoil(monkeypatch, at, error, *, once, late=False):
    """Have the ``at``-th call to the file system fail, and all after it unless ``once``.

    If ``late``, it does its work before it fails.
    """
    count = iter(range(10**6))

    def spoiled(call):
        def run(*args, **kwargs):
            i = next(count)
            if i != at and (i < at or once):
                return call(*args, **kwargs)
            if late:
                call(*args, **kwargs)
            raise error

        return run

    for module, name in CALLS:
        monkeypatch.setattr(module, name, spoiled(getattr(module, name)))
    return count
