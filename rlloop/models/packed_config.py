"""Reads a config.json's `quantization_config`, or ModelOpt's hf_quant_config.json beside it: the format of packed
weights, and what of it is left out.

Every key is read, refused by name, or changes nothing. Which weights are packed is what their stored tensors say, so
the lists of modules that are, or are not, have no effect. Inputs, keys and values are not quantised: a format whose
releases quantise them is read without that, which `Scheme.left_out` names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlloop.errors import ModelError
from rlloop.models.config_reader import Keys, all_are
from rlloop.numerics.packed import FP8, INT4, MXFP4, NVFP4, Packing

SUPPORTED = (
    "compressed-tensors (pack-quantized with 4-bit integers in groups of 32, or nvfp4-pack-quantized), modelopt "
    "(NVFP4, FP8 and FP8_PER_CHANNEL_PER_TOKEN), mxfp4, and fp8 in blocks of 128 x 128"
)
E4M3 = ("e4m3", "float8_e4m3fn")
MODELOPT = "hf_quant_config.json"
INPUTS_4, INPUTS_8, CACHE_8 = "inputs in 4 bits", "inputs in 8 bits", "keys and values in 8 bits"
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
NVFP4_NUMBERS = {"num_bits": 4, "type": "float", "group_size": 16}
FP8_NUMBERS = {"num_bits": 8, "type": "float"}
MODELOPT_BLOCKS = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0)}  # quant_algo -> `Scheme.block`


@dataclass(frozen=True)
class Scheme:
    """A packing and the names of its parts in checkpoints, by what they are."""

    packing: Packing
    names: Mapping[str, str]  # codes, scales, and perhaps of_tensor and shape -> ending of the name
    divides: bool = False  # scales are divided by the tensor's, not multiplied
    strips: str = ".weight"  # the plain name's ending that the parts' replace
    block: tuple[int, int] = (128, 128)  # of FP8: rows and inputs that share a scale; 0: all of them
    left_out: tuple[str, ...] = ()  # what else is quantised according to the file, and is not here

    def parts(self, name: str) -> dict[str, str]:
        """The stored names of a weight's parts."""
        return {kind: name.removesuffix(self.strips) + ending for kind, ending in self.names.items()}


def read_scheme(raw: Any, file: str = "config.json", place: str = "quantization_config") -> Scheme:
    """The scheme of a `quantization_config`; `file` and `place` are where it is. Raises `ModelError` for a format that
    is not read, by its name, and for keys that are unknown or would change what is computed."""
    config: dict[str, Any] = raw if isinstance(raw, dict) else {}
    keys, producer = Keys(config, f"{place}.", file), config.get("producer")
    of_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    read = METHODS.get(str(keys.take("quant_method", "modelopt" if of_modelopt else None)))  # older ones leave it out
    scheme = None if read is None else read(keys)
    if scheme is None:
        deciding = ("quant_method", "format", "weight_block_size", "quant_algo", "fmt")
        said = ", ".join(f"{key} {config[key]!r}" for key in deciding if config.get(key) is not None)
        raise ModelError(
            f"{file} has a {place} of {said or repr(raw)}, which is not read; weights may be float32, "
            f"bfloat16, float16, {SUPPORTED}"
        )
    keys.refuse_the_rest()
    return scheme


def _mxfp4(keys: Keys) -> Scheme:
    _modules(keys, "modules_to_not_convert")
    return Scheme(MXFP4, {"codes": "_blocks", "scales": "_scales"}, strips="")


def _fp8(keys: Keys) -> Scheme | None:
    if keys.take("weight_block_size") != [128, 128] or keys.take("fmt", "e4m3") not in E4M3:
        return None
    _modules(keys, "modules_to_not_convert", "ignored_layers", "modules_to_convert")
    keys.fixed("activation_scheme", "dynamic")
    keys.fixed("scale_fmt", "float", "ue8m0")  # scales that are powers of 2 are floats, too
    keys.fixed("expert_dtype", "fp8")
    keys.fixed("dequantize", False)
    return Scheme(FP8, {"codes": "", "scales": "_scale_inv"}, strips="", left_out=(INPUTS_8,))


def _modelopt(keys: Keys) -> Scheme | None:
    algorithm = str(keys.take("quant_algo"))
    if algorithm != "NVFP4" and algorithm not in MODELOPT_BLOCKS:
        return None
    keys.take("producer")
    _modules(keys, "ignore", "exclude_modules")
    numbers, inputs = (NVFP4_NUMBERS, INPUTS_4) if algorithm == "NVFP4" else (FP8_NUMBERS, INPUTS_8)
    left_out = _groups(keys, numbers, inputs=inputs) if keys.has("config_groups") else (inputs,)
    if keys.has("kv_cache_scheme") or keys.has("kv_cache_quant_algo"):
        left_out = (*left_out, CACHE_8)
    if isinstance(keys.copy().take("kv_cache_scheme"), dict):
        _numbers(keys.within("kv_cache_scheme"), FP8_NUMBERS, dynamic=(False, True))
    keys.fixed("kv_cache_scheme", None, "FP8")
    keys.fixed("kv_cache_quant_algo", None, "FP8")
    names = {"codes": ".weight", "scales": ".weight_scale"}
    if algorithm != "NVFP4":
        return Scheme(FP8, names, block=MODELOPT_BLOCKS[algorithm], left_out=left_out)
    keys.fixed("group_size", 16)
    return Scheme(NVFP4, {**names, "of_tensor": ".weight_scale_2"}, left_out=left_out)


