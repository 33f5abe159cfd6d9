"""An engine whose steps are replays, prompts among them, makes the bits of one that computes each step as it comes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from rlloop.models import load_model
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout.engine import engine as engine_module
from rlloop.rollout.engine import graph_sizes, graphs
from rlloop.rollout.engine.engine import Engine
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.scheduler import ScheduledStep
from rlloop.types import SamplingParams
from tests.support.adapters import random_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.replayed_graphs import Replays, Work, count_replays, replaying
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import VOCABULARY, bits, traffic


@pytest.fixture(params=[graph_sizes.LONG, 0], ids=["together", "apart"])
def replays(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Replays:
    """How many steps of each kind were replayed."""
    return count_replays(monkeypatch, request.param)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running": 5},
        {"max_batch_tokens": 40, "page_size": 64},
        {"max_running": 7, "max_cache_tokens": 432, "page_size": 1},
        {"max_running": 4, "prefix_caching": False},
    ],
    ids=str,
)
def test_prompts_beside_decoding_are_replayed(replays: Replays, settings: dict[str, int]) -> None:
    model = tiny_qwen3(vocab_size=VOCABULARY)
    made = replaying(model, **settings).generate(*traffic(48))
    assert [bits(each) for each in made] == [bits(each) for each in Engine(model).generate(*traffic(48))]
    assert replays["prompts"] >= 5
    assert replays["decodes"] >= 20


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_5_moe", "nemotron_h", "gpt_oss"])
def test_families_are_replayed(tmp_path: Path, replays: Replays, family: str) -> None:
    make_checkpoint(tmp_path, family)
    model = load_model(tmp_path)
    prompts = [[5 + at, 7, 9, 11 + at % 3] * (1 + at % 5) for at in range(12)]
    sampling = [SamplingParams(max_tokens=4 + at, seed=at, ignore_eos=True) for at in range(12)]
    made = replaying(model, max_running=4).generate(prompts, sampling)
    plain = Engine(model, max_running=4).generate(prompts, sampling)
    assert [bits(each) for each in made] == [bits(each) for each in plain]
    for one, other in zip(made, plain, strict=True):
        if one.routed_experts is not None and other.routed_experts is not None:
            assert one.routed_experts.tobytes() == other.routed_experts.tobytes()
    assert replays["prompts"] >= 5


@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h"])
def test_states_are_saved_and_read_by_steps_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: Replays, family: str
) -> None:
    monkeypatch.setattr(engine_module, "SAVED_STATES", 3)  # of four prefixes
    make_checkpoint(tmp_path, family)
    model = load_model(tmp_path)
    prompts = [[5 + at % 4, *range(7, 16), 16 + at % 3][: 11 - at % 2] for at in range(24)]
    sampling = [SamplingParams(max_tokens=2 + at % 5, seed=at, ignore_eos=True) for at in range(24)]
    plain = [bits(each) for each in Engine(model, prefix_caching=False).generate(prompts, sampling)]
    engine, ahead = replaying(model, max_running=4, max_batch_tokens=16, page_size=4), Counter[str]()
    schedule_ahead = engine._scheduler.schedule_ahead

    def counted(before: ScheduledStep) -> ScheduledStep | None:
        if (step := schedule_ahead(before)) is not None and step.source is not None:
            ahead.update(prompts=bool((step.source < 0).any()), restores=len(step.restores), saves=len(step.saves))
        return step

    monkeypatch.setattr(engine._scheduler, "schedule_ahead", counted)
    for _ in range(2):
        assert [bits(each) for each in engine.generate(prompts, sampling)] == plain
    assert min(ahead["prompts"], ahead["restores"], ahead["saves"]) > 0
    assert replays["prompts"] >= 5


@pytest.mark.parametrize("replays", [graph_sizes.LONG], indirect=True)
def test_steps_are_recorded_before_they_come(monkeypatch: pytest.MonkeyPatch, replays: Replays) -> None:
    monkeypatch.setattr(graphs, "MOST_TOKENS", 96)
    model = tiny_qwen3(vocab_size=VOCABULARY)
    engine = replaying(model, max_running=7, max_batch_tokens=64, prefix_caching=False)
    assert engine.prepare() > 20
    monkeypatch.setattr(EngineGraphs, "_captured", None)  # nothing more can be recorded
    requests = traffic(24)
    made = engine.generate(*requests)
    assert [bits(each) for each in made] == [bits(each) for each in Engine(model).generate(*requests)]
    assert replays["prompts"] >= 5


@pytest.mark.parametrize("replays", [graph_sizes.LONG], indirect=True)
@pytest.mark.parametrize(
    ("longest", "work", "prepared", "recorded"),
    [(0, 3e11, False, False), (150, 3e11, False, True), (150, 1.0, False, False), (150, 3e11, True, False)],
)
def test_long_steps_of_small_models_are_recorded_but_not_by_servers(
    monkeypatch: pytest.MonkeyPatch, replays: Replays, longest: int, work: float, prepared: bool, recorded: bool
) -> None:
    monkeypatch.setattr(graphs, "MOST_TOKENS", 96)
    monkeypatch.setattr(graphs, "LAUNCHED", work)
    model = tiny_qwen3(vocab_size=VOCABULARY)
    engine = replaying(model, longest=longest, max_running=4, max_batch_tokens=150, prefix_caching=False)
    if prepared:
        engine.prepare(1, 16)
    prompts = [[5 + (at + i) % 50 for i in range(180)] for at in range(4)]
    sampling = [SamplingParams(max_tokens=6, seed=at, ignore_eos=True) for at in range(4)]
    plain = [bits(each) for each in Engine(model).generate(prompts, sampling)]
    for _ in range(2):
        assert [bits(each) for each in engine.generate(prompts, sampling)] == plain
    assert any(form.tokens > 96 for form in engine._graphs._recorded) is recorded  # type: ignore[union-attr]


def test_what_cannot_be_recorded_stops_no_server(monkeypatch: pytest.MonkeyPatch, replays: Replays) -> None:
    model = tiny_qwen3(vocab_size=VOCABULARY)
    engine, captured, left = replaying(model, max_running=7), EngineGraphs._captured, iter(range(3))

    def tight(self: EngineGraphs, work: Work) -> object:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return captured(self, work)

    monkeypatch.setattr(EngineGraphs, "_captured", tight)
    assert engine.prepare() == 3
    monkeypatch.setattr(EngineGraphs, "_captured", captured)
    made = engine.generate(*traffic(12))
    assert [bits(each) for each in made] == [bits(each) for each in Engine(model).generate(*traffic(12))]


def test_adapters_by_request_are_replayed(replays: Replays) -> None:
    model = tiny_qwen3(vocab_size=VOCABULARY)
    prompts, sampling = traffic(24)
    names = [None, "one", "two"] * 8

    def made(engine: Engine) -> list[object]:
        for seed, name in enumerate(("one", "two")):
            engine.add_adapter(name, random_adapter(model, seed=seed))
        ids = [
            engine.add_request(prompt, how, adapter=name)
            for prompt, how, name in zip(prompts, sampling, names, strict=True)
        ]
        done = dict(each for _ in iter(lambda: engine.has_work, False) for each in engine.step())
        for name in ("one", "two"):
            engine.drop_adapter(name)
        return [bits(done[id]) for id in ids]

    plain = made(Engine(model, max_running=6))
    assert made(replaying(model, max_running=6)) == plain
    assert replays["prompts"] >= 5


def test_a_form_is_recorded_when_it_has_come_often(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SEEN", 3)
    engine = replaying(tiny_qwen3(vocab_size=VOCABULARY), prefix_caching=False)
    for expected in (0, 0, 1, 2):
        engine.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=1, seed=0))
        assert replays["prompts"] == expected


def test_graphs_of_prompts_are_few(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    model = tiny_qwen3(vocab_size=VOCABULARY)
    engine = replaying(model, max_running=5)
    made = engine.generate(*traffic(48))
    assert [bits(each) for each in made] == [bits(each) for each in Engine(model).generate(*traffic(48))]
    assert engine._graphs is not None
    assert sum(form.tokens > 0 for form in engine._graphs._recorded) == 2
    assert replays["prompts"] >= 5


def test_a_model_that_cannot_be_recorded_is_launched_one_by_one(
    monkeypatch: pytest.MonkeyPatch, replays: Replays, caplog: pytest.LogCaptureFixture
) -> None:
    replaced = EngineGraphs._captured

    def captured(self: EngineGraphs, work: Work) -> object:
        made = replaced(self, work)
        if made[1][0].shape[-1] == self._model.config.hidden_size:
            raise RuntimeError("operation not permitted when stream is capturing")
        return made

    monkeypatch.setattr(EngineGraphs, "_captured", captured)
    model = tiny_qwen3(vocab_size=VOCABULARY)
    made = replaying(model, max_running=5).generate(*traffic(48))
    assert [bits(each) for each in made] == [bits(each) for each in Engine(model).generate(*traffic(48))]
    assert replays["prompts"] == 0
    assert replays["decodes"] >= 20
    assert [each.message for each in caplog.records if "not permitted" in each.message] == [
        "steps with prompts are launched one by one, since recording failed: "
        "operation not permitted when stream is capturing"
    ]


def test_other_implementations_are_not_recorded(replays: Replays) -> None:
    model = tiny_qwen3(vocab_size=VOCABULARY).with_profile(NumericsProfile(attention="stock"))
    replaying(model).generate(*traffic(12))
    assert replays["prompts"] == 0
