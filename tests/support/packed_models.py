"""Checkpoints with packed weights, and beside each one the same weights written plainly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import make_image_checkpoint
from tests.support.kimi_models import make_kimi_checkpoint

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"}}},
}  # fmt: skip
FORMATS = {  # format -> (family, quantization_config, or what hf_quant_config.json holds)
    "int4": ("qwen3_moe", INT4),
    "int4_kimi": ("kimi_k25", INT4),  # experts alone, as it was released
    "nvfp4": ("qwen3", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4_compressed": ("qwen3_moe", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "fp8": ("deepseek_v3", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "fp8_tensor": ("nemotron_h", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}),
    "fp8_tensor_dense": ("llama", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8_rows": ("qwen3", {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96}
EXPERTS = {"moe_intermediate_size": 32}
WIDTH = 160  # of models that read images, and of FP8's: two blocks
FILE = "model.safetensors"


def nibbles(rows: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8)


def bytes_of(codes: Tensor) -> Tensor:
    """Two codes a byte, the first one low."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def packed_matrix(kind: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A random matrix: its parts by the endings of their names, and its bfloat16 values by the plain formula."""
    rows, width = shape
    size = width**-0.5
    if kind == "fp8":
        codes = (torch.randn(shape, generator=generator) * 3).to(torch.float8_e4m3fn)
        scales = (torch.rand(-(-rows // 128), -(-width // 128), generator=generator) + 0.5) * size / 3
        wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
        return {".weight": codes, ".weight_scale_inv": scales}, (codes.float() * wide).bfloat16()
    if kind.startswith("fp8_"):  # a scale of the tensor, or one for each row
        codes = (torch.randn(shape, generator=generator) * 3).to(torch.float8_e4m3fn)
        scales = (torch.rand(() if kind == "fp8_tensor" else rows, generator=generator) + 0.5) * size / 3
        values = (codes.float() * scales.reshape(-1, 1)).bfloat16()
        parts = {".weight": codes, ".weight_scale": scales}
        return (parts | {".input_scale": torch.tensor(1.0)} if kind == "fp8_tensor" else parts), values
    codes = nibbles(rows, width, generator)
    if kind == "int4":
        words = torch.zeros(rows, width // 8, dtype=torch.int64)
        for place in range(8):
            words |= codes[:, place::8].long() << (4 * place)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        scales = ((torch.rand(rows, width // 32, generator=generator) + 0.5) * size / 4).bfloat16()
        values = ((codes.float() - 8) * scales.float().repeat_interleave(32, 1)).bfloat16()
        return {".weight_packed": words, ".weight_scale": scales, ".weight_shape": torch.tensor(shape)}, values
    scales = (torch.rand(rows, width // 16, generator=generator) * 10 + 1).to(torch.float8_e4m3fn)
    of_tensor = torch.tensor(size / 12)
    whole = scales.float() * (of_tensor if kind == "nvfp4" else 1 / (1 / of_tensor))
    values = (FP4[codes.long()] * whole.repeat_interleave(16, 1)).bfloat16()
    if kind == "nvfp4":
        parts = {".weight": bytes_of(codes), ".weight_scale": scales, ".weight_scale_2": of_tensor}
        return {**parts, ".input_scale": torch.tensor(1.0)}, values
    global_scale = (1 / of_tensor)[None]
    return {".weight_packed": bytes_of(codes), ".weight_scale": scales, ".weight_global_scale": global_scale}, values


def packed_experts(shape: tuple[int, ...], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """gpt-oss's: blocks [E, N, K / 32, 16] and exponents, of a weight [E, K, N]."""
    experts, width, rows = shape
    codes = nibbles(experts * rows, width, generator).view(experts, rows, width)
    scales = torch.randint(120, 126, (experts, rows, width // 32), generator=generator, dtype=torch.uint8)
    values = FP4[codes.long()] * 2.0 ** (scales.double() - 127).repeat_interleave(32, 2).float()
    return {"_blocks": bytes_of(codes).unflatten(-1, (-1, 16)), "_scales": scales}, values.bfloat16().mT.contiguous()


def make_packed(place: Path, kind: str, **config: Any) -> tuple[Path, Path]:
    """The folders of the packed weights and of the plain ones; `config`: of the model."""
    family, quantization = FORMATS[kind]
    wrapped = family == "kimi_k25"
    plain, packed = place / "plain", place / "packed"
    sizes: dict[str, Any] = SIZES | ({"hidden_size": WIDTH} if kind.startswith("fp8_") else {})
    sizes |= (EXPERTS if family in ("qwen3_moe", "deepseek_v3", "kimi_k25", "nemotron_h") else {}) | config
    for folder in (plain, packed):
        if wrapped:
            make_kimi_checkpoint(folder, dtype=torch.bfloat16, num_hidden_layers=3, **sizes)
        else:
            make_checkpoint(folder, family, dtype=torch.bfloat16, **sizes)
    _pack(place, kind.removesuffix("_kimi").removesuffix("_dense"), ".experts." if wrapped else "")
    _quantize_config(packed, quantization, "text_config" if wrapped else None)
    return packed, plain


def make_packed_images(place: Path, family: str, kind: str, under: str | None = None) -> tuple[Path, Path]:
    """As `make_packed`, of a model that reads images; its tower is plain, and so are the gates' inputs of recurrent
    layers, as released. `under`: where config.json has the quantization_config; None: at the top."""
    plain, packed = place / "plain", place / "packed"
    text: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96}
    if family != "qwen3_vl":
        text |= EXPERTS
    if family == "qwen3_5_moe":
        text |= {"shared_expert_intermediate_size": 32, "linear_value_head_dim": 24}
    for folder in (plain, packed):
        make_image_checkpoint(folder, family, dtype=torch.bfloat16, text=text, vision={"out_hidden_size": WIDTH})
    _pack(place, kind, "language_model.layers.", ("in_proj_a.", "in_proj_b."))
    _quantize_config(packed, FORMATS[kind][1], under)
    return packed, plain


def _quantize_config(folder: Path, quantization: dict[str, Any], under: str | None) -> None:
    if "quantization" in quantization:
        (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
        return
    config = json.loads((folder / "config.json").read_text())
    (config if under is None else config[under])["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def _pack(place: Path, kind: str, part: str, left: tuple[str, ...] = ()) -> None:
    """Rewrite place/packed with projections packed whose names have `part` and none of `left`, experts one by one, and
    place/plain with their values."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(place / "plain" / FILE)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts = re.search(r"experts\.(gate_up|down)_proj$", name) is not None
        if kind == "mxfp4" and experts:
            parts, values = packed_experts(tuple(tensor.shape), generator)
            stored |= {name + ending: each for ending, each in parts.items()}
            tensors[name] = values
        elif (
            kind != "mxfp4" and "_proj" in name and part in name and not any(each in name for each in left)
            and (tensor.ndim == 2 or experts)
        ):  # fmt: skip
            for matrix, rows in _matrices(name, tensor).items():
                parts, values = packed_matrix(kind, (rows.shape[0], rows.shape[1]), generator)
                stored |= {matrix + ending: each for ending, each in parts.items()}
                rows.copy_(values)
        else:
            stored[name] = tensor
    save_file(tensors, place / "plain" / FILE)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, place / "packed" / FILE)


def _matrices(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Views of a weight's matrices by name, without .weight: itself, or those of each expert of a stack."""
    if tensor.ndim == 2:
        return {name.removesuffix(".weight"): tensor}
    before, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return {
        f"{before}.{expert}.{each}": rows
        for expert, matrix in enumerate(tensor)
        for each, rows in zip(kinds, matrix.chunk(len(kinds)), strict=True)
    }