def _compressed(keys: Keys) -> Scheme | None:
    form = keys.take("format")
    if form not in ("pack-quantized", "nvfp4-pack-quantized"):
        return None
    for name in ("global_compression_ratio", "version"):
        keys.take(name)
    _modules(keys, "ignore")
    keys.fixed("quantization_status", "compressed", "frozen")
    if keys.has("sparsity_config"):
        zeros = keys.within("sparsity_config")
        zeros.fixed("format", "dense")  # which stores them
        for name in ("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"):
            zeros.take(name)
        zeros.refuse_the_rest()
    keys.fixed("transform_config", {})
    keys.fixed("kv_cache_scheme", None)
    if form == "pack-quantized":
        if not (groups := keys.copy().take("config_groups", None)):
            keys.refuse("config_groups", groups, "an object of groups of weights")
        _groups(keys, INT4_WEIGHTS, form=form)
        return Scheme(INT4, {"codes": ".weight_packed", "scales": ".weight_scale", "shape": ".weight_shape"})
    left_out = _groups(keys, NVFP4_NUMBERS, inputs=INPUTS_4, form=form)
    names = {"codes": ".weight_packed", "scales": ".weight_scale", "of_tensor": ".weight_global_scale"}
    return Scheme(NVFP4, names, divides=True, left_out=left_out)


def given_once(whole: Keys, text: Keys) -> Any:
    """The `quantization_config` of a whole config.json or of its text_config; where both have one they must agree."""
    given = [each for keys in (whole, text) if (each := keys.take("quantization_config")) is not None]
    if len(given) == 2 and given[0] != given[1]:
        whole.refuse("quantization_config", given[0], "that of text_config, or one of the two")
    return given[0] if given else None


def with_modelopt(raw: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the `quantization_config` that a hf_quant_config.json beside it stands for. Raises
    `ModelError` where the config.json names another format of weights, and as `read_scheme` does."""
    keys = Keys(beside, file=MODELOPT)
    if not isinstance(within := keys.take("quantization"), dict):
        keys.refuse("quantization", within, "an object")
    quantized = {"quant_method": keys.take("quant_method", "modelopt"), "producer": keys.take("producer"), **within}
    keys.refuse_the_rest()
    if Keys(within).null("quant_algo"):  # weights are plain, perhaps beside keys and values in 8 bits
        return dict(raw)
    weights = replace(read_scheme(quantized, MODELOPT, "quantization"), left_out=())
    text = raw.get("text_config")
    places = (raw, text if isinstance(text, dict) else {})
    given = [each for place in places if (each := place.get("quantization_config")) is not None]
    for each in given:
        if replace(read_scheme(each), left_out=()) != weights:
            raise ModelError(
                f"config.json's quantization_config names another format of weights than the {MODELOPT} beside it "
                f"(quant_algo {within.get('quant_algo')!r}); remove the one that is not theirs"
            )
    return dict(raw) if given else {**raw, "quantization_config": quantized}


METHODS: dict[str, Callable[[Keys], Scheme | None]] = {
    "mxfp4": _mxfp4, "fp8": _fp8, "modelopt": _modelopt, "compressed-tensors": _compressed,
}  # fmt: skip


def _modules(keys: Keys, *lists: str) -> None:
    """Consume lists of modules, which say what the stored tensors say, too."""
    for name in lists:
        if not all_are(value := keys.take(name, []), str):
            keys.refuse(name, value, "a list of names")


def _groups(
    keys: Keys, weights: Mapping[str, Any], *, inputs: str | None = None, form: str | None = None
) -> tuple[str, ...]:
    """Consume config_groups, whose weights must all be these numbers. `inputs`: these may be such numbers, too, and
    this is then returned as left out."""
    left_out: tuple[str, ...] = ()
    given = keys.take("config_groups", {})
    if not isinstance(given, dict):
        keys.refuse("config_groups", given, "an object")
    groups = Keys(given, "quantization_config.config_groups.")
    for name in given:
        group = groups.within(name)
        _modules(group, "targets")
        group.fixed("format", form)
        group.fixed("output_activations", None)
        _numbers(group.within("weights"), weights)
        if inputs is not None and group.has("input_activations"):
            _numbers(group.within("input_activations"), weights, dynamic=(False, True, "local"))
            left_out = (inputs,)
        group.fixed("input_activations", None)
        group.refuse_the_rest()
    return left_out


def _numbers(keys: Keys, needed: Mapping[str, Any], *, dynamic: tuple[Any, ...] = (False,)) -> None:
    """Consume all that says how numbers are quantised, of which `needed` must be there."""
    for name, value in needed.items():
        if (given := keys.take(name)) != value:
            keys.refuse(name, given, json.dumps(value))
    keys.fixed("symmetric", True)
    keys.fixed("dynamic", *dynamic)
    keys.fixed("strategy", "group", "tensor_group")
    keys.fixed("actorder", None, "weight", "static")  # of rounding them; under "group" the stored ones are permuted
    keys.fixed("block_structure", None)
    for name in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        keys.take(name)  # how scales were found, and types that the stored tensors have
    keys.refuse_the_rest()
