"""Short runs on a GPU with tiny random models, and a reward that has signal from step one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlloop.cli.main import main
from rlloop.runs.folder import read_records

OVERRIDES = [
    "reward._target_=learnable.reward", "trainer.num_steps=3", "trainer.lr=1e-2", "rollout.num_prompts=8",
    "rollout.group_size=4", "eval.num_draws=8",
]  # fmt: skip
SHARED = {
    "vocab_size": 640, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
KINDS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **HEADS},
    "mixture": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, **HEADS,
                **EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "latent": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8,
               **EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
               "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 64, "kv_lora_rank": 512,
               "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "scoring_func": "sigmoid",
               "routed_scaling_factor": 2.5, "topk_method": "noaux_tc"},
}  # fmt: skip


def train_over(ranks: int, run: str, kind: str, *overrides: str, seconds: float = 500) -> None:
    """By torchrun, a GPU for each rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = ["train", "--config-name", "countdown/gpu", f"run.dir={run}", f"model.path={kind}", *OVERRIDES]
    subprocess.run([*launcher, "-m", "rlloop", *command, *overrides], check=True, timeout=seconds)


def train(run: str, kind: str, *overrides: str) -> list[dict]:
    command = ["train", "--config-name", "countdown/gpu", f"run.dir={run}", f"model.path={kind}", *OVERRIDES]
    assert main([*command, *overrides]) == 0
    return list(read_records(Path(run) / "metrics.jsonl"))[1:]
