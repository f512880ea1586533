"""An engine on transformers' continuous batching: paged cache, prefix sharing, many requests at once.

Two promises: every sampled token carries the version of the weights that sampled it, and no token
sampled after an update rests on cache computed under older weights.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from torchrl_mt.engines.continuous_batching import Manager
from torchrl_mt.engines.engine import Completion

__all__ = ["TransformersEngine"]

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
            the same to ``ExperienceMaker`` and ``MultiTurnLoss``.
        max_new_tokens: longest answer, unless a request says otherwise.
        max_batch_tokens: most tokens in one forward pass.
        cache_tokens: most tokens in the cache, over all conversations.
        page_size: tokens per cache page; prefixes are shared in whole pages.
        prefix_sharing: reuse the cache of a common prefix across turns and within a group.
        share_weights: generate with the parameters of ``model`` itself, or with a copy.

    Raises:
        TypeError: if ``model`` is not a transformers model.
        ValueError: if no stop token is known, or a size is not positive.

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
        for name, value in {
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "max_batch_tokens": max_batch_tokens,
            "cache_tokens": cache_tokens,
            "page_size": page_size,
        }.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_total_tokens: int = min(cache_tokens, positions or cache_tokens)
        """Most tokens of prompt and answer together: what the cache holds and the model can place."""
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size = int(embeddings.weight.shape[0])
        self._stop_ids = _stop_ids(model, tokenizer)
        self._source = None if share_weights else weakref.ref(model)
        self._model = _view(model) if share_weights else copy.deepcopy(model)
        self._version = 0
        self._request_ids = map(str, itertools.count())
        # For each request under way, how many tokens it had sampled at every update since it began.
        self._in_flight: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        generation = GenerationConfig(
            do_sample=True,
            temperature=float(temperature),
            top_k=0,
            top_p=1.0,
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
        self._manager = Manager(self._model, generation, batching)
        # Runs when the engine is collected and at interpreter exit, whichever comes first: a script
        # that dies before close() must not hang on the generation thread.
        self._closer = weakref.finalize(self, Manager.shut_down, self._manager)

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
            **sampling: none is supported for single requests; set them on the engine.

        Returns:
            The sampled tokens with their log-probabilities and weight versions.

        Raises:
            ValueError: if the prompt is empty or not in the vocabulary, if prompt and answer exceed
                :attr:`max_total_tokens`, or if ``max_new_tokens`` is below 1.
            TypeError: if ``prompt_ids`` are no integers, or a sampling argument is given.
            RuntimeError: if the engine is closed or generation failed.
        """
        prompt = _integers(prompt_ids)
        limit = max_new_tokens
        if limit is None:
            limit = min(self.max_new_tokens, max(1, self.max_total_tokens - len(prompt)))
        self._check_request(prompt, limit, sampling)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[GenerationOutput] = loop.create_future()
        request_id = next(self._request_ids)
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(0.001)  # weights are being updated: other episodes go on
        try:
            version = self._version
            self._manager.submit(request_id, prompt, limit, self._stop_ids, answer, loop)
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
            raise RuntimeError(f"generation failed: {output.error}")
        token_ids = output.generated_tokens
        versions = [version] * len(token_ids)
        for num_sampled in updates:
            version += 1
            versions[num_sampled:] = [version] * (len(token_ids) - num_sampled)
        stopped = bool(token_ids) and token_ids[-1] in self._stop_ids
        return Completion(token_ids, output.logprobs, versions, "stop" if stopped else "length")

    def update_weights(
        self, source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Take new weights, in place, between two steps of generation.

        Answers under way are continued with the new weights, from cache that is computed anew.

        Args:
            source: the model whose weights to take, or a state dict, or parameters in a TensorDict.
                ``None`` is the model that the engine was made from; weights that are shared with it
                are in place already.

        Returns:
            The new version.

        Raises:
            ValueError: if names or shapes of the weights do not fit the model; nothing is changed then.
            RuntimeError: if the engine is closed.
        """
        self._check_open()
        weights = self._weights_of(source)
        with self._lock, self._manager.paused():
            if weights is not None:
                with torch.no_grad():
                    own = self._model.state_dict()
                    for name, value in weights.items():
                        own[name].copy_(value, non_blocking=True)
                if self._model.device.type == "cuda":
                    # Generation runs on a stream of its own.
                    torch.cuda.synchronize(self._model.device)
            sampled = self._manager.num_sampled()
            self._manager.forget_cache()
            for request_id, updates in list(self._in_flight.items()):
                # A request that has its answer is complete: none of it is newer.
                updates.append(sampled.get(request_id, _COMPLETE))
            self._version += 1
        return self._version

    def close(self) -> None:
        """Stop generating: answers under way fail, and the cache is released."""
        self._closer()

    def _check_request(
        self, prompt_ids: Sequence[int], limit: int, sampling: Mapping[str, Any]
    ) -> None:
        """Refuse what the generation thread could not digest."""
        if sampling:
            raise TypeError(
                f"TransformersEngine.generate takes no {sorted(sampling)}: sampling arguments are "
                "set when the engine is made."
            )
        self._check_open()
        if len(prompt_ids) == 0:
            raise ValueError("prompt_ids must hold at least one token, got none.")
        lowest, highest = min(prompt_ids), max(prompt_ids)
        if lowest < 0 or highest >= self._vocab_size:
            raise ValueError(
                f"prompt_ids must be token ids in 0..{self._vocab_size - 1}, got "
                f"{lowest if lowest < 0 else highest}: do model and tokenizer belong together?"
            )
        if limit < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {limit}.")
        if len(prompt_ids) + limit > self.max_total_tokens:
            raise ValueError(
                f"prompt_ids of {len(prompt_ids)} tokens and max_new_tokens={limit} exceed the "
                f"{self.max_total_tokens} tokens that cache_tokens and the model's positions allow."
            )

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
        if isinstance(source, nn.Module):
            weights: Mapping[str, torch.Tensor] = source.state_dict()
        elif isinstance(source, TensorDictBase):
            computed = dict(self._model.named_buffers()).keys() - self._model.state_dict().keys()
            weights = dict(source.flatten_keys(".").exclude(*computed).items())
        else:
            weights = source
        own = self._model.state_dict()
        # A tied weight has two names; parameters are often listed under one of them.
        given = {own[name].data_ptr() for name in weights if name in own}
        missing = sorted(
            name for name in own if name not in weights and own[name].data_ptr() not in given
        )
        unknown = sorted(weights.keys() - own.keys())
        if missing or unknown:
            raise ValueError(
                "source must have the weights of the engine's model, got "
                f"{len(missing)} missing {missing[:3]} and {len(unknown)} unknown {unknown[:3]}."
            )
        for name, value in weights.items():
            if value.shape != own[name].shape:
                raise ValueError(
                    f"source[{name!r}] must have shape {tuple(own[name].shape)}, "
                    f"got {tuple(value.shape)}."
                )
        in_place = all(value.data_ptr() == own[name].data_ptr() for name, value in weights.items())
        return None if in_place else weights


def _integers(prompt_ids: Sequence[int]) -> list[int]:
    """Token ids as plain integers, whatever sequence they come in."""
    try:
        return [index(token) for token in prompt_ids]
    except TypeError:
        raise TypeError(
            "prompt_ids must be a flat sequence of token ids, got "
            f"{type(prompt_ids).__name__}: of a tokenizer's output take ['input_ids']."
        ) from None


def _view(model: PreTrainedModel) -> PreTrainedModel:
    """The same parameters and buffers in modules (and a config) of their own."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer, by the tokenizer and by the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    known = configured if isinstance(configured, list) else [configured]
    stop_ids = frozenset(
        token for token in (*known, tokenizer.eos_token_id) if token is not None and token >= 0
    )
    if not stop_ids:
        raise ValueError(
            "tokenizer must have an end-of-turn token (eos_token), got none, and the model's "
            "generation config has no eos_token_id either."
        )
    return stop_ids
