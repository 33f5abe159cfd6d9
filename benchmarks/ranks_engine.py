"""Tokens per second of one engine over several GPUs of a host, Qwen3-8B shape, bfloat16, with logprobs.

    python benchmarks/ranks_engine.py --tp 2 [--vllm] [--only crowd] [--profile] [--quick]

rlloop's engine with `rollout.layout.tp=N`, beside vLLM's at `tensor_parallel_size=N` (`--vllm`), by default and
batch-invariant. Each runs a round to warm up; when all have, they take turns, a workload at a time, in three rounds on
new prompts; least, median and most are printed, and medians recorded, of each workload as soon as it is done, or as an
interrupt (or SIGTERM) ends it after two rounds. Every rank must make the same tokens. rlloop's requests have seeds,
which cost it nothing; vLLM's have none, which is faster. Each engine records its CUDA graphs before its first round:
vLLM as it starts, rlloop by `Engine.prepare`, for as many and as long requests as here. CACHE_GIB=11 in the environment
lets the engines fit on GPUs of 80 GB together; where requests then wait for room in the cache, rlloop may still record
steps with prompts beside contexts of more than 1,024 tokens in a measured round, 0.1 to 0.2 s each. `--profile`: the
first GPU's kernels by a step instead, of rlloop alone; nothing is recorded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from children import Child, Ended, Rounds, answer, in_turns, prepare, rehearsed, when_prepared
from gpu_shapes import save_random
from profiled import profiled
from results_schema import Figure, need_gpus, report

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "eos_token_id": 151645, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKEN_BYTES = 36 * 2 * 8 * 128 * 2  # of keys and values, over all ranks
CACHE_BYTES = int(os.environ.get("CACHE_GIB", "28")) << 30  # of keys and values, of each engine on each GPU
LONGEST, RUNNING, ROUNDS = 2048, 512, 3
SIDES = {  # name -> environment
    "rlloop": {},
    "vLLM default": {"VLLM_PLUGINS": "none"},
    "vLLM batch-invariant": {"VLLM_PLUGINS": "none", "VLLM_BATCH_INVARIANT": "1"},
}
KEPT = ExitStack()  # until the process ends
WORK = {"crowd": "256 x (128 in, 256 out)", "one": "1 request (128 in, 256 out)", "ragged": "64 x 8 ragged"}
AIMS = {"crowd": 1.1, "one": 0.95, "ragged": 1.1}
Request = tuple[list[int], int, int]  # prompt, tokens to make, seed
Run = Callable[[list[Request]], list[list[int]]]


def requests_of(work: str, index: int) -> list[Request]:
    """A round's requests: the same for every engine."""
    rng = np.random.default_rng([index, len(work)])

    def prompt(length: int) -> list[int]:
        return rng.integers(3, 150000, length).tolist()

    if work != "ragged":
        return [(prompt(128), 256, 1000 * index + i) for i in range(256 if work == "crowd" else 1)]
    groups = [prompt(int(rng.integers(64, 513))) for _ in range(64)]
    return [(ids, int(rng.integers(32, 1025)), 1000 * index + i) for i, ids in enumerate(groups * 8)]


def rlloop_side(folder: str, tp: int, rank: int, kind: str) -> tuple[Run, Any]:
    """(what makes a round's tokens, the ranks). Every rank runs every round."""
    import torch

    import rlloop
    from rlloop.parallel.context import join
    from rlloop.parallel.layout import Layout
    from rlloop.parallel.start import process_group

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    KEPT.enter_context(process_group(device, f"file://{folder}/meeting", rank, tp))
    context = join(device, Layout(tp=tp))
    when_prepared(Path(folder))
    model = rlloop.load_model(folder, dtype="bfloat16", context=context)
    engine = rlloop.Engine(
        model, max_cache_tokens=CACHE_BYTES // (TOKEN_BYTES // tp), max_running=RUNNING, max_batch_tokens=8192
    )
    engine.prepare(RUNNING, LONGEST)

    def run(requests: list[Request]) -> list[list[int]]:
        sampling = [rlloop.SamplingParams(new, seed=seed, ignore_eos=True) for _, new, seed in requests]
        made = engine.generate([ids for ids, _, _ in requests], sampling)
        assert all(len(each.logprobs) == new for each, (_, new, _) in zip(made, requests, strict=True))
        return [each.token_ids for each in made]

    return run, context.tp


def follow(folder: str, tp: int, rank: int, kind: str) -> None:
    """A further rank: the rounds that the first one names."""
    run, ranks = rlloop_side(folder, tp, rank, kind)
    while (asked := ranks.broadcast_object(None)) is not None:
        ranks.gather_objects(hash(tuple(map(tuple, run(requests_of(*asked))))))


