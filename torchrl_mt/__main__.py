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
    parser.add_argument("command", choices=["info"], help="print versions, devices and extras")
    parser.parse_args(arguments)
    extras = {
        name: f"lacks {', '.join(lacks)}: pip install 'torchrl-mt[{name}]'"
        if lacks
        else "installed"
        for name, lacks in missing_packages().items()
    }
    extras = extras or {"torchrl-mt": "is not installed: pip install torchrl-mt"}
    found = {"versions": versions(), "devices": devices(start_cuda=True), "extras": extras}
    for title, lines in found.items():
        print(title)
        for name, value in lines.items():
            print(f"  {name:<13} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
