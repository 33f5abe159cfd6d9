"""Adapters as PEFT folders: adapter_config.json beside adapter_model.safetensors, float32, B unscaled.

Three layouts of experts' factors are read: one pair for each expert and projection (`experts.3.up_proj.lora_A`), PEFT's
`target_parameters` (all experts in one matrix, [E r, K] and [N, r E]; this one is written), and three dimensions
([E or 1, r, K], as Tinker has them, where 1 is shared by all experts). A gate and an up of different A become one pair
of twice the rank; zeros in B remove the terms of the other.

Features of a file that rlloop does not compute are refused by name. Folders written by rlloop hold the digest of their
base's weights, and are refused for another base.
"""

from __future__ import annotations

import json
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
from rlloop.models.adapter_weights import Adapter, AdapterWeights, Target, scaled, some
from rlloop.models.checkpoint_names import stored_name, stored_state
from rlloop.models.config_reader import read_json
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import StoredWeights
from rlloop.models.transformer import Model
from rlloop.models.weights import save_model

CONFIG, WEIGHTS, PREFIX, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.model.", "base_digest"
PLAIN = {  # key of the configuration -> the values that change nothing
    "bias": ("none", None), "lora_dropout": (0, None), "use_dora": (False, None), "modules_to_save": (None, []),
    "lora_bias": (False, None), "fan_in_fan_out": (False, None), "layer_replication": (None,),
    "trainable_token_indices": (None,), "alora_invocation_tokens": (None,), "use_qalora": (False, None),
    "use_bdlora": (None, False), "arrow_config": (None,), "kasa_config": (None,),
}  # fmt: skip
WORDS = {"bias": "trained biases", "lora_dropout": "dropout", "use_dora": "DoRA", "modules_to_save": "modules_to_save"}
KEY = re.compile(r"(?P<module>.+)\.lora_(?P<letter>[AB])(?:\.default)?(?:\.weight)?")
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?:(?P<index>\d+)\.)?(?P<part>[a-z_0-9]+)")
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
Pair = tuple[Tensor, Tensor]


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
    names = {stored_name(f"{name}.", model.config.architecture).removesuffix("."): name for name in targets}
    factors = _factors(_pairs(stored, folder), names, targets, folder)
    scales = {name: _scale(config, name, pair[0].shape[-2], folder) for name, pair in factors.items()}
    weights = AdapterWeights(factors, scales, int(config["r"]), float(config["lora_alpha"]))
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
    config = dict(read_json(folder / CONFIG))
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{folder / CONFIG}: peft_type is {config['peft_type']!r}; only LORA is computed here")
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            raise ConfigError(
                f"{folder / CONFIG} asks for {WORDS.get(key, key)} ({key}={config[key]!r}), which is not computed "
                f"here; train an adapter without it ({key}={json.dumps(plain[0])})"
            )
    for key in ("r", "lora_alpha"):
        if isinstance(config.get(key), bool) or not isinstance(config.get(key), (int, float)) or config[key] <= 0:
            raise ConfigError(f"{folder / CONFIG}: {key} is {config.get(key)!r}; it must be a number above 0")
    return config


def _scale(config: Mapping[str, Any], name: str, rank: int, folder: Path) -> float:
    alpha, default_rank = float(config["lora_alpha"]), int(config["r"])

    def pattern(key: str, otherwise: float) -> float:
        matches = [value for each, value in (config.get(key) or {}).items() if re.match(rf"(.*\.)?({each})$", name)]
        return matches[0] if matches else otherwise

    alpha, declared = pattern("alpha_pattern", alpha), int(pattern("rank_pattern", default_rank))
    if rank not in (declared, 2 * declared):  # twice: a gate and an up together
        raise ConfigError(f"{folder}: {name} has rank {rank}; {CONFIG} says {declared}")
    return alpha / (declared**0.5 if config.get("use_rslora") else declared)


