"""What `profile=true` leaves in the process, and says of a trace without kernels."""

import gzip
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlloop.launch.timeline import Timeline


@pytest.mark.parametrize("before", [None, "3"])
def test_later_children_inherit_no_level_of_the_profilers_log(tmp_path, monkeypatch, before):
    if before is None:
        monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("KINETO_LOG_LEVEL", before)
    timeline = Timeline(tmp_path, print)
    timeline.log(1, {})
    timeline.close()
    assert os.environ.get("KINETO_LOG_LEVEL") == before


@pytest.mark.parametrize("gpu", [False, True])
def test_a_trace_without_kernels_of_the_gpu_is_noted(tmp_path, monkeypatch, gpu):
    for name, answer in (("is_available", True), ("is_initialized", gpu), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    notes = list[str]()
    timeline = Timeline(tmp_path, notes.append)
    timeline.log(1, {})
    timeline.log(2, {})  # a whole step
    timeline.close()
    assert ["no kernel of the GPU" in note for note in notes] == [True] * gpu
    assert timeline.file.exists()


def test_a_run_of_one_step_is_not_told_of_a_trace_without_kernels(tmp_path, monkeypatch):
    for name in ("is_available", "is_initialized", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    notes = list[str]()
    timeline = Timeline(tmp_path, notes.append)
    timeline.log(1, {})
    timeline.close()
    assert not notes


def test_a_thread_that_works_since_before_is_traced(tmp_path):
    timeline = Timeline(tmp_path, print)
    with ThreadPoolExecutor(1) as rank:  # as rank 0 of several has one
        rank.submit(torch.ones, 1).result()
        timeline.log(1, {})
        rank.submit(torch.cumsum, torch.ones(2), 0).result()
        timeline.close()
    assert b"aten::cumsum" in gzip.decompress(timeline.file.read_bytes())


def test_ranks_that_may_hang_are_not_asked_for_their_trace(tmp_path):
    """After a second Ctrl-C, say, while they sample."""
    calls = list[str]()

    def ranks(method, *args):
        calls.append(method)
        return lambda: (b"a trace", True)

    timeline = Timeline(tmp_path, print, ranks)
    timeline.log(1, {})
    with pytest.raises(KeyboardInterrupt), timeline:
        raise KeyboardInterrupt
    assert calls == ["trace"]
    assert not timeline.file.exists()
    with Timeline(tmp_path, print, ranks) as timeline:
        timeline.log(1, {})
    assert calls[1:] == ["trace", "traced"]
    assert timeline.file.read_bytes() == b"a trace"
