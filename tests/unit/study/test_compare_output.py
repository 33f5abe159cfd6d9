"""`rlloop compare -o`: where the report cannot be written."""

import json

import pytest

from rlloop.cli.main import main


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["html", "png"])
def test_a_report_that_cannot_be_written_is_said_in_a_line(tmp_path, capsys, ending):
    for seed in range(2):
        run = tmp_path / f"seed={seed}"
        run.mkdir()
        (run / "config.yaml").write_text(f"seed: {seed}\n")
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in (1, 2))
        )
    taken = tmp_path / f"report.{ending}"
    taken.mkdir()
    assert main(["compare", str(tmp_path / "seed=0"), str(tmp_path / "seed=1"), "-o", str(taken)]) == 2
    assert f"{taken} cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("k3", [0.0, 1e-3])
def test_collapse_is_judged_only_where_there_was_a_mismatch(tmp_path, capsys, k3):
    for seed in range(2):
        run = tmp_path / f"seed={seed}"
        run.mkdir()
        (run / "config.yaml").write_text(f"seed: {seed}\n")
        records = [
            {"step": step, "reward/mean": 0.5, "eval/reward": 0.7, "eval/solved": 0.7, "parity/k3": k3}
            for step in (1, 2)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = tmp_path / "report.html"
    assert main(["compare", str(tmp_path / "seed=0"), str(tmp_path / "seed=1"), "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert ("Collapse" in out) == ("verdict" in out) == (k3 > 0)
    assert ("Verdict" in page.read_text()) == (k3 > 0)
    assert "reward, held-out" in out
    assert ("Dose and response" in page.read_text()) == page.with_suffix(".dose.png").exists() == (k3 > 0)


@pytest.fixture
def compared(tmp_path, capsys, monkeypatch):
    """What is said of two runs that have a record in both of their steps."""
    monkeypatch.setenv("COLUMNS", "200")  # so that no label is wrapped

    def said(record: dict, config: str = "") -> str:
        for seed in range(2):
            run = tmp_path / f"seed={seed}"
            run.mkdir()
            (run / "config.yaml").write_text(f"seed: {seed}\n{config}")
            lines = [json.dumps({"step": step, **record}) + "\n" for step in (1, 2)]
            (run / "metrics.jsonl").write_text("".join(lines))
        assert main(["compare", str(tmp_path / "seed=0"), str(tmp_path / "seed=1")]) == 0
        return capsys.readouterr().out

    return said


def test_continuous_rewards_are_compared_by_their_mean(compared):
    means = {"reward/mean": 0.4, "reward/solved": 0.0, "eval/reward": 0.7, "eval/solved": 0.0}
    out = compared(means)
    assert "pass@1" not in out
    assert out.count("reward, held-out") == 1
    assert "reward at the end, by seed" in out


@pytest.mark.parametrize(("kind", "held_out"), [("preferences", "pass@1"), ("verdicts", "preference accuracy")])
def test_runs_on_given_completions_are_compared_by_their_objective(compared, kind, held_out):
    constants = {"reward/mean": 0.0, "reward/solved": 0.5}
    config = f"task:\n  _target_: rlloop.recipes.offline.task.Given\n  kind: {kind}\n"
    record = {**constants, "loss/total": 0.6, "loss/reward_accuracy": 0.8, "eval/reward": 0.9, "eval/solved": 0.7}
    out = compared(record, config)
    assert "reward, training" not in out
    assert "0.600 -> 0.600" in out
    assert "0.800 -> 0.800" in out
    assert f"{held_out} at the end" in out


def test_runs_that_have_not_ended_are_named(tmp_path, capsys):
    for seed, last in enumerate((3, 1)):
        run = tmp_path / f"seed={seed}"
        run.mkdir()
        (run / "config.yaml").write_text(f"seed: {seed}\ntrainer:\n  num_steps: 3\n")
        records = [{"step": step, "reward/mean": 0.5} for step in range(last + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["compare", str(tmp_path / "seed=0"), str(tmp_path / "seed=1")]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'seed=1'}: 1 of 3 steps" in out
    assert f"{tmp_path / 'seed=0'}:" not in out


def test_keys_are_whole_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    keys = ["trainer.micro_batch_multiple", "algorithm.loss_args.clip_high", "data.path"]
    longest = "algorithm.correction.token_importance.truncation_threshold"
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        config = "".join(f"{key}: {name}/{'of/a/long/path/' * 3}\n" for key in (*keys, longest))
        (tmp_path / name / "config.yaml").write_text(f"seed: 0\n{config}")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "eval/solved": 0.5}\n')
    assert main(["compare", *(str(tmp_path / name) for name in ("one", "two", "three"))]) == 0
    shown = capsys.readouterr().out
    firsts = [line.split("│")[1].strip() for line in shown.splitlines() if "│" in line]
    assert all(firsts.count(key) == 2 for key in keys)  # two arms abreast, then the third
    at = firsts.index("algorithm.correction.")
    assert firsts[at + 1 : at + 3] == ["token_importance.", "truncation_threshold"]
    assert max(map(len, shown.splitlines()[:-1])) <= 80
