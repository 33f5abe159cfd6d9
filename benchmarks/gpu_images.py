"""Milliseconds to read pictures and answer with one token: rlloop's engine beside vLLM, Qwen3-VL-8B's shape.

    python benchmarks/gpu_images.py [--vllm] [--parts] [--layers 12] [--seconds 300] [--quick] [--tiny]

1 and 16 requests, each a picture of 512 x 512 pixels (1,024 patches, which the tower merges to 256 tokens) among 64
tokens of text, and one new token. The tower is whole; of the decoder's 36 layers there are `--layers`, so that its
random weights are written soon. Both sides take Pillow's pictures and token ids, and have a process of their own, one
after the other: two rounds to warm up, then nine on new pictures, whose median counts. rlloop is also measured with the
patches made before, and the trainer computes its logprobs again, of which none may differ.

vLLM runs as it comes, with its default processor, no videos, no statistics and no detokenisation.

`--parts` records nothing and says where rlloop's time goes: the processor, patches on their way to the device, the
tower (also: until its last launch, which is the host's part), and the engine with features known before; then, of one
answer, the operations that take most of the device's time and of the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from children import tell, told
from gpu_shapes import save_random
from results_schema import Figure, need_gpus, report

if TYPE_CHECKING:
    from rlloop import Engine

ROUNDS, WARM = 9, 2
START, END, PAD, VIDEO = 151652, 151653, 151655, 151656  # tokens that mark images, as released
SPECIAL = (  # tokens from 151643 on
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
SIZES = {"text": 64, "side": 512, "requests": [1, 16]}
SMALL = {"text": 12, "side": 64, "requests": [1, 3]}
SIDES = {"rlloop": {}, "vllm": {"VLLM_PLUGINS": "none"}}
Round = list[tuple[list[int], Any]]  # (text with one placeholder, picture) of each request
Found = dict[tuple[str, int], list[float]]  # (what, requests) -> seconds of each round


def config_of(layers: int, tiny: bool) -> dict[str, Any]:
    """Qwen3-VL-8B-Instruct's, with fewer layers; `tiny`: a toy of the family."""
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "bos_token_id": 151643, "eos_token_id": 151645,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096,
        "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    if tiny:
        text |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        text["num_hidden_layers"] = 2
        vision |= {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
        vision["deepstack_visual_indexes"] = [0, 1]
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
        "vision_config": vision, "image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": START,
        "vision_end_token_id": END, "tie_word_embeddings": False,
    }  # fmt: skip


