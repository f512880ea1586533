"""What an engine is: prompt tokens in; sampled tokens, their log-probabilities and weight versions out.

Text never appears here. Whatever stands behind an engine, the three lists of a completion have one
entry per sampled token, exactly as sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["Completion", "Engine"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model answered to one prompt.

    Args:
        token_ids: the sampled tokens, the stop token included if one was sampled.
        log_probs: the log-probability of each, under the distribution that it was sampled from.
        versions: the weight version that sampled each.
        finish_reason: ``"stop"`` if the model ended its answer by itself, ``"length"`` if it was cut.
        sampling: the arguments that shaped the distribution where they differ from plain sampling at
            temperature 1, such as ``temperature``, ``top_k`` and ``top_p``. An engine that can give no
            log-probabilities of that distribution says so here.

    Raises:
        ValueError: if the lists differ in length.

    Examples:
        >>> Completion([5, 2], [-0.1, -0.2], [0, 0], "stop").token_ids
        [5, 2]
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    finish_reason: Literal["stop", "length"]
    sampling: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                "token_ids, log_probs and versions must have one entry per sampled token, got "
                f"{len(self.token_ids)}, {len(self.log_probs)} and {len(self.versions)}."
            )


@runtime_checkable
class Engine(Protocol):
    """A sampler that many conversations share.

    Any object with these members is an engine; nothing has to be inherited. One whose weights others may
    change without its ``update_weights`` (a server's, say) should also have ``count_update() -> int``,
    which counts such an update and does nothing else.
    """

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        """Sample a continuation of ``prompt_ids``; any number of calls may be under way at once.

        Args:
            prompt_ids: the tokens that the model sees, at least one.
            max_new_tokens: longest answer; if ``None``, the engine's own limit or what room there is.
            **sampling: what the engine lets a request choose, such as ``temperature``.

        Raises:
            ValueError: if the prompt is empty or not in the vocabulary, prompt and answer together are
                too long, ``max_new_tokens`` is below 1, or a sampling argument is out of range.
            TypeError: if ``prompt_ids`` are no integers, or a sampling argument is not supported.
            RuntimeError: if the engine is closed, or sampling failed.
        """
        ...

    def update_weights(self, source: Any) -> int:
        """Take new weights; returns the new version."""
        ...

    def close(self) -> None:
        """Stop sampling and release everything; closing again does nothing."""
        ...
