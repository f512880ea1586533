"""An engine on an OpenAI-compatible completions server, such as vLLM's: token ids in and out.

What the server samples is taken token for token with its log-probabilities. No answer claims newer
weights than sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from torchrl_mt.engines.completions.api import (
    OWN_FIELDS,
    completions_url,
    max_model_len,
    parse_answer,
)
from torchrl_mt.engines.engine import Completion
from torchrl_mt.engines.engine_thread import closed_error
from torchrl_mt.engines.request_checks import checked_request, require_positive
from torchrl_mt.engines.sampling_params import TruncationWarning, sampling_record
from torchrl_mt.engines.weights import hand_on
from torchrl_mt.http_client import HttpClient, HttpError

__all__ = ["CompletionsEngine", "CompletionsError"]

_logger = logging.getLogger("torchrl_mt")

_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What vLLM would otherwise take from the model's generation config."""

_PROBE_TOKENS, _NEARLY_GREEDY, _SURE = 4, 0.02, -0.05
"""How many tokens a probe asks for, at which temperature, and the log-probability of a sure one."""
_DOUBTS = {
    "raw_logprobs": "Sampling with %s: raw log-probabilities are not those of what was sampled from; do "
    "not train on them. Completion.sampling records it.",
    "unknown": "Sampling with %s: log-probabilities must be those of what is sampled from; vLLM reports "
    "such only when started with --logprobs-mode processed_logprobs. Say so with logprobs_mode=.",
}
"""What to say, once, of log-probabilities that are or may be of another distribution."""
_ASK_SECONDS = 5.0
"""For the server to say what it knows of the model."""
_AWAY_PAUSE = 0.5
"""Seconds after which a server that is not there yet is looked for again."""


class CompletionsError(HttpError):
    """A request to a completions server failed for good.

    Args:
        url: what was asked.
        attempts: how often.
        reason: what happened the last time.
    """


