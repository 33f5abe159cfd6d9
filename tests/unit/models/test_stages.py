"""Stages of a pipeline as NCCL needs them: ranks on GPUs of their own, and connections that both ends ask for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from rlloop.models.config import parse_config
from rlloop.models.stages import Stage
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG


class Wires:
    """Copies between ranks of a group. The first of a pair waits until both ask for it, as with NCCL."""

    def __init__(self) -> None:
        self._met: dict[frozenset[int], Barrier] = {}
        self._sent: dict[tuple[int, int], Queue[Tensor]] = {}
        for one in range(3):
            for other in range(3):
                self._met.setdefault(frozenset((one, other)), Barrier(2, timeout=120))
                self._sent[one, other] = Queue()
        self._connected: set[tuple[int, frozenset[int]]] = set()

    def _connect(self, rank: int, other: int) -> None:
        pair = frozenset((rank, other))
        if (rank, pair) not in self._connected:
            self._connected.add((rank, pair))
            self._met[pair].wait()

    def post(self, rank: int, x: Tensor, to: int) -> None:
        self._connect(rank, to)
        self._sent[rank, to].put(x)

    def receive(self, rank: int, source: int) -> Tensor:
        self._connect(rank, source)
        return self._sent[source, rank].get(timeout=120)


class Pipe:
    """A rank's end of the wires."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self.size, self.rank, self._wires = 3, rank, wires
        self.told: list[Any] = []

    def post(self, x: Tensor, to: int) -> None:
        self._wires.post(self.rank, x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._wires.receive(self.rank, source))

    def gather_objects(self, item: Any) -> list[Any]:
        return [item if rank == self.rank else [] for rank in range(self.size)]

    def broadcast_object(self, item: Any, source: int) -> Any:
        self.told.append(item)
        return item

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x


def stage(rank: int, pipe: Pipe, back: Pipe) -> Stage:
    groups: Any = {"pp": pipe, "pp_back": back}
    context = ParallelContext(torch.device("cpu"), Layout(pp=3), rank, groups=groups)
    return Stage(parse_config({**CONFIG, "num_hidden_layers": 3}), context)


def test_ends_of_a_pipeline_swap_tensors_although_a_first_copy_waits_for_its_other_end() -> None:
    forth, back = Wires(), Wires()
    first, last = (stage(rank, Pipe(rank, forth), Pipe(rank, back)) for rank in (0, 2))
    calls: list[Callable[[], tuple[Tensor | None, Tensor | None]]] = [
        lambda: first.swapped(torch.ones(3), None),
        lambda: last.swapped(None, torch.zeros(3)),
    ]
    with ThreadPoolExecutor(2) as pool:
        found = [each.result(240) for each in [pool.submit(call) for call in calls]]
    for of_first, of_last in found:
        assert of_first is not None
        assert of_last is not None
        assert of_first.tolist() == [1.0] * 3
        assert of_last.tolist() == [0.0] * 3


def test_a_stages_tensors_are_told_without_the_number_of_its_gpu() -> None:
    pipe = Pipe(1, Wires())
    named = dict(stage(1, pipe, Pipe(1, Wires())).all(["norm"], lambda name: torch.ones(4)))
    assert named["norm"].tolist() == [1.0] * 4
    assert pipe.told == [((4,), torch.float32, "cpu")]
