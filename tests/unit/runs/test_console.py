import io
from pathlib import Path

import pytest
from rich.console import Console

from rlloop.runs.console import Output, Progress, clock, print_summary, short
from rlloop.runs.folder import summarize

STEP = {
    "reward/mean": 0.25,
    "reward/solved": 0.2,
    "parity/k3": 0.0,
    "parity/tokens": 1000,
    "parity/tokens_different": 0.0,
}


def plain(width: int = 200) -> Console:
    return Console(file=io.StringIO(), width=width)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_closed_output_is_an_error_that_a_run_can_record(monkeypatch):
    def closed(text):
        raise BrokenPipeError(32, "Broken pipe")

    file = io.StringIO()
    monkeypatch.setattr(file, "write", closed)
    console = Output(file=file)
    with pytest.raises(BrokenPipeError):
        console.print("step 1")
    console.print("step 2")  # what follows is dropped


def test_plain_lines_where_there_is_no_terminal():
    console = plain()
    with Progress(console, "toy", num_steps=100, start=0) as progress:
        progress.log(0, {"eval/solved": 0.2})
        for step in range(1, 101):
            evaluated = {"eval/solved": 0.4} if step % 50 == 0 else {}
            progress.log(step, {**STEP, **evaluated, "perf/rollout_tokens_per_s": 3100.0})
    lines = said(console).splitlines()
    assert lines[0] == "step 0/100  held-out 0.200"
    assert "\x1b" not in said(console)
    assert any(line.startswith("step 50/100") for line in lines)  # never skipped: it was evaluated
    assert len(lines) < 20  # a line every two seconds at most, and this took less
    assert lines[-1] == (
        "step 100/100  reward 0.250  pass@1 0.200  held-out 0.200 -> 0.400  "
        "KL 0 (0 of 100,000 tokens differ)  3,100 tokens/s"
    )


def test_a_terminal_shows_outcome_and_work_on_lines_of_their_own():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Progress(console, "toy", num_steps=2, start=0) as progress:
        progress.log(1, {**STEP, "eval/solved": 0.4, "perf/rollout_tokens_per_s": 3100.0})
    lines = [line.partition("\x1b")[0].strip() for line in said(console).splitlines()]
    assert "reward 0.250  pass@1 0.200  held-out 0.400" in lines
    assert any(line.startswith("KL 0 (0 of 1,000 tokens differ)  3,100 tokens/s") for line in lines)


def test_rejected_samples_are_told_in_every_line():
    console = plain()
    with Progress(console, "toy", num_steps=3, start=1) as progress:
        progress.recall([{"step": 1, "ledger/sampled": 1000, "ledger/rejected": 3}])
        progress.log(2, {**STEP, "ledger/sampled": 64, "ledger/rejected": 2, "eval/solved": 0.4})
        progress.log(3, {**STEP, "ledger/sampled": 64, "ledger/rejected": 0, "eval/solved": 0.4})
    lines = said(console).splitlines()
    assert "held-out 0.400  5 of 1,064 rejected, see run.log  KL 0" in lines[0]
    assert "held-out 0.400 -> 0.400  5 of 1,128 rejected, see run.log  KL 0" in lines[1]


def test_held_out_samples_that_are_rejected_are_counted_too(tmp_path):
    console = plain()
    records = [
        {"step": 0, "eval/solved": 0.5, "eval/reward": 0.5, "eval/draws": 97, "eval/rejected": 3},
        {"step": 1, **STEP, "ledger/sampled": 64, "ledger/rejected": 2, "eval/solved": 0.5, "eval/draws": 100},
        {"step": 2, **STEP, "eval/solved": 0.5, "eval/reward": 0.5, "eval/draws": 1000},
    ]
    with Progress(console, "toy", num_steps=2, start=0) as progress:
        progress.recall(records[:1])
        for record in records[1:]:
            progress.log(record["step"], record)
    lines = said(console).splitlines()
    assert "held-out 0.500 -> 0.500  2 of 64 rejected, 3 of 200 held-out rejected, see run.log  KL" in lines[0]
    assert "2 of 64 rejected, 3 of 1,200 held-out rejected, see run.log  KL" in lines[1]
    console = plain()
    print_summary(console, tmp_path, summarize(records, "finished"), records)
    assert "1,200 sampled, 3 rejected, see run.log" in said(console)


