"""The network copies bits, it never adds: what rlloop's source takes from torch.distributed, by its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlloop

ADDS = re.compile("all_?reduce|reduce_?scatter|multimem", re.IGNORECASE)
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"}  # add by themselves
KNOB = "all_reduce"  # of NumericsProfile: how a sum over segments is rounded, on one rank
COPIES = {
    "Work", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_to_all_single", "broadcast",
    "broadcast_object_list", "irecv", "isend", "recv", "send",
}  # fmt: skip
OTHERS = {  # that move no tensors
    "DistError", "FileStore", "PrefixStore", "ProcessGroup", "Store", "TCPStore", "_symmetric_memory",
    "_symmetric_memory.empty", "_symmetric_memory.rendezvous", "destroy_process_group", "get_backend",
    "get_process_group_ranks", "get_rank", "get_world_size", "group", "group.WORLD", "init_process_group",
    "is_initialized", "new_subgroups_by_enumeration",
}  # fmt: skip
HOMES = ("torch.distributed.", "torch._C._distributed_c10d.")


def forbidden(source: str, *, copies: bool = False) -> list[str]:
    """Names in `source` that add over the network, or that are not known to copy alone. `copies`: it may copy."""
    tree = ast.parse(source)
    modules = {name: full for node in ast.walk(tree) for name, full in _imported(node) if name}
    allowed = OTHERS | COPIES if copies else OTHERS
    found = []
    for name, path in _names(tree, modules):
        unknown = any(path.startswith(home) and path.removeprefix(home) not in allowed for home in HOMES)
        if unknown or name in WRAPPERS or ADDS.search(name) or (name == "reduce" and path == ""):
            found.append(name)
    return found


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that an import binds, and what they are."""
    if isinstance(node, ast.Import):
        for each in node.names:
            top = each.name.partition(".")[0]
            yield (each.asname, each.name) if each.asname else (top, top)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for each in node.names:
            yield each.asname or each.name, f"{node.module}.{each.name}"


def _names(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Names that are imported, read or asked for by `getattr`, and their full path if a module has them, else ""."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, path in _imported(node):
                yield path.rpartition(".")[2], path
        elif isinstance(node, ast.Attribute):
            if not (node.attr == KNOB and ast.unparse(node.value).endswith("profile")):
                yield node.attr, _path(node, modules)
        elif isinstance(node, ast.Name) and not (node.id == KNOB and isinstance(node.ctx, ast.Store)):
            yield node.id, modules.get(node.id, "here")
        elif isinstance(node, ast.Call):
            match node.func, node.args:
                case ast.Name("getattr"), [owner, ast.Constant(str(name)), *_]:
                    yield name, _path(ast.Attribute(owner, name), modules)


def _path(node: ast.expr, modules: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := _path(node.value, modules)) else ""
    return modules.get(node.id, "") if isinstance(node, ast.Name) else ""


def test_nothing_adds_over_the_network():
    root = Path(rlloop.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    assert len(files) > 300
    found = {
        name: forbidden(path.read_text(), copies=name == "parallel/collectives.py") for name, path in files.items()
    }
    assert not {name: names for name, names in found.items() if names}, "gather, and add on one rank in a fixed order"


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist; dist.all_reduce(x)",
        "import torch.distributed as dist; dist.reduce(x, 0)",
        "import torch.distributed as dist; dist.reduce_scatter(x, y)",
        "import torch.distributed as dist; dist.all_reduce_coalesced(xs)",
        "import torch.distributed as dist; dist.reduce_scatter_tensor_coalesced(x, y)",
        "import torch.distributed as dist; add = dist.all_reduce",
        "import torch.distributed as dist; getattr(dist, 'reduce')(x, 0)",
        "import torch; torch.distributed.reduce(x, 0)",
        "import torch; torch.ops.symm_mem.multimem_all_reduce_(x, 'sum', name)",
        "import torch.distributed.nn; torch.distributed.nn.functional.broadcast(x)",
        "from torch.distributed import reduce",
        "from torch.distributed import reduce as gather; gather(x, 0)",
        "from torch import distributed; distributed.reduce(x, 0)",
        "from torch.distributed import *",
        "from torch.distributed.tensor import DTensor",
        "from torch.distributed.fsdp import fully_shard",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "import torch; torch.nn.parallel.DistributedDataParallel(model)",
        "from vllm.distributed import tensor_model_parallel_all_reduce",
        "group.allreduce(x)",
        "group.reduce(x)",
        "self.group.allreduce_coalesced(x)",
        "group._reduce_scatter_base(x, y)",
        "import torch.distributed as dist; dist.all_gather_single(x, y)",  # outside of rlloop.parallel.collectives
    ],
)
def test_the_rule_finds(source):
    assert forbidden(source)
    assert forbidden(source, copies=True) or "gather_single" in source


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist; dist.init_process_group('gloo'); dist.group.WORLD",
        "from functools import reduce; reduce(add, terms)",
        "import functools; functools.reduce(add, terms)",
        "class NumericsProfile:\n    all_reduce: str = 'fp32_tree'",
        "self.profile.all_reduce == 'rounded_chain'",
        "'an all-reduce of dist.all_reduce() in words'",
    ],
)
def test_the_rule_lets_pass(source):
    assert forbidden(source) == []
