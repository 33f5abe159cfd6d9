"""What a weight sync weighs and costs, on consecutive checkpoints of RL runs, beside XOR + zstd-1.

    python benchmarks/delta.py sizes            # runs of three models at three learning rates; their deltas
    python benchmarks/delta.py speed            # encoding and applying, one core; publication to a live replica
    python benchmarks/delta.py sizes --models demo --lrs 1e-5

Models: `demo`, the countdown recipe's, warm-started; `dense` and `mixture`, a Qwen3 and a Qwen3-MoE of some million
weights from random initialisation, whose reward (how many of a completion's tokens are numbers) has signal from the
first step. All of them train on countdown's prompts in bfloat16 with float32 masters; each step's checkpoint holds the
masters, and what is synced is their rounding. The last `--pairs` steps are measured, when Adam's averages have filled.
`speed` takes the runs that `sizes` left.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from results_schema import Figure, report

from rlloop.cli.delta_size import Sizes, compare, describe, version_bytes
from rlloop.models import new_model, save_model
from rlloop.sync import codec
from rlloop.sync.bits import Bits
from rlloop.sync.folder import read_folder
from rlloop.sync.live import bits_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.store import FolderStore
from rlloop.sync.target import MemoryTarget

LRS = ("1e-6", "1e-5", "3e-4")
BASE = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "eos_token_id": 1, "initializer_range": 0.02, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **BASE},
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **BASE, "num_experts": 16,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "num_hidden_layers": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
REWARD = """
def reward(prompt, completion, example):
    words = completion.split()
    return sum(word.isdigit() for word in words) / max(1, len(words))
"""


def train(work: Path, model: str, lr: str, steps: int, pairs: int) -> Path:
    """A run's folder, with a checkpoint of each of its last steps; a finished one is taken as it is."""
    folder = work / f"{model}-lr{lr}"
    command = [sys.executable, "-m", "rlloop", "train", "--config-name", "countdown", f"run.dir={folder}"]
    command += ["model.dtype=bfloat16", f"trainer.lr={lr}", f"trainer.num_steps={steps}", "checkpoint.every=1"]
    command += [f"checkpoint.keep={pairs + 1}", "eval.num_draws=8", "eval.every=0"]
    if model != "demo":
        if not (work / model).exists():
            save_model(new_model(CONFIGS[model], 0, dtype="bfloat16"), work / model)
            (work / "numbers_reward.py").write_text(REWARD)
        command += [f"model.path={work / model}", "reward._target_=numbers_reward.reward"]
        command += ["rollout.num_prompts=8", "rollout.group_size=8"]
    subprocess.run(command, check=True, cwd=work)
    return folder


def checkpoints(run: Path) -> list[dict[str, Bits]]:
    """The weights that engines had after each of the last steps, in bfloat16."""
    folders = sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    states = []
    for folder in folders:
        masters = read_folder(folder)
        states.append(
            {
                name: bits_of(torch.from_numpy(bits.array.view(np.float32).copy()).bfloat16())
                for name, bits in masters.items()
            }
        )
    return states


def sizes(work: Path, models: list[str], lrs: list[str], steps: int, pairs: int) -> list[Figure]:
    figures = []
    for model in models:
        for lr in lrs:
            states = checkpoints(train(work, model, lr, steps, pairs))
            total, stream, manifests = Sizes(), 0, 0
            for old, new in itertools.pairwise(states):
                for _, found in compare(old, new):
                    total += found
                encoded, manifest = version_bytes(old, new)
                stream, manifests = stream + encoded, manifests + manifest
            weights = sum(bits.array.size for bits in states[0].values())
            name = f"delta of {model} ({weights:,} weights), lr {lr}"
            print("\n".join([name, *describe(total, stream, manifests), ""]), flush=True)
            share = f", {100 * total.changed / total.elements:.3g}% changed"
            figures += [
                Figure(name=f"{name}{share}: full bytes by wire bytes, manifest included", unit="x",
                       value=total.full / (stream + manifests), peer="XOR + zstd-1 (without a manifest)",
                       peer_value=total.full / total.xor, aim=2.0 if float(lr) <= 1e-5 else None),
                Figure(name=f"{name}: full bytes by wire bytes, beside index and value", unit="x",
                       value=total.full / (stream + manifests), peer="index + value, 4 and 2 bytes a change",
                       peer_value=total.full / total.index_value),
                Figure(name=f"{name}: full bytes by the encoded tensors'", unit="x", value=total.full / stream,
                       peer="entropy, old exponent known", peer_value=total.full / total.conditional, aim=0.8),
            ]  # fmt: skip
    return figures


