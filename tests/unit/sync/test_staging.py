from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlloop.sync import codec, staging, steps_fast
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.manifest import Entry
from rlloop.sync.steps import Patch
from rlloop.sync.steps_fast import STRETCH


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("chunk", [STRETCH + 1, codec.CHUNK])
@pytest.mark.parametrize("share", [0.0005, 0.02, 0.2])
def test_a_patch_is_what_changes_wherever_stretches_ranges_and_chunks_end(monkeypatch, dtype, chunk, share):
    monkeypatch.setattr(codec, "CHUNK", chunk)
    monkeypatch.setattr(codec, "SMALL", 0)
    monkeypatch.setattr(steps_fast, "RANGE", 2 * STRETCH + 512)
    rng = np.random.default_rng(0)
    count, width = 6 * STRETCH + 700, WIDTH[dtype]
    floats = (0.02 * rng.standard_normal(count)).astype(np.float32).view(np.uint32)
    old = Bits(dtype, (floats >> (32 - 8 * width)).astype(UNSIGNED[width]))
    new, where = old.copy(), np.flatnonzero(rng.random(count) < share)
    new.array[where] += rng.choice(np.array([1, 2, 3], new.array.dtype), len(where))
    made = codec.encode(new, old)
    assert made.codec == "changes"
    entry = Entry("x", dtype, (count,), made.codec, 0, len(made.content))
    with ThreadPoolExecutor(2) as pool:
        (staged,) = staging.stage(*staging.begin([entry], made.content, pool), [old])
    assert isinstance(staged.change, Patch)
    places, values = staged.change
    order = np.argsort(places)
    assert np.array_equal(places[order], where)
    assert np.array_equal(values[order], new.array[where])
    assert staged.digest == new.digest() != old.digest()


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
def test_waves_stage_what_one_pool_stages(monkeypatch, size):
    """In the same order, with each wave decoded before its first group is staged."""
    monkeypatch.setattr(codec, "SMALL", 0)
    monkeypatch.setattr(staging, "WAVE", max(1, size))
    rng = np.random.default_rng(0)
    olds = {f"w{at}": Bits("BF16", rng.integers(0, 1 << 15, 5000 + at, np.uint16)) for at in range(5)}
    contents, news = {}, {name: old.copy() for name, old in olds.items()}
    for name, new in news.items():
        new.array[:: 7 + len(contents)] += 1
        contents[name] = codec.encode(new, olds[name]).content
    decoded = []

    def begun(pool):
        for name, content in contents.items():
            decoded.append(
                staging.begin([Entry(name, "BF16", olds[name].shape, "changes", 0, len(content))], content, pool)
            )
            yield decoded[-1]

    def stage(each):
        return staging.stage(*each, [olds[each.group[0].name]])

    def checked(each):
        assert all(chunk.done() for chunk in each.chunks)
        assert each in decoded
        return stage(each)

    with ThreadPoolExecutor(2) as pool:
        whole = list(staging.on_host(begun(pool), stage, pool))
        decoded.clear()
        in_waves = list(staging.on_device(begun(pool), checked))
    assert [name for name, _ in in_waves] == [name for name, _ in whole] == list(olds)
    for (name, mine), (_, theirs) in zip(in_waves, whole, strict=True):
        assert mine.digest == theirs.digest == news[name].digest()


def test_a_patch_that_cannot_be_read_back_is_reported():
    flat = np.arange(3000, dtype=np.uint16)
    places, values = np.arange(0, 3000, 2, dtype=np.uint32), np.arange(1500, dtype=np.uint16) + 5000
    assert steps_fast.put(flat, places, values)
    assert np.array_equal(flat[::2], values)
    assert np.array_equal(flat[1::2], np.arange(1, 3000, 2))
    places[-1] = places[-2]  # the last value is written over the one before
    assert not steps_fast.put(flat, places, values)
