"""Implementations of each operation by name: rlloop's, PyTorch's, transformers', or those of an outside module.

An outside module is named by its dotted path, as `model.profile.activation=their_package.kernels`. It has functions
with the names and signatures of the knob's operations (`OPERATIONS`; shapes are those of `rlloop.numerics.ops.Ops`),
at least one; the others stay rlloop's. It must handle gradients (by plain PyTorch or a `torch.autograd.Function`) and
devices itself. It may declare

    BATCH_INVARIANT = True

which promises that the bits of a row depend on that row alone. Then the start-up probe checks its functions like
rlloop's, and `parity.mode=require` is allowed. Without it, require refuses the module. Fingerprints have the path and a
digest of the source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

BUILT_IN = {
    "rlloop": "rlloop.numerics.operators",
    "stock": "rlloop.numerics.stock",
    "huggingface": "rlloop.numerics.huggingface",
    "reference": "rlloop.numerics.reference",
}
SIMPLER = {"huggingface": "stock", "stock": "reference"}  # has the operations that the other does not define
OPERATIONS = {  # knob -> what it chooses the implementation of
    "linear": ("linear", "head_linear"),
    "rms_norm": ("rms_norm",),
    "activation": ("silu_mul", "sigmoid_mul", "gelu"),
    "rope": ("rope",),
    "attention": ("attention", "full_attention", "sparse_attention"),
    "token_logprob": ("logits", "token_logprob", "sample"),
    "router": ("router_logits", "route"),
    "experts": ("experts",),
    "combine": ("combine",),
    "indexer": ("index_weights", "layer_norm", "select"),
    "recurrent": ("causal_conv", "recurrent_gates", "scan"),
}


def is_outside(name: str) -> bool:
    """True if `name` has the form of an outside module's path."""
    return "." in name and all(component.isidentifier() for component in name.split("."))


def implementation(name: str, operation: str) -> Callable[..., Any]:
    """The function that implements an operation. `name` is one of `BUILT_IN`, or an outside module's path."""
    module = importlib.import_module(BUILT_IN[name]) if name in BUILT_IN else outside(name)
    if name in BUILT_IN and name not in SIMPLER:
        return getattr(module, operation)
    return getattr(module, operation, None) or implementation(SIMPLER.get(name, "rlloop"), operation)


@functools.cache
def outside(path: str) -> ModuleType:
    """The module of a path. Raises ValueError where it cannot be imported."""
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ValueError(
            f"{path} cannot be imported ({error}); a profile takes {', '.join(BUILT_IN)} or the dotted path of an "
            "installed module"
        ) from error


def check_outside(knob: str, path: str) -> None:
    """Raises ValueError where the module cannot be imported, or has none of the knob's operations."""
    if not any(callable(getattr(outside(path), operation, None)) for operation in OPERATIONS[knob]):
        raise ValueError(f"{path} has no function {' or '.join(OPERATIONS[knob])}, which {knob} chooses")


def batch_invariant(name: str) -> bool:
    """True for rlloop's implementation, and for an outside module that declares batch invariance."""
    return name == "rlloop" or (name not in BUILT_IN and getattr(outside(name), "BATCH_INVARIANT", False) is True)


def source_digest(path: str) -> str:
    """SHA-256 of a module's file; of a package's, of all its Python files by name."""
    spec = importlib.util.find_spec(path)
    assert spec is not None, path
    assert spec.origin is not None, path
    file, digest = Path(spec.origin), hashlib.sha256()
    files = sorted(file.parent.rglob("*.py")) if spec.submodule_search_locations else [file]
    for each in files:
        digest.update(each.relative_to(file.parent).as_posix().encode() + b"\0" + each.read_bytes() + b"\0")
    return digest.hexdigest()
