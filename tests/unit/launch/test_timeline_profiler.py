"""What `profile=true` leaves in the process, and says of a trace without kernels."""

import os

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
