"""Tokens per second of a mixture of experts over the GPUs of a host: 16 layers, width 2,048, 128 experts, 8 a token.

    python benchmarks/ranks_experts.py --gpus 4 [--vllm] [--only crowd] [--profile] [--quick] [--tiny]

rlloop's engine with `rollout.layout.tp=N` and `ep=N`, beside vLLM's with `tensor_parallel_size=N`, by default and with
`enable_expert_parallel` (`--vllm`). Each runs a round to warm up; when all have, they take turns, a workload at a time,
in three rounds on new prompts; medians are recorded, of each workload as soon as it is done, or as an interrupt (or
SIGTERM) ends it after two rounds. Logprobs are on. `--profile`: the first GPU's kernels
by a step instead, of rlloop alone; nothing is recorded. `--tiny`: a small model on CPUs, to try the script out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from children import Child, Rounds, answer, in_turns, prepare, rehearsed, when_prepared
from gpu_shapes import save_random
from profiled import profiled
from ranks_engine import left_out, vllm_side
from results_schema import Figure, need_gpus, report

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "eos_token_id": 151645, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TINY: dict[str, Any] = {
    **MIXTURE, "vocab_size": 997, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 16,
    "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "eos_token_id": 2,
}  # fmt: skip
WORK = {"crowd": (256, 128, 256), "one": (1, 128, 256), "large": (1024, 128, 128)}  # requests, tokens in, tokens out
RUNNING, ROUNDS, CACHE_BYTES = 1024, 3, 16 << 30  # keys and values on each GPU
SIDES: dict[str, dict[str, Any]] = {"rlloop": {}, "vLLM TP": {}, "vLLM TP + EP": {"enable_expert_parallel": True}}
Request = tuple[list[int], int, int]  # prompt, tokens to make, seed
Run = Callable[[list[Request]], list[list[int]]]


def requests_of(work: str, index: int, tiny: bool) -> list[Request]:
    """A round's requests: the same for every engine."""
    count, prompt, new = (3, 9, 5) if tiny else WORK[work]
    rng = np.random.default_rng([index, len(work)])
    ids = rng.integers(3, 900 if tiny else 150000, (count, prompt)).tolist()
    return [(row, new, 1000 * index + at) for at, row in enumerate(ids)]


def rank_main(folder: str, ranks: int, rank: int, tiny: bool) -> None:
    """One of rlloop's ranks: all take part in the rounds that the first one reads."""
    import torch

    import rlloop
    from rlloop.parallel.context import join
    from rlloop.parallel.layout import Layout
    from rlloop.parallel.start import process_group

    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    with process_group(device, f"file://{folder}/meeting", rank, ranks):
        context = join(device, Layout(tp=ranks, ep=ranks))
        when_prepared(Path(folder))
        model = rlloop.load_model(folder, dtype="bfloat16", context=context)
        token_bytes = MIXTURE["num_hidden_layers"] * 2 * -(-4 // ranks) * 128 * 2
        room = 4096 if tiny else CACHE_BYTES // token_bytes
        engine = rlloop.Engine(model, max_cache_tokens=room, max_running=RUNNING, max_batch_tokens=8192)

        def run(requests: list[Request]) -> list[list[int]]:
            sampling = [rlloop.SamplingParams(new, seed=seed, ignore_eos=True) for _, new, seed in requests]
            made = engine.generate([ids for ids, _, _ in requests], sampling)
            tokens = [each.token_ids for each in made]
            prints = context.tp.gather_objects(hash(tuple(map(tuple, tokens))))
            assert len(set(prints)) == 1, f"ranks made other tokens: {prints}"
            return tokens

        if rank == 0:
            serve(run, tiny, lambda asked: context.tp.broadcast_object(asked))
            return
        while (asked := context.tp.broadcast_object(None)) is not None:
            run(requests_of(*asked, tiny))


def serve(run: Run, tiny: bool, announce: Callable[[Any], Any]) -> None:
    """A round for each line on stdin (`work index`). `announce` to the other ranks what comes, and None at the end."""

    def round_of(line: str) -> float:
        work, index, *more = line.split()

        def whole() -> list[list[int]]:
            announce((work, int(index)))
            return run(requests_of(work, int(index), tiny))

        if more:
            return profiled(whole, requests_of(work, 0, tiny)[0][1], work)
        begin = time.perf_counter()
        made = whole()
        return sum(map(len, made)) / (time.perf_counter() - begin)

    answer(round_of)
    announce(None)


def child(name: str, folder: str, ranks: int, tiny: bool) -> None:
    if name != "rlloop":
        serve(vllm_side(folder, ranks, RUNNING, CACHE_BYTES, **SIDES[name]), tiny, lambda _: None)
        return
    start = multiprocessing.get_context("spawn").Process
    others = [start(target=rank_main, args=(folder, ranks, rank, tiny), daemon=True) for rank in range(1, ranks)]
    for other in others:
        other.start()
    rank_main(folder, ranks, 0, tiny)


def figures_of(work: str, by_side: Rounds, ranks: int, asked: list[str]) -> list[Figure]:
    """`asked`: the peers, which may have ended."""
    for name, speeds in by_side.items():
        low, middle, high = min(speeds), statistics.median(speeds), max(speeds)
        print(f"{work}: {name} {low:,.0f} / {middle:,.0f} / {high:,.0f} tokens/s", flush=True)
    count, prompt, new = WORK[work]
    title = f"engine, 16 layers of 128 experts bf16, EP {ranks}, {count} x ({prompt} in, {new} out)"
    ours = by_side["rlloop"]
    return [
        Figure.of_rounds(
            title, "tokens/s", ours, f"{name} {ranks}" + (", unseeded" if name in by_side else ": it ended"),
            by_side.get(name), aim=1.1,
        )
        for name in asked
    ] or [Figure.of_rounds(title, "tokens/s", ours)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--without", choices=list(SIDES), action="append", default=[], help="of the engines")
    parser.add_argument("--only", choices=WORK, action="append", help="of the workloads")
    parser.add_argument("--profile", action="store_true", help="where rlloop's time goes; nothing recorded")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a small model on CPUs, nothing recorded")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.folder, given.gpus, given.tiny)
        return
    if not given.tiny:
        need_gpus(given.gpus, "--tiny runs a toy on a CPU")
    vllm = given.vllm and not given.profile
    names = [name for name in SIDES if (vllm or name == "rlloop") and name not in given.without]
    works = given.only or list(WORK)

    def record(work: str, by_side: Rounds) -> None:
        figures = figures_of(work, by_side, given.gpus, names[1:])
        packages = ("triton", *(("vllm",) if given.vllm else ()))
        write = not (given.quick or given.tiny)
        report(f"ranks-experts-{given.gpus}", figures, packages=packages, part=True, write=write)

    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--gpus", str(given.gpus), "--folder", folder, *(["--tiny"] if given.tiny else [])]
        command = [sys.executable, __file__, *arguments, "--child"]
        plugins = {name: {} if name == "rlloop" else {"VLLM_PLUGINS": "none"} for name in names}
        sides = [Child(name, [*command, name], plugins[name]) for name in names]
        prepare(sides, Path(folder), lambda: save_random(TINY if given.tiny else MIXTURE, folder))
        if given.profile:
            rehearsed(sides[0], works)
        else:
            in_turns(sides, works, ROUNDS, record, left_out, ahead=True)


if __name__ == "__main__":
    main()
