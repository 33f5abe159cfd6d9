"""Packed int4 experts beside bfloat16 on a GPU: decoding, a LoRA step, and memory of trainer and engine together.

    python benchmarks/gpu_packed.py [--layers 8] [--memory 48] [--ranks 4 32] [--seconds 240]

Widths of Qwen3-30B-A3B (128 experts of 768, 8 a token, hidden 2,048); experts in groups of 32 as Kimi K2 is released,
all else bfloat16, an adapter over all linear layers. All weights are random and drawn on the GPU, codes and scales as
well. Both models decode in turns without the adapter (of rank 32) and with it, 1 to 128 requests (so that at most 8
rows meet at an expert on average), 64 tokens in and 128 out, logprobs on; then each takes forward, backward and AdamW
of its adapter over 16 x 1,024 tokens. Medians of three rounds after one. A layer's experts alone, told their choices,
stand in graphs over many draws, so that none of their weights is in the cache: there the packed bytes show, which share
a decoding step with all that is not packed.

`--memory N`: models of N layers, each in a process of its own, an engine and a trainer above it, peak of the device's
tensors after sampling and a step, with adapters of `--ranks`: 4 is 32 over the 8 experts of a token, as LoRA Without
Regret has it. Masters, moments and gradients of an adapter are the same beside both models: with 48 layers about 3 GB
at rank 4, 25 GB at rank 32. A model that does not fit is named so. `--layers 0`: memory alone.

Each line is recorded when it is known.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import rlloop  # before torch, as `rlloop train` does  # isort: skip
import numpy as np
import torch
from children import tell, told
from gpu_shapes import random_model, seconds
from ranks_experts import MIXTURE, TINY
from results_schema import Figure, need_gpus, report

from rlloop import SamplingParams
from rlloop.algorithms import get_loss
from rlloop.config.model import LoraSection
from rlloop.config.trainer import TrainerConfig
from rlloop.launch.make import with_lora
from rlloop.models import Model
from rlloop.numerics.ops import ops_for
from rlloop.numerics.packed import INT4, PackedWeight
from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import Trainer, TrainSequence

GIB, ROUNDS, RANK, KINDS = 1 << 30, 3, 32, ("packed", "bfloat16")
ALONE, DRAWS = (1, 8, 32, 64, 128), 16  # requests; at 128 eight rows meet at an expert on average


def packed(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
    """Random int4 codes and scales in place of experts' weights, as `load_model` has them of a packed checkpoint."""
    if ".experts." not in name:
        return None
    *groups, rows, width = shape
    place = generator.device
    codes = torch.randint(
        -(2**31), 2**31 - 1, (*groups, rows, width // INT4.each), generator=generator, device=place, dtype=INT4.codes
    )
    scales = torch.rand((*groups, rows, width // INT4.group), generator=generator, device=place)
    return PackedWeight(codes, scales.add_(0.5).mul_(0.005).to(INT4.scales), INT4)


def model_of(kind: str, layers: int, tiny: bool) -> Model:
    shape, _, device = work_of(tiny)
    began = time.perf_counter()
    model = random_model({**shape, "num_hidden_layers": layers}, device, packed if kind == "packed" else None)
    say(f"{kind}: a model of {layers} layers in {time.perf_counter() - began:.1f} s")
    return model


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def sequences(count: int, length: int, vocab: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            token_ids=rng.integers(3, vocab, length).tolist(), predict=range(1, length),
            advantages=np.full(length - 1, rng.normal(), np.float32),
            rollout_logprobs=np.full(length - 1, -np.log(vocab), np.float32),
        )
        for _ in range(count)
    ]  # fmt: skip


def timed(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def decoding(engine: rlloop.Engine, rows: int, new: int, vocab: int) -> Callable[[], object]:
    prompts = np.random.default_rng(rows).integers(3, vocab, (rows, 64)).tolist()
    sampling = [SamplingParams(max_tokens=new, seed=seed, ignore_eos=True) for seed in range(rows)]
    return lambda: engine.generate(prompts, sampling)


def speeds(models: dict[str, Model], rows: list[int], new: int, batch: tuple[int, int]) -> Iterator[Figure]:
    vocab, device = models["packed"].config.vocab_size, next(models["packed"].parameters()).device
    works: dict[str, dict[str, Callable[[], object]]] = {}
    for kind, model in models.items():
        room = {"max_cache_tokens": max(rows) * (128 + new), "max_running": max(rows)}
        base, adapted = rlloop.Engine(model.with_adapter(None), **room), rlloop.Engine(model, **room)
        for count in rows:
            works.setdefault(f"decode, {count} requests", {})[kind] = decoding(base, count, new, vocab)
            works.setdefault(f"with an adapter, {count} requests", {})[kind] = decoding(adapted, count, new, vocab)
        trainer, data = Trainer(model, TrainerConfig(lr=1e-5, max_batch_tokens=4 * batch[1])), sequences(*batch, vocab)

        def step(trainer: Trainer = trainer, data: list[TrainSequence] = data) -> None:
            trainer.forward_backward(data, get_loss("grpo"))
            trainer.optim_step()

        works.setdefault(f"LoRA step of {batch[0]} x {batch[1]} tokens", {})[kind] = step
    for name, by_kind in works.items():
        rounds = [{kind: timed(work, device) for kind, work in by_kind.items()} for _ in range(ROUNDS + 1)]
        taken = {kind: [each[kind] for each in rounds[1:]] for kind in by_kind}
        for kind in models:
            say(" ".join((name, kind, *(f"{each:.4f}" for each in sorted(taken[kind])), "s")))
        yield Figure.of_rounds(
            f"{name}, int4 experts", "s", taken["packed"], "bfloat16", taken["bfloat16"], lower_is_better=True,
            aim={"d": 1.5, "w": None, "L": 0.9}[name[0]],
        )  # fmt: skip


def work_of(tiny: bool) -> tuple[dict[str, Any], tuple[int, int], str]:
    """(shape, sequences and their length of a step, device)."""
    return ({**TINY, "moe_intermediate_size": 64}, (2, 20), "cpu") if tiny else (MIXTURE, (16, 1024), "cuda")


def speed_figures(layers: int, tiny: bool) -> Iterator[Figure]:
    models = {kind: with_lora(model_of(kind, layers, tiny), LoraSection(rank=RANK), 0) for kind in KINDS}
    yield from speeds(models, [1, 2] if tiny else [1, 8, 32, 128], 4 if tiny else 128, work_of(tiny)[1])


def experts_alone() -> Iterator[Figure]:
    hidden, inner = MIXTURE["hidden_size"], MIXTURE["moe_intermediate_size"]
    count, top_k = MIXTURE["num_experts"], MIXTURE["num_experts_per_tok"]
    generator, ops = torch.Generator("cuda").manual_seed(0), ops_for(NumericsProfile())
    shapes = (torch.Size((count, 2 * inner, hidden)), torch.Size((count, hidden, inner)))
    with torch.inference_mode():
        int4 = [packed(".experts.", shape, generator) for shape in shapes]
        plain = [weight.dequantised() for weight in int4 if isinstance(weight, PackedWeight)]
        for tokens in ALONE:
            drawn = [
                (
                    torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda", generator=generator),
                    torch.rand(tokens, count, device="cuda", generator=generator).topk(top_k)[1],
                )
                for _ in range(DRAWS)
            ]
            assert torch.equal(*(ops.experts(drawn[0][0], *weights, drawn[0][1]) for weights in (int4, plain)))
            mine, other = seconds(
                [[lambda x=x, c=c, w=w: ops.experts(x, *w, c) for x, c in drawn] for w in (int4, plain)]
            )
            yield Figure.of_rounds(
                f"experts alone, {tokens} requests, int4 experts", "us", [1e6 * each for each in mine], "bfloat16",
                [1e6 * each for each in other], lower_is_better=True, aim=1.5,
            )  # fmt: skip


def allocated(tiny: bool, peak: bool = False) -> int:
    """Bytes of tensors on the GPU, now or at most. A CPU has no such count."""
    if tiny:
        return GIB
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def held(model: Model, rank: int, tiny: bool) -> int:
    """Bytes of the device that an engine and a trainer over the model have taken, after sampling and a step."""
    batch, vocab, began = work_of(tiny)[1], model.config.vocab_size, time.perf_counter()

    def done(what: str) -> None:
        now, most = allocated(tiny) / GIB, allocated(tiny, peak=True) / GIB
        say(f"  {time.perf_counter() - began:5.1f} s  rank {rank}: {what}: {now:.2f} GiB, at most {most:.2f}")

    adapted = with_lora(model, LoraSection(rank=rank), 0)
    done("an adapter")
    engine = rlloop.Engine(adapted, max_cache_tokens=16384, max_running=64)
    trainer = Trainer(adapted, TrainerConfig(lr=1e-5, max_batch_tokens=4 * batch[1], checkpoint_layers="all"))
    done("an engine and a trainer")
    decoding(engine, 64, 32, vocab)()
    done("sampled")
    trainer.forward_backward(sequences(*batch, vocab), get_loss("grpo"))
    done("forward and backward")
    metrics = trainer.optim_step()
    done("a step")
    return int(metrics.get("memory/device_peak_bytes", allocated(tiny)))  # of all since the reset: it resets the peak


def measure(kind: str, layers: int, ranks: list[int], tiny: bool) -> None:
    """Tell what a model takes alone, and what an engine and a trainer take with it. In a process of its own."""
    try:
        model = model_of(kind, layers, tiny)
    except torch.OutOfMemoryError as error:
        say(f"{kind}: {str(error).splitlines()[0]}")
        tell(outgrown=True)
        return
    tell(rank=0, bytes=allocated(tiny), device=None if tiny else torch.cuda.get_device_name())
    for rank in ranks:
        if not tiny:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            say(f"{kind}: {allocated(tiny) / GIB:.2f} GiB before an adapter of rank {rank}")
        try:
            tell(rank=rank, bytes=held(model, rank, tiny))
        except torch.OutOfMemoryError as error:
            say(f"{kind}: {str(error).splitlines()[0]}")
            tell(rank=rank, outgrown=True)
            return


def memory_figures(layers: int, ranks: list[int], tiny: bool, deadline: float) -> Iterator[tuple[str | None, Figure]]:
    """(device, figure) of the weights alone, and of an engine and a trainer with an adapter of each rank."""
    found: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
    device, over = None, set[str]()
    for kind in KINDS:
        command = [sys.executable, __file__, "--child", kind, "--memory", str(layers), "--ranks", *map(str, ranks)]
        try:
            for made in told([*command, *(["--tiny"] if tiny else [])], max(1.0, deadline - time.monotonic())):
                device = made.get("device", device)
                if made.get("outgrown"):
                    over.add(kind)
                    continue
                rank = made["rank"]
                found[kind][rank] = made["bytes"]
                say(f"{kind}, {layers} layers, rank {rank}: {made['bytes'] / GIB:.2f} GiB")
                if (mine := found["packed"].get(rank)) is not None:
                    plain = found["bfloat16"].get(rank)
                    yield device, memory_figure(layers, rank, mine, plain, "bfloat16" if plain else None)
        except subprocess.CalledProcessError as error:
            say(f"{kind}: ended with code {error.returncode}; see above")
    if "bfloat16" in over:
        for rank in found["packed"].keys() - found["bfloat16"].keys():
            yield device, memory_figure(layers, rank, found["packed"][rank], None, "bfloat16: out of memory")


def memory_figure(layers: int, rank: int, mine: int, plain: int | None, peer: str | None) -> Figure:
    what = f"trainer and engine, LoRA of rank {rank}" if rank else "weights"
    return Figure(
        name=f"memory, {layers} layers, {what}, int4 experts", unit="GiB", value=mine / GIB, peer=peer,
        peer_value=plain and plain / GIB, lower_is_better=True, aim=1 / 0.4,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--memory", type=int, nargs="+", default=[], metavar="LAYERS")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="of adapters, for --memory")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of --memory: end after them, with what is known")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        measure(given.child, given.memory[0], given.ranks, given.tiny)
        return
    if not given.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")

    def known(figure: Figure, device: str | None = None) -> None:
        report("gpu-packed", [figure], packages=("triton",), device=device, part=True, write=not given.tiny)

    deadline = time.monotonic() + given.seconds
    for layers in given.memory:  # before this process takes any of the GPU
        for device, figure in memory_figures(layers, given.ranks, given.tiny, deadline):
            known(figure, device)
    if given.layers and not given.tiny:
        for figure in experts_alone():
            known(figure)
    for figure in speed_figures(given.layers, given.tiny) if given.layers else ():
        known(figure)


if __name__ == "__main__":
    main()
