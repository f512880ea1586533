"""Engine for servers that take and return token ids, such as vLLM's and SGLang's.

Completions hold the server's sampled tokens and log-probabilities unchanged. No token is stamped with
newer weights than sampled it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrl_mt.chat.encoding import decode
from torchrl_mt.checks import check_choice
from torchrl_mt.engines.completions.api import OWN_FIELDS, Answer, parse_answer
from torchrl_mt.engines.completions.images import ImageApi, ImageRequests
from torchrl_mt.engines.completions.log_probs_mode import LogProbsMode
from torchrl_mt.engines.completions.model_limit import ModelLimit
from torchrl_mt.engines.completions.native import PATHS, Api, Request, make_request
from torchrl_mt.engines.completions.reported_versions import (
    VersionSource,
    name_of,
    reported_versions,
)
from torchrl_mt.engines.completions.servers import Server, Servers, server_origins
from torchrl_mt.engines.completions.updates_elsewhere import UpdatesElsewhere
from torchrl_mt.engines.engine import FACTORY_INSTEAD, Completion
from torchrl_mt.engines.engine_thread import closed_error
from torchrl_mt.engines.request_checks import checked_images, checked_request, require_positive
from torchrl_mt.engines.sampling_params import sampling_record
from torchrl_mt.engines.server_weights import ServerWeights
from torchrl_mt.engines.stop_strings import checked_stop, find_stop, watch
from torchrl_mt.engines.weights import hand_on
from torchrl_mt.http_client import AttemptError, HttpClient, HttpError, Target, TryAgainError
from torchrl_mt.processes import StaysInProcess
from torchrl_mt.threads import wait_all
from torchrl_mt.vision.processor import with_processor

__all__ = ["CompletionsEngine", "CompletionsError"]

_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Neutral values, sent because vLLM would otherwise use the model's generation config."""
_WITH_TOKENS = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
"""Has servers answer with token ids and their log-probabilities."""
_BARRED = -100.0
"""Added to the logits of tokens that must not be sampled: the least that servers take."""
_NO_IMAGES = (
    "images cannot be sent to /v1/completions with token ids: make the engine with processor= and "
    "image_api='vllm' or 'sglang', for a server that takes them."
)
_MOST_STOPS = 4
"""Stop strings that ``/v1/completions`` takes, as OpenAI says and vLLM 0.32 checks."""


class CompletionsError(HttpError):
    """A request to a completions server failed, and retries did not help.

    Args:
        url: address of the request.
        attempts: number of attempts.
        reason: why the last attempt failed.
    """


