"""transformers' continuous batching, made fit to share a process with training.

Over the host's manager: a daemon thread, answers routed to the event loop that asked, sampling of each
request's own, cache that can be dropped between two steps, and counts of what was computed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
)

from torchrl_mt.engines import paged_attention
from torchrl_mt.engines.prefix_sharing import GroupScheduler, PrefixCache, Tally
from torchrl_mt.engines.sampling import Processors, Runner

__all__ = ["Manager"]


class Router(OutputRouter):
    """Deliver answers to the event loops that wait for them, one wake-up per loop and step.

    The host's router sends a whole batch to the loop of the last request in it, and a loop that was
    closed in the meantime stops its generation thread.
    """

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Callable, GenerationOutput]]] = {}
        with self._lock:
            for output in outputs:
                entry = self.result_handlers.pop(output.request_id, None)
                if entry is not None:
                    ready.setdefault(entry[1], []).append((entry[0], output))
        for loop, answers in ready.items():
            with suppress(RuntimeError):  # a closed loop waits for nothing
                loop.call_soon_threadsafe(_resolve, answers)

    def fail_all(self, reason: str) -> None:
        """Fail every request that has no answer yet."""
        with self._lock:
            waiting = list(self.result_handlers)
        self.deliver_batch(
            [
                GenerationOutput(request_id, error=reason, status=RequestStatus.FAILED)
                for request_id in waiting
            ]
        )


def _resolve(answers: Iterable[tuple[Callable, GenerationOutput]]) -> None:
    """Hand out answers on the loop that waits for them."""
    for set_result, output in answers:
        set_result(output)


class Manager(ContinuousBatchingManager):
    """The host's manager with a daemon thread, our router and a way to drop stale cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        batching: ContinuousBatchingConfig,
        *,
        truncation: bool,
    ) -> None:
        batching.scheduler_type = GroupScheduler.name
        super().__init__(cast(Any, model), generation_config, batching)
        # The host would seed the global generator of the process, and sample with it.
        vars(self.distributed_helper)["set_tp_seed"] = lambda seed, device: None
        config = self.continuous_batching_config
        compiled = config.varlen_compile_config or config.decode_compile_config
        fixed = any(config.cuda_graph_booleans) or compiled is not None
        # Truncation sorts the vocabulary; a captured graph would do so whether or not it is asked for.
        self.processors = Processors(truncation=truncation or not fixed, fixed=fixed)
        self.logit_processor = self.processors
        self.tally = Tally()
        self._withdrawn: deque[str] = deque()
        self.output_router: Router = Router()
        # Held while a request is queued and while the thread takes leave, so that none falls between.
        self._gate = threading.Lock()
        self._ended = False

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Choose how to attend: as the host does, but never to all requests' tokens at once."""
        super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)
        given = model.config._attn_implementation
        if given == "sdpa" and paged_attention.supports(model.config.get_text_config()):
            self._original_attn_impl = self._original_attn_impl or given
            model.set_attn_implementation(paged_attention.NAME)

    def _run_generation_loop(self) -> None:
        """Generate until stopped; then no request is left without an answer."""
        super()._run_generation_loop()
        with self._gate:
            self._ended = True
        self.output_router.fail_all("the generation thread ended")

    def _generation_loop_body(
        self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool
    ) -> bool:
        """Take one step."""
        scheduler = batch_processor.scheduler
        if not scheduler.active_requests:
            # The host lifts this block, set when the cache was full, only when a request finishes;
            # if all were cancelled or queued again instead, nothing would ever be scheduled.
            scheduler.block_new_requests = False
        while self._withdrawn:
            request_id = self._withdrawn.popleft()
            if request_id in scheduler.active_requests:
                # A batch that is still in flight must not look for the cache of this request.
                scheduler.active_requests[request_id]._status = RequestStatus.FINISHED
            scheduler.set_request_cancellation(request_id)
        return super()._generation_loop_body(batch_processor, bootstrapping)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """Build the host's batch processor with our draw and our cache."""
        processor = super()._create_batch_processor()
        processor.model_runner = Runner(
            logit_processor=processor.logit_processor,
            cb_config=processor.cb_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=processor.cache,
            do_sample=True,
            return_logprobs=True,
        )
        PrefixCache.adopt(processor.cache, self.tally)
        return processor

    def _generation_step(self) -> None:
        """Compute one batch."""
        assert self.batch_processor is not None
        batch = _batch(self.batch_processor, in_flight=False)
        cache = cast(PrefixCache, self.batch_processor.cache)
        cache.count(batch)
        cache.lay_out(batch)
        with torch.inference_mode():  # cheaper than the host's no_grad
            super()._generation_step()

    def _start_thread(self) -> None:
        """Start the generation thread unless it was started."""
        if self._generation_thread is None:
            thread = threading.Thread(
                target=self._run_generation_loop, name="torchrl_mt-generation", daemon=True
            )
            setattr(self, "_generation_thread", thread)  # noqa: B010 - the host types it as None
            thread.start()

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int],
        max_new_tokens: int,
        stop_ids: Iterable[int],
        sampling: Mapping[str, Any],
        seed: int,
        answer: asyncio.Future[GenerationOutput],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Queue a request whose output resolves ``answer``.

        Raises:
            RuntimeError: if the generation thread has died or is about to.
        """

        def set_result(output: GenerationOutput) -> None:
            if not answer.done():
                answer.set_result(output)

        with self._gate:
            accepted = None
            if not self._ended:
                self._start_thread()
                with self.output_router._lock:
                    self.output_router.result_handlers[request_id] = (set_result, loop)
                accepted = self.add_request(
                    prompt_ids,
                    request_id=request_id,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(stop_ids),
                    seed=seed,
                    **sampling,
                )
        if accepted is None:
            self.withdraw(request_id)
            raise RuntimeError(
                "the engine was closed or its generation thread died: make a new engine."
            ) from self.background_thread_status.fatal_error

    def withdraw(self, request_id: str) -> None:
        """Take a request back; what it sampled is thrown away."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)
        self._withdrawn.append(request_id)
        self._wake_up_loop.set()

    def paused(self) -> AbstractContextManager[None]:
        """The context in which the weights may be changed."""
        return self.pause() if self.is_running() else nullcontext()

    def forget_cache(self) -> None:
        """Drop every cache entry and queue the requests under way for a new prefill; call it paused."""
        if self.batch_processor is None:
            return
        scheduler, cache = self.batch_processor.scheduler, self.batch_processor.cache
        for request in list(scheduler.active_requests.values()):
            again = request.create_equivalent_initial_request()
            # A batch that is still in flight must not continue the request that is replaced.
            request._status = RequestStatus.FINISHED
            scheduler.finish_request(request.request_id)
            scheduler.add_waiting_request(again)
        cache.evict_cached_blocks()

    def num_sampled(self, *, in_flight: bool) -> dict[str, int]:
        """How many tokens each request without an answer has sampled; call it paused.

        Args:
            in_flight: count the tokens of the batch that is computed but not read yet. They are lost if
                the cache is dropped.
        """
        # A request may be on its way from the queue to the scheduler: it has sampled nothing yet.
        sampled = dict.fromkeys(self.output_router.result_handlers, 0)
        if self.batch_processor is not None:
            scheduler = self.batch_processor.scheduler
            for requests in (scheduler.active_requests, scheduler.waiting_requests):
                sampled |= {name: _num_sampled(request) for name, request in requests.items()}
            for future in _batch(self.batch_processor, in_flight=True) if in_flight else ():
                request_id = future.state.request_id
                alive = future.state.status < RequestStatus.FINISHED and request_id in sampled
                if future.has_new_token and alive:
                    sampled[request_id] += 1
        return sampled

    def cache_usage(self) -> tuple[int, int]:
        """How many tokens' places in the cache requests hold, and how many are kept for later ones."""
        if self.batch_processor is None:
            return 0, 0
        held, kept = [0], [0]
        for allocator in self.batch_processor.cache.cache_allocators.values():
            blocks = {block for table in list(allocator.block_table.values()) for block in table}
            held.append(len(blocks) * allocator.tokens_per_page)
            kept.append(len(allocator.ledger.cached_blocks) * allocator.tokens_per_page)
        return max(held), max(kept)

    def num_running(self) -> int:
        """How many requests have a place in the batches."""
        return len(self.batch_processor.scheduler.active_requests) if self.batch_processor else 0

    def shut_down(self) -> None:
        """Stop the generation thread and fail what is under way; none is started any more."""
        with self._gate:
            self._ended = True
        if self.is_running():
            self.stop(hard_stop=True)


def _batch(processor: ContinuousBatchProcessor, *, in_flight: bool) -> list[FutureRequestState]:
    """The batch that was prepared last, or the one whose tokens have not been read yet."""
    ios = processor.inputs_and_outputs
    if isinstance(ios, ContinuousBatchingAsyncIOs):
        pair = 1 - ios.current_pair if in_flight else ios.current_pair
        return ios.io_pairs[pair].host_io.requests_in_batch
    return [] if in_flight else ios.requests_in_batch


def _num_sampled(request: RequestState) -> int:
    """Tokens sampled for a request, over all its prefills."""
    already = (
        len(request.initial_tokens) - request._true_initial_tokens
        if request._true_initial_tokens
        else 0
    )
    return already + len(request.generated_tokens)
