import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes

from rlloop.cli.main import main
from rlloop.config.resume import flatten
from rlloop.study.analysis import (
    PASS,
    Arm,
    CollapseRule,
    Run,
    arms_of,
    band,
    bootstrap,
    departures,
    difference,
    differences,
    dose,
    held_out_of,
    over_seeds,
    verdict_of,
)
from rlloop.study.plots import draw_arms, draw_doses

RULE = CollapseRule(fraction=0.5, evaluations=3)


def evaluated(*rewards: float | None, metric: str = "eval/reward") -> list[dict]:
    """An evaluation each 10 steps; None: a step without one."""
    return [{"step": 10 * i, **({} if reward is None else {metric: reward})} for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.2, 0.4, 0.6, 0.6], None),
        ([0.2, 0.6, 0.3, 0.3, 0.3], 20),  # at half counts as below
        ([0.2, 0.6, 0.31, 0.31, 0.31], None),
        ([0.2, 0.6, 0.1, 0.1, 0.5, 0.1, 0.1], None),  # in a row
        ([0.2, 0.6, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1], 50),
        ([0.6, 0.2, None, 0.2, None, 0.2], 10),  # of evaluations, not of steps
        ([0.6, 0.2, 0.2], None),
        ([0.6, 0.1, 0.1, 0.1, 0.6, 0.6], 10),  # a recovery does not undo it
        ([0.0, 0.0, 0.0, 0.0], None),  # what never learned has not collapsed
        ([], None),
    ],
)
def test_the_rule_on_curves(rewards, step):
    verdict = RULE.verdict(evaluated(*rewards))
    assert (verdict.step, verdict.collapsed) == (step, step is not None)


def test_a_gradient_that_is_not_finite_is_a_collapse():
    records = [*evaluated(0.2, 0.4), {"step": 15, "trainer/refused": 1.0, "loss/grad_norm": None}]
    assert RULE.verdict(records).step == 15
    assert "gradient" in RULE.verdict(records).reason


def test_the_engine_is_judged_by_its_own_evaluations():
    records = evaluated(0.6, 0.1, 0.1, 0.1, metric="eval/engine_reward")
    assert RULE.verdict(records).step is None
    assert RULE.verdict(records, "eval/engine_reward").step == 10


def test_the_declared_rule_is_the_one_that_judges():
    declared = Run(Path("a"), {"eval.collapse_fraction": 0.9, "eval.collapse_evals": 1}, evaluated(0.6, 0.5))
    assert CollapseRule.of(declared) == CollapseRule(0.9, 1)
    assert CollapseRule.of(Run(Path("b"), {}, [])) == RULE
    assert "0.9 of its running best in 1 evaluations" in str(CollapseRule.of(declared))


def run(name: str, seed: int, k3: list[float], rewards: list[float], **config) -> Run:
    records = [
        {"step": i, "parity/k3": kl, "eval/solved": reward, "eval/reward": reward}
        for i, (kl, reward) in enumerate(zip(k3, rewards, strict=True))
    ]
    return Run(Path(name), flatten({"seed": seed, "run": {"dir": name}, **config}), records)


def test_the_dose_counts_from_the_first_mismatch_to_the_collapse():
    none = run("a", 0, [0.0] * 4, [0.5] * 4)
    assert dose(none, RULE.verdict(none.records)) == dose(none, RULE.verdict([]))
    assert (dose(none, RULE.verdict([])).onset, dose(none, RULE.verdict([])).mean) == (None, 0.0)
    falling = run("b", 0, [0.0, 0.1, 0.3, 5.0, 5.0, 5.0], [0.5, 0.5, 0.5, 0.1, 0.1, 0.1])
    found = dose(falling, RULE.verdict(falling.records))
    assert (found.onset, found.mean, found.largest) == (1, pytest.approx(0.2), 5.0)
    assert found.early == pytest.approx(np.mean([0.1, 0.3, 5, 5, 5]))


