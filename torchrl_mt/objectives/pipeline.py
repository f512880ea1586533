"""Experience in the background: the next batch is scored while the last one is trained on.

Batches come in the source's order. Each is scored with the weights of one moment, at which the trainer
asked for a batch. An error reaches whoever asks for the batch that it befell.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt._hosts.torch import with_submodules
from torchrl_mt.checks import check_positive_integer
from torchrl_mt.objectives.experience import ExperienceMaker
from torchrl_mt.objectives.snapshot import Snapshot
from torchrl_mt.scoring.forward import unwrapped
from torchrl_mt.scoring.log_probs import causal_lm
from torchrl_mt.threads import settle

SCORED = ("versions", "scored")
"""Key of the version that a batch was scored with."""

_logger = logging.getLogger("torchrl_mt")


class ExperiencePipeline:
    """Iterate over completed batches; while one is trained on, the next ones are scored in a thread.

    Scoring takes place while the actor changes, so it never reads the actor's own parameters. Whenever
    the next batch is asked for, trained parameters of actor and critic are copied, and a batch is scored
    with the copy made when the batch ``depth`` before it was asked for: always the same one, however
    fast either side is. This needs memory for up to ``depth + 1`` copies. With LoRA, only the adapter
    is copied; nothing is if the maker scores with neither actor nor critic. Reference and reward models
    must not change meanwhile.

    Batches have ``("versions", "scored")`` ``[N]`` int64, the version that they were scored with. With a
    batch, ``maker.metrics`` are that batch's, and ``"staleness/scored"`` says how many versions ago it
    was scored. Settings of the maker that change count for batches that are begun later.

    A collector as the source plays while the policy is trained. Its engine needs weights of its own
    (``share_weights=False``), and its tokens get up to ``depth`` versions older.

    Close the pipeline, or use it as a context manager. Batches that were made ahead are then lost.

    Args:
        source: Batches of rows or whole episodes: a collector, a replay buffer with a batch size, or any
            iterable; iterated in a thread.
        maker: Completes them; no other thread may call it.
        depth: Number of batches that are made ahead.
        version: Returns the weight version, such as ``lambda: collector.policy_version``. Default: the
            number of batches that were asked for before, which is the number trained on.

    Raises:
        ValueError: If ``depth`` is below 1, or the source's engine samples with the weights that are
            trained.

    Examples:
        >>> with ExperiencePipeline(collector, maker) as pipeline:  # doctest: +SKIP
        ...     for rows in pipeline:
        ...         loss_module(rows)["loss_objective"].backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         collector.update_policy_weights_(model)
    """

    def __init__(
        self,
        source: Iterable[TensorDictBase],
        maker: ExperienceMaker,
        *,
        depth: int = 1,
        version: Callable[[], int] | None = None,
    ) -> None:
        self.depth = check_positive_integer("depth", depth)
        if getattr(getattr(source, "engine", None), "shares_weights", False):
            raise ValueError(
                "source would sample while the policy is trained, with the very weights that are "
                "trained: make its engine with share_weights=False."
            )
        if maker.process_group is not None:
            raise ValueError(
                "maker must have no process_group: its exchanges with other ranks, in a thread of its "
                "own, would mix with those of the training. Call maker(rows) between training steps."
            )
        self.maker = maker
        self._source = source
        self._version = version
        self._taken = 0
        self._snapshot: Snapshot | None = None
        self._orders: SimpleQueue[_Item | None] = SimpleQueue()
        self._line: deque[Future[_Made | None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_over = False
        # Also runs when the pipeline is collected: its thread must not wait for ever.
        self._closer = weakref.finalize(self, _close, self._orders, self._line)

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self

    def __next__(self) -> TensorDictBase:
        """Return the next batch, completed.

        Raises:
            StopIteration: After the last batch, an error, or :meth:`close`.
            Exception: The error of the source or of the maker, with the thread's traceback.
        """
        if self._is_over or not self._closer.alive:
            raise StopIteration
        order = self._order()
        if self._thread is None:
            for _ in range(self.depth):
                self._put(order)
            self._thread = threading.Thread(
                target=_work,
                args=(self._orders, self._source, _cuda_device()),
                name="torchrl_mt-experience",
                daemon=True,
            )
            self._thread.start()
        try:
            # An interrupt while waiting takes nothing: the next call goes on.
            self._line[0].exception()
            taken = self._line.popleft()
        except (CancelledError, IndexError):  # It was closed meanwhile.
            raise StopIteration from None
        self._is_over = True
        made = taken.result() if self._closer.alive else None
        if made is None:
            raise StopIteration
        self._is_over = False
        self._put(order)
        self._taken += 1
        self.maker.metrics = made.metrics | {
            "staleness/scored": float(order.version - made.version)
        }
        return made.rows

    def _put(self, order: _Order) -> None:
        """Order a batch."""
        self._line.append(Future())
        self._orders.put((order, self._line[-1]))

    def _order(self) -> _Order:
        """Make the order for a batch, with the weights of now."""
        version = self._taken if self._version is None else self._version()
        maker = self.maker
        _check_apart(maker)
        scored: dict[str, torch.nn.Module] = {}
        if maker.old_log_probs == "actor" or maker.passes.with_entropy or maker.ref == "base":
            scored["actor"] = unwrapped(causal_lm(maker.actor))
        if maker.critic is not None:
            scored["critic"] = unwrapped(maker.critic)
        if not scored:
            return _Order(with_submodules(maker), version)
        if self._snapshot is None or not self._snapshot.is_of(list(scored.values())):
            self._snapshot = Snapshot(list(scored.values()))
        copies = dict(zip(scored, self._snapshot.models, strict=True))
        weights = self._snapshot.weights()
        return _Order(with_submodules(maker, **copies), version, self._snapshot, weights)

    def close(self) -> None:
        """End the thread, after the batch that it scores; closing again does nothing.

        A source that is waited for is left to the thread, which ends when the source answers.
        """
        self._closer()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            for made in list(self._line):
                if made.running():
                    made.exception()
            self._line.clear()

    def __enter__(self) -> ExperiencePipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Order:
    """How a batch is to be scored."""

    maker: ExperienceMaker
    """The maker, with the copies of its models."""
    version: int
    """The version of the weights."""
    snapshot: Snapshot | None = None
    """The copies; ``None`` if none are needed."""
    weights: list[Tensor] | None = None
    """Their weights."""

    def fill(self, batch: Any) -> _Made:
        """Complete a batch."""
        if self.snapshot is not None and self.weights is not None:
            self.snapshot.load(self.weights)
        rows = self.maker(self.maker.rows_of(batch))
        version = torch.full(rows.batch_size, self.version, dtype=torch.long, device="cpu")
        rows.set(SCORED, version.to(rows[self.maker.tensor_keys.action].device))
        return _Made(rows, self.maker.metrics, self.version)


@dataclass(frozen=True)
class _Made:
    """A completed batch."""

    rows: TensorDictBase
    metrics: dict[str, float]
    version: int


_Item = tuple[_Order, "Future[_Made | None]"]
"""An order, and what becomes of it: a batch, an error, or ``None`` at the source's end."""


