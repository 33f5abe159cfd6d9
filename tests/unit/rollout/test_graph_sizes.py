"""Sizes of the graphs that decode."""

import pytest

from rlloop.rollout.engine.graphs import at_least, rounded


@pytest.mark.parametrize(("finely", "most"), [(False, 1 / 3), (True, 1 / 9)])
def test_few_rows_are_idle_and_few_sizes_are_recorded(finely: bool, most: float) -> None:
    sizes = [rounded(rows, finely=finely) for rows in range(1, 1025)]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, 1):
        assert rows <= size
        assert size - rows <= size * (most if rows > 32 else 1 / 3)
        assert rounded(size, finely=finely) == size
    assert len(set(sizes)) <= (60 if finely else 22)


def test_pages_double() -> None:
    assert [at_least(pages, 64) for pages in (1, 64, 65, 200)] == [64, 64, 128, 256]
