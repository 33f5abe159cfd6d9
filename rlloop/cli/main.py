"""The `rlloop` command. Imports nothing heavy until a command needs it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rlloop import __version__
from rlloop.errors import ConfigError, RlloopError

if TYPE_CHECKING:
    from rlloop.launch.run import Job
    from rlloop.launch.torchrun import Leader

SHOWN_PROBLEMS = 20  # of each check

OVERVIEW = """\
On-policy reinforcement learning for language models with zero train-inference KL, bit for bit.

commands:
  train      train a model by a recipe; resume a run; sweep over settings
  dashboard  show runs in a browser, live or finished
  compare    compare runs: outcomes, collapse, and the settings that differ
  verify     check a run's records for errors and tampering, and draw its tokens again
  parity     compare two definitions of a model: KL, and the first operation that differs
  delta      measure a weight sync from one checkpoint to another
  serve      start a server of a fleet: engine, relay, trainer or proxy
  doctor     show what this machine can do, and how to get the rest
"""

EXAMPLES = """\
examples:
  rlloop train --config-name countdown
  rlloop train --config-name countdown trainer.num_steps=200 seed=1 run.dir=runs/mine
  rlloop train --config-name countdown -m seed=0,1,2        three runs, one after the other
  rlloop train --config-name countdown --cfg job            print the whole configuration
"""

TRAIN = """\
Train a model by a recipe. key=value sets any key of its configuration (Hydra's override grammar: +key=value adds a key,
~key removes one, GROUP=NAME chooses another entry of a group, such as algorithm=dapo).

The same command with the same run.dir resumes the run, bit for bit. Ctrl-C ends a run so that it can be resumed.
Exit codes: 0 done, 1 failed during the run, 2 refused before it, 3 engine and trainer differ (parity.mode=require),
130 interrupted.
"""

COMPARE = """\
Compare runs: outcomes, whether each collapsed, and the settings that differ.

Runs that differ in the seed only are one arm, with a band over its seeds. Collapse is decided by the rule in the runs'
configurations (eval.collapse_fraction, eval.collapse_evals).
"""

COMPARE_EXAMPLES = """\
examples:
  rlloop compare runs/a runs/b
  rlloop compare runs/countdown/2026-01-01_12-00-00 -o report.html    a multirun's folder: all of its runs
"""

VERIFY = """\
Check a run's records against each other, against the certificate, and against values computed again. The run may be
running. docs/runs.md says what each check proves. Exit code: 0, or 1 if a check fails.
"""

VERIFY_EXAMPLES = """\
examples:
  rlloop verify runs/mine                  512 completions drawn again, 1,000 rewards computed again
  rlloop verify runs/mine --all            all of them
  rlloop verify runs/mine --replay         train the run again, and compare every record
"""

DELTA = """\
Measure a weight sync from checkpoint A to B: bytes by rlloop's codec, by other codecs, and by the entropy.
"""

DELTA_EXAMPLES = """\
example:
  rlloop delta runs/mine/checkpoints/step_50 runs/mine/checkpoints/step_100 --bfloat16
"""

DOCTOR = """\
Show what this machine can do (ok) and cannot do (--), and how to get the rest: zero KLD (equal bits) by dtype and
device, optional packages, vLLM. The first call compiles kernels. Exit code: 0, or 1 if the CPU or a GPU does not hold
zero KLD.

With --model and --gpus: the layouts over so many GPUs in which training this model fits, and the memory of a rank by
part, predicted from config.json. Exit code: 0, or 1 if none fits.
"""

DOCTOR_EXAMPLES = """\
example:
  rlloop doctor --model my-model --gpus 8 --memory 80
  rlloop doctor --model my-model --gpus 1 --memory 80 --offload masters
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
        + "\n`rlloop COMMAND --help` explains a command. --full-error (or RLLOOP_TRACEBACK=1) shows tracebacks.",
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
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="recipe: NAME, or NAME/VARIANT (required)")
    parser.add_argument("--multirun", "-m", action="store_true", help="run every combination of key=a,b,c")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed configuration and exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    given = parser.parse_intermixed_args(arguments)
    if given.config_name is None:
        raise ConfigError(f"no recipe is named; add --config-name NAME\n{_listed_recipes()}")

    from rlloop.launch.compose import compose_recipe, expand_sweep

    jobs = expand_sweep(given.overrides) if given.multirun else [("", given.overrides)]
    if given.cfg:
        from omegaconf import OmegaConf

        for name, overrides in jobs:
            print(f"# {name}\n" if name else "", end="")
            print(OmegaConf.to_yaml(compose_recipe(given.config_name, overrides), resolve=given.resolve), end="")
        return 0
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return _run_jobs(_make_jobs(given.config_name, jobs))

    from rlloop.launch.torchrun import Leader, Torchrun, follow

    here = Torchrun.here()
    if here is not None and here.rank > 0:
        return follow(here)
    with nullcontext() if here is None else Leader(here) as leader:
        return _run_jobs(_make_jobs(given.config_name, jobs), leader)


