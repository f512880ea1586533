"""One thread that answers many requests token by token, batch by batch.

Two promises: between two steps the thread can be held, so that weights may change; and every request
that is submitted is answered, fails, or is taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from torchrl_mt.engines.cached_model import CachedModel
from torchrl_mt.engines.padded_batch import PaddedBatch
from torchrl_mt.engines.prefix_tree import PrefixTree
from torchrl_mt.engines.sampling import Sampling, draw, random_word

__all__ = ["Generation", "Request", "Tally"]

_CALL = 128
"""A further forward pass costs about as much as this many tokens in one."""
_PATIENCE = 4
"""Steps of sampling between two steps of prompts, so that prompts are computed together."""
_LULL = 0.002
"""Seconds without a prompt after which no more are waited for."""
_AHEAD = 16
"""Prompts with fewer tokens in common do not wait for each other; room for an answer's beginning."""
_MEMORY = 8
"""Of how many times the cache's tokens it is known that they went through the model."""


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, and what was sampled for it so far."""

    tokens: list[int]
    limit: int
    """Most tokens, of prompt and answer."""
    stop_ids: frozenset[int]
    law: Sampling
    seed: int
    answer: asyncio.Future[Request]
    loop: asyncio.AbstractEventLoop
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Prompt:
    """Tokens that go through the model once, for all requests that have them."""

    tokens: list[int]
    requests: list[Request]
    known: int
    """How many of the tokens were found in the cache."""
    past: list[torch.Tensor]
    """What the cache had of these."""
    key: Hashable
    """The same for prompts that go on alike where the cache ends."""

    @property
    def num_new(self) -> int:
        """How many tokens have to be computed."""
        return len(self.tokens) - self.known


@dataclass(eq=False, slots=True)
class _Lane:
    """What is computed together, row for row as in the batch."""

    batch: PaddedBatch
    rows: list[Request | _Prompt | None] = field(default_factory=list)
    """Requests that sample; prompts as long as they are being computed; ``None`` for who has left."""
    fills: int = 0
    """Forward passes of prompts that come first; meanwhile none samples, and no row moves."""

    @property
    def requests(self) -> list[Request]:
        """Those that sample."""
        return [row for row in self.rows if isinstance(row, Request)]

    @property
    def in_use(self) -> bool:
        """Whether anybody waits for what is computed here."""
        return any(row.requests if isinstance(row, _Prompt) else row for row in self.rows)

    def sweep(self) -> None:
        """Take out the rows of who has left."""
        gone = [i for i, row in enumerate(self.rows) if row is None]
        if gone:
            self.rows = [self.rows[row] for row in self.batch.remove(gone)]


class _Fill:
    """Prompts of a lane that are computed together, in one forward pass or in several."""

    def __init__(self, model: CachedModel, lane: _Lane, prompts: list[_Prompt]) -> None:
        self.lane, self.prompts = lane, prompts
        self.rows = lane.batch.join([len(p.tokens) for p in prompts], [p.past for p in prompts])
        lane.rows += prompts
        lane.fills += 1
        self._num_new = [prompt.num_new for prompt in prompts]
        self.left = longest = max(self._num_new)
        """How many columns are left to compute."""
        new = [[0] * (longest - p.num_new) + p.tokens[p.known :] for p in prompts]
        self._tokens = torch.tensor(new, device=model.layout.device)

    def computed(self) -> list[int]:
        """How many of each prompt's tokens the batch has."""
        return [len(p.tokens) - min(p.num_new, self.left) for p in self.prompts]

    def advance(self, model: CachedModel, budget: int) -> tuple[torch.Tensor, int]:
        """Compute the next columns, as many as a budget of tokens allows.

        Returns:
            ``[B, V]`` logits of what follows, and how many tokens of prompts were computed.
        """
        before, longest = sum(self.computed()), self._tokens.shape[1]
        begin = longest - self.left
        self.left -= min(self.left, max(1, budget // len(self.prompts)))
        tokens = self._tokens[:, begin : longest - self.left]
        inputs = self.lane.batch.fill(self.rows, tokens, self._num_new, self.left)
        return model.logits(inputs), sum(self.computed()) - before


@dataclass
class Tally:
    """Tokens counted since the start."""

    generated_tokens: int = 0
    """Sampled, also for requests that were taken back."""
    prefill_tokens: int = 0
    """Tokens of prompts that went through the model, again after an update included."""
    shared_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    new_tokens: int = 0
    """Tokens of prompts that had not gone through the model before, as far as is known."""


class Generation:
    """The thread, its requests and its cache.

    Args:
        model: in the mode that it samples in.
        cache_tokens: most tokens in the cache.
        max_batch_tokens: most tokens of a forward pass.
        sharing: keep and share what was computed.
    """

    def __init__(
        self, model: CachedModel, *, cache_tokens: int, max_batch_tokens: int, sharing: bool
    ) -> None:
        self.version = 0
        """Of the weights: what each token is stamped with."""
        self.tally = Tally()
        self._model = model
        self._room, self._budget, self._sharing = cache_tokens, max_batch_tokens, sharing
        self._key_cost = model.key_cost()
        self._kept = PrefixTree()
        self._seen = PrefixTree()
        self._waiting: dict[Request, None] = {}
        self._running: dict[Request, None] = {}
        self._finished: list[Request] = []
        self._fills: list[_Fill] = []
        self._lanes: list[_Lane] = []
        self._since_admission = self._num_answered = 0
        self._changed = threading.Condition()
        self._pausing = threading.Lock()
        self._held = self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    # Called from other threads

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RuntimeError: if the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise _closed()
            self._waiting[request] = None
            if self._thread is None:
                # A daemon, so that a script which dies without closing does not hang on it.
                self._thread = threading.Thread(
                    target=self._work, name="torchrl_mt-generation", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def withdraw(self, request: Request) -> None:
        """Take a request back; what it sampled is thrown away."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the step that is being computed, and let no other begin meanwhile."""
        with self._pausing:
            with self._changed:
                self._held = True
                self._changed.wait_for(lambda: not self._busy)
            try:
                yield
            finally:
                with self._changed:
                    self._held = False
                    self._changed.notify_all()

    def forget_cache(self) -> None:
        """Drop all keys and values; requests begin anew with what they have. Call it paused."""
        for lane in self._lanes:
            for row in lane.rows:
                if isinstance(row, Request):
                    self._seen.add(row.tokens[:-1])
        with self._changed:
            self._waiting = {**self._stop_all(), **self._waiting}

    def usage(self) -> dict[str, int]:
        """Requests, and tokens in the cache, now."""
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "cache_tokens": self._num_held(),
                "kept_tokens": len(self._kept),
            }

    def close(self) -> None:
        """End the thread and fail what has no answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._fail(_closed)

    # The thread

    def _work(self) -> None:
        """Take steps until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (not self._held and (self._waiting or self._running))
                )
                if not self._running:
                    self._gather()
                if self._closed:
                    return
                if self._held:
                    continue
                self._busy = True
            try:
                with torch.inference_mode():
                    self._step()
            except BaseException as error:
                self._fail(lambda error=error: _failed(error))  # type: ignore[misc]
            finally:
                finished, self._finished = self._finished, []
                self._num_answered += len(finished)
                _settle((request, None) for request in finished)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _gather(self) -> None:
        """Wait for more prompts as long as those who were answered last keep coming back."""
        while not (self._closed or self._held) and len(self._waiting) < self._num_answered:
            count = len(self._waiting)
            if not self._changed.wait_for(lambda: len(self._waiting) > count, _LULL):  # noqa: B023
                break
        self._num_answered = 0

    def _fail(self, error: Callable[[], BaseException]) -> None:
        """Fail all requests."""
        with self._changed:
            failed, self._waiting = {**self._stop_all(), **self._waiting}, {}
        _settle((request, error()) for request in failed)

    def _stop_all(self) -> dict[Request, None]:
        """Forget everything that was computed; returns the requests that were under way."""
        running, self._running = self._running, {}
        self._fills, self._lanes = [], []
        self._kept = PrefixTree()
        return running

    def _step(self) -> None:
        """Compute prompts that are due, and sample a token for every request that is ready."""
        self._drop_cancelled()
        if self._is_due():
            self._admit()
        self._compute_prompts()
        self._sample()

    # Prompts

    def _is_due(self) -> bool:
        """Whether to look for prompts: a pass for each that comes would cost more than it brings."""
        sampling = sum(len(lane.rows) for lane in self._lanes)
        count = len(self._waiting)
        return count > 0 and (self._since_admission >= _PATIENCE or count >= sampling)

    def _admit(self) -> None:
        """Let requests in, oldest first, but none whose beginning is just being computed."""
        with self._changed:
            candidates = list(self._waiting)
        under_way = {prompt.key: prompt for fill in self._fills for prompt in fill.prompts}
        chosen: dict[Hashable, _Prompt] = {}
        budget, room = self._budget, self._room - self._num_held()
        for request in candidates:
            if self._running and (budget <= 0 or len(self._running) >= self._budget):
                break
            prompt = self._look_up(request)
            first = chosen.get(prompt.key) or under_way.get(prompt.key)
            if first is not None and first.tokens != request.tokens:
                continue
            room -= len(request.tokens) + _AHEAD
            if self._running and room < 0:
                break
            if first is not None:
                first.requests.append(request)
                self.tally.shared_tokens += len(request.tokens)
            else:
                prompt.tokens = request.tokens[:]
                chosen[prompt.key] = prompt
                budget -= prompt.num_new
                self.tally.shared_tokens += prompt.known
                if self._sharing:
                    known = self._seen.find(request.tokens[:-1])[0]
                    self.tally.new_tokens += len(request.tokens) - known
            with self._changed:
                self._running[request] = None
                self._waiting.pop(request, None)
        self._since_admission = 0
        self._evict()
        for prompts in self._grouped(chosen.values()):
            self._fills.append(_Fill(self._model, self._lane_for(prompts), prompts))

    def _look_up(self, request: Request) -> _Prompt:
        """What of a request has to be computed."""
        if not self._sharing:
            return _Prompt(request.tokens, [request], 0, [], request)
        # At least one token is always computed: what follows it is not kept.
        known, past, end = self._kept.find(request.tokens[:-1], copied=True)
        key = end, tuple(request.tokens[known : known + _AHEAD])
        return _Prompt(request.tokens, [request], known, past, key)

    def _grouped(self, prompts: Iterable[_Prompt]) -> Iterator[list[_Prompt]]:
        """Prompts that are padded to one size, where that is cheaper than another forward pass."""
        group: list[_Prompt] = []
        cost, widest = 0.0, 0
        for prompt in sorted(prompts, key=lambda prompt: (prompt.num_new, len(prompt.tokens))):
            width, length = len(prompt.tokens), prompt.num_new
            own = length * (1 + self._key_cost * width)
            widest, size = max(widest, width), len(group) + 1
            together = size * length * (1 + self._key_cost * widest)
            too_large = size * length > self._budget or size * widest > self._room
            if group and (together > cost + own + _CALL or too_large):
                yield group
                group, widest, together = [], width, own
            group.append(prompt)
            cost = together
        if group:
            yield group

    def _lane_for(self, prompts: list[_Prompt]) -> _Lane:
        """Where prompts are to be computed: in a lane that is under way, or in one of their own."""
        # Who samples does not wait for a prompt that takes several steps.
        long = {fill.lane for fill in self._fills if fill.left * len(fill.prompts) > self._budget}
        lane = None
        if max(prompt.num_new for prompt in prompts) * len(prompts) <= self._budget:
            count = sum(len(prompt.requests) for prompt in prompts)
            longest = max(len(prompt.tokens) for prompt in prompts)
            lane = self._cheapest(
                [each for each in self._lanes if each not in long], count, longest
            )
        lane = lane or next((each for each in self._lanes if not each.rows), None)
        if lane is None:
            lane = _Lane(self._model.batch())
            self._lanes.append(lane)
        return lane

    def _cheapest(self, lanes: Iterable[_Lane], count: int, longest: int) -> _Lane | None:
        """The lane where rows cause the least padding; ``None`` if a lane of their own is cheaper."""
        best, least = None, float(_CALL)
        for lane in lanes:
            width, size = lane.batch.width, len(lane.rows)
            padding = count * max(0, width - longest) + size * max(0, longest - width)
            fits = (size + count) * max(width, longest) <= 2 * self._room
            if padding * self._key_cost < least and fits:
                best, least = lane, padding * self._key_cost
        return best

    def _compute_prompts(self) -> None:
        """Put prompts through the model, within the budget."""
        budget = self._budget
        while self._fills and budget > 0:
            fill = min(self._fills, key=lambda fill: fill.left)
            logits, count = fill.advance(self._model, budget)
            self.tally.prefill_tokens += count
            budget -= max(1, count)
            if not fill.left:
                self._fills.remove(fill)
                self._begin_sampling(fill, logits)

    def _begin_sampling(self, fill: _Fill, logits: torch.Tensor) -> None:
        """Sample the first tokens after prompts."""
        lane, prompts = fill.lane, fill.prompts
        lane.fills -= 1
        self._keep(lane.batch, fill.rows, [prompt.tokens for prompt in prompts], copied=True)
        rows: list[tuple[int, Request]] = []
        further: list[tuple[int, Request]] = []
        for i, (row, prompt) in enumerate(zip(fill.rows, prompts, strict=True)):
            pairs = [(i, request) for request in prompt.requests]
            lane.rows[row] = prompt.requests[0] if pairs else None
            rows += pairs[:1]
            further += pairs[1:]
        if further:
            lane.batch.absorb(lane.batch, [fill.rows[i] for i, _ in further])
            lane.rows += [request for _, request in further]
        rows += further
        if rows:
            self._draw(logits[[i for i, _ in rows]], [request for _, request in rows])
        self._sweep()

    # Sampling

    def _sample(self) -> None:
        """Sample a token for every request in the lanes."""
        self._preempt()
        self._merge()
        for lane in list(self._lanes):
            if lane.rows and not lane.fills:
                requests = lane.requests
                last = [[request.tokens[-1]] for request in requests]
                tokens = torch.tensor(last, device=self._model.layout.device)
                logits = self._model.logits(lane.batch.extend(tokens))
                self._draw(logits, requests)
        self._since_admission += 1

    def _merge(self) -> None:
        """Make one lane of two, if that is cheaper."""
        idle = [lane for lane in self._lanes if not lane.fills]
        if len(idle) > 1:
            small = min(idle, key=lambda lane: len(lane.rows))
            idle.remove(small)
            into = self._cheapest(idle, len(small.rows), small.batch.width)
            if into is not None:
                into.batch.absorb(small.batch, range(len(small.rows)))
                into.rows += small.rows
                self._lanes.remove(small)

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> None:
        """Append a token to each request; those that are complete leave."""
        words = [random_word(request.seed, len(request.tokens)) for request in requests]
        tokens, log_probs = draw(logits, [request.law for request in requests], words)
        self.tally.generated_tokens += len(requests)
        finished = []
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.tokens.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            if token in request.stop_ids or len(request.tokens) == request.limit:
                finished.append(request)
        self._finished += finished
        self._leave(finished)

    # Leaving

    def _drop_cancelled(self) -> None:
        """Let go of what was taken back."""
        with self._changed:
            for request in [r for r in self._waiting if r.cancelled]:
                del self._waiting[request]
        self._leave([request for request in self._running if request.cancelled])

    def _leave(self, requests: list[Request]) -> None:
        """Take requests out of the batches; what was computed for them may be kept."""
        if not requests:
            return
        gone = set(requests)
        with self._changed:
            for request in requests:
                del self._running[request]
        for lane in self._lanes:
            left: list[tuple[int, list[int]]] = []
            for i, row in enumerate(lane.rows):
                if isinstance(row, _Prompt):
                    row.requests = [request for request in row.requests if request not in gone]
                elif row in gone:
                    assert row is not None
                    # The last token was sampled; it has not gone through the model.
                    left.append((i, row.tokens[:-1]))
                    lane.rows[i] = None
            self._keep(lane.batch, [i for i, _ in left], [text for _, text in left])
        self._sweep()

    def _sweep(self) -> None:
        """Take out the rows that nobody waits for."""
        for lane in list(self._lanes):
            if not lane.in_use and (lane.fills or len(self._lanes) > 1):
                self._drop(lane)
            elif not lane.fills:
                lane.sweep()  # of the last lane the memory stays, for who comes next

    def _drop(self, lane: _Lane) -> None:
        """Give a lane up that nobody waits for."""
        self._lanes.remove(lane)
        for fill in [fill for fill in self._fills if fill.lane is lane]:
            self._fills.remove(fill)
            texts = [p.tokens[:size] for p, size in zip(fill.prompts, fill.computed(), strict=True)]
            self._keep(lane.batch, fill.rows, texts)

    def _keep(
        self,
        batch: PaddedBatch,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        *,
        copied: bool = False,
    ) -> None:
        """Keep what was computed, for later prompts.

        Args:
            batch: that computed it.
            rows: of the batch.
            texts: of each row the tokens that were computed.
            copied: whether requests still have them.
        """
        if not self._sharing:
            return
        known = [self._kept.find(text)[0] for text in texts]
        new = [i for i, text in enumerate(texts) if known[i] < len(text)]
        if not new:
            return
        pieces = batch.pieces(
            [rows[i] for i in new], [known[i] for i in new], [len(texts[i]) for i in new]
        )
        for i, piece in zip(new, pieces, strict=True):
            self._kept.add(texts[i], piece, copied=copied)
            self._seen.add(texts[i])
        self._seen.evict(max(0, len(self._seen) - _MEMORY * self._room))
        self._evict()

    def _num_held(self) -> int:
        """Tokens of the requests under way."""
        return sum(len(request.tokens) for request in self._running)

    def _evict(self) -> None:
        """Give up what is kept in case it is needed, where requests need the room."""
        missing = self._num_held() + len(self._kept) - self._room
        if missing > 0:
            self._kept.evict(max(missing, self._room // 64))

    def _preempt(self) -> None:
        """Have room for a token of each request; who came last goes back to the queue for it."""
        sampling = {request for lane in self._lanes if not lane.fills for request in lane.requests}
        while len(sampling) > 1 and self._num_held() + len(sampling) > self._room:
            last = next(request for request in reversed(self._running) if request in sampling)
            sampling.remove(last)
            with self._changed:
                self._waiting = {last: None, **self._waiting}
                self._leave([last])
        self._evict()


def _settle(outcomes: Iterable[tuple[Request, BaseException | None]]) -> None:
    """Answer or fail requests on the event loops that wait for them, one wake-up a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, BaseException | None]]] = {}
    for request, error in outcomes:
        by_loop.setdefault(request.loop, []).append((request, error))
    for loop, pairs in by_loop.items():
        with suppress(RuntimeError):  # a closed loop waits for nothing
            loop.call_soon_threadsafe(_resolve, pairs)


def _resolve(pairs: list[tuple[Request, BaseException | None]]) -> None:
    """Hand answers out, on the loop that waits for them."""
    for request, error in pairs:
        if request.answer.done():
            continue
        if error is None:
            request.answer.set_result(request)
        else:
            request.answer.set_exception(error)


def _closed() -> RuntimeError:
    """What is said once closed."""
    return RuntimeError("the engine is closed: make a new one.")


def _failed(cause: BaseException) -> RuntimeError:
    """What requests are told whose step failed."""
    error = RuntimeError(f"generation failed: {cause}")
    error.__cause__ = cause
    return error
