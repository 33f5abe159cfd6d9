"""Reinforcement learning on a tiny random model of every family: is the KL exactly 0, and are all choices alike?

    python benchmarks/families.py                       50 steps of each family, on the CPU; recorded
    python benchmarks/families.py --steps 5 --only deepseek_v3

Each is a real run of `rlloop train` (recipe countdown, a reward with signal from step one) under parity.mode=require,
which stops at the first bit that differs. Prints one JSON object a family.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_schema import Figure, report

from rlloop.cli.main import main as rlloop
from rlloop.models import new_model, save_model
from rlloop.runs.folder import read_records

SIZES = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.1, "eos_token_id": 1,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
INDEXER = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **LATENT, **INDEXER},
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"], **LATENT, **INDEXER, "indexer_types": ["full", "shared"],
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16,
    },
    "qwen3_5_moe_text": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "rope_parameters": {"partial_rotary_factor": 0.25},
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
        "moe_latent_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
        "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": 8,
    },
}  # fmt: skip
REWARD = "def reward(prompt, completion, example):\n    return len(completion) % 7\n"


def run(family: str, steps: int, place: Path) -> dict[str, Any]:
    save_model(new_model({**SIZES, "model_type": family, **FAMILIES[family]}, seed=0), place / "model")
    (place / "signal_from_the_start.py").write_text(REWARD)
    sys.path.insert(0, str(place))
    code = rlloop([
        "train", "--config-name", "countdown", f"run.dir={place / 'run'}", f"model.path={place / 'model'}",
        f"trainer.num_steps={steps}", "eval.num_draws=8", "eval.every=0", "rollout.num_prompts=4",
        "rollout.group_size=4", "trainer.lr=1e-2", "reward._target_=signal_from_the_start.reward",
        "parity.mode=require",
    ])  # fmt: skip
    sys.path.pop(0)
    records = [record for record in read_records(place / "run" / "metrics.jsonl") if "parity/tokens" in record]
    choices = [name for name in ("parity/router_different", "parity/indexer_different") if name in records[0]]
    return {
        "family": family,
        "exit_code": code,
        "steps": len(records),
        "tokens": sum(record["parity/tokens"] for record in records),
        **{
            name: max(record[name] for record in records) for name in ("parity/k3", "parity/tokens_different", *choices)
        },
        "reward": [round(records[at]["reward/mean"], 3) for at in (0, -1)],
    }


def figures_of(found: dict[str, Any]) -> list[Figure]:
    """The worst step of a run counts."""
    name = f"{found['family']}, {found['steps']} steps, {found['tokens']} tokens"
    units = {
        "parity/k3": "nats", "parity/tokens_different": "of tokens", "parity/router_different": "of expert choices",
        "parity/indexer_different": "of selections",
    }  # fmt: skip
    return [
        Figure(name=f"{name}: largest {key}", unit=unit, value=found[key])
        for key, unit in units.items()
        if key in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", choices=FAMILIES, action="append", help="nothing is recorded then")
    args = parser.parse_args()
    found = []
    for family in args.only or FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            found.append(run(family, args.steps, Path(place)))
    print("\n".join(map(json.dumps, found)))
    if args.only is None and all(each["exit_code"] == 0 for each in found):
        report("families", [figure for each in found for figure in figures_of(each)])


if __name__ == "__main__":
    main()
