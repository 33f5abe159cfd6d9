import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.cli.delta_size import sizes
from rlloop.sync import codec
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.codec import CodecError, decode, encode, max_encoded
from rlloop.sync.framing import Numbers, framed, unframed
from rlloop.sync.planes import monotone
from rlloop.sync.steps import ORDERINGS, ordered, patterns_of

TYPES = sorted(WIDTH)
REFERENCE = codec.reference()
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0xFFFF, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x3F80]


def bf16(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def trained_pair(count: int, lr: float, seed: int = 0) -> tuple[Bits, Bits]:
    """bf16 weights before and after an update of about `lr`."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(count) * 0.02
    update = np.clip(0.4 * rng.standard_normal(count) + 0.3 * rng.standard_normal(count), -1, 1)
    return Bits("BF16", bf16(master)), Bits("BF16", bf16(master - lr * update))


def same_both_ways(new: Bits, old: Bits | None) -> codec.Encoded:
    """Encodes by both coders, and decodes by both: as it is, and as if the tensor were not small."""
    before = codec.SMALL
    codec.SMALL = 0
    try:
        large = same_by_both_coders(new, old)
    finally:
        codec.SMALL = before
    made = same_by_both_coders(new, old)
    assert large.codec != "adaptive"
    assert len(made.content) <= len(large.content)
    return made


def same_by_both_coders(new: Bits, old: Bits | None) -> codec.Encoded:
    made = encode(new, old)
    assert encode(new, old, coders=REFERENCE) == made
    assert len(made.content) <= max_encoded(new.dtype, new.shape)
    for coders in (REFERENCE, None):
        back = decode(made.codec, made.content, new.dtype, new.shape, old, coders=coders)
        assert back.same(new)
        assert back.shape == new.shape
        assert not np.shares_memory(back.array, new.array)
    return made


@pytest.mark.slow
def test_every_bf16_pattern_becomes_another():
    patterns = np.arange(65536, dtype=np.uint16)
    rng = np.random.default_rng(0)
    same_both_ways(Bits("BF16", rng.permutation(patterns)), Bits("BF16", patterns))
    near = patterns_of(np.clip(ordered(patterns, ORDERINGS["BF16"]) + rng.integers(-2, 3, 65536), -32768, 32767),
                       ORDERINGS["BF16"])  # fmt: skip
    made = same_both_ways(Bits("BF16", near), Bits("BF16", patterns))
    assert made.codec == "adaptive"
    assert made.changed == np.count_nonzero(near != patterns)


@pytest.mark.parametrize("count", [codec.SMALL + 1, codec.SMALL + 2, codec.SMALL + 3, codec.SMALL + 4])
@pytest.mark.parametrize("dtype", ["BF16", "I8"])
def test_elements_behind_the_last_whole_word_are_coded(count, dtype):
    """Sparse changes, which the compiled coder looks for in words of four elements: also in what is left over."""
    kind = UNSIGNED[WIDTH[dtype]]
    old = np.random.default_rng(count).integers(1, 100, count).astype(kind)
    for back in range(1, 6):
        new = old.copy()
        new[-back] += 1
        new[count // 2] += 1
        made = same_by_both_coders(Bits(dtype, new), Bits(dtype, old))
        assert (made.codec, made.changed) == ("changes", 2)


def test_special_values_keep_every_bit():
    pairs = np.array([(a, b) for a in SPECIAL for b in SPECIAL], np.uint16)
    for new, old in (pairs.T, pairs.T[::-1]):
        same_both_ways(Bits("BF16", new.copy()), Bits("BF16", old.copy()))
    zero, negative = Bits("BF16", np.zeros(9, np.uint16)), Bits("BF16", np.full(9, 0x8000, np.uint16))
    assert encode(negative, zero).codec != "unchanged"  # as floats they are equal
    nan = Bits("BF16", np.full(9, 0x7FC1, np.uint16))
    assert encode(nan, nan).codec == "unchanged"  # as floats they are not


@pytest.mark.parametrize("name", sorted(ORDERINGS))
def test_order_is_a_bijection_that_follows_the_values(name):
    ordering = ORDERINGS[name]
    step = 65537 if ordering.bits == 32 else 1  # of 2^32 values, a prime number apart, 65,536
    patterns = np.arange(0, 1 << ordering.bits, step).astype(f"u{ordering.bits // 8}")
    values = ordered(patterns, ordering)
    assert len(np.unique(values)) == len(patterns)
    assert (values >= -(1 << ordering.bits - 1)).all()
    assert (values < 1 << ordering.bits - 1).all()
    assert (patterns_of(values, ordering) == patterns).all()
    if name in ("F16", "F32"):
        as_floats = patterns.view(f"f{ordering.bits // 8}")
        finite = patterns[np.isfinite(as_floats)]
        floats = finite.view(as_floats.dtype)[np.argsort(ordered(finite, ordering))]
        assert (np.diff(floats.astype(np.float64)) >= 0).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (300, 41)])
def test_every_type_and_shape(dtype, shape):
    rng = np.random.default_rng(len(shape))
    kind = UNSIGNED[WIDTH[dtype]]
    old = rng.integers(0, 2 ** (8 * WIDTH[dtype]), shape, kind, endpoint=False)
    flips = rng.random(shape) < 0.05
    new = np.where(flips, old ^ rng.integers(1, 255, shape, dtype=kind), old).astype(kind)
    same_both_ways(Bits(dtype, new), Bits(dtype, old))
    assert same_both_ways(Bits(dtype, new), None).changed == new.size
    assert encode(Bits(dtype, old), Bits(dtype, old.copy())) == codec.Encoded("unchanged", b"", 0)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(TYPES), count=st.integers(1, 3000), rate=st.floats(0, 1), reach=st.integers(0, 63),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_fuzzed_pairs(dtype, count, rate, reach, seed):
    """Changes of any density and size, clustered, over random patterns; chunks that end anywhere."""
    rng = np.random.default_rng(seed)
    width = WIDTH[dtype]
    kind = UNSIGNED[width]
    old = rng.integers(0, 2 ** (8 * width - 1), count, kind, endpoint=True)
    where = np.repeat(rng.random(-(-count // 8)) < rate, 8)[:count]
    by = rng.integers(0, 2 ** min(reach + 1, 8 * width - 1), count, np.uint64, endpoint=True).astype(kind)
    new = np.where(where, old + by, old).astype(kind)
    before = codec.CHUNK
    codec.CHUNK = 1 + seed % 2000
    try:
        same_both_ways(Bits(dtype, new), Bits(dtype, old))
    finally:
        codec.CHUNK = before


class CountingPool(ThreadPoolExecutor):
    maps = 0

    def map(self, *args, **options):
        self.maps += 1
        return super().map(*args, **options)


def bf16_and_float_pairs() -> list[tuple[str, Bits, Bits | None, int]]:
    """Codec, new, old, and how often the encoder goes over the chunks."""
    old, new = trained_pair(10_500, 1e-5)
    rng = np.random.default_rng(0)
    floats = rng.standard_normal(10_500).astype(np.float32).view(np.uint32)
    noise = Bits("BF16", rng.integers(0, 65536, 10_500, np.uint16))
    return [
        ("changes", new, old, 1),
        ("planes", Bits("U32", floats + np.uint32(1)), Bits("U32", floats), 1),
        ("full", new, None, 1),
        ("full", new, noise, 2),  # once for the delta
    ]


@pytest.mark.parametrize(("kind", "new", "old", "maps"), bf16_and_float_pairs())
def test_chunks_in_parallel_are_the_same_bytes(monkeypatch, kind, new, old, maps):
    monkeypatch.setattr(codec, "CHUNK", 1000)
    monkeypatch.setattr(codec, "SMALL", 0)
    with CountingPool(3) as pool:
        made = encode(new, old, pool=pool)
        assert (made.codec, pool.maps) == (kind, maps)
        assert made.changed == (new.array.size if old is None else np.count_nonzero(new.array != old.array))
        assert made == encode(new, old)
        assert decode(made.codec, made.content, new.dtype, new.shape, old, pool=pool).same(new)
        assert pool.maps == maps + 1


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_chunks_that_no_change_fell_into_stay(monkeypatch, dtype):
    monkeypatch.setattr(codec, "CHUNK", 1000)
    monkeypatch.setattr(codec, "SMALL", 0)
    old = Bits(dtype, np.random.default_rng(0).integers(0, 200, 2500, UNSIGNED[WIDTH[dtype]]))
    new = Bits(dtype, old.array.copy())
    new.array[1700] += 1
    assert same_by_both_coders(new, old).changed == 1


@pytest.mark.parametrize(("new", "old"), [(new, old) for _, new, old, _ in bf16_and_float_pairs()])
def test_finding_changes_takes_a_share_of_the_time(monkeypatch, new, old):
    monkeypatch.setattr(codec, "SMALL", 0)
    began = time.perf_counter()
    seconds = [encode(new, old).diff_seconds, encode(new, new).diff_seconds]
    assert sum(seconds) < time.perf_counter() - began
    assert [each > 0 for each in seconds] == [old is not None, True]


def numbers(values) -> bytes:
    """LEB128."""
    content = bytearray()
    for value in values:
        while value >= 128:
            content.append(value & 127 | 128)
            value >>= 7
        content.append(value)
    return bytes(content)


def test_numbers_of_every_length_come_back_and_limits_are_included():
    values = [0, 1, 127, 128, 129, 1 << 14, 3 << 20, (1 << 28) + 1, (1 << 32) - 1]
    content = numbers(values)
    assert content[:5] == b"\x00\x01\x7f\x80\x01"
    reader = Numbers(memoryview(content + b"rest"))
    assert [reader.next(value) for value in values] == values
    assert (bytes(reader.bytes(2)), bytes(reader.rest())) == (b"re", b"st")
    with pytest.raises(CodecError, match="the content ends early"):
        reader.bytes(3)
    with pytest.raises(CodecError, match="a number is 128, above 127"):
        Numbers(memoryview(numbers([128]))).next(127)
    for endless in (b"", b"\x80", b"\x80" * 5 + b"\x01"):
        with pytest.raises(CodecError, match="a number does not end"):
            Numbers(memoryview(endless)).next(1 << 40)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_planes_order_patterns_as_their_values(kind):
    """The order of patterns decides which differences are small, so it must never change between versions."""
    values = np.array([-np.inf, -3.5, -1, -1e-7, -0.0, 0.0, 1e-7, 1, 3.5, np.inf], kind)
    patterns = values.view(f"<u{values.itemsize}")
    order = monotone(patterns, True)
    assert (np.diff(order.view(f"<i{values.itemsize}")) > 0).all()
    assert (order[-5:] == patterns[-5:]).all()
    assert (monotone(order, True) == patterns).all()
    assert monotone(patterns, False) is patterns


def test_no_change_is_no_symbol():
    same = np.arange(100, dtype=np.uint16)
    for coders in (REFERENCE, codec.fast()):
        changes, places = coders.steps.find_changes(same, same, ORDERINGS["BF16"])
        assert changes.counts.sum() == len(changes.gaps) == len(changes.zigzags) == len(places) == 0


@pytest.mark.parametrize("last", [1000, 0x8000])
def test_a_far_and_large_change_among_near_and_small_ones(monkeypatch, last):
    """More than a symbol and a byte can say, of the gap and of the step."""
    monkeypatch.setattr(codec, "SMALL", 0)
    old = Bits("BF16", np.zeros(20_000, np.uint16))
    new = Bits("BF16", old.array.copy())
    new.array[:2000] = 1
    new.array[-2:] = 0x7F80, last
    assert same_by_both_coders(new, old).codec == "changes"


@pytest.mark.parametrize(
    ("header", "rest", "message"),
    [
        ([0], b"x", "bytes follow a chunk without changes"),
        ([9], b"", "a number is 9, above 8"),
        ([1, 256], b"", "a number is 256, above 255"),
        ([1, 255, 1], b"", "a number is 1, above 0"),
        ([1, 0, 0, 2], b"", "a number is 2, above 1"),
        ([1, 0, 0, 0, 0, 0, 0, 1, 22], b"", "a number is 22, above 21"),
        ([2, 0, 0, 0, 0, 0, 0, 1, 0], b"", "the classes have 1 changes; the chunk has 2"),
        ([1, 0, 0, 0, 0, 0, 0, 1, 0, 0], b"x", "1 bytes of low bits do not fit the changes"),
        ([1, 0, 0, 0, 0, 0, 0, 1, 9, 0], b"x", "1 bytes of low bits do not fit the changes"),
        ([1, 0, 0, 0, 0, 0, 0, 1, 0, 1], b"", "the content ends early"),
    ],
)
def test_headers_of_steps_that_no_encoder_writes(header, rest, message):
    header = numbers(header) + rest
    old = Bits("BF16", np.zeros(8, np.uint16))
    with pytest.raises(CodecError, match=message):
        decode("steps", framed([header]), "BF16", (8,), old, coders=REFERENCE)


def test_parts_come_back_and_are_exactly_as_many_as_asked_for():
    parts = [b"first", b"", b"x", b""]
    content = framed(parts)
    assert [bytes(part) for part in unframed(memoryview(content), 4)] == parts
    for damaged, count, message in (
        (content, 5, "the content ends before its parts do"),
        (content[:-1], 4, "the content ends before its parts do"),
        (content[:8], 1, "a part is longer than what is left of the content"),
        (content + b"abc", 4, "^3 bytes are left over"),
    ):
        with pytest.raises(CodecError, match=message):
            list(unframed(memoryview(damaged), count))


@pytest.mark.parametrize(
    ("plain", "announced", "after", "message"),
    [
        (8, True, b"x", "a frame cannot be read"),
        (9, True, b"", "a frame announces 9 bytes, not 8"),
        (7, False, b"", "a frame has 7 bytes, not 8"),
    ],
)
def test_frames_that_no_encoder_writes(plain, announced, after, message):
    stream = zstandard.ZstdCompressor(1, write_content_size=announced).compressobj(size=plain if announced else -1)
    frame = stream.compress(bytes(plain)) + stream.flush() + after
    with pytest.raises(CodecError, match=message):
        decode("full", framed([framed([frame])]), "U8", (8,), None)


def test_noncontiguous_tensors():
    old, new = trained_pair(600, 1e-4)
    a, b = Bits("BF16", old.array.reshape(20, 30).T), Bits("BF16", new.array.reshape(20, 30).T)
    same_both_ways(b, a)


@pytest.mark.parametrize(("lr", "of_reference"), [(1e-6, 0.975), (1e-5, 0.98), (3e-4, 0.98)])
def test_sizes_beside_xor_and_the_entropy(lr, of_reference):
    old, new = trained_pair(1 << 20, lr)
    found = sizes(new, old)
    assert found.conditional / found.delta > of_reference
    assert found.conditional < found.unconditional < found.index_value
    assert found.delta < found.xor / (2 if lr <= 1e-5 else 1.5)
    assert found.full == 2 << 20


def test_the_shortest_way_is_taken():
    rng = np.random.default_rng(0)
    old = Bits("BF16", rng.integers(0, 65536, 5000, np.uint16))
    fresh = Bits("BF16", bf16(rng.standard_normal(5000)))
    whole = encode(fresh, old)
    assert whole.codec == "full"
    for known in (old, None):  # whether or not the receiver has what came before
        assert decode("full", whole.content, "BF16", (5000,), known).same(fresh)
    one = Bits("BF16", old.array.copy())
    one.array[4321] ^= 1
    assert len(encode(one, old).content) < 40
    noise = Bits("F32", rng.integers(0, 2**32, 5000, np.uint32))
    assert len(encode(noise, None).content) <= max_encoded("F32", (5000,)) == 20_000 + 156 + 256


@pytest.mark.slow
@pytest.mark.parametrize("small", [0, codec.SMALL])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
def test_damage_is_an_error_or_another_tensor_but_never_worse(monkeypatch, dtype, small):
    """Damaged content that passes the hashes still cannot read or write outside the tensor. Seeds 0 to 299."""
    monkeypatch.setattr(codec, "SMALL", small)
    rng = np.random.default_rng(0)
    kind = UNSIGNED[WIDTH[dtype]]
    count = 500 if small else 2000  # the reference takes its time over each
    old = Bits(dtype, rng.integers(0, 200, count, kind))
    new = Bits(dtype, np.where(rng.random(count) < 0.1, old.array + 3, old.array).astype(kind))
    made = encode(new, old)
    assert made.codec == ("adaptive" if small > 0 and dtype != "F32" else "changes")
    failed = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        damaged = bytearray(made.content)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        content = bytes(damaged[: rng.integers(len(damaged))] if seed % 5 == 0 else damaged)
        results = []
        for coders in (REFERENCE, None):
            try:
                back = decode(made.codec, content, dtype, new.shape, old, coders=coders)
                assert back.shape == new.shape
                results.append(back.array.tobytes())
            except CodecError as error:
                results.append(type(error))
        assert results[0] == results[1]
        failed += results[0] is CodecError
    assert failed > 150


def test_sizes_are_capped_before_anything_is_unpacked():
    bomb = zstandard.ZstdCompressor(1).compress(bytes(50_000_000))
    quiet = zstandard.ZstdCompressor(1, write_content_size=False)
    hidden = quiet.compressobj()
    unnamed = hidden.compress(bytes(50_000_000)) + hidden.flush()
    for frame in (bomb, unnamed):
        plane = struct.pack("<I", len(frame)) + frame
        content = struct.pack("<I", len(plane)) + plane
        with pytest.raises(CodecError):
            decode("full", content, "U8", (1000,), None)
    old = Bits("BF16", np.zeros(1000, np.uint16))
    for header in (b"\xff\xff\xff\xff\x7f", b"\xe8\x07\xff\x01\x00", b"\x80" * 20):
        with pytest.raises(CodecError):
            decode("steps", struct.pack("<I", len(header)) + header, "BF16", (1000,), old)
    with pytest.raises(CodecError, match="predecessor"):
        decode("steps", b"", "BF16", (1000,), None)
    with pytest.raises(CodecError, match="left over"):
        decode("full", encode(old, None).content + b"x", "BF16", (1000,), None)


@pytest.mark.parametrize("small", [0, codec.SMALL])
def test_changes_outside_of_the_tensor_or_the_type(monkeypatch, small):
    monkeypatch.setattr(codec, "SMALL", small)
    old = Bits("BF16", np.full(100, 0x3F80, np.uint16))
    new = Bits("BF16", old.array.copy())
    new.array[99] += 1
    made = encode(new, old)
    for count in (50,) if small else (50, 99):  # 99 of 100 may be another whole tensor to the adaptive coder
        shorter = Bits("BF16", old.array[:count])
        for coders in (REFERENCE, None):
            with pytest.raises(CodecError, match=r"lie outside|out of range|leave the type"):
                decode(made.codec, made.content, "BF16", (count,), shorter, coders=coders)
    if not small:  # modulo the type's width, a step leads nowhere else
        return
    for end, before in ((0x7FFF, 0x7FFD), (0x7FFF, 0x7FFE), (0xFFFF, 0xFFFE)):
        last = Bits("BF16", np.full(100, end, np.uint16))  # the same class in another place of the order
        made = encode(last, Bits("BF16", np.full(100, before, np.uint16)))
        assert made.codec == "adaptive"
        for coders in (REFERENCE, None):
            with pytest.raises(CodecError, match="leave the type's range"):
                decode(made.codec, made.content, "BF16", (100,), last, coders=coders)


def test_what_is_adaptive_ends_where_its_encoder_ended(monkeypatch):
    monkeypatch.setattr(codec, "SMALL", 2000)  # as many as there are
    old, new = trained_pair(2000, 1e-5)
    made = encode(new, old)
    assert made.codec == "adaptive"
    assert decode("adaptive", made.content, "BF16", (2000,), old).same(new)
    for content in (made.content + b"\0", made.content + b"x"):
        for coders in (REFERENCE, None):
            with pytest.raises(CodecError, match="do not end as an encoder's"):
                decode("adaptive", content, "BF16", (2000,), old, coders=coders)
    for shape, dtype in (((codec.SMALL + 1,), "U8"), ((4,), "F32")):
        odd = Bits(dtype, np.zeros(shape, UNSIGNED[WIDTH[dtype]]))
        with pytest.raises(CodecError, match=r"at most|is not for F32"):
            decode("adaptive", b"", dtype, shape, odd)
    for kind, other in (("steps", odd), ("changes", Bits("I32", odd.array))):
        with pytest.raises(CodecError, match=f"{kind} is not for {other.dtype}"):
            decode(kind, b"", other.dtype, (4,), other)
