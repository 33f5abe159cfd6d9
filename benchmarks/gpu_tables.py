"""One command for each table of figures on GPUs: what it measures and needs, and how to run it.

    make bench-gpu                                     # lists them
    make bench-gpu TABLE=engine ARGS="--cells 8B/crowd 8B/one --seconds 540"
    make bench-gpu TABLE=all                           # those that this machine can run, one after the other

The same without make:

    python benchmarks/gpu_tables.py engine -- --cells 8B/crowd 8B/one --seconds 540

Results go to benchmarks/results/, a part of a table beside what is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A script with arguments that measure everything; `{gpus}` in them is the number of GPUs here."""

    script: str
    what: str  # and beside which peer, if any
    minutes: int  # of all of it: a guess, to plan with
    arguments: str = ""
    gpus: int = 1
    peer: str | None = None  # package that it is compared with, without which it does not run
    more: str = ""  # packages that add peers
    parts: str = ""  # the argument that measures a part
    launcher: str = ""


TABLES = {
    "engine": Table(
        "gpu_engine.py", "sampling beside vLLM, unseeded: five regimes, twelve shapes", 200, "--vllm", peer="vllm",
        parts="--cells, --seconds",
    ),
    "latency": Table(
        "gpu_latency.py", "latency of a server under arrivals beside vLLM's", 30, "--vllm", peer="vllm",
        parts="--shape, --rates, --seconds",
    ),
    "train": Table(
        "gpu_train.py", "forward and backward beside transformers, compiled or not: three batches", 40,
        peer="transformers", more="flash-attn",
        parts="--cells, --seconds",
    ),
    "step": Table(
        "gpu_step.py", "a whole RL step beside vLLM with transformers, and beside its parts alone", 15, "--vllm",
        peer="vllm", parts="--only, --seconds",
    ),
    "long": Table(
        "long_context.py", "training on one sequence of 32k to 256k tokens beside transformers", 10,
        peer="transformers",
        parts="--only, --seconds",
    ),
    "longest": Table(
        "long_context.py", "the longest sequence of two layers that transformers trains, beside it, and twice that", 10,
        "--find-longest --layers 2 --only 256k", peer="transformers", parts="--only, --layers, --seconds",
    ),
    "long-rl": Table("long_context.py", "a step of RL after a prompt of 128k tokens", 3, "--rl", parts="--seconds"),
    "images": Table(
        "gpu_images.py", "pictures to first token beside vLLM", 4, "--vllm", peer="vllm", parts="--seconds"
    ),
    "attention": Table(
        "gpu_attention.py", "attention beside cuDNN, FlashAttention 2 and 3: decode, prefill, chunks", 6,
        more="vllm", parts="--only",
    ),
    "linear": Table(
        "gpu_linear.py", "products beside cuBLAS and other invariant ones", 14, more="vllm, batch_invariant_ops",
        parts="--rows",
    ),
    "experts": Table("gpu_experts.py", "a layer's experts beside fused_moe", 5, more="vllm"),
    "adapters": Table(
        "gpu_adapters.py", "decoding with adapters beside the base alone and vLLM", 15, "--vllm", peer="vllm",
        parts="--shape",
    ),
    "packed": Table("gpu_packed.py", "packed int4 experts beside bfloat16", 8, "--memory 48", parts="--seconds"),
    "fp8": Table("gpu_fp8.py", "training in 8 bits beside bfloat16", 20, parts="--only"),
    "recurrent": Table(
        "gpu_recurrent.py", "recurrences of gated delta networks and Mamba-2 beside other libraries' kernels", 6,
        more="flash-linear-attention, mamba-ssm, vllm", parts="--cells, --seconds",
    ),
    "delta": Table("gpu_delta.py", "weight sync of an 8B shape against its aims", 10, parts="--only"),
    "offload": Table(
        "offload.py", "moments and masters on the host beside PCIe's time", 5, parts="--layers, --seconds"
    ),
    "countdown": Table("gpu_countdown.py", "countdown/gpu from random weights: minutes, and what it solves", 3),
    "losses": Table("api_losses.py", "a fused loss beside the same as a custom one", 5, parts="--only"),
    "shared-prompts": Table(
        "shared_prompts.py", "a group of one long prompt, computed once, beside every sequence whole", 3
    ),
    "ranks-engine": Table(
        "ranks_engine.py", "an engine over GPUs beside vLLM", 20, "--vllm --tp {gpus}", gpus=2, peer="vllm",
        parts="--only",
    ),
    "ranks-experts": Table(
        "ranks_experts.py", "experts over GPUs beside vLLM", 20, "--vllm --gpus {gpus}", gpus=2, peer="vllm",
        parts="--only",
    ),
    "ranks-products": Table(
        "ranks_products.py", "products and their communication beside all-reduce", 5, gpus=2, parts="--rows",
        launcher="-m torch.distributed.run --nproc-per-node {gpus}",
    ),
    "ranks-train": Table(
        "ranks_train.py", "full training of an 8B shape over GPUs beside transformers with FSDP2", 15,
        "--gpus {gpus}", gpus=2, peer="transformers", parts="--layers",
    ),
    "ranks-context": Table(
        "ranks_context.py", "training on one sequence of 128k and 256k tokens over GPUs beside one", 9,
        "--keep-attention",
        gpus=2, parts="--cp, --lengths, --layers",
    ),
    "ranks-publish": Table(
        "ranks_publish.py", "a version of an 8B shape encoded by all GPUs beside one", 5, "--ranks 1 {gpus} --record",
        gpus=2, parts="--layers, --rounds",
    ),
    "ranks-step": Table(
        "ranks_step.py", "a whole RL step over GPUs beside vLLM with FSDP2", 10, "--vllm --gpus {gpus}", gpus=2,
        peer="vllm", parts="--layers",
    ),
}  # fmt: skip


