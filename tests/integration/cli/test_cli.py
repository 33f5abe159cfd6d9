"""The command as a user types it, in process. Engine and trainer are fakes; the real ones run in tests/recipes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlloop.cli.main import main
from rlloop.config.run import Launch
from rlloop.launch import run as launch
from rlloop.numerics.operators.distribution import NotFinite
from rlloop.runs import plots
from rlloop.runs.console import Progress
from rlloop.runs.folder import read_records
from rlloop.testing import FakeEngine, FakePolicy, fake_parts
from rlloop.trainer import CheckpointStore

RECIPE = """\
defaults:
  - rlloop
  - algorithm: grpo
  - _self_
task: {_target_: rlloop.testing.FakeTask}
reward: {_target_: rlloop.testing.fake_reward}
trainer: {num_steps: 3}
rollout: {num_prompts: 4, group_size: 3, max_tokens: 6}
eval: {num_draws: 8}
"""


class Harness:
    """A working folder with one recipe, `toy`, run by fakes. `drift` goes to the next engines that are built."""

    def __init__(self, capsys) -> None:
        self.drift = 0.0
        self.engine_class = FakeEngine
        self.capsys = capsys

    @contextmanager
    def parts(self, config, prepared, folder):
        policy = FakePolicy()
        engine = self.engine_class(policy, drift=self.drift)
        yield fake_parts(
            folder.checkpoints,
            policy=policy,
            engine=engine,
            scorer=prepared.scorer,
            advantages=prepared.advantages,
            checkpoints=CheckpointStore(folder.checkpoints),
        )

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """(exit code, everything printed)"""
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
        captured = self.capsys.readouterr()
        assert isinstance(code, int)
        return code, captured.out + captured.err

    def train(self, *overrides: str) -> tuple[int, str]:
        return self("train", "--config-name", "toy", *overrides)


@pytest.fixture
def rlloop(tmp_path, monkeypatch, capsys) -> Harness:
    recipe = tmp_path / "recipes" / "toy"
    recipe.mkdir(parents=True)
    (recipe / "config.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(plots, "draw", lambda runs, file, *_: file.write_bytes(b"\x89PNG"))  # drawn in test_plots
    harness = Harness(capsys)
    monkeypatch.setitem(launch.BUILDERS, Launch.local, harness.parts)
    return harness


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_records(run / "metrics.jsonl")]


def test_a_run_leaves_its_folder_a_picture_and_a_summary(rlloop, tmp_path):
    code, said = rlloop.train("run.dir=out")
    assert code == 0
    run = tmp_path / "out"
    assert steps(run) == [0, 1, 2, 3]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    for part in ("finished at step 3", "reward, held-out", "at most 0 in any step", "curve.png"):
        assert part in said
    assert {path.name for path in run.iterdir()} == {
        ".lock", "config.yaml", "metrics.jsonl", "parity.jsonl", "rollouts", "checkpoints", "fingerprints.json",
        "reward.json", "summary.json", "curve.png", "run.log",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"recipes", "out"}  # no folder of Hydra's


def test_the_default_folder_of_a_files_run_has_its_name(rlloop, tmp_path):
    recipe = tmp_path / "recipes" / "toy" / "config.yaml"
    (recipe.parent / "other.yaml").write_text(recipe.read_text())
    assert rlloop("train", str(recipe))[0] == 0
    assert rlloop("train", "recipes/toy/other.yaml")[0] == 0
    assert {path.parent.parent.name for path in tmp_path.glob("runs/*/*/config.yaml")} == {"toy", "other"}


def test_the_default_folder_is_runs_recipe_time(rlloop, tmp_path):
    assert rlloop.train()[0] == 0
    [run] = (tmp_path / "runs" / "toy").iterdir()
    assert steps(run) == [0, 1, 2, 3]


def test_the_same_command_of_a_finished_run_says_so(rlloop, tmp_path):
    rlloop.train("run.dir=out")
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    code, said = rlloop.train("run.dir=out")
    assert (code, "out is finished" in said) == (0, True)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


def test_more_steps_extend_a_finished_run(rlloop, tmp_path):
    rlloop.train("run.dir=out")
    code, said = rlloop.train("run.dir=out", "trainer.num_steps=5")
    assert (code, "resuming after step 3" in said) == (0, True)
    assert steps(tmp_path / "out") == [0, 1, 2, 3, 4, 5]


def test_another_configuration_in_the_same_folder_is_refused(rlloop):
    rlloop.train("run.dir=out")
    code, said = rlloop.train("run.dir=out", "trainer.lr=0.5")
    assert code == 2
    assert "trainer.lr: the run has 1e-05, now it is 0.5" in said


def test_a_sweep_makes_a_folder_a_job_and_can_be_repeated(rlloop, tmp_path):
    code, _ = rlloop.train("-m", "seed=0,1", "run.dir=sweep")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["seed=0", "seed=1"]
    records = [list(read_records(tmp_path / "sweep" / f"seed={seed}" / "metrics.jsonl")) for seed in (0, 1)]
    assert records[0][1]["reward/mean"] != records[1][1]["reward/mean"]
    code, said = rlloop.train("-m", "seed=0,1", "run.dir=sweep")
    assert (code, said.count("is finished")) == (0, 2)


def test_a_sweep_with_a_mistake_starts_nothing(rlloop, tmp_path):
    code, said = rlloop.train("-m", "trainer.lr=0.1,-1", "run.dir=sweep")
    assert (code, "trainer.lr is -1" in said) == (2, True)
    assert not (tmp_path / "sweep").exists()
    for override, says in (("seed", "'seed' is not an override"), ("trainer.lr=interval(0,1)", "INTERVAL_SWEEP")):
        code, said = rlloop.train("-m", "seed=0,1", override)
        assert (code, says in said) == (2, True)


def test_cfg_job_prints_and_stops(rlloop, tmp_path):
    code, said = rlloop.train("--cfg", "job", "trainer.lr=0.25")
    assert code == 0
    assert "lr: 0.25" in said
    assert "mode: require" in said
    assert {path.name for path in tmp_path.iterdir()} == {"recipes"}


@pytest.mark.parametrize(("shown", "on"), [(["doctor"], {0, 2}), (["train", "toy", "--cfg", "job"], {0})])
def test_of_torchruns_ranks_the_first_prints_and_of_machines_the_first_of_each(rlloop, monkeypatch, shown, on):
    for name, value in {"WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        code, said = rlloop(*shown)
        assert (code, bool(said)) == (0, rank in on)


def test_help_has_examples_and_lists_recipes(rlloop):
    for arguments in (["--help"], ["train", "--help"]):
        code, said = rlloop(*arguments)
        assert (code, "rlloop train countdown" in said) == (0, True)
    assert "toy  (" in said


@pytest.mark.parametrize("width", [80, 130])
def test_help_breaks_between_words_where_the_terminal_is_narrow(rlloop, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in ([], ["train"], ["eval"], ["parity"], ["dashboard"], ["serve"], ["serve", "engine"]):
        lines = rlloop(*arguments, "--help")[1].splitlines()
        longer = [line for line in lines if len(line) > width]
        # Commands stay whole, to be copied; so do paths.
        assert all(line.startswith("  rlloop ") or len(line.split()) == 1 for line in longer), longer
    examples = rlloop("compare", "--help")[1].splitlines()
    assert ("      a multirun's folder: all of its runs" in examples) == (width == 80)  # no thin column
    assert any("On-policy" in line and len(line) > 80 for line in rlloop("--help")[1].splitlines()) == (width > 80)


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (["trainer.lrr=1"], 2, "did you mean trainer.lr"),
        (["trainer.lr=-1"], 2, "trainer.lr is -1.0"),
        (["parity.mode=strict"], 2, "[require, fallback, observe]"),
        (["parity.mode=requird"], 2, "did you mean require?"),
        (["rollout.num_prompts=0"], 2, "rollout.num_prompts is 0"),
        (["rollout.group_size=1"], 2, "set rollout.group_size to 2 or more"),
        (["reward._target_=nosuch.reward"], 2, "there is no module 'nosuch'"),
        (["reward._target_=rlloop.testing.fake_rewrad"], 2, "did you mean fake_reward?"),
        (["model.path=nosuch"], 2, "model.path is 'nosuch'"),
        (["model.reference_path=nosuch"], 2, "model.reference_path is 'nosuch'"),
        (["algorithm=null"], 2, "'algorithm=null': algorithm picks an entry of its group"),
        (["run.dir=${oc.env:NO_SUCH_VARIABLE}"], 2, "Environment variable 'NO_SUCH_VARIABLE' not found"),
        (["device=tpu"], 2, "device is 'tpu'; it must be cpu or cuda"),
        (["launch=slurm", "run.dir=out"], 2, "[local, ray]"),
        (["run.dir="], 2, "run.dir is empty"),
        (["run.dir=/dev/null/run"], 2, "cannot write a run into /dev/null/run: Not a directory"),
        (["+sinks.wanbd={}"], 2, "(did you mean wandb?)"),
        (["algorithm.loss=grop"], 2, "(did you mean grpo?)"),
        (["certificate.key=none.pem"], 2, "none.pem cannot be read as a private key"),
        (["certificate.witness=none/heads"], 2, "a file in an existing folder"),
        (["fleet.store=s3://key:secret@bucket/p"], 2, "fleet.store has a login"),
        (["task._target_=rlloop.testing.FakePolicy", "~task.seed"], 2, "task"),
    ],
)
def test_mistakes_end_by_name_before_a_folder_is_made(rlloop, tmp_path, overrides, code, says):
    ended, said = rlloop.train(*overrides)
    assert (ended, says in said) == (code, True), said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 8
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_corrects_by_itself_needs_no_other_correction_to_fall_back_to(rlloop):
    assert rlloop.train("algorithm=importance_sampling", "parity.mode=fallback", "trainer.num_steps=1")[0] == 0


RELAY = ["serve", "relay", "--upstream", "http://127.0.0.1:1", "--cache", "c"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--config-name", "toyy"], "did you mean toy?"),
        (["train"], "no recipe is named"),
        (["trian"], "(did you mean train?)"),
        (["serve", "engin"], "(did you mean engine?)"),
        (["shapes", "qwen3-8b-full", "--gpu", "8"], "unrecognized arguments: --gpu 8 (did you mean --gpus?)"),
        (["shapes", "Qwen/Qwen3-8B-full"], "(did you mean qwen3-8b-full, "),
        (["shapes", "nope"], "there is no training shape 'nope'; rlloop shapes lists all"),
        (["verify", "nosuch"], "there is no run nosuch"),
        (["verify", "nosuch", "--witness", "none"], "--witness none is not a file"),
        (["verify", "nosuch", "--witness", "/dev/null"], "there is no run nosuch"),  # as a pipe, not a regular file
        (["compare", "nosuch", "other"], "there is no run nosuch"),
        (["verify", "recipes"], "recipes is not a run's folder"),
        (["compare", "a", "b", "-o", "/dev/null/report.html"], "its folder cannot be created: "),
        (["serve", "relay", "--upstream", "http://127.0.0.1:1", "--cache", "/dev/null/c"], "folder /dev/null/c cannot"),
        (["serve", "trainer", "--store", "w", "--signing-key", "/proc/k", "--run-id", "r"], "k.token cannot be wr"),
        (["serve", "relay", "--upstream", "trainer:7000", "--cache", "c"], "write http://trainer:7000"),
        ([*RELAY, "--port", "70000"], "the port is 70000; it must be 0"),
        ([*RELAY, "--certificate", "no.pem", "--key", "no.pem"], "certificate no.pem and key no.pem cannot be used"),
        (["serve", "engine", "--model", "m", "--join", "trainer:7000"], "--join is 'trainer:7000'; it must be an"),
        (
            ["serve", "engine", "--model", ".", "--lora-rank", "4"],
            "--lora-rank 4 follows an adapter that trains, so it",
        ),
        (["serve", "engine", "--model", "m", "--join", "http://[t"], "--join is 'http://[t'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(rlloop, arguments, says):
    code, said = rlloop(*arguments)
    assert (code, says in said, "Traceback" in said) == (2, True, False), said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*RELAY, "--host", "a..b"], "cannot listen on a..b"),
        (
            ["serve", "engine", "--model", "m", "--join", "http://t", "--host", "0.0.0.0"],
            "--join with --host 0.0.0.0 needs --advertise",
        ),
    ],
)
def test_servers_for_others_that_nobody_could_reach(rlloop, monkeypatch, arguments, says):
    monkeypatch.setenv("RLLOOP_TOKEN", "a token of some length")
    code, said = rlloop(*arguments)
    assert (code, says in said, "Traceback" in said) == (2, True, False), said


def test_a_run_that_fails_says_so_in_its_folder_and_may_be_put_right(rlloop, tmp_path):
    (tmp_path / "my_broken_reward.py").write_text("def broken(prompt, completion, example):\n    return None.reward\n")
    code, said = rlloop.train("reward._target_=my_broken_reward.broken", "run.dir=out")
    assert (code, "held-out samples was rejected, first: reward error: AttributeError" in said) == (1, True), said
    assert "stopped: every one of" in (tmp_path / "out" / "run.log").read_text()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"
    assert rlloop.train("run.dir=out")[0] == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "finished"


def test_a_traceback_only_for_who_asks(rlloop, monkeypatch):
    assert "Traceback" in rlloop.train("trainer.lr=-1", "--full-error")[1]
    monkeypatch.setenv("RLLOOP_TRACEBACK", "1")
    assert "Traceback" in rlloop.train("trainer.lr=-1")[1]


def test_a_users_own_reward_is_found_beside_them(rlloop, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(prompt, completion, example, bonus):\n    return bonus\n")
    assert rlloop.train("reward._target_=mine.reward", "+reward.bonus=0.75", "run.dir=out")[0] == 0
    assert [record.get("reward/mean") for record in read_records(tmp_path / "out" / "metrics.jsonl")][1:] == [0.75] * 3


def test_a_users_own_reward_that_an_installed_module_hides_is_refused(rlloop, tmp_path, monkeypatch):
    (site := tmp_path / "site-packages").mkdir()
    for folder in (tmp_path, site):
        (folder / "scoring_twice.py").write_text("def reward(prompt, completion, example):\n    return 1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    code, said = rlloop.train("reward._target_=scoring_twice.reward", "run.dir=out")
    assert code == 2
    assert f"working folder has scoring_twice.py, but Python imports scoring_twice from {site}" in said
    assert not (tmp_path / "out").exists()


def test_an_async_reward_and_one_that_fails_now_and_then(rlloop, tmp_path):
    (tmp_path / "later.py").write_text(
        "import asyncio\n"
        "async def reward(prompt, completion, example):\n"
        "    await asyncio.sleep(0)\n"
        "    if '2' in completion:\n        raise KeyError('two')\n"
        "    return 1.0\n"
    )
    assert rlloop.train("reward._target_=later.reward", "run.dir=out")[0] == 0
    record = list(read_records(tmp_path / "out" / "metrics.jsonl"))[1]
    assert record["reward/mean"] == 1.0
    assert 0 < record["ledger/rejected"] < record["ledger/sampled"] == 12


def test_a_difference_ends_with_3_a_report_and_the_token(rlloop, tmp_path):
    rlloop.drift = 1e-6
    code, said = rlloop.train("run.dir=out")
    assert code == 3
    assert "step 0: " in said  # at the first evaluation
    assert "sequence eval/0, token 0" in said
    assert str(Path("out") / "parity_report.json") in said
    assert json.loads((tmp_path / "out" / "parity_report.json").read_text())["first"]["uid"] == "eval/0"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "parity broken"


@pytest.mark.usefixtures("heard_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_after_the_step_and_says_how_to_resume(rlloop, tmp_path, number):
    class Interrupted(FakeEngine):
        def generate(self, prompts, sampling):
            if self.policy_version == 1 and len(prompts) == 12:
                os.kill(os.getpid(), number)
            return super().generate(prompts, sampling)

    rlloop.engine_class = Interrupted
    before = signal.getsignal(signal.SIGINT)  # ignored, in what a shell runs in the background
    code, said = rlloop.train("run.dir=out", "seed=4")
    assert code == 130
    assert "Interrupted. To resume: rlloop train --config-name toy seed=4 run.dir=out" in said
    assert steps(tmp_path / "out") == [0, 1, 2]
    rlloop.engine_class = FakeEngine
    assert rlloop.train("seed=4", "run.dir=out")[0] == 0
    rlloop.train("seed=4", "run.dir=whole")
    histories = [
        [record["reward/mean"] for record in list(read_records(tmp_path / run / "metrics.jsonl"))[1:]]
        for run in ("out", "whole")
    ]
    assert histories[0] == histories[1]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_stops_at_once(rlloop, tmp_path):
    class Impatient(FakeEngine):
        def generate(self, prompts, sampling):
            if self.policy_version == 1:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().generate(prompts, sampling)

    rlloop.engine_class = Impatient
    code, said = rlloop.train("run.dir=out")
    assert (code, "To resume:" in said) == (130, True)
    assert steps(tmp_path / "out") == [0, 1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BrokenPipeError(32, "Broken pipe"), "the output was closed, as by `| head`"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_a_run_that_ends_by_an_error_keeps_the_reason(rlloop, tmp_path, monkeypatch, error, reason):
    def log(self, step, metrics):
        if step == 2:
            raise error

    monkeypatch.setattr(Progress, "log", log)
    with pytest.raises((OSError, ValueError)):  # of a pipe: what the test's own output makes of it
        rlloop.train("run.dir=out")
    assert f"stopped: {reason}" in (tmp_path / "out" / "run.log").read_text()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"


def test_weights_that_are_no_longer_finite_end_the_run_with_what_to_change(rlloop, tmp_path, monkeypatch):
    def log(self, step, metrics):
        if step == 2:
            raise NotFinite("row 0 of 4 holds no distribution to sample from")

    monkeypatch.setattr(Progress, "log", log)
    code, said = rlloop.train("run.dir=out")
    assert (code, "Traceback" in said) == (1, False), said
    assert "out: training has diverged: row 0 of 4 holds no distribution" in said
    assert "Train again in another folder (run.dir)" in said
    assert "a lower trainer.lr" in said
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"


def test_an_interrupt_before_the_first_step_is_quiet_too(rlloop, monkeypatch):
    def interrupted(config, prepared, folder):
        raise KeyboardInterrupt

    monkeypatch.setitem(launch.BUILDERS, Launch.local, interrupted)
    code, said = rlloop.train("run.dir=out")
    assert (code, "To resume:" in said, "Traceback" in said) == (130, True, False)


def test_verify_finds_a_sound_run_sound_and_a_changed_one_not(rlloop, tmp_path):
    rlloop.train("run.dir=out")
    code, said = rlloop("verify", "out")
    assert code == 0, said
    assert "36 sampled" in said
    file = tmp_path / "out" / "parity.jsonl"
    file.write_text(file.read_text().replace('"version":1', '"version":0'))
    code, said = rlloop("verify", "out")
    assert code == 1
    assert "step 2 was changed" in said


def test_compare_shows_outcomes_and_the_keys_that_differ(rlloop, tmp_path):
    for seed in (0, 1):
        rlloop.train(f"run.dir=run{seed}", f"seed={seed}")
    code, said = rlloop("compare", "run0", "run1", "-o", "report.html")
    assert code == 0
    assert "pass@1, held-out" in said
    assert [line for line in said.splitlines() if "seed" in line]
    assert "trainer.lr" not in said
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert rlloop("compare", "run0", "run1", "-o", "report.pdf")[0] == 2


def test_python_m_rlloop_is_the_command():
    done = subprocess.run([sys.executable, "-m", "rlloop", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rlloop 0.")


def test_what_is_no_task_is_refused(rlloop):
    code, said = rlloop.train("task._target_=rlloop.testing.fake_reward")
    assert (code, "task" in said) == (2, True)
