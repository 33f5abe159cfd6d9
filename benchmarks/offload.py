"""`trainer.offload`: peak memory, time of an update and of a step, and bytes over what PCIe carries; bits compared.

A random dense model trains in bfloat16 on the same sequences with trainer.offload none, moments and masters, one
after the other, each in a process of its own. What an update takes longer is set beside the bytes that it streams over
the bandwidth measured here, both ways at once; the aim is 1: nothing but the bytes.

    python benchmarks/offload.py [--shape 4b] [--layers 36] [--tokens 16384 131072]   # a GPU
    python benchmarks/offload.py --shape tiny --tokens 512 --no-write      # a CPU: the bits and the counts
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from results_schema import Figure, report, table

SETTINGS, MICRO_BATCH, GIB = ("none", "moments", "masters"), 16384, 1 << 30
SHAPES = {  # hidden, intermediate, layers, heads, kv heads, head dim, vocabulary
    "tiny": (64, 128, 3, 4, 2, 16, 512),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
}


class Run(NamedTuple):
    """Measured under one setting."""

    device: str
    digest: str  # of the weights after all steps
    step: float  # seconds, the least of all steps after the first
    update: float  # seconds of optim_step, likewise
    peak: float  # bytes on the device
    moved: float  # bytes that an update streamed
    bandwidth: float  # bytes a second, there and back at once


def config(shape: str, layers: int | None = None) -> dict[str, Any]:
    hidden, intermediate, depth, heads, kv_heads, head_dim, vocab = SHAPES[shape]
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers or depth, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": MICRO_BATCH,
        "tie_word_embeddings": shape in ("tiny", "0.6b", "4b"), "initializer_range": 0.02, "eos_token_id": 0,
    }  # fmt: skip


def bandwidth(device: Any, size: int) -> float:
    """Bytes a second between pinned host memory and the device, both ways at once; of a CPU, of copies in memory."""
    import torch

    from rlloop.trainer.offload import HostMemory

    home = HostMemory(2 * size, device)
    like = torch.empty(size, dtype=torch.uint8, device="meta")
    hosts = [home.zeros_like(like) for _ in range(2)]
    here = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        if device.type == "cuda":
            there, back = torch.cuda.Stream(device), torch.cuda.Stream(device)
            with torch.cuda.stream(there):
                here[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(back):
                hosts[1].copy_(here[1], non_blocking=True)
            torch.cuda.synchronize(device)
        else:
            here[0].copy_(hosts[0])
            hosts[1].copy_(here[1])
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def run(shape: str, layers: int | None, tokens: int, setting: str, steps: int) -> Run:
    import rlloop  # noqa: F401  # before torch, as `rlloop train` does  # isort: skip
    import torch
    from gpu_shapes import random_model

    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    model = random_model(config(shape, layers), device.type)
    settings = TrainerConfig(lr=1e-4, max_batch_tokens=MICRO_BATCH, checkpoint_layers="all", offload=setting)
    trainer, rng, length = Trainer(model, settings), np.random.default_rng(0), min(tokens, MICRO_BATCH)
    vocab = model.config.vocab_size
    batch = [
        TrainSequence(
            token_ids=rng.integers(1, vocab, length).tolist(),
            predict=range(1, length),
            advantages=np.full(length - 1, rng.normal(), np.float32),
            rollout_logprobs=np.full(length - 1, -np.log(vocab), np.float32),
        )
        for _ in range(max(1, tokens // length))
    ]
    times: list[tuple[float, float]] = []
    metrics: dict[str, float] = {}
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    peak = 0.0
    for _ in range(steps):
        began = time.perf_counter()
        trainer.forward_backward(batch, get_loss("grpo"))
        if gpu:
            torch.cuda.synchronize(device)
        middle = time.perf_counter()
        metrics = trainer.optim_step()
        if gpu:
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        times.append((ended - began, ended - middle))
        peak = max(peak, metrics.get("memory/device_peak_bytes", 0.0))
    digest = hashlib.sha256()
    for _, weight in trainer.compute_copy():
        digest.update(weight.cpu().view(torch.uint8).numpy().tobytes())
    return Run(
        device=torch.cuda.get_device_name(device) if gpu else "CPU",
        digest=digest.hexdigest(),
        step=min(step for step, _ in times[1:]),
        update=min(update for _, update in times[1:]),
        peak=peak,
        moved=metrics.get("memory/streamed_bytes", 0.0),
        bandwidth=bandwidth(device, 256 << 20 if gpu else 1 << 20),
    )


def compared(shape: str, layers: int | None, tokens: int, steps: int) -> list[Figure]:
    """Each setting in a new process. Raises `SystemExit` where weights differ."""
    runs: dict[str, Run] = {}
    for setting in SETTINGS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            runs[setting] = pool.submit(run, shape, layers, tokens, setting, steps).result()
    none, figures = runs["none"], []
    for setting in SETTINGS[1:]:
        cut = f" ({layers} layers)" if layers else ""
        each, name = runs[setting], f"{shape}{cut}, {tokens} tokens, {setting}"
        if each.digest != none.digest:
            raise SystemExit(f"{name}: the weights differ from those without offload")
        if none.peak:
            figures.append(
                Figure(
                    name=f"peak memory, {name}", unit="GiB", value=each.peak / GIB, peer="none",
                    peer_value=none.peak / GIB, lower_is_better=True, aim=1 / 0.6,
                )
            )  # fmt: skip
        longer = max(each.update - none.update, 1e-9)
        figures += [
            Figure(
                name=f"step, {name}", unit="s", value=each.step, peer="none", peer_value=none.step, lower_is_better=True
            ),
            Figure(
                name=f"update longer by, {name}", unit="s", value=longer, peer=f"{each.moved / GIB:.2f} GiB over PCIe",
                peer_value=each.moved / each.bandwidth, lower_is_better=True, aim=1.0,
            ),
        ]  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a GPU that it does not fit")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 131072], help="of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    figures = [each for tokens in given.tokens for each in compared(given.shape, given.layers, tokens, given.steps)]
    if given.no_write:
        print(table(figures))
    else:
        report("offload", figures)


if __name__ == "__main__":
    main()
