"""Kernels for CPU tensors, compiled by numba: `rlloop.numerics.kernels.protocol.Kernels`, whole.

Float32 inside with one rounding to the tensors' type, in backwards too, and no bit depends on a thread.
"""

from rlloop.numerics.fp8 import dequantised as fp8_dequantised
from rlloop.numerics.fp8 import quantised_rows as fp8_rows
from rlloop.numerics.kernels.cpu.attention import (
    attention,
    attention_backward,
    families_backward,
    full_attention,
    full_attention_backward,
    select,
    sparse_attention,
    sparse_attention_backward,
)
from rlloop.numerics.kernels.cpu.compiled.decoder_layer import decoder_layer
from rlloop.numerics.kernels.cpu.compiled.fused import gated_linear, qkv_cache_write, qkv_linear
from rlloop.numerics.kernels.cpu.distribution import (
    logits_rows,
    sample,
    score_logits,
    score_logits_backward,
    token_logprob,
    token_logprob_backward,
)
from rlloop.numerics.kernels.cpu.elementwise import (
    layer_norm,
    rms_norm,
    rms_norm_backward,
    rope,
    sigmoid_mul,
    silu_mul,
    silu_mul_backward,
)
from rlloop.numerics.kernels.cpu.memory import keep_freed
from rlloop.numerics.kernels.cpu.mixture import combine, combine_backward, route
from rlloop.numerics.kernels.cpu.products import (
    adapted_grouped_linear,
    adapted_linear,
    embedding_backward,
    fp8_product,
    grouped_linear,
    grouped_rows_gradient,
    grouped_weight_gradient,
    linear,
    linear_float32,
    product,
    squares_of_rows,
    sum_of_rows,
)
from rlloop.numerics.kernels.cpu.recurrence import (
    causal_conv,
    causal_conv_backward,
    recurrent_gates,
    scan,
    scan_backward,
    scan_state,
)
from rlloop.numerics.kernels.cpu.vision import gelu, gelu_backward, layer_norm_backward

keep_freed()

gated_experts = fp8_gated_experts = head_linear = dequantised = adapted_rows = adapted_products = add_layer_norm = None
sample_part = kept_token_logprob = wide_sum = add_product = None
norm_rope = norm_rope_backward = silu_mul_remade = None
READS_PACKED = frozenset({"grouped_linear", "adapted_grouped_linear", "grouped_rows_gradient"})
