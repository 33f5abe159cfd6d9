"""Targets of weight sync: live weights by name, and the mapping of a version's tensors onto them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import numpy as np

from rlloop.sync.bits import Bits, each
from rlloop.sync.manifest import Manifest, Refused
from rlloop.sync.steps import Patch

T = TypeVar("T")
TORN = -1  # the version of weights that are being written, or were left half-written
Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors type, shape)


class Target(Protocol):
    """Live weights by Hugging Face name, and the engine that serves from them."""

    def layout(self) -> Layout | None:
        """Every parameter, tied weights once. None: there is no model, and any tensors are accepted."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """Other names of tied weights -> their name in `layout`."""
        ...

    def read(self, name: str) -> Bits | None:
        """The live parameter's bits; None only if `layout` is None and it was never written."""
        ...

    def write(self, name: str, bits: Bits) -> None:
        """Write in place. Called only inside `exclusively`."""
        ...

    def prepare(self, patches: Mapping[str, Patch], threads: int) -> Callable[[], list[str]]:
        """A function that changes some elements in place, then reads them back; called only inside `exclusively`.

        It returns the parameters that do not hold what was written. Whatever needs no pause is done before it returns.
        """
        ...

    def exclusively(self, change: Callable[[], T]) -> T:
        """Run `change` with no request in flight and return its result. Its exceptions pass through."""
        ...

    def set_version(self, step: int) -> None:
        """The weights are now this version's: drop caches. Called only inside `exclusively`.

        `TORN`: they are no version's, and nothing may be sampled.
        """
        ...


def plan_writes(manifest: Manifest, target: Target) -> dict[str, list[str]]:
    """The live parameters that each tensor of a manifest is written to: tensor's name -> live names.

    A weight that is tied on one side only has two names on the other, and goes to both. Raises `Refused` for a tensor
    without a parameter, a parameter without a tensor, and for other dtypes or shapes.
    """
    layout, tied = target.layout(), target.aliases()
    if layout is None:
        return {entry.name: [entry.name] for entry in manifest.tensors}
    source: dict[str, str] = {}  # live name -> tensor of the manifest
    unknown = []
    for alias, name in (*((entry.name, entry.name) for entry in manifest.tensors), *manifest.aliases.items()):
        live = alias if alias in layout else tied.get(alias)
        if live is None:
            unknown.append(alias)
        elif source.setdefault(live, name) != name:
            raise Refused(f"{alias} and {source[live]} are two tensors of {manifest.version}, and one parameter here")
    missing = sorted(layout.keys() - source.keys())
    if unknown or missing:
        raise Refused(f"version {manifest.version} does not fit: unknown here {unknown[:5]}, missing {missing[:5]}")
    plan: dict[str, list[str]] = {entry.name: [] for entry in manifest.tensors}
    entries = {entry.name: entry for entry in manifest.tensors}
    for live, name in source.items():
        kind = (entries[name].dtype, entries[name].shape)
        if kind != layout[live]:
            raise Refused(f"{name} of version {manifest.version} is {kind}; the parameter {live} is {layout[live]}")
        plan[name].append(live)
    return plan


def patch_arrays(flat: Mapping[str, np.ndarray], patches: Mapping[str, Patch], threads: int) -> list[str]:
    """Change flat arrays in place. Returns the names of those that do not hold what was written."""
    from rlloop.sync import steps_fast

    held = each(lambda name: steps_fast.put(flat[name], *patches[name]), patches, threads)
    return [name for name, right in zip(patches, held, strict=True) if not right]


class MemoryTarget:
    """A target of tensors in memory. Those given at the start fix the layout; without any, every layout is accepted."""

    def __init__(self, tensors: Mapping[str, Bits] | None = None, aliases: Mapping[str, str] | None = None) -> None:
        self.state: dict[str, Bits] = dict(tensors or {})
        self.version = -1
        self._layout = {name: (bits.dtype, bits.shape) for name, bits in self.state.items()} or None
        self._aliases = dict(aliases or {})
        self._own = set[str]()  # tensors in memory that no caller has

    def layout(self) -> Layout | None:
        return self._layout

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, name: str) -> Bits | None:
        return self.state.get(name)

    def write(self, name: str, bits: Bits) -> None:
        self.state[name] = bits
        self._own.add(name)

    def prepare(self, patches: Mapping[str, Patch], threads: int) -> Callable[[], list[str]]:
        for name in patches.keys() - self._own:
            self.state[name] = self.state[name].copy()
        self._own |= patches.keys()
        flat = {name: self.state[name].array.reshape(-1) for name in patches}
        return lambda: patch_arrays(flat, patches, threads)

    def exclusively(self, change: Callable[[], T]) -> T:
        return change()

    def set_version(self, step: int) -> None:
        self.version = step
