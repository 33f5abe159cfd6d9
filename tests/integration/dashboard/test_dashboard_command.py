"""`rlloop dashboard` as a process, and what it refuses."""

import json
import signal
import subprocess
import sys

import httpx
import pytest

from rlloop.cli.main import main
from tests.support.dashboard_runs import serving, write_run


def test_serves_tells_what_happens_and_ends_at_once(tmp_path):
    writer = write_run(tmp_path / "a", 1, finished=False)
    with serving(tmp_path) as (process, address, token), httpx.Client(base_url=address, timeout=60) as client:
        assert len(token) > 20
        assert client.get("/").status_code == 401
        assert client.get(f"/?token={token}", follow_redirects=True).status_code == 200
        with client.stream("GET", "/api/events") as events:
            lines = events.iter_lines()
            assert next(lines) == "event: runs"
            while next(lines) != "event: changed":
                pass
            writer.write()
            while True:
                line = next(lines)
                if line.startswith("data: ") and any(run["step"] == 2 for run in json.loads(line[6:])["runs"]):
                    break
            process.send_signal(signal.SIGINT)  # with a listener still there
            assert process.wait(timeout=240) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_the_demo_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving("--demo") as (process, address, token):
        assert list(tmp_path.iterdir())
        found = httpx.get(f"{address}/api/runs", headers={"authorization": f"Bearer {token}"}, timeout=60).json()
        assert {run["status"] for run in found["runs"]} == {"live", "finished"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 0
        assert list(tmp_path.iterdir()) == []


def test_no_torch_and_nothing_written_below_the_runs(tmp_path):
    write_run(tmp_path / "runs" / "a", 2)
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    program = f"""
import asyncio, sys
from httpx import ASGITransport, AsyncClient
from pathlib import Path
from rlloop.cli import dashboard
from rlloop.dashboard import demo, workspace
from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.web.server import Guard, Listen
async def main():
    dashboard = Dashboard(Path({str(tmp_path / "runs")!r}))
    headers = {{"authorization": "Bearer " + 16 * "t"}}
    transport = ASGITransport(Guard(make_app(dashboard), Listen(token=16 * "t", browser=True)))
    async with AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("runs", "totals?run=a", "rollouts?run=a&step=1", "rollout?run=a&step=1&line=0", "log?run=a"):
            assert (await client.get("/api/" + path, headers=headers)).status_code == 200, path
    dashboard.close()
asyncio.run(main())
print([name for name in ("torch", "ray", "transformers", "numba", "wandb") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    assert sorted(str(file) for file in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a folder of runs"),
        (["runs", "--demo"], "--demo shows recorded runs, runs other ones; give only one of the two"),
        (["no/such/folder"], "no/such/folder does not exist; name a folder"),
        ([".", "--port", "70000"], "the port is 70000; it must be 0 (any free one) to 65535"),
        ([".", "--token", "short"], "the token has 5 characters; it must have at least 16"),
        (["--wandb", "mine"], "it must be ENTITY/PROJECT"),
        ([".", "--alert", "failed"], "--alert and --webhook belong together"),
        ([".", "--webhook", "http://x"], "--alert and --webhook belong together"),
        ([".", "--alert", "odd", "--webhook", "http://x"], "'odd' is no condition of an alert"),
        ([".", "--alert", "failed", "--webhook", "x"], "it must be an address"),
        (["--api", "localhost"], "it must be the address of `rlloop serve api`"),
        ([".", "--api", "http://x", "--api-key-file", "no-file"], "no-file cannot be read"),
    ],
)
def test_refusals(capsys, arguments, message):
    assert main(["dashboard", *arguments]) == 2
    assert message in capsys.readouterr().err
