"""The `rlloop` command. Imports nothing heavy until a command needs it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlloop import __version__
from rlloop.cli.parser import COMPLETING, Help, Parser, completed_command
from rlloop.errors import RlloopError

OVERVIEW = """\
On-policy reinforcement learning for language models with zero train-inference KL, bit for bit.

commands:
  init       write a recipe to fill in, with data and a reward to replace
  train      train a model by a recipe; resume a run; sweep over settings
  eval       score a checkpoint on held-out prompts
  generate   complete a prompt, or chat with a checkpoint
  dashboard  show runs in a browser, live or finished
  compare    compare runs: outcomes, collapse, and the settings that differ
  verify     check a run's records for errors and tampering, and draw its tokens again
  parity     compare two definitions of a model: KL, and the first operation that differs
  delta      measure a weight sync from one checkpoint to another
  serve      start a server: engine, relay, trainer, proxy, or the training API
  shapes     list training shapes: models, accelerators, memory
  doctor     show what this machine can do, and how to get the rest
"""

EXAMPLES = """\
examples:
  rlloop train countdown
  rlloop train countdown trainer.num_steps=200 seed=1 run.dir=runs/mine
  rlloop train countdown -m seed=0,1,2            three runs, one after the other
  rlloop train countdown --cfg job                print the whole configuration

`rlloop COMMAND --help` explains a command. --full-error (or RLLOOP_TRACEBACK=1) shows tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # so that a user's rewards and tasks can be imported by dotted path
    full_error = "--full-error" in arguments or os.environ.get("RLLOOP_TRACEBACK") == "1"
    try:
        return _dispatch([text for text in arguments if text != "--full-error"])
    except RlloopError as error:
        if full_error:
            traceback.print_exc()
        print(f"rlloop: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rlloop: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `rlloop ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: list[str]) -> int:
    if (completed := completed_command(NAMES)) is not None:
        return COMMANDS[completed]([])
    parser = Parser(
        prog="rlloop",
        usage="rlloop [-h] [--version] COMMAND ...",
        description=OVERVIEW,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"rlloop {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    if not arguments and COMPLETING not in os.environ:
        parser.print_help()
        return 2
    chosen = parser.parse_args(arguments[:1])
    return COMMANDS[chosen.command](arguments[1:])


def _call(module: str, arguments: list[str]) -> int:
    return importlib.import_module(f"rlloop.cli.{module}").main(arguments)


NAMES = (
    "init", "train", "eval", "generate", "verify", "compare", "dashboard", "delta", "doctor", "serve", "shapes",
    "parity",
)  # fmt: skip
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    name: partial(_call, "serve_options" if name == "serve" else name) for name in NAMES
}


if __name__ == "__main__":
    sys.exit(main())
