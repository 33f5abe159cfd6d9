"""Weight sync of a model of Qwen3-8B's shape: encode and publish, apply and verify, on the GPU and on the host's cores.

    python benchmarks/gpu_delta.py [--layers 36] [--rounds 3] [--only device|host|step] [--sequences 128]
    python benchmarks/gpu_delta.py --tiny      # a toy's `step` on a CPU

Weights are drawn on the device (normal, 0.02); a version is an update of lr 1e-6 by numbers such as Adam's, rounded to
bfloat16, and versions go back and forth between two states. The store is a folder in shared memory. `device`: the
publisher's and the replica's weights lie on the GPU. `host`: both in the host's memory, on all its processors. A
publication ends when the head has moved, an application when the weights are served; the pause is its part without
requests. Medians; the first round, in which kernels are compiled, is not counted. The whole version that starts each
store, encoded and stored, is timed as well.

`step`: what a publication takes from a trainer's step. A whole trainer (float32 masters, moments in the host's memory,
all layers checkpointed) takes steps of `--sequences` of 128 + 384 tokens, in micro-batches of at most 65,536 tokens,
which end when the device is done: without publishing, with the last version published from the GPU while gradients are
computed (`fleet.max_version_lag=1`), and with it published first. The three take turns; the first is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from results_schema import Figure, need_gpus, report, table

from rlloop.sync.bits import Bits, processors
from rlloop.sync.live import LiveTarget, device_tensors_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.store import FolderStore
from rlloop.sync.target import MemoryTarget

HIDDEN, INNER, QUERIES, KEYS, VOCABULARY = 4096, 12288, 4096, 1024, 151936
PARTS = ("diff", "encode", "upload", "fetch", "stage", "verify", "drain", "pause")


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "self_attn.q_proj.weight", (QUERIES, HIDDEN)
        yield at + "self_attn.k_proj.weight", (KEYS, HIDDEN)
        yield at + "self_attn.v_proj.weight", (KEYS, HIDDEN)
        yield at + "self_attn.o_proj.weight", (HIDDEN, QUERIES)
        yield at + "mlp.gate_proj.weight", (INNER, HIDDEN)
        yield at + "mlp.up_proj.weight", (INNER, HIDDEN)
        yield at + "mlp.down_proj.weight", (HIDDEN, INNER)
        yield at + "input_layernorm.weight", (HIDDEN,)
        yield at + "post_attention_layernorm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def draw(layers: int, lr: float) -> list[dict[str, torch.Tensor]]:
    """Two versions of the weights."""
    generator = torch.Generator("cuda").manual_seed(0)
    before, after = {}, {}
    for name, shape in shapes(layers):
        master = torch.randn(shape, device="cuda", generator=generator) * 0.02
        update = (0.35 * torch.randn(shape, device="cuda", generator=generator)).clamp_(-1, 1)
        before[name], after[name] = master.bfloat16(), (master - lr * update).bfloat16()
    return [before, after]


def shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def measured(versions: list, target, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each part, and figures of the whole version. `versions`: two states, of which `target` has the
    first."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        key = Ed25519PrivateKey.generate()
        publisher = Publisher(FolderStore(folder), key, "run")
        replica = Replica(FolderStore(folder), key.public_key(), target)
        began = time.perf_counter()
        first = publisher.publish(versions[0], 0).metrics
        whole = {"seconds": time.perf_counter() - began, "ratio": first["sync/ratio"]}
        assert replica.poll(), replica.error
        parts: dict[str, list[float]] = {}
        for step in range(1, rounds + 2):
            began = time.perf_counter()
            published = publisher.publish(versions[step % 2], step).metrics
            published_at = time.perf_counter()
            assert replica.poll(), replica.error
            applied_at = time.perf_counter()
            if step == 1:
                continue
            metrics = {**published, **replica.metrics}
            for part in PARTS:
                parts.setdefault(part, []).append(metrics[f"sync/{part}_seconds"])
            parts.setdefault("publish", []).append(published_at - began)
            parts.setdefault("apply", []).append(applied_at - published_at)
            parts.setdefault("changed", []).append(metrics["sync/changed"])
            parts.setdefault("ratio", []).append(metrics["sync/ratio"])
        return {part: statistics.median(taken) for part, taken in parts.items()}, whole


def stepped(layers: int, rounds: int, sequences: int, device: str) -> list[Figure]:
    """Seconds of a trainer's step without publishing, and with it."""
    from gpu_shapes import SHAPES, TINY, random_model

    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.launch.regions import RegionSync, beside_the_trainer
    from rlloop.trainer import Trainer, TrainSequence

    small = device == "cpu"
    config = {**(TINY if small else SHAPES["8B"])[1], "num_hidden_layers": layers}
    model = random_model(config, device)
    count, prompt, new = (4, 8, 24) if small else (sequences, 128, 384)
    settings = TrainerConfig(
        lr=1e-6, max_batch_tokens=min(65536, count * (prompt + new)), checkpoint_layers="all",
        offload="none" if small else "moments",
    )  # fmt: skip
    trainer, generator = Trainer(model, settings), np.random.default_rng(0)
    batch = [
        TrainSequence(
            token_ids=generator.integers(3, config["vocab_size"] - 3, prompt + new).tolist(),
            predict=range(prompt, prompt + new),
            advantages=np.full(new, advantage, np.float32),
            rollout_logprobs=np.full(new, -np.log(config["vocab_size"]), np.float32),
        )
        for advantage in generator.normal(size=count)
    ]
    ways = ("without publishing", "published beside it", "published first")
    taken: dict[str, list[float]] = {way: [] for way in ways}
    published = list[float]()

    class Live:
        def serve_version(self, version: int, canary: None) -> dict[str, float]:
            return {}

    class NoCanary:
        def canary(self, version: int) -> None:
            return None

    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder, ThreadPoolExecutor(1) as thread:
        publisher = Publisher(FolderStore(folder), Ed25519PrivateKey.generate(), "run", anchor_every=1000)
        engine: Any = Live()
        reference: Any = NoCanary()
        begin = beside_the_trainer(model, publisher, on_device=True)
        sync = RegionSync(begin, publisher.anchor, engine, reference, thread)
        version = 0
        sync.publish(version).result()
        for turn in range(rounds + 1):
            for way in ways:
                synchronize(device)
                began = time.perf_counter()
                future = None if way == ways[0] else sync.publish(version := version + 1)
                if future is not None and way == ways[2]:
                    published.append(future.result()["sync/publish_seconds"])
                trainer.forward_backward(batch, get_loss("grpo"))
                computed = time.perf_counter() - began
                if future is not None:
                    inner = future.result()["sync/publish_seconds"]
                    print(f"  published in {inner:.2f} s; gradients {computed:.2f}", file=sys.stderr)
                trainer.optim_step()
                synchronize(device)
                if turn:
                    taken[way].append(time.perf_counter() - began)
                print(f"  {way}: {time.perf_counter() - began:.3f} s", file=sys.stderr, flush=True)
    name = f"step of a Qwen3-8B shape, {layers} layers, {count} x ({prompt} + {new}), {settings.offload} offloaded"
    aims = {ways[1]: 1 / 1.01, ways[2]: None}
    return [
        *(
            Figure.of_rounds(f"{name}, {way}", "s", taken[way], ways[0], taken[ways[0]], lower_is_better=True, aim=aim)
            for way, aim in aims.items()
        ),
        Figure.of_rounds(f"{name}, a publication", "s", published[1:], lower_is_better=True),
    ]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--sequences", type=int, default=128, help="in a step of `step`, of 512 tokens each")
    parser.add_argument("--only", choices=["device", "host", "step"])
    parser.add_argument("--tiny", action="store_true", help="`step` of a toy on a CPU, nothing recorded")
    args = parser.parse_args()
    if args.tiny:
        print(table(stepped(2, args.rounds, args.sequences, "cpu")))
        return
    need_gpus(instead="--tiny runs a toy on a CPU")
    figures = []
    if args.only in (None, "step"):
        figures += stepped(args.layers, args.rounds, args.sequences, "cuda")
    if args.only != "step":
        figures += versions_measured(args.layers, args.lr, args.rounds, args.only)
    device = f"{torch.cuda.get_device_name()}, {processors()} processors"
    report("gpu-delta", figures, packages=("triton",), device=device)


