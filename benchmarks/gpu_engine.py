"""Tokens per second of sampling on a GPU, bfloat16, with logprobs: 256 requests of 128 tokens in, 256 out.

    python benchmarks/gpu_engine.py [--vllm] [--only dense] [--quick]

With `--vllm` the same requests go through vLLM in processes of its own: in its default mode, batch-invariant, and
around rlloop's model (`rollout.engine=vllm`). All have started before the first runs, and then they take turns: one
round each to warm up, then five, each on new prompts, of which the fastest counts. So a host that others slow down for
a while slows all. Then the trainer scores a quarter of each one's last round: k3 is the mean of exp(d) - d - 1, d its
logprob less the engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_shapes import MODELS, make_folder
from results_schema import Figure, report, table

REQUESTS, PROMPT, NEW, ROUNDS, SCORED = 256, 128, 256, 5, 64
READY, DONE = "#ready", "#done "
VLLM_CACHE_BYTES = 24 << 30  # of keys and values: all requests at once, with room to spare
SIDES = {  # name -> (who runs, environment)
    "rlloop": ("rlloop", {}),
    "vLLM default": ("vllm", {"VLLM_PLUGINS": "none"}),
    "vLLM batch-invariant": ("vllm", {"VLLM_PLUGINS": "none", "VLLM_BATCH_INVARIANT": "1"}),
    "rlloop's model inside vLLM": ("tier1", {}),
}
Run = Callable[[list[list[int]], int], list[tuple[list[int], Any]]]  # (prompts, round) -> tokens and logprobs of each


def prompts_of(seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 150000, (REQUESTS, PROMPT)).tolist()


def rlloop_side(folder: Path, kind: str) -> Run:
    import rlloop

    model = rlloop.load_model(folder, dtype="bfloat16", device="cuda")
    if kind == "tier1":
        from rlloop.rollout.vllm.engine import VllmEngine

        engine: Any = VllmEngine(model, max_cache_tokens=REQUESTS * 512, max_running=REQUESTS)
    else:
        engine = rlloop.Engine(model, max_cache_tokens=REQUESTS * 512)

    def run(prompts: list[list[int]], index: int) -> list[tuple[list[int], Any]]:
        sampling = [rlloop.SamplingParams(NEW, seed=1000 * index + i, ignore_eos=True) for i in range(REQUESTS)]
        return [(made.token_ids, made.logprobs) for made in engine.generate(prompts, sampling)]

    return run


def vllm_side(folder: Path, kind: str) -> Run:
    import vllm

    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, max_num_seqs=REQUESTS,
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.2, kv_cache_memory_bytes=VLLM_CACHE_BYTES,
    )  # fmt: skip

    def run(prompts: list[list[int]], index: int) -> list[tuple[list[int], Any]]:
        sampling = [
            vllm.SamplingParams(
                max_tokens=NEW, temperature=1.0, seed=1000 * index + i, ignore_eos=True, logprobs=0, detokenize=False
            )
            for i in range(REQUESTS)
        ]
        made = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        outputs = [request.outputs[0] for request in made]
        return [
            (list(each.token_ids), [place[id].logprob for place, id in zip(each.logprobs, each.token_ids, strict=True)])
            for each in outputs
        ]

    return run


def serve(name: str, folder: Path) -> None:
    """A round for each line on stdin, the first to warm up; what the last one made stays in the folder."""
    kind = SIDES[name][0]
    run = (vllm_side if kind == "vllm" else rlloop_side)(folder, kind)
    print(f"\n{READY}", flush=True)
    for index, _ in enumerate(sys.stdin):
        prompts = prompts_of(index)
        begin = time.perf_counter()
        made = run(prompts, index)
        speed = sum(len(logprobs) for _, logprobs in made) / (time.perf_counter() - begin)
        print(f"{name}, {'round ' + str(index) if index else 'warm-up'}: {speed:,.0f} tokens/s", file=sys.stderr)
        kept = made[:SCORED]
        np.savez(
            folder / f"{list(SIDES).index(name)}.npz", prompts=np.array(prompts[:SCORED]),
            tokens=np.array([tokens for tokens, _ in kept]),
            logprobs=np.array([logprobs for _, logprobs in kept], np.float32),
        )  # fmt: skip
        print(f"\n{DONE}{speed}", flush=True)


def mismatch(folder: Path, names: list[str]) -> dict[str, tuple[float, int]]:
    """(k3, how many logprobs differ) of each engine from the trainer's own path."""
    import torch

    import rlloop

    model, found = rlloop.load_model(folder, dtype="bfloat16", device="cuda"), {}
    for name in names:
        made = np.load(folder / f"{list(SIDES).index(name)}.npz")
        pairs = list(zip(made["prompts"].tolist(), made["tokens"].tolist(), strict=True))
        with torch.no_grad():
            scored = torch.stack(rlloop.token_logprobs(model, pairs, max_tokens=16384)).cpu().numpy()
        d = scored.astype(np.float64) - made["logprobs"]
        different = int((scored.view(np.int32) != made["logprobs"].view(np.int32)).sum())
        found[name] = float(np.mean(np.expm1(d) - d)), different
        print(f"{name}: k3 {found[name][0]:.3g}, {different} of {d.size} logprobs differ", file=sys.stderr)
    return found


