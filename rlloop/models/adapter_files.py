"""Adapters as PEFT folders: adapter_config.json beside adapter_model.safetensors, float32, B unscaled.

Features of a file that rlloop does not compute are refused by name. Folders written by rlloop hold the digest of their
base's weights, and are refused for another base.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlloop.errors import ConfigError, ModelError
from rlloop.models.adapter_layouts import Declared, Pair, read_factors
from rlloop.models.adapter_weights import Adapter, AdapterWeights, Target, scaled, some
from rlloop.models.checkpoint_names import EMBEDDING, HEAD, module_name, module_names, stored_state
from rlloop.models.config_reader import read_json
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import FLOATS, StoredWeights
from rlloop.models.stored_parameter import entries_of
from rlloop.models.transformer import Model
from rlloop.models.weights import save_model

CONFIG, WEIGHTS, PREFIX, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.model.", "base_digest"
PLAIN = {  # key of the configuration -> the values that change nothing
    "bias": ("none", None), "lora_dropout": (0, None), "use_dora": (False, None), "modules_to_save": (None, []),
    "lora_bias": (False, None), "fan_in_fan_out": (False, None), "layer_replication": (None,),
    "trainable_token_indices": (None,), "alora_invocation_tokens": (None,), "use_qalora": (False, None),
    "use_bdlora": (None, False), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
}  # fmt: skip
WORDS = {"bias": "trained biases", "lora_dropout": "dropout", "use_dora": "DoRA", "modules_to_save": "modules_to_save"}
KEY = re.compile(r"(?P<module>.+)\.lora_(?P<letter>[AB])(?:\.default)?(?:\.weight)?")
MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights, or their beginnings
# PEFT takes modules of these names for experts' projections in these models, so plain ones are written as parameters.
TAKEN = ("gate_proj", "up_proj", "down_proj")
TAKEN_IN = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def load_adapter(model: Model, folder: str | Path, name: str) -> int:
    """Give `model` the adapter of a PEFT folder under a name: for `token_logprobs(..., adapter=name)`, and engines.

    Returns its version: 1, or one more than an adapter of that name had, which it replaces.

    Raises `ConfigError` for an adapter of another base, of unknown targets, of wrong shapes, not finite in the model's
    type, of a rank above the slots' room, or with what is not computed here (dropout, DoRA, biases, modules_to_save);
    `ModelError` for files that are missing or damaged. Nothing is loaded then.
    """
    model.check_adapts()
    return model.adapters.add(name, read_adapter(model, folder), model.adapter_targets()).version


def read_adapter(model: Model, folder: str | Path) -> AdapterWeights:
    """Read the adapter of a PEFT folder and check it against `model`. Raises as `load_adapter`."""
    folder, targets = Path(folder), model.adapter_targets()
    config = _config(folder)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            base = (file.metadata() or {}).get(BASE)
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, FileNotFoundError, OSError) as error:
        raise ModelError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    if base is not None and base != base_digest(model):
        raise ConfigError(
            f"{folder} is an adapter of another base: it was trained on weights of digest {base[:12]}, and "
            f"this model's have {base_digest(model)[:12]}"
        )
    declared = Declared(config["r"], config["lora_alpha"], config)
    factors = read_factors(_pairs(stored, model, folder), declared, targets, model.config.architecture, folder)
    weights = AdapterWeights(
        {name: each.pair for name, each in factors.items()},
        {name: each.scale for name, each in factors.items()},
        declared.rank,
        declared.alpha,
    )
    weights.check(targets, model.dtype, str(folder))
    return weights


def is_adapter(folder: str | Path) -> bool:
    """True for a PEFT folder."""
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """The base that a PEFT folder names: a path, a name on the Hugging Face Hub, or nothing."""
    return str(_config(Path(folder)).get("base_model_name_or_path") or "")


def with_stored_adapter(model: Model, folder: str | Path) -> Model:
    """A view of the model in which every token has the adapter of a PEFT folder. Raises as `load_adapter`."""
    return model.with_adapter(Adapter(read_adapter(model, folder), model.adapter_targets()))


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; an adapter is a PEFT folder, {CONFIG} beside {WEIGHTS}")
    config, where = dict(read_json(folder / CONFIG)), str(folder / CONFIG)
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{where}: peft_type is {config['peft_type']!r}; only LORA is computed here")
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            raise ConfigError(
                f"{where} asks for {WORDS.get(key, key)} ({key}={config[key]!r}), which is not computed "
                f"here; train an adapter without it ({key}={json.dumps(plain[0])})"
            )
    if str(config.get("init_lora_weights")).lower().startswith(MOVES_BASE):
        raise ConfigError(
            f"{where} asks for init_lora_weights={config['init_lora_weights']!r}, with which PEFT changes the base; "
            "that is not computed here: convert the adapter by PEFT's path_initial_model_for_weight_conversion"
        )
    _check_number(where, "r", config.get("r"), whole=True)
    _check_number(where, "lora_alpha", config.get("lora_alpha"))
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config[key] = config.get(key) or {}
        if not isinstance(pattern, dict):
            raise ConfigError(f"{where}: {key} is {pattern!r}; it must be an object, a number for each name of modules")
        for name, value in pattern.items():
            _check_number(where, f"{key} of {name!r}", value, whole=key == "rank_pattern")
            try:
                re.compile(name)
            except re.error as error:
                raise ConfigError(f"{where}: {key} names {name!r}, no regular expression: {error}") from error
    if not isinstance(config.get("use_rslora", False), bool):
        raise ConfigError(f"{where}: use_rslora is {config['use_rslora']!r}; it must be true or false")
    return config


def _check_number(where: str, key: str, value: Any, *, whole: bool = False) -> None:
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a {'whole ' if whole else ''}number above 0")


def _pairs(stored: Mapping[str, Tensor], model: Model, folder: Path) -> dict[str, Pair]:
    """A and B, float32, by the module's name in the file."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        match = KEY.fullmatch(bare := key.removeprefix(PREFIX))
        if match is None:
            _check_base(model, bare, tensor, folder)
            continue
        if tensor.dtype not in FLOATS.values():
            raise ConfigError(f"{folder / WEIGHTS}: {key} has type {tensor.dtype}; it may be {', '.join(FLOATS)}")
        if tensor.ndim < 2 and tensor.numel():
            raise ConfigError(f"{folder / WEIGHTS}: {key} has shape {list(tensor.shape)}; A and B are matrices")
        pair = matrices.setdefault(match["module"], {})
        if match["letter"] in pair:
            raise ConfigError(f"{folder / WEIGHTS} holds {match['letter']} of {match['module']} twice")
        pair[match["letter"]] = tensor.float()
    if alone := sorted(module for module, pair in matrices.items() if len(pair) != 2):
        raise ConfigError(f"{folder / WEIGHTS} holds A without B, or B without A, of {some(alone)}")
    return {module: (pair["A"], pair["B"]) for module, pair in matrices.items()}


