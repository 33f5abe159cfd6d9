"""A model that trains and that a GPU has no room for is refused before it is loaded."""

import json
from types import SimpleNamespace

import pytest
import torch

from rlloop.errors import ConfigError, ModelError
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.make import load
from rlloop.launch.room import check_room
from rlloop.models.config import read_config
from rlloop.parallel.context import ParallelContext
from rlloop.training.memory import GIB

GPU = torch.device("cuda")
TWO, CRITIC = ("trainer.layout.dp_shard=2",), ("algorithm.critic.lr=1e-5", "algorithm.advantage=raw")


@pytest.fixture
def folder(tmp_path):
    """A model of Qwen3-8B's shape without weights."""
    (tmp_path / "config.json").write_text(json.dumps(dict(build(compose_recipe("random", [])).task["config"])))
    return tmp_path


def refused(folder, monkeypatch, memory, *overrides):
    """The refusal on a GPU of so many GiB; empty where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory * GIB))
    config = build(compose_recipe("random", [*overrides, "launch=ray"]))
    try:
        check_room(config, read_config(folder), folder, GPU)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("memory", "overrides", "said"),
    [
        (80, (), "(one rank) keeps 106.8 GiB of weights, masters and moments on a GPU, which has 80.0; set trainer."),
        (80, ("trainer.offload=moments",), ""),
        (40, ("trainer.offload=moments",), "which has 40.0; set trainer.offload=masters, or use more GPUs. What fits"),
        (12, ("trainer.offload=masters",), "keeps 15.3 GiB of weights, masters and moments on a GPU, which has 12.0; "),
        (12, ("model.lora.rank=8",), "keeps 15.3 GiB of weights"),
        (16, ("model.lora.rank=8",), ""),
        (108, (), ""),
        (80, TWO, ""),
        (60, TWO, "; set trainer.layout.pp=2 trainer.layout.dp_shard=1 rollout.layout.pp=2, or set trainer.offload="),
        (60, (*TWO, *CRITIC), "; set trainer.layout.tp=2 trainer.layout.dp_shard=1 rollout.layout.tp=2, or"),
        (60, (*TWO, "trainer.shard=parameters"), ""),
        (60, ("trainer.layout.dp_replicate=2",), "(dp_replicate=2) keeps 106.8 GiB"),
        (20, ("model.quantize=fp8",), ""),
    ],
)  # fmt: skip
def test_weights_masters_and_moments_must_fit(folder, monkeypatch, memory, overrides, said):
    found = refused(folder, monkeypatch, memory, *overrides)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    "given",
    [
        ("trainer.layout.dp_replicate=2", "rollout.layout.tp=2"),
        ("trainer.layout.cp=4", "rollout.layout.tp=2"),
        ("rollout.layout.dp_replicate=4",),
    ],
)
def test_what_is_advised_fits_on_as_many_ranks(folder, monkeypatch, given):
    said = refused(folder, monkeypatch, 80, *given)
    advice = said.partition("; set ")[2].partition(", or")[0].split()
    assert refused(folder, monkeypatch, 80, *given, *advice) == ""
    size, now = (build(compose_recipe("random", [*given, *more])).world.size for more in ([], advice))
    assert now == size


def test_it_is_refused_before_it_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    config = build(compose_recipe("random", []))
    with pytest.raises(ConfigError, match=r"rlloop doctor --model .* --gpus 1"):
        load(config, folder, ParallelContext(GPU), trains=True)
    with pytest.raises(ModelError):  # which only samples: its weights are looked for
        load(config, folder, ParallelContext(GPU))
