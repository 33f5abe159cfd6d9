"""A run of tens of thousands of small steps: what grows with them? Memory, descriptors, disk and latency by step.

    nice python benchmarks/long_run.py --steps 50000           # benchmarks/results/long-run.json
    nice python benchmarks/long_run.py --steps 5000 --fleet    # with a relay and an engine: long-run-fleet.json

A model of 5,000 weights takes steps of two completions of four tokens each, so that whatever is kept for each step
shows. The processes are looked at from outside, by /proc. `--kills N` ends the trainer N times by SIGKILL on the way,
and the same command resumes it. At the end `rlloop verify` reads the whole history.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.results_schema import Figure, report  # noqa: E402
from rlloop.models import new_model, save_model  # noqa: E402
from rlloop.runs.folder import read_records  # noqa: E402
from rlloop.sync.manifest import new_key  # noqa: E402
from rlloop.web import TOKEN_VARIABLE  # noqa: E402

TOKEN = "a token of the long run"
REWARD = "def reward(prompt, completion, example):\n    return len(completion) % 7\n"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 160, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


@dataclass
class Look:
    """One look at everything."""

    step: int
    seconds: float
    memory: dict[str, int]  # process -> bytes that it alone holds
    descriptors: dict[str, int]
    disk: dict[str, int]  # part of the run's folder -> bytes
    files: int


@dataclass
class Processes:
    """The run's, by name."""

    place: Path
    settings: list[str]
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "rlloop", *map(str, arguments)]
        with (self.place / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, cwd=self.place, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def train(self) -> None:
        self.start("trainer", *self.settings)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def prepare(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    save_model(new_model(CONFIG, seed=0), place / "model")
    (place / "constant.py").write_text(REWARD)
    new_key(place / "key")


def settings(steps: int, overrides: Sequence[str]) -> list[str]:
    return [
        "train", "--config-name", "countdown", "run.dir=run", "model.path=model", "reward._target_=constant.reward",
        f"trainer.num_steps={steps}", "trainer.lr=1e-3", "rollout.num_prompts=1", "rollout.group_size=2",
        "rollout.max_tokens=4", "eval.every=0", "eval.num_draws=1", "checkpoint.every=200", *overrides,
    ]  # fmt: skip


def memory_of(pid: int) -> int:
    """Private bytes: what the process would give back."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def disk_of(run: Path) -> tuple[dict[str, int], int]:
    found, files = dict[str, int](), 0
    for folder, _, names in os.walk(run):
        for name in names:
            path = Path(folder, name)
            try:
                size = path.stat().st_blocks * 512
            except OSError:
                continue  # it was moved meanwhile
            part = path.relative_to(run).parts[0]
            found[part] = found.get(part, 0) + size
            files += 1
    return found, files


def look(processes: Processes, step: int, began: float) -> Look:
    pids = {name: process.pid for name, process in processes.running.items() if process.poll() is None}
    disk, files = disk_of(processes.place / "run")
    return Look(
        step,
        time.monotonic() - began,
        {name: memory_of(pid) for name, pid in pids.items()},
        {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
        disk,
        files,
    )


def watch(processes: Processes, every: int, kills: Sequence[int], seconds: float) -> list[Look]:
    """Looks after every `every` steps, until the run has ended, or is ended after `seconds`. The trainer is killed at
    each step of `kills`."""
    began, looks, left = time.monotonic(), list[Look](), list(kills)
    trainer, taken, kept = processes.running["trainer"], 0, b""
    journal = processes.place / "run" / "metrics.jsonl"
    while trainer.poll() is None:
        time.sleep(0.2)
        try:  # its last line alone, since the file grows
            with journal.open("rb") as file:
                file.seek(max(0, journal.stat().st_size - 16384))
                kept = file.read().splitlines()[-2]
            taken = json.loads(kept)["step"]
        except (OSError, IndexError, ValueError):
            continue
        if not looks or taken >= looks[-1].step + every:
            try:
                looks.append(look(processes, taken, began))
            except OSError:
                continue  # a process has just ended
            print(f"step {taken}: {looks[-1].memory} {looks[-1].descriptors} {looks[-1].files} files", flush=True)
        if time.monotonic() - began > seconds:
            trainer.send_signal(signal.SIGINT)
            trainer.wait()
            return looks
        if left and taken >= left[0]:
            del left[0]
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            processes.train()
            trainer = processes.running["trainer"]
    if trainer.returncode != 0:
        raise SystemExit((processes.place / "trainer.log").read_text()[-3000:])
    return looks


def growth(steps: Sequence[int], values: Sequence[float]) -> float:
    """Growth by 1,000 steps: the slope of a line through the second half of the looks."""
    half = len(steps) // 2
    return 1000 * float(np.polyfit(steps[half:], values[half:], 1)[0]) if len(steps) - half > 1 else 0.0


def figures(looks: Sequence[Look], run: Path, seconds: float) -> list[Figure]:
    steps = [each.step for each in looks]
    made = list[Figure]()
    for name in looks[-1].memory:
        memory = [each.memory.get(name, 0) for each in looks]
        descriptors = [each.descriptors.get(name, 0) for each in looks]
        made += [
            Figure(name=f"{name}: private memory at the end", unit="MB", value=memory[-1] / 1e6,
                   peer=f"after {steps[len(steps) // 10]} steps", peer_value=memory[len(steps) // 10] / 1e6,
                   lower_is_better=True),
            Figure(name=f"{name}: growth of memory, second half", unit="MB by 1,000 steps",
                   value=growth(steps, memory) / 1e6, lower_is_better=True),
            Figure(name=f"{name}: descriptors at the end", unit="", value=descriptors[-1], lower_is_better=True,
                   peer=f"after {steps[len(steps) // 10]} steps", peer_value=descriptors[len(steps) // 10]),
        ]  # fmt: skip
    parts = sorted({part for each in looks for part in each.disk})
    for part in parts:
        sizes = [each.disk.get(part, 0) for each in looks]
        made.append(
            Figure(name=f"disk: {part}", unit="KB by 1,000 steps", value=growth(steps, sizes) / 1e3,
                   lower_is_better=True)
        )  # fmt: skip
    made.append(Figure(name="files in the run's folder", unit="by 1,000 steps", lower_is_better=True,
                       value=growth(steps, [each.files for each in looks])))  # fmt: skip
    taken = np.array([record["time/step"] for record in read_records(run / "metrics.jsonl") if "time/step" in record])
    tenth = max(1, len(taken) // 10)
    for name, share in (("median", 0.5), ("p99", 0.99)):
        first, last = (float(np.quantile(part, share)) for part in (taken[tenth : 2 * tenth], taken[-tenth:]))
        made.append(Figure(name=f"a step's time, last tenth, {name}", unit="ms", value=1000 * last,
                           peer="second tenth", peer_value=1000 * first, lower_is_better=True))  # fmt: skip
    made.append(Figure(name="steps run", unit="", value=float(steps[-1] if len(taken) < 1 else len(taken))))
    made.append(Figure(name="their wall time", unit="s", value=seconds, lower_is_better=True))
    return made


def verified(place: Path) -> tuple[float, int]:
    """Seconds and peak memory of `rlloop verify`. Ends the script if it finds anything."""
    command = [sys.executable, "-m", "rlloop", "verify", "run", "--run-code"]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    print(output[-4000:])
    if process.returncode != 0:
        raise SystemExit("rlloop verify does not accept the history")
    return time.monotonic() - began, usage.ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=500, help="steps between looks")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which it ends, however many steps it took")
    parser.add_argument("--fleet", action="store_true", help="sample by an engine behind a relay")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs of the trainer on the way")
    parser.add_argument("--place", type=Path, help="folder for the run; default: a temporary one")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    given = parser.parse_args()
    place = (given.place or Path(tempfile.mkdtemp(prefix="long-run-"))).resolve()
    shutil.rmtree(place, ignore_errors=True)
    prepare(place)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{place}"}
    environment |= {TOKEN_VARIABLE: TOKEN}
    processes = Processes(place, settings(given.steps, given.overrides), environment)
    try:
        if given.fleet:
            with_fleet(processes)
        processes.train()
        kills = [round(given.steps * (index + 0.5) / given.kills) for index in range(given.kills)]
        began = time.monotonic()
        looks = watch(processes, given.every, kills, given.seconds)
        seconds = time.monotonic() - began
    finally:
        processes.close()
    made = figures(looks, place / "run", seconds)
    took, peak = verified(place)
    made += [Figure(name="rlloop verify", unit="s", value=took, lower_is_better=True),
             Figure(name="rlloop verify, most memory", unit="MB", value=peak / 1e6, lower_is_better=True)]  # fmt: skip
    report("long-run-fleet" if given.fleet else "long-run", made)


def with_fleet(processes: Processes) -> None:
    ports = {"trainer": 27_310, "relay": 27_311, "engine": 27_312}
    at = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    processes.settings += ["fleet=regions", f"fleet.port={ports['trainer']}", "fleet.signing_key=key",
                           "fleet.heartbeat=0.2", f'+fleet.engines.eu=["{at["engine"]}"]']  # fmt: skip
    processes.start("relay", "serve", "relay", "--port", ports["relay"], "--upstream", at["trainer"], "--cache",
                    "cache", "--cache-bytes", 80 << 20)  # fmt: skip
    processes.start("engine", "serve", "engine", "--model", "model", "--port", ports["engine"], "--threads", 1,
                    "--interval", 0.2, "--store", at["trainer"], "--relay", at["relay"], "--public-key", "key.pub",
                    "--region", "eu")  # fmt: skip
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for name in ("relay", "engine"):
        for _ in range(600):
            try:
                httpx.get(f"{at[name]}/health", headers=headers, trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)


if __name__ == "__main__":
    main()
