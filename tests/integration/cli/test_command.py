"""`rlloop parity`: what it measures, what it names, and what it takes from other stacks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlloop import Engine, load_model
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.parity_tool.recorded import read_logprobs
from rlloop.parity_tool.sides import open_side, parse_profile
from rlloop.runs.folder import RunFolder
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.checkpoints import make_checkpoint

SMALL = ("--sequences", "3", "--length", "24")


def parity(tmp_path: Path, *arguments: object) -> tuple[int, dict]:
    code = main(["parity", *map(str, arguments), "-o", str(tmp_path / "report")])
    assert (tmp_path / "report" / "parity.png").stat().st_size > 1000
    return code, json.loads((tmp_path / "report" / "parity.json").read_text())


def test_the_published_finding_about_the_combine(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Rounding each expert to bf16 against rounding their sum once: visible, and gone with the matching profile."""
    folder = tmp_path / "model"
    make_checkpoint(folder, "qwen3_moe", dtype=torch.bfloat16)
    theirs, ours = f"transformers:{folder}", f"{folder}@huggingface"
    code, report = parity(tmp_path, theirs, f"{ours},expert_combine=fp32_once", "--dtype", "bfloat16", *SMALL)
    assert code == 0
    assert report["by_type"]["all"]["k3"] > 1e-5
    assert (report["first_difference"]["op"], report["first_difference"]["where"]) == ("combine", "model.layers.0")
    (knob,) = report["knobs"]
    assert (knob["name"], knob["a"], knob["b"], knob["left"]) == ("expert_combine", "bf16_each", "fp32_once", 0.0)
    assert knob["alone"] == report["by_type"]["all"]["k3"]
    code, report = parity(tmp_path, theirs, ours, "--dtype", "bfloat16", "--require", *SMALL)
    assert code == 0
    assert report["by_type"]["all"]["different"] == 0
    assert report["by_type"]["all"]["k3"] == 0
    assert "Equal, bit for bit." in capsys.readouterr().out


def test_a_side_that_computes_nan_is_named_and_not_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("good", "broken"):
        make_checkpoint(tmp_path / name, "qwen3")
    file = tmp_path / "broken" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"] *= 3e38  # its products overflow; NaN weights are refused
    save_file(weights, file)
    for kind in ("", "transformers:"):
        assert main(["parity", str(tmp_path / "good"), f"{kind}{tmp_path / 'broken'}", "--require", *SMALL]) == 2
        assert "broken computes NaN for 23 of 23 tokens" in capsys.readouterr().err


