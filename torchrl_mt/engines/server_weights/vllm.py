"""New weights for vLLM servers, by the endpoints of its development mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchrl_mt.engines.adapters import peft_model
from torchrl_mt.engines.completions.reported_versions import name_of
from torchrl_mt.engines.server_weights.base import ServerError, ServerWeights
from torchrl_mt.engines.server_weights.process_group import described, open_vllm_group

__all__ = ["VLLMWeights"]

_ADAPTERS = 8
"""Adapters on disk beyond which an update aborts open requests, so that none needs the older ones."""


class VLLMWeights(ServerWeights):
    """Load new weights into vLLM servers, for ``CompletionsEngine(on_update=...)``.

    A server is paused (``/pause``), loads the weights and is resumed (``/resume``). It must run with
    ``VLLM_SERVER_DEV_MODE=1``.

    - ``"disk"``: weights are saved as safetensors, and the server's processes load the folder
      (``/collective_rpc`` of ``reload_weights``). The folder of the update before is deleted.
    - ``"nccl"``: weights are broadcast to the servers' processes. This process needs vLLM and a GPU of
      its own, and servers ``--weight-transfer-config '{"backend": "nccl"}'``.

    Args:
        urls: address of the server, or a list of several servers'.
        transport: ``"disk"`` or ``"nccl"``.
        pause: what happens to open requests: ``"abort"`` has them sent again, ``"wait"`` lets them end,
            ``"keep"`` freezes them, so that they go on with the new weights; with ``lora_name``, with
            the adapter that they began with.
        folder: where weights are saved, in sight of the servers; a temporary folder if ``None``,
            removed at exit. vLLM reads an adapter again while requests use it, so the last adapters
            stay: two, with ``pause="keep"`` up to 8, after which one update aborts open requests.
        lora_name: name of a LoRA adapter, which is then the engine's ``model``. Sources are PEFT models
            or folders of their adapters (``/v1/load_lora_adapter``); servers must run with
            ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. They serve version 3 as ``"<lora_name>@3"``.
        master_address: this process's address, in sight of the servers, for ``"nccl"``.
        api_key: sent as a bearer token.
        timeout: seconds for one request to a server.
        wait_ready: seconds that an update waits for a server that starts or restarts; ``None`` for those
            of the engine.

    Raises:
        ImportError: if httpx is not installed.
        ValueError: if a value is out of range.

    Examples:
        >>> urls = ["http://gpu1:8000", "http://gpu2:8000"]
        >>> engine = CompletionsEngine(  # doctest: +SKIP
        ...     urls, "Qwen/Qwen3-0.6B", tokenizer, api="vllm", on_update=VLLMWeights(urls)
        ... )
        >>> collector.update_policy_weights_(model)  # doctest: +SKIP
    """

    transports = "disk", "nccl"
    pauses = "abort", "wait", "keep"
    _open_group = staticmethod(open_vllm_group)

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        transport: Literal["disk", "nccl"] = "disk",
        pause: Literal["abort", "wait", "keep"] = "abort",
        folder: str | Path | None = None,
        lora_name: str | None = None,
        master_address: str = "127.0.0.1",
        api_key: str | None = None,
        timeout: float = 600.0,
        wait_ready: float | None = None,
    ) -> None:
        if lora_name is not None and transport != "disk":
            raise ValueError(f'transport must be "disk" with lora_name, got {transport!r}.')
        super().__init__(
            urls,
            transport=transport,
            pause=pause,
            folder=folder,
            master_address=master_address,
            api_key=api_key,
            timeout=timeout,
            wait_ready=wait_ready,
        )
        self._lora_name = lora_name
        if lora_name is not None:
            self.versions = "named"

    def check_engine(self, origins: Sequence[str], model: str, wait_ready: float = 0.0) -> None:
        """Refuse other servers, and a ``model`` that is not the adapter."""
        super().check_engine(origins, model, wait_ready)
        if self._lora_name not in (None, model):
            raise ValueError(
                f"model must be the lora_name of on_update, {self._lora_name!r}, got {model!r}: "
                "requests for another model are not sampled with the adapter."
            )

    def _save(self, source: Any, version: int) -> Path:
        if self._lora_name is None:
            return super()._save(source, version)
        is_folder = isinstance(source, (str, Path))
        if not (_is_adapter(Path(source)) if is_folder else peft_model(source)):
            raise TypeError(
                "source must be a PEFT model or a folder of its adapter (adapter_config.json) with "
                f"lora_name, got {source if is_folder else type(source).__name__}."
            )
        return self._saved.save(source, version, adapter=True)

    def _forget(self, version: int) -> None:
        if self._lora_name is None:
            super()._forget(version)
        elif self._pause_mode() != "keep":
            # A request that came while servers were paused may use the adapter before.
            self._saved.keep(version, 2)

    def _pause_mode(self, *, is_again: bool = False) -> str:
        aborts = self._lora_name is not None and (is_again or len(self._saved) > _ADAPTERS)
        return "abort" if aborts else self._pause

    def _pause_server(self, url: str, mode: str) -> None:
        # Releases without mode know the last parameter alone.
        waits = {"wait_for_inflight_requests": "true"} if mode == "wait" else {}
        sent = {"mode": mode, "clear_cache": "true", **waits}
        if not self._optional(url, "/pause", **sent):
            raise ServerError("/pause: status 404: start vLLM with VLLM_SERVER_DEV_MODE=1")

    def _resume_server(self, url: str) -> None:
        self._post(url, "/resume")

    def _load_folder(self, url: str, path: Path, version: int) -> None:
        if self._lora_name is not None:
            # With load_inplace, vLLM would load it again at every step, and requests that go on would
            # load the adapter before over it.
            for name in self._adapters(url):
                self._optional(url, "/v1/unload_lora_adapter", {"lora_name": name})
            adapter = {"lora_name": name_of(self._lora_name, version), "lora_path": str(path)}
            self._post(url, "/v1/load_lora_adapter", adapter)
            return
        kwargs = {"weights_path": str(path)}
        self._post(url, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        self._finish(url)
        self._optional(url, "/update_weight_version", {"new_version": str(version)})

    def _broadcast(self, url: str, weights: Mapping[str, Tensor], version: int) -> None:
        group, _ = self._group(url)
        has_phases = self._optional(url, "/start_weight_update")
        info = described(weights, "dtype_names")
        # The server answers once it has received everything.
        asked = self._start(self._post, url, "/update_weights", {"update_info": info})
        group.send(weights.values(), asked)
        if has_phases:
            self._post(url, "/finish_weight_update", {"weight_version": str(version)})
        self._finish(url)

    def _place(self, url: str) -> dict[str, Any]:
        return {"world_size": 1 + int(self._request("GET", url, "/get_world_size")["world_size"])}

    def _ask_to_join(self, url: str, place: dict[str, Any]) -> None:
        self._post(url, "/init_weight_transfer_engine", {"init_info": place})

    def _finish(self, url: str) -> None:
        if self._pause == "keep":  # a cache that is not cleared has the old weights' prefixes
            self._post(url, "/reset_prefix_cache", reset_running_requests="true")

    def _optional(self, url: str, path: str, body: Any = None, **params: str) -> bool:
        """Post to an endpoint that not every server has; false if there is none."""
        said = self._request("POST", url, path, is_optional=True, json=body, params=params)
        return said is not False

    def _has(self, url: str, version: int) -> bool:
        if self._lora_name is not None:
            return name_of(self._lora_name, version) in self._adapters(url)
        said = self._get(url, "/weight_info")
        return bool(said) and said.get("weight_version") == str(version)

    def _adapters(self, url: str) -> list[str]:
        """Versions of the adapter that a server has, by their names."""
        listed = [str(each["id"]) for each in self._get(url, "/v1/models")["data"]]
        return [name for name in listed if name.rpartition("@")[0] == self._lora_name]

    def _model_path(self, url: str) -> str:
        listed = self._get(url, "/v1/models")["data"]
        return next(str(each["root"]) for each in listed if not each.get("parent"))


def _is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").exists()
