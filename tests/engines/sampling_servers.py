"""Servers with weights of a known version, in the forms of vLLM and SGLang; unknown fields are refused.

The log-probability of a token tells which version sampled it.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from safetensors.torch import load_file

from tests.faulty_server import FaultyServer, running
from tests.waiting import wait_until

VOCABULARY, STOP = 26, 1

SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids",
    "logit_bias",
}  # fmt: skip


def log_prob_of(version: int) -> float:
    return -(1 + version) / 1024


def version_of(log_prob: float) -> int:
    """The version that sampled a token."""
    return round(-log_prob * 1024) - 1


class Refused(Exception):
    """The status and the message of a refusal."""


class Adapter(NamedTuple):
    """An adapter as a request knows it, whatever is loaded under its name later."""

    number: int
    folder: str
    in_place: bool


class Versions(NamedTuple):
    """Of each token: what sampled it, and what the server calls that."""

    true: list[int]
    labels: list[str]


class SamplingServer(FaultyServer):
    """Samples token by token; a pause aborts, freezes or waits for open requests."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.version = 0
        """Version of the weights that sample."""
        self.label = "default"
        """Its name, as far as the server was told."""
        self.is_paused = False
        self.running = 0
        self.aborts = 0
        """Increased to abort every open request."""
        self.state = threading.Condition()
        self.prompts: list[list[int]] = []
        """Prompts of all requests that sampled."""
        self.calls: list[str] = []
        """Paths of all posts but prompts'."""
        self.freed = 0
        """Requests that were given up since the client hung up, or asked for it."""
        self.before_token: Callable[[int], object] = lambda k: None
        """Called before each token of an answer."""
        self.load_fault: Callable[[], object] = lambda: None
        """Called before weights are loaded; may raise ``Refused``."""
        self.decode: Callable[[list[int]], str] = str
        self.prompt_log_probs: Callable[[list[int]], list[float]] | None = None
        """Log-probabilities of all tokens of a prompt but the first, if it is asked for them."""
        self.folder = "tiny"
        """Folder of the weights that it started with."""

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "tiny", "root": self.folder, "parent": None}]

    def look_up(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": self.models()}
        return (200, None) if path == "/health" else super().look_up(path)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        post = self.posts().get(parts.path)
        if post is None:
            return 404, {"detail": "Not Found"}
        with self.lock:
            self.calls.append(path)
        try:
            return 200, post(body, query)
        except Refused as refused:
            return refused.args[0], {"error": {"message": refused.args[1]}}

    def posts(self) -> Mapping[str, Callable[[dict[str, Any], dict[str, str]], Any]]:
        raise NotImplementedError

    def sample(
        self,
        prompt: list[int],
        params: Mapping[str, Any],
        limit: int,
        rid: str | None = None,
        adapter: Adapter | None = None,
    ) -> tuple[list[int], Versions, str, Any]:
        """Tokens, the version of each, why it ended, and what stopped it."""
        rng = random.Random(str(prompt))
        tokens: list[int] = []
        versions = Versions([], [])
        with self.state:
            while self.is_paused and not self.release.is_set():
                self.state.wait(0.02)
            self.running += 1
            aborts = self.aborts
        with self.lock:
            self.prompts.append(prompt)
        try:
            while True:
                self.before_token(len(tokens))
                with self.state:
                    while self.is_paused and self.aborts == aborts:
                        self.state.wait(0.02)
                    if self.release.is_set():
                        raise ConnectionError("killed")
                    if self.aborts != aborts or rid in self.aborted:
                        return tokens, versions, "abort", None
                    if self.hung_up():
                        self.freed += 1
                        return tokens, versions, "abort", None
                    versions.true.append(self.version_with(adapter))
                    versions.labels.append(self.label)
                tokens.append(rng.randrange(VOCABULARY))
                if tokens[-1] == STOP:
                    return tokens, versions, "stop", STOP
                text = self.decode(tokens)
                for string in params.get("stop", ()):
                    if string in text:
                        return tokens, versions, "stop", string
                if len(tokens) == limit:
                    return tokens, versions, "length", None
        finally:
            with self.state:
                self.running -= 1
                self.state.notify_all()

    def version_with(self, adapter: Adapter | None) -> int:
        assert adapter is None
        return self.version

    aborted: frozenset[str | None] = frozenset()
    """Ids of aborted requests."""

    def hung_up(self) -> bool:
        """Whether the client of this thread's request is gone."""
        connection = self.handling.handler.connection
        connection.setblocking(False)
        try:
            return connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            connection.setblocking(True)

    def pause(self, mode: str) -> None:
        with self.state:
            self.is_paused = True
            if mode == "abort":
                self.aborts += 1
            while mode == "wait" and self.running:
                self.state.wait(0.02)
            self.state.notify_all()

    def resume(self) -> None:
        with self.state:
            self.is_paused = False
            self.state.notify_all()

    def load(self, folder: str) -> None:
        self.load_fault()
        version = saved_version(folder)
        assert self.is_paused
        self.version = version


def saved_version(folder: str) -> int:
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        found.update(load_file(path))
    if "version" not in found:
        raise Refused(500, f"no weights in {folder}")
    return int(found["version"].item())


def prompt_entries(server: VLLMServer, prompt: list[int], params: Mapping[str, Any]) -> Any:
    """What vLLM says of a prompt's tokens."""
    if params.get("prompt_logprobs") != 0:
        return None
    values = zip(prompt[1:], server.prompt_log_probs(prompt), strict=True)
    return [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in values)]


