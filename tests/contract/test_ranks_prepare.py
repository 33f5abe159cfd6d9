"""`Engine.prepare()` over ranks: all record the same steps, requests find them, and draw one rank's tokens."""

from __future__ import annotations

import logging
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlloop import Engine
from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine import graphs, step_ranks
from rlloop.rollout.engine.graph_forms import Form
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.leader import LeadingEngine, follow
from rlloop.types import Completion
from tests.support.rank_models import CPU, EXPERTS, model
from tests.support.ranks import run_ranks
from tests.support.replayed_graphs import Work, count_replays, replaying
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import bits, traffic

APART = {"dp_shard": 2, "ep": 2}  # each rank has requests of its own
LAYOUTS = [{"tp": 2}, {"tp": 2, "ep": 2}, APART, {"pp": 2}]
TOKENS = 64  # of steps with prompts
NOTED = "steps are recorded, others when they come: "


def crowd(engine: Engine, part: slice = slice(None)) -> list[Any]:
    """Bits of requests whose tokens are drawn in graphs, and of some whose are not."""
    prompts, sampling = traffic(48)
    prompts, sampling = prompts[part], sampling[part]
    plain = [replace(each, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for each in sampling]
    made: list[Completion] = [*engine.generate(prompts, plain), *engine.generate(prompts[:9], sampling[:9])]
    return [bits(each) for each in made]


def forms(engine: Engine) -> list[Form]:
    """In order of recording."""
    assert engine._graphs is not None
    return list(engine._graphs._recorded)


def more(degrees: dict[str, int]) -> dict[str, Any]:
    return EXPERTS if "ep" in degrees else {}


def prepared(degrees: dict[str, int]) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Of this rank: the steps recorded ahead, and bits of requests by which none is recorded."""
    context = join(CPU, Layout(**degrees))
    with pytest.MonkeyPatch.context() as patch:
        count_replays(patch)
        patch.setattr(graphs, "MOST_TOKENS", TOKENS)
        engine = replaying(model(context, more(degrees)), max_running=40, sleep=True)
        engine.sleep()
        count, ahead = engine.prepare(), forms(engine)
        assert count == len(ahead)
        assert engine.prepare() == count
        engine.sleep()
        patch.setattr(EngineGraphs, "_captured", None)  # nothing more can be recorded
        half = slice(24 * context.rank, 24 * context.rank + 24) if degrees == APART else slice(None)
        made = crowd(engine, half)
    return [tuple(each) for each in ahead], made


def every_layout() -> list[tuple[list[tuple[Any, ...]], list[Any]]]:
    return [prepared(degrees) for degrees in LAYOUTS]


def test_ranks_record_the_same_steps_ahead_and_requests_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank = run_ranks(2, every_layout)
    count_replays(monkeypatch)
    monkeypatch.setattr(graphs, "MOST_TOKENS", TOKENS)
    for degrees, *ranks in zip(LAYOUTS, *by_rank, strict=True):
        one = replaying(model(None, more(degrees)), max_running=40)
        assert one.prepare() > 30
        decodes = [each for each in forms(one) if not each.tokens]
        expected = forms(one) if degrees == {"tp": 2} else decodes  # of experts and stages no prompts
        if degrees == APART:  # whose ranks agree on a size that all can take
            expected = [
                Form(n, 16, "none", draws) for draws in (True, False) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
            ]
        for rank, (recorded, made) in enumerate(ranks):
            assert recorded == expected, f"{degrees}, rank {rank}"
            half = slice(24 * rank, 24 * rank + 24) if degrees == APART else slice(None)
            assert made == crowd(Engine(model(None, more(degrees)), max_running=40), half), f"{degrees}, rank {rank}"


def troubled(trouble: str) -> tuple[int | str, int, list[str], list[Any]]:
    """`trouble` is the second rank's, in its third step: what `prepare` returned or raised, the number of steps, what
    the log says, and bits of requests."""
    context, said = join(CPU, Layout(tp=2)), list[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background may ignore
    with pytest.MonkeyPatch.context() as patch:
        count_replays(patch)
        captured = EngineGraphs._captured

        def trips(self: EngineGraphs, work: Work) -> Any:
            made = captured(self, work)
            if len(self._recorded) == 2:
                if trouble != "interrupted":
                    raise RuntimeError(trouble)
                signal.raise_signal(signal.SIGINT)
            return made

        engine = replaying(model(context), max_running=7)
        if context.rank == 1 and trouble == "no room":
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (step_ranks.ROOM // 2, 80 << 30))
        elif context.rank == 1:
            patch.setattr(EngineGraphs, "_captured", trips)
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        graphs.logger.addHandler(handler)
        try:
            answer: int | str = engine.prepare()
        except KeyboardInterrupt:
            answer = "interrupted"
        finally:
            graphs.logger.removeHandler(handler)
        count = len(forms(engine))
        patch.setattr(EngineGraphs, "_captured", captured)
        return answer, count, said, crowd(engine)


TROUBLES = {  # of the second rank -> what each rank answers, steps recorded, and the log's words
    "CUDA out of memory": ((2, 2), 2, "rank 1 of 2: CUDA out of memory"),
    "no room": ((0, 0), 0, "rank 1 of 2: 1.0 GiB are free, and to record a step takes up to 2"),
    "interrupted": ((3, "interrupted"), 3, "rank 1 of 2: interrupted"),
}


def all_troubled() -> list[tuple[int | str, int, list[str], list[Any]]]:
    return [troubled(trouble) for trouble in TROUBLES]


def test_ranks_stop_together_name_the_one_that_cannot_go_on_and_serve_requests() -> None:
    alone = crowd(Engine(model(), max_running=7))
    for rank, results in enumerate(run_ranks(2, all_troubled)):
        for (answer, count, said, made), (answers, recorded, words) in zip(results, TROUBLES.values(), strict=True):
            assert (answer, count, said) == (answers[rank], recorded, [f"{recorded} {NOTED}{words}"])
            assert made == alone


@torch.no_grad()
def move(weights: Model) -> None:
    for parameter in weights.parameters():
        parameter.mul_(1.25)


def led(interrupted: bool) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """An engine that a server calls on the first rank alone, before and after a change of weights."""
    context, made = join(CPU, Layout(tp=2)), list[Any]()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        count_replays(patch)
        patch.setattr(graphs, "MOST_TOKENS", TOKENS)
        if context.rank == 1:
            engine = replaying(model(context), max_running=40)
            patch.setattr(engine, "close", lambda: None)  # which drops the graphs
            follow(engine)
            return [tuple(each) for each in forms(engine)], made
        whole = model()
        engine = replaying(model(context), LeadingEngine, weights=whole, max_running=40)
        if interrupted:
            captured = EngineGraphs._captured

            def trips(self: EngineGraphs, work: Work) -> Any:
                signal.raise_signal(signal.SIGINT)
                return captured(self, work)

            patch.setattr(EngineGraphs, "_captured", trips)
            with pytest.raises(KeyboardInterrupt):
                engine.prepare()
        else:
            engine.prepare()
            patch.setattr(EngineGraphs, "_captured", None)
            for version in range(2):
                made.append(crowd(engine))
                move(whole)
                engine.set_version(version + 1)
        ahead = [tuple(each) for each in forms(engine)]
        engine.close()
        return ahead, made


def both_led() -> list[tuple[list[tuple[Any, ...]], list[Any]]]:
    return [led(False), led(True)]


def test_a_server_prepares_all_ranks() -> None:
    whole, expected = model(), []
    for _ in range(2):
        expected.append(crowd(Engine(whole, max_running=40)))
        move(whole)
    (first, stopped), (second, also_stopped) = run_ranks(2, both_led)
    assert first[1] == expected
    assert len(first[0]) > 30
    assert sorted(second[0]) == sorted(first[0])  # those with prompts in order of their latest use
    assert stopped[0] == also_stopped[0] == [(1, 16, "none", True, 0, 0)]


def test_more_requests_and_longer_contexts_are_prepared_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    count_replays(monkeypatch)
    monkeypatch.setattr(graphs, "MOST_TOKENS", TOKENS)
    monkeypatch.setattr(graphs, "LEAST_TOKENS", 32)
    engine = replaying(tiny_qwen3(vocab_size=300), max_running=9)
    engine.prepare(requests=3, tokens=33)
    assert {(each.rows, each.pages) for each in forms(engine) if each.draws} == {
        (n, w) for n in (1, 2, 3) for w in (2, 4)
    }
    assert {each.pages for each in forms(engine) if each.tokens} == {2}
    for wrong in ({"requests": 0}, {"tokens": 0}):
        with pytest.raises(ConfigError, match="must be at least 1"):
            engine.prepare(**wrong)
