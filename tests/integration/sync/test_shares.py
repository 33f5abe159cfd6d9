"""Ranks that encode a version together, over gloo: the store has the bytes of one rank's, and any engine reads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlloop import Engine, SamplingParams, load_model
from rlloop.models import Model, new_model, save_model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from rlloop.sync import packing
from rlloop.sync.live import LiveTarget, named_weights, tensors_of
from rlloop.sync.manifest import Head
from rlloop.sync.packing import listing_from
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.sharded_weights import ShardedWeights
from rlloop.sync.shares import spread
from rlloop.sync.store import FolderStore, Store
from tests.support.rank_updates import DENSE, MIXTURE
from tests.support.ranks import run_ranks
from tests.support.weight_history import KEY, PUBLIC

CPU = torch.device("cpu")
SMALL = 300  # elements below which tensors are joined: both kinds are in every model here
LAYOUTS = {
    2: {"dense": [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}],
        "mixture": [{"dp_shard": 2, "ep": 2}, {"tp": 2}],
        "adapter": [{"tp": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}],
        "fp8": [{"dp_shard": 2}]},
    3: {"mixture": [{"dp_shard": 3, "ep": 3}, {"dp_replicate": 3}]},
    4: {"dense": [{"pp": 2, "tp": 2}],
        "mixture": [{"dp_shard": 2, "tp": 2, "ep": 4}, {"pp": 2, "dp_shard": 2, "ep": 2}]},
}  # fmt: skip
PROMPTS = [[5, 7, 9, 11], [4, 6], [8] * 9]
SAMPLING = SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(packing, "JOINED", SMALL)


@pytest.fixture
def folder(tmp_path):
    for name, config in (("dense", DENSE), ("mixture", MIXTURE)):
        model = new_model(config, seed=1, dtype="bfloat16")
        save_model(ParameterStore(model).snapshot(), tmp_path / name, config=model.config)
    return tmp_path


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
            live[live.abs() > 0.1 * version] *= 1.0625


class Dying(FolderStore):
    """Ends its process at a blob: the `left`th from now, if that is set."""

    left = 0

    def put(self, blob: bytes) -> bytes:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().put(blob)


class Trainer:
    """What publishes a model's versions, on one rank or several."""

    def __init__(self, folder: Path, case: str, layout: Mapping[str, int], store: Store, publishes: bool) -> None:
        self.model = model_of(folder, case, join(CPU, Layout(**layout)))
        self.publisher = Publisher(store, KEY, "run", threads=1) if publishes else None
        self.weights = None
        if layout:
            world = self.model.context.ranks("world")
            self.weights = ShardedWeights(self.model, world, on_device=True, threads=1)

    def publish(self, version: int) -> None:
        if self.weights is None:
            tensors, aliases = tensors_of(named_weights(self.model).items())
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
    models: Path, case: str, layout: Mapping[str, int], store: Path, versions: range, dies: bool = False
) -> list[str]:
    """Publishes some versions, of which the third is stored whole as well; the first of a later start has been already.
    `dies`: while the last one's pieces are written. Returns the large tensors whose published bits a rank keeps."""
    packing.JOINED = SMALL  # of a rank's process
    first = not dist.is_initialized() or dist.get_rank() == 0
    trainer = Trainer(models, case, layout, Dying(store) if dies else FolderStore(store), first)
    for version in range(versions.stop):
        step(trainer.model, version)
        if dies and first and version == versions.stop - 1:
            trainer.publisher.store.left = 1
        if version >= versions.start:
            trainer.publish(version)
            if version == 2:
                trainer.anchor()
    if first:
        trainer.publisher.squash(trainer.publisher.head.chain[-3].sequence)
    state = (trainer.publisher if first else trainer.weights)._state
    return [name for name, bits in state.tensors.items() if bits.size >= SMALL]


def all_published(folder: Path, cases: Mapping[str, list[dict[str, int]]]) -> list[list[str]]:
    return [
        published(folder, case, layout, folder / f"{case} {layout}", range(5))
        for case, layouts in cases.items()
        for layout in layouts
    ]


