"""An engine on transformers' continuous batching: paged cache, prefix sharing, many requests at once.

Two promises: every sampled token carries the version of the weights that sampled it, and no token
sampled after an update rests on cache computed under older weights unless that is asked for.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from torchrl_mt.engines.continuous_batching import Manager
from torchrl_mt.engines.engine import Completion
from torchrl_mt.engines.model_facts import max_positions, stop_ids, view_of, vocab_size
from torchrl_mt.engines.requests import checked_request, integers, require_positive
from torchrl_mt.engines.sampling import Sampling, random_word
from torchrl_mt.engines.sampling_arguments import TruncationWarning
from torchrl_mt.engines.weights import copy_weights, fitting_weights

__all__ = ["TransformersEngine"]

_logger = logging.getLogger("torchrl_mt")

_COMPLETE = 2**31 - 1
"""More tokens than any answer has."""


class TransformersEngine:
    """Sample from a Hugging Face causal language model, many conversations at once.

    The engine generates with a *view* of the model: the same parameters, but its own train/eval mode
    and attention implementation, so the model may be trained between two rollouts as if there were no
    engine. It must not be trained *while* tokens are sampled; for that, pass ``share_weights=False``:
    the engine then has weights of its own, which :meth:`update_weights` refreshes.

    The default sizes suit small models on a CPU. Work runs in one background thread, started by the
    first request.

    Args:
        model: a causal language model. Its generation config is not used, except for its stop tokens:
            sampling is from the model's own distribution unless ``temperature`` says otherwise.
        tokenizer: the model's tokenizer; its end-of-sequence token stops an answer.
        temperature: divides the logits; log-probabilities are those of the divided ones, so give
            the same to ``ExperienceMaker`` and ``MultiTurnLoss``. At 0 the likeliest token is taken,
            with log-probability 0.
        top_k: draw from the ``top_k`` likeliest tokens only; 0 or ``None`` is all.
        top_p: draw from the likeliest tokens that together have this probability only; 1 or ``None``
            is all. Where the host captures CUDA graphs, single requests may be truncated only if the
            engine was given ``top_k`` or ``top_p``, be it 0 or 1.
        seed: the same requests in the same order get the same answers (up to rounding: it depends on
            what else is in the batch). If ``None``, drawn once from torch's global generator. Sampling
            itself neither reads nor moves that generator.
        max_new_tokens: longest answer, unless a request says otherwise.
        max_batch_tokens: most tokens in one forward pass.
        cache_tokens: most tokens in the cache, over all conversations.
        page_size: tokens per cache page. Prompts share whole pages; the next turn of a conversation also
            goes on in its last page.
        prefix_sharing: reuse the cache of a common prefix across turns and within a group.
        share_weights: generate with the parameters of ``model`` itself, or with a copy.

    Raises:
        TypeError: if ``model`` is not a transformers model.
        ValueError: if no stop token is known, a size is not positive, or a sampling argument is out of
            range.

    Examples:
        >>> engine = TransformersEngine(model, tokenizer)  # doctest: +SKIP
        >>> completion = await engine.generate([1, 5, 7])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        max_new_tokens: int = 256,
        max_batch_tokens: int = 1024,
        cache_tokens: int = 65_536,
        page_size: int = 32,
        prefix_sharing: bool = True,
        share_weights: bool = True,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model must be a transformers PreTrainedModel, got {type(model).__name__}."
            )
        require_positive(
            max_new_tokens=max_new_tokens,
            max_batch_tokens=max_batch_tokens,
            cache_tokens=cache_tokens,
            page_size=page_size,
        )
        self._sampling = Sampling().changed(temperature, top_k, top_p)
        self._seed = int(torch.randint(2**63 - 1, ())) if seed is None else _seed(seed)
        self._warn = TruncationWarning()
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.max_total_tokens: int = min(cache_tokens, max_positions(model) or cache_tokens)
        """Most tokens of prompt and answer together: what the cache holds and the model can place."""
        self._vocab_size = cast(int, vocab_size(model))
        self._stop_ids = _stop_ids(model, tokenizer)
        self._source = None if share_weights else weakref.ref(model)
        self._model = view_of(model) if share_weights else copy.deepcopy(model)
        self._version = 0
        self._num_requests = itertools.count()
        # For each request under way, how many tokens it had sampled at every update since it began.
        self._in_flight: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        generation = GenerationConfig(
            do_sample=True,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self._stop_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        batching = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=-(-cache_tokens // page_size),
            max_batch_tokens=max_batch_tokens,
            return_logprobs=True,
            allow_block_sharing=prefix_sharing,
        )
        truncation = top_k is not None or top_p is not None
        self._manager = Manager(self._model, generation, batching, truncation=truncation)
        # Runs when the engine is collected and at interpreter exit, whichever comes first: a script
        # that dies before close() must not hang on the generation thread.
        self._closer = weakref.finalize(self, Manager.shut_down, self._manager)

    @property
    def shares_weights(self) -> bool:
        """Whether it generates with the parameters of ``model`` itself."""
        return self._source is None

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._version

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer unless a request says otherwise."""
        return self._stop_ids

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Iterable[int] | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample an answer to a prompt.

        Args:
            prompt_ids: the tokens that the model sees, at least one.
            max_new_tokens: longest answer; if ``None``, the engine's own limit or what room there is.
            temperature: instead of the engine's; 0 takes the likeliest token each time, whose
                log-probability is then 0.
            top_k: instead of the engine's; 0 is off.
            top_p: instead of the engine's; 1 is off.
            stop_token_ids: tokens that end this answer, instead of :attr:`stop_token_ids`; if there is
                none, only its length does.
            seed: the same prompt, arguments and seed give the same answer. If ``None``, the next of the
                engine's.
            **sampling: no other argument is supported.

        Returns:
            The sampled tokens, the stop token included, with their weight versions, and their
            log-probabilities after temperature and truncation.

        Raises:
            ValueError: if the prompt is empty or not in the vocabulary, if prompt and answer exceed
                :attr:`max_total_tokens`, if ``max_new_tokens`` is below 1, or if a sampling argument is
                out of range.
            TypeError: if ``prompt_ids`` are no integers, or a sampling argument is unknown or cannot be
                set for single requests.
            RuntimeError: if the engine is closed or generation failed.
        """
        if sampling:
            raise TypeError(
                f"TransformersEngine.generate takes no {sorted(sampling)}: of a request one may set "
                "max_new_tokens, temperature, top_k, top_p, stop_token_ids and seed."
            )
        self._check_open()
        total = self.max_total_tokens
        prompt, limit = checked_request(
            prompt_ids,
            max_new_tokens,
            longest=self.max_new_tokens,
            total=total,
            bound=f"the {total} tokens that cache_tokens and the model's positions allow",
            vocab_size=self._vocab_size,
        )
        record = self._record(self._sampling.changed(temperature, top_k, top_p))
        if seed is not None:
            seed = _seed(seed)
        stop_ids = (
            self._stop_ids
            if stop_token_ids is None
            else frozenset(integers(stop_token_ids, "stop_token_ids"))
        )
        number = next(self._num_requests)
        seed = random_word(self._seed, number) if seed is None else seed
        request_id = str(number)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[GenerationOutput] = loop.create_future()
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(0.001)  # weights are being updated: other episodes go on
        try:
            version = self._version
            self._manager.submit(request_id, prompt, limit, stop_ids, record, seed, answer, loop)
            updates = self._in_flight[request_id] = []
        finally:
            self._lock.release()
        try:
            output = await answer
        except asyncio.CancelledError:
            self._manager.withdraw(request_id)
            raise
        finally:
            del self._in_flight[request_id]
        if output.error is not None:
            self._check_open()
            raise RuntimeError(f"generation failed: {output.error}")
        token_ids = output.generated_tokens
        versions = [version] * len(token_ids)
        for num_sampled in updates:
            version += 1
            versions[num_sampled:] = [version] * (len(token_ids) - num_sampled)
        reason: Any = "stop" if token_ids and token_ids[-1] in stop_ids else "length"
        return Completion(token_ids, output.logprobs, versions, reason, sampling=record)

    def update_weights(
        self,
        source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor] | None = None,
        *,
        keep_cache: bool = False,
    ) -> int:
        """Take new weights, in place, between two steps of generation.

        Answers under way are continued with the new weights, from cache that is computed anew.

        Args:
            source: the model whose weights to take, or a state dict, or parameters in a TensorDict, of
                any dtype and on any device. ``None`` is the model that the engine was made from;
                weights that are shared with it are in place already.
            keep_cache: continue from the cache as it is, and keep it for later prompts. That is
                faster, but what is sampled afterwards is then, in part, conditioned by older weights:
                its log-probabilities are those of neither version.

        Returns:
            The new version.

        Raises:
            TypeError: if ``source`` is none of these.
            ValueError: if names or shapes of the weights do not fit the model; nothing is changed then.
            RuntimeError: if the engine is closed.
        """
        self._check_open()
        weights = self._weights_of(source)
        with self._lock, self._manager.paused():
            if weights is not None:
                copy_weights(weights, self._model)
            sampled = self._manager.num_sampled(in_flight=keep_cache)
            if not keep_cache:
                self._manager.forget_cache()
            for request_id, updates in list(self._in_flight.items()):
                # A request that has its answer is complete: none of it is newer.
                updates.append(sampled.get(request_id, _COMPLETE))
            self._version += 1
        return self._version

    def close(self) -> None:
        """Stop generating: answers under way fail, and the cache is released."""
        self._closer()

    def stats(self) -> dict[str, int]:
        """What the engine has done and is doing.

        Returns:
            A flat dictionary of integers. Requests: ``"running"`` in the batches, ``"waiting"`` for room
            in them. Tokens since the engine was made: ``"generated_tokens"``, sampled (also for requests
            that were cancelled); ``"prefill_tokens"``, of prompts, that went through the model (again
            after an update); ``"shared_tokens"``, of prompts, that were found in the cache instead;
            ``"new_tokens"``, of prompts, that had not gone through the model before, as far as is known
            (0 without ``prefix_sharing``): what ``"prefill_tokens"`` has beyond them was computed again.
            Places of tokens in the cache: ``"cache_tokens"``, held by requests; ``"kept_tokens"``, kept
            for prompts that begin alike and given up when room is needed.
        """
        held, kept = self._manager.cache_usage()
        under_way, running = len(self._in_flight), self._manager.num_running()
        return {
            "running": running,
            "waiting": max(0, under_way - running),
            **vars(self._manager.tally),
            "cache_tokens": held,
            "kept_tokens": kept,
        }

    def _record(self, law: Sampling) -> dict[str, Any]:
        """What a completion says about its distribution; warns of the first that is truncated."""
        # More than all tokens are all tokens.
        record = law.record() if law.top_k < self._vocab_size else law.changed(top_k=0).record()
        if record.keys() & {"top_k", "top_p"}:
            if not self._manager.processors.truncation:
                raise TypeError(
                    "top_k and top_p are engine-wide where generation is captured in CUDA graphs: give "
                    "TransformersEngine a top_k or top_p (0 or 1 will do), then requests may differ."
                )
            self._warn(record)
        return record

    def _check_open(self) -> None:
        """Refuse to work once closed."""
        if not self._closer.alive:
            raise RuntimeError("the engine is closed: make a new one.")

    def _weights_of(
        self, source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor] | None
    ) -> Mapping[str, torch.Tensor] | None:
        """The tensors to copy, checked; ``None`` if they are in place already."""
        if source is None:
            if self._source is None:
                return None
            source = self._source()
            if source is None:
                raise ValueError(
                    "source is needed: the model that the engine was made from is gone."
                )
        weights = fitting_weights(source, self._model)
        own = self._model.state_dict()
        in_place = all(value.data_ptr() == own[name].data_ptr() for name, value in weights.items())
        return None if in_place else weights


def _seed(seed: int) -> int:
    """A seed as a plain integer."""
    try:
        return index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, got {seed!r}.") from None


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer, by the tokenizer and by the model; at least one."""
    found = stop_ids(tokenizer, model)
    if not found:
        raise ValueError(
            "tokenizer must have an end-of-turn token (eos_token), got none, and the model's "
            "generation config has no eos_token_id either."
        )
    return found
