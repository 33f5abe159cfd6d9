"""Folders of 8-bit weights in DeepSeek-V3's layout, for other engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rlloop.errors import ModelError
from rlloop.models.checkpoint_names import module_name
from rlloop.models.fp8 import is_quantised
from rlloop.models.layers import Linear
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import write_single
from rlloop.models.transformer import Model
from rlloop.models.weights import COMPANIONS
from rlloop.numerics.fp8 import BLOCK, Fp8Weight


def save_fp8(model: Model, path: str | Path) -> None:
    """Write the weights of a `quantize="fp8"` model as computed with: `X.weight` in E4M3, `X.weight_scale_inv` float32,
    other weights in the compute type, and a `quantization_config`, beside the source's tokenizer.

    `load_model` reads it as packed weights, which are frozen and whose inputs are not quantised; to go on training,
    load a checkpoint of the masters. Raises `ModelError` for other models, and a folder that holds other weight files.
    """
    if not is_quantised(model):
        raise ModelError('the model has no weights in 8 bits; load it with quantize="fp8", or use save_model')
    folder, store = Path(path), ParameterStore(model)
    folder.mkdir(parents=True, exist_ok=True)
    stored = store.as_stored()
    write_single(folder, {name: tensor for name, tensor in stored.items() if name not in store.aliases})
    plain = [
        module_name(name, model.config.architecture)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and not isinstance(module.weight, Fp8Weight)
    ]
    quantized = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head", *plain],
    }  # fmt: skip
    raw = model.config.raw
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    config = {**raw, key: str(model.dtype).removeprefix("torch."), "quantization_config": quantized}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if (source := model.source_path) is not None:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
