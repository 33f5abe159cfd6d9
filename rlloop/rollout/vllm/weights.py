"""A live stock model's weights by Hugging Face name, as views into the parameters that vLLM multiplies by."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlloop.sync.live import split


def live_parts(model: Any) -> dict[str, Tensor]:
    """Name -> view, of a model on one rank. Fused projections stand under the names of their parts, tied weights under
    each of theirs, stacked experts under each expert's; rows that pad a vocabulary are left out.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    parts: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        prefix, _, leaf = path.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            if leaf in fused and hasattr(module, "output_sizes"):
                rows = dict(zip((f"{prefix}.{name}.{kind}" for name in fused[leaf]), module.output_sizes, strict=True))
                parts |= split(tensor.detach(), rows)
            elif kind in ("w13_weight", "w2_weight"):
                parts |= _experts(path, kind, tensor.detach())
            else:
                parts[f"{path}.{kind}"] = tensor.detach()[: getattr(module, "org_vocab_size", None)]
    return parts


def _experts(path: str, kind: str, stacked: Tensor) -> dict[str, Tensor]:
    """w13 [E, 2F, D] holds gate over up, w2 [E, D, F] is down."""
    experts = path.removesuffix(".routed_experts")
    parts: dict[str, Tensor] = {}
    for index, expert in enumerate(stacked.unbind(0)):
        if kind == "w2_weight":
            parts[f"{experts}.{index}.down_proj.weight"] = expert
        else:
            half = expert.shape[0] // 2
            names = (f"{experts}.{index}.{part}_proj.weight" for part in ("gate", "up"))
            parts |= split(expert, dict.fromkeys(names, half))
    return parts
