"""A fault planted in any operation of an engine, and what the doctor says to it: the table of docs/parity.md.

    python -m tests.support.planted_faults

The fault is a factor from 0.7 to 1.3 that follows the number it is put to, so that a row's bits stay a function of the
row; of choices, it is another choice. Nothing declares it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from rlloop.models import Model, new_model
from rlloop.numerics.ops import Ops
from rlloop.rollout import Engine
from tests.support.doctored import CONFIG as DENSE
from tests.support.doctored import MIXTURE, diagnosed

SPARSE = {**MIXTURE, "index_n_heads": 4}
DELTA = {
    **DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    **DENSE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 2,
    "layers_block_type": ["linear_attention", "mlp"], "ssm_state_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 20,
    "n_groups": 2, "tie_word_embeddings": False,
}  # fmt: skip

# planted -> (model, what the doctor is to call it, the module or layer that it is to name)
FAULTS = {
    "linear": (DENSE, "linear", "model.layers.0.self_attn.q_proj"),
    "rms_norm": (DENSE, "rms_norm", "model.layers.0.input_layernorm"),
    "residual sum": (DENSE, "residual sum", "model.layers.0.input_layernorm"),
    "rope": (DENSE, "rope", "model.layers.0"),
    "attention": (DENSE, "attention", "model.layers.0"),
    "silu_mul": (DENSE, "silu_mul", "model.layers.0"),
    "logits": (DENSE, "logits", "lm_head"),
    "sample": (DENSE, "token_logprob", "lm_head"),
    "head_linear": (SPARSE, "head_linear", "model.layers.0.self_attn.kv_b_proj"),
    "index_weights": (SPARSE, "index_weights", "model.layers.0.self_attn.indexer.weights_proj"),
    "layer_norm": (SPARSE, "layer_norm", "model.layers.0.self_attn.indexer.k_norm"),
    "select": (SPARSE, "select", "model.layers.0"),
    "sparse_attention": (SPARSE, "sparse_attention", "model.layers.0"),
    "router_logits": (SPARSE, "router_logits", "model.layers.1.mlp.gate"),
    "route": (SPARSE, "route", "model.layers.1.mlp.gate.e_score_correction_bias"),
    "expert choice": (SPARSE, "expert choice", "model.layers.1.mlp.gate.e_score_correction_bias"),
    "experts": (SPARSE, "experts", "model.layers.1.mlp.experts.gate_up_proj"),
    "combine": (SPARSE, "combine", "model.layers.1"),
    "causal_conv": (DELTA, "causal_conv", "model.layers.0.linear_attn.conv1d"),
    "recurrent_gates": (DELTA, "recurrent_gates", "model.layers.0.linear_attn.A_log"),
    "scan": (DELTA, "scan", "model.layers.0"),
    "sigmoid_mul": (DELTA, "sigmoid_mul", "model.layers.0"),
    "relu_squared": (MAMBA, "relu_squared", "model.layers.1"),
}
PART = {
    "residual sum": ("rms_norm", 1), "rms_norm": ("rms_norm", 0), "route": ("route", 0), "expert choice": ("route", 1),
    "sample": ("sample", 1), "recurrent_gates": ("recurrent_gates", 0),
}  # fmt: skip


def off(x: Tensor, op: str) -> Tensor:
    """Another number for each number, the next expert for each expert; of several positions, the last is forgotten."""
    if op == "select":
        several = (x >= 0).sum(-1, keepdim=True) > 1
        return x.where((x != x.max(-1, keepdim=True)[0]) | ~several, -1)
    return x * (1 + 0.3 * (1000 * x).cos()) if x.is_floating_point() else (x + 1) % MIXTURE["n_routed_experts"]


class Faulty:
    """`Ops` with one operation, or one of its results, that is off."""

    fuses = False  # or the operation would be part of another

    def __init__(self, ops: Ops, planted: str) -> None:
        self._ops, self.profile = ops, ops.profile
        self._name, self._part = PART.get(planted, (planted, None))

    def __getattr__(self, op: str) -> Callable[..., Any]:
        right = getattr(self._ops, op)
        if op != self._name:
            return right

        def wrong(*args: Any, **options: Any) -> Any:
            result = right(*args, **options)
            if self._part is None:
                return off(result, op)
            return tuple(off(part, op) if at == self._part else part for at, part in enumerate(result))

        return wrong


def sharp_model(config: dict[str, Any]) -> Model:
    """Far from uniform, so that a difference anywhere reaches the logprobs."""
    made = new_model(config, seed=0)
    for weight in made.parameters():
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    return made


def named(planted: str) -> dict[str, Any]:
    """The diagnosis of a fault planted in an operation."""
    model = sharp_model(FAULTS[planted][0])
    engine = Engine(model)
    view = model.with_profile(model.profile)
    view.ops = cast(Ops, Faulty(model.ops, planted))
    engine.model = view
    return diagnosed(engine, model).details


def main() -> None:
    print("| planted in | operation named | at | profile knob |\n|---|---|---|---|")
    for planted in FAULTS:
        found = named(planted)
        print(f"| `{planted}` | `{found['op']}` | `{found['where']}` | `{found['knob']}` |")


if __name__ == "__main__":
    main()
