"""Milliseconds that the training API adds to a pipelined forward_backward and optim_step, over the work itself.

    python benchmarks/api_overhead.py            # 300 pairs each way, a LoRA of a tiny Qwen3
    python benchmarks/api_overhead.py --quick    # 40 pairs, nothing recorded

Both ways run the same pairs, in turns of ten so that both see the same machine: called in this process, and over HTTP
on loopback from another one, both requests sent before either result is waited for; the server's service computes in a
process of its own, as `rlloop serve api` has it. A request is on disk before it is acknowledged. The same client also
calls a mock, a server whose work is to sleep: what that takes beyond is the client's own and HTTP's. Processes share
two cores with the work here, so the processors' time that a pair costs beside the work is a figure of its own: it does
not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import uvicorn
from children import Child, answer
from decode import CONFIG
from results_schema import ROOT, Figure, report
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

sys.path.insert(0, str(ROOT))

from rlloop.api.core import Settings
from rlloop.api.keys import Keys
from rlloop.api.schema import message
from rlloop.api.server import ApiServer
from rlloop.models import new_model, save_model
from rlloop.training.service import TrainingService
from rlloop.training.service_process import SWITCH, ProcessTrainingService
from rlloop.training.types import AdamParams, Datum, LoraConfig
from rlloop.types import ModelInput
from rlloop.web.server import BackgroundServer, Listen
from tests.support.api_client import Api
from tests.support.api_process import processor_seconds
from tests.support.command import free_port

SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TOKENS = [list(range(5 + row, 21 + row)) for row in range(4)]
TURN = 10  # pairs
MOCK_SECONDS = 0.05


def timed(pair: Callable[[], None]) -> list[float]:
    """Seconds of each pair of one turn."""
    times = []
    for _ in range(TURN):
        began = time.perf_counter()
        pair()
        times.append(time.perf_counter() - began)
    return times


def in_process(service: TrainingService) -> Callable[[], None]:
    model = service.create_model(lora=LoraConfig(8, seed=0)).result().model_id
    data = [
        Datum(ModelInput.from_ids(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)})
        for ids in TOKENS
    ]

    def pair() -> None:
        gradient = service.forward_backward(model, data, "cross_entropy")
        update = service.optim_step(model, AdamParams(learning_rate=1e-4))
        gradient.result()
        update.result()

    return pair


def client(url: str) -> None:
    """A turn for each line of the input: seconds of each pair, and at last of the processor here."""
    api = Api(url).start("model", rank=8)

    def pair() -> None:
        gradient = api.forward_backward_(TOKENS).json()["request_id"]
        update = api.command_("optim_step", adam_params={"learning_rate": 1e-4})
        api.result(gradient)
        api.result(update)

    def turn(_: str) -> list[float]:
        began = time.process_time()
        return [*timed(pair), time.process_time() - began]

    answer(turn)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline, "the mock did not start"
            time.sleep(0.05)
        else:
            return


def mock(port: int) -> None:
    """A server that acknowledges at once; both results of a pair are there when it has slept for its work."""
    began = 0.0

    async def answer(request: Request) -> Response:
        nonlocal began
        route, body = request.path_params["route"], await request.body()
        if route == "forward_backward":
            began = time.perf_counter()
        if route == "create_session":
            return JSONResponse({"session_id": "session"})
        if route != "retrieve_future":
            return JSONResponse({"request_id": route})
        asked = json.loads(body)["request_id"]
        if asked == "create_model":
            return JSONResponse({"model_id": "model"})
        await asyncio.sleep(max(0.0, began + MOCK_SECONDS - time.perf_counter()))
        if asked == "optim_step":
            return JSONResponse({"metrics": {}})
        return Response(message("ForwardBackwardOutput")().SerializeToString(), media_type="application/x-protobuf")

    app = Starlette(routes=[Route("/api/v1/{route}", answer, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error", access_log=False, loop="asyncio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    parser.add_argument("--url", help=argparse.SUPPRESS)  # of the server, in the client's process
    parser.add_argument("--mock", type=int, help=argparse.SUPPRESS)  # port, in the mock's process
    given = parser.parse_args()
    if given.url is not None:
        client(given.url)
        return
    if given.mock is not None:
        mock(given.mock)
        return
    turns = 4 if given.quick else 30
    sys.setswitchinterval(SWITCH)  # as the service's process has it
    torch.set_num_threads(1)  # the other core has the client
    work, served, mocked = list[float](), list[float](), list[float]()
    cpu = np.zeros(3)  # the work's, the server's, the client's
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        with subprocess.Popen([sys.executable, __file__, "--mock", str(port)]) as sleeper:
            save_model(new_model(SMALL, seed=0), folder / "model")
            here = TrainingService(folder / "model", checkpoints=folder / "here")
            service = ProcessTrainingService(folder / "model", threads=1, checkpoints=folder / "checkpoints")
            settings = Settings(folder=folder / "api", model_name="model", model_folder=folder / "model")
            server = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
            _wait_for(port)
            urls = server.url, f"http://127.0.0.1:{port}"
            client_, mocks = (Child("client", [sys.executable, __file__, "--url", url]) for url in urls)
            client_.wait()
            mocks.wait()
            pair = in_process(here)
            for turn in range(turns + 1):
                began = time.process_time()
                alone = timed(pair)
                middle, elsewhere = time.process_time(), processor_seconds(service.pid)
                *there, of_client = client_.ask("")
                end = time.process_time() + processor_seconds(service.pid) - elsewhere
                *slept, _ = mocks.ask("")
                if turn:  # the first warms up
                    work, served, mocked = work + alone, served + there, mocked + slept
                    cpu += middle - began, end - middle, of_client
            client_.close()
            mocks.close()
            sleeper.terminate()
        server.close()
        service.close()
        here.close()
    cpu *= 1e3 / len(work)

    def figure(what: str, of: Callable[[list[float]], float]) -> Figure:
        name = f"api, forward_backward and optim_step pipelined, {what}"
        return Figure(name=name, unit="ms", value=1e3 * of(served), peer="in process", peer_value=1e3 * of(work),
                      lower_is_better=True)  # fmt: skip

    over = 1e3 * float(np.median(served) - np.median(work))
    mock_over = 1e3 * float(np.median(mocked) - MOCK_SECONDS)
    figures = [
        figure("fastest", min),
        figure("median", lambda times: float(np.median(times))),
        figure("slowest", max),
        Figure(name="api, overhead of a pair, median", unit="ms", value=over, peer="a mock's, published",
               peer_value=8.0, aim=1.0, lower_is_better=True),
        Figure(name="api, overhead of a pair, median, here", unit="ms", value=over, peer="a mock's, here",
               peer_value=mock_over, lower_is_better=True),
        Figure(name="api, overhead of a pair, fastest", unit="ms", value=1e3 * (min(served) - min(work)),
               peer="a mock's, here", peer_value=1e3 * (min(mocked) - MOCK_SECONDS), lower_is_better=True),
        Figure(name="api, processor time of a pair, server over the work", unit="ms", value=cpu[1] - cpu[0],
               lower_is_better=True),
        Figure(name="api, processor time of a pair, client", unit="ms", value=cpu[2], lower_is_better=True),
    ]  # fmt: skip
    report("api-overhead", figures, write=not given.quick)


if __name__ == "__main__":
    main()
