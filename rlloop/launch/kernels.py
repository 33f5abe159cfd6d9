"""The CPU kernels, compiled ahead of their first use, on several cores.

numba compiles a kernel when it is first called, one at a time in a process, and keeps it in the cache. Here several
processes each call a part of what a run calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlloop.errors import RunError

if TYPE_CHECKING:
    from rlloop.config.run import RunConfig
    from rlloop.models import Model

PARTS = ("sample", "train", "probe")  # of a run: what its engine calls, what its trainer calls, the start-up check
SYNC = "sync"  # what publishing to engines elsewhere calls
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


def is_compiled(module: str = "") -> bool:
    """True if this version's kernels, or those of one module, are in the cache, for some type."""
    from rlloop.numerics.kernels.cpu.compiled.jit import CACHE

    return any(Path(CACHE).glob(f"{module}*/*.nbi"))


def compile_kernels(dtypes: Sequence[str] = ("float32",), parts: Sequence[str] = (*PARTS, SYNC)) -> float:
    """Compile what runs of these types call; returns the seconds it took. Raises `RunError` if a part fails."""
    began = time.monotonic()
    waiting = [(part, dtype) for dtype in dtypes for part in parts]
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="rlloop-kernels-") as scratch:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                part, dtype = waiting.pop(0)
                command = [sys.executable, "-m", "rlloop.launch.kernels", part, dtype, f"{scratch}/{part}-{dtype}"]
                running.append((f"{part}, {dtype}", subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)))
            name, process = running.pop(0)
            _, error = process.communicate()
            if process.returncode:
                raise RunError(f"the kernels cannot be compiled ({name}): {error.decode(errors='replace')[-2000:]}")
    return time.monotonic() - began


def compile_if_new(config: RunConfig, say: Callable[[str], None]) -> None:
    """Before a run on a CPU: compile, and say so, what the cache lacks."""
    from rlloop.config.fleet import FleetKind
    from rlloop.config.run import Launch

    if config.device != "cpu":
        return
    publishes = config.fleet.kind is FleetKind.regions or (config.launch is Launch.ray and config.replicas > 0)
    parts = [*([] if is_compiled() else PARTS), *([SYNC] if publishes and not is_compiled("steps_fast") else [])]
    if parts:
        say(f"Compiling kernels for this machine, once, on {os.cpu_count()} cores: half a minute or so")
        seconds = compile_kernels([config.model.dtype], parts)
        say(f"Compiled in {seconds:.0f} s; `rlloop doctor --compile` does it ahead")


def _sample(dtype: str) -> None:
    from rlloop.rollout import Engine
    from rlloop.types import SamplingParams

    sampling = [SamplingParams(4, seed=0), SamplingParams(4, seed=1, temperature=0.7, top_p=0.9, top_k=5)]
    Engine(_model(dtype)).generate([[2, 3, 4], [5]], sampling)


def _train(dtype: str) -> None:
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer
    from rlloop.trainer.batching import TrainSequence

    trainer = Trainer(_model(dtype), TrainerConfig())
    trainer.forward_backward([TrainSequence.supervised([2, 3], [4, 5, 6])], get_loss("sft"))
    trainer.optim_step()


def _probe(dtype: str) -> None:
    import torch

    from rlloop.numerics.ops import ops_for
    from rlloop.numerics.probe import probe
    from rlloop.numerics.profile import NumericsProfile

    probe(ops_for(NumericsProfile()), getattr(torch, dtype))


def _sync(dtype: str) -> None:
    import numpy as np

    from rlloop.sync import codec
    from rlloop.sync.bits import Bits

    name, kind = ("F32", np.uint32) if dtype == "float32" else ("BF16", np.uint16)
    for count in (64, codec.SMALL + 1):  # small tensors have a coder of their own
        old, new = Bits(name, np.zeros(count, kind)), Bits(name, np.arange(count).astype(kind))
        new.array[8:] = 0
        encoded = codec.encode(new, old)
        codec.decode(encoded.codec, encoded.content, name, (count,), old)


def _model(dtype: str) -> Model:
    from rlloop.models import load_model, new_model, save_model

    folder = Path(sys.argv[3])
    save_model(new_model(CONFIG, seed=0), folder)
    return load_model(folder, dtype=dtype)


if __name__ == "__main__":
    {"sample": _sample, "train": _train, "probe": _probe, "sync": _sync}[sys.argv[1]](sys.argv[2])
