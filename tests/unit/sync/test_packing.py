"""Small tensors share an encoding, and come apart again."""

import numpy as np
import pytest

from rlloop.sync import codec, packing
from rlloop.sync.bits import Bits, digest
from rlloop.sync.bundle import MemoryStore
from rlloop.sync.packing import groups, listing_of, pack, unpack
from tests.support.weight_history import history, same


def read_back(store, packed, base):
    """The state that the entries and pieces describe, for who has `base`."""
    stream = b"".join(b"".join(store.get(piece)) for piece in packed.pieces)
    state = {entry.name: base[entry.name] for entry in packed.entries if entry.codec == "unchanged"}
    for group in groups(packed.entries):
        content = stream[group[0].start : group[0].start + group[0].size]
        made = unpack(group, content, [base.get(entry.name) for entry in group])
        state.update(zip((entry.name for entry in group), made, strict=True))
    assert packed.digests == {name: digest(bits.array) for name, bits in state.items()}
    return state


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("joined", "chunk"), [(1 << 20, 1 << 22), (1000, 700), (0, 100), (5000, 1)])
def test_whatever_is_joined_and_wherever_chunks_end(monkeypatch, joined, chunk, threads):
    monkeypatch.setattr(packing, "JOINED", joined)
    monkeypatch.setattr(codec, "CHUNK", chunk)
    versions = history(2)
    if chunk == 1:  # a chunk an element: the smallest tensors only
        versions = [{name: each[name] for name in ("model.norm.weight", "model.scale")} for each in versions]
    for base, new in (({}, versions[0]), (versions[0], versions[1]), (versions[1], versions[2])):
        store = MemoryStore()
        known = {name: digest(bits.array) for name, bits in base.items()}
        packed = pack(store, listing_of(new, {}), new, base, known, threads)
        assert same(read_back(store, packed, base), new)
        assert packed.changed == (
            sum(int((new[name].array != base[name].array).sum()) for name in new)
            if base
            else sum(bits.array.size for bits in new.values())
        )


def test_small_tensors_of_one_type_are_one_encoding_and_unchanged_ones_none():
    old = {f"expert.{i}": Bits("BF16", np.full(500, i, np.uint16)) for i in range(40)}
    new = {name: Bits("BF16", bits.array.copy()) for name, bits in old.items()}
    for name in list(new)[:30]:
        new[name].array[7] ^= 1
    packed = pack(MemoryStore(), listing_of(new, {}), new, old, {}, 1)
    [group] = groups(packed.entries)
    assert [entry.name for entry in group] == list(new)[:30]
    assert [entry.codec for entry in packed.entries] == ["adaptive"] + 29 * ["joined"] + 10 * ["unchanged"]
    alone = sum(len(codec.encode(new[name], old[name]).content) for name in new)
    assert group[0].size < alone


def test_a_group_without_all_its_predecessors_is_refused():
    versions = history(1)
    packed = pack(MemoryStore(), listing_of(versions[1], {}), versions[1], versions[0], {}, 1)
    group = next(iter(groups(packed.entries)))
    assert len(group) > 1
    with pytest.raises(codec.CodecError, match="predecessor"):
        unpack(group, b"", [versions[0][group[0].name]] + [None] * (len(group) - 1))
