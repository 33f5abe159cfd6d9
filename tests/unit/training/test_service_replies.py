"""Replies of a service in another process: errors come back as they were or by name, and one that cannot be read ends
the service instead of what waits for it."""

import itertools
import pickle
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from rlloop.api.core import Refused
from rlloop.errors import ConfigError, RlloopError, RunError
from rlloop.launch.ranks import RankFailed
from rlloop.rollout.errors import VersionUnavailable
from rlloop.rollout.fleet.generation import BadField
from rlloop.training.service_process import ProcessTrainingService, _Host


class OfTwo(Exception):
    """An error of a library: it can be pickled, and not be read again."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize(
    "error",
    [BadField("top_p", "it is wrong"), VersionUnavailable(3, 1, 2), Refused(422, "no"), RankFailed(1, 2, "died")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_rlloop_is_the_same_in_another_process(error):
    same = pickle.loads(pickle.dumps(error))
    assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


def test_an_error_that_cannot_be_read_again_is_sent_as_its_name_and_message():
    ours, theirs = Pipe()
    host = _Host(theirs)
    host._send(3, False, OfTwo("a hole", "the end"))
    number, good, error = ours.recv()
    assert (number, good, type(error), str(error)) == (3, False, RlloopError, "OfTwo: a hole at the end")
    host._send(4, False, ConfigError("as it is"))
    assert isinstance(ours.recv()[2], ConfigError)


def test_a_reply_that_cannot_be_read_fails_all_that_waits():
    ours, theirs = Pipe()
    killed = list[bool]()
    service: Any = ProcessTrainingService.__new__(ProcessTrainingService)
    service._process = SimpleNamespace(kill=lambda: killed.append(True), wait=lambda: -9)
    service._socket, service._died, service._ended = ours, None, None
    service._lock, service._numbers, service._waiting = threading.Lock(), itertools.count(), {}
    waits = [service._call("info", (), {}) for _ in range(2)]
    theirs.send((0, True, Unreadable()))
    threading.Thread(target=service._receive, daemon=True).start()
    for future in [*waits, service._call("info", (), {})]:  # also what comes later
        with pytest.raises(RunError, match="ended with code -9, since a reply could not be read: ValueError"):
            future.result(10)
    assert killed == [True]
