"""On-policy reinforcement learning for language models with zero train-inference KL, bit for bit.

    model = rlloop.load_model("path/to/a/hugging-face-folder")
    engine = rlloop.Engine(model)
    [completion] = engine.generate([[1, 2, 3]], rlloop.SamplingParams(max_tokens=32, seed=0))
    [logprobs] = rlloop.token_logprobs(model, [(completion.prompt_ids, completion.token_ids)])
    assert (logprobs.detach().numpy() == completion.raw_logprobs).all()

Names are imported when first used, so that `import rlloop` costs nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Read when torch loads OpenMP. Idle threads that spin instead of sleeping slow every kernel down many times over as
# soon as anything else needs a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from rlloop.errors import ConfigError, ModelError, ParityError, RlloopError, RunError
    from rlloop.launch.grpo import GRPO
    from rlloop.launch.python import train
    from rlloop.launch.ray_service import RayTrainingService
    from rlloop.loop.own import Run
    from rlloop.models import Model, load_model, save_model
    from rlloop.models.adapter_files import load_adapter
    from rlloop.models.scoring import token_logprobs
    from rlloop.numerics.profile import NumericsProfile
    from rlloop.rollout import Engine
    from rlloop.training.clients import SamplingClient, ServiceClient, TrainingClient
    from rlloop.training.shapes import resolve_training_profile
    from rlloop.types import Completion, Example, ModelInput, RewardResult, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "rlloop.errors": ("ConfigError", "ModelError", "ParityError", "RlloopError", "RunError"),
    "rlloop.launch.grpo": ("GRPO",),
    "rlloop.launch.python": ("train",),
    "rlloop.launch.ray_service": ("RayTrainingService",),
    "rlloop.loop.own": ("Run",),
    "rlloop.models": ("Model", "load_model", "save_model"),
    "rlloop.models.adapter_files": ("load_adapter",),
    "rlloop.models.scoring": ("token_logprobs",),
    "rlloop.numerics.profile": ("NumericsProfile",),
    "rlloop.rollout": ("Engine",),
    "rlloop.training.clients": ("SamplingClient", "ServiceClient", "TrainingClient"),
    "rlloop.training.shapes": ("resolve_training_profile",),
    "rlloop.types": ("Completion", "Example", "ModelInput", "RewardResult", "SamplingParams"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "GRPO",
    "Completion",
    "ConfigError",
    "Engine",
    "Example",
    "Model",
    "ModelError",
    "ModelInput",
    "NumericsProfile",
    "ParityError",
    "RayTrainingService",
    "RewardResult",
    "RlloopError",
    "Run",
    "RunError",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TrainingClient",
    "load_adapter",
    "load_model",
    "resolve_training_profile",
    "save_model",
    "token_logprobs",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlloop' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Documented modules by their former names, so that users' recipes, rewards and environments keep working.
_FORMER = {
    "rlloop.batches": "rlloop.loop.step_data",
    "rlloop.environments": "rlloop.loop.environments",
    "rlloop.plots": "rlloop.runs.plots",
    "rlloop.records": "rlloop.runs.folder",
    "rlloop.rollout.remote": "rlloop.rollout.fleet.client",
    "rlloop.rollout.wire": "rlloop.rollout.fleet.wire",
    "rlloop.rollout.vllm.following": "rlloop.rollout.vllm.worker_replica",
    "rlloop.targets": "rlloop.config.instantiate",
    "rlloop.verify": "rlloop.audit",
}


class _FormerNames(MetaPathFinder, Loader):
    """Imports a former name as the module of the present name, the same object."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _FORMER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_FORMER[spec.name])
        self._spec = module.__spec__  # which the import system overwrites
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


sys.meta_path.append(_FormerNames())