class Side:
    """One engine in a process of its own: they all start at once, and then take turns."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        command = [sys.executable, __file__, "--child", str(folder), name]
        environment = {**os.environ, **SIDES[name][1]}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def until(self, marker: str) -> str:
        """The rest of the first line that begins with the marker; what an engine prints besides is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(marker):
                return line.removeprefix(marker)
        raise SystemExit(f"{self.name} ended with code {self._process.wait()}")

    def round(self) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self.until(DONE))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # vLLM has processes of its own
        self._process.wait()


def mismatches(folder: Path, names: list[str]) -> dict[str, tuple[float, int]]:
    command = [sys.executable, __file__, "--child", str(folder), "k3", *names]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def figures_of(model: str, names: list[str]) -> list[Figure]:
    work = f"engine, {MODELS[model][0]} bf16, {REQUESTS} x ({PROMPT} in, {NEW} out), logprobs"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_folder(model, folder)
        sides = [Side(name, folder) for name in names]
        for side in sides:
            side.until(READY)
        rounds = [[side.round() for side in sides] for _ in range(ROUNDS + 1)]
        speed = dict(zip(names, map(max, zip(*rounds[1:], strict=True)), strict=True))
        for side in sides:
            side.close()
        apart = mismatches(folder, names)
    figures = [Figure(name=work, unit="tokens/s", value=speed["rlloop"])] if len(names) == 1 else []
    for name in ("rlloop", "rlloop's model inside vLLM"):
        for peer, aim in (("vLLM default", 0.95), ("vLLM batch-invariant", 1.25)):
            if name in names and peer in names:
                title = work if name == "rlloop" else f"{work}, {name}"
                figures.append(
                    Figure(name=title, unit="tokens/s", value=speed[name], peer=peer, peer_value=speed[peer], aim=aim)
                )
    return figures + [
        Figure(name=f"k3 of {name} from the trainer, {MODELS[model][0]} bf16", unit="nats", value=k3)
        for name, (k3, _) in apart.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--only", choices=MODELS, action="append", help="of the models")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--without", choices=list(SIDES), action="append", default=[], help="of the engines")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, *what = args.child
        if what[0] == "k3":
            print(json.dumps(mismatch(Path(folder), what[1:])))
        else:
            serve(what[0], Path(folder))
        return
    names = [name for name in (SIDES if args.vllm else ["rlloop"]) if name not in args.without]
    figures = [figure for model in args.only or MODELS for figure in figures_of(model, names)]
    if args.quick:
        print(table(figures))
    else:
        report("gpu-engine", figures, packages=("triton", *(("vllm",) if args.vllm else ())))


if __name__ == "__main__":
    main()
