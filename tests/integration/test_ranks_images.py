"""Models that read images over ranks: forwards have one rank's bits in every layout, and so have updates, the tower's
weights among them, but under `cp`; runs have no differing token."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.models.scoring import ScoreRow
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from rlloop.runs.folder import read_records
from tests.support.image_models import FAMILIES, image_config, inputs, make_image_checkpoint
from tests.support.packed_models import make_packed_images
from tests.support.rank_cases import CPU, bits
from tests.support.rank_context import compared
from tests.support.rank_updates import Case, digests_of, go, live, ranked, save
from tests.support.ranked_run import finish, on_pictures, same, start
from tests.support.ranks import run_ranks

# The first of two stages has the two layers that features of deepstack are added to.
TEXT = {family: {"num_hidden_layers": 5} if config[3] else {} for family, config in FAMILIES.items()}
LONG, FROZEN = "qwen3_vl bfloat16", "qwen3_vl, the tower frozen"
UPDATES = {  # by number of ranks: cases, and layouts whose updates have one rank's bytes
    2: {
        LONG: [{"dp_shard": 2}],
        "qwen3_vl": [{"tp": 2}, {"pp": 2}, {"dp_shard": 2, "layers": 1}],
        "qwen3_5_moe": [{"dp_shard": 2, "ep": 2}],
        FROZEN: [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "layers": 1}],
    },
    3: {LONG: [{"dp_shard": 3}], "qwen3_5_moe": [{"dp_replicate": 3}, {"dp_shard": 3, "ep": 3}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp("models") / family for family in FAMILIES}
    for family, folder in made.items():
        make_image_checkpoint(folder, family, text=TEXT[family])
    return made


CASES = {name: Case(image_config(name, TEXT[name]), pictures=True) for name in ("qwen3_vl", "qwen3_5_moe")}
CASES[LONG] = dataclasses.replace(CASES["qwen3_vl"], dtype="bfloat16", steps=20)
CASES[FROZEN] = dataclasses.replace(CASES["qwen3_vl"], dtype="bfloat16", settings={"freeze_vision_tower": True})


def trained(folder: Path, case: Case, layout: dict[str, int]) -> tuple[str, dict[str, str], str]:
    trainer = ranked(case, layout)
    return digests_of(go(trainer, case, range(case.steps))), save(trainer, folder / str(layout)), live(trainer)


def in_layouts(folder: Path, size: int) -> dict[tuple[str, str], Any]:
    return {
        (name, str(layout)): trained(folder / name, CASES[name], layout)
        for name, layouts in UPDATES[size].items()
        for layout in layouts
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: trained(folder / name, case, {}) for name, case in CASES.items()}


@pytest.mark.parametrize("size", UPDATES)
def test_updates_have_the_bytes_of_one_rank(alone: dict[str, Any], tmp_path: Path, size: int) -> None:
    for found in run_ranks(size, in_layouts, tmp_path, size):
        for (name, layout), result in found.items():
            assert result == alone[name], f"{name} with {layout} is not what one rank has"


def seen(folder: Path, context: ParallelContext | None) -> dict[str, bytes]:
    """What an engine samples and prefills, and the trainer's logprobs and whole gradients of the tower."""
    model = load_model(folder, dtype="bfloat16", context=context)
    engine, prompts = Engine(model, page_size=4, max_batch_tokens=16), [prompt for prompt, _ in inputs()]
    params = [SamplingParams(max_tokens=6, seed=index, ignore_eos=True) for index in range(len(prompts))]
    made = engine.generate(prompts, params)
    found = {
        "tokens": str([each.token_ids for each in made]).encode(),
        "sampled": b"".join(each.logprobs.tobytes() for each in made),
        "prefilled": b"".join(each.tobytes() for each in engine.prefill_logprobs(prompts)),
    }
    with torch.set_grad_enabled(model.stage.whole):
        logprobs = torch.cat(token_logprobs(model, inputs()))
    found["scored"] = bits(model.stage.shared(logprobs.detach()))
    if model.stage.whole and model.visual is not None:
        logprobs.square().sum().backward()
        found |= {name: bits(each.grad) for name, each in model.visual.named_parameters() if each.grad is not None}
    return found


def seen_in(folders: dict[str, Path], layout: Layout) -> dict[str, dict[str, bytes]]:
    context = join(CPU, layout)
    return {family: seen(folder, context) for family, folder in folders.items()}


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=3), Layout(pp=2)], ids=["tp=2", "tp=3", "pp=2"])
def test_engines_and_trainers_have_the_bits_of_one_rank(folders: dict[str, Path], layout: Layout) -> None:
    wanted = {family: seen(folder, None) for family, folder in folders.items()}
    for found in run_ranks(layout.world_size, seen_in, folders, layout):
        for family, results in found.items():
            assert results.keys() == (wanted[family].keys() if layout.pp == 1 else {*list(wanted[family])[:4]})
            for name, result in results.items():
                assert result == wanted[family][name], f"{family}: {name}"


def test_packed_text_weights_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    packed = {family: make_packed_images(tmp_path / family, family, "fp8")[0] for family in ("qwen3_vl", "qwen3_5_moe")}
    wanted = {family: seen(folder, None) for family, folder in packed.items()}
    for found in run_ranks(2, seen_in, packed, Layout(tp=2)):
        assert found == wanted


@pytest.mark.parametrize("size", [2, 3])
def test_contexts_have_the_bits_of_one_rank(folders: dict[str, Path], size: int) -> None:
    """A rank's tokens begin and end within pictures; it sees those alone that its tokens have parts of."""
    drawn = SamplingParams(max_tokens=20, seed=3)
    rows = [
        ScoreRow(prompt.token_ids + ids, range(len(prompt), len(prompt) + len(ids)), drawn, model_input=prompt)
        for prompt, ids in inputs()
    ]
    for different in run_ranks(size, compared, list(folders.values()), size, "float32", (), 1e-4, [rows, rows[2:3]]):
        assert not different


def test_runs_on_pictures_have_no_differing_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun with one rank's bytes; under Ray engines and trainer divide different things."""
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "cache"))  # of the warm start
    alone, spread, rays = (tmp_path / name for name in ("alone", "spread", "rays"))
    finish(start(alone, 1, run=on_pictures))
    finish(start(spread, 2, "trainer.layout.dp_shard=2", run=on_pictures))
    same(alone, spread, 2)
    finish(start(rays, 1, "launch=ray", "trainer.layout.cp=2", "rollout.layout.tp=2", run=on_pictures))
    for run in (alone, rays):
        assert all(line["tokens_different"] == 0 for line in read_records(run / "parity.jsonl"))
        steps = list(read_records(run / "metrics.jsonl"))[1:]
        assert [step["parity/k3_image"] for step in steps] == [0.0, 0.0]
        assert all(step["loss/grad_norm"] > 0 for step in steps)
