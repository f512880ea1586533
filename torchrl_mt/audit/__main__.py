"""``python -m torchrl_mt.audit``: check rows against what was sampled."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchrl_mt.audit import audit_rows

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_mt.audit",
        description="Check that rows train what was sampled. The exit status is 0 if no check failed, "
        "1 if one did, 2 if the input cannot be read.",
    )
    kinds = "a dump_dir or a file of it, a data set, a saved TensorDict, or a .pt file"
    parser.add_argument("rows", metavar="ROWS", help=kinds)
    parser.add_argument("--sampled", metavar="PATH", help=f"what the sampler recorded: {kinds}")
    parser.add_argument(
        "--model", metavar="NAME", help="a Hugging Face name or folder of the policy that sampled"
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="likewise; decodes tokens of the report"
    )
    parser.add_argument("--tolerance", type=float, default=1e-3, help="in nats (%(default)s)")
    given = vars(parser.parse_args(arguments))
    try:
        import transformers

        for name, loader in (("model", "AutoModelForCausalLM"), ("tokenizer", "AutoTokenizer")):
            if given[name] is not None:
                given[name] = getattr(transformers, loader).from_pretrained(given[name])
        report = audit_rows(**given)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
