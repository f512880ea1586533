"""Engine for any TorchRL language-model policy; gathers requests into micro-batches.

No completion has log-probabilities that a plain forward pass of the model contradicts.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm import LLMWrapperBase, TransformersWrapper
from transformers import PreTrainedTokenizerBase

from torchrl_mt.engines.engine import FACTORY_INSTEAD, Completion, Engine
from torchrl_mt.engines.engine_thread import closed_error
from torchrl_mt.engines.model_facts import max_positions, stop_ids, view_of, vocab_size
from torchrl_mt.engines.policy.log_probs import LogProbs
from torchrl_mt.engines.policy.micro_batching import MicroBatcher
from torchrl_mt.engines.policy.sampler import (
    PolicySampler,
    generate_kwargs_of,
    require_own_distribution,
)
from torchrl_mt.engines.request_checks import checked_request, require_positive
from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.engines.sampling_params import TruncationWarning, altering_arguments, sampling_of
from torchrl_mt.engines.stop_strings import checked_stop, watch
from torchrl_mt.engines.weights import check_whole, copy_weights, fitting_weights, hand_on
from torchrl_mt.processes import StaysInProcess

__all__ = ["PolicyEngine", "as_engine"]

_MAX_NEW_TOKENS = 256
_PARAMS = {"temperature", "top_k", "top_p", "min_p", "stop"}
"""Arguments that requests to a ``TransformersWrapper`` may set."""


class PolicyEngine(StaysInProcess):
    """Sample with a TorchRL policy, such as ``TransformersWrapper``, many conversations at once.

    Requests that wait when the policy becomes free form a micro-batch, sampled in a background thread.
    Do not train the policy *while* tokens are sampled. Log-probabilities are those of the distribution
    sampled from: computed by a plain forward pass, or compared with one. :doc:`/engines` says what
    policies must take and return, and which of their log-probabilities are used.

    Args:
        policy: an ``LLMWrapperBase``, or any module or callable from TensorDict to TensorDict.
        tokenizer: its end-of-sequence token stops a response; the policy's tokenizer if ``None``.
        model: causal language model that checks the policy and loads new weights; ``policy.model`` if
            ``None``.
        max_new_tokens: maximum length of a response, unless a request sets another. ``None`` means the
            policy's ``generate_kwargs``, or 256. A policy's own limit also holds, except in a
            ``TransformersWrapper``; longer responses are cut.
        temperature: divides the logits; at 0, or with ``do_sample=False``, the likeliest token is
            chosen, with log-probability 0. ``None`` means the policy's ``generate_kwargs``, or 1. A
            ``TransformersWrapper`` is set to it; other policies must not state another value.
        max_batch_size: maximum number of requests in a micro-batch.
        max_wait: seconds that a request waits at most for its micro-batch to fill up.
        check: compare or compute the log-probabilities. If false, reported ones are used as they are: do
            not train on them.
        tolerance: largest mean absolute difference that counts as rounding, in nats; five times as much
            for a single token. ``None`` means 0.05, or 0.1 for a model in half precision.
        max_forward_tokens: maximum number of tokens in a plain forward pass, including padding.
        on_update: called with the source of an update while nothing is sampled, in place of loading
            weights into the model, for policies whose weights are elsewhere. May be ``async``.

    Raises:
        TypeError: if ``policy`` is no policy.
        ValueError: if the policy does not sample one response per prompt from a distribution that its
            model gives, no stop token is known, its ``temperature`` is another, or a number is out of
            range.

    Examples:
        >>> policy = TransformersWrapper(  # doctest: +SKIP
        ...     model, tokenizer=tokenizer, input_mode="tokens", return_log_probs=True
        ... )
        >>> engine = PolicyEngine(policy, max_new_tokens=64)  # doctest: +SKIP
        >>> completion = await engine.generate([1, 5, 7])  # doctest: +SKIP
    """

    _instead = FACTORY_INSTEAD

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model: nn.Module | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        max_batch_size: int = 64,
        max_wait: float = 0.0,
        check: bool = True,
        tolerance: float | None = None,
        max_forward_tokens: int = 8192,
        on_update: Callable[[Any], Any] | None = None,
    ) -> None:
        policy_kwargs = generate_kwargs_of(policy)
        arguments = dict(policy_kwargs)
        if temperature is not None:
            own = sampling_of(policy_kwargs).temperature
            is_set = {"temperature", "do_sample"} & policy_kwargs.keys()
            if is_set and own != temperature and not isinstance(policy, TransformersWrapper):
                raise ValueError(
                    f"temperature must be the policy's own, which is {own}, got {temperature}: set "
                    "it on the policy."
                )
            arguments["temperature"] = temperature
            if temperature > 0:
                arguments.pop("do_sample", None)
        if max_new_tokens is None:
            max_new_tokens = int(policy_kwargs.get("max_new_tokens") or _MAX_NEW_TOKENS)
        require_positive(
            max_new_tokens=max_new_tokens,
            max_batch_size=max_batch_size,
            max_forward_tokens=max_forward_tokens,
            tolerance=tolerance,
        )
        if not max_wait >= 0:
            raise ValueError(f"max_wait must not be negative, got {max_wait}.")
        if check:
            require_own_distribution(arguments)
        self.tokenizer = getattr(policy, "tokenizer", None) if tokenizer is None else tokenizer
        self.max_new_tokens = max_new_tokens
        if model is None and isinstance(getattr(policy, "model", None), nn.Module):
            model = policy.model  # type: ignore[attr-defined]
        if model is not None:
            check_whole(model)
        # The view has its own train/eval mode and config: the model may be trained in between.
        view = None if model is None else view_of(model).eval()
        self._model = view
        self.max_total_tokens = max_positions(view)
        """Positions of the model, for prompt and response together; ``None`` if unknown."""
        self._vocab_size = vocab_size(view)
        self._params = sampling_of(arguments, self._vocab_size)
        # Other arguments of the policy that change the distribution, recorded in completions.
        self._other_arguments = altering_arguments(arguments)
        self._warn = TruncationWarning()
        policy_ends = (policy_kwargs.get(name) for name in ("eos_token_id", "stop_token_ids"))
        ends = stop_ids(self.tokenizer, model, *policy_ends)
        self._on_update = on_update
        self._closing = threading.Event()
        sampler = PolicySampler(policy, view, self.tokenizer, ends, self._closing)
        self._takes_arguments = sampler.takes_arguments
        log_probs = LogProbs(
            policy, view, check=check, tolerance=tolerance, max_tokens=max_forward_tokens
        )
        self._answerer = _Answerer(sampler, log_probs, self.tokenizer, ends, self.max_total_tokens)
        self._batcher: MicroBatcher[_Request, Completion] = MicroBatcher(
            self._answerer.answer,
            self._answerer.fits,
            max_batch_size=max_batch_size,
            max_wait=max_wait,
            name="torchrl_mt-policy",
        )
        # Runs when the engine is collected and at interpreter exit, whichever comes first.
        self._closer = weakref.finalize(self, _close, self._closing, self._batcher)

    @property
    def model(self) -> nn.Module | None:
        """The policy's model, if it has one; change its weights by :meth:`update_weights`."""
        return None if self._on_update is not None else self._model

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._answerer.version

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
            prompt_ids: at least one token.
            images: must be empty: policies sample from text alone.
            max_new_tokens: maximum length of the response; if ``None``, the engine's limit or the room
                that the prompt leaves, whichever is less.
            **sampling: with a ``TransformersWrapper``, ``temperature``, ``top_k``, ``top_p`` and
                ``min_p`` instead of the policy's (at temperature 0 the likeliest token is chosen, with
                log-probability 0).
                Requests that differ in these are in different batches. ``stop``, a string or several,
                ends the response with the first token at which its decoded text, special tokens
                included, contains one of them; ``Completion.stop_string`` says which. No other argument
                is supported, and none with another policy.

        Returns:
            The sampled tokens with their log-probabilities and the weight version, one for all tokens.

        Raises:
            ValueError: if an argument is out of range (see :meth:`Engine.generate`).
            TypeError: if ``prompt_ids`` are no integers, ``images`` are given, or a sampling parameter
                is not supported.
            RuntimeError: if the engine is closed, the policy raised (that error is the cause), or its
                log-probabilities are wrong.
        """
        if images:
            raise TypeError(
                f"images cannot be given to a PolicyEngine, which samples from text alone, got "
                f"{len(images)}: use TransformersEngine(model, processor)."
            )
        unknown = sorted(sampling.keys() - (_PARAMS if self._takes_arguments else set()))
        if unknown:
            raise TypeError(
                f"PolicyEngine.generate takes no {unknown}: sampling arguments are set on the policy; "
                "of a request to a TransformersWrapper one may set temperature, top_k, top_p, min_p "
                "and stop."
            )
        total = self.max_total_tokens
        prompt, limit = checked_request(
            prompt_ids,
            max_new_tokens,
            longest=self.max_new_tokens,
            total=total,
            bound=f"the {total} tokens that the model's positions allow",
            vocab_size=self._vocab_size,
        )
        strings = checked_stop(sampling.pop("stop", None))
        if strings and self.tokenizer is None:
            raise TypeError(
                f"stop={list(strings)} needs a tokenizer, and the policy has none: make the engine with "
                "tokenizer=."
            )
        asked = sampling_of(sampling, self._vocab_size)
        given = (name for name, value in sampling.items() if value is not None)
        params = self._params.changed(**{name: getattr(asked, name) for name in given})
        record = params.record() | self._other_arguments
        self._warn(record)
        return await self._batcher.ask(_Request(prompt, limit, params, record, strings))

    def update_weights(
        self, source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Load new weights in place, between two micro-batches.

        Args:
            source: a model or TorchRL wrapper, a state dict, or parameters in a TensorDict; with
                ``on_update``, whatever that takes. ``None``: the policy has its new weights already.

        Returns:
            The new version.

        Raises:
            ValueError: if names or shapes of the weights do not match the model's; nothing is changed.
            NotImplementedError: if the policy has no model to load weights into, and no ``on_update``.
            RuntimeError: if the engine is closed.
        """
        if not self._closer.alive:
            raise closed_error()
        weights: Mapping[str, torch.Tensor] | None = None
        if source is not None and self._on_update is None:
            if self._model is None:
                raise NotImplementedError(
                    "the policy has no model (policy.model is no nn.Module) to load weights into: pass "
                    "on_update=, a function that hands the source to the policy, or update the policy "
                    "yourself and call update_weights(None)."
                )
            weights = fitting_weights(source, self._model)
        with self._batcher.paused():
            if self._on_update is not None:
                hand_on(self._on_update, source)
            if weights is not None:
                assert self._model is not None
                copy_weights(weights, self._model)
            return self._answerer.updated()

    def count_update(self) -> int:
        """Count an update that the policy received from elsewhere; returns the new version."""
        with self._batcher.paused():
            return self._answerer.updated()

    def close(self) -> None:
        """Stop sampling, fail all open requests and end the thread."""
        self._closer()


