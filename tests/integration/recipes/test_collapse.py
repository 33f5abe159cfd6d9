"""The collapse study end to end, two steps of a tiny model; the effect itself is `make study`'s to show."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlloop.cli.main import main
from rlloop.config.run import Anchor, ParityMode, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe
from rlloop.metrics import is_timing
from rlloop.recipes.countdown import warmstart
from rlloop.runs.folder import read_config, read_records, read_rollouts, rollout_files

ARMS = sorted(file.stem for file in (Path(warmstart.__file__).parent / "arm").glob("*.yaml"))
GUARDS = ("clip", "none", "tis", "icepop")
TINY = [
    "task.largest_number=4", "task.largest_target=20", "task.model.hidden_size=16", "task.model.intermediate_size=32",
    "task.model.num_layers=1", "task.model.num_heads=2", "task.warm_start.demonstrations=64",
    "task.warm_start.batch_size=16", "task.warm_start.lr=0.01", "task.warm_start.eval_every=5",
    "task.warm_start.eval_draws=8", "task.warm_start.max_steps=10", "rollout.num_prompts=4", "rollout.group_size=4",
    "trainer.num_steps=2", "eval.num_draws=8",
    "reward._target_=rlloop.testing.fake_reward",  # one that so small a model gets something of, so that it learns
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def working_folder(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.setattr(warmstart, "cache_root", lambda: cache)
    monkeypatch.chdir(tmp_path)


@functools.cache
def control(recipe: str, *overrides: str) -> RunConfig:
    """The arm that others are compared with, which stays as it is."""
    return build(compose_recipe(recipe, overrides))


def train(*overrides: str) -> int:
    return main(["train", "--config-name", "countdown/collapse", *TINY, *overrides])


@pytest.mark.parametrize("arm", ARMS)
def test_arms_differ_in_the_engine_alone(arm):
    # On the device that has every arm's kernels: a CPU refuses those of fp8.
    zero = control("countdown/collapse", "arm=zero_kld", "device=cuda")
    other = build(compose_recipe("countdown/collapse", [f"arm={arm}", "device=cuda"]))
    drift = other.rollout.drift
    departs = bool(drift.declared and not drift.both_sides) or other.rollout.profile != zero.rollout.profile
    assert (other.parity.mode is ParityMode.observe) == departs
    assert departs != (arm in ("zero_kld", "other_batches") or arm.endswith("_both_sides"))
    if arm.endswith(("_tis", "_none")):
        assert other.algorithm.anchor is Anchor.trainer
        assert other.algorithm.correction == ({"tis": {"cap": 2.0}} if arm.endswith("_tis") else {})
        other.algorithm = zero.algorithm
    if arm == "other_batches":
        for key in ("page_size", "max_batch_tokens", "max_cache_tokens", "prefix_caching"):
            assert getattr(other.rollout, key) != getattr(zero.rollout, key)
            setattr(other.rollout, key, getattr(zero.rollout, key))
    other.parity, other.rollout.drift, other.rollout.profile = zero.parity, zero.rollout.drift, zero.rollout.profile
    assert other == zero


@pytest.mark.parametrize("guard", GUARDS)
def test_guards_compose_with_every_arm(guard):
    for arm in ("int4", "lossy_sync"):
        algorithm = build(compose_recipe("countdown/collapse", [f"arm={arm}", f"guard={guard}"])).algorithm
        assert algorithm.anchor is (Anchor.rollout if guard == "clip" else Anchor.trainer)
        assert list(algorithm.correction) == ([guard] if guard in ("tis", "icepop") else [])


def test_a_drift_is_refused_where_equality_is_required():
    with pytest.raises(ConfigError, match=r"rollout\.drift has weights=int4.*parity\.mode=require refuses"):
        build(compose_recipe("countdown/collapse", ["arm=int4", "parity.mode=require"]))


def test_a_drifted_arm_beside_the_equal_one(tmp_path, capsys):
    assert train("-m", "arm=zero_kld,int4_tensor", "run.dir=study") == 0
    zero, drifted = (list(read_records(tmp_path / "study" / f"arm={arm}" / "metrics.jsonl"))
                     for arm in ("zero_kld", "int4_tensor"))  # fmt: skip
    for record in zero[1:]:
        assert (record["parity/k3"], record["parity/tokens_different"]) == (0, 0)
        assert "eval/engine_solved" not in record
    for record in drifted[1:]:
        assert record["parity/k3"] > 0
        assert record["parity/tokens_different"] > 0.5
        assert record["sync/weight_error"] > 0.01
    assert "eval/engine_solved" in drifted[0]
    assert "eval/engine_solved" in drifted[2]
    assert drifted[0]["eval/solved"] == zero[0]["eval/solved"]  # the trainer's own weights, the same before any update
    assert main(["compare", "study", "-o", "report.html"]) == 0
    assert "no collapse in 1 of 1" in (tmp_path / "report.html").read_text()
    assert main(["verify", "study/arm=int4_tensor"]) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of Inductor's own imports
@pytest.mark.parametrize("arm", ["stock_attention", "stock_linear", pytest.param("compiled", marks=pytest.mark.slow)])
def test_an_engine_that_differs_in_some_operations_alone(tmp_path, arm):
    sizes = ("task.model.hidden_size=256", "task.model.intermediate_size=512")  # enough terms that their order shows
    assert train(f"arm={arm}", *sizes, "run.dir=run") == 0
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))[1:]
    assert sum(record["parity/tokens_different"] for record in records) > 0
    assert max(abs(record["parity/k3"]) for record in records) < 1e-6


def test_a_switch_in_mid_run_leaves_the_steps_before_it_equal(tmp_path):
    assert train("arm=switched_int4", "rollout.drift.from_step=2", "run.dir=switched") == 0
    records = list(read_records(tmp_path / "switched" / "metrics.jsonl"))
    assert records[1]["parity/k3"] == 0 < records[2]["parity/k3"]
    assert read_config(tmp_path / "switched")["rollout"]["drift"]["from_step"] == 2


def trained(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """A run's records after its start, without times, and its last checkpoint's tensors."""
    records = [
        {name: value for name, value in record.items() if not (is_timing(name) or name.startswith("sync/"))}
        for record in list(read_records(folder / "metrics.jsonl"))[1:]
    ]
    last = folder / "checkpoints" / f"step_{records[-1]['step']}"
    return records, {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def test_other_batch_sizes_in_the_engine_change_no_bit_of_a_run(tmp_path):
    small = ["rollout.max_batch_tokens=7", "rollout.max_cache_tokens=40", "trainer.num_steps=3"]
    assert train("arm=zero_kld", "trainer.num_steps=3", "run.dir=zero") == 0
    assert train("arm=other_batches", *small, "run.dir=small") == 0
    zero, other = trained(tmp_path / "zero"), trained(tmp_path / "small")
    assert zero == other
    assert any(record["loss/grad_norm"] > 0 for record in zero[0])


def test_weights_rounded_on_both_sides_leave_engine_and_trainer_equal(tmp_path, capsys):
    settings, arm = ("eval.every=1", "checkpoint.every=1"), ("arm=switched_fp4_both_sides", "rollout.drift.from_step=3")
    assert train("arm=zero_kld", *settings, "trainer.num_steps=4", "run.dir=zero") == 0
    assert train(*arm, *settings, "trainer.num_steps=4", "run.dir=whole") == 0
    for last in (2, 3, 4):  # resumed where the drift begins, and after it
        assert train(*arm, *settings, f"trainer.num_steps={last}", "run.dir=broken") == 0
    (zero, exact), (records, weights), (again, resumed) = (
        trained(tmp_path / name) for name in ("zero", "whole", "broken")
    )
    assert (again, resumed) == (records, weights)
    assert records[0] == zero[0]
    assert records[1]["loss/grad_norm"] == zero[1]["loss/grad_norm"]  # its evaluation is of the rounded weights
    assert records[3]["loss/grad_norm"] != zero[3]["loss/grad_norm"]
    assert weights["model.safetensors"] != exact["model.safetensors"]
    for record in records:
        assert (record["parity/k3"], record["parity/tokens_different"]) == (0, 0)
        assert record["parity/tokens"] > 0
    metrics = list(read_records(tmp_path / "whole" / "metrics.jsonl"))[1:]
    errors = [record["sync/weight_error"] for record in metrics]
    assert errors[:2] == [0, 0]
    assert min(errors[2:]) > 0.01
    capsys.readouterr()
    assert main(["verify", "whole", "--all"]) == 0  # scores again under the last checkpoints' weights, rounded
    assert "drawn again under the weights that it began with, step_3;" in capsys.readouterr().out


def test_the_command_that_resumes_a_job_of_a_multirun_is_one(tmp_path):
    from rlloop.cli.train import _make_jobs

    [job] = _make_jobs("countdown/collapse", [("arm=int4,seed=1", ["arm=int4", "seed=1", f"run.dir={tmp_path}"])])
    assert job.folder == tmp_path / "arm=int4,seed=1"
    [again] = _make_jobs("countdown/collapse", [("", shlex.split(job.command)[4:])])
    assert (again.folder, again.plain) == (job.folder, job.plain)


MIXTURES = sorted(file.stem for file in (Path(warmstart.__file__).parent / "mixture").glob("*.yaml"))


@pytest.mark.parametrize("name", MIXTURES)
def test_arms_of_the_mixture_differ_in_the_engine_and_in_replay_alone(name):
    zero = control("countdown/collapse_moe", "mixture=zero_kld")
    other = build(compose_recipe("countdown/collapse_moe", [f"mixture={name}"]))
    assert (other.parity.mode is ParityMode.observe) == (name != "zero_kld")
    assert other.parity.replay == name.endswith("_replay")
    differs = other.rollout.profile != zero.rollout.profile, bool(other.rollout.drift.declared)
    assert sum(differs) == (name != "zero_kld")
    other.parity, other.rollout.drift, other.rollout.profile = zero.parity, zero.rollout.drift, zero.rollout.profile
    assert other == zero


@pytest.mark.parametrize("recipe", ["collapse_gpu", "collapse_gpu_moe"])
def test_the_recipes_for_a_gpu_take_arms_and_algorithms(recipe):
    zero = build(compose_recipe(f"countdown/{recipe}", []))
    assert (zero.device, zero.algorithm.loss, zero.algorithm.anchor) == ("cuda", "grpo", Anchor.rollout)
    assert bool(zero.task["model"]["num_experts"]) == recipe.endswith("_moe")
    arm = build(compose_recipe(f"countdown/{recipe}", ["arm=fp8_all", "algorithm=gspo", "task.model.num_layers=2"]))
    assert (arm.algorithm.loss, arm.algorithm.anchor, arm.rollout.profile.experts) == ("gspo", Anchor.rollout, "stock")
    assert arm.rollout.drift.declared == [
        "weights=fp8", "activations=fp8", "products=fp8", "cache=fp8", "logits=bfloat16"
    ]  # fmt: skip


def test_a_mixture_with_and_without_replay(tmp_path):
    args = ["task.model.num_experts=4", "mixture=zero_kld,fp4,fp4_replay"]
    assert main(["train", "--config-name", "countdown/collapse_moe", "-m", *TINY, *args, "run.dir=moe"]) == 0
    zero, plain, replayed = (
        list(read_records(tmp_path / "moe" / f"mixture={name}" / "metrics.jsonl"))[1:]
        for name in ("zero_kld", "fp4", "fp4_replay")
    )
    assert all((record["parity/k3"], record["parity/router_different"]) == (0, 0) for record in zero)
    assert plain[0]["parity/router_different"] > 0 == replayed[0]["parity/router_different"]
    assert min(plain[0]["parity/k3"], replayed[0]["parity/k3"]) > 0


def test_stale_weights_are_recorded_as_what_they_are(tmp_path):
    assert train("arm=stale", "rollout.drift.stale_steps=1", "trainer.num_steps=3", "run.dir=stale") == 0
    records = list(read_records(tmp_path / "stale" / "metrics.jsonl"))
    assert [record["rollout/version_lag"] for record in records[1:]] == [0, 1, 1]
    versions = [{row["policy_version"] for row in read_rollouts(file)} for file in rollout_files(tmp_path / "stale")]
    assert versions == [{0}, {0}, {1}]
    assert records[1]["parity/k3"] == 0 < records[2]["parity/k3"]


def test_a_lossy_run_resumes_to_the_history_of_an_unbroken_one(tmp_path):
    for folder, steps in (("whole", [4]), ("broken", [2, 4])):
        for last in steps:
            assert train("arm=lossy_sync", f"trainer.num_steps={last}", f"run.dir={folder}", "eval.every=1") == 0
    whole, broken = (
        [record["parity/k3"] for record in list(read_records(tmp_path / folder / "metrics.jsonl"))[1:]]
        for folder in ("whole", "broken")
    )
    assert whole == broken
    assert whole[-1] > 0