# ---------------------------------------------------------------------------------------------------- speed


def fastest(works: list[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds of one call of each, the best of many rounds that alternate."""
    best = [float("inf")] * len(works)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best:
        for i, work in enumerate(works):
            began = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def speed(work: Path, models: list[str], lrs: list[str], seconds: float) -> list[Figure]:
    figures = []
    for model in models:
        for lr in lrs:
            states = checkpoints(work / f"{model}-lr{lr}")
            old, new = _joined(states[-2]), _joined(states[-1])
            made = codec.encode(new, old)
            xored = _xor(new, old)
            encode, peer = fastest([lambda o=old, n=new: codec.encode(n, o), lambda o=old, n=new: _xor(n, o)], seconds)
            apply, peer_apply = fastest(
                [
                    lambda o=old, m=made: codec.decode(m.codec, m.content, o.dtype, o.shape, o),
                    lambda o=old, x=xored: _unxor(x, o),
                ],
                seconds,
            )
            for what, ours, theirs in (("encode", encode, peer), ("apply", apply, peer_apply)):
                figures.append(
                    Figure(name=f"{what} one core, {model} lr {lr}, {old.nbytes:,} bytes", unit="GB/s",
                           value=old.nbytes / ours / 1e9, peer="XOR + zstd-1", peer_value=old.nbytes / theirs / 1e9)
                )  # fmt: skip
            figures += publication(model, lr, states)
    return figures


def publication(model: str, lr: str, states: list[dict[str, Bits]], rounds: int = 60) -> list[Figure]:
    """To a replica that reads the same folder: milliseconds from the weights' being there to their being served.

    Forwards and backwards through the run's steps, so that every version is one step's.
    """
    parts: dict[str, list[float]] = {}
    way = [*states, *states[-2:0:-1]]
    with tempfile.TemporaryDirectory() as folder:
        key, store = Ed25519PrivateKey.generate(), FolderStore(folder)
        publisher, target = Publisher(store, key, "run"), MemoryTarget()
        replica = Replica(store, key.public_key(), target)
        for number in range(rounds + 1):
            metrics = publisher.publish(way[number % len(way)], number).metrics
            assert replica.poll(), replica.error
            if number:
                taken = {**metrics, **replica.metrics}
                for name in ("diff", "encode", "upload", "fetch", "stage", "verify", "pause"):
                    parts.setdefault(name, []).append(1000 * taken[f"sync/{name}_seconds"])
    parts["all"] = [sum(each) for each in zip(*parts.values(), strict=True)]
    return [
        Figure(
            name=f"publish to live, {model} lr {lr}: {part}, {which}",
            unit="ms",
            lower_is_better=True,
            value=float(np.quantile(taken, at)),
        )
        for part, taken in parts.items()
        for which, at in (("p50", 0.5), ("p99", 0.99))
    ]


def _joined(state: dict[str, Bits]) -> Bits:
    """All tensors as one, so that what is timed is the coder."""
    return Bits("BF16", np.concatenate([bits.array.reshape(-1) for bits in state.values()]))


def _xor(new: Bits, old: Bits) -> bytes:
    return zstandard.ZstdCompressor(1).compress((new.array ^ old.array).data.cast("B"))


def _unxor(content: bytes, old: Bits) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(content), "<u2") ^ old.array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sizes", "speed"])
    parser.add_argument("--work", type=Path, default=Path("runs/delta"), help="folder for models and runs")
    parser.add_argument("--models", nargs="+", choices=["demo", *CONFIGS], default=["demo", *CONFIGS])
    parser.add_argument("--lrs", nargs="+", default=list(LRS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each timing")
    args = parser.parse_args()
    work = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if args.what == "sizes":
        report("delta-sizes", sizes(work, args.models, args.lrs, args.steps, args.pairs), packages=("zstandard",))
    else:
        torch.set_num_threads(1)
        figures = speed(work, args.models, args.lrs, args.seconds)
        report("delta-speed", figures, packages=("zstandard",))


if __name__ == "__main__":
    main()
