"""`trainer.offload`: peak memory, time of an update and of a step, and bytes over what PCIe carries; bits compared.

A random dense model trains in bfloat16 on the same sequences with trainer.offload none, moments and masters, one
after the other, each in a process of its own for all numbers of tokens. What an update takes longer is set beside the
bytes that it streams over the bandwidth measured here, both ways at once; the aim is 1: nothing but the bytes. Each
line is recorded when it is known.

    python benchmarks/offload.py [--shape 4b] [--layers 24] [--tokens 16384 131072] [--seconds 240]   # a GPU
    python benchmarks/offload.py --shape tiny --tokens 512 1024 --no-write      # a CPU: the bits and the counts

The first step of a process warms up and does not count. Larger batches are more micro-batches of the same size, so
their first step counts. Weights, masters, moments and the sums of gradients of n micro-batches take 14 + 4 log2(n)
bytes for each number without offload, at most: 24 layers of the 4b shape fit on a GPU of 80 GB, all 36 do not.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from children import tell, told
from results_schema import Figure, need_gpus, report, table

SETTINGS, MICRO_BATCH, GIB = ("none", "moments", "masters"), 16384, 1 << 30
SHAPES = {  # hidden, intermediate, layers, heads, kv heads, head dim, vocabulary
    "tiny": (64, 128, 3, 4, 2, 16, 512),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
}


class Run(NamedTuple):
    """Measured under one setting at one number of tokens."""

    device: str
    digest: str  # of the weights after all steps
    step: float  # seconds, the least of the steps that count
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


def digest_of(trainer: Any) -> str:
    """SHA-256 of all weights: of those of each, which threads compute."""
    import torch

    def one(weight: Any) -> bytes:
        return hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()

    with ThreadPoolExecutor(16) as pool:
        return hashlib.sha256(b"".join(pool.map(one, [weight for _, weight in trainer.compute_copy()]))).hexdigest()


def measure(shape: str, layers: int | None, counts: list[int], setting: str, steps: list[int]) -> None:
    """Tell a `Run` of each number of tokens. In a process of its own."""
    began = time.perf_counter()
    import rlloop  # noqa: F401  # before torch, as `rlloop train` does  # isort: skip
    import torch
    from gpu_shapes import random_model

    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")

    def now() -> float:
        if gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def say(what: str) -> None:
        print(f"{now() - began:6.1f} s  {setting}: {what}", file=sys.stderr, flush=True)

    say("imported")
    model = random_model(config(shape, layers), device.type)
    say(f"a model of {sum(each.numel() for each in model.parameters()) / 1e9:.2f}e9 numbers")
    settings = TrainerConfig(lr=1e-4, max_batch_tokens=MICRO_BATCH, checkpoint_layers="all", offload=setting)
    trainer, vocab = Trainer(model, settings), model.config.vocab_size
    say("a trainer")
    speed = bandwidth(device, 256 << 20 if gpu else 1 << 20)
    for index, tokens in enumerate(counts):
        rng, length = np.random.default_rng(0), min(tokens, MICRO_BATCH)
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
        peak, moved = 0.0, 0.0
        if gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            for _ in range(steps[min(index, len(steps) - 1)]):
                start = now()
                trainer.forward_backward(batch, get_loss("grpo"))
                middle = now()
                metrics = trainer.optim_step()  # begins the peak of memory anew, too
                end = now()
                times.append((end - start, end - middle))
                peak = max(peak, metrics.get("memory/device_peak_bytes", 0.0))
                moved = metrics.get("memory/streamed_bytes", 0.0)
                say(f"{tokens} tokens: a step in {end - start:.2f} s, its update in {end - middle:.2f} s")
        except torch.OutOfMemoryError as error:
            say(f"{tokens} tokens: out of memory: {str(error).splitlines()[0]}")
            tell(tokens=tokens, outgrown=True)
            return
        counted = times[1:] if index == 0 and len(times) > 1 else times
        tell(
            tokens=tokens,
            run=Run(
                device=torch.cuda.get_device_name(device) if gpu else "CPU",
                digest=digest_of(trainer),
                step=min(step for step, _ in counted),
                update=min(update for _, update in counted),
                peak=peak,
                moved=moved,
                bandwidth=speed,
            )._asdict(),
        )
        say("digest of the weights")


def figures_of(name: str, setting: str, run: Run, none: Run | None, peer: str) -> list[Figure]:
    """Figures of one setting at one number of tokens; `none`: that without offload. `name`: of shape and tokens."""
    of = f"{name}, {setting}"
    known: dict[str, Any] = {"lower_is_better": True}
    beside: dict[str, Any] = known if setting == "none" else {**known, "peer": peer}
    before = None if none is None else none.step
    figures = [Figure(name=f"step, {of}", unit="s", value=run.step, peer_value=before, **beside)]
    if run.peak:
        figures.append(
            Figure(
                name=f"peak memory, {of}", unit="GiB", value=run.peak / GIB,
                peer_value=None if none is None else none.peak / GIB, aim=None if setting == "none" else 1 / 0.6,
                **beside,
            )
        )  # fmt: skip
    if none is not None:
        figures.append(
            Figure(
                name=f"update longer by, {of}", unit="s", value=max(run.update - none.update, 1e-9),
                peer=f"{run.moved / GIB:.2f} GiB over PCIe", peer_kind="over PCIe",
                peer_value=run.moved / run.bandwidth, aim=1.0, **known,
            )
        )  # fmt: skip
    return figures


def compared(given: argparse.Namespace) -> Iterator[tuple[str, list[Figure]]]:
    """(device, figures) of each setting and number of tokens. Raises `SystemExit` where weights differ."""
    deadline, runs = time.monotonic() + given.seconds, dict[int, dict[str, Run | None]]()
    for setting in SETTINGS:
        if (left := deadline - time.monotonic()) <= 0:
            print(f"no time for {setting}", file=sys.stderr, flush=True)
            continue
        command = [sys.executable, __file__, "--child", setting, *sys.argv[1:]]
        try:
            for made in told(command, left):
                tokens = made["tokens"]
                run = None if made.get("outgrown") else Run(**made["run"])
                before = runs.setdefault(tokens, {})
                first = next(((other, each) for other, each in before.items() if each is not None), None)
                before[setting] = run
                if run is None:
                    continue
                cut = f" ({given.layers} layers)" if given.layers else ""
                name = f"{given.shape}{cut}, {tokens} tokens"
                if first is not None and first[1].digest != run.digest:
                    raise SystemExit(f"{name}: the weights with {setting} differ from those with {first[0]}")
                alone = setting == "none" or "none" not in before
                peer = "none: out of memory" if not alone and before["none"] is None else "none"
                none = None if alone else before["none"]
                yield run.device, figures_of(name, setting, run, none, peer)
        except subprocess.CalledProcessError as error:
            print(f"{setting}: ended with code {error.returncode}; see above", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a GPU that it does not fit")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 131072], help="of a step")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 1], help="of each number of tokens")
    parser.add_argument("--seconds", type=float, default=1800.0, help="end after them, with what is known")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--child", choices=SETTINGS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        measure(given.shape, given.layers, given.tokens, given.child, given.steps)
        return
    if given.shape != "tiny":
        need_gpus(instead="--shape tiny --tokens 512 1024 --no-write runs on a CPU")
    every: list[Figure] = []
    for device, figures in compared(given):
        every += figures
        report("offload", figures, device=None if device == "CPU" else device, part=True, write=not given.no_write)
    if not every:
        raise SystemExit("nothing was measured; see above")
    print(f"\nall of it:\n{table(every)}", flush=True)


if __name__ == "__main__":
    main()