def _check_base(model: Model, key: str, tensor: Tensor, folder: Path) -> None:
    """Raises `ConfigError` unless `key` is a weight that PEFT saves beside adapters (embedding, or what an adapter
    adapts), and is this base's."""
    plain, architecture = key.replace(".base_layer.", "."), model.config.architecture
    weights = [f"{name}.weight" for name in model.adapter_targets()]
    name = next((each for each in weights if plain in module_names(each, architecture)), None)
    if plain.endswith((".embed_tokens.weight", ".embeddings.weight")) or (name == HEAD and model.config.tied):
        name = EMBEDDING
    if name is None:
        raise ConfigError(f"{folder / WEIGHTS} holds {key}, which is neither A nor B of a linear layer")
    entry = entries_of(model).get(name)
    if entry is None:
        return  # another stage's
    same = tuple(tensor.shape) == entry.shape
    if not same or not torch.equal(entry.part(tensor).to(entry.live), entry.live.detach()):
        raise ConfigError(
            f"{folder / WEIGHTS} holds {key} {list(tensor.shape)}, and this base has another one {list(entry.shape)}; "
            "trained or resized weights are not computed here: train an adapter alone, without new tokens"
        )


# --------------------------------------------------------------------------------------------------------- writing


def save_adapter(model: Model, weights: AdapterWeights, folder: str | Path) -> None:
    """Write a PEFT folder, with the digest of the base's weights. Collective: the first rank writes, whose `weights`
    count.

    Raises `ModelError` where there is one already.
    """
    writes = model.context.rank == 0
    if not writes and model.source_path is not None:
        return  # the digest is of stored weights
    folder, targets, digest = Path(folder), model.adapter_targets(), base_digest(model)
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / WEIGHTS).exists():
        raise ModelError(f"{folder} already holds an adapter; save to another folder")
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in weights.factors.items():
        target, module = targets[name], module_name(name, model.config.architecture)
        if target.experts is not None:
            (ours, kind), module = name.rsplit(".", 1), module.rsplit(".", 1)[0]
            module += ".base_layer" if kind != "down_proj" and f"{ours}.down_proj" in weights.factors else ""
            down, up = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
        elif target.heads is not None:
            up = up.flatten(0, 1)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = down.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = up.contiguous()
    # One entry of metadata: safetensors writes several in any order, and equal adapters must be equal files.
    save_file(tensors, folder / WEIGHTS, metadata={BASE: digest})
    text = json.dumps(_written_config(model, weights, targets), indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n")


def _written_config(model: Model, weights: AdapterWeights, targets: Mapping[str, Target]) -> dict[str, Any]:
    architecture = model.config.architecture
    parameters: dict[str, str] = {}  # target -> its name in PEFT, which wraps parameters; modules otherwise
    modules: dict[str, str] = {}
    for name, target in targets.items():
        theirs = module_name(name, architecture)
        if target.experts is not None:
            parameters[name] = theirs
        elif architecture in TAKEN_IN and theirs.endswith(TAKEN):
            parameters[name] = f"{theirs}.weight"
        else:
            modules[name] = theirs
    names = {**modules, **parameters}
    leaves, others = (
        {theirs.rsplit(".", 1)[-1] for name, theirs in modules.items() if (name in weights.factors) == adapted}
        for adapted in (True, False)
    )
    whole = sorted(theirs for name, theirs in modules.items() if name in weights.factors)
    ranks = {name: weights.rank_of(name) for name in weights.factors}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": weights.rank, "lora_alpha": weights.alpha,
        "lora_dropout": 0.0, "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None,
        "fan_in_fan_out": False, "inference_mode": True, "base_model_name_or_path": str(model.source_path or ""),
        "target_modules": whole if leaves & others else sorted(leaves),
        "target_parameters": [parameters[name] for name in weights.factors if name in parameters] or None,
        "rank_pattern": {names[name]: rank for name, rank in ranks.items() if rank != weights.rank},
        "alpha_pattern": {
            names[name]: weights.scales[name] * rank for name, rank in ranks.items()
            if weights.scales[name] != weights.alpha / rank
        },
    }  # fmt: skip


