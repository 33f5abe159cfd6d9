"""Adapters over context-parallel ranks: forwards have one rank's bits; updates repeat their bits, are close to one
rank's, and go on from a checkpoint on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlloop import Engine
from rlloop.models import Model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.runs.folder import read_records
from rlloop.trainer import Trainer
from tests.support.checkpoints import make_checkpoint
from tests.support.packed_models import make_packed
from tests.support.rank_cases import CPU, PROMPTS, SAMPLING
from tests.support.rank_context import compared
from tests.support.rank_updates import DENSE, MIXTURE, Case, digests_of, go, live, ranked, save
from tests.support.ranked_run import finish, start
from tests.support.ranks import run_ranks
from tests.support.train_sequences import make_batch

ALL = ("all-linear", "lm_head")
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe")
WIDE = {"num_attention_heads": 4}  # of one key-value head
CASES = {
    "dense": Case({**DENSE, **WIDE}, "bfloat16", adapter=ALL, reference=True),
    "experts": Case({**MIXTURE, **WIDE}, adapter=ALL, reference=True, settings={"balance_coef": 0.1}),
    "one product": Case({**MIXTURE, **WIDE}, adapter=("model.layers.1.self_attn.o_proj",)),
}
UPDATES = {  # by number of ranks
    2: [("dense", {"cp": 2}), ("experts", {"cp": 2, "ep": 2}), ("one product", {"cp": 2, "ep": 2})],
    3: [("dense", {"cp": 3}), ("experts", {"cp": 3, "ep": 3})],
    4: [("experts", {"cp": 2, "dp_shard": 2, "ep": 4}), ("dense", {"cp": 2, "pp": 2})],
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}  # relative: of a weight's gradient, by its norm


def everything(folders: list[Path], packed: Path, degree: int) -> list[str]:
    cases = ((folders, "float32"), ([packed], "bfloat16"))
    return [each for case, dtype in cases for each in compared(case, degree, dtype, ALL, TOLERANCE[dtype])]


@pytest.mark.parametrize("degree", [2, 3])
def test_forwards_have_one_ranks_bits_and_gradients_are_close(tmp_path: Path, degree: int) -> None:
    """Over plain bases and over experts with packed weights."""
    folders = [tmp_path / family for family in FAMILIES]
    for folder in folders:
        make_checkpoint(folder, folder.name)
    packed, _ = make_packed(tmp_path / "int4", "int4")
    for different in run_ranks(degree, everything, folders, packed, degree):
        assert not different


def computed(trainer: Trainer, engine: Model) -> list[Any]:
    """What a trainer's adapter computes, in training and in an engine."""
    made = Engine(engine, max_batch_tokens=32).generate([prompt[:8] for prompt in PROMPTS], SAMPLING)
    logprobs = [each.tobytes() for each in trainer.logprobs(make_batch(seed=99))]
    return [logprobs, [(each.token_ids, each.raw_logprobs.tobytes()) for each in made]]


def updated(folder: Path, size: int) -> list[tuple[Any, ...]]:
    """Of each case: logprobs before an update, the norm of its gradient, and what the adapter computes at the end."""
    found = []
    for name, layout in UPDATES[size]:
        trainer, again = ranked(CASES[name], layout), ranked(CASES[name], layout)
        reported, its = (list(go(each, CASES[name], [0, 2])) for each in (trainer, again))
        assert digests_of(reported) == digests_of(its), f"{name} {layout}: two runs differ"
        assert save(trainer, folder / name) == save(again, folder / f"{name} again")
        assert live(trainer) == live(again)
        model, ep = trainer.model, layout.get("ep", 1)
        context = join(CPU, Layout(dp_shard=ep, ep=ep, pp=layout.get("pp", 1)))  # an engine beside the trainer
        engine = Model(model.config, model.profile, context, weights_of=model)
        found.append((repr(reported[0][0]), reported[2]["loss/grad_norm"], computed(trainer, engine)))
    return found


@pytest.mark.parametrize("size", UPDATES)
def test_updates_repeat_and_one_rank_reads_their_checkpoint(tmp_path: Path, size: int) -> None:
    of_ranks = run_ranks(size, updated, tmp_path, size)
    for at, (name, _) in enumerate(UPDATES[size]):
        trainer, resumed = ranked(CASES[name], {}), ranked(CASES[name], {})
        reported = list(go(trainer, CASES[name], [0]))
        resumed.restore(tmp_path / name)
        wanted = computed(resumed, resumed.model)
        for logprobs, norm, its in (found[at] for found in of_ranks):
            assert logprobs == repr(reported[0][0])
            assert norm == pytest.approx(reported[2]["loss/grad_norm"], rel=TOLERANCE[CASES[name].dtype])
            assert its == wanted


def test_a_run_has_no_differing_token_and_goes_on_on_one_rank(tmp_path: Path) -> None:
    folder, lora = tmp_path / "run", "model.lora.rank=4"
    finish(start(folder, 2, lora, "trainer.layout.cp=2", "trainer.num_steps=4"))
    finish(start(folder, 1, lora))
    lines = list(read_records(folder / "parity.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(line["tokens"] > 0 and line["tokens_different"] == 0 for line in lines)
    assert (folder / "checkpoints" / "step_6" / "adapter_model.safetensors").exists()
