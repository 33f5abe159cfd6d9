"""vLLM's own server around its own model of experts: a run follows, measures and replays what it chose."""

from __future__ import annotations

from pathlib import Path

from rlloop.cli.main import main
from rlloop.models import new_model, save_model
from rlloop.runs.folder import read_records
from tests.support.fleet_run import TOKEN
from tests.support.tiny_run import make_model
from tests.support.vllm_families import FAMILIES, SMALL
from tests.support.vllm_server import proxy_of, vllm_of

STOCK = ["--load-format", "rlloop_stock", "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill"]


def test_a_run_over_it_replays_the_experts_that_it_chose(tmp_path, monkeypatch):
    make_model(tmp_path)
    wide = {"hidden_size": 64, "head_dim": 32}
    save_model(new_model({**SMALL, **FAMILIES["mixture"], **wide}, seed=0, dtype="bfloat16"), tmp_path / "moe")
    (tmp_path / "model").rename(tmp_path / "dense")
    (tmp_path / "moe").rename(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    with vllm_of(tmp_path, *STOCK, "--dtype", "bfloat16") as url:
        proxy = proxy_of(tmp_path, url)
        try:
            command = ["train", "--config-name", "countdown", "run.dir=run", "model.path=model", "model.dtype=bfloat16"]
            command += ["reward._target_=learnable.reward", "trainer.num_steps=2", "eval.num_draws=8"]
            command += ["rollout.num_prompts=4", "rollout.group_size=4", "parity.mode=fallback", "fleet=regions"]
            command += ["fleet.store=weights", "fleet.signing_key=key", f'+fleet.engines.eu=["{proxy.url}"]']
            assert main(command) == 0
        finally:
            proxy.kill()
    for record in list(read_records(Path("run/metrics.jsonl")))[1:]:
        assert 0 < record["parity/k3"] < 1e-2
        assert record["parity/router_different"] < 0.05