def base_digest(model: Model) -> str:
    """BLAKE3 of the base's stored tensors by name, type, shape and bytes; of live weights, which ranks gather, where it
    has no folder."""
    if model.adapters.base_digest is not None:
        return model.adapters.base_digest
    digest = blake3(max_threads=blake3.AUTO)

    def add(name: str, tensor: Tensor) -> None:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype!s} {list(plain.shape)}\n".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)

    if model.source_path is None:
        wholes = dict(ParameterStore(model.with_adapter(None)).wholes())
        for name, tensor in sorted(stored_state(wholes, model.config.architecture).items()):
            add(name, tensor)
    else:
        stored = StoredWeights.open(model.source_path)
        for name in sorted(stored.tensors):
            for _, tensor in stored.read({name}):
                add(name, tensor)
        model.adapters.base_digest = digest.hexdigest()
    return digest.hexdigest()


@torch.no_grad()
def save_merged(model: Model, adapter: AdapterWeights, folder: str | Path) -> None:
    """Write the base with an adapter merged into its weights, as a Hugging Face folder.

    It is another model: W + scale B A is rounded once more, so its bits differ from those of base and adapter, and its
    config.json says so (`merged_adapter`). Raises as `save_model`.
    """
    targets, base = model.adapter_targets(), model.with_adapter(None)
    store = ParameterStore(base)
    names, merged = {id(entry.live): name for name, entry in store.entries.items()}, store.tensors()
    for name, (down, up) in adapter.factors.items():
        target = targets[name]
        rows = up.flatten(0, 1) if target.heads is not None else up
        delta = scaled(rows, adapter.scales[name], torch.float32) @ down
        weight = merged[names[id(target.weight)]]
        delta = delta.mT if target.transposed else delta
        merged[names[id(target.weight)]] = (weight.float() + delta.to(weight.device)).to(weight.dtype)
    if model.lm_head is None and "lm_head" in adapter.factors:
        raise ConfigError("an adapter of lm_head cannot be merged where the unembedding is tied to the embedding")
    save_model(merged, folder, model.source_path, config=model.config)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"merged_adapter": {BASE: base_digest(model)}}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
