"""Long runs: journals whose older parts are rotated, and rollouts of many steps in one file, are still one history."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from rlloop.dashboard.runs import Metrics, Tail
from rlloop.errors import RunError
from rlloop.runs import folder as runs
from rlloop.runs.folder import RunFolder, read_records, read_rollouts, rollout_file, rollout_files, step_of
from rlloop.runs.journal import Journal, compress, open_journal, pack, segments, unpack


@pytest.fixture
def often(monkeypatch):
    """Rotate as soon as there is anything to."""
    monkeypatch.setattr(runs, "SEGMENT", 100)
    monkeypatch.setattr(runs, "PACKED", 4)


def take(folder: RunFolder, steps) -> None:
    for step in steps:
        folder.metrics.append({"step": step, "value": step * 1.5})
        folder.parity.append({"step": step, "hash": f"{step:064x}"})
        folder.fleet.append({"event": "serving", "version": step})
        folder.write_rollouts(step, [{"uid": f"{step}/0/0"}])
        if step % 5 == 0:
            folder.rotate(step)


def steps_of(path, name="metrics.jsonl", key="step"):
    return [record[key] for record in read_records(path / name)]


def rows_of(path):
    return [read_rollouts(file)[0]["uid"] for file in rollout_files(path)]


def test_a_long_run_is_one_history_in_few_files(tmp_path, often):
    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 43))
    run = tmp_path / "run"
    assert len(segments(run / "metrics.jsonl")) == 8
    assert steps_of(run) == steps_of(run, "parity.jsonl") == list(range(1, 43))
    assert steps_of(run, "fleet.jsonl", "version") == list(range(1, 43))
    assert rows_of(run) == [f"{step}/0/0" for step in range(1, 43)]
    assert [step_of(file) for file in rollout_files(run)] == list(range(1, 43))
    assert len(list((run / "rollouts").iterdir())) == 10  # eight archives and two steps
    assert read_rollouts(rollout_file(run, 23)) == [{"uid": "23/0/0"}]
    assert rollout_file(run, 43) is None


@pytest.mark.parametrize("keep", [42, 40, 37, 20, 3, None])
def test_a_resume_goes_back_into_what_was_rotated(tmp_path, often, keep):
    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 43))
    left = list(range(1, (keep or 0) + 1))
    with RunFolder(tmp_path / "run") as folder:
        assert folder.rewind(keep) == 42 - len(left)
        run = folder.path
        assert steps_of(run) == steps_of(run, "parity.jsonl") == left
        assert rows_of(run) == [f"{step}/0/0" for step in left]
        aside = run / "orphaned" / "1"
        if keep != 42:
            assert steps_of(aside) == list(range(len(left) + 1, 43))
            assert rows_of(aside) == [f"{step}/0/0" for step in range(len(left) + 1, 43)]
        take(folder, range(len(left) + 1, 50))
    assert steps_of(run) == list(range(1, 50))
    assert rows_of(run) == [f"{step}/0/0" for step in range(1, 50)]
    served = steps_of(run, "fleet.jsonl", "version")
    assert served == [*range(1, 43), *range(len(left) + 1, 50)]  # what served is never taken back


def test_a_kill_in_a_rotation_or_a_packing_leaves_every_line_once(tmp_path, often, monkeypatch):
    class Killed(Exception):
        pass

    def killed(*_):
        raise Killed

    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 13))
        monkeypatch.setattr("rlloop.runs.journal.compress", killed)  # the plain segment stays
        with pytest.raises(Killed):
            folder.metrics.rotate(12)
        monkeypatch.undo()
        assert steps_of(folder.path) == list(range(1, 13))
        loose = [file for file in rollout_files(folder.path) if isinstance(file, type(folder.path))]
        archive = folder.rollouts / "step_00000012.zip"
        contents = {file: file.read_bytes() for file in loose}
        pack(loose, archive)
        for file, content in contents.items():  # as if it had ended before they were deleted
            file.write_bytes(content)
        assert rows_of(folder.path) == [f"{step}/0/0" for step in range(1, 13)]
        folder.rewind(12)
        assert steps_of(folder.path) == list(range(1, 13))
        assert [each.suffix for each in segments(folder.path / "metrics.jsonl")] == [".zst"] * 3
        assert not any(file.exists() for file in loose)
        plain = folder.path / "rotated" / "metrics_00000012.jsonl"
        plain.write_bytes(b"".join(line for line in open_journal(folder.path / "metrics.jsonl")))
        assert steps_of(folder.path) == list(range(1, 13))  # compressed, and not yet deleted
        compress(plain)


def test_a_rotation_changes_no_byte_for_readers(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    tail, metrics = Tail(journal.path), Metrics(journal.path)
    seen, whole = [], b""
    for step in range(60):
        whole += journal.append({"step": step, "loss": step / 7})
        if step % 7 == 3:
            journal.rotate(step)
        if step % 4 == 1:
            assert not tail.rewound()
            seen += [record["step"] for _, _, record in tail.new()]
            metrics.refresh()
    with open_journal(journal.path) as file:
        assert file.read() == whole
        for at in (0, 5, 300, 777, len(whole) - 3, len(whole)):
            assert file.seek(at) == at
            assert file.read(40) == whole[at : at + 40]
        assert file.seek(-9, os.SEEK_END) == len(whole) - 9
        assert file.read() == whole[-9:]
    assert seen == list(range(58))
    assert tail.generation == 0
    assert metrics.record(11) == {"step": 11, "loss": 11 / 7}


def test_reading_while_it_is_written_and_rotated(tmp_path):
    journal, stop = Journal(tmp_path / "metrics.jsonl"), threading.Event()
    journal.append({"step": 0})

    def write():
        step = 0
        while not stop.is_set() and step < 3000:
            step += 1
            journal.append({"step": step})
            if step % 50 == 0:
                journal.rotate(step)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(40):
            found = steps_of(tmp_path)
            assert found == list(range(len(found)))
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("name", ["metrics.jsonl", "rotated/metrics_00000000.jsonl"])
def test_a_file_that_is_there_may_be_gone_when_it_is_opened(tmp_path, monkeypatch, name):
    """The journal is rotated, or its segment compressed, as a reader has seen that there is one."""
    journal, segment = Journal(tmp_path / "metrics.jsonl"), tmp_path / "rotated" / "metrics_00000000.jsonl"
    exists = Path.exists
    for step in range(3):
        journal.append({"step": step})
    segment.parent.mkdir()
    if name != journal.path.name:
        journal.path.rename(segment)

    def moved(path: Path) -> bool:
        there = exists(path)
        if there and path == tmp_path / name:
            monkeypatch.undo()
            journal.path.rename(segment) if path == journal.path else compress(segment)
        return there

    monkeypatch.setattr(Path, "exists", moved)
    assert steps_of(tmp_path) == [0, 1, 2]


def test_rollouts_that_are_packed_while_they_are_listed_are_not_missing(tmp_path, often, monkeypatch):
    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 4))
        glob = Path.glob

        def packed(path: Path, pattern: str):
            found = list(glob(path, pattern))
            if path == folder.rollouts and not (path / "step_00000003.zip").exists():
                pack(sorted(glob(path, "*.zst")), path / "step_00000003.zip")
            return iter(found)

        monkeypatch.setattr(Path, "glob", packed)
        assert rows_of(folder.path) == ["1/0/0", "2/0/0", "3/0/0"]


def test_rollouts_that_are_unpacked_while_they_are_listed_are_not_missing(tmp_path, often, monkeypatch):
    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 6))
    archive, glob = folder.rollouts / "step_00000005.zip", Path.glob

    def unpacked(path: Path, pattern: str):
        found = list(glob(path, pattern))
        if archive in found and archive.exists():
            unpack(archive)
        return iter(found)

    for read in (rows_of, lambda path: read_rollouts(rollout_file(path, 2))):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "glob", unpacked)
            assert read(folder.path)
        assert not archive.exists()
        assert rows_of(folder.path) == [f"{step}/0/0" for step in range(1, 6)]
        pack(sorted(folder.rollouts.iterdir()), archive)


def test_rollouts_that_are_packed_or_unpacked_since_they_were_listed_are_read(tmp_path, often):
    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 4))
    loose, archive = rollout_files(folder.path), folder.rollouts / "step_00000003.zip"
    pack(sorted(folder.rollouts.iterdir()), archive)
    packed = rollout_files(folder.path)
    assert [read_rollouts(file) for file in loose] == [read_rollouts(file) for file in packed]
    unpack(archive)
    assert [read_rollouts(file) for file in packed] == [read_rollouts(file) for file in loose]
    loose[0].unlink()
    with pytest.raises(FileNotFoundError):
        read_rollouts(loose[0])


def test_damage_is_named(tmp_path, often):
    with RunFolder(tmp_path / "run") as folder:
        take(folder, range(1, 13))
    [segment, *_] = segments(folder.path / "metrics.jsonl")
    segment.write_bytes(segment.read_bytes()[:-4])
    with pytest.raises(RunError, match=r"metrics_00000005\.jsonl\.zst is damaged"):
        steps_of(folder.path)
    segment.write_bytes(b"")
    with pytest.raises(RunError, match=r"metrics_00000005\.jsonl\.zst is damaged"):
        steps_of(folder.path)
    archive = folder.rollouts / "step_00000005.zip"
    archive.write_bytes(archive.read_bytes()[:50])
    with pytest.raises(RunError, match=r"step_00000005\.zip is damaged"):
        rollout_files(folder.path)


def test_packed_files_come_back_as_they_were(tmp_path):
    files = []
    for step in (1, 2):
        files.append(tmp_path / f"step_{step:08d}.jsonl.zst")
        files[-1].write_bytes(os.urandom(100))
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    pack(files, tmp_path / "step_00000002.zip")
    unpack(tmp_path / "step_00000002.zip")
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


def test_a_pipe_is_read_as_a_journal():
    read, write = os.pipe()
    os.write(write, b'{"step": 1}\n')
    os.close(write)
    assert list(read_records(Path(f"/dev/fd/{read}"))) == [{"step": 1}]
    os.close(read)


def test_a_line_that_found_no_room_leaves_none_of_itself(tmp_path):
    journal, other = Journal(tmp_path / "a.jsonl"), Journal(tmp_path / "b.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal.append({"step": 0})
    try:
        for written in (journal, other):  # of `other` it is the first line
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
            with pytest.raises(OSError, match=r"[Nn]o space|too large"):
                written.append({"text": "x" * 50})
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            written.append({"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [list(read_records(each.path)) for each in (journal, other)] == [[{"step": 0}, {"step": 1}], [{"step": 1}]]


@pytest.mark.parametrize("length", [1, 70_000, 140_000])
@pytest.mark.parametrize("whole", [b"", b'{"step":0}\n'])
def test_what_a_kill_left_of_a_line_is_cut_off_before_the_next(tmp_path, whole, length):
    file = tmp_path / "a.jsonl"
    file.write_bytes(whole + b"{" * length)
    Journal(file).append({"step": 1})
    assert file.read_bytes() == whole + b'{"step":1}\n'