def runs() -> list[Run]:
    return [
        run("study/arm=int4,guard=clip,seed=0", 0, [0.1, 0.1], [0.5, 0.2], rollout={"w": "int4"}),
        run("study/arm=int4,guard=clip,seed=1", 1, [0.1, 0.3], [0.7, 0.4], rollout={"w": "int4"}),
        run("study/arm=zero_kld,guard=clip,seed=0", 0, [0.0, 0.0], [0.5, 0.6], rollout={"w": "none"}),
    ]


def test_seeds_are_grouped_and_arms_named_after_the_multirun():
    arms = arms_of(runs())
    assert [(arm.name, [run.seed for run in arm.runs]) for arm in arms] == [
        ("int4, guard=clip", [0, 1]),
        ("zero_kld, guard=clip, seed=0", [0]),
    ]
    assert differences(arms) == [("rollout.w", ["int4", "none"]), ("seed", ["0, 1", "0"])]


def test_a_key_that_a_run_is_older_than_is_no_difference(tmp_path):
    for name, swapped in (("old", None), ("new", False), ("other", True)):
        (tmp_path / name).mkdir()
        younger = {} if swapped is None else {"reference_swapped": swapped}
        config = {"seed": 0, "task": {"made": str(swapped is True)}, "model": {"path": "model", **younger}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(config))
    arms = arms_of(Run.read_all([tmp_path / "old", tmp_path / "new", tmp_path / "other"]))
    assert [len(arm.runs) for arm in arms] == [2, 1]
    assert [key for key, _ in differences(arms)] == ["model.reference_swapped", "seed", "task.made"]


def test_a_key_that_repeats_another_is_named_once():
    data = [{"data": {"split": split}, "task": {"data": {"split": split}, "seen": split}} for split in ("a", "b")]
    arms = arms_of([run(f"study/{index}", 0, [0.0], [0.5], **each) for index, each in enumerate(data)])
    assert differences(arms) == [("data.split", ["a", "b"]), ("task.seen", ["a", "b"])]


def test_runs_of_one_configuration_are_laid_side_by_side():
    arms = arms_of(runs()[:2])
    assert [len(arm.runs) for arm in arms] == [1, 1]
    assert differences(arms) == [("seed", ["0", "1"])]


def test_a_band_has_the_steps_that_every_seed_has():
    arm = Arm("int4", [*runs()[:2], run("c", 2, [0.1], [0.9])])
    found = band(arm, "eval/solved")
    assert found is not None
    assert (found.steps.tolist(), found.low.tolist(), found.high.tolist()) == ([0], [0.5], [0.9])
    assert found.mean[0] == pytest.approx(0.7)
    two = band(arms_of(runs())[0], "eval/solved", window=2)
    assert two is not None
    assert two.mean.tolist() == pytest.approx([0.6, (0.35 + 0.55) / 2])
    assert band(arm, "nothing") is None


def test_numbers_over_seeds_say_their_spread():
    [arm, _] = arms_of(runs())
    assert over_seeds(arm, lambda run: run.records[-1]["eval/solved"], "{:.2f}") == "0.30 (0.20 to 0.40)"
    assert over_seeds(arm, lambda run: 1.0, "{:.0f}") == "1"
    assert over_seeds(arm, lambda run: None) == "-"


def test_an_interval_is_the_percentile_bootstrap_over_seeds():
    values = [0.1, 0.2, 0.4, 0.5, 0.9]
    found = bootstrap(values)
    assert found is not None
    assert (found.mean, found.seeds) == (pytest.approx(0.42), 5)
    every = np.sort([np.mean(each) for each in itertools.product(values, repeat=5)])  # all 3,125 resamples
    assert (found.low, found.high) == pytest.approx(np.quantile(every, [0.025, 0.975]), abs=0.02)
    assert found == bootstrap(values)
    three = bootstrap([0.3, 0.1, 0.2])
    assert three is not None
    assert str(three) == "0.200 [0.100, 0.300]"  # of three seeds it is their range
    assert bootstrap([0.3]) is bootstrap([]) is None


