"""Encoding of versions by several ranks of a host, each its share, beside one rank that encodes all.

    python benchmarks/ranks_publish.py [--ranks 1 2 4] [--layers 36] [--rounds 5] [--device cuda|cpu] [--record]

Weights of Qwen3-8B's shape, whole on each rank as under `dp_shard`, of which each draws what it encodes; an update of
lr 1e-6, rounded to bfloat16, back and forth (`gpu_delta.py`). A rank has a GPU of its own (or the host's memory,
`--device cpu`) and an equal part of the processors. A publication ends when the head has moved and every rank has
adopted the version. Each number of ranks has processes of its own, one after the other, and all store the same bytes.
`--inner` narrows the model, for machines that are small.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpu_delta import shapes, shared_memory
from results_schema import Figure, need_gpus, report

from rlloop.parallel.collectives import Ranks
from rlloop.sync.bits import processors
from rlloop.sync.live import device_tensors_of, tensors_of
from rlloop.sync.packing import is_joined, listing_from
from rlloop.sync.published import PublishedState
from rlloop.sync.publisher import Publisher
from rlloop.sync.shares import Shares, spread
from rlloop.sync.store import FolderStore

LR = 1e-6
LIMIT = 540  # seconds for the ranks of one number, start and first round included


def versions(shares: Shares, device: torch.device) -> list[dict[str, Any]]:
    """This rank's tensors of two versions; a tensor is drawn alike on every rank."""
    both: list[dict[str, torch.Tensor]] = [{}, {}]
    for index, (name, _, shape) in enumerate(shares.listing.tensors):
        if shares.owners.get(name, shares.ranks.rank) != shares.ranks.rank:
            continue
        generator = torch.Generator(device).manual_seed(index)
        master = torch.randn(shape, device=device, generator=generator) * 0.02
        update = (0.35 * torch.randn(shape, device=device, generator=generator)).clamp_(-1, 1)
        both[0][name], both[1][name] = master.bfloat16(), (master - LR * update).bfloat16()
    named = device_tensors_of if device.type == "cuda" else tensors_of
    return [named(each.items())[0] for each in both]


def measured(rank: int, size: int, meeting: str, store: str, settings: argparse.Namespace, results: Any) -> None:
    """A rank's publications. The first rank puts (seconds of each round, seconds of the whole version, its root)."""
    from rlloop.parallel.start import Place, process_group

    device = Place(rank, size, meeting, rank).device(settings.device)
    threads = max(1, processors() // size)
    torch.set_num_threads(threads)
    with process_group(device, meeting, rank, size):
        kinds = [(name, "BF16", narrowed(shape, settings.inner)) for name, shape in shapes(settings.layers)]
        listing = listing_from(kinds, {})
        owners = spread(listing, {name: range(size) for name, _, shape in kinds if not is_joined(shape)}, size)
        shares = Shares(Ranks(size, rank, torch.distributed.group.WORLD), listing, owners)
        states, state = versions(shares, device), PublishedState(threads)
        key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
        publisher = Publisher(FolderStore(store), key, "run", threads=threads) if rank == 0 else None
        seconds, manifests = list[float](), list[bytes]()
        for step in range(settings.rounds + 2):
            tensors = states[step % 2]
            shares.ranks.gather_objects(rank)
            began = time.perf_counter()

            def publish(tensors: Any = tensors, step: int = step) -> bytes:
                assert publisher is not None
                return publisher.publish(tensors, step, shares=shares).hash

            made = shares.lead(state, tensors, publish)
            seconds.append(time.perf_counter() - began)
            manifests.append(made or b"")
        if rank == 0:
            results.put((seconds[2:], seconds[0], manifests))  # the second, in which kernels are compiled, is left out


def narrowed(shape: Sequence[int], inner: int | None) -> tuple[int, ...]:
    return tuple(side if inner is None else min(side, inner) for side in shape)


def published(size: int, settings: argparse.Namespace) -> tuple[list[float], float, list[bytes]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        results, meeting = context.Queue(), f"file://{Path(folder) / 'meeting'}"
        common = size, meeting, f"{folder}/store", settings, results
        ranks = [context.Process(target=measured, args=(rank, *common), daemon=True) for rank in range(size)]
        for rank in ranks:
            rank.start()
        try:
            return results.get(timeout=LIMIT)
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--inner", type=int, help="limit of a tensor's sides")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/ranks-publish.json")
    settings = parser.parse_args()
    if settings.device == "cuda":
        need_gpus(max(settings.ranks), "--device cpu --layers 2 runs on a CPU")
    found = {size: published(size, settings) for size in settings.ranks}
    first = settings.ranks[0]
    if any(manifests != found[first][2] for _, _, manifests in found.values()):
        sys.exit("stores differ between numbers of ranks")
    figures = [
        Figure.of_rounds(
            f"a version published by {size} ranks, whole one {whole:.2f} s", "s", rounds, f"{first} ranks",
            found[first][0], lower_is_better=True,
        )
        for size, (rounds, whole, _) in found.items()
    ]  # fmt: skip
    report("ranks-publish", figures, part=False, write=settings.record)
    for size, (rounds, _, _) in found.items():
        low, high = min(rounds), max(rounds)
        print(f"{size} ranks: {low:.3f} / {sorted(rounds)[len(rounds) // 2]:.3f} / {high:.3f} s, same manifests")


if __name__ == "__main__":
    main()