def _pairs(stored: Mapping[str, Tensor], folder: Path) -> dict[str, Pair]:
    """A and B, float32, by the module's name in the checkpoint."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        if key.endswith((".base_layer.weight", "embed_tokens.weight")) and ".lora_" not in key:
            continue  # the base's own, which PEFT saves beside an adapted embedding
        match = KEY.fullmatch(key.removeprefix(PREFIX))
        if match is None:
            raise ConfigError(f"{folder / WEIGHTS} holds {key}, which is neither A nor B of a linear layer")
        matrices.setdefault(match["module"], {})[match["letter"]] = tensor.float()
    if alone := sorted(module for module, pair in matrices.items() if len(pair) != 2):
        raise ConfigError(f"{folder / WEIGHTS} holds A without B, or B without A, of {some(alone)}")
    return {module: (pair["A"], pair["B"]) for module, pair in matrices.items()}


def _factors(
    pairs: Mapping[str, Pair], names: Mapping[str, str], targets: Mapping[str, Target], folder: Path
) -> dict[str, Pair]:
    """By the target's name, in the shapes of `Target.shapes`; unknown modules under their own."""
    factors: dict[str, Pair] = {}
    grouped = {
        stored.rsplit(".", 1)[0]: name.rsplit(".", 1)[0]
        for stored, name in names.items() if targets[name].experts is not None
    }  # fmt: skip
    of_experts: dict[str, dict[str, dict[int, Pair]]] = {}  # experts -> projection -> expert: its pair
    for module, (down, up) in pairs.items():
        bare = module.replace(".base_layer", "")
        split = EXPERT.fullmatch(bare)
        if bare in grouped:
            flat = (targets.get(f"{grouped[bare]}.{kind}") for kind in ("gate_up_proj", "up_proj", "down_proj"))
            target = next((each for each in flat if each is not None and _fits_flat(each, down, up)), None)
            if target is None or target.experts is None:
                raise ConfigError(
                    f"{folder}: {module} has shapes {list(down.shape)} and {list(up.shape)}, which no experts here have"
                )
            count = target.experts
            factors[target.name] = down.unflatten(0, (count, -1)), up.unflatten(1, (-1, count)).permute(2, 0, 1)
        elif split is not None and split["experts"] in grouped:
            ours = grouped[split["experts"]]
            by_expert = of_experts.setdefault(ours, {}).setdefault(PARTS.get(split["part"], split["part"]), {})
            if split["index"] is not None:
                by_expert[int(split["index"])] = (down, up)
            elif down.numel() or up.numel():  # three dimensions; one expert stands for all
                count = targets[f"{ours}.down_proj"].experts or 0
                a, b = (x.expand(count, *x.shape[1:]) if len(x) == 1 else x for x in (down, up))
                by_expert.update({expert: (a[expert], b[expert]) for expert in range(min(len(a), len(b)))})
        else:
            name = names.get(bare, bare)
            heads = targets[name].heads if name in targets else None
            factors[name] = (down, up.unflatten(0, (heads, -1)) if heads and up.shape[0] % heads == 0 else up)
    for experts, projections in of_experts.items():
        factors |= _joined(experts, projections, targets, folder)
    return factors


def _fits_flat(target: Target, down: Tensor, up: Tensor) -> bool:
    count = target.experts or 1
    return (down.shape[1], up.shape[0]) == (target.inputs, target.outputs) and down.shape[0] % count == 0


def _joined(
    experts: str,
    projections: dict[str, dict[int, Pair]],
    targets: Mapping[str, Target],
    folder: Path,
) -> dict[str, Pair]:
    """Join pairs of single experts into factors of all experts; experts without a pair get zeros."""
    factors: dict[str, Pair] = {}
    gated = f"{experts}.gate_up_proj" in targets
    for kind in ("gate_up_proj" if gated else "up_proj", "down_proj"):
        target = targets[f"{experts}.{kind}"]
        wanted = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        present = {projection: projections.pop(projection) for projection in wanted if projection in projections}
        if not present:
            continue
        count = target.experts or 0
        if wrong := sorted(index for each in present.values() for index in each if index >= count):
            raise ConfigError(f"{folder}: {experts} has factors of expert {wrong[0]}; this base has {count}")
        rank = next(iter(next(iter(present.values())).values()))[0].shape[0]
        downs, ups, width = [], [], target.outputs // len(wanted)
        for index, projection in enumerate(wanted):
            none = (torch.zeros(rank, target.inputs), torch.zeros(width, rank))
            pairs = [present.get(projection, {}).get(expert, none) for expert in range(count)]
            if any(a.shape != (rank, target.inputs) or b.shape != (width, rank) for a, b in pairs):
                raise ConfigError(
                    f"{folder}: factors of {experts}'s {projection} are not all [{rank}, {target.inputs}] and "
                    f"[{width}, {rank}]"
                )
            downs.append(torch.stack([a for a, _ in pairs]))
            placed = [
                torch.stack([b for _, b in pairs]) if at == index else torch.zeros(count, width, rank)
                for at in range(len(wanted))
            ]
            ups.append(torch.cat(placed, 1))
        same = all(torch.equal(each, downs[0]) for each in downs)
        factors[target.name] = (downs[0], sum(ups[1:], ups[0])) if same else (torch.cat(downs, 1), torch.cat(ups, 2))
    if projections:
        raise ConfigError(
            f"{folder}: {experts} has factors of {some(sorted(projections))}, which these experts do not have"
        )
    return factors


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
        target, module = targets[name], stored_name(f"{name}.", model.config.architecture).removesuffix(".")
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
    stored = {name: stored_name(f"{name}.", model.config.architecture).removesuffix(".") for name in targets}
    plain = [name for name in weights.factors if targets[name].experts is None]
    leaves = {stored[name].rsplit(".", 1)[-1] for name in plain}
    others = {
        stored[name].rsplit(".", 1)[-1]
        for name in targets
        if targets[name].experts is None and name not in weights.factors
    }
    modules = sorted(leaves) if not leaves & others else sorted(stored[name] for name in plain)
    parameters = [name for name in weights.factors if targets[name].experts is not None]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": weights.rank, "lora_alpha": weights.alpha,
        "lora_dropout": 0.0, "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None,
        "fan_in_fan_out": False, "inference_mode": True, "base_model_name_or_path": str(model.source_path or ""),
        "target_modules": modules, "target_parameters": [stored[name] for name in parameters] or None,
        "rank_pattern": {
            stored[name]: rank for name in plain if (rank := weights.rank_of(name)) != weights.rank
        },
        "alpha_pattern": {
            stored[name]: alpha for name in weights.factors
            if (alpha := weights.scales[name] * weights.rank_of(name)) != weights.alpha
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
