"""Serve environments from a shell: ``python -m torchrl_mt.envs.serve package.module:make_env``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torchrl_mt.envs.remote.server import serve

TOKEN_VARIABLE = "TORCHRL_MT_SERVE_TOKEN"
"""Environment variable of the token: a process list shows arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code is 2 if that cannot begin."""
    parser = _parser()
    given = parser.parse_args(arguments)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        server = serve(
            _named(given.make_env),
            host=given.host,
            port=given.port,
            token=os.environ.get(TOKEN_VARIABLE) if given.token is None else given.token,
            allowed_ips=given.allowed_ip or ("127.0.0.1", "::1"),
            max_sessions=given.max_sessions,
            idle_timeout=given.idle_timeout,
        )
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(str(error))
    with server:
        print(server.url, flush=True)
        stopping.wait()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_mt.envs.serve",
        description="Serve text environments by OpenEnv's protocol. Prints the address.",
    )
    parser.add_argument("make_env", help="class or function, such as package.module:MyEnv")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--token",
        help="what clients must send as 'Authorization: Bearer'; better given by the environment "
        f"variable {TOKEN_VARIABLE}, which no list of processes shows",
    )
    parser.add_argument(
        "--allowed-ip",
        action="append",
        metavar="IP",
        help="address or network of clients, such as 10.0.0.0/8; may be repeated (this machine)",
    )
    parser.add_argument("--max-sessions", type=int, default=64, help="sessions at a time")
    parser.add_argument(
        "--idle-timeout", type=float, default=300.0, help="seconds after which an idle session ends"
    )
    return parser


def _named(name: str) -> Any:
    """The object that ``package.module:name`` names."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"make_env must be named as package.module:make_env, got {name!r}.")
    module = importlib.import_module(module_name)
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        raise ValueError(
            f"make_env {name!r}: {module_name!r} was imported but has no {attribute!r}."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
