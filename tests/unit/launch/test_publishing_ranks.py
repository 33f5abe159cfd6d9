"""The workers of several ranks: all encode what is published, and a replica over ranks takes it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloop import Engine, SamplingParams
from rlloop.config.run import RunConfig
from rlloop.errors import SyncError
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.make import load
from rlloop.launch.workers import Colocated, Replica
from rlloop.models.parameters import ParameterStore
from rlloop.parallel.start import Place
from rlloop.sync.bundle import Bundle, BundlePublisher
from rlloop.sync.live import named_weights, tensors_of
from tests.support.command import forks
from tests.support.tiny_run import make_model

SIZE = 2
PROMPTS = [[5, 6, 7], list(range(10, 40)), [9]]
SAMPLING = [SamplingParams(max_tokens=8, seed=seed) for seed in range(3)]
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
LAYOUTS = {  # of trainer and engines
    "dp_shard": ["trainer.layout.dp_shard=2"],
    "tp": ["trainer.layout.tp=2", "rollout.layout.tp=2"],
    "ep": ["trainer.layout.dp_shard=2", "trainer.layout.ep=2", "rollout.layout.tp=2"],
    "pp": ["trainer.layout.pp=2", "rollout.layout.pp=2"],
    "stages": ["trainer.layout.pp=2", "rollout.layout.tp=2"],
    "adapter of stages": ["trainer.layout.pp=2", "model.lora.rank=2"],
    "adapter": ["trainer.layout.dp_shard=2", "rollout.layout.tp=2", "model.lora.rank=2"],
    "fp8": ["trainer.layout.dp_shard=2", "rollout.layout.dp_shard=2", "model.quantize=fp8"],
}


def config(layout: str) -> RunConfig:
    return build(compose_recipe("countdown", [*LAYOUTS[layout], "launch=ray", "ray.replicas=1"]))


def on_ranks(size: int, place: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    with ProcessPoolExecutor(size, forks()) as pool:
        places = [Place(rank, size, f"file://{place / function.__name__}") for rank in range(size)]
        ranks = [pool.submit(function, place, where, *args) for where in places]
        return [rank.result(120) for rank in ranks]


def published(place: Path, rank: Place, layout: str) -> list[Bundle | None]:
    """A first version, the next, and that one for a replica that joins."""
    worker = Colocated(config(layout), str(place / "model"), 1, rank)
    try:
        first = worker.call("publish", 0)
        change(worker.model)
        bundles = [first, worker.call("publish", 1), worker.call("publications.joining")]
        assert worker.engine.policy_version == 1
        assert bool(worker.published()) == (rank.rank == 0)
        return bundles
    finally:
        worker.close()


def applied(place: Path, rank: Place, layout: str, bundles: list[Bundle], wrong: Bundle) -> Any:
    """A replica's completions by the second version, which it takes twice, with a refused bundle in between."""
    worker = Replica(config(layout), str(place / "model"), 1, rank)
    try:
        made = []
        for some in (bundles[:2], [bundles[2]]):
            for bundle in some:
                worker.call("apply", bundle)
            with pytest.raises(SyncError):
                worker.call("apply", wrong)
            made.append(worker.call("generate", 1, PROMPTS, SAMPLING))
        return [[(each.token_ids, each.logprobs.tobytes()) for each in some or ()] for some in made]
    finally:
        worker.close()


@torch.no_grad()
def change(model) -> None:
    for tensor in ParameterStore(model).tensors().values():
        tensor.mul_(2).add_(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_in_the_engines_layout_takes_what_all_ranks_encode(tmp_path, layout):
    make_model(tmp_path, **(MIXTURE if layout == "ep" else {}))
    bundles, *others = on_ranks(SIZE, tmp_path, published, layout)
    assert others == [[None] * 3], "rank 0 has the bundles"
    model = load(config(layout), tmp_path / "model")
    wrong = BundlePublisher("node").publish(tensors_of(named_weights(model).items())[0], 2, {})  # by another key
    size = config(layout).world.engine.world_size
    first, *rest = on_ranks(size, tmp_path, applied, layout, bundles, wrong)
    change(model)
    expected = Engine(model).generate(PROMPTS, SAMPLING)
    assert first == [[(each.token_ids, each.logprobs.tobytes()) for each in expected]] * 2
    assert rest == [[[], []]] * (size - 1), "rank 0 has the completions"