GIVEN = {"reward/mean": 0.0, "reward/solved": 0.5, "loss/total": 0.67, "perf/trainer_tokens_per_s": 900.0}
PAIRS = {**GIVEN, "loss/reward_accuracy": 0.75, "loss/reward_margin": 0.05}


@pytest.mark.parametrize(
    ("kind", "step", "line", "rows"),
    [
        ("demonstrations", GIVEN, "loss 0.670  held-out 0.200 -> 0.500  KL", ["pass@1, held-out", "loss, training"]),
        (
            "preferences",
            PAIRS,
            "loss 0.670  preference accuracy 0.750  reward margin 0.050  held-out 0.200 -> 0.500  KL",
            ["pass@1, held-out", "loss, training", "preference accuracy, training", "reward margin, training"],
        ),
        (
            "preferences",
            {**GIVEN, "loss/reward_good": 0.02, "loss/reward_bad": -0.03},
            "loss 0.670  reward of good ones 0.020  reward of bad ones -0.030  held-out 0.200 -> 0.500  KL",
            ["pass@1, held-out", "loss, training", "reward of good ones, training", "reward of bad ones, training"],
        ),
        (
            "verdicts",
            PAIRS,
            "loss 0.670  preference accuracy 0.750  reward margin 0.050  held-out margin 0.300 -> 1.700  "
            "held-out preference accuracy 0.200 -> 0.500  KL",
            ["preference accuracy, held-out", "margin, held-out", "loss, training", "preference accuracy, training",
             "reward margin, training"],
        ),
    ],
)  # fmt: skip
def test_a_run_on_given_completions_shows_its_objective_and_no_rewards(tmp_path, kind, step, line, rows):
    """Of these the rewards in training are constants: 1, and -1 for a rejected one."""
    means = (0.3, 1.7) if kind == "verdicts" else (0.2, 0.5)  # margins have no bound
    records = [
        {"step": 0, "eval/solved": 0.2, "eval/reward": means[0]},
        {"step": 1, **STEP, **step, "ledger/sampled": 64, "ledger/accepted": 64, "ledger/trained": 64},
        {"step": 2, **STEP, **step, "eval/solved": 0.5, "eval/reward": means[1]},
    ]
    console = plain()
    with Progress(console, "offline", num_steps=2, start=0, offline=kind) as progress:
        for record in records:
            progress.log(record["step"], record)
    last = said(console).splitlines()[-1]
    assert last.startswith(f"step 2/2  {line}")
    assert last.endswith("900 tokens/s")
    console = plain()
    print_summary(console, tmp_path, summarize(records, "finished"), records, kind)
    labels = [text.split("│")[1].strip() for text in said(console).splitlines() if "│" in text]
    assert labels[: labels.index("train-inference KL")] == rows
    assert "64 trained" in said(console)
    assert not any(word in said(console) for word in ("reward, training", "sampled", "accepted"))


def test_a_resumed_run_goes_on_counting():
    console = plain()
    with Progress(console, "toy", num_steps=3, start=2) as progress:
        progress.recall([{"step": 0, "eval/solved": 0.2}, {"step": 1, **STEP}, {"step": 2, **STEP}])
        assert not said(console)
        progress.log(3, {**STEP, "eval/solved": 0.4})
    assert "held-out 0.200 -> 0.400  KL 0 (0 of 3,000 tokens differ)" in said(console)


def test_different_tokens_are_counted_over_steps_not_shown():
    console = plain()
    with Progress(console, "toy", num_steps=3, start=0) as progress:
        for step in (1, 2, 3):
            progress.log(step, {**STEP, "parity/tokens_different": 0.01, "parity/k3": 1e-7})
    assert "KL 1.0e-07 (30 of 3,000 tokens differ)" in said(console).splitlines()[-1]


