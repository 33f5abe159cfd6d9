"""Kernels by device: what a backend has, what a run imports, and a third one beside the CPU's and Triton's."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlloop.numerics.kernels.triton
from rlloop.numerics.kernels import kernel, kernels_for, register_kernels
from rlloop.numerics.kernels.cpu import backend as cpu
from rlloop.numerics.kernels.protocol import Kernels

NAMES = [name for name in vars(Kernels) if not name.startswith("_")]

ANOTHER_DEVICE = """
import sys
for name in ("numba", "llvmlite", "triton"):
    sys.modules[name] = None  # an import raises
import types
import torch
import rlloop.launch.run, rlloop.rollout, rlloop.trainer

from rlloop.models import new_model
from rlloop.numerics import kernels
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from tests.support.drifted_pair import CONFIG

kernels._by_device[torch.device("meta")] = types.SimpleNamespace(  # called directly: no fake implementation
    embedding_backward=lambda grad, tokens, rows: grad.new_empty(rows, grad.shape[1])
)
model = new_model(CONFIG, 0).to("meta")
ids, start = torch.zeros(8, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
layout = AttentionLayout(start, start[:1], start[:1, None], 8, True)
hidden = model.hidden(ids, ids, layout)
model.ops.token_logprob(hidden, model.head, ids, LogitsProcessing())[0].sum().backward()
assert all(parameter.grad is not None for parameter in model.parameters())
assert not any(name.startswith("rlloop.numerics.kernels.cpu") for name in sys.modules)
"""

THIRD = """
import sys
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from rlloop.models.weights import usable_device
from rlloop.numerics.kernels import backend_of, kernels_for, register_kernels
from rlloop.numerics.kernels.cpu import backend as cpu
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile

torch.utils.rename_privateuse1_backend("third")
_setup_privateuseone_for_python_backend("third")
calls = []


class Elsewhere(torch.Tensor):
    @staticmethod
    def __new__(cls, here):
        tensor = torch._C._acc.create_empty_tensor(here.shape, here.dtype)
        tensor.__class__ = cls
        tensor.here = here
        return tensor

    def __init__(self, here):
        pass


def silu_mul(gate, up):
    calls.append("silu_mul")
    return Elsewhere(cpu.silu_mul(gate.here, up.here))


def gated_linear(x, gate, up):
    calls.append("gated_linear")
    return Elsewhere(cpu.gated_linear(x.here, gate.here, up.here))


register_kernels("third", __name__, packages=("numpy",), lacks=("attention sinks",))
device = usable_device("third")
assert (device.type, device.index) == ("third", 0)
assert backend_of("third").packages == ("numpy",)
ops, x = ops_for(NumericsProfile()), torch.randn(4, 16)
far = Elsewhere(x)
assert far.device.type == "third"
assert torch.equal(ops.silu_mul(far, far).here, ops.silu_mul(x, x))
assert torch.equal(ops.gated_linear(far, far, far).here, ops.gated_linear(x, x, x))
assert calls == ["silu_mul", "gated_linear"]
try:
    ops.sigmoid_mul(far, far)
except NotImplementedError as error:
    assert "the kernels for 'third' (__main__) have no 'sigmoid_mul'" in str(error)
else:
    raise AssertionError
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_another_device_needs_no_numba():
    run(ANOTHER_DEVICE)


def test_a_cpu_needs_no_triton():
    assert kernels_for(torch.device("cpu")) is cpu
    assert "triton" not in sys.modules
    assert "rlloop.numerics.kernels.triton.backend" not in sys.modules


@pytest.mark.slow
def test_a_third_backend_is_a_module_and_a_registration():
    run(THIRD)


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_has_every_kernel_with_its_arguments(name):
    function, declared = getattr(cpu, name), vars(Kernels)[name]
    if not isinstance(declared, property):
        wanted, has = (
            list(inspect.signature(declared).parameters)[1:],
            list(inspect.signature(function).parameters.values()),
        )
        assert [each.name for each in has][: len(wanted)] == wanted
        assert all(each.default is not inspect.Parameter.empty for each in has[len(wanted) :])


def test_triton_has_the_kernels_of_the_protocol_but_one():
    """Read, not imported: few machines have Triton."""
    tree = ast.parse((Path(rlloop.numerics.kernels.triton.__file__).parent / "backend.py").read_text())
    names = set[str]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(each) for each in node.targets}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    assert set(NAMES) - names == {"embedding_backward"}


def test_kernels_in_use_stay():
    kernels_for(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"kernels for 'cpu' are in use \(rlloop.numerics.kernels.cpu.backend\)"):
        register_kernels("cpu", "another.module")


def test_a_device_without_kernels_is_named():
    with pytest.raises(ValueError, match="no kernels for 'xla' are registered, only for cpu, cuda"):
        kernel("xla", "linear")(None)
