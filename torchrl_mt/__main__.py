"""``python -m torchrl_mt``: ``info`` about this installation, and ``train`` as a file says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchrl_mt.installed import devices, missing_packages, versions

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m torchrl_mt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, devices and extras")
    keys = ""
    if arguments[:1] == ["train"]:  # what it imports takes seconds
        from torchrl_mt.trainers.config_file import explain_keys, trainer_from_file

        keys = f"keys of the file:\n\n{explain_keys()}"
    train = commands.add_parser(
        "train",
        help="train as a TOML file says",
        epilog=keys,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", help="the file; its keys are those of MultiTurnTrainer")
    train.add_argument("--resume", action="store_true", help="go on with the run in its folder")
    given = parser.parse_args(arguments)
    if given.command == "info":
        print_info()
        return 0
    try:
        trainer = trainer_from_file(given.config, resume=given.resume)
    except (ImportError, OSError, TypeError, ValueError) as error:
        train.error(str(error))
    try:
        trainer.train()
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint")
        return 130
    return 0


def print_info() -> None:
    """Print versions, devices and extras."""
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


if __name__ == "__main__":
    sys.exit(main())