@dataclass(frozen=True, slots=True)
class _Request:
    """One call of ``generate``."""

    prompt: list[int]
    limit: int
    """Maximum length of the response."""
    params: Sampling
    record: dict[str, Any]
    """``Completion.sampling``."""
    strings: tuple[str, ...]
    """Stop strings."""


class _Answerer:
    """Answers batches in the thread; has no reference to the engine, which may be garbage collected."""

    def __init__(
        self,
        sampler: PolicySampler,
        log_probs: LogProbs,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: frozenset[int],
        max_total_tokens: int | None,
    ) -> None:
        self.version = 0
        self._sampler = sampler
        self._log_probs = log_probs
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._max_total_tokens = max_total_tokens

    def fits(self, requests: list[_Request]) -> bool:
        """Whether requests fit in a batch: the same sampling parameters, and enough positions."""
        if requests[-1].params != requests[0].params:
            return False
        if self._max_total_tokens is None:
            return True
        longest = max(len(request.prompt) for request in requests)
        return longest + max(request.limit for request in requests) <= self._max_total_tokens

    def answer(self, requests: list[_Request]) -> list[Completion]:
        """Sample a response to every request."""
        prompts, params = [request.prompt for request in requests], requests[0].params
        stops = [watch(request.strings, self._tokenizer) for request in requests]
        sampled = self._sampler(prompts, [request.limit for request in requests], params, stops)
        log_probs = self._log_probs(
            prompts,
            [answer.token_ids for answer in sampled],
            [answer.reported for answer in sampled],
            params,
        )
        return [
            Completion(
                answer.token_ids,
                scores,
                [self.version] * len(answer.token_ids),
                "stop"
                if answer.stop_string or answer.token_ids[-1] in self._stop_ids
                else "length",
                sampling=request.record,
                stop_string=answer.stop_string,
            )
            for request, answer, scores in zip(requests, sampled, log_probs, strict=True)
        ]

    def updated(self) -> int:
        """Count an update and compare log-probabilities again. Call it between two batches."""
        self._log_probs.compare_again()
        self.version += 1
        return self.version


