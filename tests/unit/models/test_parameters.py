"""The parameter store: names, tied names, what trains, views and copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop.models import load_model
from rlloop.models.parameters import ParameterStore
from tests.support.checkpoints import make_checkpoint


def test_a_tied_head_is_an_alias_and_stands_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    model = load_model(tmp_path)
    store = ParameterStore(model)
    assert store.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in store.entries
    stored = store.as_stored()
    assert stored[store.aliases["lm_head.weight"]].data_ptr() == model.head.data_ptr()
    assert stored["lm_head.weight"].data_ptr() == model.head.data_ptr()


def test_experts_are_stored_one_by_one_in_the_memory_of_all(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    model = load_model(tmp_path)
    store = ParameterStore(model)
    assert store.aliases == {}
    assert store.shapes() == {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    store.as_stored()["model.layers.1.mlp.experts.2.down_proj.weight"].fill_(7.0)
    assert (store.entries["model.layers.1.mlp.experts.down_proj"].live[2] == 7.0).all()


def test_what_trains_is_what_requires_a_gradient(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    model = load_model(tmp_path)
    model.head.requires_grad_(False)
    frozen = {name for name, entry in ParameterStore(model).entries.items() if not entry.trains}
    biases = {name for name, _ in model.named_parameters() if name.endswith("e_score_correction_bias")}
    assert biases
    assert frozen == {"lm_head.weight", *biases}  # no gradient moves the routers' biases


def test_a_snapshot_is_a_copy_that_can_be_written_back(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path)
    store = ParameterStore(model)
    before, places = store.snapshot(), [weight.data_ptr() for weight in model.parameters()]
    for tensor in store.tensors().values():
        tensor.add_(1)
    assert not any(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    store.copy_from(before)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert places == [weight.data_ptr() for weight in model.parameters()]
    with pytest.raises(KeyError):
        store.copy_from({})
