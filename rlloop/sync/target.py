"""Where a replica's versions go: live weights by name, and which of them each tensor of a version reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from rlloop.sync.bits import Bits
from rlloop.sync.manifest import Manifest, Refused

T = TypeVar("T")
TORN = -1  # the version of weights that are none
Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors type, shape)


class Target(Protocol):
    """Live weights by Hugging Face name, and the engine that serves from them."""

    def layout(self) -> Layout | None:
        """Every parameter, a tied weight once. None: no model stands behind it, so any tensors will do."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """Other names of tied weights -> their name in `layout`."""
        ...

    def read(self, name: str) -> Bits | None:
        """What the live parameter holds now; None only where `layout` is None and it was never written."""
        ...

    def write(self, name: str, bits: Bits) -> None:
        """In place. Called only inside `exclusively`."""
        ...

    def exclusively(self, change: Callable[[], T]) -> T:
        """Run `change` with nothing in flight, and its result. Where it raises, raise the same."""
        ...

    def set_version(self, step: int) -> None:
        """The weights are now those of this version: drop caches. Called only inside `exclusively`.

        `TORN`: they are those of none, and nothing may be sampled.
        """
        ...


def plan_writes(manifest: Manifest, target: Target) -> dict[str, list[str]]:
    """Which live parameters each tensor of a manifest goes to: all of them are reached, and nothing is left over.

    A weight that is tied on one side only has two names on the other, and goes to both.
    Raises `Refused` for a name that reaches no parameter, a parameter that no name reaches, and other types or shapes.
    """
    layout, tied = target.layout(), target.aliases()
    if layout is None:
        return {entry.name: [entry.name] for entry in manifest.tensors}
    source: dict[str, str] = {}  # live name -> tensor of the manifest
    unknown = []
    for given, name in (*((entry.name, entry.name) for entry in manifest.tensors), *manifest.aliases.items()):
        live = given if given in layout else tied.get(given)
        if live is None:
            unknown.append(given)
        elif source.setdefault(live, name) != name:
            raise Refused(f"{given} and {source[live]} are two tensors of {manifest.version}, and one parameter here")
    missing = sorted(layout.keys() - source.keys())
    if unknown or missing:
        raise Refused(f"version {manifest.version} does not fit: unknown here {unknown[:5]}, missing {missing[:5]}")
    plan: dict[str, list[str]] = {entry.name: [] for entry in manifest.tensors}
    entries = {entry.name: entry for entry in manifest.tensors}
    for live, name in source.items():
        given = (entries[name].dtype, entries[name].shape)
        if given != layout[live]:
            raise Refused(f"{name} of version {manifest.version} is {given}; the parameter {live} is {layout[live]}")
        plan[name].append(live)
    return plan


class MemoryTarget:
    """Tensors in memory, with or without a layout that they must have."""

    def __init__(self, tensors: Mapping[str, Bits] | None = None, aliases: Mapping[str, str] | None = None) -> None:
        self.state: dict[str, Bits] = dict(tensors or {})
        self.version = -1
        self._layout = {name: (bits.dtype, bits.shape) for name, bits in self.state.items()} or None
        self._aliases = dict(aliases or {})

    def layout(self) -> Layout | None:
        return self._layout

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, name: str) -> Bits | None:
        return self.state.get(name)

    def write(self, name: str, bits: Bits) -> None:
        self.state[name] = bits

    def exclusively(self, change: Callable[[], T]) -> T:
        return change()

    def set_version(self, step: int) -> None:
        self.version = step
