"""A fault planted in any operation of an engine, its vision tower's and those under an adapter among them, and what the
doctor says to it: the table of docs/parity.md.

    python -m tests.support.planted_faults

The fault is a factor from 0.7 to 1.3 that follows the number it is put to, so that a row's bits stay a function of the
row; of choices, it is another choice. Nothing declares it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlloop.models import Model, new_model
from rlloop.models.adapter_weights import Adapter
from rlloop.numerics.ops import Ops
from rlloop.rollout import Engine
from rlloop.types import ModelInput
from tests.support.adapters import random_adapter
from tests.support.doctored import CONFIG as DENSE
from tests.support.doctored import MIXTURE, PROMPTS, diagnosed, sampled
from tests.support.image_models import image, image_config, prompt_with

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
PICTURES = image_config("qwen3_vl", {})
ADAPTER = " under an adapter"

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
    "linear of a tower": (PICTURES, "linear", "visual.patch_embed.proj"),
    "layer_norm of a tower": (PICTURES, "layer_norm", "visual.blocks.0.norm1"),
    "rope of a tower": (PICTURES, "rope", "visual.blocks.0"),
    "full_attention": (PICTURES, "full_attention", "visual.blocks.0"),
    "add_layer_norm": (PICTURES, "add_layer_norm", "visual.blocks.0.norm2"),
    "gelu": (PICTURES, "gelu", "visual.blocks.0"),
    "linear" + ADAPTER: (DENSE, "linear", "model.layers.0.self_attn.q_proj"),
    "attention" + ADAPTER: (DENSE, "attention", "model.layers.0"),
    "logits" + ADAPTER: (DENSE, "logits", "lm_head"),
    "head_linear" + ADAPTER: (SPARSE, "head_linear", "model.layers.0.self_attn.kv_b_proj"),
    "experts" + ADAPTER: (SPARSE, "experts", "model.layers.1.mlp.experts.gate_up_proj"),
    "full_attention" + ADAPTER: (PICTURES, "full_attention", "visual.blocks.0"),
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


def faulty(planted: str) -> type[Ops]:
    """`Ops` with one operation, or one of its results, that is off."""
    op, part = PART.get(planted, (planted.partition(" ")[0], None))

    def wrong(ops: Ops, *args: Any, **options: Any) -> Any:
        result = getattr(Ops, op)(ops, *args, **options)
        if part is None:
            return tuple(off(each, op) for each in result) if isinstance(result, tuple) else off(result, op)
        return tuple(off(each, op) if at == part else each for at, each in enumerate(result))

    return type("Faulty", (Ops,), {op: wrong, "fuses": False})  # fused, the operation would be part of another


def sharp_model(config: dict[str, Any]) -> Model:
    """Far from uniform, so that a difference anywhere reaches the logprobs."""
    made = new_model(config, seed=0)
    for weight in made.parameters():
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    return made


def named(planted: str) -> dict[str, Any]:
    """The diagnosis of a fault planted in an operation."""
    config = FAULTS[planted][0]
    model = sharp_model(config)
    if planted.endswith(ADAPTER):
        model = model.with_adapter(Adapter(random_adapter(model, 0), model.adapter_targets()))
    engine = Engine(model)
    view = model.with_profile(model.profile)
    view.ops = faulty(planted)(model.profile).with_adapters(model.ops.adapters)
    engine.model = view
    prompts: list[ModelInput | list[int]] = [*PROMPTS]
    if config is PICTURES:
        prompts = [prompt_with([20, 21], image(8, 6, seed), [22 + seed]) for seed in range(2)]
    return diagnosed(engine, model, sampled(engine, prompts)).details


def main() -> None:
    print("| planted in | operation named | at | profile knob |\n|---|---|---|---|")
    for planted in FAULTS:
        found = named(planted)
        print(f"| `{planted}` | `{found['op']}` | `{found['where']}` | `{found['knob']}` |")


if __name__ == "__main__":
    main()
