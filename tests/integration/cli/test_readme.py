"""The figures, links and examples that README.md and docs/ show."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from rlloop.audit import verify
from rlloop.cli.main import main
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.runs.folder import read_records

ROOT = Path(__file__).parents[3]


def test_figures_are_those_of_the_recorded_results():
    script = ROOT / "benchmarks" / "page.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_says_which_run_measured_a_row_and_where_rounds_overlap(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("page")
    row = {
        "unit": "ms",
        "ratio": 1.5,
        "aim": 1.0,
        "peer": "it",
        "value": 2.0,
        "peer_value": 3.0,
        "versions": {},
        "gpu": "G",
    }
    run = {"commit": "0" * 40, "date": "today"}
    near, far = {"spread": [1.0, 2.5], "peer_spread": [2.5, 4.0]}, {"spread": [1.0, 2.5], "peer_spread": [2.6, 4.0]}
    found = [
        {**row, **run, **spread, "name": name, "command": command}
        for name, spread, command in (("a", near, "first"), ("b", far, "second"), ("c", {}, "first"))
    ]
    monkeypatch.setattr(page, "records", lambda name: found)
    assert page.table(["any"]).splitlines()[2:] == [
        "| a | 2 (1 to 2.5) ms | it: 3 (2.5 to 4) | 1.5, in the spread | 1 | 1 |",
        "| b | 2 (1 to 2.5) ms | it: 3 (2.6 to 4) | 1.5 | 1 | 2 |",
        "| c | 2 ms | it: 3 | 1.5 | 1 | 1 |",
        "",
        "1. `first` at 0000000, today: G; .",
        "2. `second` at 0000000, today: G; .",
    ]


def test_the_minimal_loop_learns_without_a_difference(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    rewards = importlib.import_module("minimal_loop").main(steps=20)
    assert rewards[-1] > 0.15 > 0.05 > rewards[0]
    assert capsys.readouterr().out.count(", 0 of 768 tokens differ") == 20


def test_a_loss_of_the_readers_own_learns_without_a_difference(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    rewards = importlib.import_module("own_loss").main(steps=20)
    assert rewards[-1] > 0.15 > 0.05 > rewards[0]
    assert capsys.readouterr().out.count(" below the mean, 0 differ") == 20


def test_the_same_loss_trains_a_recipe(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("model"), hidden_size=32, num_layers=1)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(60)))
    command = ["train", "--config-name", "custom", "model.path=model", "data.path=rows.jsonl", "run.dir=run"]
    small = ["trainer.num_steps=1", "rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_tokens=4"]
    own = ["algorithm.loss._target_=own_loss.asymmetric", "algorithm.loss.negative=0.3"]
    assert main([*command, *small, "eval.num_draws=2", *own]) == 0
    assert "loss/below_mean" in list(read_records(Path("run") / "metrics.jsonl"))[-1]


def test_an_environment_of_the_readers_own_learns(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    rewards = importlib.import_module("own_environment").main(steps=16, folder=str(tmp_path))
    assert np.mean(rewards[-3:]) > 0.15 > np.mean(rewards[:3])


def test_several_engines_learn_what_one_would(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    rewards = importlib.import_module("several_engines").main(steps=22, folder=str(tmp_path))
    assert rewards[-1] > 0.15 > 0.05 > rewards[0]
    assert [check for check in verify(tmp_path / "run") if check.problems] == []


def test_a_served_checkpoint_answers_as_it_was_trained(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    before, after = importlib.import_module("serving").main(steps=20, folder=str(tmp_path))
    assert after > 0.2 > before


def test_a_run_of_one_part_keeps_the_others_figures(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    schema = importlib.import_module("results_schema")
    monkeypatch.setattr(schema, "RESULTS", tmp_path)

    def recorded(arguments: list[str], **values: float) -> list[tuple[str, float]]:
        monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu_step.py"), *arguments])
        figures = [schema.Figure(name=name, unit="tokens/s", value=value) for name, value in values.items()]
        made = json.loads(schema.report("step", figures, device="none").read_text())
        return [(each["name"], each["value"]) for each in made]

    recorded([], dense=1, dense_k3=1, moe=1)
    assert recorded(["--only", "moe"], moe=2, moe_k3=2) == [("dense", 1), ("dense_k3", 1), ("moe", 2), ("moe_k3", 2)]
    assert recorded(["--only=dense"], dense=3, dense_k3=3)[:3] == [("dense", 3), ("dense_k3", 3), ("moe", 2)]
    assert recorded(["sizes", "--models", "moe"], moe=5)[2] == ("moe", 5)
    assert recorded([], dense=4) == [("dense", 4)]


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    local = [(page, target) for page, target in links if not target.startswith(("http://", "https://"))]
    assert len(local) > 10
    assert [f"{page.name}: {target}" for page, target in local if not (page.parent / target).exists()] == []
