"""The entropy coder of changes: what it writes comes back, and nothing else is read."""

import numpy as np
import pytest

from rlloop.sync import entropy, legacy
from rlloop.sync.entropy import Damage
from rlloop.sync.framing import CodecError
from rlloop.sync.steps import ORDERINGS, Changes

ELEMENTS = 1 << 22
BF16 = ORDERINGS["BF16"]
GOLDEN = (
    "066414030202260500000000000000000000000000000000000001090103120901000000000001000000000000010000010a0e0101000000"
    "0000000100eeceb098d3ec02f5a8a4f78a3621c182001a"
)


def drawn(seed: int, classes: int = 256, bits: int = 16) -> Changes:
    """Classes of any number of changes, gaps and steps of any size, near and far."""
    rng = np.random.default_rng(seed)
    counts = np.where(
        rng.random(classes) < rng.choice([0.02, 0.3, 1]), rng.integers(0, rng.choice([3, 60]), classes), 0
    )
    n = int(counts.sum())
    gaps = np.minimum(rng.geometric(rng.choice([0.9, 0.1, 1e-3]), n) - 1, ELEMENTS - 1)
    zigzags = rng.integers(0, rng.choice([2, 20, 1 << bits]), n, endpoint=False)
    return Changes(counts.astype(np.int64), gaps.astype(np.uint32), zigzags.astype(np.uint32))


def read(content: bytes, classes: int = 256, bits: int = 16, elements: int = ELEMENTS) -> Changes | Damage:
    return entropy.decode(memoryview(content), classes, bits, elements)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_changes_come_back(bits):
    for seed in range(40):
        changes = drawn(seed, 1 if seed % 4 == 0 else 256, bits)
        back = read(entropy.encode(changes), len(changes.counts), bits)
        assert isinstance(back, Changes), (seed, back)
        assert all(np.array_equal(one, other) for one, other in zip(back, changes, strict=True))


def test_the_bytes_stay():
    """Stores keep what an encoder wrote: a change of these bytes is another format."""
    counts = np.zeros(256, np.int64)
    counts[[100, 101, 120]] = 3, 2, 1
    changes = Changes(counts, np.array([5, 0, 70, 900, 1, 4000], np.uint32), np.array([0, 1, 0, 300, 1, 2], np.uint32))
    assert entropy.encode(changes).hex() == GOLDEN
    assert entropy.encode(Changes(counts * 0, changes.gaps[:0], changes.zigzags[:0])) == b"\0"


def test_damage_is_noticed_or_harmless():
    """Seeds 0 to 399: a reason, or changes within their limits. Content that goes on or stops early has a reason."""
    noticed = 0
    for seed in range(400):
        rng, changes = np.random.default_rng(seed), drawn(seed % 20)
        content = bytearray(entropy.encode(changes))
        for _ in range(rng.integers(1, 4)):
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        back = read(bytes(content))
        if isinstance(back, Changes):
            assert back.counts.sum() == len(back.gaps) == len(back.zigzags) <= ELEMENTS
            assert not len(back.gaps) or (back.gaps.max() < ELEMENTS and back.zigzags.max() < 1 << 16)
        noticed += isinstance(back, Damage)
    assert noticed > 300
    content = entropy.encode(drawn(3))
    for cut in range(0, len(content), 7):
        assert isinstance(read(content[:cut]), Damage)
    for more in (b"\0", b"\1", bytes(9)):
        assert isinstance(read(content + more), Damage)
    assert isinstance(read(b"\0\0"), Damage)


def test_noise_is_refused():
    rng = np.random.default_rng(0)
    for size in range(300):
        content = rng.bytes(size)
        assert isinstance(read(content, elements=1000), Damage) or content[:1] == b"\0"


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", Damage.number),
        (b"\x80", Damage.number),
        (b"\x09", Damage.number),  # of 8 elements
        (b"\x01\xff\x02", Damage.number),  # class 383
        (b"\x02\0\0\x01\0", Damage.counts),
        (b"\x01\0\0\x01\0\0", Damage.table),  # no table
        (b"\x01\0\0\x01\0\x01\x01\x01\0", Damage.table),  # of no symbol
        (b"\x01\0\0\x01\0\x01\x01\x21", Damage.table),  # of 33 entries
        (b"\x01\0\0\x01\0\x01\x01\x01\x01\x01\x01\0\0\0", Damage.number),  # states below the least
    ],
)
def test_headers_that_no_encoder_writes(content, damage):
    assert read(content, elements=8) == damage
    assert entropy.REASONS[damage]


def test_a_rest_larger_than_any_is_refused():
    counts = np.zeros(256, np.int64)
    counts[7] = 1
    far = entropy.encode(Changes(counts, np.array([5000], np.uint32), np.array([0], np.uint32)))
    assert read(far, elements=5000) == Damage.large
    assert isinstance(read(far, elements=5001), Changes)
    large = entropy.encode(Changes(counts, np.array([0], np.uint32), np.array([256], np.uint32)))
    assert read(large, bits=8) == Damage.large


def test_old_chunks_have_as_many_overflows_as_they_say():
    """`steps` of format 2, one change whose gap's symbol has an overflow byte that is not there."""
    import zstandard

    body = zstandard.ZstdCompressor(1).compress(bytes([0xF0]))
    header = bytes([1, 0, 0, 0, 0, 0, 0, 1, 0, len(body)])
    with pytest.raises(CodecError, match="number of overflows"):
        legacy.changes_of(memoryview(header + body), BF16, 100)
