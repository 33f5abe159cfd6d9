import timeit

from rlloop.runs import machine
from rlloop.runs.machine import MachineUse
from tests.support.waiting import until


def test_the_machines_use_by_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "EVERY", 0.01)
    use = MachineUse(tmp_path)
    until(lambda: "system/cpu" in use.latest())
    assert min(timeit.repeat(use.latest, number=1, repeat=20)) < 1e-3  # a step waits for nothing
    found = use.latest()
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