def _close(orders: SimpleQueue[_Item | None], line: Iterable[Future[_Made | None]]) -> None:
    """Cancel the orders that are not being filled, and drop what was made."""
    orders.put(None)
    for made in list(line):
        if not made.cancel() and made.done() and made.exception() is not None:
            _logger.warning(
                "the batch after the last that was taken failed.", exc_info=made.exception()
            )


def _work(orders: SimpleQueue[_Item | None], source: Iterable[Any], device: int | None) -> None:
    """Fill orders with the source's batches, until its end, an error or closing."""
    if device is not None:
        torch.cuda.set_device(device)
    iterator: Iterator[Any] | None = None
    while (item := orders.get()) is not None and not item[1].cancelled():
        order, made = item
        end: BaseException | None = None
        try:
            iterator = iter(source) if iterator is None else iterator
            batch = next(iterator)
        except BaseException as error:
            end = error
        # Running only while a batch is scored: nobody waits for the source.
        if not made.set_running_or_notify_cancel():
            break
        if isinstance(end, StopIteration):
            made.set_result(None)
            break
        if end is not None:
            made.set_exception(end)
            return
        settle(made, order.fill, batch)
        if made.exception() is not None:
            break
        del item, order, made, batch  # Not kept while waiting.
    if iterator is not None and iterator is not source and hasattr(iterator, "close"):
        iterator.close()  # Here: no other thread may close a generator that runs in this one.


def _check_apart(maker: ExperienceMaker) -> None:
    """Refuse models that cannot be copied one by one, and have parameters that are trained."""
    trainable = [maker.actor] if maker.critic is None else [maker.actor, maker.critic]
    trained = {id(p) for model in trainable for p in model.parameters() if p.requires_grad}
    for name in ("ref", "reward"):
        model = getattr(maker, name)
        if isinstance(model, torch.nn.Module) and any(id(p) in trained for p in model.parameters()):
            raise ValueError(
                f"{name} must not have parameters of actor or critic that are trained: it would be "
                "scored with while they change. Give it a copy, or ref='base' for a PEFT model."
            )


def _cuda_device() -> int | None:
    """The current CUDA device, which is a thread's own."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None
