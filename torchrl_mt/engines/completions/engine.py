"""Engine for an OpenAI-compatible completions server, such as vLLM's: token ids in and out.

Completions hold the server's sampled tokens and log-probabilities unchanged. No token is stamped with
newer weights than sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args

from torchrl_mt.chat.encoding import decode
from torchrl_mt.checks import check_choice
from torchrl_mt.engines.completions.api import (
    OWN_FIELDS,
    Answer,
    completions_url,
    max_model_len,
    parse_answer,
)
from torchrl_mt.engines.completions.images import ImageApi, ImageRequests, barring
from torchrl_mt.engines.engine import FACTORY_INSTEAD, Completion
from torchrl_mt.engines.engine_thread import closed_error
from torchrl_mt.engines.request_checks import checked_request, require_positive
from torchrl_mt.engines.sampling_params import TruncationWarning, sampling_record
from torchrl_mt.engines.stop_strings import checked_stop, find_stop
from torchrl_mt.engines.weights import hand_on
from torchrl_mt.http_client import HttpClient, HttpError
from torchrl_mt.processes import StaysInProcess
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.model import check_no_video

__all__ = ["CompletionsEngine", "CompletionsError"]

_logger = logging.getLogger("torchrl_mt")

_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Neutral values, sent because vLLM would otherwise use the model's generation config."""

_PROBE_TOKENS, _NEARLY_GREEDY, _CERTAIN = 4, 0.02, -0.05
"""Of a probe: its tokens, its temperature, and the lowest log-probability of a certain token."""
_MODE_WARNINGS = {
    "raw_logprobs": "Sampling with %s: raw log-probabilities are not those of what was sampled from; do "
    "not train on them. Completion.sampling records it.",
    "unknown": "Sampling with %s: log-probabilities must be those of what is sampled from; vLLM reports "
    "such only when started with --logprobs-mode processed_logprobs. Say so with logprobs_mode=.",
}
"""Warnings, logged once, if log-probabilities are or may be of another distribution."""
_MODELS_TIMEOUT = 5.0
"""Seconds for a request to ``/v1/models``."""
_AWAY_PAUSE = 0.5
"""Seconds between two attempts to reach a server that is not up yet."""


class CompletionsError(HttpError):
    """A request to a completions server failed, and retries did not help.

    Args:
        url: address of the request.
        attempts: number of attempts.
        reason: why the last attempt failed.
    """


