"""Requests with several adapters, over several GPUs: the bits of one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlloop.models import new_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG, TEN_EXPERTS, need_gpus
from tests.support.rank_adapters import by_request
from tests.support.ranks import run_ranks

SHAPES: dict[str, dict[str, Any]] = {"dense": {}, "experts": TEN_EXPERTS}
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"tp": 2}, {"pp": 2}, {"tp": 2, "ep": 2}],
    4: [{"tp": 4}, {"tp": 4, "ep": 4}, {"pp": 2, "tp": 2}],
}


def sampled(kind: str, layouts: list[dict[str, int]]) -> list[dict[str, bytes]]:
    """In each layout, of each shape that has its parts."""
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else 0)
    found = []
    for layout in layouts:
        shapes = {"experts": TEN_EXPERTS} if "ep" in layout else SHAPES
        context = join(device, Layout(**layout))
        models = {
            name: new_model({**CONFIG, **shape}, seed=0, dtype="bfloat16", context=context)
            for name, shape in shapes.items()
        }
        made = {name: by_request(model.requires_grad_(False)) for name, model in models.items()}
        found.append({f"{shape} {part}": value for shape, parts in made.items() for part, value in parts.items()})
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", LAYOUTS)
def test_requests_with_several_adapters_get_the_bits_of_one_gpu(size: int) -> None:
    need_gpus(size)
    (wanted,) = sampled("cuda", [{}])
    for found in run_ranks(size, sampled, "cuda", LAYOUTS[size], kind="cuda"):
        for layout, parts in zip(LAYOUTS[size], found, strict=True):
            assert [name for name, value in parts.items() if value != wanted[name]] == [], layout
