"""The collapse study on GPUs (docs/gpu.md): every arm with several seeds, some runs at a time on each GPU.

    python benchmarks/gpu_study.py [FOLDER] [--models dense experts] [--lr 2e-4] [--seeds 3] [--slots 4] [--list]
    rlloop compare runs/gpu_study/dense-2e-4 -o report.html  # of a stopped study, name the runs that ended

What one change of an engine does alone, in many small steps:

    python benchmarks/gpu_study.py runs/gpu_study --models dense --steps 1000 --lr 1e-5 --override eval.every=50 \
      --arms zero_kld other_batches stock_attention flash_attention stock_linear compiled

More and more of one kind of difference:

    python benchmarks/gpu_study.py runs/gpu_study --models dense --arms zero_kld int8 int6 int5 int4

A run that was stopped goes on, a finished one is left as it is: the same command continues the study. Warm starts come
first, one for each model, which all arms and seeds share. A run's output is in its .log. Runs wait for the host much of
the time, so that a GPU has room for several.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

RECIPES = {"dense": "countdown/collapse_gpu", "experts": "countdown/collapse_gpu_moe"}
FP8 = ["arm=fp8"]
OTHER_BATCHES = [
    "arm=other_batches", "rollout.max_batch_tokens=2048", "rollout.max_cache_tokens=32768", "rollout.page_size=16",
]  # fmt: skip
ARMS: dict[str, dict[str, list[str]]] = {
    "dense": {
        "zero_kld": ["arm=zero_kld"],
        "fp4_both": ["arm=fp4_both"],
        "fp8_all": ["arm=fp8_all"],
        "other_kernels": ["arm=other_kernels"],
        "fp8_kernels": ["arm=fp8_kernels"],
        # Doses of one kind: the same roundings, with scales of more and more numbers.
        "fp8_block": [*FP8, "rollout.drift.granularity=block"],
        "fp8_channel": FP8,
        "fp8_tensor": [*FP8, "rollout.drift.granularity=tensor"],
        # Controls: the mismatch without clipping by it, the rounding in both, and other batches alone.
        "fp4_both_none": ["arm=fp4_both", "guard=none"],
        "fp4": ["arm=fp4"],
        "fp4_none": ["arm=fp4_none"],
        "fp4_both_sides": ["arm=fp4_both_sides"],
        "other_batches": OTHER_BATCHES,
    },
    "experts": {
        "zero_kld": ["arm=zero_kld"],
        "fp4_both": ["arm=fp4_both"],
        "fp8_all": ["arm=fp8_all"],
        "router": ["arm=router"],
        "other_kernels": ["arm=other_kernels"],
        "fp4_both_none": ["arm=fp4_both", "guard=none"],
        "fp4_both_sides": ["arm=fp4_both_sides"],
        "other_batches": OTHER_BATCHES,
    },
}  # fmt: skip
# Run only where --arms names them. One change of the engine each:
NAMED = {
    "stock_attention": ["arm=stock_attention"],
    "flash_attention": ["arm=flash_attention"],  # needs vLLM
    "stock_linear": ["arm=stock_linear"],
    "compiled": ["arm=compiled"],
    # Doses of one kind: weights rounded to fewer and fewer bits, each bit less twice as coarse.
    **{f"int{bits}": [f"arm=int{bits}"] for bits in (8, 6, 5, 4)},
}


class Run(NamedTuple):
    model: str
    arm: str
    lr: str
    seed: int
    steps: int | None = None  # None: the recipe's
    overrides: tuple[str, ...] = ()  # of the recipe, for all runs

    @property
    def name(self) -> str:
        steps = f"-{self.steps}" if self.steps else ""
        return f"{self.model}-{self.lr}{steps}/{self.arm},seed={self.seed}"  # as `rlloop compare` reads arms and seeds

    def command(self, folder: Path) -> list[str]:
        return [
            sys.executable, "-m", "rlloop", "train", "--config-name", RECIPES[self.model], "algorithm=gspo",
            *{**NAMED, **ARMS[self.model]}[self.arm], f"trainer.lr={self.lr}", f"seed={self.seed}",
            *([f"trainer.num_steps={self.steps}"] if self.steps else []), *self.overrides,
            f'run.dir="{folder / self.name}"',
        ]  # fmt: skip


def runs_of(
    models: list[str],
    lrs: list[str],
    seeds: int,
    arms: list[str] | None,
    steps: int | None = None,
    overrides: tuple[str, ...] = (),
) -> list[Run]:
    """Whole arms first, so that a study that is stopped has some."""
    return [
        Run(model, arm, lr, seed, steps, overrides)
        for model in models
        for lr in lrs
        for arm in [*ARMS[model], *(NAMED if arms else ())]
        for seed in range(seeds)
        if arms is None or arm in arms or f"{arm},seed={seed}" in arms
    ]


class Study:
    def __init__(self, folder: Path, runs: list[Run]) -> None:
        self.folder, self.done, self.failed = folder, 0, list[str]()
        self._todo, self._lock, self._stopped = list(runs), threading.Lock(), False
        self._warm = {run.model: threading.Event() for run in runs}
        self._cold: queue.SimpleQueue[Run] = queue.SimpleQueue()
        for model in self._warm:
            self._cold.put(next(run for run in runs if run.model == model))

    def work(self, gpu: str, threads: int) -> None:
        """Take runs until none is left."""
        while not self._stopped:
            try:
                cold = self._cold.get_nowait()
            except queue.Empty:
                break
            self._run(cold, gpu, threads, "--dry-run")
            self._warm[cold.model].set()
        while True:
            with self._lock:
                if self._stopped:
                    return
                run = next((run for run in self._todo if self._warm[run.model].is_set()), None)
                if run is not None:
                    self._todo.remove(run)
                elif not self._todo:
                    return
            if run is None:
                time.sleep(1)
            else:
                self._run(run, gpu, threads)

    def stop(self) -> None:
        """Begin no more runs."""
        with self._lock:
            self._stopped = True
            self._todo.clear()

    def _run(self, run: Run, gpu: str, threads: int, *more: str) -> None:
        log = self.folder / f"{run.name}{'.warm' if more else ''}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}
        begin = time.monotonic()
        with log.open("w") as output:
            code = subprocess.run(
                [*run.command(self.folder), *more],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        what = "warm start of " if more else ""
        print(f"{what}{run.name}: exit code {code}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        with self._lock:
            self.done += not code and not more
        if code:
            self.failed.append(f"{log}: exit code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gpu_study"))
    parser.add_argument("--models", choices=RECIPES, nargs="+", default=list(RECIPES))
    parser.add_argument("--lr", nargs="+", default=["2e-4"], help="rates of learning")
    parser.add_argument(
        "--arms", nargs="+", help=f"some of them, or {', '.join(NAMED)}, left out else; ARM,seed=N: a single run"
    )
    parser.add_argument("--steps", type=int, help="of a run, in place of the recipe's")
    parser.add_argument("--override", action="append", default=[], help="of the recipe, such as eval.every=50")
    parser.add_argument("--seeds", type=int, default=3, help="of each arm, from 0 on")
    parser.add_argument("--slots", type=int, default=4, help="runs at a time on each GPU")
    parser.add_argument("--list", action="store_true", help="print the runs' commands")
    args = parser.parse_args()
    runs = runs_of(args.models, args.lr, args.seeds, args.arms, args.steps, tuple(args.override))
    if args.list:
        print("\n".join(shlex.join(run.command(args.folder)) for run in runs))
        return 0
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(at) for at in range(torch.cuda.device_count())]
    if not gpus or not runs:
        parser.error("there is no GPU" if runs else f"no arm is named {' or '.join(args.arms)}")
    study, threads = Study(args.folder, runs), max(1, (os.cpu_count() or 1) // (args.slots * len(gpus)))
    workers = [threading.Thread(target=study.work, args=(gpu, threads)) for gpu in gpus * args.slots]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:  # runs have been interrupted too, and end after their step
        study.stop()
        for worker in workers:
            worker.join()
    print("\n".join([f"{study.done} runs of {len(runs)} are done", *study.failed]), file=sys.stderr)
    return int(study.done < len(runs))


if __name__ == "__main__":
    sys.exit(main())
