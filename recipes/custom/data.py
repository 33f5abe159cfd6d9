"""Rows from files or a `datasets` dataset, and which of them are held out."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from hashlib import blake2b
from inspect import formatannotation
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from rlloop.config.instantiate import accepts
from rlloop.errors import ConfigError

Row = dict[str, Any]
# With each one's number in its file or dataset, from 1; where there are several files, with the file's name.
Rows = Sequence[tuple[int | str, Row]]
SHOWN = 5  # rows that a list of problems names


@dataclass
class DataSection:
    """The section `data` of the configuration; config.yaml says what each key means."""

    path: str
    format: str = "jsonl"
    name: str | None = None
    split: str = "train"
    prompt_key: str = "prompt"
    id_key: str | None = None
    system: str | None = None
    eval_path: str | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.1
    max_prompt_tokens: int = 1024
    overlong: str = "error"
    streaming: bool = False
    curriculum: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(f"data.path is {self.path!r}; it must name the rows, as in data.path=rows.jsonl")
        for key, hint in get_type_hints(DataSection).items():
            if not accepts(hint, getattr(self, key)):
                wanted = formatannotation(hint)
                raise ConfigError(f"data.{key} is {getattr(self, key)!r}; it must be {wanted}")
        checks = [
            ("format", self.format in ("jsonl", "datasets"), "jsonl or datasets"),
            ("overlong", self.overlong in ("error", "drop"), "error or drop"),
            ("eval_fraction", 0 < self.eval_fraction < 1, "between 0 and 1"),
            ("max_prompt_tokens", self.max_prompt_tokens >= 1, "at least 1"),
            ("eval_split", self.eval_split is None or self.format == "datasets", "null, unless data.format=datasets"),
        ]
        for key, good, allowed in checks:
            if not good:
                raise ConfigError(f"data.{key} is {getattr(self, key)!r}; it must be {allowed}")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DataSection:
        known = cls.__dataclass_fields__
        if unknown := [key for key in config if key not in known]:
            raise ConfigError(f"there is no key data.{unknown[0]}; there are {', '.join(known)}")
        return cls(**config)

    @classmethod
    def several(cls, config: Mapping[str, Any]) -> dict[str, DataSection]:
        """By name the sections of `data.mix`, each with the keys of `data` that it does not set; one, named "", where
        nothing is mixed. `weight` is left out: `rlloop.recipes.custom.mixture`."""
        shared = {key: value for key, value in config.items() if key != "mix"}
        mix = config.get("mix")
        if not mix:
            return {"": cls.of(shared)}
        if shared.get("path") is not None:
            raise ConfigError(f"data.path is {shared['path']!r} beside data.mix; give each source its path there")
        sections = {}
        for name, source in mix.items():
            if not isinstance(source, Mapping) or "path" not in source:
                raise ConfigError(f"data.mix.{name} is {source!r:.80}; it must be a mapping with a path")
            sections[name] = cls.of({**shared, **{key: value for key, value in source.items() if key != "weight"}})
        return sections


def read_rows(data: DataSection) -> tuple[Rows, Rows]:
    """The rows to train on and the held-out ones. Raises `ConfigError` for data that is missing, empty or lacks a field
    that `data` names."""
    if data.streaming and data.format == "jsonl":
        from .streaming import JsonLines

        rows = JsonLines(Path(data.path), "data.path")
        held_out = None if data.eval_path is None else JsonLines(Path(data.eval_path), "data.eval_path")
    elif data.format == "jsonl":
        rows = read_files(data.path, "data.path")
        held_out = None if data.eval_path is None else read_files(data.eval_path, "data.eval_path")
    else:
        rows = read_dataset(data.path, data.name, data.split, "data.path", mapped=data.streaming)
        held_out = None
        if data.eval_path is not None or data.eval_split is not None:
            path, split = data.eval_path or data.path, data.eval_split or data.split
            name = data.name if path == data.path else None
            held_out = read_dataset(path, name, split, "data.eval_path", mapped=data.streaming)
    _require_fields(rows, data, data.path)
    if held_out is not None:
        _require_fields(held_out, data, data.eval_path or data.path)
        return rows, held_out
    sides = _split(rows, data)
    for side, name in zip(sides, ("training", "evaluation"), strict=True):
        if not side:
            raise ConfigError(
                f"data.path {data.path!r} has {len(rows)} rows, and data.eval_fraction={data.eval_fraction} leaves "
                f"none for {name}; change it, give more rows, or give data.eval_path"
            )
    return sides


def _split(rows: Rows, data: DataSection) -> tuple[Rows, Rows]:
    if data.streaming:
        from .streaming import OnDemand

        held_out = np.array([place(row[data.prompt_key]) < data.eval_fraction for _, row in rows])
        return OnDemand(rows, np.flatnonzero(~held_out)), OnDemand(rows, np.flatnonzero(held_out))
    sides: tuple[list[Any], list[Any]] = [], []
    for number, row in rows:
        sides[place(row[data.prompt_key]) < data.eval_fraction].append((number, row))
    return sides


def _require_fields(rows: Rows, data: DataSection, source: str) -> None:
    problems = Problems(source)
    for number, row in rows:
        for name in ("prompt_key", "id_key"):
            field = getattr(data, name)
            if field is not None and field not in row:
                missing = f" has no field {field!r} (data.{name}); it has {', '.join(map(str, row))}"
                problems.add(number, RowProblem(f"no {field}", missing))
    problems.raise_any(len(rows))


class RowProblem(ConfigError):
    """Reason why a row cannot be used. Equal `kind`s are counted together; the text follows "row 7"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Problems:
    """The problems of all rows of a source, listed together before a run begins."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._by_kind: dict[str, list[tuple[int | str, RowProblem]]] = {}

    def add(self, number: int | str, problem: RowProblem) -> None:
        self._by_kind.setdefault(problem.kind, []).append((number, problem))

    def raise_any(self, rows: int) -> None:
        """Raises `ConfigError` where there are some: the first in full, then how many there are of each kind."""
        if not self._by_kind:
            return
        number, first = min((each[0] for each in self._by_kind.values()), key=lambda each: each[0])
        lines = [f"{self.source}, row {number}{first}"]
        unusable = {number for each in self._by_kind.values() for number, _ in each}
        if len(unusable) > 1:
            lines.append(f"{len(unusable)} of {rows} rows cannot be used:")
            for kind, each in self._by_kind.items():
                numbers = ", ".join(str(number) for number, _ in each[:SHOWN]) + (", ..." if len(each) > SHOWN else "")
                lines.append(f"  {kind}: {len(each)} (row {numbers})")
        raise ConfigError("\n".join(lines))


def read_files(path: str, key: str) -> Rows:
    """The rows of a file, by its ending (`READERS`; any other is JSONL), or of all files that a glob such as
    `data/*.jsonl` matches, in the order of their names."""
    files = [Path(path)]
    if not files[0].exists() and any(mark in path for mark in "*?["):
        files = [Path(name) for name in sorted(glob(path, recursive=True)) if Path(name).is_file()]  # noqa: PTH207
    if not files or not all(file.is_file() for file in files):
        folder = f"a folder; name its files, as in {path}/*.jsonl" if Path(path).is_dir() else None
        raise ConfigError(
            f"{key} is {path!r}, {folder}" if folder else f"{key} is {path!r}, and there is no such file; it must be a "
            f"JSONL file, another of {', '.join(READERS)}, or a glob"
        )  # fmt: skip
    rows = list[tuple[int | str, Row]]()
    for file in files:
        try:
            own = READERS.get(file.suffix.lower(), read_jsonl)(file)
        except OSError as error:
            raise ConfigError(f"{key} {str(file)!r} cannot be read: {error.strerror or error}") from error
        if not own:
            raise ConfigError(f"{key} {str(file)!r} has no rows")
        rows += list(own) if len(files) == 1 else [(f"{number} of {file}", row) for number, row in own]
    return rows


def read_jsonl(path: Path) -> Rows:
    """One JSON object a line; empty lines are skipped."""
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    return [(number, parse_line(line, path, number)) for number, line in lines if line.strip()]


def parse_line(line: bytes, path: Path, number: int) -> Row:
    where = f"{path}, line {number},"
    return _row(_parsed(line, where), where)


def read_json(path: Path) -> Rows:
    """A list of objects, or an object with one list of them."""
    content = _parsed(path.read_bytes(), str(path))
    lists = [value for value in content.values() if isinstance(value, list)] if isinstance(content, dict) else [content]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise ConfigError(f"{path} must be a JSON list of objects, or an object with one such list")
    return [(number, _row(row, f"{path}, row {number},")) for number, row in enumerate(lists[0], start=1)]


def read_csv(path: Path) -> Rows:
    """A header and rows; values are strings. The separator of .tsv is a tab, else a comma."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            rows = list(enumerate(reader, start=1))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}, is not CSV: {error}") from None
    for number, row in rows:
        if None in row or None in row.values():
            raise ConfigError(f"{path}, row {number}, has not the {len(reader.fieldnames or ())} fields of the header")
    return list(rows)


