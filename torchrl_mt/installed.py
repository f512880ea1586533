"""What is installed: versions, devices, and the extras of this package."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, distribution, version

import torch
from packaging.requirements import Requirement

import torchrl_mt

__all__ = ["devices", "missing_packages", "versions"]

_NAMES = ("torch", "torchrl", "tensordict", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Get the versions of Python, of this package and of what it is built on.

    Examples:
        >>> list(versions())
        ['python', 'torchrl_mt', 'torch', 'torchrl', 'tensordict', 'transformers', 'numpy']
    """
    found = {"python": platform.python_version(), "torchrl_mt": torchrl_mt.__version__}
    return found | {name: version(name) for name in _NAMES}


def devices(*, start_cuda: bool = False) -> dict[str, str]:
    """Name the devices of this machine: the CPU, then its accelerators.

    Args:
        start_cuda: whether CUDA may be started to learn the names. A process that started it cannot be
            forked afterwards, so by default an unused CUDA device has no name.

    Examples:
        >>> list(devices())[0]
        'CPU'
    """
    found = {"CPU": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    named = start_cuda or torch.cuda.is_initialized()
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number) if named else "not in use yet"
        found[f"CUDA {number}"] = name
    if torch.backends.mps.is_available():
        found["MPS"] = platform.machine()
    return found


def missing_packages() -> dict[str, list[str]]:
    """Find for each extra of this package what it needs and is not installed, or too old.

    Returns:
        The requirements that are not met, as ``pip`` writes them, by extra; empty if the package itself
        is not installed.
    """
    try:
        package = distribution("torchrl-mt")
    except PackageNotFoundError:
        return {}
    needed = [Requirement(line) for line in package.requires or ()]
    extras = sorted(package.metadata.get_all("Provides-Extra") or ())
    return {extra: sorted(_missing(extra, needed)) for extra in extras}


def _missing(extra: str, needed: list[Requirement]) -> set[str]:
    """What an extra lacks, and the extras that it names."""
    found: set[str] = set()
    for each in needed:
        if each.marker is None or not each.marker.evaluate({"extra": extra}):
            continue
        if each.name == "torchrl-mt":
            found = found.union(*(_missing(other, needed) for other in each.extras))
            continue
        try:
            is_met = each.specifier.contains(version(each.name), prereleases=True)
        except PackageNotFoundError:
            is_met = False
        found |= set() if is_met else {f"{each.name}{each.specifier}"}
    return found
