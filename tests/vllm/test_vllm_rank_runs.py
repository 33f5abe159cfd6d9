"""Whole runs with vLLM as engine over two ranks: rlloop's model is one rank's embedded run, bit for bit, and vLLM's own
is measured and corrected."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlloop.models import new_model, save_model
from rlloop.runs.folder import read_records
from tests.support.ranked_run import finish, same, start
from tests.support.tiny_run import history
from tests.support.vllm_families import FAMILIES, SMALL

# Shapes that vLLM's CPU kernels know, divided over two ranks.
MIXTURE = {
    **SMALL, **FAMILIES["mixture"], "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4,
    "moe_intermediate_size": 64,
}  # fmt: skip
RUN = ["model.path=mixture", "model.dtype=bfloat16", "trainer.num_steps=2", "eval.every=1", "parity.mode=fallback"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of rlloop's engine, on one rank."""
    place = tmp_path_factory.mktemp("runs")
    save_model(new_model(MIXTURE, seed=0, dtype="bfloat16"), place / "mixture")
    finish(start(place / "embedded", 1, *RUN))
    return place / "embedded"


@pytest.mark.timeout(900)
def test_ranks_of_torchrun(embedded: Path) -> None:
    """Both engines in one command, one after the other; the trainer's ranks are data-parallel."""
    place, sweep = embedded.parent, ["-m", "rollout.engine=vllm,vllm_stock", "rollout.layout.tp=2"]
    finish(start(place / "torchrun", 2, *RUN, *sweep))
    exact, stock = (place / "torchrun" / f"rollout.engine={name}" for name in ("vllm", "vllm_stock"))
    same(exact, embedded, step=2)
    records = list(read_records(exact / "metrics.jsonl"))[1:]
    assert len(records) == 2
    for record in records:
        assert record["parity/tokens"] > 100
        assert record["parity/tokens_different"] == record["parity/k3"] == record["parity/router_different"] == 0
    records, lines = list(read_records(stock / "metrics.jsonl"))[1:], list(read_records(stock / "parity.jsonl"))
    assert lines[0]["layout"]["rollout"] == {"tp": 2}
    assert len(records) == 2
    for record, line in zip(records, lines, strict=True):
        assert record["parity/tokens_different"] > 0
        assert 0 < record["parity/k3"] < 1e-2  # after an update as well: vLLM's ranks have the new weights
        assert record["parity/router_different"] < 0.05
        assert record["is/ratio_max"] != 1
        assert line["rung"] in ("replay", "correction")


@pytest.mark.timeout(900)
def test_stages_of_the_trainer_beside_whole_engines(embedded: Path) -> None:
    """Both engines again; runs stop after a step, and are resumed with an engine over both ranks."""
    folder, stages = embedded.parent / "stages", ["trainer.layout.pp=2", "rollout.sleep=true", "checkpoint.every=1"]
    sweep = ["-m", "rollout.engine=vllm,vllm_stock"]
    finish(start(folder, 2, *RUN, *stages, *sweep, "trainer.num_steps=1"))
    finish(start(folder, 2, *RUN, *stages, *sweep, "rollout.layout.tp=2"))
    exact, stock = (folder / f"rollout.engine={name}" for name in ("vllm", "vllm_stock"))
    same(exact, embedded, step=2)
    layouts = [line["layout"] for line in read_records(exact / "parity.jsonl") if "layout" in line]
    assert layouts == [{"trainer": {"pp": 2}}, {"trainer": {"pp": 2}, "rollout": {"tp": 2}}]
    for record in list(read_records(exact / "metrics.jsonl"))[1:]:
        assert record["parity/tokens_different"] == record["parity/k3"] == record["parity/router_different"] == 0
    records = list(read_records(stock / "metrics.jsonl"))[1:]
    assert len(records) == 2
    for record in records:
        assert record["parity/tokens_different"] > 0
        assert 0 < record["parity/k3"] < 1e-2  # after an update as well


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layouts",
    [
        ("trainer.layout.dp_shard=2", "rollout.layout.tp=2", "rollout.layout.ep=2"),
        ("trainer.layout.pp=2", "rollout.layout.tp=2"),
    ],
    ids=["experts over ranks", "stages of the trainer"],
)
def test_in_actors_of_ray(embedded: Path, layouts: tuple[str, ...]) -> None:
    folder = embedded.parent / f"ray{len(layouts)}"
    finish(start(folder, 1, *RUN, "launch=ray", "ray.cpus_per_worker=0.5", "rollout.engine=vllm", *layouts))
    assert history(folder) == history(embedded)
