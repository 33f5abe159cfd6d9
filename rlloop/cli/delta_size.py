"""`rlloop delta A B`: the size of a weight sync between two checkpoints: by rlloop's codec, by others, in theory.

References: coding which n of N elements changed takes log2 C(N, n) bits, and their steps take their entropy. The
unconditional reference is that sum for each tensor; the conditional one, which knows the old exponents as receivers do,
for each exponent of a tensor. Neither counts the description of the distributions, so no coder that sends them reaches
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.errors import ModelError
from rlloop.sync import codec
from rlloop.sync.bits import Bits
from rlloop.sync.bundle import MemoryStore
from rlloop.sync.folder import read_folder
from rlloop.sync.manifest import Manifest, hash_of, root_hash
from rlloop.sync.packing import listing_of, pack
from rlloop.sync.steps import ORDERINGS, classes_of, ordered


@dataclass(frozen=True)
class Sizes:
    """Elements, and bytes by several codecs, of one tensor's change; or their sums over a checkpoint."""

    elements: int = 0
    changed: int = 0  # elements
    single: int = 0  # elements changed by one representable step
    full: int = 0  # bytes, as all below
    delta: int = 0  # by rlloop's codec, each tensor separately
    xor: int = 0  # XOR, then zstd level 1
    index_value: int = 0  # int32 index and new value of each changed element
    conditional: float = 0.0  # reference; 0 for dtypes wider than 16 bits, which have none
    unconditional: float = 0.0  # reference
    referenced: int = 0  # part of `delta` of tensors with references

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def sizes(new: Bits, old: Bits) -> Sizes:
    """Sizes of one tensor's change."""
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
    if ordering is None or ordering.bits > 16:
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
    position_bits = (math.lgamma(total + 1) - math.lgamma(n + 1) - math.lgamma(total - n + 1)) / math.log(2)
    share = np.unique(changed, return_counts=True)[1] / n
    return position_bits - n * float((share * np.log2(share)).sum())


def read_pair(old: Path, new: Path, bfloat16: bool = False) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Two checkpoints of one model; `bfloat16` rounds their float32. Raises `ModelError` if their tensors differ."""
    before, after, where = read_folder(old), read_folder(new), f"{old} and {new}"
    if odd := sorted(before.keys() ^ after.keys()):
        raise ModelError(f"{where} are not of one model: only one of them has {', '.join(odd[:5])}")
    for name, bits in after.items():
        had = before[name]
        if (had.dtype, had.shape) != (bits.dtype, bits.shape):
            raise ModelError(
                f"{where}: {name} is {had.dtype} {list(had.shape)} in one and {bits.dtype} {list(bits.shape)} in the "
                "other; save both in the type that engines compute in"
            )
    return (_rounded(before), _rounded(after)) if bfloat16 else (before, after)


def _rounded(tensors: Mapping[str, Bits]) -> dict[str, Bits]:
    import torch

    from rlloop.sync.live import bits_of

    return {
        name: bits_of(torch.tensor(bits.array.view(np.float32)).bfloat16()) if bits.dtype == "F32" else bits
        for name, bits in tensors.items()
    }


def compare(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> Iterator[tuple[str, Sizes]]:
    """(name, sizes) of each tensor."""
    for name, bits in new.items():
        yield name, sizes(bits, old[name])


def version_bytes(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> tuple[int, int]:
    """Bytes of a publication of `new` after `old`: of its stream, in which small tensors are joined, and its manifest.

    The listing of names and shapes is not included, since it is sent once in a run.
    """
    listing = listing_of(new, {})
    packed = pack(_Nowhere(), listing, new, old, {}, 1)
    root = root_hash(listing.tensors, packed.digests)
    parent, listed = hash_of(b"its parent's"), hash_of(listing.encode())
    manifest = Manifest("run", 1, 1, parent, None, listed, packed.entries, {}, packed.pieces, root)
    return manifest.stream_bytes, len(manifest.sign(Ed25519PrivateKey.generate()))


class _Nowhere(MemoryStore):
    def put(self, blob: bytes) -> bytes:
        return hash_of(blob)


def describe(total: Sizes, stream: int, manifest: int) -> list[str]:
    """Lines for the terminal; `stream` and `manifest` are `version_bytes`."""
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
        ("rlloop's delta", stream),
        ("  with its manifest", stream + manifest),
    ]
    if total.conditional and total.referenced == total.delta:
        rows.append(("entropy", total.unconditional))
        rows.append(("entropy, old exponent known", total.conditional))
    lines += [f"{name:34}{size:18,.0f}{total.full / size:10.4g}" for name, size in rows]
    lines += ["", f"XOR + zstd-1 takes {total.xor / stream:.3g} times as much"]
    if total.conditional and total.referenced == total.delta:
        lines[-1] += f"; the entropy with the old exponent known is {total.conditional / stream:.3g} of it"
    return lines
