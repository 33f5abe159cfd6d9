"""Kernels for CUDA tensors: `rlloop.numerics.kernels.protocol.Kernels`, but for the gradient of an embedding, which
PyTorch's own operations make (`operators.parameters`).

Forwards keep the contract. Backwards repeat themselves from run to run, and use cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import attention as dense
from rlloop.numerics.kernels.triton import attention_backward as dense_backward
from rlloop.numerics.kernels.triton import linear as products
from rlloop.numerics.kernels.triton import sparse
from rlloop.numerics.kernels.triton.adapted import (
    adapted_grouped_linear,
    adapted_linear,
    adapted_products,
    adapted_rows,
    grouped_linear,
)
from rlloop.numerics.kernels.triton.elementwise import (
    gelu,
    gelu_backward,
    rope,
    sigmoid_mul,
    silu_mul,
    silu_mul_backward,
    silu_mul_remade,
    squares_of_rows,
)
from rlloop.numerics.kernels.triton.experts import experts as gated_experts
from rlloop.numerics.kernels.triton.experts import fp8_gated_experts, head_linear
from rlloop.numerics.kernels.triton.fp8 import fp8_dequantised, fp8_product, fp8_rows
from rlloop.numerics.kernels.triton.grouped import weight_gradient as grouped_weight_gradient
from rlloop.numerics.kernels.triton.kept_logits import kept_token_logprob
from rlloop.numerics.kernels.triton.launch import strict_products
from rlloop.numerics.kernels.triton.linear import add_product
from rlloop.numerics.kernels.triton.linear import gradient as product
from rlloop.numerics.kernels.triton.multi_linear import gated_linear, qkv_linear
from rlloop.numerics.kernels.triton.norm_rope import norm_rope, norm_rope_backward
from rlloop.numerics.kernels.triton.norms import (
    add_layer_norm,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from rlloop.numerics.kernels.triton.packed import dequantised, sums
from rlloop.numerics.kernels.triton.qkv_cache_write import qkv_cache_write
from rlloop.numerics.kernels.triton.recurrence import (
    causal_conv,
    causal_conv_backward,
    recurrent_gates,
)
from rlloop.numerics.kernels.triton.recurrence_backward import scan_backward
from rlloop.numerics.kernels.triton.routing import combine, combine_backward, route
from rlloop.numerics.kernels.triton.scan import scan, scan_state
from rlloop.numerics.kernels.triton.sparse import select, sparse_attention_backward
from rlloop.numerics.kernels.triton.token_logprob import (
    logits_rows,
    sample,
    sample_part,
    score_logits,
    score_logits_backward,
    token_logprob,
    token_logprob_backward,
)
from rlloop.numerics.kernels.triton.wide_sum import wide_sum
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.packed import is_packed

strict_products()


READS_PACKED = frozenset(
    {"linear", "linear_float32", "grouped_linear", "adapted_linear", "adapted_grouped_linear", "gated_experts"}
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if is_packed(weight):
        output = sums(x, weight, True, None, x.dtype if bias is None else torch.float32)
        return output if bias is None else (output + bias.float()).to(x.dtype)
    return products.product(x, weight, bias, x.dtype)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    if is_packed(weight):
        return sums(x, weight, True, None, torch.float32)
    return products.product(x, weight, None, torch.float32)


grouped_rows_gradient = grouped_linear
decoder_layer = None  # a CUDA graph launches a layer's kernels at no cost


def sum_of_rows(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float32)


def attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, context: Tensor, block_start: Tensor, block_size: int,
    scale: float, split: int, window: int, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In parts of `attention.SEGMENT` keys; those of a window are one. Raises NotImplementedError for other parts."""
    _check_parts(split)
    return dense.attention(q, k, v, query_start, context, block_start, block_size, scale, window, sinks)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return dense_backward.attention_backward(q, k, v, query_start, out, lse, grad, scale, window)


def families_backward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    start = layout.query_start
    return dense_backward.attention_backward(q, k, v, start, out, lse, grad, scale, window, families=layout)


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    context = torch.zeros_like(query_start[1:])
    return dense.attention(q, k, v, query_start, context, query_start[:-1, None], longest, scale, causal=False)


def full_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return dense_backward.attention_backward(q, k, v, query_start, out, lse, grad, scale, causal=False)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, block_start: Tensor, block_size: int,
    scale: float, split: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_parts(split)
    return sparse.sparse_attention(q, k, v, selected, query_start, block_start, block_size, scale)


def _check_parts(split: int) -> None:
    if split:
        raise NotImplementedError(f"attention on CUDA has no parts of {split} keys; use device=cpu for them")
