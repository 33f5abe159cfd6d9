"""The worker of several ranks publishes: rank 0 encodes, and the others' engines have the weights in place."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.workers import Colocated
from rlloop.models import load_model
from rlloop.models.parameters import ParameterStore
from rlloop.parallel.start import Place
from rlloop.sync.bundle import BundleReplica
from rlloop.sync.live import LiveTarget, named_weights
from tests.support.command import forks
from tests.support.tiny_run import make_model

SIZE = 2


def published(place: Path, rank: int) -> tuple[list[bool], int, bool]:
    """Which bundles a rank has, its engine's version, and if a replica that takes them has the rank's weights."""
    config = build(compose_recipe("countdown", ["trainer.layout.dp_shard=2", "launch=ray", "ray.replicas=1"]))
    worker = Colocated(config, str(place / "model"), 1, Place(rank, SIZE, f"file://{place / 'meeting'}"))
    try:
        first = worker.call("publish", 0)
        for _, tensor in sorted(ParameterStore(worker.model).tensors().items()):
            tensor.mul_(2)
        second, whole = worker.call("publish", 1), worker.call("joining")
        encoded = worker._publisher._publisher.head is not None
        assert encoded == (rank == 0), "only rank 0 encodes"
        assert bool(worker.published()) == encoded
        replica, versions = load_model(place / "model"), list[int]()
        sync = BundleReplica(LiveTarget(named_weights(replica).items(), versions.append))
        for bundle in (first, second) if rank == 0 else ():
            sync.apply(bundle)
        same = all(torch.equal(*pair) for pair in zip(replica.parameters(), worker.model.parameters(), strict=True))
        return [each is not None for each in (first, second, whole)], worker.engine.policy_version, same
    finally:
        worker.close()


@pytest.mark.slow
def test_rank_0_alone_encodes_what_all_ranks_publish(tmp_path):
    make_model(tmp_path)
    with ProcessPoolExecutor(SIZE, forks()) as pool:
        ranks = [pool.submit(published, tmp_path, rank) for rank in range(SIZE)]
        assert [rank.result(120) for rank in ranks] == [([True] * 3, 1, True), ([False] * 3, 1, False)]
