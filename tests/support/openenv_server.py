"""An OpenEnv server on loopback, made of the library itself.

`python -m tests.support.openenv_server` prints its address and serves until it is interrupted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.command import free_port


@contextmanager
def counting_server() -> Iterator[tuple[str, Any]]:
    """Each action's text is answered by 7 less the actions so far; the third is worth 1 and ends the episode, others
    1/4. Gives the address, and the environment's class, whose `open` counts those that are."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Told(Observation):
        text: str = ""

    class Counting(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        open = 0

        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            Counting.open += 1

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
            self.count, self.seed, self.more = 0, seed, more
            return Told(text="begin")

        def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Told:
            self.count += 1
            if action.message == "raise":
                raise ValueError("crashed")
            last = self.count == 3
            return Told(text=str(7 - self.count), done=last, reward=1.0 if last else 0.25)

        @property
        def state(self) -> State:
            return State(step_count=self.count)

        def close(self) -> None:
            Counting.open -= 1

    port = free_port()
    app = create_fastapi_app(Counting, Say, Told, max_concurrent_envs=64)
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}", Counting
    running.should_exit = True
    thread.join()


if __name__ == "__main__":
    with counting_server() as (address, _):
        print(address, flush=True)
        threading.Event().wait()
