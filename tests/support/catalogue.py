"""Released models: whether their config.json is read, tensors against transformers' modules, and a table for the docs.

    python -m tests.support.catalogue        # the table of docs/models.md

`released.json` has configurations as they were released, some with the hf_quant_config.json beside them, and the public
repository and commit that had the copy. Its `index` is of a release with the same tensors, whose
model.safetensors.index.json such a repository has: the number of names, SHA-256 of them in order, each on a line, and
perhaps the tensors' bytes in all, in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlloop.errors import ModelError
from rlloop.models.architecture import ModelConfig
from rlloop.models.config import parse_config
from rlloop.models.families import LACKING
from rlloop.models.packed_config import read_scheme, with_modelopt
from rlloop.models.transformer import Model
from tests.support.checkpoints import by_our_names

RELEASED: dict[str, dict[str, Any]] = {
    name: each if (beside := each.get("hf_quant_config")) is None
    else {**each, "config": with_modelopt(each["config"], beside)}
    for name, each in json.loads((Path(__file__).parent / "released.json").read_text()).items()
}  # fmt: skip
LAYER_LISTS = ("layer_types", "indexer_types", "mlp_layer_types", "layers_block_type")
# Objects without effect whose keys are free: classes of code, labels, what found the scales and its arguments.
FREE = ("auto_map", "id2label", "label2id", "producer", "observer_kwargs")
MOST_LAYERS, MOST_EXPERTS = 8, 16  # of the models that are compared: layers and experts after those are like them


@dataclass(frozen=True)
class Standing:
    """Support of a family on GPUs, in vLLM and by LoRA, and its tests, as text for the table."""

    gpu: str
    vllm: str
    lora: str
    proven: str


CHECKS = "families' checks"
DENSE = Standing("yes", "CPU, GPU", "yes", CHECKS)
RECURRENT = Standing("yes", "CPU, GPU", "yes", f"{CHECKS}; 8 layers of Nano's widths on an H200")
STANDINGS = {  # by architecture
    "LlamaForCausalLM": replace(DENSE, proven=f"{CHECKS}; SmolLM2 trained on a GPU"),
    "Qwen3ForCausalLM": replace(
        DENSE, proven=f"{CHECKS}; RL of 79M, steps of an 8B shape and engines of all layers up to 32B on GPUs"
    ),
    "Qwen3MoeForCausalLM": replace(DENSE, proven=f"{CHECKS}; a 10.6B shape on GPUs"),
    "DeepseekV3ForCausalLM": replace(DENSE, proven=f"{CHECKS}; small sizes on GPUs"),
    "DeepseekV32ForCausalLM": replace(DENSE, proven=f"{CHECKS}; small sizes on GPUs"),
    "GlmMoeDsaForCausalLM": replace(DENSE, proven=f"{CHECKS}; small sizes on GPUs"),
    "MiniMaxM2ForCausalLM": replace(DENSE, vllm="CPU", proven=f"{CHECKS}; a small size on an H200"),
    "Qwen3_5MoeForConditionalGeneration": replace(
        RECURRENT,
        proven=f"{CHECKS}, with images; on an H200 small sizes, and an engine with 8 layers of 35B-A3B's widths at "
        "2.87 times vLLM's speed, k3 0",
    ),
    "Qwen3VLForConditionalGeneration": replace(
        DENSE, proven=f"{CHECKS}, with images; its tower and all 36 layers on an H200"
    ),
    "Qwen3VLMoeForConditionalGeneration": replace(DENSE, proven=f"{CHECKS}, with images; small sizes on an H200"),
    "NemotronHForCausalLM": RECURRENT,
    "KimiK25ForConditionalGeneration": replace(
        DENSE, vllm="no", proven=f"{CHECKS}, of its text model; small sizes on an H200"
    ),
    "GptOssForCausalLM": Standing("yes", "CPU, GPU", "yes", f"{CHECKS}; a small size on an H200"),
}


def cut(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with fewer layers and experts, each kind of layer among them, and plain weights."""
    made = dict(raw)
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = cut(made["text_config"])
    made.pop("quantization_config", None)
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if name in made:
            made[name] = MOST_EXPERTS
    if "num_experts_per_tok" in made:
        made["num_experts_per_tok"] = min(made["num_experts_per_tok"], 4)
    if "num_hidden_layers" in made:
        made["num_hidden_layers"] = min(made["num_hidden_layers"], MOST_LAYERS)
    for name in LAYER_LISTS:
        if isinstance(made.get(name), list):
            made[name] = made[name][:MOST_LAYERS]
    if "hybrid_override_pattern" in made:
        made["hybrid_override_pattern"] = made["hybrid_override_pattern"][:MOST_LAYERS]
    return made


