"""The loop in one process and on Ray: steps per second by replicas, its own overhead, and Ray's time to a first token.

    python benchmarks/launch.py [--steps 30] [--replicas 1 2 4] [--no-write]

Every run is recipe countdown from the same warm start (made first, not timed), through the command line, with 512
completions a step; the first five steps are left out. Ratios are over `launch=local` in the same run of this script:
replicas share the cores of one machine here, so they cost and do not pay. Overhead is what of a step's time is spent
neither in sampling nor in the update: sync, rewards, advantages, comparison, records.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results_schema import Figure, report

WARM_UP = 5


def train(folder: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of each timed step of one run."""
    command = [sys.executable, "-m", "rlloop", "train", "--config-name", "countdown", f"run.dir={folder}"]
    command += [f"trainer.num_steps={steps + WARM_UP}", "eval.every=0", "eval.num_draws=1", "checkpoint.every=0"]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"] > WARM_UP]


def steps_per_second(records: list[dict[str, Any]]) -> float:
    seconds = sorted(record["time/step"] - record.get("time/eval", 0.0) for record in records)
    return 1.0 / seconds[len(seconds) // 2]


def overhead(records: list[dict[str, Any]]) -> float:
    """Percent of all steps' time outside rollout and update; evaluations are left out."""
    whole = sum(record["time/step"] - record.get("time/eval", 0.0) for record in records)
    return 100.0 * (1.0 - sum(record["time/rollout"] + record["time/update"] for record in records) / whole)


def seconds_to_first_token(root: Path) -> float:
    """Seconds from `ray.init` to a sampled token: Ray, the placement group, two actors, their models, weights."""
    from rlloop.launch.compose import build, compose_recipe
    from rlloop.launch.prepare import prepare
    from rlloop.launch.ray_actors import ray_parts
    from rlloop.runs.folder import RunFolder
    from rlloop.types import SamplingParams

    config = build(compose_recipe("countdown", ["launch=ray", "ray.replicas=1", f"run.dir={root}"]))
    with RunFolder(root) as folder:
        prepared = prepare(config)
        prompt = prepared.task.eval_examples(1)[0].prompt_ids
        began = time.perf_counter()
        with ray_parts(config, prepared, folder) as parts:
            parts.sync.publish(0)
            parts.engine.generate([prompt], SamplingParams(max_tokens=1, seed=0))
            took = time.perf_counter() - began
        prepared.scorer.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each run")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4], help="engines beside the co-located one")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        train(root / "warm", 1)
        local = train(root / "local", args.steps)
        base = steps_per_second(local)
        figures = [
            Figure(name="steps, launch=local", unit="steps/s", value=base),
            Figure(name="overhead of the loop, launch=local", unit="% of a step", value=overhead(local)),
        ]
        for count in args.replicas:
            run = train(root / f"ray{count}", args.steps, "launch=ray", f"ray.replicas={count}")
            name = f"launch=ray, ray.replicas={count}"
            figures += [
                Figure(
                    name=f"steps, {name}",
                    unit="steps/s",
                    value=steps_per_second(run),
                    peer="launch=local",
                    peer_value=base,
                ),
                Figure(name=f"overhead of the loop, {name}", unit="% of a step", value=overhead(run)),
            ]
        figures.append(Figure(name="ray.init to first token", unit="s", value=seconds_to_first_token(root / "first")))
    report("launch", figures, packages=("ray",), write=not args.no_write)


if __name__ == "__main__":
    main()
