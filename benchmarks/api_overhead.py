"""Milliseconds that the training API adds to a pipelined forward_backward and optim_step, over the work itself.

    python benchmarks/api_overhead.py            # 300 pairs each way, a LoRA of a tiny Qwen3
    python benchmarks/api_overhead.py --quick    # 40 pairs, nothing recorded

Both ways run the same pairs on the same service, in turns of ten so that both see the same machine: called in this
process, and over HTTP on loopback from another one, both requests sent before either result is waited for. A request is
on disk before it is acknowledged. Threads that wait for others share two cores with the work here, so the processors'
time that a pair costs beside the work is a figure of its own: it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from decode import CONFIG
from results_schema import ROOT, Figure, report, table

sys.path.insert(0, str(ROOT))

from rlloop.api.core import Settings
from rlloop.api.keys import Keys
from rlloop.api.server import ApiServer
from rlloop.models import new_model, save_model
from rlloop.training.service import TrainingService
from rlloop.training.types import AdamParams, Datum, LoraConfig
from rlloop.types import ModelInput
from rlloop.web.server import BackgroundServer, Listen
from tests.support.api_client import Api

SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TOKENS = [list(range(5 + row, 21 + row)) for row in range(4)]
TURN = 10  # pairs


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
    """A turn for each line of the input: its seconds, and the seconds of processor time it took here."""
    api = Api(url).start("model", rank=8)

    def pair() -> None:
        gradient = api.forward_backward_(TOKENS).json()["request_id"]
        update = api.command_("optim_step", adam_params={"learning_rate": 1e-4})
        api.result(gradient)
        api.result(update)

    for _ in sys.stdin:
        began = time.process_time()
        times = timed(pair)
        print(*times, time.process_time() - began, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    parser.add_argument("--url", help=argparse.SUPPRESS)  # of the server, in the client's process
    given = parser.parse_args()
    if given.url is not None:
        client(given.url)
        return
    turns = 4 if given.quick else 30
    sys.setswitchinterval(5e-4)  # as `rlloop serve api` has it
    torch.set_num_threads(1)  # the other core has the client
    work, served, cpu = list[float](), list[float](), np.zeros(3)  # cpu: the work's, the server's, the client's
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(new_model(SMALL, seed=0), folder / "model")
        service = TrainingService(folder / "model", checkpoints=folder / "checkpoints")
        settings = Settings(folder=folder / "api", model_name="model", model_folder=folder / "model")
        server = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
        command = [sys.executable, __file__, "--url", server.url]
        pair = in_process(service)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for turn in range(turns + 1):
                began = time.process_time()
                here = timed(pair)
                middle = time.process_time()
                print(file=process.stdin, flush=True)
                *there, of_client = map(float, process.stdout.readline().split())
                if turn:  # the first warms up
                    work, served = work + here, served + there
                    cpu += middle - began, time.process_time() - middle, of_client
            process.stdin.close()
        server.close()
        service.close()
    cpu *= 1e3 / len(work)

    def figure(what: str, of: Callable[[list[float]], float]) -> Figure:
        name = f"api, forward_backward and optim_step pipelined, {what}"
        return Figure(name=name, unit="ms", value=1e3 * of(served), peer="in process", peer_value=1e3 * of(work),
                      lower_is_better=True)  # fmt: skip

    over = 1e3 * float(np.median(served) - np.median(work))
    figures = [
        figure("fastest", min),
        figure("median", lambda times: float(np.median(times))),
        figure("slowest", max),
        Figure(name="api, overhead of a pair, median", unit="ms", value=over, peer="a mock's overhead", peer_value=8.0,
               aim=1.0, lower_is_better=True),
        Figure(name="api, processor time of a pair, server over the work", unit="ms", value=cpu[1] - cpu[0],
               lower_is_better=True),
        Figure(name="api, processor time of a pair, client", unit="ms", value=cpu[2], lower_is_better=True),
    ]  # fmt: skip
    if given.quick:
        print(table(figures))
    else:
        report("api-overhead", figures)


if __name__ == "__main__":
    main()
