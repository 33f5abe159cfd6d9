"""`trainer.share_prompts`: seconds of training and of recomputing one group, its common prompt computed once or not.

A random model takes GRPO's `forward_backward` of one group, and then scores it without a gradient (`recompute`, which
always shares), with and without sharing, in turns, in one process and with micro-batches of the same size. Bits of the
logprobs are compared, and gradients by the norm of their difference. On a CPU, seconds are processor seconds, and the
model is a dense Qwen3, a Qwen3.5 (gated delta networks), a Nemotron 3 (Mamba-2), or a Qwen3-VL whose prompt has a
picture of 256 tokens.

    python benchmarks/shared_prompts.py                                   # a GPU: 0.6B, bfloat16, 16 x (8192 + 512)
    python benchmarks/shared_prompts.py --device cpu --no-write           # 3M, float32, 16 x (1024 + 64)
    python benchmarks/shared_prompts.py --device cpu --prompt 512 --new 32 --rounds 3 --no-write
    python benchmarks/shared_prompts.py --device cpu --shape delta mamba pictures --prompt 512 --new 32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_shapes import QWEN3_06B
from results_schema import Figure, need_gpus, report
from train import CONFIG

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import new_model
from rlloop.trainer import Trainer, TrainSequence
from rlloop.types import Image, ModelInput

BASE = {**CONFIG, "max_position_embeddings": 16384}
PICTURE, PAD = 32, CONFIG["vocab_size"]  # patches of a side, of which 2 x 2 make a token, and what stands for them
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("3M", {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
    "delta": (
        "gated delta networks, 6 layers",
        {
            **BASE, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "linear_num_value_heads": 6,
            "linear_num_key_heads": 3, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "rope_parameters": {"partial_rotary_factor": 0.25},
        },
    ),
    "mamba": (
        "Mamba-2, 8 layers",
        {
            **BASE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "mamba_num_heads": 12,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2, "num_hidden_layers": 8,
            "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "tie_word_embeddings": False,
        },
    ),
    "pictures": (
        "Qwen3-VL, 6 layers and a tower of 6",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": PAD,
            "video_token_id": PAD + 1, "vision_start_token_id": PAD + 2, "vision_end_token_id": PAD + 3,
            "tie_word_embeddings": True,
            "text_config": {
                **BASE, "model_type": "qwen3_vl_text", "vocab_size": PAD + 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5],
                                    "mrope_interleaved": True},
            },
            "vision_config": {
                "model_type": "qwen3_vl", "depth": 6, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4,
                "in_channels": 3, "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2,
                "out_hidden_size": CONFIG["hidden_size"], "num_position_embeddings": 1024,
                "deepstack_visual_indexes": [1, 3, 5],
            },
        },
    ),
}  # fmt: skip
AIM, WORK = 3.0, ("train", "recompute")


def make_group(vocab: int, group: int, prompt: int, new: int, picture: bool = False) -> list[TrainSequence]:
    """Completions of one prompt, each of `new` / 2 to `new` tokens."""
    rng = np.random.default_rng(0)
    common, batch, begun = rng.integers(3, vocab, prompt).tolist(), [], None
    if picture:
        at = range(64, 64 + PICTURE**2 // 4)
        common[at.start : at.stop] = [PAD] * len(at)
        image = Image(rng.uniform(-1, 1, (PICTURE**2, 384)).astype(np.float32), PICTURE, PICTURE)
        begun = ModelInput.with_images(common, at, [image])
    for _ in range(group):
        made = int(rng.integers(new // 2, new + 1))
        batch.append(
            TrainSequence(
                token_ids=common + rng.integers(3, vocab, made).tolist(),
                predict=range(prompt, prompt + made),
                advantages=np.full(made, rng.normal(), np.float32),
                rollout_logprobs=np.full(made, -np.log(vocab), np.float32),
                model_input=begun,
            )
        )
    return batch


def seconds(work: Callable[[], object], cpu: bool) -> float:
    if cpu:  # of the processors, all threads together: other work does not count
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@contextmanager
def without_sharing() -> Iterator[None]:
    """Turns sharing off in forwards without a gradient, which otherwise share where they can."""
    with ExitStack() as stack:
        for module in ("models.scoring", "trainer.trainer"):
            stack.enter_context(patch(f"rlloop.{module}.why_not_shared", return_value="the benchmark compares"))
        yield


def gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: total for name, total in trainer._masters.gradients.totals().items() if total is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", nargs="+", choices=SMALL, default=["dense"], help="on a CPU; a GPU has one, dense")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, help="tokens; 8192, on a CPU 1024")
    parser.add_argument("--new", type=int, help="tokens of a completion at most; 512, on a CPU 64")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    if not cpu and args.shape != ["dense"]:
        parser.error("--shape names models for --device cpu; leave it out for a GPU")
    if not cpu:
        need_gpus(instead="--device cpu trains a small model")
    figures = [figure for shape in args.shape for figure in measure(args, cpu, shape)]
    packages = () if cpu else ("triton",)
    report("shared-prompts", figures, packages=packages, part=True, write=not args.no_write)


def measure(args: argparse.Namespace, cpu: bool, shape: str) -> list[Figure]:
    prompt, new = args.prompt or (1024 if cpu else 8192), args.new or (64 if cpu else 512)
    (kind, config), dtype = (SMALL[shape], "float32") if cpu else (("0.6B shape", QWEN3_06B), "bfloat16")
    vocab = config.get("vocab_size", PAD)
    batch = make_group(vocab, args.group, prompt, new, picture=shape == "pictures")
    tokens = sum(len(item.token_ids) for item in batch)
    trainers = {
        share: Trainer(
            new_model(config, seed=0, dtype=dtype).to(args.device),
            TrainerConfig(max_batch_tokens=args.micro_batch_tokens, share_prompts=share),
        )
        for share in (False, True)
    }
    times: dict[tuple[str, bool], list[float]] = {(what, share): [] for what in WORK for share in trainers}
    gradients, logprobs = {}, {}
    for turn in range(args.rounds + 1):  # the first one compiles
        for share, trainer in trainers.items():
            trainer.drop_gradient()
            taken = seconds(lambda t=trainer: t.forward_backward(batch, get_loss("grpo")), cpu)
            times["train", share].append(taken)
            if turn == 0:
                gradients[share] = gradient(trainer)
            with nullcontext() if share else without_sharing():
                taken = seconds(lambda s=share, t=trainer: logprobs.update({s: t.logprobs(batch)}), cpu)
            times["recompute", share].append(taken)
    same = sum(int((a.view(np.int32) != b.view(np.int32)).sum()) for a, b in zip(*logprobs.values(), strict=True))
    print(f"{same} of {sum(len(item.predict) for item in batch)} logprobs differ")
    apart = [(mine - gradients[False][name]).norm() / mine.norm() for name, mine in gradients[True].items()]
    print(f"gradients differ by {float(max(apart)):.1e} of their norm at most")
    figures = []
    for what in WORK:
        plain, shared = (times[what, share][1:] for share in (False, True))
        ratios = [a / b for a, b in zip(plain, shared, strict=True)]
        for name, found in (("whole, s", plain), ("shared, s", shared), ("ratio", ratios)):
            least, middle, most = min(found), statistics.median(found), max(found)
            print(f"{shape}, {what}, {name}: {least:.3f} / {middle:.3f} / {most:.3f} (min, median, max)")
        title = f"{what}, {kind} {dtype}, {args.group} x ({prompt} + {new // 2} to {new}), one prompt"
        mine, whole = ([tokens / each for each in taken] for taken in (shared, plain))
        unit = "tokens/processor second" if cpu else "tokens/s"
        figures.append(Figure.of_rounds(title, unit, mine, "the same, every sequence whole", whole, aim=AIM))
    return figures


if __name__ == "__main__":
    main()
