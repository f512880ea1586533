"""``python -m torchrl_mt info``: versions, devices and extras of this installation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchrl_mt.installed import devices, missing_packages, versions

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchrl_mt", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("info", help="print versions, devices, and extras with what they lack")
    parser.parse_args(arguments)
    _print("versions", versions())
    _print("devices", devices(start_cuda=True))
    missing = missing_packages()
    if not missing:
        print("\nextras\n  torchrl-mt itself is not installed: pip install torchrl-mt")
        return 0
    _print("extras", {extra: _state(extra, lacks) for extra, lacks in missing.items()})
    return 0


def _state(extra: str, lacks: list[str]) -> str:
    return f"lacks {', '.join(lacks)}: pip install 'torchrl-mt[{extra}]'" if lacks else "installed"


def _print(title: str, lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    print(f"\n{title}" if title != "versions" else title)
    for name, value in lines.items():
        print(f"  {name:<{width}}  {value}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
