"""Imports of a GPU run."""

import subprocess
import sys

GENERATE_AND_TRAIN = """
import sys
import rlloop
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.trainer import Trainer
from rlloop.types import SamplingParams
from tests.support.gpu_models import dense_model
from tests.support.samples import as_sample, different

model = dense_model("bfloat16")
engine, trainer = rlloop.Engine(model), Trainer(model, TrainerConfig())
sampling = [SamplingParams(20, seed=seed, temperature=0.7, top_p=0.9) for seed in (0, 1)]
made = engine.generate([[5, 6, 7], [8, 9]], sampling)
samples = [as_sample(i, each, i - 0.5) for i, each in enumerate(made)]
result = trainer.forward_backward(samples, get_loss("grpo"))
assert different(samples, result.logprobs) == 0
trainer.optim_step()
imported = {name.partition(".")[0] for name in sys.modules}
assert "triton" in imported
assert not imported & {"numba", "llvmlite"}, imported & {"numba", "llvmlite"}
"""


def test_a_gpu_run_imports_no_numba():
    done = subprocess.run([sys.executable, "-c", GENERATE_AND_TRAIN], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
