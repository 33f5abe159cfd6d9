"""`rlloop delta A B`: what a sync from one checkpoint to another weighs, by this codec, others, and in theory.

References: coding which elements changed costs log2 C(N, n) bits, and the steps of those their entropy. Without
knowledge that is one such sum a tensor; knowing the old exponent, as receivers do, it is one for each exponent. They
leave out what describing the distributions costs, so no coder that sends them quite reaches them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import zstandard

from rlloop.errors import ModelError
from rlloop.sync import codec
from rlloop.sync.bits import Bits
from rlloop.sync.folder import read_folder
from rlloop.sync.steps import ORDERINGS, classes_of, ordered


@dataclass(frozen=True)
class Sizes:
    """Bytes of one tensor's way from old to new; sums of them for a checkpoint's."""

    elements: int = 0
    changed: int = 0
    single: int = 0  # of those, by one representable step
    full: int = 0
    delta: int = 0  # by rlloop's codec
    xor: int = 0  # XOR, then zstd level 1
    index_value: int = 0  # int32 index and new value of each changed element
    conditional: float = 0.0  # references; 0 for types wider than 16 bits, which have none
    unconditional: float = 0.0
    referenced: int = 0  # bytes of `delta` that are of tensors with references

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def sizes(new: Bits, old: Bits) -> Sizes:
    encoded = codec.encode(new, old)
    xor = np.bitwise_xor(new.array, old.array)
    index_value = encoded.changed * (4 + new.array.itemsize)
    measured = Sizes(
        elements=new.array.size,
        changed=encoded.changed,
        full=new.nbytes,
        delta=len(encoded.content),
        xor=len(zstandard.ZstdCompressor(1).compress(xor.tobytes())),
        index_value=index_value,
    )
    ordering = ORDERINGS.get(new.dtype)
    if ordering is None:
        return measured
    before, after = old.array.reshape(-1), new.array.reshape(-1)
    steps = ordered(after, ordering) - ordered(before, ordering)
    kinds = classes_of(before, ordering)
    conditional = sum(_bits(steps[kinds == kind]) for kind in np.unique(kinds))
    return measured + Sizes(
        single=int(np.count_nonzero(np.abs(steps) == 1)),
        conditional=conditional / 8,
        unconditional=_bits(steps) / 8,
        referenced=len(encoded.content),
    )


def _bits(steps: np.ndarray) -> float:
    """log2 C(N, n) + n H(step | changed)."""
    changed = steps[steps != 0]
    total, n = len(steps), len(changed)
    if n == 0:
        return 0.0
    places = (math.lgamma(total + 1) - math.lgamma(n + 1) - math.lgamma(total - n + 1)) / math.log(2)
    share = np.unique(changed, return_counts=True)[1] / n
    return places - n * float((share * np.log2(share)).sum())


def compare(old: Path, new: Path) -> Iterator[tuple[str, Sizes]]:
    """Each tensor's sizes. Raises `ModelError` where the folders are not checkpoints of one model."""
    yield from compare_tensors(read_folder(old), read_folder(new), f"{old} and {new}")


def compare_tensors(
    old: Mapping[str, Bits], new: Mapping[str, Bits], where: str = "the two"
) -> Iterator[tuple[str, Sizes]]:
    if odd := sorted(old.keys() ^ new.keys()):
        raise ModelError(f"{where} are not of one model: only one of them has {', '.join(odd[:5])}")
    for name, bits in new.items():
        before = old[name]
        if (before.dtype, before.shape) != (bits.dtype, bits.shape):
            raise ModelError(
                f"{where}: {name} is {before.dtype} {list(before.shape)} in one and {bits.dtype} {list(bits.shape)} in "
                "the other; save both in the type that engines compute in"
            )
        yield name, sizes(bits, before)


def describe(total: Sizes) -> list[str]:
    """Lines for the terminal."""
    if total.changed == 0:
        return [f"{total.elements:,} weights, {total.full:,} bytes: every bit is the same"]
    lines = [
        f"{total.elements:,} weights, {total.changed:,} changed ({100 * total.changed / total.elements:.3g}%)"
        + (f", {100 * total.single / total.changed:.3g}% of them by one step" if total.single else ""),
        "",
        f"{'':34}{'bytes':>18}{'ratio':>10}",
    ]
    rows: list[tuple[str, float]] = [
        ("full", total.full),
        ("index + value", total.index_value),
        ("XOR + zstd-1", total.xor),
        ("rlloop's delta", total.delta),
    ]
    if total.conditional and total.referenced == total.delta:
        rows.append(("entropy", total.unconditional))
        rows.append(("entropy, old exponent known", total.conditional))
    lines += [f"{name:34}{size:18,.0f}{total.full / size:10.4g}" for name, size in rows]
    lines += ["", f"XOR + zstd-1 takes {total.xor / total.delta:.3g} times as much"]
    if total.conditional and total.referenced == total.delta:
        lines[-1] += f"; the entropy with the old exponent known is {total.conditional / total.delta:.3g} of it"
    return lines
