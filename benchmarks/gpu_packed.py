"""Packed int4 experts beside bfloat16 on a GPU: decoding, a LoRA step, and memory of trainer and engine together.

    python benchmarks/gpu_packed.py [--layers 8] [--memory 48]

Widths of Qwen3-30B-A3B (128 experts of 768, 8 a token, hidden 2,048); experts in groups of 32 as Kimi K2 is released,
all else bfloat16, an adapter of rank 32 over all linear layers. Both models decode in turns without it and with it, 1
to 128 requests (so that at most 8 rows meet at an expert on average), 64 tokens in and 128 out, logprobs on; then each
takes forward, backward and AdamW of its adapter over 16 x 1,024 tokens. Medians of three rounds after one. A layer's
experts alone, told their choices, stand in graphs over many draws, so that none of their weights is in the cache: in
these rows the packed bytes show, which share a decoding step with all that is not packed. `--memory
N`: one model of N layers at a time, an engine and a trainer above it, peak of the device after sampling and a step; the
plain model's weights are zeros, which take as much room. `--layers 0`: memory alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlloop  # before torch, as `rlloop train` does  # isort: skip
import numpy as np
import torch
from gpu_shapes import random_model, seconds
from ranks_experts import MIXTURE, TINY
from results_schema import Figure, report, table
from safetensors.torch import load_file, save_file

from rlloop import SamplingParams
from rlloop.algorithms import get_loss
from rlloop.config.model import LoraSection
from rlloop.config.trainer import TrainerConfig
from rlloop.launch.workers import with_lora
from rlloop.models import Model, new_model, save_model
from rlloop.numerics.ops import ops_for
from rlloop.numerics.packed import INT4 as PACKING
from rlloop.numerics.packed import PackedWeight
from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import Trainer, TrainSequence

GROUP, GIB, ROUNDS, LORA = 32, 1 << 30, 3, LoraSection(rank=32)
ALONE, DRAWS = (1, 8, 32, 64, 128), 16  # requests; at 128 eight rows meet at an expert on average
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True, "strategy": "group"}}},
}  # fmt: skip


def packed_folder(place: Path, shape: dict[str, Any], layers: int) -> Path:
    """A checkpoint whose experts are random int4 codes: those of one layer, in a file for each layer."""
    one = place / "one"
    save_model(new_model({**shape, "num_hidden_layers": 1}, seed=0, dtype="bfloat16"), one)
    stored = {name: tensor for file in one.glob("*.safetensors") for name, tensor in load_file(file).items()}
    folder, generator = place / "packed", torch.Generator().manual_seed(0)
    folder.mkdir()
    layer: dict[str, torch.Tensor] = {}
    for name in [each for each in stored if ".experts." in each]:
        rows, width = stored.pop(name).shape
        parts = {
            ".weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, width // 8), generator=generator).int(),
            ".weight_scale": (0.5 + torch.rand(rows, width // GROUP, generator=generator)).mul(0.005).bfloat16(),
            ".weight_shape": torch.tensor([rows, width]),
        }
        layer |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
    for name in [each for each in stored if ".layers.0." in each]:
        layer[name] = stored.pop(name)
    places: dict[str, str] = dict.fromkeys(stored, "ends.safetensors")
    save_file(stored, folder / "ends.safetensors")
    for index in range(layers):
        named = {name.replace(".layers.0.", f".layers.{index}."): tensor for name, tensor in layer.items()}
        save_file(named, folder / f"layer-{index}.safetensors")
        places |= dict.fromkeys(named, f"layer-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = json.loads((one / "config.json").read_text())
    changed = {"num_hidden_layers": layers, "quantization_config": INT4}
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


def zeros_folder(place: Path, shape: dict[str, Any], layers: int) -> Path:
    """A plain bfloat16 checkpoint of zeros, in files without content."""
    one, folder = place / "one", place / "zeros"
    save_model(new_model({**shape, "num_hidden_layers": 1}, seed=0, dtype="bfloat16"), one)
    shapes = {name: x.shape for file in one.glob("*.safetensors") for name, x in load_file(file).items()}
    folder.mkdir()
    header, at = dict[str, Any](), 0
    for layer in range(layers):
        for name, size in shapes.items():
            if layer == 0 or ".layers.0." in name:
                of, end = name.replace(".layers.0.", f".layers.{layer}."), at + 2 * size.numel()
                header[of] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
                at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    config = json.loads((one / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return folder


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


def speeds(models: dict[str, Model], rows: list[int], new: int, batch: tuple[int, int]) -> list[Figure]:
    vocab, device = models["packed"].config.vocab_size, next(models["packed"].parameters()).device
    works: dict[tuple[str, str], Callable[[], object]] = {}
    for kind, model in models.items():
        room = {"max_cache_tokens": max(rows) * (128 + new), "max_running": max(rows)}
        base, adapted = rlloop.Engine(model.with_adapter(None), **room), rlloop.Engine(model, **room)
        for count in rows:
            works[f"decode, {count} requests", kind] = decoding(base, count, new, vocab)
            works[f"with an adapter, {count} requests", kind] = decoding(adapted, count, new, vocab)
        trainer, data = Trainer(model, TrainerConfig(lr=1e-5, max_batch_tokens=4 * batch[1])), sequences(*batch, vocab)

        def step(trainer: Trainer = trainer, data: list[TrainSequence] = data) -> None:
            trainer.forward_backward(data, get_loss("grpo"))
            trainer.optim_step()

        works[f"LoRA step of {batch[0]} x {batch[1]} tokens", kind] = step
    taken: dict[tuple[str, str], list[float]] = {work: [] for work in works}
    for index in range(ROUNDS + 1):
        for name, work in works.items():
            seconds = timed(work, device)
            if index:
                taken[name].append(seconds)
    figures = []
    for name in dict.fromkeys(name for name, _ in works):
        for kind in models:
            print(name, kind, *(f"{each:.4f}" for each in sorted(taken[name, kind])), "s", file=sys.stderr)
        figures.append(
            Figure.of_rounds(
                f"{name}, int4 experts", "s", taken[name, "packed"], "bfloat16", taken[name, "bfloat16"],
                lower_is_better=True, aim={"d": 1.5, "w": None, "L": 0.9}[name[0]],
            )
        )  # fmt: skip
    return figures


def experts_alone() -> list[Figure]:
    hidden, inner = MIXTURE["hidden_size"], MIXTURE["moe_intermediate_size"]
    count, top_k = MIXTURE["num_experts"], MIXTURE["num_experts_per_tok"]
    generator, ops, figures = torch.Generator("cuda").manual_seed(0), ops_for(NumericsProfile()), list[Figure]()

    def packed(rows: int, width: int) -> PackedWeight:
        codes = torch.empty(count, rows, width // 8, dtype=torch.int32, device="cuda")
        scales = torch.rand(count, rows, width // GROUP, device="cuda", generator=generator)
        return PackedWeight(
            codes.random_(-(2**31), 2**31 - 1, generator=generator), (scales + 0.5).mul(0.005).bfloat16(), PACKING
        )

    with torch.inference_mode():
        int4 = packed(2 * inner, hidden), packed(hidden, inner)
        plain = int4[0].dequantised(), int4[1].dequantised()
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
            figures.append(
                Figure.of_rounds(
                    f"experts alone, {tokens} requests, int4 experts", "us", [1e6 * each for each in mine], "bfloat16",
                    [1e6 * each for each in other], lower_is_better=True, aim=1.5,
                )
            )  # fmt: skip
    return figures


def peak(model: Model, batch: tuple[int, int]) -> float:
    """Bytes of the device that an engine and a trainer over the model have taken, after sampling and a step."""
    vocab = model.config.vocab_size
    engine = rlloop.Engine(model, max_cache_tokens=16384, max_running=64)
    trainer = Trainer(model, TrainerConfig(lr=1e-5, max_batch_tokens=4 * batch[1], checkpoint_layers="all"))
    decoding(engine, 64, 32, vocab)()
    trainer.forward_backward(sequences(*batch, vocab), get_loss("grpo"))
    trainer.optim_step()
    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else float(GIB)


def loaded(folder: Path, device: str) -> Model:
    began = time.perf_counter()
    model = rlloop.load_model(folder, dtype="bfloat16", device=device)
    print(f"model loaded in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return model


def work_of(tiny: bool) -> tuple[dict[str, Any], tuple[int, int], str]:
    """(shape, sequences and their length of a step, device)."""
    return ({**TINY, "moe_intermediate_size": 64}, (2, 20), "cpu") if tiny else (MIXTURE, (16, 1024), "cuda")


def speed_figures(layers: int, tiny: bool) -> list[Figure]:
    shape, batch, device = work_of(tiny)
    with tempfile.TemporaryDirectory() as place:
        plain = random_model({**shape, "num_hidden_layers": layers}, device)
        models = {
            "packed": with_lora(loaded(packed_folder(Path(place), shape, layers), device), LORA, 0),
            "bfloat16": with_lora(plain, LORA, 0),
        }
        return speeds(models, [1, 2] if tiny else [1, 8, 32, 128], 4 if tiny else 128, batch)


def memory_figure(layers: int, tiny: bool) -> Figure:
    shape, batch, device = work_of(tiny)
    gib = dict[str, float]()
    with tempfile.TemporaryDirectory() as place:
        for kind, folder_of in {"packed": packed_folder, "bfloat16": zeros_folder}.items():
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            model = with_lora(loaded(folder_of(Path(place), shape, layers), device), LORA, 0)
            gib[kind] = peak(model, batch) / GIB
            print(f"{kind}: {gib[kind]:.2f} GiB", file=sys.stderr, flush=True)
            del model
    return Figure(
        name=f"memory, {layers} layers, trainer and engine, int4 experts", unit="GiB", value=gib["packed"],
        peer="bfloat16", peer_value=gib["bfloat16"], lower_is_better=True, aim=1 / 0.4,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--memory", type=int, default=0, metavar="LAYERS")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    given = parser.parse_args()
    figures = speed_figures(given.layers, given.tiny) if given.layers else []
    if given.layers and not given.tiny:
        figures += experts_alone()
    if given.memory:
        figures.append(memory_figure(given.memory, given.tiny))
    if given.tiny:
        print(table(figures))
    else:
        report("gpu-packed", figures, packages=("triton",))


if __name__ == "__main__":
    main()
