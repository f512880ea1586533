"""New weights for vLLM servers, by the endpoints of its development mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchrl_mt.checks import check_choice
from torchrl_mt.engines.adapters import peft_model
from torchrl_mt.engines.server_weights.base import ServerError, ServerWeights
from torchrl_mt.engines.server_weights.process_group import free_port, open_vllm_group

__all__ = ["VLLMWeights"]


class VLLMWeights(ServerWeights):
    """Load new weights into vLLM servers, for ``CompletionsEngine(on_update=...)``.

    A server is paused (``/pause``), loads the weights and is resumed (``/resume``). It must run with
    ``VLLM_SERVER_DEV_MODE=1``.

    - ``"disk"``: weights are saved as safetensors, and workers load the folder
      (``/collective_rpc`` of ``reload_weights``). The folder of the update before is deleted.
    - ``"nccl"``: weights are broadcast to the workers. This process needs vLLM and a GPU of its own, and
      servers ``--weight-transfer-config '{"backend": "nccl"}'``.

    Args:
        urls: address of the server, or a list of several servers'.
        transport: ``"disk"`` or ``"nccl"``.
        pause: what happens to open requests: ``"abort"`` has them sent again, ``"wait"`` lets them end,
            ``"keep"`` freezes them, so that they go on with the new weights.
        folder: where weights are saved, in sight of the servers; a temporary folder if ``None``,
            removed at exit. An adapter must stay: vLLM may read it again at any request, and dies if
            it is gone.
        lora_name: name of a LoRA adapter, which is then the engine's ``model``. Sources are PEFT models
            or folders of their adapters (``/v1/load_lora_adapter``); servers must run with
            ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
        master_address: this process's address, in sight of the servers, for ``"nccl"``.
        api_key: sent as a bearer token.
        timeout: seconds for one request to a server.

    Raises:
        ImportError: if httpx is not installed.
        ValueError: if a value is out of range.

    Examples:
        >>> urls = ["http://gpu1:8000", "http://gpu2:8000"]
        >>> engine = CompletionsEngine(  # doctest: +SKIP
        ...     urls, "Qwen/Qwen3-0.6B", tokenizer, on_update=VLLMWeights(urls, folder="/shared/weights")
        ... )
        >>> collector.update_policy_weights_(model)  # doctest: +SKIP
    """

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
    ) -> None:
        check_choice("transport", transport, ("disk", "nccl"))
        check_choice("pause", pause, ("abort", "wait", "keep"))
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
        )
        self._lora_name = lora_name

    def check_engine(self, origins: Sequence[str], model: str) -> None:
        """Refuse other servers, and a ``model`` that is not the adapter."""
        super().check_engine(origins, model)
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

    def _pause_server(self, url: str) -> None:
        # Releases without mode know the last parameter alone.
        waits = {"wait_for_inflight_requests": "true"} if self._pause == "wait" else {}
        sent = {"mode": self._pause, "clear_cache": "true", **waits}
        if not self._optional(url, "/pause", **sent):
            raise ServerError("/pause: status 404: start vLLM with VLLM_SERVER_DEV_MODE=1")

    def _resume_server(self, url: str) -> None:
        self._post(url, "/resume")

    def _load_folder(self, url: str, path: Path, version: int) -> None:
        if self._lora_name is not None:
            adapter = {"lora_name": self._lora_name, "lora_path": str(path), "load_inplace": True}
            self._post(url, "/v1/load_lora_adapter", adapter)
        else:
            kwargs = {"weights_path": str(path)}
            self._post(url, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        self._finish(url)
        self._optional(url, "/update_weight_version", {"new_version": str(version)})

    def _broadcast(self, url: str, weights: Mapping[str, Tensor], version: int) -> None:
        group = self._group(url)
        has_phases = self._optional(url, "/start_weight_update")
        info = {
            "names": list(weights),
            "dtype_names": [str(value.dtype).removeprefix("torch.") for value in weights.values()],
            "shapes": [list(value.shape) for value in weights.values()],
        }
        with ThreadPoolExecutor(1) as thread:
            # The server answers once it has received everything.
            asked = thread.submit(self._post, url, "/update_weights", {"update_info": info})
            group.send(weights.values(), asked)
        if has_phases:
            self._post(url, "/finish_weight_update", {"weight_version": str(version)})
        self._finish(url)

    def _group(self, url: str) -> Any:
        """The process group with a server's workers."""
        if url not in self._groups:
            size = 1 + int(self._request("GET", url, "/get_world_size")["world_size"])
            place: dict[str, Any] = {
                "master_address": self._master_address,
                "master_port": free_port(self._master_address),
                "world_size": size,
            }
            info = {"init_info": {**place, "rank_offset": 1}}
            with ThreadPoolExecutor(1) as thread:
                asked = thread.submit(self._post, url, "/init_weight_transfer_engine", info)
                self._groups[url] = open_vllm_group(**place)
                asked.result()
        return self._groups[url]

    def _finish(self, url: str) -> None:
        if self._pause == "keep":  # a cache that is not cleared has the old weights' prefixes
            self._post(url, "/reset_prefix_cache", reset_running_requests="true")

    def _optional(self, url: str, path: str, body: Any = None, **params: str) -> bool:
        """Post to an endpoint that not every server has; false if there is none."""
        try:
            self._post(url, path, body, **params)
        except ServerError as error:
            if "status 404" in str(error):
                return False
            raise
        return True

    def _reported(self, url: str) -> str | None:
        said = self._get(url, "/weight_info")
        return None if said is None else said.get("weight_version")


def _is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").exists()
