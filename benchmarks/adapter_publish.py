"""Seconds from an adapter's update until an engine samples with it: in one process, and to a replica as a delta.

An adapter of rank 32 over all linear layers of a random dense model takes a step of AdamW; then
- in process: its masters are rounded into the compute copy, which the engine reads (`publish`), and the engine forgets
  what it cached;
- to a replica with weights of its own: the change is encoded, checked and written into the live factors; no file, no
  export. Beside it the whole model's bytes.

    python benchmarks/adapter_publish.py [--shape 0.6b] [--rank 32]
"""

from __future__ import annotations

import argparse
import time

import rlloop  # before torch, as `rlloop train` does  # isort: skip
import numpy as np
import torch
from offload import SHAPES, config
from results_schema import Figure, report

from rlloop.algorithms import get_loss
from rlloop.config.model import LoraSection
from rlloop.config.trainer import TrainerConfig
from rlloop.launch.make import with_lora
from rlloop.models import Model, new_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.sync.bundle import BundlePublisher, BundleReplica
from rlloop.sync.live import LiveTarget, named_weights, tensors_of
from rlloop.trainer import Trainer, TrainSequence

MIB = 1 << 20


def step(trainer: Trainer, seed: int) -> None:
    """An update that moves every number."""
    rng, vocab = np.random.default_rng(seed), trainer.model.config.vocab_size
    batch = [
        TrainSequence(
            token_ids=rng.integers(1, vocab, 16).tolist(), predict=range(8, 16),
            advantages=np.full(8, rng.normal(), np.float32), rollout_logprobs=np.full(8, -np.log(vocab), np.float32),
        )
    ]  # fmt: skip
    trainer.forward_backward(batch, get_loss("grpo"))
    trainer.optim_step()


def measure(shape: str, rank: int, rounds: int) -> list[Figure]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def model() -> Model:
        made = new_model(config(shape), seed=0, dtype="bfloat16", context=join(device, Layout()))
        return with_lora(made, LoraSection(rank=rank), 0)

    trained = model()
    served = with_lora(trained.with_adapter(None), LoraSection(rank=rank), 0)  # the frozen base is shared
    engine, replica = (rlloop.Engine(each, max_cache_tokens=256) for each in (trained, served))
    trainer = Trainer(trained, TrainerConfig(lr=1e-4))
    threads = torch.get_num_threads()
    publisher, sizes = BundlePublisher("here", threads), []
    follower = BundleReplica(LiveTarget(named_weights(served).items(), replica.set_version), threads)
    live, sent = list[float](), list[float]()
    for version in range(rounds + 2):  # the first is whole, the second warms up
        began = time.perf_counter()
        trainer._masters.publish()  # again what optim_step has done: the same work
        engine.set_version(version)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        middle = time.perf_counter()
        tensors, aliases = tensors_of(named_weights(trained).items())
        bundle = publisher.publish(tensors, version, aliases)
        follower.apply(bundle)
        ended = time.perf_counter()
        sizes.append(bundle.metrics["sync/wire_bytes"])
        live.append(middle - began)
        sent.append(ended - middle)
        step(trainer, version)
    base = sum(each.numel() * each.element_size() for each in trained.with_adapter(None).parameters())
    own = sum(each.nbytes for each in named_weights(trained).values())
    name = f"{shape}, rank {rank}"
    return [
        Figure(name=f"publish in process, {name}", unit="ms", value=1e3 * float(np.median(live[2:]))),
        Figure(name=f"publish to a replica, {name}", unit="ms", value=1e3 * float(np.median(sent[2:]))),
        Figure(
            name=f"bytes of a version, {name}", unit="MiB", value=float(np.median(sizes[2:])) / MIB,
            peer=f"adapter {own / MIB:.1f} MiB; all weights", peer_value=base / MIB, lower_is_better=True,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    figures = measure(given.shape, given.rank, given.rounds)
    report("adapter-publish", figures, write=not given.no_write)


if __name__ == "__main__":
    main()
