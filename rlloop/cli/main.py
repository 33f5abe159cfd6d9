"""The `rlloop` command. Imports nothing heavy until a command needs it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlloop import __version__
from rlloop.errors import ConfigError, RlloopError

if TYPE_CHECKING:
    from rlloop.launch.run import Job

SHOWN_PROBLEMS = 20  # of one check

OVERVIEW = """\
On-policy reinforcement learning for language models with zero train-inference KL, bit for bit.

commands:
  train      run, resume or sweep a recipe
  verify     check a run's records against the certificate, and draw its tokens again
  compare    lay runs side by side: outcomes, verdicts, and the keys that differ
  dashboard  look at runs in a browser, live or finished
  delta      what a weight sync from one checkpoint to another weighs
  serve      engine, relay, trainer or proxy: the servers of a fleet
  parity     how far two engines, or engine and trainer, are apart, and what brings it
  doctor     what this machine can do, and what is missing for the rest
"""

EXAMPLES = """\
examples:
  rlloop train --config-name countdown
  rlloop train --config-name countdown trainer.num_steps=200 seed=1 run.dir=runs/mine
  rlloop train --config-name countdown -m seed=0,1,2        one run after the other
  rlloop train --config-name countdown --cfg job            the whole configuration, and stop
"""

TRAIN = """\
Run a recipe. Any key of its configuration is set by key=value (Hydra's override grammar: +key=value adds, ~key removes,
GROUP=NAME picks another entry, such as algorithm=dapo).

The same command with the same run.dir resumes, bit for bit; Ctrl-C leaves a run that can be resumed. Exit codes:
0 done, 1 failed on the way, 2 refused, 3 engine and trainer disagree (parity.mode=require), 130 interrupted.
"""

COMPARE = """\
Lay runs side by side: outcomes, whether each collapsed, and which keys of their configurations differ.

Runs whose configurations differ in the seed alone are one arm, with a band over its seeds. Collapse is judged by the
rule that the runs' own configurations declare (eval.collapse_fraction, eval.collapse_evals).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a user's own rewards and tasks, by dotted path
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
    parser = argparse.ArgumentParser(
        prog="rlloop",
        usage="rlloop [-h] [--version] COMMAND ...",
        description=OVERVIEW,
        epilog=EXAMPLES
        + "\n`rlloop COMMAND --help` says more. --full-error (or RLLOOP_TRACEBACK=1) shows a traceback.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlloop {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help()
        return 2
    chosen = parser.parse_args(arguments[:1])
    return COMMANDS[chosen.command](arguments[1:])


def _parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"rlloop {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# ------------------------------------------------------------------------------------------------ train


def _train(arguments: list[str]) -> int:
    parser = _parser("train", TRAIN, EXAMPLES + "\n" + _listed_recipes())
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="the recipe: NAME, or NAME/VARIANT")
    parser.add_argument("--multirun", "-m", action="store_true", help="run every combination of key=a,b,c")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed configuration, and stop")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what to change of the recipe")
    given = parser.parse_intermixed_args(arguments)
    if given.config_name is None:
        raise ConfigError(f"which recipe? Name one by --config-name NAME\n{_listed_recipes()}")

    from rlloop.launch.compose import compose_recipe, expand_sweep

    jobs = expand_sweep(given.overrides) if given.multirun else [("", given.overrides)]
    if given.cfg:
        from omegaconf import OmegaConf

        for name, overrides in jobs:
            print(f"# {name}\n" if name else "", end="")
            print(OmegaConf.to_yaml(compose_recipe(given.config_name, overrides), resolve=given.resolve), end="")
        return 0
    return _run_jobs(_make_jobs(given.config_name, jobs))


def _make_jobs(recipe: str, sweep: Sequence[tuple[str, list[str]]]) -> list[Job]:
    """Every job of a sweep, composed and checked before the first one starts."""
    from rlloop.launch.compose import as_container, build, compose_recipe

    default = Path("runs") / recipe / time.strftime("%Y-%m-%d_%H-%M-%S")
    checked = []
    for name, overrides in sweep:
        composed = compose_recipe(recipe, overrides)
        config = build(composed)
        if config.run.dir == "":
            raise ConfigError("run.dir is empty; it must be a folder, or null for runs/<recipe>/<time>")
        folder = (default if config.run.dir is None else Path(config.run.dir)) / name
        config.run.dir = composed.run.dir = str(folder)
        again = [text for text in overrides if not text.startswith("run.dir=")]
        command = shlex.join(["rlloop", "train", "--config-name", recipe, *again, f"run.dir={_quoted(folder)}"])
        checked.append((recipe, config, as_container(composed), folder, command))

    from rlloop.launch.run import Job  # brings torch, which no mistake in a configuration should have to wait for

    return [Job(*fields) for fields in checked]


def _quoted(folder: Path) -> str:
    """As an override's value: a multirun names its folders with characters of the override grammar."""
    return f'"{folder}"' if set(str(folder)) & set("=, ") else str(folder)


