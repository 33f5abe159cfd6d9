"""`rlloop parity A B`: its arguments, checked before torch is imported."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")

DESCRIPTION = """\
Compare two definitions of one model on the same tokens: KL (k1, k3), the first operation that differs, and the effect
of each numerics setting in which they differ.

A and B are each one of:
  FOLDER[@PROFILE]           rlloop's definition of a Hugging Face folder; PROFILE is rlloop, stock, huggingface or
                             reference, with settings: FOLDER@rlloop,linear=stock,expert_combine=bf16_each
  engine:FOLDER[@PROFILE]    sampled by the embedded engine
  transformers:FOLDER        transformers' own model
  RUN                        a run's last rollout, with the engine's logprobs; against one of its checkpoints, the
                             completions that those very weights sampled, where there are any
  FILE.jsonl                 logprobs of another program: prompt_ids, token_ids, logprobs and optional token_types
"""

EXAMPLES = """\
examples:
  rlloop parity my-model transformers:my-model         rlloop against transformers
  rlloop parity engine:my-model my-model --require         engine against trainer: exit code 3 if a bit differs
"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 3 with --require if a bit differs."""
    given = _parser().parse_args(arguments)
    _refuse(given)

    from rich.console import Console

    from rlloop.parity_tool.report import compare, draw, show

    console = Console()
    report = compare(given.a, given.b, given.dtype, given.prompts, given.sequences, given.length)
    show(report, console)
    if given.output is not None:
        (given.output / "parity.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw(report, given.output / "parity.png")
        console.print(f"{given.output / 'parity.json'}, {given.output / 'parity.png'}", highlight=False)
    return 3 if given.require and not report.comparison.all.equal else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("parity", DESCRIPTION, EXAMPLES)
    parser.add_argument("a", metavar="A", help="the engine's side in the formulas")
    parser.add_argument("b", metavar="B", help="the trainer's side")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of models (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="sequences to score or continue: JSONL of prompt_ids and optional token_ids, token_types",
    )  # fmt: skip
    parser.add_argument(
        "--sequences", type=int, default=8, metavar="N", help="number of random ones without --prompts (default: 8)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of a random one (default: 64, or the model's positions)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write parity.json and parity.png there")
    parser.add_argument("--require", action="store_true", help="exit with code 3 if a bit differs")
    return parser


def _refuse(given: argparse.Namespace) -> None:
    for text in (given.a, given.b):
        path = text.removeprefix("engine:").removeprefix("transformers:")
        if not any(Path(name).exists() for name in (path, path.partition("@")[0])):
            raise ConfigError(
                f"{text}: there is no {path}; give a model's folder, engine:FOLDER, transformers:FOLDER, a run's "
                "folder, or a file of logprobs"
            )
    for name, least in (("sequences", 1), ("length", 2)):
        if getattr(given, name) is not None and getattr(given, name) < least:
            raise ConfigError(f"--{name} is {getattr(given, name)}; it must be at least {least}")
    if given.prompts is not None and not given.prompts.is_file():
        raise ConfigError(f"--prompts is {str(given.prompts)!r}, which is not a file; give a JSONL file")
    if given.output is not None:
        try:
            given.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o is {str(given.output)!r}, which cannot be created: {error.strerror}") from None
