"""Tensor parallelism over more ranks than there are experts: some have none, and all bits are those of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlloop import Engine, load_model
from rlloop.models import Model
from rlloop.models.experts import Experts
from rlloop.numerics.packed import is_packed
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from tests.support.checkpoints import make_checkpoint
from tests.support.packed_models import make_packed
from tests.support.rank_adapters import results as with_adapters
from tests.support.rank_cases import CPU, PROMPTS, SAMPLING, results
from tests.support.rank_updates import (
    DENSE,
    MAMBA,
    MIXTURE,
    Case,
    after_the_checkpoint,
    around_a_checkpoint,
    go,
    ranked,
)
from tests.support.ranks import run_ranks

EXPERTS, RANKS = 2, 3  # the first rank has none
FEW = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 1, "num_attention_heads": 3}
HALVES = {**MAMBA, **FEW, "head_dim": DENSE["head_dim"], "n_groups": 1, "mamba_num_heads": 4}
CASES = {
    "experts": Case(
        {**MIXTURE, **FEW}, "bfloat16", {"balance_coef": 0.1, "expert_bias_rate": 0.01, "checkpoint_layers": "all"}
    ),
    "halves": Case({**HALVES, "num_key_value_heads": 1}, settings={"checkpoint_layers": "all"}),
    "adapter": Case({**MIXTURE, **FEW}, adapter=("all-linear",), reference=True),
}
TP = {"tp": RANKS}
LAYOUTS = [TP, {**TP, "layers": 1}]
FOLDERS: dict[str, dict[str, Any]] = {  # one tensor an expert; all of them in one
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 1},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 1},
}


def drawn_elsewhere(trains: dict[str, int], samples: dict[str, int]) -> list[Any]:
    """Draws of an engine in another layout than its trainer's, after an update."""
    trainer = ranked(CASES["experts"], trains)
    model = trainer.model
    if trains != samples:
        model = Model(model.config, model.profile, join(CPU, Layout(**samples)), weights_of=model)
    engine = Engine(model, max_batch_tokens=32)
    list(go(trainer, CASES["experts"], [0]))
    engine.set_version(1)
    made = engine.generate([prompt[:8] for prompt in PROMPTS], SAMPLING)
    return [(each.token_ids, each.raw_logprobs.tobytes()) for each in made]


def held(folder: Path) -> tuple[int, bool]:
    """The number of experts that this rank has of a layer, and whether they are packed."""
    model = load_model(folder, dtype="bfloat16", context=join(CPU, Layout(**TP)))
    experts = next(each for each in model.modules() if isinstance(each, Experts))
    return len(experts.down_proj), is_packed(experts.down_proj)


def everything(folder: Path, plain: dict[tuple[str, str], Path], packed: dict[tuple[str, str], Path]) -> dict[str, Any]:
    context = join(CPU, Layout(**TP))
    found: dict[str, Any] = {"plain": results(plain, context), "packed": with_adapters(packed, context)}
    found["held"] = [held(each) for each in (*plain.values(), *packed.values())]
    for name in CASES:
        layouts = LAYOUTS if name == "experts" else LAYOUTS[:1]
        found |= {
            f"{name} {layout}": around_a_checkpoint(CASES[name], layout, folder / f"{name} {layout}")
            for layout in layouts
        }
    found["resumed"] = [after_the_checkpoint(CASES[name], TP, folder / f"{name} {TP}") for name in CASES]
    found["elsewhere"] = [drawn_elsewhere(*each) for each in ((TP, {"dp_shard": RANKS}), ({"dp_shard": RANKS}, TP))]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[tuple[str, str], Path]:
    for family, sizes in FOLDERS.items():
        make_checkpoint(folder / family, family, **sizes)
    return {(family, "float32"): folder / family for family in FOLDERS}


@pytest.fixture(scope="module")
def packed(folder: Path) -> dict[tuple[str, str], Path]:
    found = {}
    for kind, family in (("int4", "qwen3_moe"), ("mxfp4", "gpt_oss")):
        found[kind, "bfloat16"], _ = make_packed(folder / kind, kind, **FOLDERS[family])
    return found


@pytest.fixture(scope="module")
def of_ranks(folder: Path, plain, packed) -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything, folder, plain, packed)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tuple[Any, ...]]:
    return {name: around_a_checkpoint(CASES[name], {}, folder / name) for name in CASES}


def test_the_first_rank_has_no_experts_plain_or_packed(of_ranks) -> None:
    for found, count in zip(of_ranks, (0, 1, 1), strict=True):
        assert found["held"] == [(count, False), (count, False), (count, True), (count, True)]


def test_samples_scores_and_gradients_have_one_ranks_bits(of_ranks, plain, packed) -> None:
    for kind, wanted in (("plain", results(plain, None)), ("packed", with_adapters(packed, None))):
        for found in of_ranks:
            assert [name for name, value in wanted.items() if found[kind][name] != value] == [], kind


def test_updates_and_checkpoints_have_one_ranks_bytes(of_ranks, alone) -> None:
    for found in of_ranks:
        made = {name: result for name, result in found.items() if name.partition(" ")[0] in CASES}
        assert len(made) == len(CASES) + 1
        assert [name for name, result in made.items() if result != alone[name.partition(" ")[0]]] == []


def test_a_run_resumes_over_as_many_ranks_and_on_one(of_ranks, alone, folder: Path) -> None:
    wanted = [alone[name][2:] for name in CASES]
    for found in of_ranks:
        assert found["resumed"] == wanted
    assert [after_the_checkpoint(CASES[name], {}, folder / f"{name} {TP}") for name in CASES] == wanted


def test_an_engine_of_another_layout_reads_the_trainers_weights(of_ranks) -> None:
    (wanted,) = run_ranks(1, partial(drawn_elsewhere, {}, {}))
    for found in of_ranks:
        assert found["elsewhere"] == [wanted] * 2