def _make_jobs(recipe: str, sweep: Sequence[tuple[str, list[str]]]) -> list[Job]:
    """All jobs of a sweep, composed and checked before the first one starts."""
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

    from rlloop.launch.run import Job  # imports torch, so mistakes in a configuration are reported before

    return [Job(*fields) for fields in checked]


def _quoted(folder: Path) -> str:
    """A folder as an override's value. A multirun's folders have characters of the override grammar in their names."""
    return f'"{folder}"' if set(str(folder)) & set("=, ") else str(folder)


def _run_jobs(jobs: Sequence[Job], leader: Leader | None = None) -> int:
    """Run jobs one after the other. After a failed one the next ones still run; an interrupt ends the sweep."""
    from rich.console import Console

    from rlloop.launch.run import INTERRUPTED, train

    console = Console()
    code = 0
    for index, job in enumerate(jobs, start=1):
        if len(jobs) > 1:
            console.rule(f"{index}/{len(jobs)}  {job.folder.name}")
        try:
            ended = train(job, console, leader)
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


# ------------------------------------------------------------------------------------------------ finished runs


def _verify(arguments: list[str]) -> int:
    parser = _parser("verify", VERIFY, VERIFY_EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--rescore", type=int, default=512, metavar="N",
        help="completions to draw and score again, bit for bit, under the stored weights (default: 512; 0: none)",
    )  # fmt: skip
    parser.add_argument(
        "--rewards", type=_number_or_all, default=1000, metavar="N",
        help="completions whose reward is computed again: a number, or all (default: 1000; 0: none)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="all completions, for --rescore and --rewards")
    parser.add_argument("--replay", action="store_true", help="train the run again elsewhere, and compare every record")
    parser.add_argument(
        "--run-code", action="store_true",
        help="call the task and reward that the run names even if they are not rlloop's; this may run any code",
    )  # fmt: skip
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE", help="public half of certificate.key, PEM or hexadecimal"
    )
    parser.add_argument("--witness", type=Path, metavar="FILE", help="file written by certificate.witness")
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
    parser = _parser("compare", COMPARE, COMPARE_EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs' folders, or a multirun's")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="also write a report: .html (plus its pictures and data in files of the same name), or .png (curves only)",
    )  # fmt: skip
    given = parser.parse_args(arguments)

    from rlloop.study.compare import compare

    compare(given.runs, given.output)
    return 0


def _delta(arguments: list[str]) -> int:
    parser = _parser("delta", DELTA, DELTA_EXAMPLES)
    parser.add_argument("old", type=Path, metavar="A", help="a Hugging Face folder with safetensors")
    parser.add_argument("new", type=Path, metavar="B", help="the same model, some steps later")
    parser.add_argument("--tensors", action="store_true", help="also print a line for each tensor")
    parser.add_argument(
        "--bfloat16", action="store_true",
        help="round float32 to bfloat16 first: checkpoints are float32, engines of model.dtype=bfloat16 get bfloat16",
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
    parser = _parser("doctor", DOCTOR, DOCTOR_EXAMPLES)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="predict memory for this model; needs --gpus")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to lay it over")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of one GPU (default: this machine's)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--tokens", type=int, default=16384, metavar="T", help="of a micro-batch (default: 16384)")
    parser.add_argument(
        "--offload", choices=("none", "moments", "masters"), default="none", help="trainer.offload (default: none)"
    )
    given = parser.parse_args(arguments)
    if (given.model is None) != (given.gpus is None):
        raise ConfigError("--model and --gpus belong together, as in --model my-model --gpus 8")
    if given.model is None:
        from rlloop.cli.machine_check import examine

        lines = examine()
    else:
        if given.gpus < 1 or given.tokens < 1:
            raise ConfigError(f"--gpus is {given.gpus} and --tokens {given.tokens}; both must be at least 1")

        from rlloop.cli.memory import examine_model

        lines = examine_model(given.model, given.gpus, given.dtype, given.tokens, given.memory, given.offload)
    broken = 0
    for line in lines:
        mark = {True: "ok ", False: "-- ", None: "   "}[line.holds]
        print(f"{mark} {line.subject}: {line.text}", flush=True)
        broken += line.subject.startswith(("zero KLD", "fits")) and not line.holds
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