def require(body: Mapping[str, Any], needed: set[str], known: set[str] = frozenset()) -> None:
    """Refuse a body that lacks fields or has unknown ones."""
    lacking, unknown = needed - body.keys(), body.keys() - needed - known
    if lacking or unknown:
        raise Refused(422, f"missing {sorted(lacking)}, unknown {sorted(unknown)}")


class VLLMServer(SamplingServer):
    """vLLM in development mode."""

    def __init__(self, port: int = 0, *, has_version: bool = True) -> None:
        super().__init__(port)
        self.has_version = has_version
        """Whether there is ``/weight_info``."""
        self.adapters: dict[str, Adapter] = {}
        self.cache = OrderedDict[int, int]()
        """Version of the adapter that is loaded."""
        self.adapter_loads = 0
        self.numbers = 0
        self.is_dead = False

    def models(self) -> list[dict[str, Any]]:
        adapters = [
            {"id": name, "root": adapter.folder, "parent": "tiny"}
            for name, adapter in self.adapters.items()
        ]
        return [*super().models(), *adapters]

    def adapter_of(self, body: Mapping[str, Any]) -> Adapter | None:
        name = body.get("model", "tiny")
        if name != "tiny" and name not in self.adapters:
            raise Refused(404, f"The model `{name}` does not exist.")
        return self.adapters.get(name)

    def version_with(self, adapter: Adapter | None) -> int:
        """Make a step with an adapter, which is read again if it is not in the cache."""
        if self.is_dead:
            raise Refused(500, "EngineDeadError")
        if adapter is None:
            return self.version
        with self.lock:
            if adapter.in_place or adapter.number not in self.cache:
                try:
                    self.read(adapter)
                except Refused:
                    self.is_dead = True
                    raise
            return self.cache[adapter.number]

    def read(self, adapter: Adapter) -> None:
        self.adapter_loads += 1
        version = saved_version(adapter.folder)
        self.cache.clear()
        self.cache[adapter.number] = version

    def look_up(self, path: str) -> tuple[int, Any]:
        if path == "/weight_info" and self.has_version:
            return 200, {"weight_version": self.label}
        return super().look_up(path)

    def posts(self) -> Mapping[str, Callable[[dict[str, Any], dict[str, str]], Any]]:
        optional = {"/update_weight_version": self.set_label} if self.has_version else {}
        return {
            "/inference/v1/generate": self.generate,
            "/v1/completions": self.complete,
            "/pause": self.on_pause,
            "/resume": lambda body, query: self.resume(),
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": lambda body, query: None,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            **optional,
        }

    def set_label(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"new_version"})
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def on_pause(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        # Releases without mode wait for open requests if this is there.
        waits = {"wait_for_inflight_requests"} if query.get("mode") == "wait" else set()
        require(query, {"mode", "clear_cache"} | waits)
        self.pause(query["mode"])
        return {"status": "paused"}

    def rpc(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"method", "kwargs"}, {"args", "timeout"})
        assert body["method"] == "reload_weights"
        require(body["kwargs"], {"weights_path"}, {"is_checkpoint_format"})
        self.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def load_adapter(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"lora_name", "lora_path"}, {"load_inplace"})
        self.load_fault()
        name, in_place = body["lora_name"], body.get("load_inplace", False)
        known = self.adapters.get(name)
        if known is not None and not in_place:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        with self.lock:
            self.numbers += known is None
            number = self.numbers if known is None else known.number
            adapter = Adapter(number, body["lora_path"], in_place)
            self.read(adapter)
            self.adapters = {**self.adapters, name: adapter}

    def unload_adapter(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"lora_name"}, {"lora_int_id"})
        if body["lora_name"] not in self.adapters:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        left = self.adapters.items()
        self.adapters = {name: each for name, each in left if name != body["lora_name"]}

    def generate(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(
            body,
            {"token_ids", "sampling_params"},
            {"model", "stream", "request_id", "priority", "cache_salt"},
        )
        params, adapter = body["sampling_params"], self.adapter_of(body)
        known = {*SAMPLING, "seed", "min_tokens", "prompt_logprobs"}
        require(params, {"max_tokens", "logprobs"}, known)
        scored = prompt_entries(self, body["token_ids"], params)
        limit = params["max_tokens"]
        tokens, versions, reason, _ = self.sample(body["token_ids"], params, limit, adapter=adapter)
        content = [
            {"token_id": token, "logprob": log_prob_of(version), "rank": 1, "top_logprobs": []}
            for token, version in zip(tokens, versions.true, strict=True)
        ]
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens}
        if self.has_version:
            choice["weight_versions"] = spans(versions.labels)
        choice["logprobs"] = {"content": content}
        return {"request_id": "1", "choices": [choice], "prompt_logprobs": scored}

    def complete(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        own = {"model", "return_token_ids", "return_tokens_as_token_ids", "seed", "prompt_logprobs"}
        require(body, {"prompt", "max_tokens", "logprobs"}, {*SAMPLING, *own})
        if len(body.get("stop", ())) > 4:
            raise Refused(400, "stop: List should have at most 4 items after validation")
        tokens, versions, reason, stopped = self.sample(
            body["prompt"], body, body["max_tokens"], adapter=self.adapter_of(body)
        )
        logprobs = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [log_prob_of(version) for version in versions.true],
        }
        choice = {"finish_reason": reason, "token_ids": tokens, "logprobs": logprobs}
        choice["prompt_logprobs"] = prompt_entries(self, body["prompt"], body)
        stop_reason = stopped if isinstance(stopped, str) else None
        return {"choices": [{"index": 0, **choice, "stop_reason": stop_reason}]}


