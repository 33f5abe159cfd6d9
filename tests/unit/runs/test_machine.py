import time

from rlloop.runs import machine
from rlloop.runs.machine import MachineUse


def test_the_machines_use_by_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "EVERY", 0.01)
    use = MachineUse(tmp_path)
    until = time.monotonic() + 20
    while "system/cpu" not in use.latest() and time.monotonic() < until:
        time.sleep(0.01)
    began = time.perf_counter()
    found = use.latest()
    assert time.perf_counter() - began < 1e-3  # a step waits for nothing
    use.close()
    assert not use._thread.is_alive()
    assert 0 <= found["system/cpu"] <= 1
    assert 0 < found["system/memory"] < 1
    assert found["system/process_bytes"] > 1e6
    assert found["system/disk_free_bytes"] > 0


def test_what_a_machine_does_not_tell_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROC", tmp_path)
    use = MachineUse(tmp_path)
    use.close()
    assert set(use._sample()) - {name for name in use._sample() if "gpu" in name} == {"system/disk_free_bytes"}
