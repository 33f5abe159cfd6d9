"""`rlloop eval`: a checkpoint's score on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError

EVAL = """\
Score a model on the held-out prompts of a task, with the task's reward: a run's best checkpoint, one of its
checkpoints, or any Hugging Face folder with --config-name. Prompts and seeds are those of the run's own evaluations, so
the result for a checkpoint is the one that the run recorded, with as many draws. Imports the task and reward that the
run names.
"""

EVAL_EXAMPLES = """\
examples:
  rlloop eval runs/mine                                      the best checkpoint, on the run's task
  rlloop eval runs/mine/checkpoints/step_50 --draws 5000
  rlloop eval my-model --config-name custom data.path=rows.jsonl reward._target_=mine.reward
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("eval", EVAL, EVAL_EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a checkpoint's, or a model's")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="recipe with task and reward (default: the run's)")
    parser.add_argument("--draws", type=int, metavar="N", help="held-out completions (default: eval.num_draws)")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: eval.temperature")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write each completion: JSONL")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --config-name: settings of the recipe")
    args = parser.parse_intermixed_args(arguments)
    if args.overrides and args.config_name is None:
        raise ConfigError(f"{args.overrides[0]!r} changes a recipe's setting; name the recipe by --config-name")
    if args.draws is not None and args.draws < 1:
        raise ConfigError(f"--draws is {args.draws}; it must be at least 1")

    from rlloop.launch.evaluate import evaluate

    result = evaluate(args.model, args.config_name, args.overrides, args.draws, args.temperature)
    print(result.describe())
    if args.output is not None:
        args.output.write_text("".join(json.dumps(row) + "\n" for row in result.rows))
        print(f"completions: {args.output}")
    return 0
