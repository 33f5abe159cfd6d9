"""A run with model.lora: PEFT checkpoints, resumed after a kill with the bits of one that nothing stopped, verified."""

import json

from rlloop.audit import Extent, verify
from rlloop.runs.folder import read_records
from tests.support.tiny_run import history, train

LORA = ("model.lora.rank=4", "algorithm.reward_kl_coef=0.01")


def test_a_run_of_an_adapter_resumes_bit_for_bit(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    output, _ = (process := train(whole, *LORA)).communicate(timeout=240)
    assert process.returncode == 0, output
    output, _ = (process := train(broken, *LORA, "trainer.num_steps=4")).communicate(timeout=240)
    assert process.returncode == 0, output
    output, _ = (process := train(broken, *LORA)).communicate(timeout=240)
    assert process.returncode == 0, output
    assert "resuming after step 4" in output
    differing = {"eval/solved", "eval/reward"}  # the shorter run has an evaluation of its own at its end
    metrics = [
        [{k: v for k, v in row.items() if k.split("/")[0] != "eval" and k not in differing} for row in history(run)[0]]
        for run in (whole, broken)
    ]
    assert metrics[0] == metrics[1]
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "trainer.json", "adapter_config.json"):
        files = [folder / "checkpoints" / "step_6" / name for folder in (whole, broken)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    assert not list((whole / "checkpoints" / "step_6").glob("model*"))
    assert json.loads((whole / "checkpoints" / "step_6" / "adapter_config.json").read_text())["r"] == 4
    lines = list(read_records(whole / "parity.jsonl"))
    assert sum(line.get("different", 0) for line in lines) == 0
    monkeypatch.chdir(tmp_path)  # model.path is relative
    checks = list(verify(whole, Extent(None)))
    assert [problem for check in checks for problem in check.problems] == []
    rescored = next(check for check in checks if check.name == "re-scored")
    assert rescored.summary.startswith("32 completions"), rescored.summary  # of the base, and of step 4's adapter
