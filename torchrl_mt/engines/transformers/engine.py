"""An engine on any transformers model that keeps keys and values: many conversations at once.

Two promises: every sampled token carries the version of the weights that sampled it, and no token
sampled after an update rests on cache computed under older weights unless that is asked for.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_mt.engines.engine import Completion
from torchrl_mt.engines.engine_thread import closed_error
from torchrl_mt.engines.model_facts import max_exact_length, stop_ids, view_of, vocab_size
from torchrl_mt.engines.request_checks import checked_request, integers, require_positive
from torchrl_mt.engines.sampling import Sampling, random_word
from torchrl_mt.engines.sampling_params import TruncationWarning
from torchrl_mt.engines.transformers.batch_scheduler import BatchScheduler
from torchrl_mt.engines.transformers.batches import Request
from torchrl_mt.engines.transformers.cached_model import CachedModel
from torchrl_mt.engines.transformers.generation import Generation
from torchrl_mt.engines.weights import copy_weights, fitting_weights

__all__ = ["TransformersEngine"]


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
            is all.
        seed: the same requests in the same order get the same answers (up to rounding: it depends on
            what else is in the batch). If ``None``, drawn once from torch's global generator. Sampling
            itself neither reads nor moves that generator.
        max_new_tokens: longest answer, unless a request says otherwise.
        max_batch_tokens: most tokens in one forward pass.
        cache_tokens: most tokens in the cache, over all conversations, with those that are kept for
            later turns. Memory is taken as it is needed, and given back by :meth:`update_weights`;
            padding and room to grow may make it three times as much.
        prefix_sharing: reuse the cache of a common prefix across turns and within a group.
        share_weights: generate with the parameters of ``model`` itself, or with a copy.

    Raises:
        TypeError: if ``model`` is not a transformers model.
        ValueError: if no stop token is known, a size is not positive, a sampling argument is out of
            range, or the model is recurrent or otherwise keeps more than keys and values of every token.

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
        max_batch_tokens: int = 4096,
        cache_tokens: int = 131_072,
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
        )
        self._sampling = Sampling().changed(temperature, top_k, top_p)
        self._seed = int(torch.randint(2**63 - 1, ())) if seed is None else _seed(seed)
        self._warn = TruncationWarning()
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.max_total_tokens: int = min(cache_tokens, max_exact_length(model) or cache_tokens)
        """Most tokens of prompt and answer together: what the cache holds and the model can place; of a
        model with dynamic or long RoPE the length from which its frequencies change."""
        self._vocab_size = cast(int, vocab_size(model))
        self._stop_ids = stop_ids(tokenizer, model)
        self._source = None if share_weights else weakref.ref(model)
        self._model = view_of(model) if share_weights else copy.deepcopy(model)
        self._num_requests = itertools.count()
        self._scheduler = BatchScheduler(
            CachedModel(self._model.eval()),
            cache_tokens=cache_tokens,
            max_batch_tokens=max_batch_tokens,
            sharing=prefix_sharing,
        )
        self._generation = Generation(self._scheduler)
        # Runs when the engine is collected and at interpreter exit, whichever comes first: a script
        # that dies before close() must not hang on the generation thread.
        self._closer = weakref.finalize(self, Generation.close, self._generation)

    @property
    def shares_weights(self) -> bool:
        """Whether it generates with the parameters of ``model`` itself."""
        return self._source is None

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._scheduler.version

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
            ValueError, TypeError, RuntimeError: as in :meth:`Engine.generate`.
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
        law = self._sampling.changed(temperature, top_k, top_p)
        record = self._record(law)
        self._warn(record)
        if seed is not None:
            seed = _seed(seed)
        ends = self._stop_ids
        if stop_token_ids is not None:
            ends = frozenset(integers(stop_token_ids, "stop_token_ids"))
        number = next(self._num_requests)
        loop = asyncio.get_running_loop()
        request = Request(
            prompt,
            len(prompt) + limit,
            ends,
            law,
            random_word(self._seed, number) if seed is None else seed,
            loop.create_future(),
            loop,
        )
        size = len(prompt)
        self._generation.submit(request)
        try:
            await request.answer
        except BaseException:  # cancelled, or closed without being awaited to the end
            self._generation.withdraw(request)
            raise
        token_ids = request.tokens[size:]
        reason: Any = "stop" if token_ids[-1] in ends else "length"
        return Completion(token_ids, request.log_probs, request.versions, reason, sampling=record)

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
        with self._generation.paused():
            try:
                if weights is not None:
                    copy_weights(weights, self._model)
            finally:  # some may be new though the rest could not be copied
                if not keep_cache:
                    self._scheduler.forget_cache()
                self._scheduler.version += 1
            return self._scheduler.version

    def close(self) -> None:
        """Stop generating: answers under way fail, and the cache is released."""
        self._closer()

    def stats(self) -> dict[str, int]:
        """What the engine has done and is doing.

        Returns:
            A flat dictionary of integers. Requests: ``"running"`` in the batches, ``"waiting"`` for room
            in them. Tokens sampled: ``"generated_tokens"``, those of cancelled requests included.
            Tokens of prompts: ``"prefill_tokens"`` went through the model, ``"shared_tokens"`` were
            found in the cache instead, ``"new_tokens"`` had not gone through it before, as far as is
            known (0 without ``prefix_sharing``); what ``"prefill_tokens"`` has beyond these was computed
            again. A request that goes back, for an update or for room, counts as a prompt once more.
            Tokens in the cache: ``"cache_tokens"`` of requests under way, ``"kept_tokens"`` for prompts
            that begin alike.
        """
        return self._generation.stats()

    def _record(self, law: Sampling) -> dict[str, Any]:
        """What a completion says about its distribution."""
        # More than all tokens are all tokens.
        return law.record() if law.top_k < self._vocab_size else law.changed(top_k=0).record()

    def _check_open(self) -> None:
        """Refuse to work once closed."""
        if not self._closer.alive:
            raise closed_error()

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
