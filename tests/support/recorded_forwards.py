"""Steps as CUDA graphs record them, on PyTorch's meta device: no tensor has values, so whatever reads one on the host
raises, and so does what copies from the host. Of ranks one is simulated; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from rlloop.models import Model
from rlloop.models.config import parse_config
from rlloop.numerics import kernels
from rlloop.numerics.layout import VOCABULARY_BLOCK
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import AXES, Layout
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.kv_cache import PagedCache

META = torch.device("meta")
PAGE, SLOTS, ROWS = 16, 4096, 16  # tokens of a page and of the cache, rows of states


class Shapes:
    """The kernels that are no operators, by the shapes of their results. What a GPU's backend lacks is None."""

    READS_PACKED: frozenset[str] = frozenset()
    decoder_layer = adapted_products = adapted_rows = add_layer_norm = None

    def qkv_linear(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(len(x), len(weight)) for weight in weights)

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return x.new_empty(len(x), len(gate))

    def qkv_cache_write(self, q: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(q)

    def gated_experts(self, x: Tensor, up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
        return x.new_empty(*chosen.shape, down.shape[1])

    def head_linear(self, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        return x.new_empty(*x.shape[:2], weight.shape[1 if by_row else 2])

    def sample_part(self, logits: Tensor, seeds: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        measured = others[-1](logits.new_empty(len(logits), 2, 3, -(-logits.shape[1] // VOCABULARY_BLOCK)))
        return torch.empty_like(seeds), measured[:, 0, 0, 0]

    def scan_state(self, groups: int, heads: int, key_width: int, width: int) -> tuple[int, ...]:
        return heads, key_width, width

    def select(self, q: Tensor, *_: Any) -> Tensor:
        return torch.empty(len(q), _[-1], dtype=torch.int64, device=q.device)


class Simulated(Ranks):
    """One of several ranks, to whom the others are alike: results have the right shapes."""

    def gather(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        shape = list(x.shape)
        shape[dim] = shape[dim] * self.size if sizes is None else sum(sizes)
        return x.new_empty(shape)

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        assert sum(sends) == len(x)
        return x.new_empty(sum(receives), *x.shape[1:])

    def share_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x

    def post(self, x: Tensor, to: int) -> None:
        pass

    def gather_objects(self, item: Any) -> list[Any]:
        assert not isinstance(_get_current_dispatch_mode(), FromHost), "ranks exchange objects on the host"
        return [item] * self.size


def simulated(layout: Layout, rank: int = 0) -> ParallelContext:
    """The context of one rank."""
    at = layout.coordinates(rank)
    groups: dict[str, Ranks] = {axis: Simulated(getattr(layout, axis), at[axis]) for axis in AXES}
    groups["ep"] = groups["tp"] if layout.ep == 1 else Simulated(layout.ep, rank % layout.ep)
    groups["world"] = Simulated(layout.world_size, rank)
    return ParallelContext(META, layout, rank, 0, {name: each for name, each in groups.items() if each.size > 1})


class FromHost(TorchDispatchMode):
    """Refuses tensors of the host, but for single numbers and empty ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(each.device != META and each.ndim and each.numel() for each in tensors):
            raise AssertionError(f"{func} reads the host's memory")
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, ...]]]:
    """Records on the meta device what `EngineGraphs` records meanwhile: the outputs of each step."""
    made: list[tuple[Tensor, ...]] = []

    def captured(self: EngineGraphs, work: Callable[[], tuple[Tensor, ...]]) -> tuple[object, tuple[Tensor, ...]]:
        with FromHost():
            made.append(work())
        return object(), made[-1]

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(EngineGraphs, "_captured", captured)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 80 << 30))
        patch.setitem(kernels._by_device, META, Shapes())
        yield made


def model_of(config: Mapping[str, Any], layout: Layout, rank: int = 0) -> Model:
    with META:
        return Model(parse_config(config), context=simulated(layout, rank)).to(torch.bfloat16)


def graphs_of(model: Model) -> EngineGraphs:
    cache = PagedCache(model.cache_spec(), SLOTS, model.dtype, META, model.state_spec(), ROWS, spare=PAGE)
    return EngineGraphs(model, cache, PAGE, ChoiceStore.of(model, SLOTS + PAGE))
