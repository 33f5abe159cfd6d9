"""launch=ray: the same bits as launch=local whatever the number of engines, even when one is killed in mid-run."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.command import free_port
from tests.support.ray_processes import left_behind, ray_processes
from tests.support.tiny_run import held, history, make_model, steps, train
from tests.support.waiting import until

pytest.importorskip("ray")

SUITE = uuid.uuid4().hex  # two suites on one machine do not see each other's processes


def workers(owner: str) -> dict[int, str]:
    """Ray's processes of one run of this suite: pid -> command line."""
    return ray_processes(f"{SUITE}/{owner}")


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def listening(pids: Iterable[int]) -> list[tuple[str, str]]:
    """(address, port) in the kernel's digits, of each socket on which one of the processes listens."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = tuple(fields[1].split(":"))
    found = []
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                name = str(descriptor.readlink())
            except OSError:
                continue  # closed meanwhile
            if name in sockets:
                found.append(sockets[name])
    return found


def finish(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def same(folder: Path, other: Path) -> None:
    assert history(folder) == history(other)
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
        files = [run / "checkpoints" / "step_6" / name for run in (folder, other)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "local"
    finish(train(folder))
    return folder


def test_three_engines_and_a_killed_one_give_the_bits_of_a_local_run(tmp_path, monkeypatch, local):
    monkeypatch.setenv("RLLOOP_TEST_RUN", f"{SUITE}/three")
    run = tmp_path / "three"
    with held(run, 2):
        process = train(run, "launch=ray", "ray.replicas=2", "ray.cpus_per_worker=0.5")
        until(lambda: steps(run) == 2, process)
        victims = [pid for pid, command in workers("three").items() if "ray::Replica" in command]
        assert victims, "no replica was there to be killed"
        heard = listening(workers("three"))
        assert len(heard) > 3
        assert [each for each in heard if each[0] not in LOOPBACK] == []
        os.kill(victims[0], signal.SIGKILL)
    finish(process)
    same(run, local)
    assert not left_behind(f"{SUITE}/three"), "processes were left behind"
    assert steps(run) == 7


ATTACHED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64, "RLLOOP_TEST_RUN": f"{SUITE}/cluster"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that somebody else started, which asks for a token. Its address."""
    place = tmp_path_factory.mktemp("cluster")
    port = free_port()
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    with (place / "ray.log").open("w") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ATTACHED})
    while head.poll() is None and "Ray runtime started" not in (place / "ray.log").read_text():
        time.sleep(0.05)
    assert head.poll() is None, (place / "ray.log").read_text()
    yield f"127.0.0.1:{port}"
    head.send_signal(signal.SIGTERM)
    head.wait(timeout=240)


def test_a_running_cluster_is_attached_to_by_address_and_left_running_and_empty(tmp_path, local, cluster):
    """By a run whose trainer has the only engine."""
    attached = ("launch=ray", "ray.replicas=0", f"ray.address={cluster}")
    finish(train(tmp_path / "attached", *attached, env={**os.environ, **ATTACHED}))
    same(tmp_path / "attached", local)
    left = workers("cluster").values()
    assert any("raylet" in command for command in left), "the cluster is not ours to stop"
    assert not any("ray::Replica" in command or "ray::Colocated" in command for command in left)


def test_an_address_where_nobody_listens_is_refused_at_once(tmp_path):
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        process = train(tmp_path / "run", "launch=ray", f"ray.address={address}")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"no Ray cluster answers at ray.address={address}: [Errno" in output


def test_a_worker_that_cannot_start_says_why_with_its_exit_code(tmp_path, cluster):
    make_model(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    attached = ("launch=ray", "ray.replicas=0", f"ray.address={cluster}")
    process = train(tmp_path / "run", *attached, env={**os.environ, **ATTACHED})
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert not (tmp_path / "run").exists(), "nothing was recorded"
    *_, last = output.strip().splitlines()
    assert last.startswith("rlloop: trainer could not start: "), output
    assert "model.safetensors" in last
