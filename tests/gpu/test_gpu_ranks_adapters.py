"""Requests with several adapters, over several GPUs: the bits of one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlloop.models import new_model
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG, TEN_EXPERTS, need_gpus
from tests.support.rank_adapters import by_request
from tests.support.ranks import in_shares, run_ranks

SHAPES: dict[str, dict[str, Any]] = {"dense": {}, "experts": TEN_EXPERTS}
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"tp": 2}, {"pp": 2}, {"tp": 2, "ep": 2}],
    4: [{"tp": 4}, {"tp": 4, "ep": 4}, {"pp": 2, "tp": 2}],
    8: [{"tp": 8}, {"tp": 8, "ep": 8}, {"pp": 2, "tp": 4}],
}


def sampled(shape: str, layout: dict[str, int] | None = None) -> dict[str, bytes]:
    """In a layout, or on this GPU alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    context = ParallelContext(device) if layout is None else join(device, Layout(**layout))
    return by_request(
        new_model({**CONFIG, **SHAPES[shape]}, seed=0, dtype="bfloat16", context=context).requires_grad_(False)
    )


def compared(layouts: list[dict[str, int]]) -> list[str]:
    """What differs from one GPU in each layout, of each shape that has its parts."""
    alone = in_shares({shape: partial(sampled, shape) for shape in SHAPES})
    found = [
        (layout, shape, sampled(shape, layout))
        for layout in layouts
        for shape in (["experts"] if "ep" in layout else SHAPES)
    ]
    return [
        f"{layout} {shape} {part}" for layout, shape, made in found for part in made if made[part] != alone[shape][part]
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", LAYOUTS)
def test_requests_with_several_adapters_get_the_bits_of_one_gpu(size: int) -> None:
    need_gpus(size)
    for rank, different in enumerate(run_ranks(size, compared, LAYOUTS[size], kind="cuda")):
        assert not different, f"rank {rank}"
