"""`rlloop init NAME`: a recipe to fill in, with rows and a reward to replace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError

INIT = """\
Write a recipe of your own to recipes/NAME in the working folder: its settings (config.yaml), a reward (reward.py) and
rows (rows.jsonl). It runs as written once it has a model; replace the rows and the reward by your own.
"""

INIT_EXAMPLES = """\
examples:
  rlloop init letters
  rlloop init sums --model ./Qwen3-0.6B
"""

CONFIG = """\
# {name}: a recipe of your own. Every key: rlloop train {name} --cfg job, and docs/configuration.md.
#
#   rlloop train {name} --dry-run       # builds everything and takes no step
#   rlloop train {name}                 # the same command with the same run.dir resumes

defaults:
  - /custom # rows of data, a chat template, a reward: what stands below is put over it
  - algorithm: grpo # or dapo, gspo, cispo, ...
  - _self_

model:
  path: {model} # a Hugging Face folder, such as one that `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` fetches

data:
  path: recipes/{name}/rows.jsonl # or .json, .csv, .parquet, a glob; prompt: a text, or messages

reward:
  _target_: recipes.{name}.reward.score # further keys are its arguments

rollout:
  num_prompts: 16 # of a step
  group_size: 8 # completions of a prompt
  max_tokens: 128

trainer:
  num_steps: 100
  lr: 1e-6 # ten times that or more for small models and adapters (model.lora.rank)

eval:
  every: 10
  num_draws: 100
"""

REWARD = '''\
"""The reward of this recipe: called with each completion; a number of 1 or more counts as solved."""

from rlloop import Example


def score(prompt: str, completion: str, example: Example) -> float:
    """1 where the row's answer is the completion's last word, else 0. `example.data` is the row."""
    words = completion.replace(".", " ").split()
    return float(bool(words) and words[-1] == str(example.data["answer"]))
'''


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("init", INIT, INIT_EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="of the recipe: letters, digits and _")
    parser.add_argument("--model", metavar="FOLDER", help="the model's folder, for model.path")
    args = parser.parse_args(arguments)
    if not args.name.isidentifier():
        raise ConfigError(f"{args.name!r} is not a recipe's name; use letters, digits and _, as in my_task")
    folder = Path("recipes") / args.name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name, or edit what is there")
    model = "???" if args.model is None else json.dumps(args.model)
    files = {
        "config.yaml": CONFIG.format(name=args.name, model=model),
        "reward.py": REWARD,
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in _rows()),
    }
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
        print(folder / file)
    then = args.name if args.model is not None else f"{args.name} model.path=FOLDER"
    print(
        f"To go on: replace rows and reward by your own, then\n  rlloop train {then} --dry-run\n  rlloop train {then}"
    )
    return 0


def _rows() -> list[dict[str, str]]:
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    return [{"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in sums]
