"""Milliseconds that the training API adds to a pipelined forward_backward and optim_step, over the work itself.

    python benchmarks/api_overhead.py            # 300 pairs each way, a LoRA of a tiny Qwen3
    python benchmarks/api_overhead.py --quick    # 30 pairs, nothing recorded

Both ways run the same pairs on the same service: called in this process, and over HTTP on loopback from another one,
both requests sent before either result is waited for. A request is on disk before it is acknowledged.
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


def seconds_each(pair: Callable[[], None], count: int) -> float:
    """The median of `count` pairs, after a tenth as many that are not counted."""
    times = []
    for index in range(count + count // 10):
        began = time.perf_counter()
        pair()
        if index >= count // 10:
            times.append(time.perf_counter() - began)
    return float(np.median(times))


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


def over_http(url: str, count: int) -> float:
    api = Api(url).start("model", rank=8)

    def pair() -> None:
        gradient = api.forward_backward_(TOKENS).json()["request_id"]
        update = api.command_("optim_step", adam_params={"learning_rate": 1e-4})
        api.result(gradient)
        api.result(update)

    return seconds_each(pair, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    parser.add_argument("--url", help=argparse.SUPPRESS)  # of the server, in the client's process
    parser.add_argument("--count", type=int, default=300, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url is not None:
        print(over_http(given.url, given.count))
        return
    count = 30 if given.quick else given.count
    sys.setswitchinterval(5e-4)  # as `rlloop serve api` has it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(new_model(SMALL, seed=0), folder / "model")
        service = TrainingService(folder / "model", checkpoints=folder / "checkpoints")
        work = seconds_each(in_process(service), count)
        settings = Settings(folder=folder / "api", model_name="model", model_folder=folder / "model")
        server = BackgroundServer(ApiServer(service, settings, Keys({}, open=True)).app, Listen())
        client = [sys.executable, __file__, "--url", server.url, "--count", str(count)]
        served = float(subprocess.run(client, capture_output=True, text=True, check=True).stdout)
        server.close()
        service.close()
    figures = [
        Figure(name="api, forward_backward and optim_step pipelined", unit="ms", value=1e3 * served,
               peer="in process", peer_value=1e3 * work, lower_is_better=True),
        Figure(name="api, overhead of a pair", unit="ms", value=1e3 * (served - work), peer="a mock's overhead",
               peer_value=8.0, aim=1.0, lower_is_better=True),
    ]  # fmt: skip
    if given.quick:
        print(table(figures))
    else:
        report("api_overhead", figures)


if __name__ == "__main__":
    main()