def shapes_here(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Model(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shapes_there(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of transformers' module of the same configuration, by rlloop's names in memory."""
    given = {name: value for name, value in raw.items() if name not in ("auto_map", "architectures")}
    kind: str = given.pop("model_type")
    config = AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else kind, **given)
    make = AutoModelForImageTextToText if "vision_config" in raw else AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config)
    left_out = ("model.vision_tower.", "model.mm_projector.")  # of Kimi K2.5, which is read as a text model
    state = {
        name: tensor for name, tensor in model.state_dict().items()
        if "rotary_emb" not in name and not name.startswith(left_out)
    }  # fmt: skip
    tied = "lm_head.weight" in state and getattr(config, "tie_word_embeddings", False)  # a text_config's has no effect
    named = by_our_names(state)
    if tied:
        named.pop("lm_head.weight", None)
    for prefix, ours in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        named = {
            (ours + name.removeprefix(prefix)) if name.startswith(prefix) else name: x for name, x in named.items()
        }
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def refusal(raw: Mapping[str, Any]) -> str | None:
    """Reason why the configuration is refused; None: it is accepted."""
    try:
        parse_config(raw)
    except ModelError as error:
        return str(error)
    return None


def objects_of(raw: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of all objects in a configuration, itself first."""
    yield place
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from objects_of(value, (*place, name))


def with_key(raw: Mapping[str, Any], place: tuple[str, ...], name: str) -> dict[str, Any]:
    """The configuration with one more key in the object at that place."""
    if not place:
        return {**raw, name: 1}
    return {**raw, place[0]: with_key(raw[place[0]], place[1:], name)}


def names_from(each: Mapping[str, Any]) -> str:
    """The sources that a model's tensors are compared with."""
    if (index := each.get("index")) is None:
        return "transformers"
    return f"transformers; names{', bytes' if 'bytes' in index else ''}: index of {index['of']}"


def weights(raw: Mapping[str, Any]) -> str:
    given = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    if given is None:
        return "bfloat16"
    if given["quant_method"] == "modelopt":
        return {"NVFP4": "NVFP4", "FP8": "FP8, a scale for each matrix"}[given["quant_algo"]]
    return {"fp8": "FP8, blocks of 128", "mxfp4": "MXFP4", "compressed-tensors": "int4, groups of 32"}[
        given["quant_method"]
    ]


def table() -> str:
    head = ("model", "loads", "weights", "left out", "names, shapes", "CPU", "GPU", "vLLM", "LoRA", "proven")
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, each in RELEASED.items():
        raw = each["config"]
        if refusal(raw) is not None:
            lacking = ", ".join(part.split(" (")[0] for part in LACKING[raw["model_type"]])
            rows.append(
                f"| {name} | no: `{raw['model_type']}` is refused | {weights(raw)} | | | | | | | lacks {lacking} |"
            )
            continue
        config = parse_config(raw)
        one = STANDINGS[config.architecture]
        further = [f"{config.further_layers} prediction layer"] if config.further_layers else []
        packed = [] if config.quantization is None else read_scheme(config.quantization).left_out
        left = ", ".join([*config.left_out, *further, *packed])
        loads = f"yes, `{raw['model_type']}`"
        cells = (name, loads, weights(raw), left, names_from(each), "yes", one.gpu, one.vllm, one.lora, one.proven)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
