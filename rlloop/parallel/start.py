"""Starts this process as one rank of many: its device and the process group, over gloo for CPUs and NCCL for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

NEVER = timedelta(days=7)  # whoever waits for a rank too long is the launcher's to name


@contextmanager
def process_group(device: torch.device, address: str, rank: int, size: int) -> Iterator[None]:
    """The default process group of `size` ranks, which meet at `address` (`tcp://HOST:PORT` or `file:///PATH`)."""

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=address, rank=rank, world_size=size, timeout=NEVER
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
