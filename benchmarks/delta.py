"""Bytes and seconds of a weight sync, on consecutive checkpoints of RL runs, beside XOR + zstd-1.

    python benchmarks/delta.py sizes            # runs of three models at three learning rates; their deltas
    python benchmarks/delta.py speed            # encoding and applying, one core; publication to a live replica
    python benchmarks/delta.py shape            # publish, apply and join at size, on all processors; needs no runs
    python benchmarks/delta.py sizes --models demo --lrs 1e-5

`sizes` also reports the strongest plain codec tried (gaps and steps in streams of bytes, each through zstd-1); what
richer conditioning would gain over the old exponent alone (`richer`); masters in bfloat16 that are rounded
stochastically (the same updates, rounded up or down by chance, so that none is lost on average); and whole versions.

Models: `demo`, the countdown recipe's, warm-started; `dense` and `mixture`, a Qwen3 and a Qwen3-MoE of some million
weights from random initialisation, whose reward (how many of a completion's tokens are numbers) has signal from the
first step. All of them train on countdown's prompts in bfloat16 with float32 masters; each step's checkpoint holds the
masters, and what is synced is their rounding. The last `--pairs` steps are measured, when Adam's averages have filled.
`speed` takes the runs that `sizes` left.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
from rlloop.sync.bits import Bits, processors
from rlloop.sync.bundle import MemoryStore
from rlloop.sync.folder import read_folder
from rlloop.sync.live import bits_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.steps import ORDERINGS, classes_of, ordered
from rlloop.sync.store import FolderStore
from rlloop.sync.target import MemoryTarget

LRS = ("1e-6", "1e-5", "3e-4")
PUBLICATIONS = 60
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


def masters_of(run: Path) -> list[dict[str, torch.Tensor]]:
    """The float32 masters after each of the last steps."""
    folders = sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return [
        {name: torch.from_numpy(bits.array.view(np.float32).copy()) for name, bits in read_folder(folder).items()}
        for folder in folders
    ]


def checkpoints(run: Path) -> list[dict[str, Bits]]:
    """The weights that engines had after each of the last steps, in bfloat16."""
    return [{name: bits_of(master.bfloat16()) for name, master in masters.items()} for masters in masters_of(run)]


def stochastically_rounded(run: Path) -> list[dict[str, Bits]]:
    """The weights of a trainer without float32 masters: the run's updates, each added to the last bfloat16 weights and
    rounded to one of the two nearest, with the probability that makes the mean exact."""
    masters, generator = masters_of(run), torch.Generator().manual_seed(0)
    weights = {name: master.bfloat16() for name, master in masters[0].items()}
    states = [weights]
    for before, after in itertools.pairwise(masters):
        rounded = {}
        for name, last in weights.items():
            exact = (last.float() + (after[name] - before[name])).view(torch.int32)
            noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, generator=generator)
            rounded[name] = ((exact + noise) & -65536).view(torch.float32).bfloat16()
        weights = rounded
        states.append(weights)
    return [{name: bits_of(tensor) for name, tensor in state.items()} for state in states]


def gaps_and_steps(new: Bits, old: Bits) -> int:
    """Bytes of gaps and of steps as streams of bytes, each through zstd-1; what a byte cannot say follows in words."""
    ordering = ORDERINGS[new.dtype]
    before, after = old.array.reshape(-1), new.array.reshape(-1)
    places = np.flatnonzero(before != after)
    step = ordered(after[places], ordering) - ordered(before[places], ordering)
    size = 0
    for values in (np.diff(places, prepend=-1) - 1, np.where(step > 0, 2 * step - 2, -2 * step - 1)):
        streams = np.minimum(values, 255).astype(np.uint8), (values[values >= 255] - 255).astype("<u4")
        size += sum(len(zstandard.ZstdCompressor(1).compress(stream.tobytes())) for stream in streams)
    return size


def richer(new: Bits, old: Bits) -> dict[str, float]:
    """Bytes of the places of changes, coded with adaptive probabilities (Krichevsky-Trofimov) by context, learning
    included. `class` is what the codec knows; the others know it too."""
    ordering = ORDERINGS[new.dtype]
    rows = new.array.reshape(-1, new.shape[-1]) if new.array.ndim > 1 else new.array.reshape(1, -1)
    before = old.array.reshape(rows.shape)
    changed = (rows != before).astype(np.int64)
    class_ = classes_of(before.reshape(-1), ordering).reshape(rows.shape)
    fine = (before >> 4).astype(np.int64) & 7  # the highest bits of the mantissa
    left = sum(np.pad(changed, ((0, 0), (by, 0)))[:, : rows.shape[1]] for by in range(1, 5))
    above = np.pad(changed, ((1, 0), (1, 1)))[:-1]
    above = above[:, :-2] + above[:, 1:-1] + above[:, 2:]
    contexts = {
        "class": class_,
        "class and mantissa": class_ * 8 + fine,
        "class and sign": class_ * 2 + (before >> 15),
        "class and changed neighbours": (class_ * 5 + left) * 4 + above,
        "class, mantissa and changed neighbours": ((class_ * 8 + fine) * 5 + left) * 4 + above,
    }
    return {name: _learned(context.reshape(-1), changed.reshape(-1)) / 8 for name, context in contexts.items()}


def _learned(context: np.ndarray, bit: np.ndarray) -> float:
    """Bits of an adaptive code of `bit` by context."""
    total = np.bincount(context)
    ones = np.bincount(context, bit)
    return sum(
        math.lgamma(n + 1) - math.lgamma(n1 + 0.5) - math.lgamma(n - n1 + 0.5) + 2 * math.lgamma(0.5)
        for n, n1 in zip(total, ones, strict=True)
        if n
    ) / math.log(2)


def sizes(work: Path, models: list[str], lrs: list[str], steps: int, pairs: int) -> list[Figure]:
    figures = []
    for model in models:
        for lr in lrs:
            states = checkpoints(train(work, model, lr, steps, pairs))
            total, stream, manifests, plain = Sizes(), 0, 0, 0
            contexts: Counter[str] = Counter()
            for old, new in itertools.pairwise(states):
                for tensor, found in compare(old, new):
                    total += found
                    plain += gaps_and_steps(new[tensor], old[tensor])
                    contexts.update(richer(new[tensor], old[tensor]))
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
                       peer="entropy, old exponent known", peer_value=total.full / total.conditional,
                       aim=0.97 if model != "demo" else 0.8),
                Figure(name=f"{name}: full bytes by the encoded tensors', beside streams of bytes", unit="x",
                       value=total.full / stream, peer="gap and step streams + zstd-1", peer_value=total.full / plain),
            ]  # fmt: skip
            figures += [
                Figure(name=f"{name}: places of changes, bytes given {context}", unit="B", value=size,
                       lower_is_better=True, peer="given class", peer_value=contexts["class"])
                for context, size in contexts.items() if context != "class"
            ]  # fmt: skip
            figures += rounded_figures(name, stochastically_rounded(work / f"{model}-lr{lr}"))
            whole, manifest = version_bytes({}, states[-1])
            figures.append(
                Figure(name=f"{name}: a whole version, full bytes by wire bytes", unit="x",
                       value=total.full / (len(states) - 1) / (whole + manifest))
            )  # fmt: skip
    return figures


def rounded_figures(name: str, states: list[dict[str, Bits]]) -> list[Figure]:
    total, stream = Sizes(), 0
    for old, new in itertools.pairwise(states):
        total = sum((found for _, found in compare(old, new)), total)
        stream += version_bytes(old, new)[0]
    share = f"{100 * total.changed / total.elements:.3g}% changed"
    return [
        Figure(name=f"{name}, bfloat16 masters rounded stochastically, {share}: full bytes by the encoded tensors'",
               unit="x", value=total.full / stream, peer="entropy, old exponent known",
               peer_value=total.full / total.conditional),
        Figure(name=f"{name}, bfloat16 masters rounded stochastically: beside XOR", unit="x",
               value=total.full / stream, peer="XOR + zstd-1", peer_value=total.full / total.xor),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- at size


def shape(layers: int, rounds: int = 4) -> list[Figure]:
    """GB/s of weights by all processors, wall clock and CPU time: a model of some layers of Qwen3-0.6B's widths, normal
    weights of 0.02, an update of lr 1e-6 by numbers such as Adam's. The store is in memory."""
    rng, before, after = np.random.default_rng(0), {}, {}
    for layer in range(layers):
        for part, rows, width in (("q", 2048, 1024), ("o", 1024, 2048), ("up", 3072, 1024), ("down", 1024, 3072)):
            master = rng.standard_normal((rows, width), np.float32) * np.float32(0.02)
            update = np.clip(rng.standard_normal((rows, width), np.float32) * np.float32(0.35), -1, 1)
            for state, values in ((before, master), (after, master - np.float32(1e-6) * update)):
                state[f"{layer}.{part}"] = bits_of(torch.from_numpy(values).bfloat16())
    states, size = [before, after], sum(bits.nbytes for bits in before.values())
    key, store = Ed25519PrivateKey.generate(), MemoryStore()
    publisher, target = Publisher(store, key, "run"), MemoryTarget({name: bits.copy() for name, bits in before.items()})
    replica = Replica(store, key.public_key(), target)
    taken: dict[str, list[tuple[float, float]]] = {}

    def timed(what: str, work: Callable[[], object]) -> object:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        taken.setdefault(what, []).append((time.perf_counter() - wall, time.process_time() - cpu))
        return result

    whole = publisher.publish(before, 0)
    replica.poll()
    changed, ratio, pause = 0.0, 0.0, math.inf
    for step in range(1, rounds + 1):
        published = timed("encode and publish", lambda step=step: publisher.publish(states[step % 2], step))
        assert timed("apply and verify", replica.poll), replica.error
        changed, ratio = published.metrics["sync/changed"], published.metrics["sync/ratio"]  # type: ignore[attr-defined]
        pause = min(pause, replica.metrics["sync/pause_seconds"])
    timed("encode a whole version", publisher.anchor)
    assert timed("join by a whole version", Replica(store, key.public_key(), MemoryTarget()).poll)
    name = f"{size / 1e6:.0f} MB of bfloat16, lr 1e-6, {100 * changed:.2g}% changed, {processors()} processors"
    aims = {"encode and publish": 1.5, "apply and verify": 3.0}
    figures = []
    for what, seconds in taken.items():
        wall, cpu = min(wall for wall, _ in seconds), min(cpu for _, cpu in seconds)
        figures += [
            Figure(name=f"{what}, {name}", unit="GB/s", value=size / wall / 1e9,
                   peer="the aim" if what in aims else None, peer_value=aims.get(what),
                   aim=1.0 if what in aims else None),
            Figure(name=f"{what}, {name}: by CPU time of one", unit="GB/s", value=size / cpu / 1e9),
        ]  # fmt: skip
    return [
        *figures,
        Figure(name=f"pause, {name}", unit="ms", value=1000 * pause, lower_is_better=True),
        Figure(name=f"full bytes by wire bytes, {name}", unit="x", value=ratio),
        Figure(name=f"a whole version, full bytes by wire bytes, {name}", unit="x", value=whole.metrics["sync/ratio"]),
    ]


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


def publication(model: str, lr: str, states: list[dict[str, Bits]]) -> list[Figure]:
    """To a replica that reads the same folder: milliseconds from the weights' being there to their being served.

    Forwards and backwards through the run's steps, so that every version is one step's.
    """
    parts: dict[str, list[float]] = {}
    way = [*states, *states[-2:0:-1]]
    with tempfile.TemporaryDirectory() as folder:
        key, store = Ed25519PrivateKey.generate(), FolderStore(folder)
        publisher, target = Publisher(store, key, "run"), MemoryTarget()
        replica = Replica(store, key.public_key(), target)
        for number in range(PUBLICATIONS + 1):
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
    parser.add_argument("what", choices=["sizes", "speed", "shape"])
    parser.add_argument("--layers", type=int, default=24, help="of `shape`'s model, 21 MB each")
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
    elif args.what == "shape":
        report("delta-shape", shape(args.layers))
    else:
        torch.set_num_threads(1)
        figures = speed(work, args.models, args.lrs, args.seconds)
        report("delta-speed", figures, packages=("zstandard",))


if __name__ == "__main__":
    main()