class CompletionsEngine:
    """Sample with a completions server (``POST /v1/completions``).

    Prompts are sent as token ids. The server must answer with token ids too: ``token_ids`` (asked for
    with ``return_token_ids``) or ``logprobs.tokens`` of the form ``"token_id:12"`` (asked for with
    ``return_tokens_as_token_ids``); vLLM gives both. Text is never encoded again.

    An answer that ends with a stop token holds it if the server's token ids do, as vLLM's do; nothing is
    added where they do not. Then ``finish_reason`` is still ``"stop"``, and the stop token is the next
    prompt's, not the answer's: it is not trained on.

    Sampling is from the model's own distribution unless ``temperature``, ``extra_body`` or a request
    say otherwise: ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` are sent with the values
    that change nothing, because vLLM would otherwise take them from the model's generation config. A
    field that is ``None`` is left out, for servers that refuse it. ``Completion.sampling`` has what was
    asked for.

    Log-probabilities are the server's, after ``temperature``, ``top_p`` and the like. vLLM reports such
    only if it is started with ``--logprobs-mode processed_logprobs``, otherwise those of the model's own
    distribution; with plain sampling there is no difference. ``logprobs_mode`` says which it is. Without
    it, the first request for which it matters is followed by a probe: four tokens without a choice,
    whose log-probabilities are 0 if they are of what was sampled from.

    Weight versions are counted here. If the weights change during a request, all of its tokens have the
    version at which its last attempt *began*: a token that passes for older than it is may be left out
    as stale, but none is trained on as if it were newer. A server that says itself which weights sampled
    is believed (``version_key``).

    httpx and tenacity are needed: ``pip install 'torchrl-mt[server]'``.

    Args:
        base_url: the server's address, with or without ``/v1``.
        model: the name under which the server serves the model.
        tokenizer: the model's tokenizer; it renders the messages.
        api_key: sent as a bearer token.
        max_new_tokens: longest answer, unless a request says otherwise.
        max_total_tokens: most tokens of prompt and answer together. ``None``: the ``max_model_len`` that
            the server's ``/v1/models`` gives, asked for when it is first needed; where it gives none, it
            is left to the server to refuse longer ones.
        timeout: seconds that one attempt may take in all, from connecting to the answer's last byte.
        max_retries: how often a request is tried again after a connection error, a timeout, one of the
            statuses 408, 425, 429 and 5xx, or an answer that the server gave up (``"abort"``).
        wait_ready: seconds for which a request waits for a server that is not there (connections are
            refused or break, or the status is 502, 503 or 504), because it starts or restarts. This
            counts as one attempt; after that the request fails.
        backoff: seconds before the first retry, about; twice as long before each further one. A
            ``Retry-After`` is kept to, if it asks for no more than ``timeout``.
        temperature: what the server divides the logits by.
        logprobs_mode: what the server's log-probabilities are of: ``"processed_logprobs"``, the
            distribution that it samples from, or ``"raw_logprobs"``, the model's own. ``None``: it is
            found by a probe when it matters; if the server refuses that, the former is assumed, and the
            log says so once. The latter are marked in ``Completion.sampling`` where they are not of what
            was sampled from.
        vocab_size: how many tokens the model has; prompts and answers with others fail. ``None``: not
            known.
        max_connections: most connections at once, per event loop.
        extra_body: further fields of every request, such as ``{"top_p": 0.9, "stop_token_ids": [7]}``.
        version_key: where the answer says which weights sampled it, as a dotted path in the choice or
            at its root: ``"metadata.weight_version"``.
        on_update: called with the source of an update; what it does is up to you: save a checkpoint
            and have the server load it, say. May be a coroutine function.

    Raises:
        ImportError: if httpx or tenacity is not installed.
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
        wait_ready: float = 0.0,
        backoff: float = 0.5,
        temperature: float = 1.0,
        logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] | None = None,
        vocab_size: int | None = None,
        max_connections: int = 256,
        extra_body: Mapping[str, Any] | None = None,
        version_key: str | None = None,
        on_update: Callable[[Any], Any] | None = None,
    ) -> None:
        require_positive(
            max_new_tokens=max_new_tokens, max_total_tokens=max_total_tokens, vocab_size=vocab_size
        )
        if logprobs_mode not in (None, "processed_logprobs", "raw_logprobs"):
            raise ValueError(
                'logprobs_mode must be "processed_logprobs", "raw_logprobs" or None, got '
                f"{logprobs_mode!r}."
            )
        _require_free("extra_body", extra_body or {})
        sampling_record({"temperature": temperature, **(extra_body or {})})
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self._max_total_tokens = max_total_tokens
        self._has_asked = max_total_tokens is not None
        """Whether the server has said what it knows of the model, or nothing can be learned."""
        self._asking = threading.Lock()
        self._wait_ready = wait_ready
        self._model = model
        self._body = {
            "model": model,
            "temperature": temperature,
            **_PLAIN,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **(extra_body or {}),
        }
        self._parse = partial(parse_answer, vocab_size=vocab_size, version_key=version_key)
        self._vocab_size = vocab_size
        self._logprobs_mode: str | None = logprobs_mode
        """``None`` until it is probed; "unknown" if the server refuses that."""
        self._probes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )
        self._warn = TruncationWarning()
        self._doubted = False
        self._on_update = on_update
        self._version = 0
        self._updating = threading.Lock()
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = HttpClient(
            completions_url(base_url),
            headers=self._headers,
            timeout=timeout,
            max_retries=max_retries,
            backoff=backoff,
            max_connections=max_connections,
            wait_ready=wait_ready,
            name="engine",
            error=CompletionsError,
        )

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._version

    @property
    def max_total_tokens(self) -> int | None:
        """Most tokens of prompt and answer together; ``None``: not known."""
        self._ask_server()
        return self._max_total_tokens

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
            ValueError: if an argument is out of range (see :meth:`Engine.generate`), or ``sampling`` has
                a field that the engine sets itself.
            TypeError: if ``prompt_ids`` are no integers, or ``sampling`` has what JSON cannot say.
            CompletionsError: if the server refuses, keeps failing, or gives no whole answer.
            RuntimeError: if the engine is closed.
        """
        await self._find_out()
        total = self._max_total_tokens
        prompt, limit = checked_request(
            prompt_ids,
            max_new_tokens,
            longest=self.max_new_tokens,
            total=total,
            bound=f"max_total_tokens={total}",
            vocab_size=self._vocab_size,
        )
        _require_free("sampling arguments", sampling)
        asked = {**self._body, **sampling, "prompt": prompt, "max_tokens": limit}
        body = {name: value for name, value in asked.items() if value is not None}
        if body.get("top_k") == 0:
            body["top_k"] = _PLAIN["top_k"]  # some servers refuse 0
        record = sampling_record(body, self._vocab_size)
        begun: list[int] = []
        answer = await self._client.post(
            body,
            partial(self._parse, max_new_tokens=limit, prompt=prompt),
            on_attempt=lambda: begun.append(self._version),
        )
        if record:
            await self._probe(body, record)
            record = self._marked(record)
        return Completion(
            answer.token_ids,
            answer.log_probs,
            answer.versions or begun[-1:] * len(answer.token_ids),
            answer.finish_reason,
            sampling=record,
        )

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
            raise closed_error()
        if self._on_update is None:
            raise NotImplementedError(
                "how a server takes new weights is the server's own affair: pass on_update=, a function "
                "that is called with the source and has the server load it."
            )
        with self._updating:
            hand_on(self._on_update, source)
            self._version += 1
            return self._version

    def count_update(self) -> int:
        """Count new weights that the server was given by somebody else; returns the new version."""
        with self._updating:
            self._version += 1
            return self._version

    def close(self) -> None:
        """Fail what is under way and close every connection."""
        self._client.close()

    async def _find_out(self) -> None:
        """Have the server say what it knows of the model, once, when it is there."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_ready
        while not (self._has_asked or self._client.closed):
            if await asyncio.to_thread(self._ask_server) or loop.time() >= end:
                return
            await asyncio.sleep(_AWAY_PAUSE)

    def _ask_server(self) -> bool:
        """Ask what the server knows of the model, unless that is known; tells whether it is."""
        import httpx

        with self._asking:
            if self._has_asked or self._client.closed:
                return True
            url = self._client.url.removesuffix("/completions") + "/models"
            try:
                answer = httpx.get(url, headers=self._headers, timeout=_ASK_SECONDS)
            except httpx.TimeoutException:
                self._has_asked = True  # It is there and says nothing, or may never be.
                return True
            except httpx.TransportError:
                return False
            if answer.status_code in (502, 503, 504):
                return False
            self._has_asked = True
            with suppress(ValueError):  # It does not say.
                self._max_total_tokens = max_model_len(answer.json(), self._model)
            return True

    async def _probe(self, body: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Find out once what log-probabilities are of, by an answer that leaves nothing to chance."""
        lock = self._probes.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._logprobs_mode is not None:
                return
            truncated = record.keys() & {"top_k", "top_p", "min_p"}
            sure = {"top_k": 1} if truncated else {"temperature": _NEARLY_GREEDY}
            # After one token alone, hardly any model is sure by itself.
            asked = {**body, **sure, "prompt": body["prompt"][:1], "max_tokens": _PROBE_TOKENS}
            try:
                answer = await self._client.post(
                    asked, partial(self._parse, max_new_tokens=_PROBE_TOKENS)
                )
            except CompletionsError:
                self._logprobs_mode = "unknown"
                return
            is_raw = min(answer.log_probs) < _SURE
            self._logprobs_mode = "raw_logprobs" if is_raw else "processed_logprobs"
            _logger.info("the server gives %s, as a probe has shown.", self._logprobs_mode)

    def _marked(self, record: dict[str, Any]) -> dict[str, Any]:
        """What a completion says about its distribution; warns of the first that calls for it."""
        doubt = _DOUBTS.get(self._logprobs_mode or "unknown")
        if doubt is not None and not self._doubted:
            self._doubted = True
            _logger.warning(doubt, record)
        if self._logprobs_mode == "raw_logprobs":
            return record | {"logprobs_mode": self._logprobs_mode}
        self._warn(record)
        return record


def _require_free(what: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the engine sets itself."""
    taken = sorted(OWN_FIELDS & fields.keys())
    if taken:
        raise ValueError(f"{what} must leave out what the engine sets itself, got {taken}.")
