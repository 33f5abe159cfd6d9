"""A newcomer's journey in a fresh clone: the commands of README.md and docs/tutorial.md as they are written, with fewer
and smaller steps, and then every page of the dashboard in a browser.

The environment is that of the tests, since setting one up needs the network.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlloop.runs.folder import read_records
from tests.support.dashboard_runs import serving
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZES = ["rollout.num_prompts=4", "rollout.group_size=4", "eval.num_draws=4"]
SMALL = {  # further keys by recipe
    "countdown": [
        "task.largest_number=4", "task.largest_target=20", "task.model.hidden_size=16", "task.model.num_layers=1",
        "task.model.intermediate_size=32", "task.model.num_heads=2", "task.warm_start.demonstrations=64",
        "task.warm_start.batch_size=16", "task.warm_start.eval_draws=8", "task.warm_start.max_steps=4",
    ],
    "custom": [],
    "letters": [],
}  # fmt: skip
REWARD = "def reward(prompt, completion, example):\n    return len(set(completion)) / 20\n"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("RLLOOP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.timeout(900)


def of_tutorial(clone: Path, place: Path) -> Iterator[list[str]]:
    """Writes the tutorial's files; gives its commands."""
    for language, title, text in BLOCK.findall((clone / "docs/tutorial.md").read_text()):
        if title:
            (place / title).parent.mkdir(parents=True, exist_ok=True)
            (place / title).write_text(text)
        elif language:
            assert language == "bash", "a block is a file with a title, or commands; others have no language"
            yield from (smaller(shlex.split(line)) for line in text.splitlines())


def of_readme(clone: Path) -> Iterator[list[str]]:
    """The commands of README.md on a run of one's own model. The dashboard is visited later, and test_doctor_command
    asks the doctor, which compiles for every type."""
    [text] = [text for _, _, text in BLOCK.findall((clone / "README.md").read_text()) if "rlloop init" in text]
    for line in text.splitlines():
        words = shlex.split(line.replace("RUN", "runs/readme"), comments=True)
        if words[1] not in ("dashboard", "doctor"):
            yield [*smaller(words), *(["run.dir=runs/readme"] if words[:3] == ["rlloop", "train", "custom"] else [])]


def smaller(words: list[str]) -> list[str]:
    """Of n steps one in forty, which makes the tutorial's 80 and 120 steps 2 and 3."""
    if words[:2] == ["rlloop", "eval"]:
        return [*words, "--draws", "4"]
    if words[:2] == ["rlloop", "generate"]:
        return [*(word.replace("step_120", "step_3") for word in words), "--max-tokens", "12"]
    if words[:2] != ["rlloop", "train"]:
        return words
    steps = [word for word in words if word.startswith("trainer.num_steps=")] or ["trainer.num_steps=80"]
    few = max(1, int(steps[0].partition("=")[2]) // 40)
    return [*(word for word in words if word not in steps), *SIZES, *SMALL[words[2]], f"trainer.num_steps={few}"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("a clone needs git, and the tests of a checkout")
    place = tmp_path_factory.mktemp("clone") / "rlloop"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), place], check=True)
    return place


@pytest.fixture(scope="module")
def runs(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(the folder in which all commands ran, what they printed)."""
    place = tmp_path_factory.mktemp("newcomer")
    commands = [*of_tutorial(clone, place), *of_readme(clone)]
    (place / "mine.py").write_text(REWARD)
    (place / "commands.json").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, clone / "tests/support/commands.py", "commands.json"], cwd=place, input="hello\n\n",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(clone), *sys.path]), "COLUMNS": "80"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith(f"rlloop lies in {clone}")
    return place, done.stdout


def test_every_command_of_the_tutorial_and_the_readme(runs):
    place, printed = runs
    assert printed.count("please say") >= 3  # look.py
    first, tidy, patience, readme = (list(read_records(place / "runs" / name / "metrics.jsonl")) for name in (
        "first", "tidy", "patience", "readme",
    ))  # fmt: skip
    [countdown] = (place / "runs/countdown").iterdir()
    countdown = list(read_records(countdown / "metrics.jsonl"))
    assert [len(records) for records in (first, tidy, patience, readme, countdown)] == [4, 3, 2, 3, 6]
    assert {"reward/letters", "reward/letters/length", "reward/tidy"} <= tidy[-1].keys()
    assert patience[-1]["rollout/turns_mean"] > 1
    for record in first[1:] + tidy[1:] + patience[1:] + readme[1:] + countdown[1:]:
        assert record["parity/tokens_different"] == 0


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or set RLLOOP_CHROMIUM")
def test_every_page_at_three_widths_without_an_error(clone, runs, monkeypatch):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    wrong: list[str] = []
    seen = {
        "charts": ".card canvas", "step": ".card", "rollouts": "#rollouts .text", "certificate": "table td",
        "config": "table td",
    }  # fmt: skip
    monkeypatch.chdir(runs[0])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(clone), *sys.path]))
    with serving("runs") as (_, address, token), sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000)
        for width in (1600, 900, 400):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.set_default_timeout(120_000)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
            page.goto(f"{address}/?token={token}")
            for view, content in seen.items():
                page.goto(f"{address}/#/{view}?run=first&run=patience&of=first&step=1")
                page.locator(content).first.wait_for()
                until(lambda page=page: page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
            page.close()
        browser.close()
    assert wrong == []
