"""vLLM's own server around rlloop's model, reached through the proxy: the trainer's bits over OpenAI's protocol."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlloop import Engine, SamplingParams
from rlloop.models import load_model, save_model
from rlloop.rollout.vllm.proxy import proxy_app
from tests.parity.models import tiny_qwen3

KEY = "a key of vLLM's own"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """Address and folder."""
    folder = tmp_path_factory.mktemp("served")
    save_model(tiny_qwen3(), folder / "model")
    words = Tokenizer(WordLevel({f"w{id}": id for id in range(300)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": KEY}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    # What `vllm serve` starts. The command itself asks for metadata of `vllm`, which the package vllm-cpu has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model"]
    command += [
        "--config-format",
        "rlloop",
        "--load-format",
        "rlloop",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--enforce-eager", "--served-model-name", "policy", "--max-num-seqs", "16"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            assert server.poll() is None, (folder / "log").read_text()[-6000:]
            time.sleep(0.2)
        yield url, folder / "model"
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, path: str, **body: object) -> httpx.Response:
    """Through the proxy, which alone has vLLM's key."""

    async def asked() -> httpx.Response:
        upstream = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
        async with (
            upstream,
            httpx.AsyncClient(transport=httpx.ASGITransport(proxy_app(upstream)), base_url="http://proxy") as client,
        ):
            return await client.post(path, json=body)

    return asyncio.run(asked())


def complete(url: str, **more: object) -> httpx.Response:
    shared = {"model": "policy", "max_tokens": 24, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    return ask(url, "/v1/completions", **(shared | more))


def test_completions_have_the_trainers_bits(served):
    url, folder = served
    engine = Engine(load_model(folder))
    for seed, (prompt, sampling) in enumerate(
        [([5, 6, 7], {"temperature": 1.0}), (list(range(10, 60)), {"temperature": 0.7, "top_p": 0.9, "top_k": 40})]
    ):
        answer = complete(url, prompt=prompt, seed=seed, **sampling)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=seed, **sampling)
        [expected] = engine.generate([prompt], params)
        assert choice["token_ids"] == expected.token_ids
        made = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        assert made.tobytes() == expected.logprobs.tobytes()


def test_what_the_trainer_does_not_know_and_what_changes_a_server_is_refused(served):
    url, _ = served
    refused = complete(url, prompt=[5, 6], presence_penalty=0.5)
    assert refused.status_code == 400
    assert "presence_penalty" in refused.text
    for path in ("/collective_rpc", "/reset_prefix_cache", "/sleep", "/pause", "/init_weight_transfer_engine"):
        assert ask(url, path).status_code == 404
