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
Compare two definitions of one model on the same tokens: KL (k1, k3) by type of token, the first operation that differs,
and the effect of each numerics setting in which they differ. A model that reads images is compared on random pictures,
too: tokens of an image (part of it, or predicted from it), and of text beside one.

A and B are each one of:
  FOLDER[@PROFILE]           rlloop's definition of a Hugging Face folder; PROFILE is rlloop, stock, huggingface or
                             reference, with settings: FOLDER@rlloop,linear=stock,expert_combine=bf16_each
  engine:FOLDER[@PROFILE]    sampled by the embedded engine
  transformers:FOLDER        transformers' own model
  RUN                        a run's last rollout, with the engine's logprobs; against one of its checkpoints, the
                             completions that those very weights sampled, where there are any
  FILE.jsonl                 logprobs of another program: prompt_ids, token_ids, logprobs and optional token_types;
                             text alone
"""

EXAMPLES = """\
examples:
  rlloop parity my-model transformers:my-model         rlloop against transformers
  rlloop parity engine:my-model my-model --require         engine against trainer: exit code 3 if a bit differs
  rlloop parity my-vl my-vl@rlloop,expert_combine=bf16_each --images 8
"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 3 with --require if a bit differs."""
    args = _parser().parse_args(arguments)
    _refuse(args)

    from rich.console import Console

    from rlloop.parity_tool.report import compare, draw, show

    console = Console()
    report = compare(args.a, args.b, args.dtype, args.prompts, args.sequences, args.length, args.images)
    show(report, console)
    if args.output is not None:
        (args.output / "parity.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw(report, args.output / "parity.png")
        console.print(f"{args.output / 'parity.json'}, {args.output / 'parity.png'}", highlight=False)
    return 3 if args.require and not report.comparison.all.equal else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("parity", DESCRIPTION, EXAMPLES)
    parser.add_argument("a", metavar="A", help="the engine's side in the formulas")
    parser.add_argument("b", metavar="B", help="the trainer's side")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of models (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="sequences to score or continue: JSONL of prompt_ids and optional token_ids, token_types, images "
        "(a path or a data URI for each placeholder)",
    )  # fmt: skip
    parser.add_argument(
        "--sequences", type=int, default=8, metavar="N", help="number of random ones without --prompts (default: 8)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of a random one (default: 64, or the model's positions)"
    )
    parser.add_argument(
        "--images", type=int, metavar="N",
        help="number of random ones with a picture, for models that read images (default: 4 where both sides can)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write parity.json and parity.png there")
    parser.add_argument("--require", action="store_true", help="exit with code 3 if a bit differs")
    return parser


def _refuse(args: argparse.Namespace) -> None:
    for text in (args.a, args.b):
        path = text.removeprefix("engine:").removeprefix("transformers:")
        if not any(Path(name).exists() for name in (path, path.rsplit("@", 1)[0])):
            raise ConfigError(
                f"{text}: there is no {path}; give a model's folder, engine:FOLDER, transformers:FOLDER, a run's "
                "folder, or a file of logprobs"
            )
    for name, least in (("sequences", 1), ("length", 2), ("images", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    if args.prompts is not None and not args.prompts.is_file():
        raise ConfigError(f"--prompts is {str(args.prompts)!r}, which is not a file; give a JSONL file")
    if args.output is not None:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o is {str(args.output)!r}, which cannot be created: {error.strerror}") from None