def test_rewards_that_are_more_than_solved_or_not(tmp_path):
    console = plain()
    records = [
        {"step": step, **STEP, "eval/solved": solved, "eval/reward": reward}
        for step, (reward, solved) in enumerate([(0.25, 0.0), (0.5, 0.1), (0.75, 0.2)])
    ]
    with Progress(console, "toy", num_steps=2, start=0) as progress:
        for record in records:
            progress.log(record["step"], record)
    assert "held-out reward 0.250 -> 0.750  held-out pass@1 0.000 -> 0.200" in said(console).splitlines()[-1]
    console = plain(width=100)
    print_summary(console, tmp_path, summarize(records, "finished"))
    assert "reward, held-out" in said(console)
    assert "0.250 -> 0.750 (best 0.750)" in said(console)


@pytest.mark.parametrize(
    "rewards",
    [
        [(0.25, 0.0), (0.43, 0.0)],  # continuous: none is solved
        [(2.9, 0.8), (3.1, 0.9)],  # above 1, which counts as solved, whatever it means
        [(0.0, 0.0), (0.0, 0.0)],  # nothing is solved yet, if anything can be
    ],
)
def test_of_rewards_that_are_not_pass_or_fail_the_mean_is_shown_alone(tmp_path, rewards):
    records = [
        {"step": step, **STEP, "reward/mean": mean, "reward/solved": solved, "eval/reward": mean, "eval/solved": solved}
        for step, (mean, solved) in enumerate(rewards)
    ]
    console = plain()
    with Progress(console, "toy", num_steps=1, start=0) as progress:
        for record in records:
            progress.log(record["step"], record)
    (first, _), (last, _) = rewards
    line = said(console).splitlines()[-1]
    assert f"reward {last:.3f}  held-out reward {first:.3f} -> {last:.3f}  KL" in line
    print_summary(console, tmp_path, summarize(records, "finished"))
    assert "reward, held-out" in said(console)
    assert "pass@1" not in said(console)
    assert "curve" in said(console)


def test_pass_at_1_stands_beside_the_reward_once_something_is_solved():
    console = plain()
    with Progress(console, "toy", num_steps=2, start=0) as progress:
        progress.log(1, {**STEP, "reward/mean": 0.1, "reward/solved": 0.0, "eval/solved": 0.0, "eval/reward": 0.1})
        assert "pass@1" not in said(console)
        progress.log(2, {**STEP, "reward/mean": 0.2, "reward/solved": 0.1})
    assert "reward 0.200  pass@1 0.100  held-out reward 0.100  held-out pass@1 0.000" in said(console)


def test_the_summary_is_one_screen(tmp_path):
    console = plain(width=100)
    metrics = [
        {"step": 0, "eval/solved": 0.2},
        {"step": 1, **STEP, "eval/solved": 0.5, "ledger/sampled": 4, "time/step": 61.0},
    ]
    print_summary(console, tmp_path, summarize(metrics, "finished"))
    assert len(said(console).splitlines()) < 24
    for part in ("finished at step 1", "0.200 -> 0.500 (best 0.500)", "0 of 1,000", "4 sampled", "1:01"):
        assert part in said(console)


def test_a_long_path_is_not_cut_short():
    console = plain(width=60)
    folder = Path("runs") / ("trainer.lr=0.0005," * 4)
    print_summary(console, folder, summarize([{"step": 1, **STEP}], "finished"))
    wanted = {f"{folder}: finished at step 1", f"{folder}/curve.png", f"{folder}/rollouts"}
    assert wanted <= set(said(console).splitlines())  # none is broken


def test_numbers_for_people():
    assert (short(0.0), short(1.23e-8), clock(59.6), clock(3723)) == ("0", "1.2e-08", "1:00", "1:02:03")
