"""`rlloop dashboard`: serve a folder of runs, or a recorded one, until Ctrl-C."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rlloop.errors import ConfigError

ABOUT = """\
Look at runs in a browser: train-inference KL, clipping, reward and everything else a run records, live or finished.

Reads the runs' files and never touches a run. The address that is printed carries a token; who has it may read.
"""

EXAMPLES = """\
examples:
  rlloop dashboard runs                      every run below runs/
  rlloop dashboard --demo                    a recorded run, and another one as it goes
  rlloop dashboard runs --port 0             a free port
  rlloop dashboard --wandb ENTITY/PROJECT    the same panels as a workspace of Weights & Biases

On another machine: ssh -L 8642:127.0.0.1:8642 THAT_MACHINE, and open the address here.
Prometheus scrapes /metrics with the token as its bearer: authorization: {credentials: TOKEN}.
"""


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse_args(arguments)
    if given.wandb is not None:
        from rlloop.dashboard.workspace import save

        print(save(given.wandb))
        return 0
    if given.demo and given.runs is not None:
        raise ConfigError(f"--demo shows recorded runs, and {given.runs} would be others; give one of the two")
    if given.runs is None and not given.demo:
        raise ConfigError("name a folder of runs, as in `rlloop dashboard runs`, or look around with --demo")
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the dashboard needs the package {package}: pip install 'rlloop[dashboard]'")
    if given.runs is not None and not given.runs.is_dir():
        found = "is a file" if given.runs.exists() else "does not exist"
        raise ConfigError(f"{given.runs} {found}; name the folder in which runs are, or one run's own")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: nothing stays behind
    with ExitStack() as stack:
        note = ""
        if given.demo:
            from rlloop.dashboard.demo import recorded_runs

            given.runs, note = stack.enter_context(recorded_runs())
        return _serve(given, note)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlloop dashboard",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="?", metavar="RUNS_DIR", help="a folder of runs, or one run's folder")
    parser.add_argument("--demo", action="store_true", help="show recorded runs; one of them is replayed as if live")
    parser.add_argument("--port", type=int, default=8642, help="0 picks a free one (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine only)")
    parser.add_argument(
        "--token", default=os.environ.get("RLLOOP_DASHBOARD_TOKEN"),
        help="default: RLLOOP_DASHBOARD_TOKEN of the environment, or a new one each time",
    )  # fmt: skip
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="another name under which it is asked for, such as a proxy's; this machine's own always are",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open a browser")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="make a workspace of these panels there, and stop")
    return parser


def _serve(given: argparse.Namespace, note: str) -> int:
    import uvicorn

    from rlloop.dashboard.guard import LOOPBACK
    from rlloop.dashboard.live import Dashboard
    from rlloop.dashboard.server import make_app

    token = given.token or secrets.token_urlsafe(24)
    dashboard = Dashboard(given.runs, note=note)
    listener = _listen(given.host, given.port)
    port = listener.getsockname()[1]
    local = given.host in LOOPBACK
    hosts = [*LOOPBACK, *map(str.lower, given.allow_host)] if local or given.allow_host else None
    app = make_app(dashboard, token, port, hosts)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            dashboard.close()  # else open event streams would keep it waiting
            await super().shutdown(sockets)

    host = f"[{given.host}]" if ":" in given.host else given.host
    address = f"http://{host}:{port}/?token={token}"
    count = len(dashboard.runs.find())
    print(f"{'1 run' if count == 1 else f'{count} runs'} in {given.runs}\n\n  {address}\n\nCtrl-C ends it.", flush=True)
    if not local:
        print(
            f"It listens on {given.host}, without encryption: whoever can read the network can read the token. A "
            "tunnel (ssh -L) or a proxy with TLS is safer.",
            file=sys.stderr,
        )
    if given.open:
        webbrowser.open(address)
    with listener, suppress(KeyboardInterrupt):
        Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # who opens the address as soon as it is printed waits, and is not refused
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}; choose another --port (0: a free one)"
        ) from None
    return listener
