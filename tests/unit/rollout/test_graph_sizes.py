"""Sizes of recorded steps."""

import pytest

from rlloop.rollout.engine.graph_sizes import at_least, rounded, rounded_rows, rounded_tokens


@pytest.mark.parametrize(("finely", "most"), [(False, 1 / 3), (True, 1 / 9)])
def test_few_rows_are_idle_and_few_sizes_are_recorded(finely: bool, most: float) -> None:
    sizes = [rounded(rows, finely=finely) for rows in range(1, 1025)]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, 1):
        assert rows <= size
        assert size - rows <= size * (most if rows > 32 else 1 / 3)
        assert rounded(size, finely=finely) == size
    assert len(set(sizes)) <= (60 if finely else 22)


def test_steps_with_prompts_have_few_sizes() -> None:
    assert [rounded_rows(rows) for rows in (1, 4, 5, 16, 17, 64, 65, 257)] == [4, 4, 16, 16, 64, 64, 256, 1024]
    sizes = [rounded_tokens(count) for count in range(1, 2049)]
    assert all(count <= size <= max(2, count * 3 / 2) for count, size in enumerate(sizes, 1))
    assert all(size * 0.8 <= count for count, size in enumerate(sizes, 1) if count > 256)
    assert len(set(sizes)) == 26
    assert [rounded_tokens(count) for count in (2049, 8192, 8200)] == [2304, 8192, 8448]


def test_pages_double() -> None:
    assert [at_least(pages, 64) for pages in (1, 64, 65, 200)] == [64, 64, 128, 256]