def vllm_side(folder: str, tp: int, running: int = RUNNING, cache: int = CACHE_BYTES, **options: Any) -> Run:
    import vllm

    when_prepared(Path(folder))
    engine = vllm.LLM(
        folder, dtype="bfloat16", max_model_len=LONGEST, skip_tokenizer_init=True, max_num_seqs=running,
        max_num_batched_tokens=8192, tensor_parallel_size=tp, logprobs_mode="processed_logprobs",
        gpu_memory_utilization=0.3, kv_cache_memory_bytes=cache, disable_log_stats=True, **options,
    )  # fmt: skip

    def run(requests: list[Request]) -> list[list[int]]:
        sampling = [
            vllm.SamplingParams(
                max_tokens=new, temperature=1.0, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
            )
            for _, new, _ in requests
        ]
        made = engine.generate([{"prompt_token_ids": ids} for ids, _, _ in requests], sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in made]

    return run


def serve(name: str, folder: str, tp: int, kind: str = "cuda") -> None:
    """A round for each line on stdin (`work index`)."""
    ranks: Any = None
    if name == "rlloop":
        for rank in range(1, tp):
            multiprocessing.get_context("spawn").Process(
                target=follow, args=(folder, tp, rank, kind), daemon=True
            ).start()
        run, ranks = rlloop_side(folder, tp, 0, kind)
    else:
        run = vllm_side(folder, tp)

    def round_of(line: str) -> float:
        work, index, *more = line.split()
        requests = requests_of(work, int(index))

        def whole() -> list[list[int]]:
            if ranks is not None:
                ranks.broadcast_object((work, int(index)))
            made = run(requests)
            if ranks is not None:
                prints = ranks.gather_objects(hash(tuple(map(tuple, made))))
                assert len(set(prints)) == 1, f"ranks made other tokens: {prints}"
            return made

        if more:
            return profiled(whole, max(new for _, new, _ in requests), work)
        begin = time.perf_counter()
        made = whole()
        speed = sum(map(len, made)) / (time.perf_counter() - begin)
        print(f"{name}, tp {tp}, {work}, round {index}: {speed:,.0f} tokens/s", file=sys.stderr, flush=True)
        return speed

    answer(round_of)
    if ranks is not None:
        ranks.broadcast_object(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="GPUs of each engine")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--without", choices=list(SIDES), action="append", default=[], help="of the engines")
    parser.add_argument("--only", choices=WORK, action="append", help="of the workloads")
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"], help="fewer, to try it out")
    parser.add_argument("--profile", action="store_true", help="where rlloop's time goes; nothing recorded")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        serve(given.child[0], given.child[1], given.tp)
        return
    need_gpus(given.tp)
    vllm = given.vllm and not given.profile
    names = [name for name in SIDES if (vllm or name == "rlloop") and name not in given.without]
    works = given.only or list(WORK)

    def record(work: str, by_side: Rounds) -> None:
        figures = figures_of(work, by_side, given.tp, names[1:])
        packages = ("triton", *(("vllm",) if given.vllm else ()))
        report(f"ranks-engine-{given.tp}", figures, packages=packages, part=True, write=not given.quick)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [sys.executable, __file__, "--tp", str(given.tp), "--child"]
        sides = [Child(name, [*command, name, place], SIDES[name]) for name in names]
        prepare(sides, folder, lambda: save_random({**QWEN3_8B, "num_hidden_layers": given.layers}, folder))
        if given.profile:
            rehearsed(sides[0], works)
        else:
            in_turns(sides, works, ROUNDS, record, left_out, ahead=True)


def left_out(side: Child, error: Ended) -> None:
    """A peer may end; the others go on."""
    if side.name == "rlloop":
        raise error
    print(error, file=sys.stderr, flush=True)


def figures_of(work: str, by_side: Rounds, tp: int, asked: list[str]) -> list[Figure]:
    """`asked`: the peers, which may have ended."""
    for name, speeds in by_side.items():
        low, middle, high = min(speeds), statistics.median(speeds), max(speeds)
        print(f"tp {tp}, {WORK[work]}: {name} {low:,.0f} / {middle:,.0f} / {high:,.0f} tokens/s", flush=True)
    ours, title = by_side["rlloop"], f"engine on {tp} GPUs, Qwen3-8B shape bf16, {WORK[work]}"
    aims = {name: AIMS[work] if name == "vLLM default" else 1.5 for name in asked}
    return [
        Figure.of_rounds(
            title, "tokens/s", ours, f"{name} tp {tp}" + (", unseeded" if name in by_side else ": it ended"),
            by_side.get(name), aim=aims[name],
        )
        for name in asked
    ] or [Figure.of_rounds(title, "tokens/s", ours)]  # fmt: skip


if __name__ == "__main__":
    main()
