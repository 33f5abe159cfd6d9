"""Time and held-out pass@1 of the recipe countdown/gpu: warm start and RL, from a random model.

python benchmarks/gpu_countdown.py [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results_schema import Figure, need_gpus, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    overrides = parser.parse_args().overrides
    need_gpus()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train = [sys.executable, "-m", "rlloop", "train", "--config-name", "countdown/gpu"]
        begin = time.perf_counter()
        # A cache of its own: what an earlier run's warm start left must not shorten this one.
        command = [*train, f"run.dir={folder / 'run'}", *overrides]
        subprocess.run(command, env={**os.environ, "RLLOOP_CACHE": place}, check=True)
        whole = time.perf_counter() - begin
        summary = json.loads((folder / "run" / "summary.json").read_text())
    solved, parity = summary["eval/solved"], summary["parity"]
    name = "countdown/gpu, 79M parameters bf16"
    figures = [
        Figure(name=f"{name}: held-out problems solved after the warm start", unit="", value=solved["first"]),
        Figure(name=f"{name}: after {summary['step']} steps of RL", unit="", value=solved["last"]),
        Figure(name=f"{name}: everything, from random weights on", unit="s", value=whole),
        Figure(name=f"{name}: the RL steps", unit="s", value=summary["seconds"]),
        Figure(
            name=f"{name}: largest k3 of a step, of {parity['tokens']:,} tokens", unit="nats", value=parity["k3_max"]
        ),
        Figure(name=f"{name}: logprobs that differ", unit="", value=parity["tokens_different"]),
    ]
    report("gpu-countdown", figures, packages=("triton",))


if __name__ == "__main__":
    main()
