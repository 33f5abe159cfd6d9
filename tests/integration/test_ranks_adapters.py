"""Adapters and packed bases under every layout have one rank's bytes: what is trained, saved and resumed, sampled by
request, and what an engine of another layout than its trainer's reads. One launch of ranks runs all cases."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlloop import Engine, load_model
from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.parity.across_ranks import different_weights
from tests.support.packed_models import make_packed
from tests.support.rank_adapters import over_ranks, results
from tests.support.rank_cases import CPU, PROMPTS, SAMPLING
from tests.support.rank_updates import (
    DENSE,
    MIXTURE,
    Case,
    after_the_checkpoint,
    around_a_checkpoint,
    digests_of,
    go,
    ranked,
)
from tests.support.ranks import run_ranks

ALL = ("all-linear", "lm_head")
CASES = {  # of 2 query heads and 1 key-value head; latent attention and 7 experts
    "dense": Case(DENSE, "bfloat16", adapter=ALL),
    "experts": Case(MIXTURE, adapter=ALL, reference=True),
    "unembedding": Case(MIXTURE, adapter=("lm_head",)),
}
TRAINED = [
    ("dense", {"tp": 2}), ("dense", {"pp": 2}), ("experts", {"tp": 2}), ("experts", {"dp_shard": 2, "ep": 2}),
    ("unembedding", {"pp": 2}), ("unembedding", {"dp_shard": 2, "ep": 2}),
]  # fmt: skip
LAYOUTS = [{"tp": 2}, {"pp": 2}]
ELSEWHERE = [({"dp_shard": 2, "ep": 2}, {"tp": 2}), ({"tp": 2}, {"pp": 2})]  # layouts of trainer and engine
PACKED, DTYPE = "int4", "bfloat16"


def sampled_elsewhere(trains: dict[str, int], samples: dict[str, int]) -> list[Any]:
    """Draws of an engine in another layout with the trainer's adapter, before and after an update."""
    trainer = ranked(CASES["experts"], trains)
    model = trainer.model
    if trains != samples:
        context = join(CPU, Layout(**samples))
        model = Model(model.config, model.profile, context, weights_of=model)
    engine, found = Engine(model, max_batch_tokens=32), []
    for version in range(2):
        made = engine.generate([prompt[:8] for prompt in PROMPTS], SAMPLING)
        found += [(each.token_ids, each.raw_logprobs.tobytes()) for each in made]
        found.append(digests_of(go(trainer, CASES["experts"], [version * 2])))
        engine.set_version(version + 1)
    return found


def packed_elsewhere(folder: Path, reads: dict[str, int], samples: dict[str, int]) -> list[Any]:
    """Draws of an engine over a packed base that was loaded in another layout."""
    model = load_model(folder, dtype=DTYPE, context=join(CPU, Layout(**reads)))
    if reads != samples:
        model = Model(model.config, model.profile, join(CPU, Layout(**samples)), weights_of=model)
    made = Engine(model, max_batch_tokens=32).generate(PROMPTS, SAMPLING)
    return [(each.token_ids, each.raw_logprobs.tobytes()) for each in made]


def diagnosed(folder: Path) -> list[dict[str, str]]:
    """Weights that differ on this rank: none of a packed base and of an adapter, then one factor of the engine's on the
    last rank."""
    cut, stages = (join(CPU, Layout(**degrees)) for degrees in ELSEWHERE[1])
    packed, trained = load_model(folder, dtype=DTYPE, context=cut), ranked(CASES["dense"], {"tp": 2}).model
    of_packed, of_trained = (
        Model(model.config, model.profile, stages, weights_of=model) for model in (packed, trained)
    )
    found = [different_weights(packed, of_packed), different_weights(trained, of_trained)]
    assert of_trained.adapter is not None
    if stages.rank == 1:
        next(iter(of_trained.adapter.entries().values())).live.detach()[0] += 1
    return [*found, different_weights(trained, of_trained)]


def refused() -> str:
    """Adapters by request, where each rank has requests of its own."""
    model = ranked(CASES["experts"], {"dp_shard": 2, "ep": 2}).model
    with pytest.raises(ConfigError) as error:
        Engine(model).load_adapter("a", "nowhere")
    return str(error.value)


def everything(folder: Path, folders: dict[tuple[str, str], Path]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{name} {layout}": around_a_checkpoint(CASES[name], layout, folder / f"{name} {layout}")
        for name, layout in TRAINED
    }
    found["resumed"] = after_the_checkpoint(CASES["dense"], {"pp": 2}, folder / f"dense {LAYOUTS[0]}")
    found["another layout"] = [sampled_elsewhere(*each) for each in ELSEWHERE]
    found["by request"] = over_ranks(folders, *LAYOUTS)
    whole, cut, stages = {"dp_shard": 2}, {"tp": 2}, {"pp": 2}
    pairs = ((whole, cut), (cut, whole), (cut, stages))
    found["packed"] = [packed_elsewhere(folders[PACKED, DTYPE], *each) for each in pairs]
    return {**found, "diagnosed": diagnosed(folders[PACKED, DTYPE]), "refused": refused()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Bases with packed weights, experts among them, and recurrent layers'."""
    return {(kind, DTYPE): make_packed(tmp_path_factory.mktemp(kind), kind)[0] for kind in (PACKED, "fp8_tensor")}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory, folders: dict[tuple[str, str], Path]) -> list[dict[str, Any]]:
    return run_ranks(2, everything, tmp_path_factory.mktemp("ranks"), folders)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    return {name: around_a_checkpoint(CASES[name], {}, tmp_path_factory.mktemp("alone")) for name in CASES}


@pytest.mark.parametrize(("name", "layout"), TRAINED)
def test_updates_and_checkpoints_are_one_ranks(of_ranks, alone, name: str, layout: dict[str, int]) -> None:
    for found in of_ranks:
        assert found[f"{name} {layout}"] == alone[name]


def test_a_run_resumes_on_another_layout(of_ranks, alone) -> None:
    for found in of_ranks:
        assert found["resumed"] == alone["dense"][2:]


def test_an_engine_of_another_layout_reads_the_trainers_adapter(of_ranks) -> None:
    (wanted,) = run_ranks(1, partial(sampled_elsewhere, {}, {}))
    for found in of_ranks:
        assert found["another layout"] == [wanted] * len(ELSEWHERE)


def test_requests_with_several_adapters_get_one_ranks_bits(of_ranks, folders) -> None:
    wanted = results(folders, None)
    for found in of_ranks:
        for layout, by_name in zip(LAYOUTS, found["by request"], strict=True):
            assert [name for name, value in by_name.items() if value != wanted[name]] == [], layout


def test_differing_weights_are_found_in_adapters_and_packed_bases(of_ranks) -> None:
    (*fine, others), (*also_fine, last) = (found["diagnosed"] for found in of_ranks)
    assert [*fine, others, *also_fine] == [{}] * 5
    [(name, why)] = last.items()
    assert (".layers.1." in name, why) == (True, "the engine's is not the trainer's")


def test_packed_weights_are_cut_and_gathered_as_they_are_stored(of_ranks, folders) -> None:
    wanted = packed_elsewhere(folders[PACKED, DTYPE], {}, {})
    for found in of_ranks:
        assert found["packed"] == [wanted] * 3


def test_ranks_with_requests_of_their_own_refuse_adapters_by_request(of_ranks) -> None:
    for found in of_ranks:
        assert "set dp_shard=1" in found["refused"]
