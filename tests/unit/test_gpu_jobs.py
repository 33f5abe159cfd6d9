"""scripts/gpu_jobs.py: which jobs run together, and what is said of each."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_jobs.py"


def jobs(folder: Path, *each: tuple[str, int, int, str]) -> Path:
    path = folder / "jobs.toml"
    entries = [f"[[jobs]]\nname = '{n}'\ngpus = {g}\nseconds = {s}\ncommand = '''{c}'''\n" for n, g, s, c in each]
    path.write_text("".join(entries))
    return path


def ran(path: Path, *arguments: str) -> tuple[int, list[list[str]]]:
    """(exit status, the words of each line)"""
    command = [sys.executable, str(SCRIPT), str(path), *arguments]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return made.returncode, [line.split() for line in (made.stdout + made.stderr).splitlines()]


def test_a_plan_keeps_gpus_for_a_job_that_waits_and_fills_them_until_then(tmp_path):
    path = jobs(tmp_path, ("long", 1, 100, ""), ("pair", 2, 50, ""), ("short", 1, 90, ""), ("late", 1, 110, ""),
                ("tests", 0, 30, ""), ("more", 0, 30, ""))  # fmt: skip
    code, lines = ran(path, "--gpus", "2", "--plan", "--seconds", "300")
    assert code == 0
    assert sorted(lines) == [
        ["0", "100", "planned", "long"], ["0", "90", "planned", "short"], ["100", "150", "planned", "pair"],
        ["150", "180", "planned", "more"], ["150", "180", "planned", "tests"], ["150", "260", "planned", "late"],
    ]  # fmt: skip
    _, lines = ran(path, "--gpus", "2", "--plan", "--seconds", "200")
    assert ["not", "run", "late:", "1", "GPUs,", "110", "s"] in lines


def test_jobs_have_gpus_of_their_own_and_their_ends_are_told(tmp_path):
    path = jobs(tmp_path, ("both", 2, 60, "echo on $CUDA_VISIBLE_DEVICES"), ("bad", 0, 60, "echo why; exit 3"))
    code, lines = ran(path, "--gpus", "2", "--out", str(tmp_path))
    assert code == 1
    assert [line[2:] for line in lines] == [["passed", "both", "on", "0,1"], ["exit", "3", "bad", "why"]]
    assert (tmp_path / "bad.log").read_text() == "why\n"
    code, lines = ran(path, "--gpus", "2", "--only", "other")
    assert code == 2
    assert lines[-1][-8:] == ["has", "no", "job", "other;", "it", "has", "both,", "bad"]


def test_the_jobs_at_hand_run_what_exists():
    for job in tomllib.loads(SCRIPT.with_suffix(".toml").read_text())["jobs"]:
        named = re.findall(r"(?:tests|benchmarks)/\S+", job["command"])
        assert named, job
        assert all((ROOT / each).is_file() for each in named), job
