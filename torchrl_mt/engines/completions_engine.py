"""An engine on an OpenAI-compatible completions server, such as vLLM's: token ids in and out.

What the server samples is taken token for token with its log-probabilities. No answer claims newer
weights than sampled it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchrl_mt.engines.completions_api import OWN_FIELDS, completions_url, parse_answer
from torchrl_mt.engines.engine import Completion
from torchrl_mt.engines.http_client import CompletionsError, HttpClient
from torchrl_mt.engines.requests import checked_request
from torchrl_mt.engines.weights import hand_on

__all__ = ["CompletionsEngine", "CompletionsError"]

_logger = logging.getLogger("torchrl_mt")


class CompletionsEngine:
    """Sample with a completions server (``POST /v1/completions``).

    Prompts are sent as token ids. The server must answer with token ids too: ``token_ids`` (asked for
    with ``return_token_ids``) or ``logprobs.tokens`` of the form ``"token_id:12"`` (asked for with
    ``return_tokens_as_token_ids``); vLLM gives both. Text is never encoded again.

    An answer that ends with a stop token holds it if the server's token ids do, as vLLM's do; nothing is
    added where they do not. Then ``finish_reason`` is still ``"stop"``, and the stop token is the next
    prompt's, not the answer's: it is not trained on.

    Log-probabilities are the server's and must be those of the distribution that it samples from.
    vLLM reports them before ``temperature``, ``top_p`` and the like act, unless it is started with
    ``--logprobs-mode processed_logprobs``; with ``temperature=1`` alone there is no difference.

    Weight versions are counted here. A request during which the weights changed is stamped with the
    version at which its last attempt *began*, for all of its tokens: which were sampled before the
    change cannot be told, and a token that passes for older than it is is at worst left out as stale,
    while one that passes for newer would be trained on as if it were on-policy. A server that says
    itself which weights sampled is believed (``version_key``).

    httpx is needed: ``pip install 'torchrl-mt[server]'``.

    Args:
        base_url: the server's address, with or without ``/v1``.
        model: the name under which the server serves the model.
        tokenizer: the model's tokenizer; it renders the messages.
        api_key: sent as a bearer token.
        max_new_tokens: longest answer, unless a request says otherwise.
        max_total_tokens: most tokens of prompt and answer together (the server's ``max_model_len``);
            ``None`` leaves it to the server to refuse longer ones.
        timeout: seconds to connect, and seconds without a byte from the server, in one attempt.
        max_retries: how often a request is tried again after a connection error, a timeout or one of
            the statuses 408, 425, 429 and 5xx.
        backoff: seconds before the first retry, about; twice as long before each further one. A
            ``Retry-After`` is kept to, if it asks for no more than ``timeout``.
        temperature: what the server divides the logits by.
        max_connections: most connections at once, per event loop.
        extra_body: further fields of every request, such as ``{"top_p": 0.9, "stop_token_ids": [7]}``.
        version_key: where the answer says which weights sampled it, as a dotted path in the choice or
            at its root: ``"metadata.weight_version"``.
        on_update: called with the source of an update; what it does is up to you: save a checkpoint
            and have the server load it, say. May be a coroutine function.

    Raises:
        ImportError: if httpx is not installed.
        ValueError: if a number is out of range, ``base_url`` is no HTTP address, or ``extra_body`` has a
            field that the engine sets itself.

    Examples:
        >>> engine = CompletionsEngine(  # doctest: +SKIP
        ...     "http://localhost:8000/v1", "Qwen/Qwen2.5-0.5B-Instruct", tokenizer
        ... )
        >>> completion = await engine.generate([1, 5, 7])  # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Any,
        *,
        api_key: str | None = None,
        max_new_tokens: int = 256,
        max_total_tokens: int | None = None,
        timeout: float = 60.0,
        max_retries: int = 3,
        backoff: float = 0.5,
        temperature: float = 1.0,
        max_connections: int = 256,
        extra_body: Mapping[str, Any] | None = None,
        version_key: str | None = None,
        on_update: Callable[[Any], Any] | None = None,
    ) -> None:
        for name, value in {
            "max_new_tokens": max_new_tokens,
            "max_total_tokens": 1 if max_total_tokens is None else max_total_tokens,
            "timeout": timeout,
            "max_connections": max_connections,
        }.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        for name, value in {
            "max_retries": max_retries,
            "backoff": backoff,
            "temperature": temperature,
        }.items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        _require_free("extra_body", extra_body or {})
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.max_total_tokens = max_total_tokens
        """Most tokens of prompt and answer together; ``None``: not known."""
        self._body = {
            "model": model,
            "temperature": temperature,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **(extra_body or {}),
        }
        self._version_key = version_key
        self._on_update = on_update
        self._version = 0
        self._updating = threading.Lock()
        self._client = HttpClient(
            completions_url(base_url),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=timeout,
            max_retries=max_retries,
            backoff=backoff,
            max_connections=max_connections,
        )
        if temperature != 1:
            _logger.warning(
                "temperature=%s: log-probabilities must be those of the divided logits; vLLM reports "
                "such only when started with --logprobs-mode processed_logprobs.",
                temperature,
            )

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._version

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        """Sample an answer to a prompt.

        Args:
            prompt_ids: the tokens that the model sees, at least one.
            max_new_tokens: longest answer; if ``None``, the engine's own limit or what room there is.
            **sampling: further fields of this request, such as ``temperature`` or ``seed``.

        Returns:
            The sampled tokens with their log-probabilities and weight versions.

        Raises:
            ValueError: if the prompt is empty, prompt and answer exceed :attr:`max_total_tokens`,
                ``max_new_tokens`` is below 1, or ``sampling`` has a field that the engine sets.
            TypeError: if ``prompt_ids`` are no integers.
            CompletionsError: if the server refuses the request, keeps failing, or answers with something
                that is no whole answer.
            RuntimeError: if the engine is closed.
        """
        total = self.max_total_tokens
        prompt, limit = checked_request(
            prompt_ids,
            max_new_tokens,
            longest=self.max_new_tokens,
            total=total,
            bound=f"max_total_tokens={total}",
        )
        _require_free("sampling arguments", sampling)
        body = {**self._body, **sampling, "prompt": prompt, "max_tokens": limit}
        parse = partial(parse_answer, max_new_tokens=limit, version_key=self._version_key)
        answer, version = await self._client.post(body, parse, lambda: self._version)
        versions = answer.versions or [version] * len(answer.token_ids)
        return Completion(answer.token_ids, answer.log_probs, versions, answer.finish_reason)

    def update_weights(self, source: Any = None) -> int:
        """Have the server take new weights, then count them.

        Args:
            source: handed to ``on_update``.

        Returns:
            The new version: what begins from now on is stamped with it.

        Raises:
            NotImplementedError: if there is no ``on_update``.
            RuntimeError: if the engine is closed.
        """
        if self._client.closed:
            raise RuntimeError("the engine is closed: make a new one.")
        if self._on_update is None:
            raise NotImplementedError(
                "how a server takes new weights is the server's own affair: pass on_update=, a function "
                "that is called with the source and has the server load it."
            )
        with self._updating:
            hand_on(self._on_update, source)
            self._version += 1
        return self._version

    def close(self) -> None:
        """Fail what is under way and close every connection."""
        self._client.close()


def _require_free(what: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the engine sets itself."""
    taken = sorted(OWN_FIELDS & fields.keys())
    if taken:
        raise ValueError(f"{what} must leave out what the engine sets itself, got {taken}.")
