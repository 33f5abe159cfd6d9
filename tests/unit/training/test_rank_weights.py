"""A rank's weights are those of its model, which is not made."""

import json

import pytest
import torch

from rlloop.models import Model
from rlloop.models.adapter_weights import ALL, choose_targets
from rlloop.models.config import parse_config
from rlloop.models.experts import Experts
from rlloop.models.parameters import ParameterStore
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout
from rlloop.training import rank_weights
from rlloop.training.memory import layouts, predict
from rlloop.training.rank_weights import RankWeights
from rlloop.training.shapes import CATALOGUE

LAYOUTS = [(Layout(), 0), (Layout(dp_shard=2, cp=2, tp=1, pp=4), 11), (Layout(dp_shard=2, tp=4, pp=2), 13)]
WITH_EXPERTS = [
    (Layout(dp_shard=8, tp=2, ep=8), 13),
    (Layout(dp_shard=4, cp=2, pp=2, ep=4), 5),
    (Layout(tp=4, ep=2), 3),
]


def config_of(name):
    return parse_config(json.loads((CATALOGUE / f"{name}.json").read_text())["model"])


def model_of(config, layout, rank):
    at = layout.coordinates(rank)
    groups = {axis: Ranks(getattr(layout, axis), at[axis]) for axis in ("pp", "cp", "tp")}
    groups["ep"] = groups["tp"] if layout.ep == 1 else Ranks(layout.ep, rank % layout.ep)
    meta = torch.device("meta")
    with meta:
        return Model(config, None, ParallelContext(meta, layout, rank, 0, groups))


def cuts(entries):
    return {
        name: (entry.live.shape, entry.shape, entry.dim, entry.division and entry.division.own)
        for name, entry in entries
    }


@pytest.mark.parametrize(
    "name", ["qwen3-0.6b", "deepseek-v3.2", "gpt-oss-120b", "nemotron-3-nano", "qwen3-vl-8b", "qwen3.5-35b-a3b-vl"]
)
def test_a_rank_has_the_weights_of_its_model(name):
    config = config_of(name)
    for layout, rank in LAYOUTS + (WITH_EXPERTS if config.mixture is not None else []):
        model, weights = model_of(config, layout, rank), RankWeights(config, layout, rank)
        stored = ParameterStore(model).entries
        assert cuts(weights.entries()) == cuts(stored.items())
        assert weights.cache_spec() == model.cache_spec()
        assert weights.sees == (model.visual is not None)
        adapted = choose_targets(model.own_targets(), [ALL]).values()
        assert [each.shapes(8) for each in weights.targets()] == [
            each.shapes(8) for each in adapted if each.name[0] == "m"
        ]
        numbers = {False: 0, True: 0}
        for name, entry in stored.items():
            numbers[isinstance(model.get_submodule(name.rpartition(".")[0]), Experts)] += entry.live.numel()
        counted = {
            flag: sum(
                count * entry.live.numel() for count, _, entry, is_experts in weights.distinct(()) if is_experts == flag
            )
            for flag in numbers
        }
        assert counted == numbers
        each = list(weights.distinct({"a packed weight"}))
        assert [count for count, *_ in each] == [1] * len(stored)
        assert {name for _, name, *_ in each} == stored.keys()


def test_hundreds_of_layouts_are_predicted_from_a_few_layers():
    config = config_of("qwen3-30b-a3b")
    rank_weights._alone.cache_clear()
    every = [predict(config, each, torch.bfloat16, 4096) for each in layouts(config, 64, splits_sequences=True)]
    assert len(every) > 150
    assert rank_weights._alone.cache_info().misses < 250  # of 48 layers on each of many ranks
