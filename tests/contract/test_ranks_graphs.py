"""Tensor-parallel ranks record steps with prompts together, or none of them does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlloop import Engine
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine import step_ranks
from rlloop.rollout.engine.graphs import EngineGraphs
from tests.support.rank_models import CONFIG, CPU, EXPERTS, model
from tests.support.ranks import run_ranks
from tests.support.replayed_graphs import Work, count_replays, replaying
from tests.support.traffic import bits, traffic


def sampled(layout: Layout, trouble: str) -> tuple[list[Any], dict[str, int], str]:
    """Of this rank: bits, replays, and forms with prompts in order of recording. `trouble` is the second rank's."""
    context, recorded = join(CPU, layout), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        counts = count_replays(patch)
        record, captured = EngineGraphs._record_prompts, EngineGraphs._captured

        def noted(self: EngineGraphs, form: Any) -> bool:
            if made := record(self, form):
                recorded.append(form)
            return made

        def fails(self: EngineGraphs, work: Work) -> Any:
            made = captured(self, work)
            if made[1][0].shape[-1] == CONFIG["hidden_size"] and len(recorded) == 2:
                raise RuntimeError(trouble)
            return made

        patch.setattr(EngineGraphs, "_record_prompts", noted)
        if context.rank == 1 and trouble == "no room":
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (step_ranks.ROOM - 1, 80 << 30))
        elif context.rank == 1 and trouble:
            patch.setattr(EngineGraphs, "_captured", fails)
        more = EXPERTS if layout.ep > 1 else None
        made = replaying(model(context, more), max_running=5).generate(*traffic(24))
    return [bits(each) for each in made], dict(counts), str(recorded)


def cases() -> list[tuple[list[Any], dict[str, int], str]]:
    troubles = ("", "no room", "CUDA out of memory", "operation not permitted")
    return [*(sampled(Layout(tp=2), trouble) for trouble in troubles), sampled(Layout(tp=2, ep=2), "")]


def test_ranks_record_the_same_steps_with_prompts() -> None:
    plain, experts = (
        [bits(each) for each in Engine(model(None, more), max_running=5).generate(*traffic(24))]
        for more in (None, EXPERTS)
    )
    first, second = run_ranks(2, cases)
    assert first == second
    for made, counts, _ in first[:4]:
        assert made == plain
        assert counts["decodes"] >= 20
    usual, tight, full, refused, of_experts = ((counts.get("prompts", 0), forms) for _, counts, forms in first)
    assert usual[0] >= 5
    assert tight == (0, "[]")
    assert refused[1] == full[1] != usual[1]  # two forms
    assert 0 < refused[0] <= full[0] < usual[0]
    assert first[4][0] == experts
    assert of_experts == (0, "[]")