class SGLangServer(SamplingServer):
    """SGLang; older releases report one version for all tokens, the last."""

    def __init__(self, port: int = 0, *, has_spans: bool = True) -> None:
        super().__init__(port)
        self.has_spans = has_spans
        self.rids: set[str] = set()

    def look_up(self, path: str) -> tuple[int, Any]:
        if path == "/get_weight_version":
            return 200, {"weight_version": self.label}
        if path == "/get_model_info":
            return 200, {"model_path": self.folder, "weight_version": self.label}
        return super().look_up(path)

    def posts(self) -> Mapping[str, Callable[[dict[str, Any], dict[str, str]], Any]]:
        return {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.on_pause,
            "/continue_generation": self.on_continue,
            "/update_weights_from_disk": self.update_from_disk,
        }

    def on_pause(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, set(), {"mode"})
        self.pause(body.get("mode", "abort"))
        return {"message": "Generation paused successfully.", "status": "ok"}

    def on_continue(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, set(), {"torch_empty_cache"})
        self.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def abort(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"rid"}, {"abort_all"})
        with self.state:
            self.freed += body["rid"] in self.rids
            self.aborted |= {body["rid"]}

    def update_from_disk(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"model_path"}, {"flush_cache", "weight_version", "load_format"})
        self.load(body["model_path"])
        self.label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def generate(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(
            body,
            {"input_ids", "sampling_params", "rid"},
            {"return_logprob", "stream", "priority", "logprob_start_len"},
        )
        assert body["return_logprob"] is True
        params, rid = body["sampling_params"], body["rid"]
        require(params, {"max_new_tokens"}, {*SAMPLING, "sampling_seed", "min_new_tokens"})
        with self.lock:
            if rid in self.rids:
                raise Refused(400, f"Duplicate request ID detected: {rid}")
            self.rids.add(rid)
        prompt, limit = body["input_ids"], params["max_new_tokens"]
        tokens, versions, reason, stopped = self.sample(prompt, params, limit, rid)
        with self.lock:
            self.rids.discard(rid)
        info = {
            "id": rid,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "finish_reason": {"type": reason, "matched": stopped},
            "output_token_logprobs": [
                [log_prob_of(version), token, None]
                for token, version in zip(tokens, versions.true, strict=True)
            ],
            "weight_version": self.label,
        }
        if body.get("logprob_start_len") == 0:
            values = zip([None, *self.prompt_log_probs(prompt)], prompt, strict=True)
            info["input_token_logprobs"] = [[value, token, None] for value, token in values]
        if self.has_spans:
            info["weight_versions"] = spans(versions.labels) or [
                {"version": self.label, "start": 0, "end": 0}
            ]
        return {"text": "not to be used", "output_ids": tokens, "meta_info": info}


def spans(labels: list[str]) -> list[dict[str, Any]]:
    """Spans of tokens with one version, under the names that servers have for them."""
    out: list[dict[str, Any]] = []
    for k, name in enumerate(labels):
        if not out or out[-1]["version"] != name:
            out.append({"version": name, "start": k, "end": k})
        out[-1]["end"] = k + 1
    return out


class Cluster:
    """Several servers that can be killed and started again at their addresses."""

    def __init__(self, kind: Callable[[int], SamplingServer], count: int) -> None:
        self._kind = kind
        self._stacks = [ExitStack() for _ in range(count)]
        self.servers = [self._start(k, 0) for k in range(count)]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def _start(self, k: int, port: int, **state: Any) -> SamplingServer:
        server = self._kind(port)
        vars(server).update(state)
        return self._stacks[k].enter_context(running(server))

    def kill(self, k: int) -> None:
        self._stacks[k].close()

    def restart(self, k: int, **state: Any) -> SamplingServer:
        """Start a killed server, which has the weights of version 0 if ``state`` has no ``version``."""
        self.servers[k] = self._start(k, self.servers[k].server_port, **state)
        return self.servers[k]

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@contextmanager
def cluster(kind: Callable[[int], SamplingServer], count: int) -> Iterator[Cluster]:
    made = Cluster(kind, count)
    try:
        yield made
    finally:
        made.close()


def slowly(seconds: float) -> Callable[[int], object]:
    return lambda k: time.sleep(seconds)


def until(server: SamplingServer, count: int) -> None:
    """Wait until a server samples so many answers."""
    wait_until(lambda: server.running >= count)
