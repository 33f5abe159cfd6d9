"""The training API's server in this process, on a service without a model."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

from rlloop.api.core import Settings
from rlloop.api.keys import Keys
from rlloop.api.server import ApiServer
from rlloop.web.server import BackgroundServer, Listen
from tests.support.fake_training import FakeTraining


@contextmanager
def serving(folder, keys=None, fake=None, **settings):
    """A server on a fake service; yields both."""
    (folder / "checkpoints").mkdir(exist_ok=True, parents=True)
    fake = fake or FakeTraining(folder / "checkpoints")
    chosen = Settings(folder=folder, model_name="fake", model_folder=folder, poll_seconds=0.2)
    server = ApiServer(fake, replace(chosen, **settings), keys or Keys({}, open=True))
    background = BackgroundServer(server.app, Listen())
    server.url = background.url
    try:
        yield server, fake
    finally:
        background.close()
        fake.close()
