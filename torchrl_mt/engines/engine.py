"""The engine interface: prompt tokens in; sampled tokens, log-probabilities and weight versions out.

Engines never handle text. The three lists of a completion have one entry per sampled token, exactly as
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["FACTORY_INSTEAD", "Completion", "Engine"]

FACTORY_INSTEAD = (
    "give a factory, a function without arguments that makes the engine in the process that uses it: "
    "policy=lambda: {name}(...)"
)
"""What to give a collector in another process instead of an engine."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that a model sampled for one prompt.

    Args:
        token_ids: the sampled tokens, including the stop token if one was sampled.
        log_probs: log-probability of each token under the distribution that it was sampled from.
        versions: weight version that sampled each token.
        finish_reason: ``"stop"`` if the model or a stop string ended the response, ``"length"`` if it
            was cut.
        sampling: sampling parameters that differ from plain sampling at temperature 1, such as
            ``temperature``, ``top_k`` and ``top_p``. An engine also records here if its
            log-probabilities are of another distribution.
        stop_string: the stop string that ended the response, the first in its text; ``None`` if a stop
            token or the limit did. ``token_ids`` keep all tokens that spell it, and what the last of
            them adds behind it.

    Raises:
        ValueError: if the lists differ in length.

    Examples:
        >>> Completion([5, 2], [-0.1, -0.2], [0, 0], "stop").token_ids
        [5, 2]
        >>> Completion([5, 2], [-0.1, -0.2], [0, 0], "stop").stop_token
        2
        >>> Completion([5, 2], [-0.1, -0.2], [0, 0], "stop", stop_string=".").stop_token is None
        True
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    finish_reason: Literal["stop", "length"]
    sampling: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    stop_string: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                "token_ids, log_probs and versions must have one entry per sampled token, got "
                f"{len(self.token_ids)}, {len(self.log_probs)} and {len(self.versions)}."
            )

    @property
    def stop_token(self) -> int | None:
        """The stop token at the response's end; ``None`` if it was cut or a stop string ended it."""
        if self.finish_reason != "stop" or self.stop_string is not None or not len(self.token_ids):
            return None
        return self.token_ids[-1]


@runtime_checkable
class Engine(Protocol):
    """A sampler that many conversations share.

    Any object with these members is an engine; no base class is needed. If others can change the weights
    without calling ``update_weights`` (those of a server, say), add ``count_update() -> int``: it only
    counts such an update and returns the new version.
    """

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[Any] | None = (),
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample a continuation of ``prompt_ids``. Calls may run concurrently.

        Args:
            prompt_ids: at least one token.
            images: all images that the prompt shows, in order, each in a form that
                :meth:`StoredImage.of <torchrl_mt.vision.StoredImage.of>` takes. The prompt holds one
                image token for each token of an image. ``None`` is none. Passed only if there are
                images, so an engine for text alone need not know the argument.
            max_new_tokens: maximum length of the response; if ``None``, the engine's limit or the room
                that the prompt leaves, whichever is less.
            **sampling: sampling parameters of this request, such as ``temperature``. ``stop``, a string
                or a list of strings, ends the response with the first token at which its decoded text
                contains one of them.

        Raises:
            ValueError: if the prompt is empty or not in the vocabulary, prompt and response together are
                too long, ``max_new_tokens`` is below 1, a sampling parameter is out of range, an image
                cannot be read, or the image tokens are not those of the images.
            TypeError: if ``prompt_ids`` are no integers, a sampling parameter is not supported, or
                ``images`` are given to an engine for text alone.
            RuntimeError: if the engine is closed, or sampling failed.
        """
        ...

    def update_weights(self, source: Any) -> int:
        """Load new weights and return the new version."""
        ...

    def close(self) -> None:
        """Stop sampling and release everything; closing again does nothing."""
        ...
