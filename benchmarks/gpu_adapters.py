"""Tokens per second of decoding with adapters on a GPU, bfloat16, logprobs on: none, one, and 64 in the same steps.

    python benchmarks/gpu_adapters.py [--shape 0.6b 8b] [--vllm]

Adapters of rank 32 over all linear layers lie above a random dense model. Requests have 64 tokens and make 384, and
then 1: `decode` is what the other 383 steps take, `requests` the whole. An engine of the base alone, one with adapters
and vLLM's (`--vllm`: multi-LoRA with 64 slots, the same PEFT folder) take turns; medians of three rounds count, after
one to warm up. The 64 adapters have the same numbers under names of their
own: what is read from memory is as much as if they differed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlloop  # before torch, as `rlloop train` does  # isort: skip
import numpy as np
import torch
from gpu_shapes import random_model
from offload import SHAPES, config
from results_schema import Figure, need_gpus, report

from rlloop import SamplingParams
from rlloop.models import save_model
from rlloop.models.adapter_files import save_adapter
from rlloop.models.adapter_weights import AdapterWeights, choose_targets, fresh_weights

ADAPTERS, RANK, PROMPT, NEW, ROUNDS = 64, 32, 64, 384, 3
ROWS = (1, 32, 256)
Round = Callable[[list[list[int]], int, int], None]  # prompts, adapters among them, tokens of each


def an_adapter(model: Any) -> AdapterWeights:
    fresh = fresh_weights(choose_targets(model.adapter_targets(), ["all-linear"]), RANK, 2.0 * RANK, 0)
    factors = {name: (down, 0.01 * torch.randn_like(up)) for name, (down, up) in fresh.factors.items()}
    return AdapterWeights(factors, fresh.scales, fresh.rank, fresh.alpha)


def rlloop_side(engine: rlloop.Engine) -> Round:
    def run(prompts: list[list[int]], adapters: int, new: int) -> None:
        names = [f"adapter-{i % adapters}" if adapters else None for i in range(len(prompts))]
        sampling = [SamplingParams(max_tokens=new, seed=i, ignore_eos=True) for i in range(len(prompts))]
        made = engine.generate(prompts, sampling, adapters=names)
        assert all(len(each.logprobs) == new for each in made)

    return run


def vllm_side(base: Path, adapter: Path) -> Round:
    os.environ["VLLM_PLUGINS"] = "none"
    import vllm
    from vllm.lora.request import LoRARequest

    engine = vllm.LLM(
        str(base), dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True, max_num_seqs=max(ROWS),
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.3, kv_cache_memory_bytes=16 << 30,
        enable_lora=True, max_loras=ADAPTERS, max_lora_rank=RANK, disable_log_stats=True,
    )  # fmt: skip

    def run(prompts: list[list[int]], adapters: int, new: int) -> None:
        which = [
            LoRARequest(f"adapter-{i % adapters}", 1 + i % adapters, str(adapter)) if adapters else None
            for i in range(len(prompts))
        ]
        sampling = vllm.SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        given: Any = [{"prompt_token_ids": ids} for ids in prompts]
        made = engine.generate(given, sampling, use_tqdm=False, lora_request=which if adapters else None)
        assert all(len(each.outputs[0].token_ids) == new for each in made)

    return run


def measure(shape: str, vllm: bool, place: Path) -> list[Figure]:
    model = random_model(config(shape))
    room = {"max_cache_tokens": max(ROWS) * (PROMPT + NEW + 64), "max_running": max(ROWS)}
    base = rlloop.Engine(model, **room)
    served = rlloop.Engine(model.with_adapter(None), adapter_slots=ADAPTERS, adapter_rank=RANK, **room)
    weights = an_adapter(model)
    for each in range(ADAPTERS):
        served.add_adapter(f"adapter-{each}", weights)
    runs = {"base": rlloop_side(base), "rlloop": rlloop_side(served)}
    if vllm:
        save_model(model, place / "base")
        save_adapter(model, weights, place / "adapter")
        runs["vLLM"] = vllm_side(place / "base", place / "adapter")
    kinds = [(rows, 1) for rows in ROWS] + [(max(ROWS), ADAPTERS)]
    works = [(name, rows, n) for rows, n in kinds for name in runs if name != "base"]
    works = sorted(works + [("base", rows, 0) for rows in ROWS], key=lambda work: work[1])  # beside what they compare
    speeds: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    vocab = model.config.vocab_size
    for index in range(ROUNDS + 1):
        for name, rows, adapters in works:
            prompts = np.random.default_rng([index, rows, adapters]).integers(3, vocab, (rows, PROMPT)).tolist()
            began = time.perf_counter()
            runs[name](prompts, adapters, NEW)
            ended = time.perf_counter()
            runs[name]([ids[::-1] for ids in prompts], adapters, 1)
            if index:
                first = time.perf_counter() - ended
                speeds["requests", name, rows, adapters].append(rows * NEW / (ended - began))
                speeds["decode", name, rows, adapters].append(rows * (NEW - 1) / (ended - began - first))
    for (what, name, rows, adapters), each in speeds.items():
        line = f"{shape} {what} {name}, {rows} rows, {adapters} adapters: "
        print(line + f"{min(each):,.0f} {statistics.median(each):,.0f} {max(each):,.0f}", file=sys.stderr)
    figures = []
    for what in ("decode", "requests"):
        for rows, adapters in kinds:
            own = speeds[what, "rlloop", rows, adapters]
            aim = 0.92 if adapters == 1 and what == "decode" else None
            peers = [("the base alone", speeds[what, "base", rows, 0], aim)]
            if vllm:
                peers.append(("vLLM multi-LoRA, unseeded", speeds[what, "vLLM", rows, adapters], 1.2))
            name = f"{what}, {shape}, {rows} rows, {adapters} adapters"
            figures += [Figure.of_rounds(name, "tokens/s", own, peer, theirs, aim=aim) for peer, theirs, aim in peers]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["0.6b", "8b"])
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's multi-LoRA too")
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    need_gpus()
    figures = []
    for shape in given.shape:
        with tempfile.TemporaryDirectory() as place:
            figures += measure(shape, given.vllm, Path(place))
    report("gpu-adapters", figures, packages=("triton", *(("vllm",) if given.vllm else ())), write=not given.no_write)


if __name__ == "__main__":
    main()