def test_a_difference_is_paired_by_seed():
    control = Arm("zero", [run(f"z{seed}", seed, [0.0, 0.0], [0.1, 0.3 + seed / 10]) for seed in range(4)])
    arm = Arm("x", [run(f"x{seed}", seed, [0.0, 0.1], [0.9, 0.2 + seed / 10]) for seed in (3, 1, 7)])
    found = difference(arm, control, "eval/solved")  # seed 7 has no partner; spread over seeds cancels
    assert found is not None
    assert (found.mean, found.low, found.high, found.seeds) == (*[pytest.approx(-0.1)] * 3, 2)
    assert difference(Arm("y", arm.runs[:1]), control, "eval/solved") is None


def test_the_control_departs_from_the_defaults_in_no_key_that_differs():
    drifts = {"zero": {"weights": "none"}, "both": {"weights": "fp4", "both_sides": True}}
    arms = arms_of(
        [run(name, 0, [0.0], [0.5], rollout={"page_size": 16, "drift": each}) for name, each in drifts.items()]
    )
    assert [departures(arm, arms) for arm in arms] == [0, 2]


def test_a_verdict_counts_seeds():
    fallen = [run("a", i, [0.0] * 4, [0.8, 0.1, 0.1, 0.1]) for i in range(2)]
    kept = run("b", 2, [0.0] * 4, [0.8] * 4)
    assert verdict_of(Arm("x", [*fallen, kept])) == "collapse in 2 of 3 seeds (from step 1, 1)"
    assert verdict_of(Arm("x", [kept])) == "no collapse in 1 of 1 seeds"
    assert verdict_of(Arm("x", [kept]), "eval/engine_reward") == "-"


def write_run(folder: Path, seed: int, weights: str, rewards: list[float], k3: float) -> None:
    folder.mkdir(parents=True)
    config = {"seed": seed, "run": {"dir": str(folder)}, "rollout": {"drift": {"weights": weights}}, "lr": 1e-3}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    records = [
        {"step": i, "reward/mean": r, "eval/solved": r, "eval/reward": r, "parity/k3": k3, "parity/tokens": 10,
         "parity/tokens_different": float(k3 > 0), "loss/entropy": 0.3, "loss/grad_norm": 1.0,
         "loss/tokens_discarded": 0.1, "time/step": 1.0,
         **({"eval/engine_solved": r / 2, "eval/engine_reward": r / 2} if k3 else {})}
        for i, r in enumerate(rewards)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "fingerprints.json").write_text(json.dumps({"ab": {"device": "cpu", "versions": {"torch": "9.9"}}}))


@pytest.fixture
def study(tmp_path) -> Path:
    for seed in (0, 1):
        end = 0.6 + seed / 10
        write_run(tmp_path / "study" / f"arm=zero,seed={seed}", seed, "none", [0.3, 0.5, 0.6, 0.6, end], 0.0)
        write_run(tmp_path / "study" / f"arm=int4,seed={seed}", seed, "int4", [0.3, 0.5, 0.1, 0.1, 0.1], 0.02)
    return tmp_path / "study"


