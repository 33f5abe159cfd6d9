"""Counter-based random numbers: the published vectors, the same bits in Python and in kernels, and flatness."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from rlloop.numerics.kernels.cpu.compiled.random import philox_kernel, uniform_kernel
from rlloop.numerics.random import philox, uniform

# Known answers of Random123 for philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD63 = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter, key, words):
    assert philox(counter, key) == words
    assert philox_kernel(*(np.uint64(x) for x in counter + key)) == words


@settings(deadline=None)  # the first call compiles
@given(WORD63, WORD63, WORD63)
def test_kernel_and_python_agree_to_the_last_bit(seed, position, stream):
    assert uniform(seed, position, stream) == uniform_kernel(seed, position, stream)


@settings(deadline=None)  # the first call compiles
@given(WORD63, WORD63)
def test_half_open_unit_interval(seed, position):
    assert 0.0 <= uniform(seed, position) < 1.0


def test_each_of_seed_position_and_stream_names_another_number():
    names = [(s, p, t) for s in (0, 1, 2**32, 2**62) for p in (0, 1, 2**32) for t in (0, 1)]
    assert len({uniform(*name) for name in names}) == len(names)


@njit
def _draw(count):
    numbers = np.empty(count)
    for i in range(count):
        numbers[i] = uniform_kernel(7, i, 0)
    return numbers


def test_positions_of_one_seed_are_flat_and_unrelated():
    numbers = _draw(200_000)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 57 < chi_square < 158  # 99 degrees of freedom, both 0.05% tails
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    low_bits = (numbers * 2**53).astype(np.uint64) % 64  # all 53 bits are random, the lowest too
    assert np.bincount(low_bits.astype(np.int64), minlength=64).min() > 2800
