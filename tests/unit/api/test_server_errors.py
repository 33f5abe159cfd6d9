"""What the API answers to failures of its own machine."""

import errno

import msgspec
import pytest
from starlette.requests import Request

from rlloop.api.server import _os_error

REQUEST = Request({"type": "http", "path": "/api/v1/asample", "headers": []})


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 503), (errno.EFBIG, 503), (errno.EBADF, 500)])
def test_a_full_disk_is_said_and_the_request_may_be_repeated(number, status):
    answer = _os_error(REQUEST, OSError(number, "no space"))
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, "1" if status == 503 else None)
    assert ("free space" in msgspec.json.decode(answer.body)["error"]) == (status == 503)