def _close(closing: threading.Event, batcher: MicroBatcher) -> None:
    """End the thread, early if it is sampling."""
    closing.set()
    batcher.close()


def as_engine(policy: Any, tokenizer: Any) -> Engine:
    """Wrap a policy in an engine.

    Args:
        policy: an engine, which is returned unchanged, a TorchRL LLM wrapper, or a function or class
            that makes one of the two without arguments.
        tokenizer: tokenizer for the wrapper.

    Raises:
        TypeError: if ``policy`` is none of these.
    """
    if isinstance(policy, LLMWrapperBase):
        return PolicyEngine(policy, tokenizer=tokenizer)
    if isinstance(policy, Engine) and not isinstance(policy, type):
        return policy
    is_class = isinstance(policy, type)
    got = f"the class {policy.__name__}" if is_class else type(policy).__name__
    if isinstance(policy, nn.Module) or not callable(policy):
        advice = "wrap a model as TransformersEngine(model, tokenizer)"
    elif not _takes_no_arguments(policy):
        advice = "it needs arguments, so give a function that passes them, lambda: ...(...)"
    else:
        made = policy()
        if isinstance(made, (Engine, LLMWrapperBase)) and not isinstance(made, type):
            return as_engine(made, tokenizer)
        raise TypeError(
            "policy must make an engine or a TorchRL LLM wrapper if it is a function or a class, got "
            f"{type(made).__name__} from {got}."
        )
    raise TypeError(
        "policy must be an engine (generate, update_weights, version, close), a TorchRL LLM wrapper, or "
        f"a function or class that makes one without arguments, got {got}: {advice}."
    )


def _takes_no_arguments(factory: Callable[..., Any]) -> bool:
    """Whether a function or a class can be called without arguments, as far as is known."""
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return False
    except ValueError:  # Such as functions that are written in C.
        return True
    return True
