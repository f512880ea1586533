"""Updates of the weights of servers: every server gets them, or the error says which ones did not.

A server is paused while it loads weights, and resumed whether or not that succeeded.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrl_mt.checks import check_at_least, check_choice, check_positive, import_extra
from torchrl_mt.engines.adapters import peft_model
from torchrl_mt.engines.completions.reported_versions import VersionSource
from torchrl_mt.engines.completions.servers import server_origins
from torchrl_mt.engines.server_weights.process_group import Group, free_port
from torchrl_mt.engines.server_weights.saved_models import SavedModels, named_weights, saved_names
from torchrl_mt.threads import settle, start_daemon

__all__ = ["ServerError", "ServerWeights", "WeightUpdateError"]

_logger = logging.getLogger("torchrl_mt")

_AWAY = (502, 503, 504)
"""Statuses of a server that starts or restarts."""
_AWAY_PAUSE = 1.0
"""Seconds between two attempts at such a server."""
_HEALTH_TIMEOUT = 5.0
"""Seconds for a server to say that it is healthy."""


class WeightUpdateError(RuntimeError):
    """Some servers did not get new weights.

    Args:
        updated: addresses of the servers that have them.
        failed: why each other server has not, by address.

    Examples:
        >>> print(WeightUpdateError(["http://a:8000"], {"http://b:8000": "status 500: no"}))
        new weights reached 1 of 2 servers, ['http://a:8000'], but not http://b:8000: status 500: no
    """

    def __init__(self, updated: Sequence[str], failed: Mapping[str, str]) -> None:
        self.updated = tuple(updated)
        self.failed = dict(failed)
        reasons = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
        reached = f"{len(self.updated)} of {len(self.updated) + len(failed)} servers"
        super().__init__(f"new weights reached {reached}, {list(updated)}, but not {reasons}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.updated, self.failed)


class ServerError(RuntimeError):
    """A request to one server failed."""


class ServerWeights(ABC):
    """Loads weights into servers; the base of ``VLLMWeights`` and ``SGLangWeights``.

    Args:
        urls: addresses of the servers.
        transport: ``"disk"``, or the backend of a process group.
        pause: what a server does with open requests during an update.
        folder: where weights are saved; a temporary folder if ``None``.
        master_address: this process's address, for process groups.
        api_key: sent as a bearer token.
        timeout: seconds for one request to a server.
        wait_ready: seconds that an update waits for a server that starts or restarts; ``None`` for those
            of the engine.
    """

    versions: VersionSource = "reported"
    """How an engine knows which weights sampled a response."""
    transports: tuple[str, ...]
    pauses: tuple[str, ...]
    """What the arguments of these names may be."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        transport: str = "disk",
        pause: str = "abort",
        folder: str | Path | None = None,
        master_address: str = "127.0.0.1",
        api_key: str | None = None,
        timeout: float = 600.0,
        wait_ready: float | None = None,
    ) -> None:
        check_choice("transport", transport, self.transports)
        check_choice("pause", pause, self.pauses)
        check_positive("timeout", timeout)
        check_at_least("wait_ready", wait_ready or 0.0, 0)
        self.urls = server_origins(urls)
        """Addresses of the servers, without paths."""
        self._httpx = import_extra("httpx", "server")
        self._transport = transport
        self._pause = pause
        self._saved = SavedModels(folder)
        self._master_address = master_address
        self._wait_ready = wait_ready
        # No socket is left open, and certificates are loaded once, for addresses that need them.
        self._client = self._httpx.Client(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=timeout,
            limits=self._httpx.Limits(max_keepalive_connections=0),
            verify=any(url.startswith("https:") for url in self.urls),
        )
        self._groups: dict[str, tuple[Group, dict[str, Any]]] = {}
        """Process group with each server's processes, and where they met."""
        self._lock = threading.Lock()
        self._loading: dict[str, Future[str | None]] = {}
        """Servers of an update that has not returned: one that runs or was interrupted."""
        self._version = 0
        self._outcome: tuple[bool, tuple[str, ...]] = False, ()
        self._names: set[str] = set()
        """Names of the weights of the model, as far as they are known."""

    def __call__(self, source: Any) -> None:
        """Update all servers, as a function for ``on_update``; versions count the calls."""
        self.update(source, self._version + 1)

    def update(self, source: Any, version: int) -> None:
        """Load new weights into all servers.

        An interrupt (Ctrl-C) leaves at once. What servers do is ended in threads. The next update waits
        for them, and so does the end of the program, until a second interrupt. :attr:`outcome` says how
        the update ended.

        Args:
            source: a model or a wrapper around one, a state dict, parameters in a TensorDict, or a
                folder of a saved model. PEFT adapters are merged.
            version: the version that the weights get.

        Raises:
            WeightUpdateError: if a server did not get them.
            TypeError: if ``source`` is of no known kind.
            ValueError: if it has no weights, or a part of those of the model.
            OSError: if they cannot be saved.
        """
        with self._lock:
            self._outcome = False, ()
            wait(self._interrupted())
            self._loading = {}
            self._version = version
            names = self._whole(source)
            load = self._loader(source, version)
            reasons = self._load_all(load)
            self._loading = {}
            failed = {url: reason for url, reason in reasons.items() if reason is not None}
            updated = [url for url in self.urls if url not in failed]
            self._outcome = bool(updated), tuple(failed)
            if updated:
                self._names = names or self._names
                self._forget(version)
            if failed:
                raise WeightUpdateError(updated, failed)

    @property
    def outcome(self) -> tuple[bool, tuple[str, ...]]:
        """Whether the last update reached any server, and which may lack the weights that count now."""
        return self._outcome[0], tuple(self._loading) or self._outcome[1]

    def check_engine(self, origins: Sequence[str], model: str, wait_ready: float = 0.0) -> None:
        """Refuse an engine that would sample with other weights than those of the updates.

        Args:
            origins: addresses of the engine's servers. All may be others than :attr:`urls`, such as that
                of a router.
            model: the name under which the engine asks for the model.
            wait_ready: seconds that its requests wait for a server that starts or restarts.

        Raises:
            ValueError: if a server of the engine gets no updates, or ``model`` is not what is updated.
        """
        missing = [url for url in origins if url not in self.urls]
        if missing and (len(missing) < len(origins) or len(origins) > len(self.urls)):
            raise ValueError(
                f"on_update must update all servers of the engine, but it has {self.urls} and lacks "
                f"{missing}: give both the same addresses."
            )
        if self._wait_ready is None:
            self._wait_ready = wait_ready

    def bring_up(self, url: str, version: int, trust: bool = False) -> None:
        """Have one server load the weights of the last update again.

        Args:
            url: the server's address.
            version: the version that it must have.
            trust: do nothing if the server says that it has them.

        Raises:
            ServerError: if it cannot, for example since the weights went over a process group.
        """
        with self._lock:
            if self._interrupted(url):
                raise ServerError("it has not ended an update that was interrupted")
            try:
                if trust and self._has(url, version):
                    return
                path = self._saved.path(version)
                if path is None:
                    raise ServerError("its weights are not on disk: it waits for the next update")
                with self._paused(url, self._pause_mode(is_again=True)):
                    self._load_folder(url, path, version)
            except (ServerError, self._httpx.HTTPError) as error:
                raise ServerError(_reason(error)) from error

    def _loader(self, source: Any, version: int) -> Callable[[str], object]:
        """Prepare an update; returns what has one server load it."""
        if self._transport == "disk":
            path = self._save(source, version)
            return lambda url: self._load_folder(url, path, version)
        weights = {name: value.contiguous() for name, value in named_weights(source).items()}
        return lambda url: self._broadcast(url, weights, version)

    def _save(self, source: Any, version: int) -> Path:
        return self._saved.save(source, version)

    def _forget(self, version: int) -> None:
        """Delete what no server needs once it has a version."""
        self._saved.keep(version)

    def _whole(self, source: Any) -> set[str]:
        """Refuse a part of the model's weights; returns the names of the whole."""
        if isinstance(source, (str, Path)) or peft_model(source) is not None:
            return set()
        given = named_weights(source)
        known = self._names or self._served_names()
        places = {value.data_ptr() for name, value in given.items() if name in known}
        missing = sorted(known - given.keys())
        # Other names altogether are those of another release or library.
        if missing and all(x in known or given[x].data_ptr() in places for x in given):
            raise ValueError(
                f"source must have all {len(known)} weights of the model, got {len(given)} without "
                f"{missing[:3]}: the servers would mix them with older ones. Give the model, or its "
                "whole state dict."
            )
        return set(given)

    def _served_names(self) -> set[str]:
        """Names of the weights that the servers started with, if this process sees their folder."""
        with suppress(ServerError, self._httpx.HTTPError, LookupError, TypeError):
            return saved_names(self._model_path(self.urls[0]))
        return set()

    def _load_all(self, load: Callable[[str], object]) -> dict[str, str | None]:
        """Update all servers; returns why each failed. An interrupt does not wait for them."""
        # One broadcast at a time: several would wait for each other.
        threads = ThreadPoolExecutor(len(self.urls) if self._transport == "disk" else 1)
        all_known, has_ended = Future[None](), threading.Event()
        try:
            for url in self.urls:
                self._loading[url] = threads.submit(self._try, url, load, all_known, has_ended)
            all_known.set_result(None)
            return {url: loading.result() for url, loading in self._loading.items()}
        finally:
            all_known.cancel()
            has_ended.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def _interrupted(self, *urls: str) -> list[Future[str | None]]:
        """What servers, all or some, still do for an update that was interrupted."""
        asked = urls or self.urls
        return [x for url, x in self._loading.items() if url in asked and not x.done()]

    def _try(
        self,
        url: str,
        load: Callable[[str], object],
        all_known: Future[None],
        has_ended: threading.Event,
    ) -> str | None:
        """Update one server, once it is up; return why that failed.

        It begins when all threads are in ``_loading``: an interrupt could forget one that ran before.
        """
        try:
            all_known.result()
        except CancelledError:
            return "the update was interrupted"
        seconds = self._wait_ready or 0.0
        end, has_said = time.monotonic() + seconds, False
        while True:
            try:
                with self._paused(url, self._pause_mode()):
                    load(url)
                return None
            except Exception as error:  # also of the process group
                self._groups.pop(url, None)
                reason = _reason(error)
                if time.monotonic() >= end or not self._is_away(url, error):
                    return reason
            if not has_said:
                has_said = True
                _logger.warning("%s is away, so an update waits %g s: %s", url, seconds, reason)
            if has_ended.wait(_AWAY_PAUSE):
                return reason

    def _is_away(self, url: str, error: Exception) -> bool:
        """Whether a server starts, restarts or dies."""
        if isinstance(error, self._httpx.TransportError):
            return not isinstance(error, self._httpx.ReadTimeout)
        try:
            health = self._client.get(url + "/health", timeout=_HEALTH_TIMEOUT)
        except self._httpx.TransportError:
            return True
        return health.status_code in _AWAY

    @contextmanager
    def _paused(self, url: str, mode: str) -> Iterator[None]:
        """Pause a server; it is resumed in any case."""
        try:
            self._pause_server(url, mode)
            yield
        except BaseException:  # the reply may be lost, and the server paused
            with suppress(ServerError, self._httpx.HTTPError):
                self._resume_server(url)
            raise
        try:
            self._resume_server(url)
        except (ServerError, self._httpx.HTTPError) as failure:
            raise ServerError(f"it does not resume: {_reason(failure)}") from failure

    def _pause_mode(self, *, is_again: bool = False) -> str:
        """What a server does with open requests while it loads weights, perhaps once more."""
        return self._pause

    def _group(self, url: str) -> tuple[Group, dict[str, Any]]:
        """The process group with a server's processes, and where they met."""
        if url not in self._groups:
            place = {
                "master_address": self._master_address,
                "master_port": free_port(self._master_address),
                **self._place(url),
            }
            asked = self._start(self._ask_to_join, url, {**place, "rank_offset": 1})
            self._groups[url] = self._open_group(**place), place
            asked.result()
        return self._groups[url]

    def _start(self, request: Callable[..., Any], *args: Any) -> Future[Any]:
        """Ask a server in a daemon thread: it answers, perhaps never, once this process did its part."""
        asked: Future[Any] = Future()
        start_daemon(settle, asked, request, *args)
        return asked

    def _post(self, url: str, path: str, body: Any = None, **params: Any) -> Any:
        """Post to a server; returns the JSON of its reply, or ``None``."""
        return self._request("POST", url, path, json=body, params=params)

    def _get(self, url: str, path: str) -> Any:
        """Get from a server; ``False`` if it has no such page."""
        return self._request("GET", url, path, is_optional=True)

    def _request(
        self, method: str, url: str, path: str, *, is_optional: bool = False, **sent: Any
    ) -> Any:
        sent = {name: value for name, value in sent.items() if value}
        answer = self._client.request(method, url + path, **sent)
        if is_optional and answer.status_code == 404:
            return False
        if not answer.is_success:
            raise ServerError(f"{path}: status {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json()
        except ValueError:
            return None

    _open_group: Callable[..., Group]

    @abstractmethod
    def _place(self, url: str) -> dict[str, Any]:
        """The size of a server's process group, and what else both sides must know."""

    @abstractmethod
    def _ask_to_join(self, url: str, place: dict[str, Any]) -> None:
        """Have a server's processes join a process group."""

    @abstractmethod
    def _model_path(self, url: str) -> str:
        """The folder of the model that a server started with, or its name on the hub."""

    @abstractmethod
    def _pause_server(self, url: str, mode: str) -> None:
        """Stop a server from sampling."""

    @abstractmethod
    def _resume_server(self, url: str) -> None:
        """Let a server sample again."""

    @abstractmethod
    def _load_folder(self, url: str, path: Path, version: int) -> None:
        """Have a paused server load a folder of safetensors."""

    @abstractmethod
    def _broadcast(self, url: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Send weights to a paused server over a process group."""

    @abstractmethod
    def _has(self, url: str, version: int) -> bool:
        """Whether a server says that it has a version."""


def _reason(error: BaseException) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, ServerError) else f"{type(error).__name__}: {text}"
