"""A recipe of one's own: init, inheritance, files of rows, dry run, train, eval, generate, shell completion."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlloop import recipes
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.launch.compose import as_container, choices_of, compose_recipe
from rlloop.recipes.custom.data import read_files
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.runs.folder import read_records

ROOT = Path(__file__).parents[3]
SMALL = ["rollout.max_tokens=4", "rollout.num_prompts=2", "rollout.group_size=2", "eval.num_draws=6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "__path__", [str(tmp_path / "recipes"), *recipes.__path__[1:]])
    return tmp_path


def test_init_gives_a_recipe_that_runs_and_whose_model_answers(place, model, capsys, monkeypatch):
    assert main(["init", "sums", "--model", str(model)]) == 0
    assert main(["init", "sums"]) == 2
    assert main(["init", "my-sums"]) == 2
    assert "exists already" in (said := capsys.readouterr()).err
    assert "rlloop train sums --dry-run" in said.out
    assert main(["train", "sums", *SMALL, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 prompts x 2 completions of up to 4 tokens" in said
    assert "Answer with the number alone" in said
    assert [path.name for path in place.iterdir()] == ["recipes"]  # no run's folder

    assert main(["train", "sums", *SMALL, "trainer.num_steps=1", "trainer.lr=1e-3", "run.dir=run"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "-o", "rows.jsonl"]) == 0
    assert "run/checkpoints/step_1: 6 held-out completions" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    recorded = list(read_records(Path("run/metrics.jsonl")))[-1]
    assert sum(row["reward"] for row in rows) / 6 == recorded["eval/reward"]  # the very completions
    assert main(["eval", str(model)]) == 2
    assert "add --config-name RECIPE" in capsys.readouterr().err
    assert main(["eval", str(model), "--config-name", "sums", "--draws", "2", "rollout.max_tokens=4"]) == 0
    assert "2 held-out completions" in capsys.readouterr().out

    assert main(["generate", "run", "2 + 2", "--max-tokens", "5", "--seed", "3", "-n", "2"]) == 0
    first, _, second = capsys.readouterr().out.partition("\n---\n")
    assert main(["generate", "run/checkpoints/step_1", "2 + 2", "--max-tokens", "5", "--seed", "4"]) == 0
    assert (capsys.readouterr().out, first != second) == (second, True)
    monkeypatch.setattr("sys.stdin", io.StringIO("and again\n\n"))
    assert main(["generate", str(model), "--chat", "--system", "short", "--max-tokens", "5", "hello"]) == 0
    assert capsys.readouterr().out.count("> ") == 2
    assert main(["generate", "org/name", "hello"]) == 2
    assert "`hf download org/name --local-dir name`" in capsys.readouterr().err
    assert main(["train", "sums", "model.path=org/name"]) == 2
    assert "hf download org/name" in capsys.readouterr().err


def test_adapters_of_runs_are_scored_and_write(place, model, capsys):
    assert main(["init", "short", "--model", str(model)]) == 0
    write(
        "letters_of.py",
        "def letters(prompt, completion, example):\n    return min(9, 0.1 + sum(map(str.isalpha, completion))) / 10\n",
    )
    lora = ["model.lora.rank=2", "trainer.lr=0.5", "trainer.num_steps=1", "run.dir=run"]
    reward = ["reward._target_=letters_of.letters"]
    assert main(["train", "short", *SMALL, *reward, *lora]) == 0
    recorded = list(read_records(Path("run/metrics.jsonl")))[-1]
    shutil.copytree("run/checkpoints/step_1", "adapter")
    task = ["--config-name", "short", *SMALL, *reward]
    for given in (["run"], ["run/checkpoints/step_1"], ["adapter", *task]):
        assert main(["eval", *given, "-o", "rows.jsonl"]) == 0
        rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
        assert sum(row["reward"] for row in rows) / 6 == recorded["eval/reward"]
    assert "pass@1" not in capsys.readouterr().out
    with Path("run/metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(recorded | {"step": 2, "eval/reward": 0.5, "eval/solved": 0.5}) + "\n")
    assert main(["eval", "run/checkpoints/step_1"]) == 0
    assert "pass@1  0.0000" in capsys.readouterr().out, "as the run's curve, since the run solved something"
    printed = []
    for given in ("run", "adapter", str(model)):
        assert main(["generate", given, "2 + 2", "--max-tokens", "20", "--seed", "3"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    config = Path("adapter/adapter_config.json")
    config.write_text(config.read_text().replace(str(model), "org/name"))
    for command in (["generate", "adapter", "hello"], ["eval", "adapter", *task]):
        assert main(command) == 2
        assert "an adapter of the model 'org/name', which is not here" in capsys.readouterr().err


def write(file: str, text: str) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


def test_recipes_begin_with_others(place):
    write(
        "recipes/letters/config.yaml",
        "defaults: [/custom, {algorithm: dapo}, _self_]\n"
        "model: {path: m}\ndata: {path: rows.csv}\nreward: {_target_: mine.reward, share: 0.5}\ntrainer: {lr: 1e-3}\n",
    )
    write(
        "recipes/letters/exact.yaml",
        "defaults: [/letters]\nreward: {_target_: rlloop.recipes.custom.reward.exact_match}\ntrainer: {num_steps: 3}\n",
    )
    letters, exact, custom = (
        as_container(compose_recipe(name, over))
        for name, over in (("letters", []), ("letters/exact", ["algorithm=gspo"]), ("custom", ["data.path=rows.csv"]))
    )
    assert (letters["algorithm"]["loss"], letters["trainer"]["lr"]) == ("dapo", 1e-3)
    assert letters["data"] == custom["data"]
    assert letters["task"] == custom["task"]
    assert exact["reward"] == {"_target_": "rlloop.recipes.custom.reward.exact_match"}  # without `share`
    assert (exact["algorithm"]["loss"], exact["trainer"]["lr"], exact["trainer"]["num_steps"]) == ("gspo", 1e-3, 3)
    assert as_container(compose_recipe("recipes/letters/exact.yaml", ["algorithm=gspo"])) == exact

    write("recipes/small/config.yaml", "defaults: [/countdown/collapse, {guard: none}]\ntrainer: {num_steps: 7}\n")
    ours = compose_recipe("small", ["arm=int4"])  # groups of the recipe that it begins with
    assert ours == compose_recipe("countdown/collapse", ["arm=int4", "guard=none", "trainer.num_steps=7"])
    for name, text, message in (
        ("a", "[/b]", "begin with each other"), ("b", "[/a]", "begin with each other"),
        ("c", "[/custom, /countdown]", "can begin with one other"), ("d", "[/costum]", "no recipe 'costum'"),
    ):  # fmt: skip
        write(f"recipes/{name}/config.yaml", f"defaults: {text}\n")
        if name == "a":
            continue
        with pytest.raises(ConfigError, match=message):
            compose_recipe(name, [])


def test_rows_are_read_by_the_ending_of_their_file(place):
    rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(4)]
    write("rows.jsonl", "\n\n".join(map(json.dumps, rows)))
    write("rows.json", json.dumps(rows))
    write("nested.json", json.dumps({"version": 1, "data": rows}))
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with Path(name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    for name in ("rows.jsonl", "rows.json", "nested.json", "rows.csv", "rows.tsv"):
        assert [row for _, row in read_files(name, "data.path")] == rows, name
    write("parts/b.jsonl", json.dumps(rows[1]))
    write("parts/a.json", json.dumps(rows[:1]))
    assert read_files("parts/*", "data.path") == [("1 of parts/a.json", rows[0]), ("1 of parts/b.jsonl", rows[1])]
    write("short.csv", "prompt,answer\nsay 1\n")
    write("number.json", "3")
    write("text.json", '["a"]')
    write("empty.json", "[]")
    for name, message in (
        ("short.csv", "short.csv, row 1, has not the 2 fields"), ("number.json", "must be a JSON list of objects"),
        ("text.json", "text.json, row 1, is a JSON str"), ("empty.json", "has no rows"), ("parts", r"parts/\*\.jsonl"),
        ("none*", "no such file"), ("none.parquet", "no such file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            read_files(name, "data.path")


def test_parquet_is_read(place):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [{"role": "user", "content": "say 1"}], "answer": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    assert read_files("rows.parquet", "data.path") == [(1, rows[0])]
    write("broken.parquet", "?")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        read_files("broken.parquet", "data.path")


def test_choices_that_a_shell_completes():
    assert {"grpo", "dapo"} <= set(choices_of("algorithm"))
    assert choices_of("launch") == ["local", "ray"]
    assert choices_of("seed") == []


def test_a_shell_completes_commands_recipes_keys_and_values(tmp_path):
    pytest.importorskip("argcomplete")
    for line, answers in (
        ("rlloop tr", {"train"}),
        ("rlloop train countd", {"countdown", "countdown/lora"}),
        ("rlloop train countdown trainer.num_s", {"trainer.num_steps="}),
        ("rlloop train countdown launch=r", {"launch=ray"}),
    ):
        asked = {
            "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        }  # fmt: skip
        environment = {**os.environ, **asked, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        subprocess.run([sys.executable, "-m", "rlloop"], env=environment, check=True, cwd=tmp_path)
        assert answers <= {each.strip() for each in (tmp_path / "out").read_text().split("\n")}, line