def lacks(table: Table, gpus: int) -> str | None:
    """The reason why this machine cannot run it."""
    if gpus < table.gpus:
        return f"needs {table.gpus} GPU{'s' * (table.gpus > 1)}, and there are {gpus}"
    if table.peer and importlib.util.find_spec(table.peer) is None:
        return f"needs {table.peer}, which is not installed"
    return None


def command(table: Table, gpus: int, more: list[str]) -> list[str]:
    words = f"{table.launcher} {HERE / table.script} {table.arguments}".format(gpus=gpus).split()
    return [sys.executable, *words, *more]


def listing(gpus: int) -> str:
    rows = [("table", "what", "minutes (a guess)", "GPUs", "needs", "more peers by", "in parts by", "here")]
    for name, each in TABLES.items():
        count = f"{each.gpus} or more" if each.gpus > 1 else "1"
        here = lacks(each, gpus) or "runs"
        rows.append((name, each.what, str(each.minutes), count, each.peer or "", each.more, each.parts, here))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=["all", *TABLES], help="all: every table that this machine can run")
    parser.add_argument("more", nargs="*", help="for the table's script, after --")
    args = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    if args.table is None:
        print(listing(gpus))
        return 0
    if args.table == "all" and args.more:
        parser.error("what follows -- is for one table's script; name the table")
    failed = []
    if args.table == "all" and all(lacks(table, gpus) for table in TABLES.values()):
        parser.error(f"this machine, with {gpus} GPUs, can run no table; without a name they are listed, and why")
    for name in TABLES if args.table == "all" else [args.table]:
        table = TABLES[name]
        if reason := lacks(table, gpus):
            print(f"{name}: left out: it {reason}", file=sys.stderr)
            failed += [name] if args.table != "all" else []
            continue
        words = command(table, gpus, args.more)
        print(f"{name}: {' '.join(words)}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
        print(f"{name}: {(time.monotonic() - begin) / 60:.1f} minutes", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