class CompletionsEngine(StaysInProcess):
    """Sample with one or several servers of a model that take and return token ids (vLLM, SGLang).

    Token ids go in and come out: text is never encoded again. :doc:`/servers` has the servers' options,
    how requests are shared among them, retries, stop strings, log-probabilities, new weights and their
    versions; :doc:`/images` has prompts with images. Needs ``pip install 'torchrl-mt[server]'``.

    Args:
        base_url: the server's address, with or without ``/v1``, or a list of several servers'.
        model: the name under which the servers serve the model.
        tokenizer: the model's tokenizer, or its processor; it renders the messages.
        api_key: sent as a bearer token.
        max_new_tokens: maximum length of a response, unless a request sets another.
        max_total_tokens: maximum length of prompt and response together; ``None`` asks the server.
        timeout: seconds for one attempt, from connecting to the last byte of the reply.
        max_retries: further attempts of a request that failed, if the fault may pass.
        wait_ready: seconds that requests and updates wait for a server that starts or restarts.
        backoff: seconds before the first retry, about; doubles for each further one.
        temperature: divides the logits.
        logprobs_mode: the distribution of the server's log-probabilities, ``"processed_logprobs"`` or
            ``"raw_logprobs"``; ``None`` probes the server if it matters.
        vocab_size: size of the vocabulary, if known; prompts and responses with other tokens fail.
        max_connections: maximum number of connections per event loop, to all servers together.
        extra_body: further fields of every request, such as ``{"top_p": 0.9, "stop_token_ids": [7]}``.
        version_key: dotted path of the weight version, in the choice or at the root of the reply.
        on_update: loads an update into the servers: :class:`~torchrl_mt.engines.VLLMWeights`,
            :class:`~torchrl_mt.engines.SGLangWeights`, or a plain or ``async`` function of its source.
        processor: the model's processor, for prompts with images, unless ``tokenizer`` is one.
        image_api: the form of prompts with images, ``"vllm"`` or ``"sglang"``; ``None`` is ``api``.
        api: the form of requests: ``"openai"``, ``"vllm"`` or ``"sglang"``.

    Raises:
        ImportError: if httpx or tenacity is not installed.
        TypeError: if the processor is of no supported family, or ``image_api`` is given without one.
        ValueError: if a number is out of range, an address or a name is wrong, arguments contradict each
            other, or ``extra_body`` has a field that the engine sets.

    Examples:
        >>> engine = CompletionsEngine(url, "Qwen/Qwen3-0.6B", tokenizer)  # doctest: +SKIP
        >>> completion = await engine.generate([1, 5, 7])  # doctest: +SKIP
    """

    _instead = FACTORY_INSTEAD
    _versions: VersionSource

    def __init__(
        self,
        base_url: str | Sequence[str],
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
        api: Api = "openai",
    ) -> None:
        require_positive(
            max_new_tokens=max_new_tokens, max_total_tokens=max_total_tokens, vocab_size=vocab_size
        )
        _require_free("extra_body", extra_body or {})
        sampling_record({"temperature": temperature, **(extra_body or {})})
        checked_stop((extra_body or {}).get("stop"))
        check_choice("api", api, get_args(Api))
        if image_api is not None:
            check_choice("image_api", image_api, get_args(ImageApi))
            if api not in ("openai", image_api):
                raise ValueError(f"image_api must be None or api={api!r}, got {image_api!r}.")
        tokenizer, self._vision = with_processor(tokenizer, processor)
        if image_api is not None and self._vision is None:
            raise TypeError("image_api needs the model's processor: give processor=, too.")
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.model_name = model
        """The name under which the servers serve the model."""
        self._body = {
            "temperature": temperature,
            **_PLAIN,
            **_WITH_TOKENS,
            **(extra_body or {}),
        }
        self._parse = partial(parse_answer, vocab_size=vocab_size, version_key=version_key)
        self._vocab_size = vocab_size
        self._log_probs_mode = LogProbsMode(logprobs_mode, self._sample)
        self._on_update = on_update
        self._updating = threading.Lock()
        origins = server_origins(base_url)
        bring_up, self._versions = None, "begun"
        if isinstance(on_update, ServerWeights):
            on_update.check_engine(origins, model, wait_ready)
            bring_up, self._versions = on_update.bring_up, on_update.versions
        self.wait_ready = wait_ready
        self._servers = Servers(origins, bring_up=bring_up)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = HttpClient(
            origins[0] + PATHS[api],
            headers=headers,
            timeout=timeout,
            max_retries=max_retries,
            backoff=backoff,
            max_connections=max_connections,
            wait_ready=wait_ready,
            name="engine",
            error=CompletionsError,
        )
        self._limit = ModelLimit(
            max_total_tokens,
            origins=origins,
            model=model,
            headers=headers,
            wait_ready=wait_ready,
            is_closed=lambda: self._client.closed,
        )
        self._api = api
        self._request = partial(make_request, api)
        form = api if image_api is None else image_api
        self._has_version_key = version_key is not None
        self._images: ImageRequests | None = None
        if form != "openai" and self._vision is not None:
            self._images = ImageRequests(form, self._vision, lambda x: self._post(x, (), []))

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers, without paths."""
        return [server.address for server in self._servers.all]

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._servers.version

    @property
    def max_total_tokens(self) -> int | None:
        """Maximum length of prompt and response together, in tokens; ``None`` if unknown.

        If it was not given, the server's ``/v1/models`` is asked when it is first needed. If that does
        not say, the server refuses what is too long.
        """
        self._limit.request()
        return self._limit.tokens

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[Any] | None = (),
        max_new_tokens: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample a response to a prompt.

        Args:
            prompt_ids: at least one token; one image token for each token of the images.
            images: all images of the prompt, in order, in any form that
                :meth:`StoredImage.of <torchrl_mt.vision.StoredImage.of>` takes.
            max_new_tokens: maximum length of the response; if ``None``, the engine's limit or the room
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
            CompletionsError: if the server refuses, keeps failing, or sends a malformed reply.
            RuntimeError: if the engine is closed.
        """
        total = await self._limit.wait()
        prompt, limit = checked_request(
            prompt_ids,
            max_new_tokens,
            longest=self.max_new_tokens,
            total=total,
            bound=f"max_total_tokens={total}",
            vocab_size=self._vocab_size,
        )
        _require_free("sampling arguments", sampling)
        refusal = _NO_IMAGES if self._images is None else ""
        shown = checked_images(prompt, images, self._vision, refusal)
        asked = {**self._body, **sampling, "prompt": prompt, "max_tokens": limit}
        strings = list(checked_stop(asked.get("stop")))
        is_limited = self._api == "openai" and not shown and self.tokenizer is not None
        asked["stop"] = strings[: _MOST_STOPS if is_limited else None] or None
        body = {name: value for name, value in asked.items() if value is not None}
        if body.get("top_k") == 0:
            body["top_k"] = _PLAIN["top_k"]  # some servers refuse 0
        record = sampling_record(body, self._vocab_size)
        if self._vision is not None:
            barred = {str(token): _BARRED for token in self._vision.barred}
            body["logit_bias"] = {**body.get("logit_bias", {}), **barred}
        parse: Callable[[Any], Answer] = partial(self._parse, max_new_tokens=limit, prompt=prompt)
        if self._images is not None and shown:
            request = await self._images.make(body, prompt, shown, parse)
        else:
            request = self._request(body, prompt, parse)
        answer, version, server = await self._ask(request, prompt)
        if len(strings) > len(asked["stop"] or ()):
            answer = _cut(answer, strings, self.tokenizer)
        self._servers.remember(server, prompt, answer.token_ids)
        record = await self._log_probs_mode.marked(body, record)
        return Completion(
            answer.token_ids,
            answer.log_probs,
            answer.versions or [version] * len(answer.token_ids),
            answer.finish_reason,
            sampling=record,
            stop_string=self._stop_string(answer, strings) if strings else None,
        )

    async def score(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the log-probabilities of given tokens under the servers' model, at temperature 1.

        Each sequence is a request, retried as any other; all go out concurrently. Servers compute these
        from the model's own logits: neither sampling parameters nor ``logprobs_mode`` change them. vLLM
        must not be started with a ``--logprobs-mode`` of logits.

        Args:
            tokens: sequences of at least one token each, of text alone. Servers sample one token more,
                which must fit ``max_total_tokens``.

        Returns:
            For each sequence ``[n]`` float32: the log-probability of each token after those before it,
            0 of the first, minus infinity where the probability is 0.

        Raises:
            ValueError: if a sequence is empty, too long or not in the vocabulary.
            TypeError: if tokens are no integers.
            CompletionsError: if a server refuses, keeps failing, or sends no such log-probabilities.
            RuntimeError: if the engine is closed.
        """
        total = await self._limit.wait()
        bound, size = f"max_total_tokens={total}", self._vocab_size
        prompts = [
            checked_request(each, 1, longest=1, total=total, bound=bound, vocab_size=size)[0]
            for each in tokens
        ]
        fixed = {**_PLAIN, "temperature": 1.0, "prompt_logprobs": 0, "max_tokens": 1}
        kept = self._body.keys() - {"stop", "min_tokens"}
        body = {k: self._body[k] for k in kept if self._body[k] is not None} | fixed
        parse = partial(self._parse, max_new_tokens=1, scores_prompt=True)
        requests = [self._request(body, each, partial(parse, prompt=each)) for each in prompts]
        pairs = zip(requests, prompts, strict=True)
        said = await wait_all(self._post(request, prompt, []) for request, prompt in pairs)
        return [torch.tensor(x.prompt_log_probs, dtype=torch.float32, device="cpu") for x in said]

    def update_weights(self, source: Any = None) -> int:
        """Have ``on_update`` load new weights into the servers, then count the update.

        Args:
            source: passed to ``on_update``.

        Returns:
            The new version, which stamps all attempts that begin from now on.

        Raises:
            NotImplementedError: if there is no ``on_update``.
            WeightUpdateError: if some servers did not get the weights. They take no requests until they
                have the weights of a later update, or of this one if ``on_update`` can load these
                again. If at least one server has the new weights, the update counts.
            RuntimeError: if the engine is closed.
        """
        if self._client.closed:
            raise closed_error()
        if self._on_update is None:
            raise NotImplementedError(
                "how a server takes new weights is the server's own affair: pass on_update=, such as "
                "VLLMWeights or SGLangWeights, or a function that is called with the source and has "
                "the server load it."
            )
        with self._updating:
            version = self.version + 1
            if isinstance(self._on_update, ServerWeights):
                self._update_servers(self._on_update, source, version)
            else:
                hand_on(self._on_update, source)
                self._servers.commit(version)
            return version

    def count_update(self) -> int:
        """Count an update that the server received from elsewhere; returns the new version."""
        with self._updating:
            self._servers.commit(self.version + 1)
            return self.version

    def follow_updates(self, versions: VersionSource = "begun") -> UpdatesElsewhere:
        """Let another process update the weights of the servers.

        Args:
            versions: how this engine knows which weights sampled a response.

        Returns:
            By which that process tells what it did, and learns which servers must load weights.
        """
        self._versions = versions
        return UpdatesElsewhere(self._servers)

    def stats(self) -> dict[str, int]:
        """Sizes and counters of the servers.

        Returns:
            A flat dictionary: open requests (``"running"``), ``"servers"``, those that take requests
            (``"servers/live"``), and prompts that left the server that had the turns before
            (``"servers/moved"``).
        """
        return {
            "running": sum(server.running for server in self._servers.all),
            "servers": len(self._servers.all),
            "servers/live": self._servers.live,
            "servers/moved": self._servers.moved,
        }

    def close(self) -> None:
        """Fail all open requests and close every connection."""
        self._client.close()

    def _update_servers(self, weights: ServerWeights, source: Any, version: int) -> None:
        """Update all servers while no request begins; those that fail take none."""
        with self._servers.hold():
            try:
                weights.update(source, version)
            finally:
                has_reached, lacking = weights.outcome
                if has_reached:
                    self._servers.commit(version, missed=lacking)
                else:
                    self._servers.missed(lacking)

    async def _sample(self, body: Mapping[str, Any], max_new_tokens: int) -> Answer:
        """Sample a response to text, for a probe."""
        prompt = list(body["prompt"])
        parse: Callable[[Any], Answer] = partial(self._parse, max_new_tokens=max_new_tokens)
        answer, _, _ = await self._ask(self._request(body, prompt, parse), prompt)
        return answer

    async def _ask(self, request: Request, prompt: Sequence[int]) -> tuple[Answer, int, Server]:
        """Send a request; return the response, and version and server of the attempt that gave it."""
        attempts: list[tuple[Server, int]] = []

        def parse(payload: Any) -> Answer:
            answer: Answer = request.parse(payload)
            is_own_form = request.path != PATHS["openai"]
            if self._versions == "reported" and is_own_form and not self._has_version_key:
                info = payload.get("meta_info") or payload["choices"][0]
                return self._with_versions(info, answer, *attempts[-1])
            return answer

        answer = await self._post(request._replace(parse=parse), prompt, attempts)
        server, version = attempts[-1]
        return answer, version, server

    def _with_versions(
        self, info: Mapping[str, Any], answer: Answer, server: Server, version: int
    ) -> Answer:
        """Add the versions that a server reports; one that lacks the weights must load them."""
        size = len(answer.token_ids)
        try:
            # An update may have reached the server already.
            versions = reported_versions(info, size, begun=version, newest=self.version + 1)
        except TryAgainError as error:
            if self._servers.lost(server, version, str(error)):
                raise
            raise ValueError(str(error)) from error
        return replace(answer, versions=versions)

    async def _post(
        self, request: Request, prompt: Sequence[int], attempts: list[tuple[Server, int]]
    ) -> Any:
        """Post a request to the server that suits a prompt; record its attempts."""
        return await self._client.post(
            request.body, request.parse, target=lambda: self._target(request, prompt, attempts)
        )

    @asynccontextmanager
    async def _target(
        self, request: Request, prompt: Sequence[int], attempts: list[tuple[Server, int]]
    ) -> AsyncIterator[Target]:
        """Choose where one attempt goes, and record server and version."""
        async with self._servers.use(prompt) as (server, version):
            attempts.append((server, version))
            url = server.address + request.path
            if request.path == PATHS["sglang"]:
                # Each attempt has its own id: SGLang refuses one that it still works on.
                rid = {"rid": request.body.get("rid", uuid.uuid4().hex)}
                yield Target(url, rid, (f"{server.address}/abort_request", rid))
                return
            is_named = self._versions == "named"
            try:
                yield Target(url, {"model": name_of(self.model_name, version * is_named)})
            except AttemptError as error:
                if error.status == 404 and is_named and version:
                    reason = f"it lacks the adapter of version {version}: {error}"
                    error.given_up = self._servers.lost(server, version, reason)
                    error.final = not error.given_up
                raise

    def _stop_string(self, answer: Answer, strings: Sequence[str]) -> str | None:
        """The stop string that ended a response; ``None`` if a stop token or the limit did."""
        if answer.finish_reason != "stop" or isinstance(answer.stopped_by, int):
            return None
        if isinstance(answer.stopped_by, str):
            return answer.stopped_by
        # Servers name no end-of-sequence token, and some name nothing.
        if self.tokenizer is None or answer.token_ids[-1] == self.tokenizer.eos_token_id:
            return None
        return find_stop(decode(self.tokenizer, answer.token_ids), strings)


def _cut(answer: Answer, strings: Sequence[str], tokenizer: Any) -> Answer:
    """Cut a response after the first token at which its text contains a stop string."""
    watched = watch(strings, tokenizer)
    assert watched is not None
    ends = (size for size, token in enumerate(answer.token_ids, 1) if watched.ended_by(token))
    size = next(ends, None)
    if size is None:
        return answer
    versions = answer.versions and answer.versions[:size]
    log_probs = answer.log_probs[:size]
    return Answer(answer.token_ids[:size], log_probs, "stop", versions, watched.found)


def _require_free(what: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the engine sets."""
    taken = sorted(OWN_FIELDS & fields.keys())
    if taken:
        raise ValueError(f"{what} must leave out fields that the engine sets, got {taken}.")
