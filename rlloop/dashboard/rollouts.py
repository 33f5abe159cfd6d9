"""An index over a run's completions, so that a million of them can be sorted, filtered and paged.

The index is an SQLite file in the user's cache, never in the run's folder. It is built from the rollout files in the
background, newest step first, and updated file by file. It may be deleted at any time, and is then built again.
"""

from __future__ import annotations

import hashlib
import io
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from rlloop.cache import cache_root
from rlloop.dashboard.chat_text import plain, question_of
from rlloop.dashboard.tokens import surprise
from rlloop.runs.folder import RolloutFile, rollout_bytes, rollout_file, rollout_files, step_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (step INTEGER PRIMARY KEY, size INTEGER, changed INTEGER, rows INTEGER, problem TEXT);
CREATE TABLE IF NOT EXISTS rollouts (
    step INTEGER, line INTEGER, uid TEXT, grp INTEGER, version INTEGER, outcome TEXT, kind INTEGER, reward REAL,
    solved INTEGER, advantage REAL, tokens INTEGER, finish TEXT, different INTEGER, diff REAL, k3 REAL,
    surprise REAL, turns INTEGER, prompt TEXT, text TEXT, PRIMARY KEY (step, line)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (step INTEGER, line INTEGER, text TEXT, PRIMARY KEY (step, line)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_diff ON rollouts (diff DESC);
CREATE INDEX IF NOT EXISTS by_reward ON rollouts (reward);
CREATE INDEX IF NOT EXISTS by_tokens ON rollouts (tokens);
CREATE INDEX IF NOT EXISTS by_surprise ON rollouts (surprise);
CREATE INDEX IF NOT EXISTS by_k3 ON rollouts (k3 DESC);
CREATE INDEX IF NOT EXISTS by_advantage ON rollouts (abs(advantage) DESC);
CREATE INDEX IF NOT EXISTS by_kind_diff ON rollouts (kind, diff DESC);
CREATE INDEX IF NOT EXISTS by_solved_diff ON rollouts (solved, diff DESC);
CREATE INDEX IF NOT EXISTS by_kind_solved_diff ON rollouts (kind, solved, diff DESC);
"""
VERSION = 2  # of the schema; files of another version are not used
COLUMNS = (
    "step", "line", "uid", "grp", "version", "outcome", "reward", "solved", "advantage", "tokens", "finish",
    "different", "diff", "k3", "surprise", "turns", "prompt", "text",
)  # fmt: skip
ORDERS = {
    "worst": "diff DESC",
    "k3": "k3 DESC",
    "newest": "step DESC, line",
    "order": "step, line",
    "reward_high": "reward DESC",
    "reward_low": "reward",
    "longest": "tokens DESC",
    "shortest": "tokens",
    "surprising": "surprise DESC",
    "expected": "surprise",
    "advantage": "abs(advantage) DESC",
}
KINDS = ("trained", "rejected", "dropped")
# The texts are read through once, whatever the order of the page.
FOUND = "(step, line) IN (SELECT step, line FROM texts WHERE text LIKE :search ESCAPE '!')"
FEW = 10_000  # up to so many completions are sorted for a query
SHOWN = 240  # characters of a prompt's question, and of a completion's start, in lists


class _Row(msgspec.Struct):
    """The keys of a rollout record that the index needs."""

    uid: str
    outcome: str
    logprobs: list[float | None]
    reward: float | None = None
    solved: bool = False
    group: int = 0
    policy_version: int = 0
    advantage: float | None = None
    finish_reason: str = ""
    prompt: str = ""
    text: str = ""
    turns: list[tuple[int, int]] | None = None
    trainer_logprobs: list[float | None] | None = None


_DECODER = msgspec.json.Decoder(_Row)


def cache_folder() -> Path:
    """The folder for indices."""
    return cache_root() / "dashboard"


class RolloutIndex:
    """The index of one run. Thread-safe, and several dashboards may share its file."""

    def __init__(self, run: Path, cache: Path | None = None) -> None:
        self.run = run
        cache = cache or cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]
        self.file = cache / f"{name}-v{VERSION}.sqlite"
        self._writing = threading.Lock()
        self._worker: threading.Thread | None = None
        self._starting, self._stop = threading.Lock(), threading.Event()
        with self._open() as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.executescript(SCHEMA)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=30)) as database, database:
            database.execute("PRAGMA synchronous=OFF")
            yield database

    # -------------------------------------------------------------------------------------------- updates

    def pending(self) -> tuple[list[RolloutFile], list[int]]:
        """(files that are new or changed, newest step first; steps whose file is gone)."""
        with self._open() as database:
            known = {step: stamp for step, *stamp in database.execute("SELECT step, size, changed FROM files")}
        stale, present = [], set()
        for file in rollout_files(self.run):
            present.add(step_of(file))
            with suppress(FileNotFoundError):  # moved since it was listed: read where it is the next time
                stat = file.stat()
                if known.get(step_of(file)) != [stat.st_size, stat.st_mtime_ns]:
                    stale.append(file)
        return stale[::-1], [step for step in known if step not in present]

    def update(self) -> None:
        """Read every file that is new or changed. Returns when done, or early after `close`."""
        stale, gone = self.pending()
        with self._writing, self._open() as database:
            for step in gone:
                _forget(database, step)
        for file in stale:
            if self._stop.is_set():
                return
            self._read(file)

    def keep_up(self) -> None:
        """Start an update in the background, unless one is running, or the index was closed."""
        with self._starting:
            if not self._stop.is_set() and (self._worker is None or not self._worker.is_alive()):
                self._worker = threading.Thread(target=self.update, name=f"index {self.run.name}", daemon=True)
                self._worker.start()

    def close(self) -> None:
        with self._starting:
            self._stop.set()
        if self._worker is not None:
            self._worker.join()

    def _read(self, file: RolloutFile) -> None:
        step = step_of(file)
        with self._writing, suppress(FileNotFoundError):  # moved since it was listed: read where it is the next time
            stat = file.stat()
            try:
                rows, texts, problem = *_index_rows(step, rollout_bytes(file)), None
            except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError) as error:
                rows, texts, problem = [], [], f"{file.name} is damaged: {error}"
            with self._open() as database:
                _forget(database, step)
                marks = ",".join("?" * 19)
                database.executemany(f"INSERT INTO rollouts VALUES ({marks})", rows)
                database.executemany("INSERT INTO texts VALUES (?, ?, ?)", texts)
                entry = (step, stat.st_size, stat.st_mtime_ns, len(rows), problem)
                database.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", entry)

    # -------------------------------------------------------------------------------------------- queries

    def progress(self) -> dict[str, Any]:
        with self._open() as database:
            files, rows = database.execute("SELECT count(*), total(rows) FROM files").fetchone()
            problems = [text for (text,) in database.execute("SELECT problem FROM files WHERE problem NOT NULL")]
        return {"files": files, "of": len(rollout_files(self.run)), "rollouts": int(rows), "problems": problems}

    def page(
        self,
        *,
        step: int | None = None,
        order: str | None = None,
        kind: str | None = None,
        solved: bool | None = None,
        group: int | None = None,
        search: str = "",
        offset: int = 0,
        limit: int = 100,
    ) -> dict[str, Any]:
        """A page of the completions of one step or of the run. A step's file that is not indexed yet is read first.

        `search`: text that a completion contains, in either case. `order` None: by difference where there is one, else
        the newest step first.
        """
        if step is not None:
            self._read_if_new(step)
        conditions = {
            "step": step,
            "kind": None if kind is None else KINDS.index(kind),
            "solved": None if solved is None else int(solved),
            "grp": group,
            "search": "%" + re.sub("([%_!])", r"!\1", search) + "%" if search else None,
        }
        used = {name: value for name, value in conditions.items() if value is not None}
        with self._open() as database:
            if order is None:
                differs = database.execute("SELECT diff > 0 FROM rollouts ORDER BY diff DESC LIMIT 1").fetchone()
                order = "worst" if differs is not None and differs[0] else "newest"
            if list(used) == ["step"] or not used:
                where = " WHERE step = :step" if used else ""
                total = database.execute(f"SELECT total(rows) FROM files{where}", used).fetchone()[0]
            else:
                where = " WHERE " + " AND ".join(FOUND if name == "search" else f"{name} = :{name}" for name in used)
                total = database.execute(f"SELECT count(*) FROM rollouts{where}", used).fetchone()[0]
            query = page_query(list(used), order, few=total <= FEW)
            window = {**used, "limit": limit, "offset": offset}
            rows = database.execute(f"{query} LIMIT :limit OFFSET :offset", window).fetchall()
        return {"total": int(total), "order": order, "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows]}

    def _read_if_new(self, step: int) -> None:
        file = rollout_file(self.run, step)
        if file is None:
            return
        with suppress(FileNotFoundError):  # moved meanwhile
            stat = file.stat()
            with self._open() as database:
                known = database.execute("SELECT size, changed FROM files WHERE step = ?", (step,)).fetchone()
            if known != (stat.st_size, stat.st_mtime_ns):
                self._read(file)

    def row(self, step: int, line: int) -> dict[str, Any] | None:
        """One completion's whole record, if there is one. Raises `zstd` and decoding errors for damaged files."""
        file = rollout_file(self.run, step)
        if file is None:
            return None
        try:
            lines = _lines(rollout_bytes(file))
        except FileNotFoundError:  # set aside by a resume at this moment
            return None
        text = next((each for number, each in enumerate(lines) if number == line), None)
        return None if text is None else msgspec.json.decode(text)


def page_query(names: Sequence[str], order: str, few: bool = False) -> str:
    """The query of a page, for which SQLite need neither read nor sort the whole table.

    `names`: columns with a condition; `few`: the rows are few enough to sort. A step is found by its key, and the worst
    of a kind, or `few` rows, by the conditions' index; otherwise SQLite walks the index of the order and skips rows. A
    `+` keeps a condition from choosing the index.
    """

    def condition(name: str) -> str:
        if name == "search":
            return FOUND
        led = name == "step" or ("step" not in names and (few or order == "worst"))
        return f"{'' if led else '+'}{name} = :{name}"

    where = f" WHERE {' AND '.join(map(condition, names))}" if names else ""
    return f"SELECT {', '.join(COLUMNS)} FROM rollouts{where} ORDER BY {ORDERS[order]}"


def _forget(database: sqlite3.Connection, step: int) -> None:
    database.execute("DELETE FROM rollouts WHERE step = ?", (step,))
    database.execute("DELETE FROM texts WHERE step = ?", (step,))
    database.execute("DELETE FROM files WHERE step = ?", (step,))


def _lines(content: bytes) -> io.BufferedReader:
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(content))


def _index_rows(step: int, content: bytes) -> tuple[list[tuple[Any, ...]], list[tuple[int, int, str]]]:
    """Rows of the tables `rollouts` and `texts`."""
    rows, read = [], 0
    for line in _lines(content):
        rows.append(_DECODER.decode(line))
        read += len(line)
    whole = zstandard.frame_content_size(content)
    if whole not in (-1, read):  # the decompressor does not report a frame that is cut short
        raise zstandard.ZstdError(f"it holds {read} of {whole} bytes")
    scored = [row for row in rows if row.trainer_logprobs is not None]
    for row in scored:
        if len(row.logprobs) != len(row.trainer_logprobs or ()):
            raise msgspec.ValidationError(f"{row.uid} has different numbers of engine's and trainer's logprobs")
    compared = iter(_differences(scored))
    table = []
    for line, row in enumerate(rows):
        kind = next((index for index, name in enumerate(KINDS) if row.outcome.startswith(name)), 0)
        if row.trainer_logprobs is not None:
            different, diff, k3 = next(compared)
        else:  # the record has the trainer's only if a bit differs, and only trained tokens are compared
            different, diff, k3 = (0, 0.0, 0.0) if kind == 0 else (None, None, None)
        table.append(
            (
                step, line, row.uid, row.group, row.policy_version, row.outcome, kind, row.reward, row.solved,
                row.advantage, len(row.logprobs), row.finish_reason, different, diff, k3,
                surprise(row.logprobs), len(row.turns or ()) or 1,
                question_of(row.prompt, SHOWN), plain(row.text)[:SHOWN],
            )
        )  # fmt: skip
    return table, [(step, line, row.text) for line, row in enumerate(rows)]


def _differences(rows: Sequence[_Row]) -> list[tuple[int, float, float]]:
    """(tokens that differ in a bit, largest |d|, mean of exp(d) − 1 − d) of each row; infinity if not finite."""
    if not rows:
        return []
    counts = np.array([len(row.logprobs) for row in rows])
    mu = np.array(list(chain.from_iterable(row.logprobs for row in rows)), np.float32)
    pi = np.array(list(chain.from_iterable(row.trainer_logprobs or () for row in rows)), np.float32)
    d = pi.astype(np.float64) - mu
    starts = np.cumsum(counts) - counts
    with np.errstate(over="ignore", invalid="ignore"):
        k3 = np.add.reduceat(np.expm1(d) - d, starts) / counts
    different = np.add.reduceat((mu.view(np.int32) != pi.view(np.int32)).astype(np.int64), starts)
    largest = np.maximum.reduceat(np.nan_to_num(np.abs(d), nan=np.inf), starts)
    k3 = np.nan_to_num(k3, nan=np.inf)
    return list(zip(different.tolist(), largest.tolist(), k3.tolist(), strict=True))