def versions_measured(layers: int, lr: float, rounds: int, only: str | None) -> list[Figure]:
    """Publications and applications of an update, from the device and from the host."""
    versions = draw(layers, lr)
    size = sum(tensor.nbytes for tensor in versions[0].values())
    figures = []
    for where, aims in (("device", (2.0, 1.0, 0.02)), ("host", (6.0, None, None))):
        if only not in (None, where):
            continue
        began = time.perf_counter()
        if where == "device":
            states = [device_tensors_of(version.items())[0] for version in versions]
            served = {name: tensor.clone() for name, tensor in versions[0].items()}
            target = LiveTarget(served.items(), lambda version: None)
        else:
            states = [
                {
                    name: Bits("BF16", tensor.view(torch.int16).cpu().numpy().view("<u2"))
                    for name, tensor in each.items()
                }
                for each in versions
            ]
            target = MemoryTarget({name: bits.copy() for name, bits in states[0].items()})
        parts, whole = measured(states, target, rounds)
        del states, target
        name = f"{where}, {size / 1e9:.1f} GB of bfloat16, lr {lr:g}, {100 * parts['changed']:.2g}% changed"
        print(f"{name}: {time.perf_counter() - began:.0f} s in all; ratio {parts['ratio']:.0f}", file=sys.stderr)
        print("  " + ", ".join(f"{part} {parts[part]:.3f}" for part in PARTS), file=sys.stderr, flush=True)
        for part, aim in zip(("publish", "apply", "pause"), aims, strict=True):
            figures.append(
                Figure(name=f"{name}: {part}", unit="s", value=parts[part], lower_is_better=True,
                       peer=None if aim is None else "the aim", peer_value=aim, aim=None if aim is None else 1.0)
            )  # fmt: skip
        figures += [
            Figure(name=f"{name}: full bytes by wire bytes", unit="x", value=parts["ratio"]),
            Figure(name=f"{name}: a whole version, encoded and stored", unit="s", value=whole["seconds"],
                   lower_is_better=True),
            Figure(name=f"{name}: a whole version, full bytes by wire bytes", unit="x", value=whole["ratio"]),
        ]  # fmt: skip
    return figures


if __name__ == "__main__":
    main()
