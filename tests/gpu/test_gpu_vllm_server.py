"""vLLM 0.26's own server on a GPU, behind the proxy: it follows a store, and hands choices of experts back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlloop import Engine, SamplingParams, token_logprobs
from rlloop.cli.main import main
from rlloop.models import load_model, new_model, save_model
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.runs.folder import read_records
from rlloop.sync.live import named_weights, tensors_of
from rlloop.sync.manifest import load_or_make_key, new_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import FolderStore
from tests.support.command import free_port
from tests.support.fleet_run import TOKEN, Server
from tests.support.gpu_runs import KINDS, OVERRIDES, SHARED
from tests.support.tiny_run import LEARNABLE
from tests.support.vllm_server import answers

pytest.importorskip("vllm", reason="vLLM 0.26 is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

FORMATS = {
    "ours": ["--config-format", "rlloop", "--load-format", "rlloop"],
    "stock": ["--load-format", "rlloop_stock", "--logprobs-mode", "processed_logprobs", "--enforce-eager",
              "--worker-cls", "rlloop.rollout.vllm.gpu.GpuWorker", "--moe-backend", "triton"],
}  # fmt: skip


class Line(NamedTuple):
    folder: Path
    url: str  # of the proxy
    stock: bool


@pytest.fixture(scope="module", params=[*FORMATS, "inside rlloop's own server"])
def line(request, tmp_path_factory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("line")
    save_model(new_model({**SHARED, **KINDS["mixture"]}, seed=0, dtype="bfloat16"), folder / "model")
    (folder / "learnable.py").write_text(LEARNABLE)
    shutil.copytree(folder / "model", folder / "served")
    words = Tokenizer(WordLevel({f"w{id}": id for id in range(SHARED["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder / "served")
    new_key(folder / "key")
    (folder / "weights").mkdir()
    follow = ["--store", "weights", "--public-key", "key.pub", "--interval", "0.2"]
    with ExitStack() as stack:
        if request.param in FORMATS:
            url = stack.enter_context(vllm_of(folder, FORMATS[request.param]))
            server = Server(folder, "proxy", "--upstream", url, *follow)
        else:
            kind = ["--engine", "vllm", "--device", "cuda", "--dtype", "bfloat16"]
            server = Server(folder, "engine", "--model", "served", *kind, *follow)
        stack.callback(server.kill)
        yield Line(folder, _address(server), request.param == "stock")


@contextmanager
def vllm_of(folder: Path, options: list[str]) -> Iterator[str]:
    port = free_port()
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "served")]
    command += ["--host", "127.0.0.1", "--port", str(port), *options, "--dtype", "bfloat16"]
    command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "100000000", "--max-num-seqs", "64"]
    command += ["--worker-extension-cls", "rlloop.rollout.vllm.worker_replica.Following"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        while not answers(f"http://127.0.0.1:{port}"):
            assert server.poll() is None, (folder / "log").read_text()[-6000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _address(server: Server) -> str:
    """The server's address, after the lines that torch and vLLM print first."""
    assert server.process.stdout is not None
    said = []
    for line in server.process.stdout:
        said.append(line)
        if line.startswith("rlloop ") and "http" in line:
            return line.rpartition(" ")[2].strip()
    raise AssertionError("".join(said))


def test_it_follows_a_store_and_says_what_was_chosen(line):
    prompts = [[5, 6, 7], list(range(10, 40)), [*range(10, 40), 50], [9]]
    sampling = [SamplingParams(max_tokens=30, seed=seed, temperature=(1.0, 0.7)[seed % 2]) for seed in range(4)]
    model = load_model(line.folder / "model", dtype="bfloat16", device="cuda")
    with RemoteEngine(line.url, token=TOKEN, timeout=60) as remote:
        for scale in (1.0, 1.25):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(scale)
            publisher = Publisher(FolderStore(line.folder / "weights"), load_or_make_key(line.folder / "key"), "run")
            step = 0 if publisher.last is None else publisher.last.step + 1
            tensors, aliases = tensors_of(named_weights(model).items())
            publisher.publish(tensors, step, aliases=aliases)
            remote.set_version(step)
            expected = Engine(model).generate(prompts, sampling)
            for _ in range(2):  # once more, from the prefix cache
                made = remote.generate(prompts, sampling)
                assert {each.policy_version for each in made} == {step}
                if not line.stock:
                    for a, b in zip(made, expected, strict=True):
                        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
                        assert a.logprobs.tobytes() == b.logprobs.tobytes()
                        assert a.raw_logprobs.tobytes() == b.raw_logprobs.tobytes()
                        assert np.array_equal(np.sort(a.routed_experts), np.sort(b.routed_experts))
                for each in made:
                    assert each.routed_experts.shape == (len(each.prompt_ids) + len(each.token_ids) - 1, 2, 2)
            scored = token_logprobs(model, [(each.prompt_ids, each.token_ids) for each in made], sampling=sampling)
            gap = torch.cat(scored).detach().cpu().numpy() - np.concatenate([each.logprobs for each in made])
            assert np.abs(gap).mean() < 0.05 if line.stock else not gap.any()


def test_it_pauses(line):
    prompts = [[5, 6, 7], [9], [11, 12]]
    sampling = [SamplingParams(max_tokens=length, seed=length, ignore_eos=True) for length in (110, 2, 111)]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        httpx.Client(base_url=line.url, headers=headers, timeout=60, trust_env=False) as client,
        RemoteEngine(line.url, token=TOKEN, timeout=60) as remote,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = remote.generate(prompts, sampling)
        for mode in ("keep", "abort"):
            answer = pool.submit(remote.generate, prompts, sampling)
            time.sleep(0.1)
            client.post(f"/rlloop/pause?mode={mode}").raise_for_status()
            client.post("/rlloop/resume").raise_for_status()
            made = answer.result(60)
            for part, whole in zip(made, expected, strict=True):
                count = len(part.token_ids)
                assert part.finish_reason == ("abort" if count < len(whole.token_ids) else "length")
                assert mode == "abort" or count == len(whole.token_ids)
                assert line.stock or part.token_ids == whole.token_ids[:count]


def test_a_run_over_it(line, monkeypatch):
    monkeypatch.chdir(line.folder)
    monkeypatch.syspath_prepend(line.folder)
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    command = ["train", "--config-name", "countdown/gpu", "run.dir=run", "model.path=model", *OVERRIDES]
    command += ["fleet=regions", "fleet.store=weights", "fleet.signing_key=key", "fleet.heartbeat=0.2"]
    command += [f'+fleet.engines.eu=["{line.url}"]']
    Path("run").mkdir()
    Path("run/fleet.json").write_text('{"run_id": "run"}')  # whose versions the engine follows since it began
    assert main([*command, *(["parity.mode=fallback", "trainer.lr=1e-3"] if line.stock else [])]) == 0
    records = list(read_records(Path("run/metrics.jsonl")))[1:]
    assert len(records) == 3
    for record in records:
        if line.stock:
            assert 0 < record["parity/k3"] < 1e-2
            assert record["parity/router_different"] < 0.05
        else:
            assert record["parity/tokens_different"] == record["parity/k3"] == record["parity/router_different"] == 0
