"""The command log: what is on disk after a crash, a torn tail, damage and a rotation."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from rlloop.api.log import Checked, Command, CommandLog, Committer, Result, Weights, read_segment, segments
from rlloop.errors import RunError


@pytest.fixture
def committer():
    made = Committer()
    yield made
    made.close()


def command(seq_id: int, body: bytes = b"x") -> Command:
    return Command(seq_id, "optim_step", f"key-{seq_id}", body)


def appended(log: CommandLog, *records) -> None:
    for future in [log.append(record) for record in records]:
        future.result(240)


def test_what_was_acknowledged_is_read_back_in_order_of_its_numbers(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0), command(2), command(1), Result(1, b"done"), Weights(1, b"digest"), Checked(2, {"n": 1.0}))
    again = CommandLog(tmp_path, committer).replay
    assert [each.seq_id for each in again.commands] == [0, 1, 2]
    assert again.results == {1: Result(1, b"done")}
    assert again.checked == {2: {"n": 1.0}}
    assert again.digests == {1: b"digest"}
    assert again.dropped == 0


def test_a_record_is_in_the_file_once_its_future_is_done(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    log.append(command(0, b"first")).result(240)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(segments(tmp_path)[0], copy)  # the machine stops here
    assert CommandLog(copy, committer).replay.commands == [command(0, b"first")]


def test_a_record_that_can_wait_is_written_with_the_next_or_at_the_end(tmp_path):
    committer = Committer()
    log = CommandLog(tmp_path, committer)
    appended(log, command(0))
    before = committer.commits
    log.append_later(Weights(0, b"first"))
    assert read_segment(segments(tmp_path)[0]).digests == {}
    appended(log, command(1))
    assert read_segment(segments(tmp_path)[0]).digests == {0: b"first"}
    assert committer.commits == before + 1
    log.append_later(Weights(1, b"last"))
    committer.close()
    assert read_segment(segments(tmp_path)[0]).digests == {0: b"first", 1: b"last"}


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_a_torn_tail_is_dropped_and_the_log_goes_on(tmp_path, committer, cut):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0))
    appended(log, command(1, b"torn" * 10))
    path = segments(tmp_path)[0]
    os.truncate(path, path.stat().st_size - cut)
    torn = CommandLog(tmp_path, committer)
    assert torn.replay.commands == [command(0)]
    assert torn.replay.dropped > 0
    appended(torn, command(1, b"again"))
    whole = CommandLog(tmp_path, committer).replay
    assert whole.commands == [command(0), command(1, b"again")]
    assert whole.dropped == 0


@pytest.mark.parametrize("where", ["length", "body"])
def test_damage_before_valid_records_is_refused(tmp_path, committer, where):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0))
    begins = segments(tmp_path)[0].stat().st_size
    appended(log, command(1))
    appended(log, command(2))
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[begins + (0 if where == "length" else 12)] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="damaged at byte"):
        read_segment(path)


def test_rotation_keeps_what_is_still_needed(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0), command(1), command(3), command(2))
    (log.new_state(3) / "weights").write_bytes(b"w")
    appended(log, Result(1, b"old"), Result(3, b"failed", failed=True), Weights(3, b"digest"))  # while it is written
    waiting = [log.append(record) for record in (command(4), Checked(4, {"n": 1.0}))]
    log.rotate(3, [Result(2, b"uncollected")]).result(240)
    for each in waiting:
        each.result(240)
    appended(log, command(5))
    again = CommandLog(tmp_path, committer).replay
    assert (again.first, again.results) == (3, {2: Result(2, b"uncollected"), 3: Result(3, b"failed", failed=True)})
    assert (again.checked, again.digests) == ({4: {"n": 1.0}}, {3: b"digest"})
    assert [each.seq_id for each in again.commands] == [3, 4, 5]
    assert again.state is not None
    assert (again.state / "weights").read_bytes() == b"w"
    assert [path.name for path in segments(tmp_path)] == ["000000.log", "000003.log"]


def test_a_crash_between_state_and_segment_leaves_the_old_segment(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0), command(1))
    log.new_state(1).rename(tmp_path / "000001")
    (tmp_path / "000001.part").write_bytes(b"")
    again = CommandLog(tmp_path, committer).replay
    assert again.first == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000.log"]


def test_old_segments_go_beyond_the_limit(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    for first in (1, 2, 3):
        appended(log, command(first - 1, b"x" * 1000))
        log.new_state(first)
        log.rotate(first, [], keep_bytes=1500).result(240)
    assert [path.name for path in segments(tmp_path)] == ["000002.log", "000003.log"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["000002", "000003"]


def test_segments_are_in_the_order_of_their_numbers(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    for first in (999_990, 1_000_010):
        log.new_state(first)
        log.rotate(first, [], keep_bytes=1 << 20).result()
    assert (tmp_path / "1000010").is_dir()
    log.close().result()
    assert CommandLog(tmp_path, committer).replay.first == 1_000_010


def test_a_full_disk_fails_the_command_and_takes_the_frame_back(tmp_path, committer, monkeypatch):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0))

    def half(file, data):
        real(file, bytes(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")

    real = os.write
    monkeypatch.setattr("rlloop.api.log.os.write", half)
    with pytest.raises(OSError, match="No space"):
        log.append(command(1)).result(240)
    monkeypatch.undo()
    appended(log, command(2))
    assert [each.seq_id for each in CommandLog(tmp_path, committer).replay.commands] == [0, 2]


def test_a_segment_that_cannot_be_begun_leaves_the_old_one_in_use(tmp_path, committer, monkeypatch):
    log = CommandLog(tmp_path, committer)
    appended(log, *(command(number) for number in range(4)))
    monkeypatch.setattr("rlloop.api.log.os.fsync", fails)
    log.new_state(4)
    for begun in (lambda: log.rotate(4, []), lambda: log.shrink(lambda records: records[2:])):
        with pytest.raises(OSError, match="No space"):
            begun().result(240)
    monkeypatch.undo()
    appended(log, command(4))
    assert len(CommandLog(tmp_path, committer).replay.commands) == 5
    log.shrink(lambda records: records[3:]).result(240)  # once there is room
    assert [each.seq_id for each in CommandLog(tmp_path, committer).replay.commands] == [3, 4]


def fails(_):
    raise OSError(28, "No space left on device")


def test_nobody_who_gives_up_waiting_stops_the_thread(tmp_path, committer):
    log, gate = CommandLog(tmp_path, committer), threading.Event()
    committer.between(gate.wait)
    assert not log.append(command(0)).cancel()
    gate.set()
    appended(log, command(1))
    assert len(CommandLog(tmp_path, committer).replay.commands) == 2


def test_what_waits_together_shares_a_sync(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    gate = threading.Event()
    committer.between(gate.wait)
    futures = [log.append(command(number)) for number in range(300)]
    before = committer.commits
    gate.set()
    for future in futures:
        future.result(240)
    assert committer.commits - before <= 2
    assert len(CommandLog(tmp_path, committer).replay.commands) == 300


def test_a_log_without_states_shrinks(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    appended(log, *(command(number, b"x" * 100) for number in range(10)))
    before = log.nbytes
    log.shrink(lambda records: records[-2:]).result(240)
    assert log.nbytes < before
    appended(log, command(10))
    assert [each.seq_id for each in CommandLog(tmp_path, committer).replay.commands] == [8, 9, 10]
    assert len(segments(tmp_path)) == 1


def test_the_size_of_a_log_can_be_asked_for_while_its_file_is_closed(tmp_path, committer, monkeypatch):
    log, close, unlink, sizes, others = CommandLog(tmp_path / "log", committer), os.close, Path.unlink, [], []
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    appended(log, *(command(number) for number in range(3)))
    size = log.nbytes

    def closed(file: int) -> None:
        close(file)
        others.append(os.open(tmp_path / "large", os.O_RDONLY))  # which has the descriptor of the closed file
        sizes.append(log.nbytes)

    monkeypatch.setattr(os, "close", closed)
    monkeypatch.setattr(Path, "unlink", lambda path: (unlink(path), sizes.append(log.nbytes)))
    log.shrink(lambda records: records).result(240)
    log.close().result(240)
    monkeypatch.undo()
    assert max(sizes) <= size
    for file in others:
        os.close(file)


def test_a_record_of_another_log_may_come_while_the_last_ones_are_written(tmp_path, monkeypatch):
    committer = Committer()
    log, other = (CommandLog(tmp_path / name, committer) for name in ("a", "b"))
    log.append_later(Weights(0, b"digest"))
    flush = log.flush
    monkeypatch.setattr(log, "flush", lambda: (other.append_later(Weights(0, b"late")), flush()))
    committer.close()
    assert read_segment(segments(log.folder)[0]).digests == {0: b"digest"}


def test_a_closed_log_has_no_file_open_and_drops_what_comes_later(tmp_path, committer):
    log = CommandLog(tmp_path, committer)
    appended(log, command(0))
    log.append_later(Weights(0, b"digest"))
    log.close().result(240)
    opened = [fd.resolve() for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]
    appended(log, command(1))
    log.append_later(Weights(1, b"digest"))
    log.new_state(1)
    log.rotate(1, []).result(240)
    log.shrink(lambda records: records).result(240)
    log.close().result(240)
    assert log.nbytes == 0
    again = read_segment(tmp_path / "000000.log")
    assert (len(again.commands), again.digests) == (1, {0: b"digest"})