def _run_jobs(jobs: Sequence[Job]) -> int:
    """One after the other. A job that fails does not keep the others from running; an interrupt ends the sweep."""
    from rich.console import Console

    from rlloop.launch.run import INTERRUPTED, train

    console = Console()
    code = 0
    for index, job in enumerate(jobs, start=1):
        if len(jobs) > 1:
            console.rule(f"{index}/{len(jobs)}  {job.folder.name}")
        try:
            ended = train(job, console)
        except RlloopError as error:
            if len(jobs) == 1:
                raise
            print(f"rlloop: {error}", file=sys.stderr)
            ended = error.exit_code
        if ended == INTERRUPTED:
            return ended
        code = code or ended
    return code


def _listed_recipes() -> str:
    from rlloop import recipes

    have = recipes.available()
    return "recipes:\n" + ("\n".join(f"  {name}  ({file})" for name, file in have.items()) or "  (none found)")


# ------------------------------------------------------------------------------------------------ looking at runs


def _verify(arguments: list[str]) -> int:
    parser = _parser(
        "verify",
        "Check a run's records against each other, the certificate, and what they must come to. Exit code 1 where "
        "something does not hold. docs/runs.md says what that proves.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--rescore", type=int, default=512, metavar="N",
        help="completions to draw and score again under the weights that made them, bit for bit; default 512, 0: none",
    )  # fmt: skip
    parser.add_argument(
        "--rewards", type=_number_or_all, default=1000, metavar="N",
        help="completions whose reward is given again: a number or all; default 1000, 0: none",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="every completion, in both")
    parser.add_argument("--replay", action="store_true", help="train the run again beside, and compare every record")
    parser.add_argument(
        "--run-code", action="store_true",
        help="call the task and the reward that the run names, though they are not rlloop's: that may be any code",
    )  # fmt: skip
    parser.add_argument("--public-key", type=Path, metavar="FILE", help="of certificate.key, PEM or hexadecimal")
    parser.add_argument("--witness", type=Path, metavar="FILE", help="what certificate.witness wrote down")
    given = parser.parse_args(arguments)

    from rich.console import Console

    from rlloop.audit import Extent, verify

    extent = Extent(
        rescored=None if given.all else given.rescore,
        rewarded=None if given.all else given.rewards,
        run_code=given.run_code,
        replay=given.replay,
        public_key=given.public_key,
        witness=given.witness,
    )
    problems = 0
    with Console(stderr=True).status("reading") as status:
        for check in verify(given.run, extent, status.update):
            print(f"{'ok ' if not check.problems else 'BAD'} {check.name}: {check.summary}", flush=True)
            for problem in check.problems[:SHOWN_PROBLEMS]:
                print(f"      {problem}")
            if (more := len(check.problems) - SHOWN_PROBLEMS) > 0:
                print(f"      and {more} more")
            problems += len(check.problems)
    return 1 if problems else 0


def _number_or_all(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


def _compare(arguments: list[str]) -> int:
    parser = _parser("compare", COMPARE)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs' folders, or a multirun's")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="also write a report: .html (with its pictures and data beside it), or .png (curves only)",
    )  # fmt: skip
    given = parser.parse_args(arguments)

    from rlloop.study.compare import compare

    compare(given.runs, given.output)
    return 0


def _delta(arguments: list[str]) -> int:
    parser = _parser("delta", "What a weight sync from checkpoint A to B weighs, beside other codecs and the entropy.")
    parser.add_argument("old", type=Path, metavar="A", help="a Hugging Face folder with safetensors")
    parser.add_argument("new", type=Path, metavar="B", help="the same model, some steps later")
    parser.add_argument("--tensors", action="store_true", help="a line for each tensor, too")
    parser.add_argument(
        "--bfloat16", action="store_true",
        help="round float32 to it first: a run's checkpoints are float32, engines of model.dtype=bfloat16 are not",
    )  # fmt: skip
    given = parser.parse_args(arguments)

    from rlloop.cli.delta_size import Sizes, compare, describe, read_pair, version_bytes

    old, new = read_pair(given.old, given.new, given.bfloat16)
    total = Sizes()
    for name, tensor in compare(old, new):
        if given.tensors:
            changed = 100 * tensor.changed / max(1, tensor.elements)
            print(f"{name}: {tensor.full:,} bytes, {changed:.3g}% changed, {tensor.delta:,} bytes of delta")
        total += tensor
    print("\n".join(describe(total, *version_bytes(old, new))))
    return 0


def _doctor(arguments: list[str]) -> int:
    parser = _parser(
        "doctor",
        "What this machine can do, and what is missing for the rest. Exit code 1 where its CPU does not hold zero KLD.",
    )
    parser.parse_args(arguments)

    from rlloop.cli.machine_check import examine

    broken = 0
    for line in examine():
        mark = {True: "ok ", False: "-- ", None: "   "}[line.holds]
        print(f"{mark} {line.subject}: {line.text}", flush=True)
        broken += line.subject.startswith("zero KLD") and not line.holds
    return 1 if broken else 0


def _serve(arguments: list[str]) -> int:
    from rlloop.cli.serve import command

    return command(arguments)


def _parity(arguments: list[str]) -> int:
    from rlloop.cli.parity import main as parity

    return parity(arguments)


def _dashboard(arguments: list[str]) -> int:
    from rlloop.cli.dashboard import main as dashboard

    return dashboard(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "verify": _verify,
    "compare": _compare,
    "dashboard": _dashboard,
    "delta": _delta,
    "doctor": _doctor,
    "serve": _serve,
    "parity": _parity,
}


if __name__ == "__main__":
    sys.exit(main())
