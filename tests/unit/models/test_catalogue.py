"""Released models: each config.json is read or refused by name, and tensors are transformers' by name and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rlloop.models.architecture import ModelConfig
from rlloop.models.checkpoint_names import stored_shapes
from rlloop.models.config import parse_config
from rlloop.models.families import LACKING
from rlloop.models.packed_config import Scheme, read_scheme
from rlloop.models.weight_reader import shapes_of
from tests.support.catalogue import (
    FREE,
    RELEASED,
    cut,
    objects_of,
    refusal,
    shapes_here,
    shapes_there,
    table,
    with_key,
)

REFUSED = {"DeepSeek-V4-Flash": "deepseek_v4"}
READ = [name for name in RELEASED if name not in REFUSED]


def test_what_is_not_read_is_refused_with_the_parts_that_it_lacks() -> None:
    assert {name for name, each in RELEASED.items() if refusal(each["config"]) is not None} == set(REFUSED)
    for name, kind in REFUSED.items():
        config = RELEASED[name]["config"]
        assert f"model_type '{kind}' is not supported; rlloop lacks its {', '.join(LACKING[kind])}" == str(
            refusal(config)
        ).removeprefix("config.json: ")
        for part in LACKING[kind]:
            assert part.rsplit("(", 1)[1].removesuffix(")") in config, part


def test_the_text_model_of_kimi_k25_is_a_kimi_k2() -> None:
    config = parse_config(RELEASED["Kimi-K2.5"]["config"])
    assert config.quantization is not None
    older = parse_config(RELEASED["Kimi-K2-Instruct"]["config"])
    assert config.latent is not None
    assert older.latent is not None
    assert replace(config.latent, scale=older.latent.scale) == older.latent  # their ropes are stretched differently
    assert (config.mixture, config.hidden_size) == (older.mixture, older.hidden_size)


@pytest.mark.parametrize("name", READ)
def test_tensors_are_transformers(name: str) -> None:
    raw = cut(RELEASED[name]["config"])
    assert shapes_here(parse_config(raw)) == shapes_there(raw)


@pytest.mark.parametrize("name", [name for name in RELEASED if "index" in RELEASED[name]])
def test_names_are_those_of_a_released_index(name: str) -> None:
    config, index = parse_config(RELEASED[name]["config"]), RELEASED[name]["index"]
    shapes = stored_shapes(shapes_of(config), config.architecture)
    names = sorted(shapes)
    assert len(names) == index["names"]
    assert index.get("bytes") in (None, sum(2 * prod(shape) for shape in shapes.values()))
    assert sha256("\n".join(names).encode()).hexdigest() == index["sha256"]


def test_names_are_those_of_a_pruned_index() -> None:
    """Of bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding, 2714ffd: 35B-A3B's text model with 180 experts a layer, each stored
    by itself, where the release has them stacked."""
    raw = RELEASED["Qwen3.5-35B-A3B"]["config"]
    config = parse_config({**raw, "text_config": {**raw["text_config"], "num_experts": 180}})
    shapes = stored_shapes(shapes_of(config), config.architecture, "split")
    text = {name: shape for name, shape in shapes.items() if not name.startswith("model.visual.")}
    assert sum(2 * prod(shape) for shape in text.values()) == 50_182_743_296
    digest = "e92500ffc7b583ee1223b88b387f095e2cfc8905f7e022751bf50dbad40d7534"
    assert sha256("\n".join(sorted(text)).encode()).hexdigest() == digest


def test_a_key_that_nobody_knows_is_refused_in_every_object_of_each() -> None:
    """Objects of others' names change nothing, whatever they hold."""
    places = [(name, place) for name in READ for place in objects_of(RELEASED[name]["config"])]
    assert {place[-1] for _, place in places if place} > {
        "text_config", "vision_config", "rope_scaling", "rope_parameters", "quantization_config", "config_groups",
        "group_0", "weights", *FREE,
    }  # fmt: skip
    for name, place in places:
        raw = RELEASED[name]["config"]
        changed = with_key(raw, place, "an_unknown_key")
        if place and place[-1] in FREE:
            assert read(changed) == read(raw), (name, place)
        else:
            assert "an_unknown_key" in str(refusal(changed)), (name, place)


def read(raw: Mapping[str, Any]) -> tuple[ModelConfig, Scheme | None]:
    config = parse_config(raw)
    return config, None if config.quantization is None else read_scheme(config.quantization)


def test_the_table_of_the_docs_is_the_catalogues() -> None:
    assert table() in (Path(__file__).parents[3] / "docs" / "models.md").read_text()
