"""`rlloop.GRPO(model, reward_funcs, train_dataset).train()`: a run in one line, with TRL's interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from rlloop.cache import cache_root
from rlloop.errors import ConfigError
from rlloop.launch.python import name_of, train
from rlloop.loop.own import Run
from rlloop.runs.folder import write_whole
from rlloop.types import Example, RewardResult

# f(prompts, completions, **columns) -> a number for each completion, as in TRL
RewardFunction = Callable[..., Sequence[float | None]]


class GRPO:
    """GRPO on a model's folder with reward functions and rows, by the recipe `custom` and the loop of `rlloop train`.

    def short(prompts, completions, **columns):
        return [-float(len(completion)) for completion in completions]

    run = rlloop.GRPO("my-model", short, [{"prompt": "Say a."}, ...], trainer={"num_steps": 50}).train()
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        train_dataset: str | Path | Iterable[Mapping[str, Any]],
        *,
        eval_dataset: str | Path | Iterable[Mapping[str, Any]] | None = None,
        reward_weights: Sequence[float] | None = None,
        callbacks: Sequence[Any] = (),
        **overrides: Any,
    ) -> None:
        """`model`: a Hugging Face folder. `reward_funcs`: one or several of the signature
        `f(prompts, completions, **columns) -> list[float]`, with the rows' other fields as columns; their sum, weighted
        by `reward_weights`, is the reward, and 1 or more counts as solved. Where a row's prompt is a list of messages,
        so are its prompt and its completion here.

        `train_dataset`, `eval_dataset`: rows with the field `prompt`, as a list of dictionaries, a `datasets.Dataset`,
        or a file that `data.path` reads. Without `eval_dataset` a tenth of the rows is held out. `overrides`: keys of
        the configuration, as for `rlloop.train`; `algorithm="dapo"` is another algorithm.
        """
        if isinstance(reward_funcs, str):
            raise ConfigError(f"reward_funcs is {reward_funcs!r}; it must be a function, or a list of functions")
        functions: list[Any] = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
        self.reward = BatchRewards(functions, reward_weights)
        self.callbacks, self.overrides = callbacks, dict(overrides)
        own = self.overrides.get("data", {})
        prompt_key = own.get("prompt_key", self.overrides.get("data.prompt_key", "prompt"))
        data = {"path": _file_of(train_dataset, "train_dataset", prompt_key)}
        if eval_dataset is not None:
            data["eval_path"] = _file_of(eval_dataset, "eval_dataset", prompt_key)
        self.overrides["data"] = {**data, **own}
        self.overrides["model"] = {"path": str(model), **self.overrides.get("model", {})}

    def train(self) -> Run:
        """Train, or resume in the same `run={"dir": ...}`. Raises what `rlloop.train` does."""
        return train("custom", callbacks=self.callbacks, reward=self.reward, **self.overrides)


class BatchRewards:
    """Functions of TRL's signature as one reward, called once a batch.

    Components: each function's value by its name, where there are several.
    """

    batched = True

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        """Raises `ConfigError` for objects that are not functions, and for a different number of weights."""
        if not functions or not all(map(callable, functions)):
            raise ConfigError(f"reward_funcs is {functions!r}; it must be a function, or a list of functions")
        self.functions, self.weights = list(functions), list(weights or [1.0] * len(functions))
        if len(self.weights) != len(functions):
            raise ConfigError(
                f"{len(self.weights)} reward_weights for {len(functions)} reward_funcs: give equally many"
            )
        names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        self.names = [name if names.count(name) == 1 else f"{name}_{at}" for at, name in enumerate(names)]
        self.__module__, self.__qualname__ = name_of(functions[0]).rpartition(".")[::2]
        self.func = functions[0]  # whose source file the run's records name

    def __call__(self, prompts: list[str], completions: list[str], examples: list[Example]) -> list[RewardResult]:
        rows = [example.data for example in examples]
        asked: list[Any] = [row.get("prompt", prompt) for row, prompt in zip(rows, prompts, strict=True)]
        written: list[Any] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(asked, completions, strict=True)
        ]
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        columns = {name: [row.get(name) for row in rows] for name in names}
        arguments = {"prompts": asked, "completions": written, **columns}
        values = [
            _values(function, name, arguments, len(rows))
            for function, name in zip(self.functions, self.names, strict=True)
        ]
        return [self._result(each) for each in zip(*values, strict=True)]

    def _result(self, values: Sequence[float | None]) -> RewardResult:
        total = sum(weight * value for weight, value in zip(self.weights, values, strict=True) if value is not None)
        known = {name: value for name, value in zip(self.names, values, strict=True) if value is not None}
        return RewardResult(total, total >= 1.0, known if len(self.names) > 1 else {})


def _values(function: RewardFunction, name: str, arguments: Mapping[str, Any], count: int) -> list[float | None]:
    """The function's values; None leaves that completion out of it. NaN rejects the completion, as of any reward."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    results = function(**{key: value for key, value in arguments.items() if takes_any or key in parameters})
    values = [None if value is None else float(value) for value in results]
    if len(values) != count:
        raise ValueError(f"{name} returned {len(values)} values for {count} completions")
    return values


def _file_of(rows: str | Path | Iterable[Mapping[str, Any]], name: str, prompt_key: str) -> str:
    """The path of a file of rows; rows in memory are written to the cache, under a digest of their content."""
    if isinstance(rows, str | Path):
        return str(rows)
    rows = [] if rows is None else list(rows)
    if odd := [row for row in rows if not isinstance(row, Mapping)]:
        raise ConfigError(f"{name} has the row {odd[0]!r:.80}; give dictionaries, such as {{'prompt': 'Say 1.'}}")
    for number, row in enumerate(rows, start=1):
        if prompt_key not in row:  # else the cache's file would be named
            raise ConfigError(f"{name}: row {number} has no field {prompt_key!r}; it has {', '.join(map(str, row))}")
    try:
        content = b"".join(msgspec.json.encode(dict(row)) + b"\n" for row in rows)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{name}: a row cannot be written as JSON: {error}; give plain values") from None
    if not content:
        raise ConfigError(f"{name} has no rows")
    file = cache_root() / "rows" / f"{blake2b(content, digest_size=10).hexdigest()}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    return str(file)