def stored(store: Path) -> tuple[Any, ...]:
    """Everything in a store but the name and term of who wrote it."""
    head = Head.decode(FolderStore(store).latest())
    return head.chain, head.shortcuts, set(FolderStore(store).blobs())


def replica_of(store: Path, model: Model) -> Replica:
    target = LiveTarget(named_weights(model).items(), lambda version: None)
    return Replica(FolderStore(store), PUBLIC, target, threads=1)


@pytest.mark.parametrize("size", LAYOUTS)
def test_ranks_store_the_bytes_of_one(folder, size):
    for case in LAYOUTS[size]:
        published(folder, case, {}, folder / f"{case} alone", range(5))
    kept = run_ranks(size, all_published, folder, LAYOUTS[size])
    runs = [(case, layout) for case, layouts in LAYOUTS[size].items() for layout in layouts]
    for (case, layout), *shares in zip(runs, *kept, strict=True):
        assert stored(folder / f"{case} {layout}") == stored(folder / f"{case} alone"), layout
        large = [name for share in shares for name in share]
        assert len(large) == len(set(large)), "one rank encodes a tensor"
        assert all(shares) or case == "adapter", f"{layout}: each rank encodes some"
        model, expected = model_of(folder, case), model_of(folder, case)
        late = replica_of(folder / f"{case} {layout}", model)
        assert late.poll()
        for version in range(5):
            step(expected, version)
        made = [Engine(each).generate(PROMPTS, SAMPLING) for each in (model, expected)]
        assert [(each.token_ids, each.logprobs.tobytes()) for each in made[0]] == [
            (each.token_ids, each.logprobs.tobytes()) for each in made[1]
        ]


@pytest.mark.parametrize("sizes", [(2, 3), (1, 3), (3, 1)])
def test_a_publisher_goes_on_with_another_number_of_ranks(folder, sizes):
    """The base of each rank's share comes from the store."""

    def publish(store: Path, size: int, versions: range) -> None:
        layout = {"dp_shard": size} if size > 1 else {}
        arguments = folder, "mixture", layout, store, versions
        run_ranks(size, published, *arguments) if size > 1 else published(*arguments)

    for size, versions in zip(sizes, (range(4), range(3, 6)), strict=True):
        publish(folder / "store", size, versions)
    for versions in (range(4), range(3, 6)):
        publish(folder / "alone", 1, versions)
    assert stored(folder / "store") == stored(folder / "alone")


def test_a_kill_of_the_first_rank_while_it_publishes_leaves_a_store_that_goes_on(folder):
    with pytest.raises(BrokenProcessPool):
        run_ranks(2, published, folder, "mixture", {"tp": 2}, folder / "store", range(5), True)
    assert replica_of(folder / "store", model := load_model(folder / "mixture", dtype="bfloat16")).poll()
    assert Head.decode(FolderStore(folder / "store").latest()).newest.step == 3
    expected = load_model(folder / "mixture", dtype="bfloat16")
    for version in range(4):
        step(expected, version)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
    run_ranks(2, published, folder, "mixture", {"dp_shard": 2, "ep": 2}, folder / "store", range(4, 6))
    for versions in (range(4), range(4, 6)):
        published(folder, "mixture", {}, folder / "alone", versions)
    heads = [Head.decode(FolderStore(folder / name).latest()) for name in ("store", "alone")]
    assert heads[0].chain == heads[1].chain


def test_large_tensors_are_spread_over_the_ranks_that_hold_them():
    tensors = [("a", "BF16", (600,)), ("b", "BF16", (400,)), ("c", "F32", (300,)), ("d", "BF16", (299,))]
    listing = listing_from(tensors, {})
    every = {name: range(3) for name, _, _ in tensors}
    assert spread(listing, every, 3) == {"a": 0, "b": 1, "c": 2}
    assert spread(listing, {**every, "c": [1]}, 3) == {"a": 0, "b": 1, "c": 1}
