"""Bytes that a computation holds: what autograd saves, and tensors that exist at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlloop.models.layers import Step


class Saved:
    """What autograd saves meanwhile, each storage once, but for some tensors' own."""

    def __init__(self, others: Any) -> None:
        self._others = {each.untyped_storage().data_ptr() for each in tree_leaves(others) if isinstance(each, Tensor)}
        self._kept: dict[int, Tensor] = {}  # so that no address comes twice
        self.hooks = saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        if (at := x.untyped_storage().data_ptr()) not in self._others:
            self._kept[at] = x
        return x

    @property
    def bytes(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in self._kept.values())


@contextmanager
def saved(others: Any) -> Iterator[Saved]:
    found = Saved(others)
    with found.hooks:
        yield found


def saved_by(model: Any, kinds: type | tuple[type, ...], run: Callable[[], object]) -> list[int]:
    """Bytes that each module of `kinds` saves in a forward, but for its input, its step's tables and the weights."""
    found: list[Saved] = []

    def before(module: Any, args: tuple[Any, ...]) -> None:
        steps = [(each.positions, each.rope) for each in args if isinstance(each, Step)]
        found.append(Saved([*model.parameters(), args[0], steps]))
        found[-1].hooks.__enter__()

    handles = []
    for module in model.modules():
        if isinstance(module, kinds):
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(lambda *_: found[-1].hooks.__exit__()))
    run()
    for each in handles:
        each.remove()
    return [each.bytes for each in found]


class Peak(TorchDispatchMode):
    """The most bytes of tensors made under it that exist at a time; not what a kernel has inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._known: dict[int, int] = {}  # of storages that exist

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._known[storage._cdata] = storage.nbytes()
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.bytes = max(self.bytes, self._now)
        return made

    def _freed(self, at: int) -> None:
        self._now -= self._known.pop(at)
