"""Faults of communication, planted into the engines of a run on two ranks: the run stops, and the doctor names them."""

import json

import pytest

from tests.support.ranked_run import start

FAULTY = """
import os
import torch
import rlloop
from rlloop.models import Model
from rlloop.numerics.ops import Ops
from rlloop.parallel.collectives import Ranks

RANK = int(os.environ["RANK"])


class HalvesAdded(Ops):
    '''Products as ranks that split the inputs make them: an all-reduce adds their partial sums.'''

    def linear(self, x, weight, *given, **options):
        half = x.shape[-1] // 2
        parts = (super(HalvesAdded, self).linear(x[..., at].contiguous(), weight[:, at].contiguous())
                 for at in (slice(None, half), slice(half, None)))
        return next(parts) + next(parts)


class Engine(rlloop.Engine):
    def __init__(self, model, *, fault, **settings):
        super().__init__(model, **settings)
        if fault == "sum":
            model.ops = HalvesAdded(model.profile)
        if fault == "swap":
            tp, gather = model.context.tp, Ranks.gather

            def swapped(ranks, x, dim=0, sizes=None):
                whole = gather(ranks, x, dim, sizes)
                swaps = ranks is tp and x.is_floating_point() and (sizes is None or len(set(sizes)) == 1)
                return torch.cat(whole.chunk(2, dim)[::-1], dim) if swaps else whole

            Ranks.gather = swapped
        if fault == "stale" and RANK == 1:

            def refresh(view):
                for copied in view._copies:
                    copied.source.whole()

            Model.refresh = refresh
"""
SPREAD, CUT = "trainer.layout.dp_shard=2", "rollout.layout.tp=2"


@pytest.mark.parametrize(
    ("fault", "layouts", "said"),
    [
        ("sum", (SPREAD, CUT), "On each of 2 ranks: The first operation that differs: "),
        ("sum", (SPREAD, CUT, "model.dtype=bfloat16"), "On each of 2 ranks: The first operation that differs: "),
        ("swap", (SPREAD, CUT), "On each of 2 ranks: The first operation that differs: "),
        ("stale", ("trainer.layout.tp=2",), "Weights differ on rank 1 alone. The first on rank 1: model."),
    ],
    ids=["all-reduce", "bf16 partial sum", "ranks swapped", "stale shard"],
)
def test_a_fault_between_ranks_is_found_and_named(tmp_path, fault, layouts, said):
    (tmp_path / "faulty.py").write_text(FAULTY)
    engine = f"rollout.engine={{_target_: faulty.Engine, fault: {fault}}}"
    ranks = start(tmp_path / "run", 2, *layouts, engine, "parity.redraw=false")
    output, _ = [rank.communicate(120)[0] for rank in ranks]
    assert ranks[0].returncode == 3, output
    assert said in output
    report = json.loads((tmp_path / "run" / "parity_report.json").read_text())
    assert report["doctor"]["ranks"] == ([1] if fault == "stale" else [0, 1])
