"""The processes that tests on several GPUs share, here over CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch.distributed as dist

from tests.support.ranks import GpuRanks, in_shares


@pytest.fixture
def ranks() -> Iterator[GpuRanks]:
    made = GpuRanks(2, "cpu")
    yield made
    made.end()


def squares(count: int) -> tuple[int, dict[str, tuple[int, int]]]:
    """This process, and by number its square and the process that has made it."""
    return os.getpid(), in_shares({str(n): partial(square, n) for n in range(count)})


def square(n: int) -> tuple[int, int]:
    return n * n, os.getpid()


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such head")
    time.sleep(600)


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(600)


def test_processes_stay_and_share_cases(ranks: GpuRanks) -> None:
    (first, found), (second, same) = ranks.run(squares, (3,))
    assert found == same == {"0": (0, first), "1": (1, second), "2": (4, first)}
    assert [process for process, _ in ranks.run(squares, (1,))] == [first, second]


@pytest.mark.parametrize(("function", "said"), [(one_fails, "no such head"), (one_dies, "its process ended")])
def test_no_rank_waits_for_one_that_failed(ranks: GpuRanks, function, said: str, capsys) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)rank 1 of 2: .*{said}"):
        ranks.run(function, ())
    stacks = capsys.readouterr().err
    other = stacks.partition("rank 0 of 2:")[2].partition("rank 1 of 2:")[0]
    assert "in _serve" in other  # perhaps still on its way to the function
    assert not any(process.is_alive() for process in ranks._processes)
