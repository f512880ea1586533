"""Servers in processes of their own, which receive weights over a process group, as workers do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.sampling_servers import Refused, SGLangServer, VLLMServer, require
from tests.faulty_server import running
from torchrl_mt._hosts.torch import join_process_group

Post = Callable[[dict[str, Any], dict[str, str]], Any]


def received(group: Any, body: Mapping[str, Any], dtypes: str) -> dict[str, torch.Tensor]:
    out = {}
    for name, dtype, shape in zip(body["names"], body[dtypes], body["shapes"], strict=True):
        out[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(out[name], 0, group=group)
    return out


def joined(place: Mapping[str, Any], backend: str, group_name: str) -> Any:
    """The process group that a trainer asks to join."""
    return join_process_group(
        f"tcp://{place['master_address']}:{place['master_port']}",
        rank=place["rank_offset"],
        world_size=place["world_size"],
        backend=backend,
        group_name=group_name,
    )


class ReceivingSGLang(SGLangServer):
    groups: Mapping[str, Any] = {}
    fails = 0
    """Number of updates to refuse."""

    def posts(self) -> Mapping[str, Post]:
        return {
            **super().posts(),
            "/init_weights_update_group": self.init_group,
            "/update_weights_from_distributed": self.update,
            "/fail": self.fail,
        }

    def look_up(self, path: str) -> tuple[int, Any]:
        return (200, {"tp_size": 1}) if path == "/get_server_info" else super().look_up(path)

    def fail(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        self.fails = body["times"]

    def init_group(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        names = {"master_address", "master_port", "rank_offset", "world_size", "group_name"}
        require(body, names, {"backend"})
        name = body["group_name"]
        self.groups = {**self.groups, name: joined(body, body["backend"], name)}
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def update(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(
            body, {"names", "dtypes", "shapes"}, {"group_name", "flush_cache", "weight_version"}
        )
        if self.fails:
            self.fails -= 1
            raise Refused(400, "no room")
        assert self.is_paused
        found = received(self.groups[body["group_name"]], body, "dtypes")
        self.version = int(found["version"].item()) if "version" in found else self.version
        self.label = body.get("weight_version", self.label)
        return {"success": True, "message": "ok"}


class ReceivingVLLM(VLLMServer):
    group: Any = None
    phases: tuple[str, ...] = ()

    def posts(self) -> Mapping[str, Post]:
        return {
            **super().posts(),
            "/init_weight_transfer_engine": self.init_group,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
        }

    def look_up(self, path: str) -> tuple[int, Any]:
        return (200, {"world_size": 1}) if path == "/get_world_size" else super().look_up(path)

    def init_group(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"init_info"})
        info = body["init_info"]
        require(info, {"master_address", "master_port", "rank_offset", "world_size"})
        self.group = joined(info, "gloo", "vllm")
        return {"message": "Weight transfer initialized"}

    def start(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        assert self.is_paused
        self.phases = ("started",)

    def update(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, {"update_info"})
        require(body["update_info"], {"names", "dtype_names", "shapes"}, {"packed"})
        assert self.phases == ("started",)
        found = received(self.group, body["update_info"], "dtype_names")
        self.version = int(found["version"].item())
        self.phases = ("started", "updated")

    def finish(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        require(body, set(), {"weight_version"})
        assert self.phases == ("started", "updated")
        self.label = body["weight_version"]


def _serve(kind: type, pipe: Connection) -> None:
    with running(kind()) as server:
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def in_processes(kind: type, count: int) -> Iterator[list[str]]:
    """Addresses of servers in processes of their own."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(kind, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        yield [pipe.recv() for pipe in pipes]
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()
