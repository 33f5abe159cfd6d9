"""rlloop's own operations: schemas, gradients, and kernels chosen by the tensors' device.

Shapes, meaning and signatures are those of `rlloop.numerics.ops.Ops`; the kernels are
`rlloop.numerics.kernels.protocol.Kernels`.
"""

from rlloop.numerics.operators.adapted import (
    adapted_experts,
    adapted_head_linear,
    adapted_linear,
    linear_with_terms,
    reduced,
)
from rlloop.numerics.operators.distribution import (
    logits,
    logits_gradients,
    sample,
    score_logits,
    token_logprob,
    token_redraw,
)
from rlloop.numerics.operators.elementwise import norm_of_sum, rms_norm, rope, sigmoid_mul, silu_mul
from rlloop.numerics.operators.fp8 import fp8_experts, fp8_linear, fp8_linears
from rlloop.numerics.operators.fused import gated_down, norm_rope, products
from rlloop.numerics.operators.masked_attention import attention, index_weights, select, sparse_attention
from rlloop.numerics.operators.mixture import combine, experts, route, router_logits, unread_combine
from rlloop.numerics.operators.products import head_linear, linear, unread_linear
from rlloop.numerics.operators.recurrence import causal_conv, recurrent_gates, scan
from rlloop.numerics.operators.vision import full_attention, gelu, layer_norm