def add_processor(folder: Path) -> None:
    """The released processors' settings but for the largest picture, and a tokenizer that knows the marks' ids."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"word{id}": id for id in range(151643)}, unk_token="word0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 262144,
    }  # fmt: skip
    shared = {
        "processor_class": "Qwen3VLProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
    }
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    for name, content in (
        ("tokenizer_config", kept), ("preprocessor_config", {**shared, **image}),
        ("video_preprocessor_config", {**shared, **video}),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(content))


def requests_of(count: int, index: int, sizes: dict[str, Any]) -> Round:
    """The same for both sides; no picture comes twice."""
    from PIL import Image

    rng, made = np.random.default_rng([count, index]), []
    for _ in range(count):
        words = rng.integers(3, 151643, sizes["text"]).tolist()
        pixels = rng.integers(0, 256, (sizes["side"], sizes["side"], 3), dtype=np.uint8)
        made.append(([*words[:8], START, PAD, END, *words[8:]], Image.fromarray(pixels)))
    return made


def rounds(what: str, sizes: dict[str, Any], prepare: Callable[[Round], Any], run: Callable[[Any], object]) -> None:
    """Tell the seconds of `run` for each number of requests."""
    for count in sizes["requests"]:
        for index in range(WARM + ROUNDS):
            given = prepare(requests_of(count, index, sizes))
            begin = time.perf_counter()
            run(given)
            if index >= WARM:
                tell(what=what, requests=count, seconds=time.perf_counter() - begin)


def rlloop_side(folder: Path, sizes: dict[str, Any]) -> None:
    import torch

    import rlloop
    from rlloop.models.vision_processor import ImageProcessor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, processor = rlloop.load_model(folder, dtype="bfloat16", device=device), ImageProcessor.of_folder(folder)
    engine = rlloop.Engine(
        model, max_cache_tokens=32768, max_running=max(sizes["requests"]), prefix_caching=not sizes.get("parts")
    )

    def prompts(asked: Round) -> list[Any]:
        images = processor.images([picture for _, picture in asked])
        return [processor.prompt(ids, [image]) for (ids, _), image in zip(asked, images, strict=True)]

    def answer(given: list[Any]) -> list[Any]:
        sampling = [rlloop.SamplingParams(1, seed=at, ignore_eos=True) for at in range(len(given))]
        return engine.generate(given, sampling)

    if sizes.get("parts"):
        parts(engine, sizes, prompts, answer)
        return
    rounds("pictures", sizes, lambda asked: asked, lambda asked: answer(prompts(asked)))
    engine.set_version(1)  # forgets the features of images
    rounds("patches", sizes, prompts, answer)
    engine.set_version(2)
    given = prompts(requests_of(max(sizes["requests"]), WARM, sizes))
    made = answer(given)
    with torch.no_grad():
        pairs = [(prompt, each.token_ids) for prompt, each in zip(given, made, strict=True)]
        scored = torch.cat(rlloop.token_logprobs(model, pairs)).cpu().numpy()
    engines = np.concatenate([each.logprobs for each in made])
    differ = int((scored.view(np.int32) != engines.view(np.int32)).sum())
    tell(differ=differ, tokens=len(scored), prompt=len(given[0].token_ids))


def parts(
    engine: Engine, sizes: dict[str, Any], prompts: Callable[[Round], list[Any]], answer: Callable[[Any], object]
) -> None:
    """Tell the seconds of each part, and print what takes most of them. The engine keeps features, but no prefixes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from rlloop.models.vision import patches_on

    model, cuda = engine.model, engine.model.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None

    def timed(part: str, count: int, counts: bool, work: Callable[[], Any], launched: str | None = None) -> Any:
        begin = time.perf_counter()
        made = work()
        returned = time.perf_counter() - begin
        wait()
        if counts:
            if launched is not None:
                tell(part=launched, requests=count, seconds=returned)
            tell(part=part, requests=count, seconds=time.perf_counter() - begin)
        return made

    for count in sizes["requests"]:
        for index in range(WARM + ROUNDS):
            asked, counts = requests_of(count, index, sizes), index >= WARM
            given = timed("processor", count, counts, lambda asked=asked: prompts(asked))
            images = [image for prompt in given for image in prompt.images]
            with torch.inference_mode():
                timed(
                    "patches to the device", count, counts,
                    lambda images=images: patches_on(images, model.device, model.dtype),
                )  # fmt: skip
                timed("tower", count, counts, lambda images=images: model.see(images), "tower, until launched")
            timed("answer, patches given", count, counts, lambda given=given: answer(given))
            timed("answer, features known", count, counts, lambda given=given: answer(given))
        given = prompts(requests_of(count, WARM + ROUNDS, sizes))
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
            answer(given)
            wait()
        for key in (["self_device_time_total"] if cuda else []) + ["self_cpu_time_total"]:
            listed = profiled.key_averages().table(sort_by=key, row_limit=16, max_name_column_width=60)
            print(f"{count} requests, by {key}:\n{listed}", file=sys.stderr, flush=True)


