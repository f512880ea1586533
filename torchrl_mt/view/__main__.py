"""``python -m torchrl_mt.view``: write a page of episodes, or follow a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_mt.view",
        description="Write one HTML file that shows episodes, or follow a run in a browser.",
    )
    parser.add_argument(
        "source",
        nargs="+",
        help="a dump_dir, a file of it, a data set, or rows in a .pt file; episodes of several are "
        "joined by id. With --live, the folder of a RunLog",
    )
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="the file (%(default)s)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="a Hugging Face name or folder; decodes the tokens of data sets",
    )
    parser.add_argument("--live", action="store_true", help="follow a run until Ctrl-C")
    parser.add_argument(
        "--port", type=int, default=0, help="port of --live on this machine; 0 takes a free one"
    )
    given = parser.parse_args(arguments)
    if given.live:
        from torchrl_mt.view.live import serve_run

        if len(given.source) != 1:
            parser.error("--live follows one folder")
        serve_run(given.source[0], port=given.port)
        return 0
    from torchrl_mt.view.report import write_report
    from torchrl_mt.view.run_files import METRICS

    for source in given.source:
        if (Path(source) / METRICS).exists():
            parser.error(
                f"{source} is the folder of a run: follow it with --live, draw it with "
                "torchrl_mt.view.plot_run, or open the pages of its episodes, "
                f"{Path(source, 'episodes', '*.html')}"
            )
    tokenizer = None
    if given.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    try:
        path = write_report(given.source, given.output, tokenizer=tokenizer)
    except (OSError, TypeError, ValueError, UnpicklingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