def read_parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        raise ConfigError(f"{path} needs the package pyarrow: pip install 'rlloop[parquet]'") from None
    try:
        return list(enumerate(parquet.read_table(path).to_pylist(), start=1))
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet
}  # fmt: skip


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a JSON {type(value).__name__}; each must be an object")
    return value


def read_dataset(path: str, name: str | None, split: str, key: str, *, mapped: bool = False) -> Rows:
    """A dataset that `datasets` knows, or a folder that its `save_to_disk` wrote. `mapped`: rows stay in its Arrow
    files, which `datasets` maps into memory, and are read when their turn comes."""
    if Path(path).is_file():  # `datasets` would ask the network for a dataset of that name
        raise ConfigError(f"{key} is {path!r}, a file: leave out data.format=datasets, or name its folder")
    try:
        import datasets  # pyright: ignore[reportMissingImports] - an extra, and too heavy for the tests
    except ImportError:
        raise ConfigError("data.format=datasets needs the package datasets: pip install 'rlloop[datasets]'") from None
    try:
        if any((Path(path) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            loaded: Any = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
            elif split != "train":
                raise ValueError("it was saved without splits")
        else:
            loaded = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key} is {path!r}, and datasets cannot load its split {split!r}: {error}") from error
    if not len(loaded):
        raise ConfigError(f"{key} {path!r}, split {split!r}, has no rows")
    if mapped:
        from .streaming import ArrowRows

        return ArrowRows(loaded)
    return [(number, dict(row)) for number, row in enumerate(loaded, start=1)]


def place(value: Any) -> float:
    """A hash of a JSON value as a number from 0 to below 1, which puts equal prompts on one side of a split."""
    return int.from_bytes(_digest(value, 6), "big") / 2**48


def row_id(row: Row, id_key: str | None) -> str:
    """The row's own name, or a digest of it."""
    return str(row[id_key]) if id_key is not None else _digest(row, 6).hex()


def _digest(value: Any, size: int) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=size).digest()


def is_messages(value: Any) -> bool:
    """True for a list of messages, which the policy is to continue."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value)
