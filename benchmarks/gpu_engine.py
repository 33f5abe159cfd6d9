"""Tokens per second of sampling on a GPU: a random Qwen3 of the 0.6B shape, bfloat16, with logprobs.

256 requests of 128 tokens in and 256 out.

    python benchmarks/gpu_engine.py [--vllm] [--quick]

With `--vllm` the same requests go through vLLM in processes of its own, in its default mode and batch-invariant. Every
engine runs once to warm up, on other prompts; then the fastest of three rounds counts, each on new prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gpu_shapes import QWEN3_06B
from results_schema import Figure, report, table

REQUESTS, PROMPT, NEW, ROUNDS = 256, 128, 256, 3


def prompts_of(seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 150000, (REQUESTS, PROMPT)).tolist()


def fastest(run: Callable[[list[list[int]], int], int], name: str) -> float:
    """Tokens per second of `run(prompts, round)`, which returns how many it made."""
    best = 0.0
    for index in range(ROUNDS + 1):
        prompts = prompts_of(index)
        begin = time.perf_counter()
        made = run(prompts, index)
        speed = made / (time.perf_counter() - begin)
        print(f"{name}, {'round ' + str(index) if index else 'warm-up'}: {speed:,.0f} tokens/s", file=sys.stderr)
        best = max(best, speed) if index else best
    return best


def ours(folder: Path) -> float:
    import rlloop

    engine = rlloop.Engine(rlloop.load_model(folder, dtype="bfloat16", device="cuda"), max_cache_tokens=256 * 512)

    def run(prompts: list[list[int]], index: int) -> int:
        sampling = [rlloop.SamplingParams(NEW, seed=1000 * index + i, ignore_eos=True) for i in range(REQUESTS)]
        made = engine.generate(prompts, sampling)
        return sum(len(completion.logprobs) for completion in made)

    return fastest(run, "rlloop")


def vllm(folder: Path) -> float:
    import vllm

    engine = vllm.LLM(str(folder), dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, max_num_seqs=256)

    def run(prompts: list[list[int]], index: int) -> int:
        sampling = [
            vllm.SamplingParams(
                max_tokens=NEW, temperature=1.0, seed=1000 * index + i, ignore_eos=True, logprobs=0, detokenize=False
            )
            for i in range(REQUESTS)
        ]
        made = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(request.outputs[0].logprobs) for request in made)

    return fastest(run, "vLLM")


def in_child(what: str, folder: Path, **environment: str) -> float:
    command = [sys.executable, __file__, "--child", what, str(folder)]
    out = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps({"rlloop": ours, "vllm": vllm}[args.child[0]](Path(args.child[1]))))
        return
    work = f"engine, Qwen3 0.6B shape bf16, {REQUESTS} x ({PROMPT} in, {NEW} out), logprobs"
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        mine = in_child("rlloop", Path(name))
        if args.vllm:
            default = in_child("vllm", Path(name))
            invariant = in_child("vllm", Path(name), VLLM_BATCH_INVARIANT="1")
            figures = [
                Figure(name=work, unit="tokens/s", value=mine, peer="vLLM default", peer_value=default, aim=0.95),
                Figure(
                    name=work, unit="tokens/s", value=mine, peer="vLLM batch-invariant", peer_value=invariant, aim=1.25
                ),
            ]
        else:
            figures = [Figure(name=work, unit="tokens/s", value=mine)]
    if args.quick:
        print(table(figures))
    else:
        report("gpu-engine", figures, packages=("triton", *(("vllm",) if args.vllm else ())))


def make_folder(folder: Path) -> None:
    from rlloop.models import new_model, save_model

    save_model(new_model(QWEN3_06B, seed=0, dtype="bfloat16"), folder)


if __name__ == "__main__":
    main()