def test_engine_and_trainer_and_a_stock_knob(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint(folder, "deepseek_v3")
    code, report = parity(tmp_path, f"engine:{folder}", folder, "--require", *SMALL)
    assert code == 0
    assert report["by_type"]["all"]["expert_flips"] == 0
    assert list(report["by_type"]) == ["all", "completion"]
    code, report = parity(tmp_path, folder, f"{folder}@rlloop,rms_norm=stock,combine=reference", "--require", *SMALL)
    assert code == 3
    assert report["first_difference"]["knob"] == "rms_norm"
    assert {knob["name"]: knob["alone"] > 0 for knob in report["knobs"]} == {"rms_norm": True, "combine": False}
    assert {knob["name"]: knob["matters"] for knob in report["knobs"]} == {"rms_norm": True, "combine": False}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_preset_huggingface_has_transformers_bits(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    sides = f"transformers:{tmp_path / 'model'}", f"{tmp_path / 'model'}@huggingface"
    assert main(["parity", *sides, "--dtype", "bfloat16", "--require", *SMALL]) == 0


def test_a_folder_whose_path_has_an_at_sign(tmp_path: Path) -> None:
    folder = tmp_path / "me@work" / "model@2"
    make_checkpoint(folder)
    for a, b in ((f"engine:{folder}", folder), (f"{folder}@rlloop", f"engine:{folder}@rlloop,linear=rlloop")):
        _, report = parity(tmp_path, a, b, *SMALL)
        assert report["by_type"]["all"]["different"] == 0
    _, report = parity(tmp_path, folder, f"{folder}@huggingface", "--dtype", "bfloat16", *SMALL)
    assert report["by_type"]["all"]["different"] > 0
    assert main(["parity", f"{folder}@rloop", str(folder)]) == 2


def test_sparse_attention_beside_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "deepseek_v32")
    _, report = parity(tmp_path, f"transformers:{tmp_path / 'model'}", tmp_path / "model", *SMALL)
    assert 0 < report["by_type"]["all"]["k3"] < 1e-6
    assert {knob["name"] for knob in report["knobs"]} >= {"linear", "indexer", "attention"}


def test_logprobs_of_another_stack_with_labels_of_its_own(tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "theirs.jsonl"
    make_checkpoint(folder)
    (side,) = (open_side(str(folder), "float32", []),)
    rows, rng = [], np.random.default_rng(0)
    for index in range(3):
        row = {"prompt_ids": rng.integers(0, 97, 6).tolist(), "token_ids": rng.integers(0, 97, 5).tolist()}
        row["token_types"] = ["text"] * 2 + ["image"] * 4 + ["completion"] * 5
        file.write_text(json.dumps({**row, "logprobs": [0.0] * 11}))
        scored = side.score(read_logprobs(file).sequences() or [])[0]
        logprobs = scored.logprobs.astype(np.float64)
        logprobs[2:6] += 0.5 * (index == 1)  # image tokens of one sequence are off
        row["logprobs"] = [None, *logprobs[1:].tolist()]
        row["top_ids"] = [None, *scored.top[1:].tolist()]
        rows.append(row)
    file.write_text("\n".join(map(json.dumps, rows)))
    _, report = parity(tmp_path, file, folder)
    found = report["by_type"]
    assert {name: (each["tokens"], each["different"]) for name, each in found.items()} == {
        "all": (30, 4), "text": (3, 0), "image": (12, 4), "completion": (15, 0),
    }  # fmt: skip
    assert found["image"]["k1"] == pytest.approx(0.5 * 4 / 12)
    assert found["image"]["largest"] == pytest.approx(0.5)
    assert found["text"]["k3"] == 0
    assert found["all"]["top_flips"] == 0
    assert "not a model" in report["note"]


def test_a_runs_conversations(tmp_path: Path) -> None:
    """The policy's turns are compared one by one; the environment's replies are not."""
    make_checkpoint(tmp_path / "model")
    engine, prompts = Engine(load_model(tmp_path / "model")), [[5, 6, 7], [8, 9]]
    params = SamplingParams(max_tokens=6, min_tokens=4, seed=3)
    samples = []
    for index, first in enumerate(engine.generate(prompts, params)):
        heard = [*first.prompt_ids, *first.token_ids, 11, 12]
        [second] = engine.generate([heard], params)
        begin = len(first.prompt_ids)
        ids = [*heard[begin:], *second.token_ids]
        turns = ((0, len(first.token_ids)), (len(first.token_ids) + 2, len(ids)))
        logprobs = np.concatenate([first.logprobs, second.logprobs])
        made = dataclasses.replace(first, token_ids=ids, logprobs=logprobs, raw_logprobs=logprobs, turns=turns)
        samples.append(Sample(f"1/0/{index}", Example("e", first.prompt_ids, "", {}), made, "", RewardResult(0.0), 0))
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(1, rollout_rows(samples, ["trained"] * 2, [None] * 2, "e"))
    code, report = parity(tmp_path, tmp_path / "run", tmp_path / "model", "--require")
    assert (code, report["by_type"]["all"]["tokens"]) == (0, sum(len(sample.completion.logprobs) for sample in samples))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere", "model"], "there is no nowhere"),
        (["model", "transformers:nowhere"], "there is no nowhere"),
        (["engine:nowhere@stock", "model"], "there is no nowhere@stock"),
        (["model", "model", "--prompts", "nowhere"], "--prompts is 'nowhere'"),
        (["model", "model", "--sequences", "0"], "--sequences is 0; it must be at least 1"),
        (["model", "model", "--length", "1"], "--length is 1; it must be at least 2"),
        (["model", "model", "-o", "model/file/report"], "-o is 'model/file/report', which cannot be created"),
    ],
)
def test_what_cannot_work_is_refused_before_torch_is_there(tmp_path: Path, arguments: list[str], named: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").touch()
    script = (
        "import sys; from rlloop.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", f"{script}; sys.exit(code)", "parity", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 1"),
        ('{"prompt_ids": [1], "token_ids": [2]}', "logprobs"),
        ('{"prompt_ids": [1, 2], "token_ids": [3, 4], "logprobs": [0.0]}', r"1 entries.*\(2\).*\(4\)"),
        ('{"prompt_ids": [1], "token_ids": [2], "logprobs": [0.0], "token_types": ["a"]}', "1 labels for 2 tokens"),
        ("", "no sequences"),
    ],
)
def test_what_is_no_file_of_logprobs(tmp_path: Path, line: str, named: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=named):
        read_logprobs(tmp_path / "x.jsonl")


def test_profiles_by_name() -> None:
    profile = parse_profile("huggingface,linear=stock,expert_combine=fp32_once")
    assert (profile.linear, profile.rope, profile.expert_combine) == ("stock", "huggingface", "fp32_once")
    assert not profile.holds_contract
    assert parse_profile("rlloop,expert_combine=bf16_each").holds_contract
    for wrong, named in (
        ("fast", "profile 'fast'.*rlloop"),
        ("rlloop,linaer=stock", r"no knob 'linaer'.*\(did you mean linear\?\)"),
        ("rlloop,linear=slow", "linear is 'slow'"),
    ):
        with pytest.raises(ConfigError, match=named):
            parse_profile(wrong)