class CompletionsEngine(StaysInProcess):
    """Sample with a completions server (``POST /v1/completions``).

    **Tokens.** Prompts are sent as token ids. The server must answer with token ids too: ``token_ids``
    (requested by ``return_token_ids``) or ``logprobs.tokens`` of the form ``"token_id:12"`` (requested
    by ``return_tokens_as_token_ids``). vLLM sends both. Text is never encoded again.

    **Stop tokens.** An answer includes its stop token if the server's token ids do, as vLLM's do. If
    they do not, ``finish_reason`` is still ``"stop"``, and the stop token is part of the next prompt: it
    is not trained on.

    **Stop strings.** ``stop`` of a request or of ``extra_body`` is sent to the server, which ends the
    answer. ``Completion.stop_string`` is what the server names (vLLM's ``stop_reason``, SGLang's
    ``matched_stop``), or else the first of them in the decoded answer.

    **Distribution.** Sampling is from the model's own distribution unless ``temperature``,
    ``extra_body`` or a request changes it. Neutral values of ``top_p``, ``top_k``, ``min_p`` and
    ``repetition_penalty`` are sent, because vLLM would otherwise use the model's generation config. Set
    a field to ``None`` to leave it out, for servers that refuse it. ``Completion.sampling`` records what
    was requested.

    **Log-probabilities** are the server's. They should be those after ``temperature``, ``top_p`` and so
    on. vLLM reports these only if started with ``--logprobs-mode processed_logprobs``; otherwise it
    reports those of the model's own distribution. With plain sampling the two are equal. If
    ``logprobs_mode`` does not say which, the engine sends a probe after the first request for which it
    matters: four nearly certain tokens, whose processed log-probabilities are nearly 0.

    **Weight versions** are counted by the engine. If the weights change during a request, all of its
    tokens have the version at which its last attempt *began*. A token may then be rejected as stale too
    early, but none is trained on as newer than it is. With ``version_key``, the server's own version
    counts instead.

    **Images.** With a processor, prompts may have images. ``/v1/completions`` takes none with token ids,
    so these go to other endpoints, as ``image_api`` says:

    - ``"vllm"``: ``/inference/v1/generate``, with the prompt as it is. vLLM's own
      ``/v1/chat/completions/render`` prepares each image once.
    - ``"sglang"``: ``/generate``, with one placeholder for each image. SGLang must answer with the
      tokens that it saw (``prompt_token_ids``); they are compared with the prompt.

    Image and video tokens are barred by ``logit_bias``, in text-only prompts, too. Raw log-probabilities
    are not those after barring: start vLLM with ``--logprobs-mode processed_logprobs``.

    Requires httpx and tenacity: ``pip install 'torchrl-mt[server]'``.

    Args:
        base_url: the server's address, with or without ``/v1``.
        model: the name under which the server serves the model.
        tokenizer: the model's tokenizer, or its processor; it renders the messages.
        api_key: sent as a bearer token.
        max_new_tokens: maximum length of an answer, unless a request sets another.
        max_total_tokens: maximum length of prompt and answer together. If ``None``, the
            ``max_model_len`` of the server's ``/v1/models``, requested when first needed. If the server
            reports none, the server refuses what is too long.
        timeout: seconds for one attempt, from connecting to the answer's last byte.
        max_retries: retries after a connection error, a timeout, a status 408, 425, 429 or 5xx, or an
            answer that the server aborted (``"abort"``).
        wait_ready: seconds that a request waits for a server that starts or restarts: connections are
            refused or break, or the status is 502, 503 or 504. This counts as one attempt; afterwards
            the request fails.
        backoff: seconds before the first retry, about; doubles for each further one. A ``Retry-After``
            of up to ``timeout`` is obeyed.
        temperature: divides the logits.
        logprobs_mode: the distribution of the server's log-probabilities: ``"processed_logprobs"`` is
            the one sampled from, ``"raw_logprobs"`` the model's own. If ``None``, a probe finds out when
            it matters; if the server refuses the probe, the engine assumes the former and logs that
            once. ``Completion.sampling`` records ``"raw_logprobs"`` where the two differ.
        vocab_size: size of the vocabulary; prompts and answers with other tokens fail. ``None`` if
            unknown.
        max_connections: maximum number of connections per event loop.
        extra_body: further fields of every request, such as ``{"top_p": 0.9, "stop_token_ids": [7]}``.
        version_key: dotted path of the weight version, in the choice or at the root of the answer, such
            as ``"metadata.weight_version"``.
        on_update: called with the source of an update, to load it into the server: it may save a
            checkpoint and have the server load that, say. May be a coroutine function.
        processor: the model's processor, for prompts with images; not needed if it is given in place of
            the tokenizer.
        image_api: the form in which the server takes prompts with images; ``None`` refuses images.

    Raises:
        ImportError: if httpx or tenacity is not installed.
        TypeError: if the processor is of no supported family, or ``image_api`` is given without one.
        ValueError: if a number is out of range, ``base_url`` is no HTTP address, ``image_api`` is
            unknown, tokenizer and processor do not belong together, or ``extra_body`` has a field that
            the engine sets.

    Examples:
        >>> engine = CompletionsEngine(  # doctest: +SKIP
        ...     "http://localhost:8000/v1", "Qwen/Qwen2.5-0.5B-Instruct", tokenizer
        ... )
        >>> completion = await engine.generate([1, 5, 7])  # doctest: +SKIP
    """

    _instead = FACTORY_INSTEAD

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
        processor: Any = None,
        image_api: ImageApi | None = None,
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
        checked_stop((extra_body or {}).get("stop"))
        if image_api is not None:
            check_choice("image_api", image_api, get_args(ImageApi))
        # Tokenizers have no tokenizer.
        if processor is None and hasattr(tokenizer, "tokenizer"):
            tokenizer, processor = None, tokenizer
        self._vision = None if processor is None else VisionProcessor.of(processor)
        if self._vision is not None:
            tokenizer = self._vision.tokenizer if tokenizer is None else tokenizer
            self._vision.check_tokenizer(tokenizer)
        if image_api is not None and self._vision is None:
            raise TypeError("image_api needs the model's processor: give processor=, too.")
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self._max_total_tokens = max_total_tokens
        self._limit_is_settled = max_total_tokens is not None
        """Whether the limit is known, or the server does not report it."""
        self._limit_lock = threading.Lock()
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
        """``None`` before the probe; ``"unknown"`` if the server refuses it."""
        self._probe_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )
        self._warn = TruncationWarning()
        self._has_warned = False
        self._on_update = on_update
        self._version = 0
        self._updating = threading.Lock()
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        url = completions_url(base_url)
        make_client = partial(
            HttpClient,
            headers=self._headers,
            timeout=timeout,
            max_retries=max_retries,
            backoff=backoff,
            max_connections=max_connections,
            wait_ready=wait_ready,
            name="engine",
            error=CompletionsError,
        )
        self._client = make_client(url)
        origin = url.removesuffix("/v1/completions")
        self._images: ImageRequests | None = None
        if image_api is not None and self._vision is not None:
            self._images = ImageRequests(
                image_api, self._vision, lambda path: make_client(origin + path)
            )

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._version

    @property
    def max_total_tokens(self) -> int | None:
        """Maximum length of prompt and answer together, in tokens; ``None`` if unknown."""
        self._request_limit()
        return self._max_total_tokens

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[Any] | None = (),
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample an answer to a prompt.

        Args:
            prompt_ids: at least one token; one image token for each token of the images.
            images: all images of the prompt, in order, in any form that
                :meth:`StoredImage.of <torchrl_mt.vision.StoredImage.of>` takes.
            max_new_tokens: maximum length of the answer; if ``None``, the engine's limit or the room
                that the prompt leaves, whichever is less.
            **sampling: further fields of this request, such as ``temperature``, ``seed`` or ``stop``.

        Returns:
            The sampled tokens with their log-probabilities and weight versions.

        Raises:
            ValueError: if an argument is out of range (see :meth:`Engine.generate`), ``sampling`` has a
                field that the engine sets, or the image tokens are not those of the images.
            TypeError: if ``prompt_ids`` are no integers, ``sampling`` has a value that JSON lacks,
                ``stop`` is neither a string nor a list of strings, or ``images`` are given to an engine
                without ``image_api``.
            CompletionsError: if the server refuses, keeps failing, or sends a malformed answer.
            RuntimeError: if the engine is closed.
        """
        await self._wait_for_limit()
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
        shown = self._stored(prompt, () if images is None else images)
        asked = {**self._body, **sampling, "prompt": prompt, "max_tokens": limit}
        asked["stop"] = strings = list(checked_stop(asked.get("stop")))
        body = {name: value for name, value in asked.items() if value is not None}
        if not strings:
            del body["stop"]
        if body.get("top_k") == 0:
            body["top_k"] = _PLAIN["top_k"]  # some servers refuse 0
        record = sampling_record(body, self._vocab_size)
        if self._vision is not None:
            body["logit_bias"] = barring(self._vision, body.get("logit_bias"))
        begun: list[int] = []
        client, sent = self._client, body
        parse: Callable[[Any], Answer] = partial(self._parse, max_new_tokens=limit, prompt=prompt)
        if self._images is not None and shown:
            client, sent, parse = await self._images.make(body, prompt, shown, parse)
        answer = await client.post(
            sent,
            parse,
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
            stop_string=self._stop_string(answer, strings) if strings else None,
        )

    def update_weights(self, source: Any = None) -> int:
        """Call ``on_update`` to load new weights into the server, then count the update.

        Args:
            source: passed to ``on_update``.

        Returns:
            The new version, which stamps all attempts that begin from now on.

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
        """Count an update that the server received from elsewhere; returns the new version."""
        with self._updating:
            self._version += 1
            return self._version

    def close(self) -> None:
        """Fail all open requests and close every connection."""
        self._client.close()
        if self._images is not None:
            self._images.close()

    def _stored(self, prompt: Sequence[int], images: Sequence[Any]) -> list[StoredImage]:
        """Read the images of a prompt; refuse them if the engine cannot take any."""
        if not isinstance(images, (list, tuple)):
            raise TypeError(
                f"images must be a list of a prompt's images, got {type(images).__name__}."
            )
        if self._vision is not None:
            check_no_video(self._vision, "prompt_ids", prompt)
        if not images:
            token = None if self._vision is None else self._vision.image_token_id
            if token is not None and token in prompt:
                raise ValueError(
                    f"images must hold the images that prompt_ids show, got none for "
                    f"{prompt.count(token)} image tokens (id {token})."
                )
            return []
        if self._images is None:
            raise TypeError(
                "images cannot be sent to /v1/completions with token ids: make the engine with "
                "processor= and image_api='vllm' or 'sglang', for a server that takes them."
            )
        stored = []
        for k, image in enumerate(images):
            try:
                stored.append(StoredImage.of(image))
            except (TypeError, ValueError) as error:
                raise type(error)(f"images[{k}]: {error}") from error
        return stored

    async def _wait_for_limit(self) -> None:
        """Request the model's limit until the server is up, for at most ``wait_ready`` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_ready
        while not (self._limit_is_settled or self._client.closed):
            if await asyncio.to_thread(self._request_limit) or loop.time() >= end:
                return
            await asyncio.sleep(_AWAY_PAUSE)

    def _request_limit(self) -> bool:
        """Request the model's limit unless it is settled; false if the server is not up."""
        import httpx

        with self._limit_lock:
            if self._limit_is_settled or self._client.closed:
                return True
            url = self._client.url.removesuffix("/completions") + "/models"
            try:
                answer = httpx.get(url, headers=self._headers, timeout=_MODELS_TIMEOUT)
            except httpx.TimeoutException:
                self._limit_is_settled = True  # Asking again would delay every request.
                return True
            except httpx.TransportError:
                return False
            if answer.status_code in (502, 503, 504):
                return False
            self._limit_is_settled = True
            with suppress(ValueError):  # The server sent no JSON.
                self._max_total_tokens = max_model_len(answer.json(), self._model)
            return True

    async def _probe(self, body: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Find out once which distribution log-probabilities are of, by nearly certain tokens."""
        lock = self._probe_locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._logprobs_mode is not None:
                return
            truncated = record.keys() & {"top_k", "top_p", "min_p"}
            greedy = {"top_k": 1} if truncated else {"temperature": _NEARLY_GREEDY}
            # After one token, hardly any model's own distribution is certain.
            asked = {**body, **greedy, "prompt": body["prompt"][:1], "max_tokens": _PROBE_TOKENS}
            asked.pop("stop", None)  # it may leave too few tokens
            try:
                answer = await self._client.post(
                    asked, partial(self._parse, max_new_tokens=_PROBE_TOKENS)
                )
            except CompletionsError:
                self._logprobs_mode = "unknown"
                return
            is_raw = min(answer.log_probs) < _CERTAIN
            self._logprobs_mode = "raw_logprobs" if is_raw else "processed_logprobs"
            _logger.info("the server gives %s, as a probe has shown.", self._logprobs_mode)

    def _stop_string(self, answer: Answer, strings: Sequence[str]) -> str | None:
        """The stop string that ended an answer; ``None`` if a stop token or the limit did."""
        if answer.finish_reason != "stop" or isinstance(answer.stopped_by, int):
            return None
        if isinstance(answer.stopped_by, str):
            return answer.stopped_by
        # Servers name no end-of-sequence token, and some name nothing.
        if self.tokenizer is None or answer.token_ids[-1] == self.tokenizer.eos_token_id:
            return None
        return find_stop(decode(self.tokenizer, answer.token_ids), strings)

    def _marked(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add the log-probability mode to a record if it matters; warns once."""
        warning = _MODE_WARNINGS.get(self._logprobs_mode or "unknown")
        if warning is not None and not self._has_warned:
            self._has_warned = True
            _logger.warning(warning, record)
        if self._logprobs_mode == "raw_logprobs":
            return record | {"logprobs_mode": self._logprobs_mode}
        self._warn(record)
        return record


def _require_free(what: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the engine sets."""
    taken = sorted(OWN_FIELDS & fields.keys())
    if taken:
        raise ValueError(f"{what} must leave out fields that the engine sets, got {taken}.")
