"""SGLang's engine as a peer of rlloop's in `gpu_engine.py --sglang FOLDER`.

FOLDER holds SGLang and what it needs, beside the interpreter's torch (`pip install --target FOLDER sglang==0.5.16`); it
is the whole PYTHONPATH of SGLang's processes and on no other's, for its releases of transformers and others are not
those of vLLM. FOLDER may lack FlashInfer: SGLang then takes norms from its own compiled kernels; it samples by PyTorch
at a temperature of 1 either way. Kernels that SGLang compiles at first use need nvcc, or are in FOLDER/jitcache.

SGLang is set up as it comes on Hopper: FlashAttention 3, the scheduler overlapping the GPU's work, prompts in chunks of
8,192 tokens, graphs of decode and of prompts, a radix cache of prefixes. Beyond that: graphs for as many requests as
run at once, the same room for keys and values as the others have, no tokenizer, no grammars, no statistics. Between
its rounds its scheduler sleeps, so that it takes no core from an engine whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

NAME, KIND = "SGLang", "sglang"
NO_PROMPTS, TRITON = "no graphs of prompts", "no graphs of prompts, Triton's attention"
SETUPS: dict[str, dict[str, Any]] = {  # in the order of trying: arguments of its engine
    "": {},
    NO_PROMPTS: {"disable_prefill_cuda_graph": True},
    TRITON: {"disable_prefill_cuda_graph": True, "attention_backend": "triton"},
}
GRAPHS = 256  # requests for which it has graphs as it comes
LEAST = 4096  # tokens that it has room for
Made = tuple[list[int], list[float]]


def check(folder: Path) -> None:
    """Raises `SystemExit` if the folder has no SGLang."""
    if not any(_packages(folder, "sglang")):
        raise SystemExit(f"{folder} has no SGLang: pip install --target {folder} sglang==0.5.16")


def environment(folder: Path) -> dict[str, str]:
    """Environment variables of SGLang's processes."""
    place = str(folder.resolve())
    made = {
        "PYTHONPATH": place,  # nothing else: it would import vLLM, too, where it finds it
        "HF_HUB_OFFLINE": "1",
        "CUDA_MODULE_LOADING": "LAZY",
    }
    if not any(_packages(folder, "flashinfer-python")):
        made["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    if (cache := folder.resolve() / "jitcache").is_dir():
        made["TVM_FFI_CACHE_DIR"] = str(cache)
    return made


def _packages(folder: Path, name: str) -> list[metadata.Distribution]:
    return list(metadata.distributions(name=name, path=[str(folder)]))


def arguments(folder: Path, settings: Mapping[str, Any], cuda: bool = True) -> dict[str, Any]:
    """Arguments of `sglang.Engine`; `settings` as in `gpu_engine.py`. Without `cuda`: on a CPU, to try a script out."""
    running = settings["running"]
    place = (
        {"attention_backend": "fa3", "cuda_graph_max_bs_decode": max(GRAPHS, running)}
        if cuda
        else {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
    )
    return {
        "model_path": str(folder), "dtype": "bfloat16", "skip_tokenizer_init": True, "log_level": "warning",
        "load_format": "auto" if any(folder.glob("*.safetensors")) else "dummy", "random_seed": 0,
        "max_running_requests": running, "max_total_tokens": max(LEAST, settings["cache"] // settings["token"]),
        "sampling_backend": "pytorch", "grammar_backend": "none", "sleep_on_idle": True, **place,
        **SETUPS[settings["setup"]],
    }  # fmt: skip


def side(folder: Path, settings: Mapping[str, Any]) -> Callable[[list[list[int]], list[int], int], list[Made]]:
    """Starts the engine; what is returned runs a round: (prompts, new tokens of each, round)."""
    import sglang
    import torch

    engine = sglang.Engine(**arguments(folder, settings, torch.cuda.is_available()))

    def run(prompts: list[list[int]], new: list[int], index: int) -> list[Made]:
        sampling = [{"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True} for n in new]
        made = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        return [
            (each["output_ids"], [logprob for logprob, *_ in each["meta_info"]["output_token_logprobs"]])
            for each in made
        ]

    return run
