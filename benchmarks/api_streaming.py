"""Seconds from a datum's arrival to its result: sent as it comes, against a batch that is gathered first.

    python benchmarks/api_streaming.py            # 128 datums, one a second, over HTTP: two minutes
    python benchmarks/api_streaming.py --quick    # 16 datums, four a second, nothing recorded

Two equal models of one server get the same datums at the same times. One client sends each as it comes; the other
gathers the batch and sends it as one request. Both end with an update, and their weights must have the same bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from api_overhead import SMALL
from results_schema import ROOT, Figure, report

sys.path.insert(0, str(ROOT))

from rlloop.models import new_model, save_model
from tests.support.api_client import Api, output
from tests.support.api_process import ApiProcess
from tests.support.command import free_port


class Arrivals:
    """Datums that come at fixed times."""

    def __init__(self, count: int, seconds: float) -> None:
        """`seconds`: between two."""
        self.tokens = [[5 + row % 64, *range(9, 24)] for row in range(count)]
        began = time.monotonic() + 1.0
        self.times = [began + row * seconds for row in range(count)]

    def wait(self, row: int) -> list[int]:
        time.sleep(max(0.0, self.times[row] - time.monotonic()))
        return self.tokens[row]


def streamed(api: Api, arrivals: Arrivals) -> list[float]:
    """Seconds that each datum waited for its result."""
    waited = []
    for row, came in enumerate(arrivals.times):
        request = api.forward_backward_([arrivals.wait(row)]).json()["request_id"]
        output(api.result(request))
        waited.append(time.monotonic() - came)
    return waited


def gathered(api: Api, arrivals: Arrivals) -> list[float]:
    batch = [arrivals.wait(row) for row in range(len(arrivals.times))]
    output(api.result(api.forward_backward_(batch).json()["request_id"], 600.0))
    done = time.monotonic()
    return [done - came for came in arrivals.times]


def weights_of(api: Api, data: list[list[int]] | None = None) -> bytes:
    """Train on `data` and update; the logprobs that this leaves."""
    if data:
        api.forward_backward(data)
    step = api.optim_step()
    assert "error" not in step, step
    body = api.forward_backward([[5, 9, 14, 3, 7, 8, 21, 40]])
    return body.SerializeToString(deterministic=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    given = parser.parse_args()
    count, seconds = (16, 0.25) if given.quick else (128, 1.0)
    waited = dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(new_model(SMALL, seed=0), folder / "model")
        server = ApiProcess(folder / "model", folder / "api", free_port()).start()
        try:
            ways: dict[str, Callable[[Api, Arrivals], list[float]]] = {"streamed": streamed, "gathered": gathered}
            clients = {way: Api(server.url, f"tml-{way}").start("model", rank=8) for way in ways}
            for api in clients.values():
                weights_of(api, [[5, 6, 7]])  # kernels are loaded
            arrivals = Arrivals(count, seconds)
            threads = [
                threading.Thread(target=lambda way=way: waited.update({way: ways[way](clients[way], arrivals)}))
                for way in ways
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            left = {weights_of(api) for api in clients.values()}
        finally:
            server.kill()
    assert len(left) == 1, "the two models' weights differ"
    work = f"api, {count} datums, one each {seconds:g} s"
    ours, peer = waited["streamed"], waited["gathered"]

    def figure(what: str, value: float, peer_value: float, aim: float | None = None) -> Figure:
        return Figure(name=f"{work}: {what}", unit="s", value=value, peer="gathered", peer_value=peer_value, aim=aim,
                      lower_is_better=True)  # fmt: skip

    figures = [
        figure("first result after its arrival", ours[0], peer[0], aim=10.0),
        figure("result after arrival, median", float(np.median(ours)), float(np.median(peer))),
        figure("result after arrival, slowest", max(ours), max(peer)),
        figure("last result after the last arrival", ours[-1], peer[-1]),
    ]
    report("api-streaming", figures, write=not given.quick)


if __name__ == "__main__":
    main()
