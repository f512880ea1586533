"""Engine for transformers models with a key-value cache; batches many conversations.

Two promises: every sampled token carries the version of the weights that sampled it; and after an
update, no token is sampled from cache of older weights, unless ``keep_cache`` asks for it.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_mt._hosts.peft import base_of, is_peft_model
from torchrl_mt.checks import check_token_ids
from torchrl_mt.engines.engine import FACTORY_INSTEAD, Completion
from torchrl_mt.engines.engine_thread import closed_error
from torchrl_mt.engines.model_facts import max_exact_length, stop_ids, view_of, vocab_size
from torchrl_mt.engines.request_checks import checked_request, require_positive
from torchrl_mt.engines.sampling import Sampling, checked_number, random_word
from torchrl_mt.engines.sampling_params import TruncationWarning
from torchrl_mt.engines.stop_strings import checked_stop, watch
from torchrl_mt.engines.transformers.batch_scheduler import BatchScheduler
from torchrl_mt.engines.transformers.batches import Request
from torchrl_mt.engines.transformers.cached_model import CachedModel
from torchrl_mt.engines.transformers.generation import Generation
from torchrl_mt.engines.transformers.images import ImageFeatures, ImagePrompts, check_processor
from torchrl_mt.engines.weights import check_whole, copy_weights, fitting_weights
from torchrl_mt.processes import StaysInProcess
from torchrl_mt.threads import call_in_thread
from torchrl_mt.vision.model import VisionModel
from torchrl_mt.vision.processor import with_processor

if TYPE_CHECKING:
    from transformers import ProcessorMixin

__all__ = ["TransformersEngine"]


class TransformersEngine(StaysInProcess):
    """Sample from a Hugging Face causal language model, many conversations at once.

    The engine shares the model's parameters, so do not train the model *while* tokens are sampled, or
    give ``share_weights=False`` and refresh the engine's copy with :meth:`update_weights`
    (:doc:`/engines`). Sampling is from the model's own distribution unless sampling parameters change
    it. One background thread, started by the first request, does the work. Image and video tokens of
    vision-language models are never sampled (:doc:`/images`).

    Args:
        model: a causal language model, or a PEFT model of one. Of its generation config, only the stop
            tokens are used.
        tokenizer: the model's tokenizer, or its processor; the end-of-sequence token stops a response.
            If ``None``, the processor's.
        processor: the model's processor, for prompts with images, unless ``tokenizer`` is one.
        temperature: divides the logits, also for log-probabilities: give the same value to
            ``ExperienceMaker`` and ``MultiTurnLoss``. At 0 the likeliest token, with log-probability 0.
        top_k: draw from the ``top_k`` likeliest tokens only; 0 or ``None`` keeps all.
        top_p: draw from the fewest likeliest tokens whose probabilities sum to at least this; 1 or
            ``None`` keeps all.
        min_p: draw from the tokens only whose probability is at least this share of the likeliest one's;
            0 or ``None`` keeps all.
        seed: the same requests in the same order get the same response, up to rounding, which depends on
            the rest of the batch. ``None`` draws one from torch's global generator, once; sampling does
            not use that generator.
        max_new_tokens: maximum length of a response, unless a request sets another.
        max_batch_tokens: maximum number of tokens in a forward pass. The default suits a small model on
            a CPU.
        cache_tokens: maximum number of tokens in the cache, kept prefixes included; as many image tokens
            are kept besides. Padding and spare room may triple its memory. ``update_weights`` frees it.
        prefix_sharing: reuse the cache of a common prefix across turns and within a group.
        share_weights: generate with the parameters of ``model``; if false, with a copy.

    Raises:
        TypeError: if ``model`` is not a transformers model, or ``processor`` is of no supported family.
        ValueError: if no stop token is known, a number is out of range, ``processor`` does not belong to
            model and tokenizer, ranks divide the model, or it caches more than keys and values.

    Examples:
        >>> engine = TransformersEngine(model, tokenizer)  # doctest: +SKIP
        >>> completion = await engine.generate([1, 5, 7])  # doctest: +SKIP
    """

    _instead = FACTORY_INSTEAD

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        *,
        processor: ProcessorMixin | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        max_new_tokens: int = 256,
        max_batch_tokens: int = 4096,
        cache_tokens: int = 131_072,
        prefix_sharing: bool = True,
        share_weights: bool = True,
    ) -> None:
        if is_peft_model(model):
            model = cast(PreTrainedModel, base_of(model))
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                "model must be a PEFT model or a transformers PreTrainedModel, got "
                f"{type(model).__name__}."
            )
        check_whole(model)
        require_positive(
            max_new_tokens=max_new_tokens,
            max_batch_tokens=max_batch_tokens,
            cache_tokens=cache_tokens,
        )
        self._sampling = Sampling().changed(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        self._seed = checked_number("seed", seed)
        self._warn = TruncationWarning()
        vision = VisionModel.of(model.config)
        tokenizer, images = with_processor(tokenizer, processor)
        if images is not None:
            check_processor(images, vision, model)
        elif tokenizer is None:
            raise TypeError("tokenizer must be the model's tokenizer or processor, got None.")
        self.tokenizer = cast(PreTrainedTokenizerBase, tokenizer)
        self.max_new_tokens = max_new_tokens
        self.max_total_tokens: int = min(cache_tokens, max_exact_length(model) or cache_tokens)
        """Maximum length of prompt and response together: the lesser of the cache's size and the model's
        positions. With dynamic or long RoPE, only the positions before the frequencies change count."""
        self._vocab_size = cast(int, vocab_size(model))
        self._stop_ids = stop_ids(tokenizer, model)
        self._source = None if share_weights else weakref.ref(model)
        if not share_weights and any(weight.is_meta for weight in model.parameters()):
            raise ValueError(
                "share_weights must be True for a model whose weights are offloaded, got False: they "
                "cannot be copied."
            )
        self._model = view_of(model, share_weights=share_weights)
        self._num_requests = itertools.count()
        self._images = ImagePrompts(vision, images, type(model).__name__)
        barred = () if vision is None else vision.barred
        features = None
        if images is not None:
            features = ImageFeatures(
                self._model, images, max_batch_tokens=max_batch_tokens, max_tokens=cache_tokens
            )
        self._scheduler = BatchScheduler(
            CachedModel(self._model.eval(), barred=barred, features=features),
            cache_tokens=cache_tokens,
            max_batch_tokens=max_batch_tokens,
            sharing=prefix_sharing,
        )
        self._generation = Generation(self._scheduler)
        # Runs when the engine is collected and at interpreter exit, whichever comes first: a script
        # that ends without close() must not hang on the generation thread.
        self._closer = weakref.finalize(self, Generation.close, self._generation)

    @property
    def shares_weights(self) -> bool:
        """Whether the engine generates with the parameters of ``model``."""
        return self._source is None

    @property
    def model(self) -> PreTrainedModel:
        """The model that tokens are sampled from; change its weights by :meth:`update_weights`."""
        return self._model

    @property
    def version(self) -> int:
        """How many times the weights were updated."""
        return self._scheduler.version

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a response, unless a request sets others."""
        return self._stop_ids

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[Any] | None = (),
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop_token_ids: Iterable[int] | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample a response to a prompt.

        Args:
            prompt_ids: at least one token; one image token for each token of the images.
            images: all images of the prompt, in order, in any form that
                :meth:`StoredImage.of <torchrl_mt.vision.StoredImage.of>` takes.
            max_new_tokens: maximum length of the response; if ``None``, the engine's limit or the room
                that the prompt leaves, whichever is less.
            temperature: replaces the engine's; 0 chooses the likeliest token, with log-probability 0.
            top_k: replaces the engine's; 0 is off.
            top_p: replaces the engine's; 1 is off.
            min_p: replaces the engine's; 0 is off.
            stop_token_ids: tokens that end this response, instead of :attr:`stop_token_ids`; if empty,
                only its length or ``stop`` does.
            stop: a string or several; the response ends with the first token at which its decoded text,
                special tokens included, contains one of them. ``Completion.stop_string`` says which.
            seed: the same prompt, arguments and seed give the same response, up to rounding. If
                ``None``, the next from the engine's seed.
            **sampling: no other argument is supported.

        Returns:
            The sampled tokens, including the stop token, with their weight versions and their
            log-probabilities after temperature and truncation.

        Raises:
            ValueError, TypeError, RuntimeError: as in :meth:`Engine.generate`.
        """
        if sampling:
            raise TypeError(
                f"TransformersEngine.generate takes no {sorted(sampling)}: of a request one may set "
                "images, max_new_tokens, temperature, top_k, top_p, min_p, stop_token_ids, stop and "
                "seed."
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
        params = self._sampling.changed(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        record = self._record(params)
        self._warn(record)
        seed = None if seed is None else checked_number("seed", seed)
        ends = self._stop_ids
        if stop_token_ids is not None:
            ends = frozenset(check_token_ids(stop_token_ids, "stop_token_ids"))
        stops = watch(checked_stop(stop), self.tokenizer)
        if self._images.takes_time(images):
            prompt, shown = await call_in_thread(self._images.read, prompt, images)
        else:
            prompt, shown = self._images.read(prompt, images)
        number = next(self._num_requests)
        loop = asyncio.get_running_loop()
        request = Request(
            prompt,
            len(prompt) + limit,
            ends,
            params,
            random_word(self._seed, number) if seed is None else seed,
            loop.create_future(),
            loop,
            stops=stops,
            images=shown,
        )
        size = len(prompt)
        self._generation.submit(request)
        try:
            await request.answer
        except BaseException:  # cancelled, or closed without being awaited to the end
            self._generation.withdraw(request)
            raise
        token_ids = request.tokens[size:]
        stop_string = None if stops is None else stops.found
        stopped = token_ids[-1] in ends or stop_string is not None
        return Completion(
            token_ids,
            request.log_probs,
            request.versions,
            "stop" if stopped else "length",
            sampling=record,
            stop_string=stop_string,
        )

    def update_weights(
        self,
        source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor] | None = None,
        *,
        keep_cache: bool = False,
    ) -> int:
        """Load new weights in place, between two steps of generation.

        Running requests continue with the new weights, from a cache that is computed again.

        Args:
            source: a model, a state dict, or parameters in a TensorDict, of any dtype and on any device.
                The adapters of a PEFT model are merged on the way, unless the engine was made from one
                like it. ``None`` is the model that the engine was made from; shared weights are in
                place already.
            keep_cache: keep the cache of the old weights. This is faster, but later tokens then depend
                in part on older weights, and their log-probabilities are those of neither version.

        Returns:
            The new version.

        Raises:
            TypeError: if ``source`` is none of these.
            ValueError: if names or shapes of the weights do not match the model's; nothing is changed.
            RuntimeError: if the engine is closed.
        """
        self._check_open()
        weights = self._weights_of(source)
        with self._generation.paused():
            try:
                if weights is not None:
                    copy_weights(weights, self._model)
            finally:  # a failed copy may have changed some weights
                if not keep_cache:
                    self._scheduler.forget_cache()
                self._scheduler.version += 1
            return self._scheduler.version

    def forget_cache(self) -> None:
        """Drop the cache, such as that of an evaluation: cached prefixes change how results are rounded.

        Raises:
            RuntimeError: if the engine is closed.
        """
        self._check_open()
        with self._generation.paused():
            self._scheduler.forget_cache()

    def close(self) -> None:
        """Stop generating, fail all open requests and free the cache."""
        self._closer()

    def stats(self) -> dict[str, int]:
        """Counters since the start, and current sizes.

        Returns:
            A flat dictionary of integers.

            - Requests: ``"running"`` are in the batches, ``"waiting"`` are queued.
            - Sampled tokens: ``"generated_tokens"``, including those of cancelled requests.
            - Prompt tokens: ``"prefill_tokens"`` were computed, ``"shared_tokens"`` were found in the
              cache, ``"new_tokens"`` were never computed before, as far as is recorded (0 without
              ``prefix_sharing``). ``"prefill_tokens"`` beyond ``"new_tokens"`` were computed again. A
              request that is requeued, after an update or for lack of room, counts as a prompt again.
            - Tokens in the cache: ``"cache_tokens"`` of running requests, ``"kept_tokens"`` of prefixes
              kept for later prompts.
        """
        return self._generation.stats()

    def _record(self, params: Sampling) -> dict[str, Any]:
        """The ``sampling`` record of a completion; a ``top_k`` of all tokens is off."""
        return (params if params.top_k < self._vocab_size else params.changed(top_k=0)).record()

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise closed_error()

    def _weights_of(
        self, source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor] | None
    ) -> Mapping[str, torch.Tensor] | None:
        """Get and check the tensors to copy; ``None`` if they are in place already."""
        if source is None:
            if self._source is None:
                return None
            source = self._source()
            if source is None:
                raise ValueError(
                    "source must be given, got None: the model that the engine was made from is gone."
                )
        weights = fitting_weights(source, self._model)
        own = self._model.state_dict()
        in_place = all(value.data_ptr() == own[name].data_ptr() for name, value in weights.items())
        if not in_place and any(tensor.is_meta for tensor in own.values()):
            raise ValueError(
                "source cannot be loaded into a model whose weights are offloaded: load it into the "
                "model where they are, and call update_weights()."
            )
        return None if in_place else weights
