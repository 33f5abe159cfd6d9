"""rlloop's and vLLM's engines as `gpu_engine.py` compares them; it says why they are set up so.

`rlloop_side` and `vllm_side` start an engine in the process that calls them; what they return runs a round. Their
`settings` are those of `gpu_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_shapes import EVERY, bytes_of, random_model

STATES = 4  # recurrent states of a request that vLLM has room for: its pages have one size, and prefixes are kept
AS_IT_COMES, TRITON, CAREFUL = "", "Triton's gated delta kernels", "half the requests at once, no CUDA graphs"
SETUPS: dict[str, dict[str, Any]] = {  # of vLLM, in the order of trying; arguments of its LLM
    AS_IT_COMES: {},
    # On Hopper its prefill of gated delta networks is FlashInfer's, which a compiler (nvcc) builds at the first prompt.
    TRITON: {"additional_config": {"gdn_prefill_backend": "triton"}},
    CAREFUL: {"additional_config": {"gdn_prefill_backend": "triton"}, "enforce_eager": True},
}
Made = tuple[list[int], Any]  # tokens and their logprobs
Run = Callable[[list[list[int]], list[int], int], list[Made]]  # (prompts, new tokens of each, round)


def written(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def model_of(folder: Path, config: dict[str, Any]) -> Any:
    import rlloop

    if written(folder):
        import torch

        return rlloop.load_model(folder, dtype="bfloat16", device="cuda" if torch.cuda.is_available() else "cpu")
    return random_model(config)


def rlloop_side(folder: Path, kind: str, settings: dict[str, Any]) -> Run:
    import rlloop

    shape, running = settings["shape"], settings["running"]
    model, (_, token, state) = model_of(folder, EVERY[shape][1]), bytes_of(shape)
    room = max(4096, (settings["cache"] - STATES * running * state) // token)  # states have memory of their own
    if kind == "tier1":
        from rlloop.rollout.vllm.engine import VllmEngine

        engine: Any = VllmEngine(model, max_cache_tokens=room, max_running=running)
    else:
        engine = rlloop.Engine(model, max_cache_tokens=room, max_running=running)

    def run(prompts: list[list[int]], new: list[int], index: int) -> list[Made]:
        sampling = [rlloop.SamplingParams(n, seed=1000 * index + i, ignore_eos=True) for i, n in enumerate(new)]
        return [(made.token_ids, made.logprobs) for made in engine.generate(prompts, sampling)]

    return run


def vllm_side(folder: Path, settings: dict[str, Any]) -> Run:
    import vllm

    texts = {"language_model_only": True} if "vision_config" in EVERY[settings["shape"]][1] else {}
    setup = settings["setup"]
    running = -(-settings["running"] // 2) if setup == CAREFUL else settings["running"]
    engine = vllm.LLM(
        str(folder), dtype="bfloat16", load_format="auto" if written(folder) else "dummy", skip_tokenizer_init=True,
        max_model_len=settings["longest"], max_num_seqs=running, logprobs_mode="processed_logprobs",
        gpu_memory_utilization=0.2, kv_cache_memory_bytes=settings["cache"], disable_log_stats=True,
        **texts, **SETUPS[setup],
    )  # fmt: skip

    def run(prompts: list[list[int]], new: list[int], index: int) -> list[Made]:
        sampling = [
            vllm.SamplingParams(
                max_tokens=n, temperature=1.0, seed=1000 * index + i if settings["seeded"] else None, ignore_eos=True,
                logprobs=0, flat_logprobs=True, detokenize=False,
            )
            for i, n in enumerate(new)
        ]  # fmt: skip
        made = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        outputs = [request.outputs[0] for request in made]
        return [(list(each.token_ids), list(each.logprobs.logprobs)) for each in outputs]

    return run


def setups_of(shape: str, first: str) -> list[str]:
    """The `SETUPS` to try, from `first` on: Triton's kernels only where the shape has gated delta networks."""
    config = EVERY[shape][1]
    delta = "linear_attention" in config.get("text_config", config).get("layer_types", ())
    every = [setup for setup in SETUPS if setup != TRITON or delta]
    return every[every.index(first) :] if first in every else every
