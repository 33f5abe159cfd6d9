"""Starts this process as one rank of many: the rendezvous, and the process group (gloo for CPUs, NCCL for GPUs)."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed does not declare them
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

NEVER = timedelta(days=7)  # the launcher detects and names ranks that are waited for too long
CONNECT = timedelta(minutes=5)  # to wait for the process that hosts the store


@dataclass(frozen=True)
class Place:
    """This process among the ranks that meet at `address`: see `meet`."""

    rank: int = 0
    size: int = 1
    address: str = ""
    local: int = 0  # the index of its GPU among those that it sees

    def device(self, kind: str) -> torch.device:
        """The device of a rank, where the configuration's is `kind`."""
        return torch.device(kind, self.local) if kind == "cuda" and self.size > 1 else torch.device(kind)


def host_store(host: str, port: int = 0) -> TCPStore:
    """A store for ranks to meet at, listening on `host`'s address alone; `port` 0: any free one."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=NEVER, master_listen_fd=listener.detach()
    )


def meet(address: str) -> Store:
    """The store at `tcp://HOST:PORT/PREFIX`, which another process hosts, or in a file (`file:///PATH`)."""
    scheme, _, rest = address.partition("://")
    if scheme == "file":
        return FileStore(rest)
    at, _, prefix = rest.partition("/")
    host, _, port = at.rpartition(":")
    store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=CONNECT)
    store.set_timeout(NEVER)
    return PrefixStore(prefix, store) if prefix else store


@contextmanager
def process_group(device: torch.device, address: str, rank: int, size: int) -> Iterator[None]:
    """The default process group of `size` ranks, which meet at `address`."""

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    _stay_local(address)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=meet(address), rank=rank, world_size=size, timeout=NEVER
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stay_local(address: str) -> None:
    """Gloo listens where it is told by the environment alone: on loopback, for ranks that meet there."""
    if address.startswith("file:"):  # if no rank is outside this host
        address = "tcp://localhost:0"
    host = address.removeprefix("tcp://").partition("/")[0].rpartition(":")[0].strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
