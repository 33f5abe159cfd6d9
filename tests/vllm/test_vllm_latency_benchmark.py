"""benchmarks/gpu_latency.py on a CPU: vLLM's own client against both servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_toy_of_both_servers_is_measured_with_vllms_client():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_latency.py", "--tiny", "--vllm", "--rates", "6"]
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("latency, toy bf16, 6 requests/s of (16 in")]
    assert len(rows) == 6
    assert all("vLLM default" in row and " ms " in row for row in rows)
    assert "vLLM default, 6 requests/s, round 1: first token, p50" in done.stderr
