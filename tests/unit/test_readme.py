"""The README states no figure but the recorded ones."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_figures_are_those_of_the_recorded_results():
    script = ROOT / "benchmarks" / "readme.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
