"""Released models: each config.json is read or refused by name, and tensors are transformers' by name and shape."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from rlloop.models.checkpoint_names import stored_shapes
from rlloop.models.config import parse_config
from rlloop.models.families import LACKING
from rlloop.models.weight_reader import shapes_of
from tests.support.catalogue import RELEASED, cut, refusal, shapes_here, shapes_there, table

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
    names = sorted(stored_shapes(shapes_of(config), config.architecture))
    assert len(names) == index["names"]
    assert sha256("\n".join(names).encode()).hexdigest() == index["sha256"]


def test_a_key_that_nobody_knows_is_refused_in_each() -> None:
    for name in READ:
        raw = {**RELEASED[name]["config"], "an_unknown_key": 1}
        assert "an_unknown_key" in str(refusal(raw)), name
        if "text_config" in raw:
            within = {**raw["text_config"], "an_unknown_key": 1}
            assert "an_unknown_key" in str(refusal({**RELEASED[name]["config"], "text_config": within})), name


def test_the_table_of_the_docs_is_the_catalogues() -> None:
    assert table() in (Path(__file__).parents[3] / "docs" / "models.md").read_text()
