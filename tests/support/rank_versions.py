"""Versions of a model, published by one rank or by several that encode a share each. Run by `run_ranks`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlloop import load_model
from rlloop.models import Model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from rlloop.sync import manifest, packing, stream
from rlloop.sync.live import published_weights
from rlloop.sync.manifest import Head
from rlloop.sync.publisher import Publisher
from rlloop.sync.sharded_weights import ShardedWeights
from rlloop.sync.store import FolderStore, StoreError
from tests.support.weight_history import KEY

PIECE = 600  # bytes: versions have several
SMALL = 300  # elements below which tensors are joined: both kinds are in every model of `rank_updates`


def model_of(folder: Path, case: str, context: ParallelContext | None = None) -> Model:
    quantize = "fp8" if case == "fp8" else "none"
    name = {"fp8": "dense", "adapter": "mixture"}.get(case, case)
    model = load_model(folder / name, dtype="bfloat16", context=context, quantize=quantize)
    if case != "adapter":
        return model
    targets = choose_targets(model.requires_grad_(False).adapter_targets(), ("all-linear", "lm_head"))
    return model.with_adapter(Adapter(fresh_weights(targets, 3, 6.0, seed=1), targets))


@torch.no_grad()
def step(model: Model, version: int) -> None:
    """Elementwise, so that a rank's part changes as that part of the whole does; norms stay."""
    for name, live in ParameterStore(model).tensors().items():
        if isinstance(live, Fp8Weight):
            live.codes.view(torch.uint8)[:, ::5] ^= 1
        elif "norm" not in name:
            live[live.abs() > 0.125 * version] *= 1.0625


class Failing(FolderStore):
    """Fails at a blob, the `left`th from now, if that is set; `dies`: with its process."""

    left, dies = 0, False

    def put(self, blob: bytes) -> bytes:
        self.left -= 1
        if self.left == 0 and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0:
            raise StoreError("full")
        return super().put(blob)


class Trainer:
    """A publisher of a model's versions, on one rank or several."""

    def __init__(
        self, folder: Path, case: str, layout: Mapping[str, int], store: Failing, publishes: bool, device: torch.device
    ) -> None:
        self.store = store
        self.model = model_of(folder, case, join(device, Layout(**layout)))
        self.publisher = Publisher(store, KEY, "run", threads=1) if publishes else None
        self.weights = None
        if layout:
            world = self.model.context.ranks("world")
            self.weights = ShardedWeights(self.model, world, on_device=True, threads=1)

    def publish(self, version: int) -> None:
        if self.weights is None:
            tensors, aliases = published_weights(self.model, on_device=True)
            self.publisher.publish(tensors, version, aliases=aliases)
            return
        tensors = self.weights.tensors()
        shares = self.weights.shares
        self.weights.lead(tensors, lambda: self.publisher.publish(tensors, version, shares=shares))

    def anchor(self) -> None:
        if self.weights is None:
            self.publisher.anchor()
        else:
            self.weights.lead({}, lambda: self.publisher.anchor())


def published(
    models: Path,
    case: str,
    layout: Mapping[str, int],
    store: Path,
    versions: range,
    fails: str = "",
    kind: str = "cpu",
    piece: int = PIECE,
) -> list[str]:
    """Publishes some versions, of which the third is stored whole as well. Returns the large tensors whose published
    bits a rank keeps.

    `piece`: bytes of a file of the store. `fails`: while the last version's pieces are written the store fails, or
    ("dies") the first rank's process ends.
    """
    packing.JOINED, stream.PIECE, manifest.PIECE = SMALL, piece, piece  # of a rank's process
    first = not dist.is_initialized() or dist.get_rank() == 0
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    trainer = Trainer(models, case, layout, Failing(store), first, device)
    trainer.store.dies = fails == "dies"
    for version in range(versions.stop):
        step(trainer.model, version)
        if fails and version == versions.stop - 1:
            trainer.store.left = 1
            with suppress(StoreError):
                trainer.publish(version)
        if version >= versions.start:
            trainer.publish(version)
            if version == 2:
                trainer.anchor()
    if first:
        trainer.publisher.squash(trainer.publisher.head.chain[-3].sequence)
    state = (trainer.publisher if first else trainer.weights)._state
    return [name for name, bits in state.tensors.items() if bits.size >= SMALL]


def stored(store: Path) -> tuple[Any, ...]:
    """Everything in a store but the name and term of who wrote it."""
    head = Head.decode(FolderStore(store).latest())
    return head.chain, head.shortcuts, set(FolderStore(store).blobs())
