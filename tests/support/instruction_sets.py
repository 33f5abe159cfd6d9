"""Results of a small model, computed in this process or in one that takes its processor for an older one.

`python -m tests.support.instruction_sets FOLDER` prints the digests of `computed`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from llvmlite import binding

from rlloop import load_model
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.numerics.kernels.cpu.compiled import bfloat16, tiles
from rlloop.trainer import Trainer
from tests.support.rank_cases import bits, results
from tests.support.train_sequences import make_batch

AFTER_AVX2 = ("amx", "avx512", "avx10", "avxvnni")
DTYPES = ("float32", "bfloat16")


def computed(folder: Path) -> dict[str, str]:
    """Digests of logprobs, gradients, samples and an update, by type; and what computed them."""
    found = results({("model", dtype): folder for dtype in DTYPES}, None)
    for dtype in DTYPES:
        trainer = Trainer(load_model(folder, dtype=dtype), TrainerConfig(lr=1e-2, grad_clip=0.5))
        trainer.forward_backward(make_batch(), get_loss("grpo"))
        trainer.optim_step()
        found |= {f"{dtype} updated {name}": bits(weight) for name, weight in trainer.compute_copy()}
    digests = {name: hashlib.sha256(value).hexdigest() for name, value in found.items()}
    unit = f"AMX {bfloat16.HAS_AMX}, {tiles.MAIN} tiles, PyTorch {torch.backends.cpu.get_cpu_capability()}"
    return {**digests, "computed by": unit}


def computed_with_avx2(folder: Path) -> dict[str, str]:
    """`computed` of kernels, and libraries, that use nothing newer than AVX2."""
    features = binding.get_host_cpu_features().items()
    kept = (f"{'+' if has and not name.startswith(AFTER_AVX2) else '-'}{name}" for name, has in features)
    environment = {
        **os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ",".join(kept),
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.support.instruction_sets", str(folder)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(computed(Path(sys.argv[1]))))
