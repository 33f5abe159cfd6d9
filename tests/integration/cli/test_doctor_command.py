"""`rlloop doctor`, and the refusal of a machine that does not keep the contract."""

import sys
from types import ModuleType

import pytest
import torch

from rlloop.cli import machine_check as doctor
from rlloop.cli.main import main
from rlloop.config.run import AlgorithmConfig, ParityConfig, ParityMode, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch import make
from rlloop.rollout.vllm import versions
from tests.support.tiny_run import make_model


def test_doctor_says_what_holds_and_what_is_missing(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for dtype in ("float32", "bfloat16", "float16"):
        assert f"ok  zero KLD on the CPU, {dtype}" in printed
    for subject in ("GPU", "launch=ray", "dashboard", "data.format=datasets", "vLLM as engine"):
        assert subject in printed


@pytest.mark.parametrize(("generation", "runs", "told"), [(9, False, 1), (9, True, 0), (8, False, 0)])
def test_kernels_for_hopper_that_are_off_are_named(monkeypatch, generation, runs, told):
    launch = ModuleType("rlloop.numerics.kernels.triton.launch")
    launch.__dict__.update(GLUON=("3.6", "3.7"), gluon_runs=lambda device: runs)  # the module needs Triton
    monkeypatch.setitem(sys.modules, "rlloop.numerics.kernels.triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    lines = [*doctor._hopper()]
    assert [(line.holds, "triton 3.6 and 3.7" in line.text) for line in lines] == [(False, True)] * told


def test_a_vllm_of_another_cuda_is_named(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF..libcudart.so.13\0..")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test's
    monkeypatch.setattr(versions, "installed", lambda: ("0.26.0", False))
    monkeypatch.setattr(versions, "problems", list)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    lines = [line.text for line in doctor._vllm()]
    assert "vLLM 0.26.0 is built for CUDA 13, and torch for 12.8: its kernels will not load" in lines
    assert lines[0].startswith("vLLM 0.26.0 is a GPU build, but torch")


def test_a_machine_that_fails_the_probe_is_refused(tmp_path, monkeypatch, capsys):
    make_model(tmp_path)
    config = RunConfig(algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"))
    monkeypatch.setattr(make, "probe", lambda *args: {"linear": "rows differ"})
    with pytest.raises(ConfigError, match=r"does not keep the numerical contract in float32 \(linear: rows differ\)"):
        make.load(config, tmp_path / "model")
    config.parity = ParityConfig(ParityMode.observe)
    make.load(config, tmp_path / "model")

    monkeypatch.setattr("rlloop.cli.machine_check.probe", lambda *args: {"linear": "rows differ"})
    assert main(["doctor"]) == 1
    assert "--  zero KLD on the CPU, float32: linear: rows differ" in capsys.readouterr().out
