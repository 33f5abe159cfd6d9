"""The blocks of docs/tutorial.md, in their order and in one empty folder, with fewer and smaller steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rlloop.cli.main import main
from rlloop.runs.folder import read_records

ROOT = Path(__file__).resolve().parents[3]
TUTORIAL = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = ["rollout.num_prompts=4", "rollout.group_size=4", "eval.num_draws=4"]


def commands() -> Iterator[list[str]]:
    """Writes the files as they come; gives the commands."""
    for language, title, text in BLOCK.findall(TUTORIAL.read_text()):
        if title:
            Path(title).parent.mkdir(parents=True, exist_ok=True)
            Path(title).write_text(text)
        else:
            assert language == "bash", (
                "a block is a file with a title, or commands; one that is not run has no language"
            )
            yield from map(shlex.split, text.splitlines())


def smaller(arguments: list[str]) -> list[str]:
    """80 steps become 2, and 120 become 3."""
    if arguments[0] == "eval":
        return [*arguments, "--draws", "4"]
    if arguments[0] != "train":
        return [text.replace("step_120", "step_3") for text in arguments]
    steps = [text for text in arguments if text.startswith("trainer.num_steps=")] or ["trainer.num_steps=80"]
    rest = [text for text in arguments if text not in steps]
    return [*rest, *SMALL, f"trainer.num_steps={max(1, int(steps[0].partition('=')[2]) // 40)}"]


def python(arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_every_command_of_the_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    printed = ""
    for program, *arguments in commands():
        if program == "python":
            printed += python(arguments)
        else:
            assert program == "rlloop"
            assert main(smaller(arguments)) == 0, arguments
    assert printed.count("please say") == 3  # look.py
    first, tidy, patience = (list(read_records(Path("runs") / name / "metrics.jsonl")) for name in (
        "first", "tidy", "patience",
    ))  # fmt: skip
    assert [len(records) for records in (first, tidy, patience)] == [4, 3, 2]
    assert {"reward/letters", "reward/letters/length", "reward/tidy"} <= tidy[-1].keys()
    assert patience[-1]["rollout/turns_mean"] > 1
    for record in first[1:] + tidy[1:] + patience[1:]:
        assert record["parity/tokens_different"] == 0
