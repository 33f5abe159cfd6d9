"""`rlloop dashboard`: serves a folder of runs, or recorded ones, until Ctrl-C."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError
from rlloop.runs.alerts import Condition, check_webhook

ABOUT = """\
Show runs in a browser: train-inference KL, clipping, reward and everything else that a run records, live or finished.

It only reads the runs' files. Open the address that it prints: it contains the token that every request needs.
"""

EXAMPLES = """\
examples:
  rlloop dashboard runs                      every run below runs/
  rlloop dashboard --demo                    recorded runs, one of them replayed as if live
  rlloop dashboard runs --port 0             use any free port
  rlloop dashboard runs --alert failed --alert 'silent 10' --webhook https://hooks.example/...
  rlloop dashboard --api http://127.0.0.1:8700    sessions of a training API
  rlloop dashboard --wandb ENTITY/PROJECT    create the same panels as a workspace of Weights & Biases

On another machine: ssh -L 8642:127.0.0.1:8642 THAT_MACHINE, and open the address here.
Prometheus scrapes /metrics with the token as its bearer: authorization: {credentials: TOKEN}.
"""


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    if args.wandb is not None:
        from rlloop.dashboard.workspace import save

        print(save(args.wandb))
        return 0
    if args.demo and args.runs is not None:
        raise ConfigError(f"--demo shows recorded runs, {args.runs} other ones; give only one of the two")
    if args.runs is None and not args.demo and args.api is None:
        raise ConfigError("name a folder of runs, as in `rlloop dashboard runs`, or use --demo or --api")
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the dashboard needs the package {package}: pip install 'rlloop[dashboard]'")
    if args.runs is not None and not args.runs.is_dir():
        problem = "is a file" if args.runs.exists() else "does not exist"
        raise ConfigError(f"{args.runs} {problem}; name a folder that contains runs, or one run's folder")
    conditions = [Condition.parse(text) for text in args.alert]
    if bool(conditions) != (args.webhook is not None):
        raise ConfigError("--alert and --webhook belong together: a condition, and where to post it")
    if conditions:
        check_webhook(args.webhook)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # shut down as with Ctrl-C
    with ExitStack() as stack:
        note = ""
        if args.demo:
            from rlloop.dashboard.demo import recorded_runs

            args.runs, note = stack.enter_context(recorded_runs())
        elif args.runs is None:
            args.runs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlloop-no-runs-")))
        return _serve(args, note)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("dashboard", ABOUT, EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="?", metavar="RUNS_DIR", help="a folder of runs, or one run's folder")
    parser.add_argument("--demo", action="store_true", help="show recorded runs; one of them is replayed as if live")
    parser.add_argument("--port", type=int, default=8642, help="0 picks a free one (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine only)")
    parser.add_argument(
        "--token", default=os.environ.get("RLLOOP_DASHBOARD_TOKEN"),
        help="token that requests need (default: $RLLOOP_DASHBOARD_TOKEN, else a new one each time)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="another host name to answer for, such as a proxy's; may be given several times",
    )  # fmt: skip
    parser.add_argument("--api", metavar="URL", help="also show the sessions of a training API (rlloop serve api)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="the API's key (default: $RLLOOP_API_KEY); an operator's shows the sessions of all clients",
    )  # fmt: skip
    parser.add_argument(
        "--alert", action="append", default=[], metavar="CONDITION",
        help="post to --webhook when it becomes true of a live run: 'eval/solved < 0.1', 'reward/mean < 0.05 for 20' "
        "(records in a row), 'silent 10' (minutes), 'failed'; may be given several times",
    )  # fmt: skip
    parser.add_argument("--webhook", metavar="URL", help="where alerts are posted, as JSON with the key `text`")
    parser.add_argument("--open", action="store_true", help="open the address in a browser")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="create a workspace with these panels and exit")
    return parser


def _api_key(args: argparse.Namespace) -> str | None:
    """The first word of the key's file, which may be the API's own file of keys; else RLLOOP_API_KEY."""
    if args.api_key_file is None:
        return os.environ.get("RLLOOP_API_KEY") or None
    try:
        lines = [line.partition("#")[0].split() for line in args.api_key_file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key's file {args.api_key_file} cannot be read: {error}") from None
    operators = [words for words in lines if "operator" in words[2:]] or [words for words in lines if words]
    if not operators:
        raise ConfigError(f"the key's file {args.api_key_file} holds no key")
    return operators[0][0]


def _serve(args: argparse.Namespace, note: str) -> int:
    from rlloop.dashboard.live import Dashboard
    from rlloop.dashboard.server import make_app
    from rlloop.dashboard.training_api import TrainingApi
    from rlloop.web.server import Listen, is_loopback, serve

    token = args.token or secrets.token_urlsafe(24)
    listen = Listen(args.host, args.port, token, browser=True, names=tuple(args.allow_host))
    dashboard = Dashboard(args.runs, note=note, api=None if args.api is None else TrainingApi(args.api, _api_key(args)))

    def announce(url: str) -> None:
        address, count = f"{url}/?token={token}", len(dashboard.runs.find())
        runs = "1 run" if count == 1 else f"{count} runs"
        print(f"{runs} in {args.runs}\n\n  {address}\n\nCtrl-C ends it.", flush=True)
        if not is_loopback(args.host):
            print(
                f"It listens on {args.host} without encryption: anyone who can read the network traffic can read the "
                "token. A tunnel (ssh -L) or a proxy with TLS is safer.",
                file=sys.stderr,
            )
        if args.open:
            webbrowser.open(address)

    if args.alert:
        from rlloop.dashboard.watch import Watch

        Watch(dashboard.runs, args.webhook, [Condition.parse(text) for text in args.alert]).start()
    with suppress(KeyboardInterrupt):
        serve(make_app(dashboard), listen, announce, dashboard.close)  # open event streams would delay the shutdown
    return 0
