"""Updates of the weights of servers: every server gets them, or the error says which ones did not.

A server is paused while it loads weights, and resumed whether or not that succeeded.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchrl_mt.checks import check_positive, import_extra
from torchrl_mt.engines.completions.servers import server_origins
from torchrl_mt.engines.server_weights.saved_models import SavedModels, named_weights

__all__ = ["ServerError", "ServerWeights", "WeightUpdateError"]


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
        folder: where weights are saved.
        master_address: this process's address, for process groups.
        api_key: sent as a bearer token.
        timeout: seconds for one request to a server.
    """

    reports_versions = False
    """Whether the servers' answers report the version that :meth:`update` set."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        transport: str,
        pause: str,
        folder: str | Path | None,
        master_address: str,
        api_key: str | None,
        timeout: float,
    ) -> None:
        check_positive("timeout", timeout)
        self.urls = server_origins(urls)
        """Addresses of the servers, without paths."""
        self._httpx = import_extra("httpx", "server")
        self._transport = transport
        self._pause = pause
        self._saved = SavedModels(folder)
        self._master_address = master_address
        self._timeout = timeout
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._groups: dict[str, Any] = {}
        """Process group with each server's workers."""
        self._lock = threading.Lock()
        self._loading: dict[str, Future[str | None]] = {}
        """Servers of an update that has not returned: one that runs or was interrupted."""
        self._version = 0

    def __call__(self, source: Any) -> None:
        """Update all servers, as a function for ``on_update``; versions count the calls."""
        self.update(source, self._version + 1)

    def update(self, source: Any, version: int) -> None:
        """Load new weights into all servers.

        An interrupt (Ctrl-C) leaves at once. What servers do is ended in threads. The next update waits
        for them, and so does the end of the program, until a second interrupt.

        Args:
            source: a model or a wrapper around one, a state dict, parameters in a TensorDict, or a
                folder of a saved model. PEFT adapters are merged.
            version: the version that the weights get.

        Raises:
            WeightUpdateError: if a server did not get them.
            TypeError: if ``source`` is of no known kind.
            ValueError: if it has no weights.
            OSError: if they cannot be saved.
        """
        with self._lock:
            wait(self._interrupted())
            self._loading = {}
            self._version = version
            load = self._loader(source, version)
            reasons = self._load_all(load)
            self._loading = {}
            failed = {url: reason for url, reason in reasons.items() if reason is not None}
            updated = [url for url in self.urls if url not in failed]
            if updated:
                self._saved.keep(version)
            if failed:
                raise WeightUpdateError(updated, failed)

    def check_engine(self, origins: Sequence[str], model: str) -> None:
        """Refuse an engine that would sample with other weights than those of the updates.

        Args:
            origins: addresses of the engine's servers. All may be others than :attr:`urls`, such as that
                of a router.
            model: the name under which the engine asks for the model.

        Raises:
            ValueError: if a server of the engine gets no updates, or ``model`` is not what is updated.
        """
        missing = [url for url in origins if url not in self.urls]
        if missing and (len(missing) < len(origins) or len(origins) > len(self.urls)):
            raise ValueError(
                f"on_update must update all servers of the engine, but it has {self.urls} and lacks "
                f"{missing}: give both the same addresses."
            )

    @property
    def doubtful(self) -> list[str]:
        """Servers that may have any weights, since an update was interrupted."""
        return list(self._loading)

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
                if trust and self._reported(url) == str(version):
                    return
                path = self._saved.path(version)
                if path is None:
                    raise ServerError("its weights are not on disk: it waits for the next update")
                with self._paused(url):
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

    def _load_all(self, load: Callable[[str], object]) -> dict[str, str | None]:
        """Update all servers; returns why each failed. An interrupt does not wait for them."""
        # One broadcast at a time: several would wait for each other.
        threads = ThreadPoolExecutor(len(self.urls) if self._transport == "disk" else 1)
        try:
            for url in self.urls:
                self._loading[url] = threads.submit(self._try, url, load)
            return {url: loading.result() for url, loading in self._loading.items()}
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _interrupted(self, *urls: str) -> list[Future[str | None]]:
        """What servers, all or some, still do for an update that was interrupted."""
        loading = [self._loading[url] for url in urls or self._loading if url in self._loading]
        return [each for each in loading if not each.done()]

    def _try(self, url: str, load: Callable[[str], object]) -> str | None:
        """Update one server; return why that failed."""
        try:
            with self._paused(url):
                load(url)
        except (ServerError, self._httpx.HTTPError) as error:
            self._groups.pop(url, None)
            return _reason(error)
        except Exception as error:  # of the process group
            self._groups.pop(url, None)
            return f"{type(error).__name__}: {error}"
        return None

    def _paused(self, url: str) -> _Paused:
        return _Paused(self, url)

    def _post(self, url: str, path: str, body: Any = None, **params: Any) -> Any:
        """Post to a server; returns the JSON of its answer, or ``None``."""
        return self._request("POST", url, path, json=body, params=params)

    def _get(self, url: str, path: str) -> Any:
        """Get from a server; ``None`` if it has no such page."""
        try:
            return self._request("GET", url, path)
        except ServerError as error:
            if "status 404" in str(error):
                return None
            raise

    def _request(self, method: str, url: str, path: str, **sent: Any) -> Any:
        sent = {name: value for name, value in sent.items() if value}
        answer = self._httpx.request(
            method, url + path, headers=self._headers, timeout=self._timeout, **sent
        )
        if not answer.is_success:
            raise ServerError(f"{path}: status {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json()
        except ValueError:
            return None

    @abstractmethod
    def _pause_server(self, url: str) -> None:
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
    def _reported(self, url: str) -> str | None:
        """The version that a server says it has; ``None`` if it does not say."""


class _Paused:
    """A server while it is paused; it is resumed in any case."""

    def __init__(self, weights: ServerWeights, url: str) -> None:
        self._weights = weights
        self._url = url

    def __enter__(self) -> None:
        try:
            self._weights._pause_server(self._url)
        except BaseException:
            self._resume()  # the answer may be lost, and the server paused
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Literal[False]:
        failure = self._resume()
        if error is None and failure is not None:
            raise ServerError(f"it does not resume: {_reason(failure)}") from failure
        return False

    def _resume(self) -> BaseException | None:
        try:
            self._weights._resume_server(self._url)
        except (ServerError, self._weights._httpx.HTTPError) as failure:
            return failure
        return None


def _reason(error: BaseException) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, ServerError) else f"{type(error).__name__}: {text}"
