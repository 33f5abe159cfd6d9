"""`rlloop train`: its arguments, and the jobs of a sweep one after the other."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rlloop.cli.parser import new_parser, recipe_names, settings
from rlloop.errors import ConfigError, RlloopError
from rlloop.parallel.layout import is_other_rank

if TYPE_CHECKING:
    from rlloop.launch.run import Job
    from rlloop.launch.torchrun import Leader

TRAIN_EXAMPLES = """\
examples:
  rlloop train countdown
  rlloop train countdown trainer.num_steps=200 seed=1 run.dir=runs/mine
  rlloop train countdown -m seed=0,1,2            three runs, one after the other
  rlloop train countdown --cfg job                print the whole configuration
  rlloop train countdown --dry-run                build everything, and take no step
"""

TRAIN = """\
Train a model by a recipe. key=value sets any key of its configuration (Hydra's override grammar: +key=value adds a key,
~key removes one, GROUP=NAME chooses another entry of a group, such as algorithm=dapo).

The same command with the same run.dir resumes the run, bit for bit. Ctrl-C ends a run so that it can be resumed.
Exit codes: 0 done, 1 failed during the run, 2 refused before it, 3 engine and trainer differ (parity.mode=require),
130 interrupted.
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("train", TRAIN, TRAIN_EXAMPLES + "\n" + _listed_recipes())
    named = parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="recipe: NAME, NAME/VARIANT or a YAML file; may also stand first"
    )
    named.completer = recipe_names  # type: ignore[attr-defined]
    parser.add_argument("--multirun", "-m", action="store_true", help="run every combination of key=a,b,c")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="build everything, take no step, write nothing")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    changed = parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    changed.completer = settings  # type: ignore[attr-defined]
    args = parser.parse_intermixed_args(arguments)
    if args.config_name is None:
        words = [text for text in args.overrides if "=" not in text and not text.startswith("~")]
        if not words:
            raise ConfigError(f"no recipe is named, as in `rlloop train NAME key=value`\n{_listed_recipes()}")
        args.config_name = words[0]
        args.overrides.remove(words[0])

    from rlloop.launch.compose import compose_recipe, expand_sweep

    jobs = expand_sweep(args.overrides) if args.multirun else [("", args.overrides)]
    if args.cfg and is_other_rank():
        return 0
    if args.cfg:
        from omegaconf import OmegaConf

        for name, overrides in jobs:
            print(f"# {name}\n" if name else "", end="")
            print(OmegaConf.to_yaml(compose_recipe(args.config_name, overrides), resolve=args.resolve), end="")
        return 0
    execute = _rehearse_jobs if args.dry_run else _run_jobs
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return execute(_make_jobs(args.config_name, jobs))

    from rlloop.launch.torchrun import Leader, Torchrun, follow

    here = Torchrun.here()
    if here is not None and here.rank > 0:
        return follow(here)
    with nullcontext() if here is None else Leader(here) as leader:
        return execute(_make_jobs(args.config_name, jobs), leader)


def _make_jobs(recipe: str, sweep: Sequence[tuple[str, list[str]]]) -> list[Job]:
    """All jobs of a sweep, composed and checked before the first one starts."""
    from rlloop.launch.compose import as_container, build, compose_recipe

    default = Path("runs") / _run_name(recipe) / time.strftime("%Y-%m-%d_%H-%M-%S")
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

    from rlloop.launch.run import Job  # imports torch, so it comes after the configuration's checks

    return [Job(*fields) for fields in checked]


def _run_name(recipe: str) -> str:
    """The recipe's name; of a file its own, or its folder's if it is a config.yaml."""
    file = Path(recipe).absolute()
    if file.suffix not in (".yaml", ".yml"):
        return recipe
    return file.parent.name if file.stem == "config" else file.stem


def _quoted(folder: Path) -> str:
    """A folder as an override's value: quoted if its name has more than plain letters, as those of a multirun have."""
    return str(folder) if re.fullmatch(r"[\w./-]+", str(folder), re.ASCII) else f'"{folder}"'


def _rehearse_jobs(jobs: Sequence[Job], leader: Leader | None = None) -> int:
    from rich.console import Console

    from rlloop.launch.rehearsal import rehearse

    for job in jobs:
        rehearse(job, Console(), leader)
    return 0


def _run_jobs(jobs: Sequence[Job], leader: Leader | None = None) -> int:
    """Run jobs one after the other. After a failed one the next ones still run; an interrupt ends the sweep."""
    from rlloop.launch.run import INTERRUPTED, train
    from rlloop.runs.console import Output

    console = Output()
    code, failures = 0, list[str]()
    for index, job in enumerate(jobs, start=1):
        if len(jobs) > 1:
            console.rule(f"{index}/{len(jobs)}  {job.folder.name}")
        try:
            ended = train(job, console, leader)
        except RlloopError as error:
            if len(jobs) == 1:
                raise
            print(f"rlloop: {error}", file=sys.stderr)
            failures.append(f"{job.folder.name}: {error}")
            ended = error.exit_code
        if ended == INTERRUPTED:
            code = ended
            break
        code = code or ended
    if leader is not None and failures:
        from rlloop.launch.torchrun import tell_torchrun

        tell_torchrun("\n".join(failures))
    return code


def _listed_recipes() -> str:
    from rlloop import recipes

    have = recipes.available()
    return "recipes:\n" + ("\n".join(f"  {name}  ({file})" for name, file in have.items()) or "  (none found)")
