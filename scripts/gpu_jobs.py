"""Run tests and benchmarks side by side on a machine's GPUs, the most important first, within a limit of time.

    python scripts/gpu_jobs.py scripts/gpu_jobs.toml --seconds 1500 --out results
    python scripts/gpu_jobs.py scripts/gpu_jobs.toml --gpus 2 --plan        # what would run when, by the estimates
    python scripts/gpu_jobs.py scripts/gpu_jobs.toml --only images tiles

The file lists jobs in the order of their importance:

    [[jobs]]
    name = "ranks-experts"
    command = "python benchmarks/ranks_experts.py --gpus 2 --vllm"
    gpus = 2         # of its own, for figures; 0: shares one with others, as tests can
    seconds = 200    # an estimate: a job starts if as much time is left, and is killed after twice that
    after = ["images"]    # waits until these have ended

Each job's output goes to OUT/NAME.log. The file is read again before each start: jobs can be added while others run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

SHARES = 5  # jobs that share a GPU


@dataclass
class Job:
    name: str
    command: str
    gpus: int = 1
    seconds: int = 60
    after: Collection[str] = ()

    on: list[int] = field(default_factory=list)  # GPUs
    began: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def end(self) -> float:
        return self.began + self.seconds


def read_jobs(path: Path, only: Sequence[str]) -> list[Job]:
    jobs = [Job(**each) for each in tomllib.loads(path.read_text())["jobs"]]
    names = [job.name for job in jobs]
    unknown = {name for job in jobs for name in job.after} | set(only)
    if unknown := unknown - set(names):
        raise LookupError(f"{path} has no job {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    if only:
        jobs = [replace(job, after=set(job.after) & set(only)) for job in jobs if job.name in only]
    return jobs


def room(job: Job, running: Sequence[Job], gpus: Sequence[int]) -> list[int]:
    """Those of `gpus` that the job can start on; none if it must wait."""
    on = {gpu: [each for each in running if gpu in each.on] for gpu in gpus}
    if job.gpus:
        free = [gpu for gpu in gpus if not on[gpu]]
        return free[: job.gpus] if len(free) >= job.gpus else []
    shared = [gpu for gpu in gpus if len(on[gpu]) < SHARES and not any(each.gpus for each in on[gpu])]
    return sorted(shared, key=lambda gpu: len(on[gpu]))[:1]


def next_job(
    jobs: Sequence[Job], running: Sequence[Job], ended: Collection[str], gpus: int, now: float, end: float
) -> Job | None:
    """The most important job that can start now. Those behind the first that cannot do not delay it."""
    known = {*ended, *(each.name for each in running)}
    everyone = list(range(gpus))
    busy = {gpu: max([each.end for each in running if gpu in each.on], default=now) for gpu in everyone}
    kept, until = set[int](), now  # for that job
    for job in jobs:
        if job.name in known or now + job.seconds > end or job.gpus > gpus or not set(job.after) <= set(ended):
            continue
        job.on = room(job, running, [gpu for gpu in everyone if gpu not in kept or now + job.seconds <= until])
        if job.on:
            return job
        soonest = sorted(everyone, key=lambda gpu: busy[gpu])[: max(1, job.gpus)]
        if not kept and busy[soonest[-1]] + job.seconds <= end:
            kept, until = set(soonest), busy[soonest[-1]]
    return None


def start(job: Job, out: Path) -> None:
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(own[gpu] if own[0] else str(gpu) for gpu in job.on)}
    with (out / f"{job.name}.log").open("wb") as log:
        job.process = subprocess.Popen(
            job.command, shell=True, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def kill(job: Job) -> None:
    """Its children, too."""
    if job.process is not None:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def result(job: Job, now: float) -> str | None:
    """None while the job runs."""
    if job.process is None:  # of a plan
        return "planned" if now >= job.end else None
    code = job.process.poll()
    if code is None and now >= job.began + 2 * job.seconds:
        kill(job)
        return "killed"
    return None if code is None else "passed" if code == 0 else f"exit {code}"


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:100]


def run(path: Path, only: Sequence[str], gpus: int, seconds: float, out: Path | None) -> int:
    """The number of jobs that did not pass. Without `out` nothing starts: a plan."""
    jobs, running = read_jobs(path, only), list[Job]()
    results: dict[str, tuple[str, float, float]] = {}
    zero, now = time.monotonic(), 0.0
    try:
        while True:
            for job in list(running):
                if made := result(job, now):
                    running.remove(job)
                    results[job.name] = made, job.began, now
                    said = "" if out is None else last_line(out / f"{job.name}.log")
                    print(f"{job.began:6.0f} {now:6.0f}  {made:8}  {job.name}  {said}", flush=True)
            with suppress(OSError, ValueError, LookupError, TypeError):  # as while it is being saved
                jobs = read_jobs(path, only)
            while job := next_job(jobs, running, results, gpus, now, seconds):
                job.began = now
                running.append(job)
                if out is not None:
                    start(job, out)
            if not running:
                break
            if out is None:
                now = min(job.end for job in running)
            else:
                time.sleep(0.5)
                now = time.monotonic() - zero
    finally:
        for job in running:
            kill(job)
    for job in jobs:
        if job.name not in results:
            print(f"               not run   {job.name}: {job.gpus} GPUs, {job.seconds} s")
    return sum(made not in ("passed", "planned") for made, _, _ in results.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--gpus", type=int, help="how many to use; all by default")
    parser.add_argument("--seconds", type=float, default=1e9, help="no job starts that would end later")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_jobs"), help="folder of the logs")
    parser.add_argument("--plan", action="store_true")
    asked = parser.parse_args()
    try:
        read_jobs(asked.jobs, asked.only)
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(str(error.args[0]) if isinstance(error, LookupError) else f"{asked.jobs}: {error}")
    gpus = asked.gpus
    if gpus is None or not asked.plan:
        import torch

        here = torch.cuda.device_count()
        gpus = here if gpus is None else min(gpus, here) if here else gpus
    if asked.plan:
        return run(asked.jobs, asked.only, gpus, asked.seconds, None)
    asked.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its jobs end, too
    return min(1, run(asked.jobs, asked.only, gpus, asked.seconds, asked.out))


if __name__ == "__main__":
    sys.exit(main())
