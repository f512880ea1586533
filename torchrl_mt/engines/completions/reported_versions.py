"""Which weights sampled a response: what a server says, compared with what the engine set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torchrl_mt.engines.completions.api import MalformedAnswerError
from torchrl_mt.http_client import TryAgainError

__all__ = ["VersionSource", "name_of", "reported_versions"]

VersionSource = Literal["begun", "reported", "named"]
"""How an engine knows which weights sampled a response: it had begun with them, the server's replies
in its own form report them, or each version is a model with a name of its own."""


def name_of(model: str, version: int) -> str:
    """The name of a version of an adapter; before the first update, that of the adapter itself.

    Examples:
        >>> name_of("policy", 3)
        'policy@3'
    """
    return f"{model}@{version}" if version else model


def reported_versions(
    info: Mapping[str, Any], size: int, *, begun: int, newest: int
) -> list[int] | None:
    """Weight version of each token of a response, as vLLM and SGLang report it.

    A server whose weights this engine never updated reports ``"default"``, which counts as 0. Releases
    that report one version for all tokens report the last one: the version at which the request began
    counts if that is older.

    Args:
        info: the reply's choice (vLLM) or ``meta_info`` (SGLang). It has ``weight_versions``, the spans
            of tokens with one version, or ``weight_version`` in older releases of SGLang.
        size: number of tokens.
        begun: version when the request began.
        newest: the newest version that a server can have.

    Returns:
        The versions; ``None`` if the server reports none.

    Raises:
        TryAgainError: if the server has older weights than when the request began.
        MalformedAnswerError: if the engine set no such version.

    Examples:
        >>> reported_versions({"weight_version": "3"}, 2, begun=3, newest=3)
        [3, 3]
        >>> reported_versions({"weight_version": "3"}, 2, begun=2, newest=3)
        [2, 2]
        >>> spans = [
        ...     {"version": "2", "start": 0, "end": 1},
        ...     {"version": "3", "start": 1, "end": 2},
        ... ]
        >>> reported_versions({"weight_versions": spans}, 2, begun=2, newest=3)
        [2, 3]
    """
    spans = info.get("weight_versions")
    if spans is not None:
        versions = [_number(x["version"]) for x in spans for _ in range(x["start"], x["end"])]
        if len(versions) != size:
            raise MalformedAnswerError(
                f"weight_versions must cover {size} tokens, got {spans!r:.100}."
            )
    elif info.get("weight_version") is None:
        return None
    else:
        versions = [_number(info["weight_version"])] * size
    if max(versions) > newest:
        raise MalformedAnswerError(
            f"weight_version must be one that this engine set, at most {newest}, got "
            f"{max(versions)}: the server has the weights of another run. Call update_weights first."
        )
    last = versions[-1]
    if last < begun:
        raise TryAgainError(
            f"the server has the weights of version {last}, not {begun}: it was started again."
        )
    return versions if spans is not None else [min(version, begun) for version in versions]


def _number(version: Any) -> int:
    """The version as a number; any other name is that of the weights that the server started with."""
    text = str(version)
    return int(text) if text.isdecimal() else 0
