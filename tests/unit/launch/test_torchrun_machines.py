"""Each rank of torchrun says where it runs before anything is loaded, and rank 0 waits for that; its threads."""

from __future__ import annotations

import signal
import socket
import threading
from datetime import timedelta

import pytest
import torch

from rlloop.launch import torchrun
from rlloop.launch.layouts import Machine
from rlloop.launch.torchrun import Leader, Torchrun, follow
from tests.support.command import free_port


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # `follow` is a process's main thread elsewhere
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    return f"tcp://127.0.0.1:{free_port()}/attempt-0"


def test_rank_0_knows_every_ranks_machine(address: str) -> None:
    codes: list[int] = []
    with Leader(Torchrun(0, 3, 0, 1, address)) as leader:
        ranks = [
            threading.Thread(target=lambda rank=rank: codes.append(follow(Torchrun(rank, 3, rank - 1, 2, address))))
            for rank in (1, 2)
        ]
        for each in ranks:
            each.start()
        host = socket.gethostname()
        assert leader.machines() == [Machine(0, host, 0, 1, 3), Machine(1, host, 0, 2, 3), Machine(2, host, 1, 2, 3)]
    for each in ranks:
        each.join(240)
    assert codes == [0, 0]


def test_a_rank_that_does_not_come_is_not_waited_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "STARTING", timedelta(seconds=0.2))
    with Leader(Torchrun(0, 2, 0, None, address)) as leader:
        assert [each.rank for each in leader.machines()] == [0]


@pytest.mark.parametrize(("variable", "neighbours", "threads"), [(None, 2, 6), (None, None, 3), ("12", 2, 12)])
def test_threads_that_the_user_gives_each_rank_are_not_divided(
    variable: str | None, neighbours: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has read the variable, or has a thread for each core."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert Torchrun(0, 4, 0, neighbours, "").threads() == threads