def vllm_side(folder: Path, sizes: dict[str, Any]) -> None:
    import vllm

    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=4096, max_num_seqs=max(sizes["requests"]),
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.5, limit_mm_per_prompt={"image": 1, "video": 0},
        disable_log_stats=True,
    )  # fmt: skip
    sampling = vllm.SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)

    def answer(asked: Round) -> None:
        given: Any = [{"prompt_token_ids": ids, "multi_modal_data": {"image": picture}} for ids, picture in asked]
        made = engine.generate(given, sampling, use_tqdm=False)
        if (length := len(made[0].prompt_token_ids)) != sizes["text"] + 2 + (sizes["side"] // 32) ** 2:
            raise RuntimeError(f"a prompt has {length} tokens: pictures were resized")

    rounds("pictures", sizes, lambda asked: asked, answer)


def figures_of(mine: Found, peer: Found, facts: dict[str, Any], sizes: dict[str, Any], words: str) -> list[Figure]:
    """Figures of what has been measured so far."""
    each_has = f"{(sizes['side'] // 16) ** 2:,} patches, {sizes['text']} tokens of text"
    figures = []
    for (what, count), seconds in mine.items():
        other = peer.get((what, count))
        title = f"pictures to first token, {count} x ({each_has}), {words} bf16"
        title += "" if what == "pictures" else ", patches given"
        figures.append(
            Figure.of_rounds(
                title, "ms", [1000 * each for each in seconds], "vLLM default" if other else None,
                [1000 * each for each in other] if other else None, aim=1.0 if other else None, lower_is_better=True,
            )
        )  # fmt: skip
    if facts:
        title = f"logprobs that differ in the trainer, of {facts['tokens']}, after pictures, {words} bf16"
        figures.append(Figure(name=title, unit="tokens", value=facts["differ"]))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--layers", type=int, default=12, help="of the decoder, which has 36")
    parser.add_argument("--seconds", type=float, default=540, help="of all; what is measured by then is recorded")
    parser.add_argument("--parts", action="store_true", help="where rlloop's time goes; nothing recorded")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "FOLDER", "SIZES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, folder, sizes = args.child
        {"rlloop": rlloop_side, "vllm": vllm_side}[side](Path(folder), json.loads(sizes))
        return 0
    if not args.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    end, failed = time.monotonic() + args.seconds, False
    words = "toy Qwen3-VL" if args.tiny else f"Qwen3-VL-8B, {args.layers} of 36 layers"
    found: dict[str, Found] = {side: {} for side in SIDES}
    facts: dict[str, Any] = {}
    found_parts: dict[tuple[int, str], list[float]] = {}
    sides = [side for side in SIDES if side == "rlloop" or (args.vllm and not args.parts)]
    with tempfile.TemporaryDirectory() as folder:
        save_random(config_of(args.layers, args.tiny), folder)
        add_processor(Path(folder))
        sizes = {**(SMALL if args.tiny else SIZES), "parts": args.parts}
        for at, side in enumerate(sides):
            seconds = (end - time.monotonic()) / (len(sides) - at)
            command = [sys.executable, __file__, "--child", side, folder, json.dumps(sizes)]
            try:
                for made in told(command, seconds, {**os.environ, **SIDES[side]}):
                    print(f"{side}: {made}", file=sys.stderr, flush=True)
                    if "part" in made:
                        found_parts.setdefault((made["requests"], made["part"]), []).append(made["seconds"])
                    elif "what" in made:
                        found[side].setdefault((made["what"], made["requests"]), []).append(made["seconds"])
                    else:
                        facts = made
            except subprocess.CalledProcessError as error:
                print(f"{side} ended with code {error.returncode}", file=sys.stderr, flush=True)
                failed = True
            for (count, part), times in found_parts.items():
                print(f"{count} x {part}: {1000 * statistics.median(times):.2f} ms", flush=True)
            figures = figures_of(found["rlloop"], found["vllm"], facts, sizes, words)
            if args.parts:
                continue
            packages = ("triton", *(("vllm",) if args.vllm else ()))
            report("gpu-images", figures, packages=packages, part=True, write=not (args.quick or args.tiny))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
