"""New weights for SGLang servers, by the endpoints that it has for training."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrl_mt.engines.server_weights.base import ServerError, ServerWeights
from torchrl_mt.engines.server_weights.process_group import described, open_torch_group

__all__ = ["SGLangWeights"]

_BUCKET_BYTES = 1 << 30
"""Bytes that a server receives at once over a process group: it holds them beside its own weights."""


class SGLangWeights(ServerWeights):
    """Load new weights into SGLang servers, for ``CompletionsEngine(on_update=...)``.

    A server is paused (``/pause_generation``), loads the weights and goes on
    (``/continue_generation``). It also gets the version (``weight_version``), which its replies report.

    - ``"disk"``: weights are saved as safetensors, and the server loads the folder
      (``/update_weights_from_disk``). The folder of the update before is deleted.
    - ``"nccl"``: weights are broadcast to the server's processes (``/update_weights_from_distributed``)
      from a GPU of this process. ``"gloo"`` is for tests without GPUs.

    Args:
        urls: address of the server, or a list of several servers'.
        transport: ``"disk"``, ``"nccl"`` or ``"gloo"``.
        pause: what happens to open requests: ``"abort"`` has them sent again, ``"retract"`` computes
            their cache again, so that they go on with the new weights.
        folder: where weights are saved, in sight of the servers; a temporary folder if ``None``.
        master_address: this process's address, in sight of the servers, for process groups.
        api_key: sent as a bearer token.
        timeout: seconds for one request to a server.
        wait_ready: seconds that an update waits for a server that starts or restarts; ``None`` for those
            of the engine.

    Raises:
        ImportError: if httpx is not installed.
        ValueError: if a value is out of range.

    Examples:
        >>> weights = SGLangWeights("http://localhost:30000", folder="/shared/weights")  # doctest: +SKIP
        >>> engine = CompletionsEngine(  # doctest: +SKIP
        ...     weights.urls, "Qwen/Qwen3-0.6B", tokenizer, api="sglang", on_update=weights
        ... )
        >>> collector.update_policy_weights_(model)  # doctest: +SKIP
    """

    transports = "disk", "nccl", "gloo"
    pauses = "abort", "retract"
    _open_group = staticmethod(open_torch_group)

    def _pause_server(self, url: str, mode: str) -> None:
        self._post(url, "/pause_generation", {"mode": mode})

    def _resume_server(self, url: str) -> None:
        self._post(url, "/continue_generation", {"torch_empty_cache": True})

    def _load_folder(self, url: str, path: Path, version: int) -> None:
        body = {"model_path": str(path), "flush_cache": True, "weight_version": str(version)}
        self._update(url, "/update_weights_from_disk", body)

    def _broadcast(self, url: str, weights: Mapping[str, Tensor], version: int) -> None:
        group, place = self._group(url)
        buckets = list(_buckets(weights))
        for k, bucket in enumerate(buckets):
            is_last = k == len(buckets) - 1
            body = {
                **described(bucket, "dtypes"),
                "group_name": place["group_name"],
                "flush_cache": is_last,
                **({"weight_version": str(version)} if is_last else {}),
            }
            # The server answers once it has received everything.
            asked = self._start(self._update, url, "/update_weights_from_distributed", body)
            group.send(bucket.values(), asked)

    def _place(self, url: str) -> dict[str, Any]:
        info = self._get(url, "/get_server_info") or self._get(url, "/server_info") or {}
        return {
            "world_size": 1 + int(info.get("tp_size", 1)),
            "backend": self._transport,
            "group_name": f"torchrl_mt-{uuid.uuid4().hex[:8]}",
        }

    def _ask_to_join(self, url: str, place: dict[str, Any]) -> None:
        self._update(url, "/init_weights_update_group", place)

    def _update(self, url: str, path: str, body: dict[str, Any]) -> None:
        """Post and check that the server succeeded."""
        said = self._post(url, path, body)
        if not (isinstance(said, Mapping) and said.get("success")):
            raise ServerError(f"{path}: {said!r:.300}")

    def _has(self, url: str, version: int) -> bool:
        said = self._get(url, "/get_weight_version") or self._info(url)
        return str(said.get("weight_version")) == str(version)

    def _model_path(self, url: str) -> str:
        return str(self._info(url)["model_path"])

    def _info(self, url: str) -> Any:
        return self._get(url, "/get_model_info") or self._get(url, "/model_info") or {}


def _buckets(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cut weights into parts of a bounded size, or of one tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, value in weights.items():
        if bucket and size + value.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = value
        size += value.nbytes
    if bucket:
        yield bucket