@pytest.mark.slow
def test_compare_reports_a_multirun_in_one_page_with_its_pictures_and_data(study, tmp_path, capsys):
    output = tmp_path / "reports" / "report.html"
    assert main(["compare", str(study), "-o", str(output)]) == 0
    said = capsys.readouterr().out
    assert said.count("written:") == 4
    page = output.read_text()
    assert "collapse in 2 of 2 seeds (from step 2, 2)" in page
    assert "no collapse in 2 of 2 seeds" in page
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    assert "<th>rollout.drift.weights</th><td>none</td><td>int4</td>" in page  # the control goes first
    assert ">lr<" not in page
    assert "cpu torch 9.9" in page
    for name in ("curves", "dose"):
        assert struct.unpack(">II", output.with_suffix(f".{name}.png").read_bytes()[16:24])[0] > 500
    data = json.loads(output.with_suffix(".json").read_text())
    assert data["arms"]["int4"]["outcomes"]["pass@1, held-out"] == "0.300 -> 0.100 (best 0.500)"
    assert data["arms"]["int4"]["outcomes"]["pass@1, held-out, through the engine"] == "0.150 -> 0.050 (best 0.250)"
    assert data["arms"]["int4"]["outcomes"]["tokens that differ"] == "100 of 100"
    assert data["arms"]["int4"]["outcomes"]["its difference from zero"] == "-0.550 [-0.600, -0.500]"
    assert data["arms"]["zero"]["outcomes"]["pass@1 at the end, by seed"] == "0: 0.600, 1: 0.700"
    assert "<td>0: 0.600, 1: 0.700</td><td>0: 0.100, 1: 0.100</td>" in page
    assert data["arms"]["zero"]["end"]["by seed"] == {"0": 0.6, "1": 0.7}
    assert data["arms"]["int4"]["end"]["pass@1"] == {"mean": 0.1, "low": 0.1, "high": 0.1, "seeds": 2}
    assert data["arms"]["zero"]["end"]["difference"] is None
    assert data["intervals"]["control"] == "zero"
    assert data["arms"]["zero"]["runs"][1]["seed"] == 1
    assert [run["dose"]["mean"] for run in data["arms"]["int4"]["runs"]] == [0.02, 0.02]


def test_compare_takes_runs_from_several_places(study, capsys):
    assert main(["compare", str(study / "arm=zero,seed=0"), str(study / "arm=int4,seed=0")]) == 0
    assert "rollout.drift.weights" in capsys.readouterr().out


def test_one_run_is_nothing_to_compare(study, capsys):
    assert main(["compare", str(study / "arm=zero,seed=0")]) == 2
    assert "is one run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_runs_make_the_same_picture(study):
    arms = arms_of([Run.read(path) for path in sorted(study.iterdir())])
    assert draw_arms(arms, PASS) == draw_arms(arms, PASS)


def test_curves_of_given_completions_are_of_their_loss(monkeypatch):
    titles = []
    monkeypatch.setattr(Axes, "set", lambda axes, **names: titles.append(names["title"]))
    given = run("a", 0, [0.0] * 3, [0.0] * 3)
    given.config["task._target_"] = "rlloop.recipes.offline.task.Given"
    draw_arms([Arm("given", [given])], PASS)
    assert titles[0] == "loss of the given completions"


def test_rewards_below_zero_are_inside_the_axes(monkeypatch):
    seen = []
    monkeypatch.setattr("rlloop.study.plots.png_of", lambda figure: seen.extend(figure.axes))
    arms = [Arm("a", [run("a", 0, [0.0, 0.1], [-0.5, -0.2])])]
    held_out = held_out_of(arms)
    draw_arms(arms, held_out)
    draw_doses(arms, {each.path: dose(each, RULE.verdict(each.records)) for each in arms[0].runs}, held_out)
    assert all(axes.get_ylim()[0] <= low for axes, low in ((seen[1], -0.5), (seen[-1], -0.2)))


def test_a_run_that_never_had_a_gradient_is_drawn():
    still = run("a", 0, [0.0] * 3, [0.0] * 3)
    for record in still.records:
        record["loss/grad_norm"] = 0.0
    assert draw_arms([Arm("still", [still])], PASS)


def test_many_arms_are_rows_of_the_table(tmp_path, capsys):
    for index in range(6):
        write_run(tmp_path / "many" / f"arm=a{index}", 0, f"int{index}", [0.5, 0.5], 0.01)
    assert main(["compare", str(tmp_path / "many")]) == 0
    assert any(line.count("a3") == 1 and "a4" not in line for line in capsys.readouterr().out.splitlines())
