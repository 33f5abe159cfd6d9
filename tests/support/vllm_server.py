"""vLLM's own server of a small model, and the proxy before it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlloop.sync.manifest import new_key
from tests.support.command import free_port
from tests.support.fleet_run import Server

KEY = "a key of vLLM's own"


@contextmanager
def vllm_of(folder: Path, *options: str) -> Iterator[str]:
    """The address of a vLLM server of `folder`'s model."""
    shutil.copytree(folder / "model", folder / "served")
    words = Tokenizer(WordLevel({f"w{id}": id for id in range(160)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder / "served")
    port = free_port()
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": KEY}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    # What `vllm serve` starts. The command itself asks for metadata of `vllm`, which the package vllm-cpu has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "served")]
    command += [*options, "--enforce-eager"]
    command += ["--served-model-name", "policy", "--max-num-seqs", "16", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-scale-out", "--worker-extension-cls", "rlloop.rollout.vllm.worker_replica.Following"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            assert server.poll() is None, (folder / "log").read_text()[-6000:]
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def proxy_of(folder: Path, url: str) -> Server:
    """In front of the vLLM server at `url`, which follows the store `weights`."""
    new_key(folder / "key")
    (folder / "weights").mkdir()
    (folder / "vllm_key").write_text(KEY)
    return Server(
        folder, "proxy", "--upstream", url, "--upstream-key-file", "vllm_key",
        "--store", "weights", "--public-key", "key.pub", "--interval", "0.2",
    )  # fmt: skip
