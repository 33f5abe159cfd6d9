"""Rows that stay on the disk: `data.streaming=true`. Of JSON lines only where each begins is kept in memory, 8 bytes a
row; Arrow files are mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from rlloop.errors import ConfigError

from .data import Row, parse_line

Numbered = tuple[int | str, Row]  # a row with its number in its file, from 1


class StoredRows(Sequence[Numbered]):
    """Rows that stay on the disk until they are asked for."""

    def _row(self, index: int) -> Numbered:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Numbered: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Numbered]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._row(index)


class JsonLines(StoredRows):
    """The rows of a JSONL file, or of all `*.jsonl` files (shards) of a folder, by index."""

    def __init__(self, path: Path, key: str) -> None:
        """Raises `ConfigError` for what is not there, and for a last line that was cut off."""
        self.files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not self.files or not all(file.is_file() for file in self.files):
            raise ConfigError(f"{key} is {str(path)!r}; it must be a JSONL file, or a folder of *.jsonl files")
        self._starts = [_line_starts(file) for file in self.files]  # [rows] int64 each
        self._numbers = [numbers for _, numbers in self._starts]
        self._ends = np.cumsum([len(starts) for starts, _ in self._starts])
        if not len(self):
            raise ConfigError(f"{key} {str(path)!r} has no rows")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _row(self, index: int) -> Numbered:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        within = index - int(self._ends[shard - 1] if shard else 0)
        starts, numbers = self._starts[shard]
        number = int(numbers[within])
        with self.files[shard].open("rb") as file:
            file.seek(int(starts[within]))
            return number, parse_line(file.readline(), self.files[shard], number)


class ArrowRows(StoredRows):
    """The rows of a dataset of the package `datasets`, which maps its Arrow files into memory."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def _row(self, index: int) -> Numbered:
        return index + 1, dict(self.dataset[index])


class OnDemand(Sequence[Any]):
    """Some items of a sequence, by their indices, each read and made anew whenever it is asked for."""

    def __init__(
        self, items: Sequence[Any], indices: np.ndarray, make: Callable[[Any], Any] = lambda item: item
    ) -> None:
        self._items, self._indices, self._make = items, indices, make

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return OnDemand(self._items, self._indices[index], self._make)
        return self._make(self._items[int(self._indices[index])])


def _line_starts(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """[rows] int64 each: where its lines that are not blank begin, and their numbers from 1."""
    starts, numbers, at = list[int](), list[int](), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                starts.append(at)
                numbers.append(number)
            at += len(line)
    return np.array(starts, np.int64), np.array(numbers, np.int64)
