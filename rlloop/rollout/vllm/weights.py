"""A live stock model's weights by Hugging Face name, as views of the tensors that vLLM multiplies with.

Of vLLM's tensor-parallel ranks each has its parts of them: equal ones in order of rank, but for the last rows of a
vocabulary, and key-value heads fewer than ranks, which consecutive ranks share. Experts are divided like other weights,
or (expert parallelism) each lies on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloop.errors import SyncError
from rlloop.sync.live import split

PRODUCTS = ("W_UK_T", "W_UV")  # of latent attention, made from kv_b_proj
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@dataclass(frozen=True)
class Packed:
    """A matrix stored in a kernel's own order; written and read in place."""

    live: Tensor  # [n] contiguous: one expert's packed matrix
    places: Tensor  # [N, K] int64: index of each number in it

    @property
    def shape(self) -> torch.Size:
        return self.places.shape

    def copy_(self, weight: Tensor) -> None:
        self.live[self.places] = weight.to(self.live.dtype)

    def read(self) -> Tensor:
        return self.live[self.places]


Part = Tensor | Packed


def live_parts(model: Any) -> dict[str, Part]:
    """Name -> view of this rank's part. Fused projections stand under the names of their parts, tied weights under
    each of theirs, stacked experts under each expert's; rows that pad a vocabulary are left out.
    """
    fused = FUSED | getattr(model, "packed_modules_mapping", {})
    weights: dict[str, Part] = {}
    for path, module in model.named_modules():
        prefix, _, leaf = path.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            if kind in PRODUCTS or (leaf == "routed_experts" and kind == "e_score_correction_bias"):
                continue  # recomputed by `renew`; and the router's own, which is listed under its name
            if leaf in fused and hasattr(module, "output_sizes"):
                names = (f"{prefix}.{name}.{kind}" for name in fused[leaf])
                rows = dict(zip(names, module.output_partition_sizes, strict=True))
                weights |= split(tensor.detach(), rows)
            elif kind in ("w13_weight", "w2_weight"):
                weights |= _experts(path, kind, module, tensor.detach())
            else:
                held = getattr(module, "shard_indices", None)  # of a vocabulary, whose rows vLLM pads
                weights[f"{path}.{kind}"] = tensor.detach()[: held and held.num_org_elements]
    return weights


def renew(model: Any, dtype: torch.dtype) -> None:
    """Recompute, in place, the matrices that vLLM derives from its weights after loading and multiplies by."""
    for module in model.modules():
        if any(hasattr(module, name) for name in PRODUCTS):
            module.process_weights_after_loading(dtype)


def plain(weight: Part) -> Tensor:
    """A tensor as the checkpoint has it."""
    return weight.read() if isinstance(weight, Packed) else weight


Place = tuple[int, int]  # a dimension, and where a rank's part begins along it


def place(whole: tuple[int, ...], shapes: Sequence[tuple[int, ...]], rank: int) -> Place:
    """Place of `rank`'s part in a weight of shape `whole`, of which ranks have parts of `shapes`, in order of rank.

    Raises `SyncError` where such parts do not make up the weight.
    """
    own = shapes[rank]
    if own == whole:
        return 0, 0
    dim = next((dim for dim, (part, of) in enumerate(zip(own, whole, strict=False)) if part != of), 0)
    sizes = [shape[dim] for shape in shapes]
    copies, odd = divmod(sum(sizes), whole[dim])
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if odd or not copies or others != {(*whole[:dim], *whole[dim + 1 :])}:
        raise SyncError(f"parts of shapes {shapes} make up no weight of shape {whole}")
    return dim, sum(sizes[: rank - rank % copies : copies])


def _experts(path: str, kind: str, module: Any, stacked: Tensor) -> dict[str, Part]:
    """w13 [E, 2F, D] holds gate over up, w2 [E, D, F] is down; F is padded where a kernel wants it."""
    experts, order = path.removesuffix(".routed_experts"), _order(module, stacked)
    size = module.moe_config.intermediate_size_per_partition_unpadded
    weights: dict[str, Part] = {}
    held = range(len(stacked)) if module.expert_map is None else (module.expert_map >= 0).nonzero().flatten().tolist()
    for index, expert in zip(held, stacked.unbind(0), strict=True):
        names = ("down",) if kind == "w2_weight" else ("gate", "up")
        rows = expert.shape[0] // len(names)
        for at, name in enumerate(names):
            mine = (slice(None), slice(size)) if name == "down" else slice(at * rows, at * rows + size)
            weight = expert[mine] if order is None else Packed(expert.view(-1), order[mine])
            weights[f"{experts}.{index}.{name}_proj.weight"] = weight
    return weights


def _order(module: Any, stacked: Tensor) -> Tensor | None:
    """[N, K] int64: where vLLM's CPU kernel for experts put each number of a matrix; None: it is as it was.

    Asked of the packing itself, which moves numbers and changes none: it packs their indices, a byte at a time.
    """
    if stacked.device.type != "cpu":
        if (backend := module.quant_method.unquantized_backend.name) not in ("TRITON", "BATCHED_TRITON"):
            raise SyncError(f"vLLM keeps experts in an order of {backend}; start it with --moe-backend triton")
        return None
    from vllm._custom_ops import cpu_prepack_moe_weight

    isa = module.quant_method.moe_kernel.fused_experts.isa
    count = stacked[0].numel()
    index = torch.arange(count).view(1, *stacked.shape[1:])
    source = torch.zeros(count, dtype=torch.int64)
    for shift in range(0, 32, 8):
        packed = cpu_prepack_moe_weight(((index >> shift) & 255).to(stacked.dtype), isa)
        source += packed.view(-1).long() << shift
    order = torch.empty(count, dtype=torch.int64)
    order[source] = torch.arange(count)
    return order.view(stacked.shape[1:])
