"""Whole runs on a GPU with vLLM as engine: tier 1 is the embedded engine's run over again, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlloop.runs.folder import read_records
from tests.support.gpu_models import need_gpus
from tests.support.gpu_runs import KINDS, train, train_over
from tests.support.tiny_run import history

pytest.importorskip("vllm", reason="vLLM 0.26 is not installed")
pytestmark = [  # the warnings are vLLM's
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("working_folder"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_embedded_engines_bit_for_bit(kind):
    train("embedded", kind)
    records = train("vllm", kind, "rollout.engine=vllm")
    assert history(Path("vllm")) == history(Path("embedded"))
    assert len(records) == 3
    for record in records:
        assert record["parity/tokens_different"] == record["parity/k3"] == 0
        assert record["parity/tokens"] > 100
        if kind != "dense":
            assert record["parity/router_different"] == 0
    train("asleep", kind, "rollout.engine=vllm", "rollout.sleep=true")
    assert history(Path("asleep")) == history(Path("embedded"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["observe", "fallback"])
def test_stock_is_observed_or_corrected(kind, mode):
    records = train("stock", kind, "rollout.engine=vllm_stock", f"parity.mode={mode}", "trainer.lr=1e-3")
    assert len(records) == 3
    for record in records:
        assert record["parity/tokens_different"] > 0
        assert 0 < record["parity/k3"] < 1e-2
        if kind != "dense":
            assert record["parity/router_different"] < 0.05


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "engines"), [("dense", ("vllm", "vllm_stock")), ("mixture", ("vllm", "vllm_stock")), ("latent", ("vllm",))]
)
def test_over_two_gpus(kind, engines):
    """All engines in one command, at tp 2 with experts over the ranks: rlloop's model is one GPU's embedded run over
    again, and vLLM's own is measured and corrected."""
    need_gpus(2)
    shared = ["parity.mode=fallback", "trainer.lr=1e-3"]
    train("embedded", kind, *shared)
    layout = ["rollout.layout.tp=2", *(["rollout.layout.ep=2"] if kind != "dense" else [])]
    train_over(2, "ranks", kind, "-m", f"rollout.engine=choice({','.join(engines)})", *shared, *layout)
    for engine in engines:
        folder = Path("ranks") / f"rollout.engine={engine}"
        records = list(read_records(folder / "metrics.jsonl"))[1:]
        assert len(records) == 3
        if engine == "vllm":
            assert history(folder) == history(Path("embedded"))
        for record in records:
            assert record["parity/tokens"] > 100
            if engine == "vllm":
                assert record["parity/tokens_different"] == record["parity/k3"] == 0
            else:
                assert record["parity/tokens_different"] > 0
                assert 0 < record["parity/k3"] < 1e-2
                assert record["is/ratio_max"] != 1
            if kind != "dense":
                assert record["parity/router_different"] < 0.05
