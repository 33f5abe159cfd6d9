"""What the API answers to failures of its own machine."""

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from rlloop.api.core import Base, keep_base
from rlloop.api.server import _os_error
from rlloop.api.sessions import Session, Sessions
from rlloop.errors import RunError

REQUEST = Request({"type": "http", "path": "/api/v1/asample", "headers": []})


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 503), (errno.EFBIG, 503), (errno.EBADF, 500)])
def test_a_full_disk_is_said_and_the_request_may_be_repeated(number, status):
    answer = _os_error(REQUEST, OSError(number, "no space"))
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, "1" if status == 503 else None)
    assert ("free space" in msgspec.json.decode(answer.body)["error"]) == (status == 503)


READERS: dict[str, Callable[[Any], Any]] = {
    "base.json": lambda core: keep_base(core.folder, Base("tiny", "tiny", {})),
    "sessions/s-1/session.json": lambda core: Sessions(core).restore(),
    "samplers/0.json": Session.restore,
    "losses/a.json": Session.restore,
}


@pytest.mark.parametrize("content", [b"", b"{}", b'"\xff"', b"[" * 100_000])
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named_and_not_only_what_is_wrong_in_it(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    core = SimpleNamespace(folder=tmp_path, settings=SimpleNamespace(folder=tmp_path))
    core.core = core.service = core
    core.create_custom_loss = pytest.fail
    with pytest.raises(RunError, match=rf"{name} is damaged: .*; restore it from a copy"):
        READERS[name](core)
