"""Faults of communication, planted into the engines of a run on two ranks: the run stops, and the doctor names them."""

import json

import pytest

from rlloop.runs.folder import read_records
from tests.support.ranked_run import on_pictures, start
from tests.support.tiny_run import train

FAULTY = """
import os
import torch
import rlloop
from rlloop.models import Model
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.ops import Ops
from rlloop.parallel.collectives import Ranks

RANK, LAST = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1


class HalvesAdded(Ops):
    '''Products as ranks that split the inputs make them: an all-reduce adds their partial sums.'''

    def linear(self, x, weight, bias=None, *given, **options):
        half = x.shape[-1] // 2
        parts = (super(HalvesAdded, self).linear(x[..., at].contiguous(), weight[:, at].contiguous(), bias)
                 for at, bias in ((slice(None, half), bias), (slice(half, None), None)))
        return next(parts) + next(parts)


class HalvesAddedInTower(HalvesAdded):
    def linear(self, x, weight, bias=None, *given, **options):
        if bias is None:  # the text's products
            return Ops.linear(self, x, weight, bias, *given, **options)
        return super().linear(x, weight, bias)


class Engine(rlloop.Engine):
    def __init__(self, model, *, fault, **settings):
        super().__init__(model, **settings)
        if fault == "sum":
            model.ops = HalvesAdded(model.profile)
        if fault == "tower":
            model.ops = HalvesAddedInTower(model.profile)
        if fault == "swap":
            tp, gather = model.context.tp, Ranks.gather

            def swapped(ranks, x, dim=0, sizes=None):
                whole = gather(ranks, x, dim, sizes)
                swaps = ranks is tp and x.is_floating_point() and (sizes is None or len(set(sizes)) == 1)
                return torch.cat(whole.chunk(2, dim)[::-1], dim) if swaps else whole

            Ranks.gather = swapped
        if fault == "heads" and RANK == LAST:  # a trainer's rank gets its heads' keys in another order
            from rlloop.models import context_parallel

            rows_of = context_parallel.exchanged_rows

            def exchanged(x, rows, division):
                got = rows_of(x, rows, division)
                return got if got.shape[1] > 1 and division.count > 2 else got.roll(1, 0)

            context_parallel.exchanged_rows = exchanged
        if fault == "reported":  # what no operation explains
            generate = self.generate

            def other(*given, **options):
                made = generate(*given, **options)
                for each in made:
                    each.logprobs[-1:] *= 1.0001
                return made

            self.generate = other
        if fault == "stale" and RANK == LAST:

            def refresh(view):
                for copied in view._copies:
                    copied.source.whole()

            Model.refresh = refresh
            ParameterStore.copy_wholes = lambda store, wholes: list(wholes)
"""
SPREAD, CUT = "trainer.layout.dp_shard=2", "rollout.layout.tp=2"
PIECES, PICTURES = "trainer.shard=parameters", "a run on pictures"
CONTEXT = "trainer.layout.cp=2"
STAGES = ("trainer.layout.pp=2", "trainer.layout.tp=2", "rollout.layout.pp=2", "rollout.layout.dp_shard=2")
EACH = "On each of 2 ranks: The first operation that differs: "


@pytest.mark.parametrize(
    ("fault", "layouts", "said"),
    [
        ("sum", (SPREAD, CUT), EACH),
        ("sum", (SPREAD, CUT, "model.dtype=bfloat16"), EACH),
        ("sum", (SPREAD, CUT, PIECES), EACH),
        ("swap", (SPREAD, CUT), EACH),
        ("tower", (SPREAD, CUT, PICTURES), EACH + "linear at visual.patch_embed.proj"),
        ("sum", (CONTEXT,), EACH + "linear at model.layers.0.self_attn.q_proj"),
        ("heads", (CONTEXT,), "On rank 1 alone: The first operation that differs: attention at model.layers.0 "),
        ("reported", (CONTEXT,), "this sequence shows no operation that differs"),
        ("stale", ("trainer.layout.tp=2",), "Weights differ on rank 1 alone. The first on rank 1: model."),
        ("stale", (SPREAD, CUT, PIECES), "Weights differ on rank 1 alone. The first on rank 1: model."),
        ("stale", ("trainer.layout.tp=2", "rollout.layout.pp=2"), "rank 1 alone. The first on rank 1: model.layers.1."),
        ("sum", ("trainer.layout.pp=2",), "On rank 0 alone: The first operation that differs: linear at "),
        ("stale", ("trainer.layout.pp=2",), "Weights differ on rank 1 alone. The first on rank 1: model."),
        ("stale", STAGES, "Weights differ on rank 3 alone. The first on rank 3: model.layers.1."),
    ],
    ids=[
        "all-reduce", "bf16 partial sum", "all-reduce beside pieces", "ranks swapped", "all-reduce in a tower",
        "all-reduce beside cp", "heads of a cp rank", "nothing of a cp rank", "stale shard",
        "stale shard beside pieces", "stale shard of an engine's stage", "all-reduce beside stages",
        "stale whole beside stages", "stale shard of a stage",
    ],
)  # fmt: skip
def test_a_fault_between_ranks_is_found_and_named(tmp_path, monkeypatch, fault, layouts, said):
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "cache"))  # of a warm start
    (tmp_path / "faulty.py").write_text(FAULTY)
    engine, size = f"rollout.engine={{_target_: faulty.Engine, fault: {fault}}}", 4 if layouts == STAGES else 2
    run = on_pictures if PICTURES in layouts else train
    overrides = [each for each in layouts if each != PICTURES]
    ranks = start(tmp_path / "run", size, *overrides, engine, "parity.redraw=false", run=run)
    output, *_ = [rank.communicate(120)[0] for rank in ranks]
    assert ranks[0].returncode == 3, output
    assert said in output
    report = json.loads((tmp_path / "run" / "parity_report.json").read_text())
    *_, line = read_records(tmp_path / "run" / "parity.jsonl")
    ranks = {"stale": [size - 1], "heads": [1], "reported": None}.get(fault, [0] if "rank 0 alone" in said else [0, 1])
    assert report["doctor"].get("ranks") == line.get("ranks") == ranks
