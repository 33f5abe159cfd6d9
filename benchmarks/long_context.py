"""One sequence of 32k to 512k tokens on one GPU: training tokens per second and peak memory, and a step of RL.

    python benchmarks/long_context.py [--only 32k 128k] [--keep-attention] [--offload-activations] [--seconds 540]
                                      [--quick] [--tiny]
    python benchmarks/long_context.py --rl [--seconds 300]

A random Qwen3 of the 0.6B shape in bfloat16, with as many positions as the lengths take. Forward and backward of one
sequence, of which all but the first 512 tokens are trained by GRPO's clipped loss:

- rlloop: `Trainer` with `checkpoint_layers=all`; `checkpoint_keep_attention`, `checkpoint_offload` and `offload` as
  `--keep-attention`, `--offload-activations` and `--offload` say. Masters and moments are on the GPU.
- peer: transformers' model, SDPA by whichever of PyTorch's choice and cuDNN is faster on 32,768 tokens, gradient
  checkpointing, lm_head and loss in recomputed blocks of 2,048 rows. It holds masters and moments of the same size.

512k is measured if `--only` names it. Each has a process of its own, and goes from short to long; one that runs out of
memory says so and ends. Three rounds of each length, fewer where the time that is left is needed for one of every
longer length. Peak memory is that of tensors, beside the prediction of `rlloop doctor --model` (without the cache of an
engine, and what CUDA reserves).

`--rl`: steps of RL at 128k: the engine reads a prompt of 130,000 tokens in chunks and samples 4 completions of 64, the
trainer computes their logprobs again (the prompt once, `share_prompts`), counts those with other bits and tokens that
it draws otherwise, learns and steps. Then a prompt of 256k tokens is read alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from children import tell, told
from gpu_shapes import SHAPES, TINY, save_random
from results_schema import Figure, device_name, report, table
from roofline import device_rates, train_speed

ROUNDS, BLOCK, WARM = 3, 2048, 4096
POSITIONS = 524288 + 64
LENGTHS = {"32k": 32768, "128k": 131072, "256k": 262144, "512k": 524288}
DEFAULT = ("32k", "128k", "256k")
CHOOSES = 32768  # tokens by which the peer chooses its attention
SIDES = {"rlloop": "rlloop", "peer": "transformers, SDPA, layers recomputed"}
CHUNK = {"cuda": 8192, "cpu": 64}  # tokens of a prompt that the engine reads in one step
RL = {"prompt": 130000, "new": 64, "count": 4, "alone": 262144}
SMALL = {  # for a CPU, to try the script out
    "lengths": {"96": 96, "160": 160}, "prompt": 20, "warm": 32,
    "rl": {"prompt": 150, "new": 5, "count": 2, "alone": 200},
}  # fmt: skip
LARGE = {"lengths": LENGTHS, "prompt": 512, "warm": WARM, "rl": RL}
Run = Callable[[int], float]  # (tokens of the sequence) -> loss
Found = dict[str, dict[int, dict[str, Any]]]  # side -> length -> seconds of rounds, peak, loss, or out of memory


def config_of(tiny: bool) -> dict[str, Any]:
    return {**(TINY if tiny else SHAPES["0.6B"])[1], "max_position_embeddings": POSITIONS}


def sequence(length: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(length).integers(3, vocabulary, length).tolist()


def ours(folder: Path, device: str, settings: dict[str, Any]) -> Run:
    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    model = rlloop.load_model(folder, dtype="bfloat16", device=device)
    keeps, moves, offload, prompt = (
        settings[name] for name in ("keep_attention", "offload_activations", "offload", "prompt")
    )
    trainer = Trainer(
        model,
        TrainerConfig(
            max_batch_tokens=POSITIONS,
            checkpoint_layers="all",
            checkpoint_keep_attention=keeps,
            checkpoint_offload=moves,
            offload=offload,
        ),
    )

    def run(length: int) -> float:
        uniform = np.full(length - prompt, -np.log(model.vocab_size), np.float32)
        batch = TrainSequence(
            token_ids=sequence(length, model.vocab_size), predict=range(prompt, length),
            advantages=np.ones(length - prompt, np.float32), rollout_logprobs=uniform,
        )  # fmt: skip
        result = trainer.forward_backward([batch], get_loss("grpo"), old_logprobs=[uniform])
        trainer.drop_gradient()
        return float(result.metrics["loss/total"].value)

    return run


def theirs(folder: Path, device: str, settings: dict[str, Any]) -> Run:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    prompt = settings["prompt"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    state = [torch.zeros(3, *each.shape, device=device) for each in model.parameters()]  # masters and moments
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def loss_of(hidden: Any, targets: Any, weight: float) -> Any:
        logprobs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ratio = (logprobs + float(np.log(model.config.vocab_size))).exp()
        return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).sum()

    def run(length: int) -> float:
        ids = torch.tensor(sequence(length, model.config.vocab_size), device=device)
        with sdpa_kernel(kinds, set_priority=True):
            made = model.model(ids[None], attention_mask={"full_attention": None}, use_cache=False)  # causal by itself
            pairs = zip(made.last_hidden_state[0, prompt - 1 : -1].split(BLOCK), ids[prompt:].split(BLOCK), strict=True)
            blocks = [checkpoint(loss_of, *pair, 1 / (length - prompt), use_reentrant=False) for pair in pairs]
            loss: Any = sum(blocks)
            loss.backward()
        model.zero_grad(set_to_none=True)
        assert state
        return float(loss.detach())

    times: dict[bool, float] = {}
    for cudnn in (False, True) if device == "cuda" else ():
        if cudnn:
            kinds.insert(0, SDPBackend.CUDNN_ATTENTION)
        try:
            run(settings["warm"])
            times[cudnn] = timed(run, min(CHOOSES, *settings["lengths"].values()), device)[0]
        except RuntimeError as error:
            print(f"SDPA, cuDNN first: {cudnn}, does not run: {str(error).splitlines()[0]}", file=sys.stderr)
    if times.get(True, np.inf) >= times.get(False, 0.0) and SDPBackend.CUDNN_ATTENTION in kinds:
        kinds.remove(SDPBackend.CUDNN_ATTENTION)
    print(f"peer: seconds with cuDNN first, or not: {times}; {kinds[0]}", file=sys.stderr, flush=True)
    return run


def timed(run: Run, length: int, device: str) -> tuple[float, float]:
    """(seconds, loss), with the device's work complete."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = run(length)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, loss


def needed(seconds: float, length: int, longer: Sequence[int]) -> float:
    """Seconds of another round and of one of each longer length: attention's grow with the square."""
    return seconds * (1 + sum((each / length) ** 2 for each in longer))


def measure(run: Run, settings: dict[str, Any], device: str) -> None:
    """Tell each round, from short to long, until memory or time is over."""
    import torch

    lengths = sorted(settings["lengths"].values())
    for at, length in enumerate(lengths):
        took = 0.0
        for index in range(settings["rounds"]):
            if index and time.monotonic() + needed(took, length, lengths[at + 1 :]) > settings["deadline"]:
                break
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                took, loss = timed(run, length, device)
            except torch.OutOfMemoryError as error:
                print(str(error).split(". ")[0], file=sys.stderr, flush=True)
                for each in lengths[at:]:  # what is longer takes more
                    tell(length=each, outgrown=True)
                return
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
            tell(length=length, seconds=took, loss=loss, peak=peak)


def rl_steps(model: Any, settings: dict[str, Any], device: str) -> None:
    """Tell each step, before which one has warmed up on a shorter prompt."""
    import torch

    import rlloop
    from rlloop.algorithms import get_loss
    from rlloop.config.trainer import TrainerConfig
    from rlloop.trainer import Trainer, TrainSequence

    prompt, new, count = (settings["rl"][name] for name in ("prompt", "new", "count"))
    room = prompt + count * (new + 64)
    engine = rlloop.Engine(model, max_cache_tokens=room, max_running=count, max_batch_tokens=CHUNK[device])
    trainer = Trainer(
        model,
        TrainerConfig(lr=1e-6, max_batch_tokens=room, checkpoint_layers="all", share_prompts=True),
    )

    def step(index: int, length: int) -> dict[str, Any]:
        ids, moments = sequence(length + index, model.vocab_size)[:length], [time.perf_counter()]
        sampling = [rlloop.SamplingParams(new, seed=1000 * index + i, ignore_eos=True) for i in range(count)]
        made = engine.generate([ids] * count, sampling)
        moments.append(time.perf_counter())
        batch = [
            TrainSequence(
                token_ids=[*each.prompt_ids, *each.token_ids], predict=range(length, length + new),
                advantages=np.full(new, 1.0 if i % 2 else -1.0, np.float32), rollout_logprobs=each.logprobs,
                sampling=each.sampling,
            )
            for i, each in enumerate(made)
        ]  # fmt: skip
        result = trainer.forward_backward(batch, get_loss("grpo"))
        moments.append(time.perf_counter())
        norm = trainer.optim_step()["loss/grad_norm"]
        engine.set_version(index + 1)
        if device == "cuda":
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
        again, theirs = np.stack(result.logprobs), np.stack([each.logprobs for each in made])
        drawn = np.stack(result.recomputed.redrawn or []) != np.array([each.token_ids for each in made])
        differ = int(((again.view(np.int32) != theirs.view(np.int32)) | drawn).sum())
        parts = dict(zip(("sample", "learn", "update"), np.diff(moments).tolist(), strict=True))
        return {**parts, "seconds": moments[-1] - moments[0], "differ": differ, "tokens": again.size, "norm": norm}

    step(0, settings["warm"])
    took = 0.0
    for index in range(1, settings["rounds"] + 1):
        if index > 1 and time.monotonic() + 2 * took > settings["deadline"]:  # leaves time for the prompt alone
            break
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        made = step(index, prompt)
        took = made["seconds"]
        tell(**made, peak=torch.cuda.max_memory_allocated() if device == "cuda" else None)


def read_alone(model: Any, settings: dict[str, Any], device: str) -> None:
    """Tell the seconds in which a prompt is read."""
    import rlloop

    length = settings["rl"]["alone"]
    engine = rlloop.Engine(
        model, max_cache_tokens=length + 64, max_running=1, max_batch_tokens=CHUNK[device], prefix_caching=False
    )
    for index in range(settings["rounds"]):
        ids = sequence(length + index, model.vocab_size)[:length]
        begin = time.perf_counter()
        engine.generate([ids], [rlloop.SamplingParams(1, seed=index, ignore_eos=True)])
        tell(alone=time.perf_counter() - begin)


def child(side: str, folder: Path, settings: dict[str, Any]) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if side == "rl":
        import rlloop

        model = rlloop.load_model(folder, dtype="bfloat16", device=device)
        rl_steps(model, settings, device)
        gc.collect()
        torch.cuda.empty_cache()
        read_alone(model, settings, device)
        return
    run = (ours if side == "rlloop" else theirs)(folder, device, settings)
    run(settings["warm"])
    measure(run, settings, device)


def predicted(config: dict[str, Any], length: int, settings: dict[str, Any]) -> float:
    """Bytes that `rlloop doctor --model` predicts for one rank, without an engine's cache and what CUDA reserves."""
    import torch

    from rlloop.models.config import parse_config
    from rlloop.parallel.layout import Layout
    from rlloop.training.memory import predict

    parts = predict(
        parse_config(config), Layout(), torch.bfloat16, length, settings["offload"],
        keep_attention=settings["keep_attention"], offload_activations=settings["offload_activations"],
    ).parts  # fmt: skip
    return sum(size for name, size in parts.items() if name not in ("cache", "reserved"))


def speeds(length: int, made: dict[str, Any]) -> list[float]:
    return [length / each for each in made["seconds"]]


def figures_of(found: Found, length: int, config: dict[str, Any], words: str, settings: dict[str, Any]) -> list[Figure]:
    """Of one length, with what has been measured so far."""
    prompt, offload = settings["prompt"], settings["offload"]
    mine, other = (found[side].get(length, {}) for side in SIDES)
    said = f"one sequence of {length:,} tokens, {words} bf16, layers recomputed"
    said += " but for attention" if settings["keep_attention"] else ""
    said += ", activations offloaded" if settings["offload_activations"] else ""
    said += "" if offload == "none" else f", offload={offload}"
    outgrown = ": out of memory"
    named = SIDES["peer"] + outgrown * bool(other.get("outgrown")) if other else None
    figures = []
    if mine.get("seconds"):
        rates = device_rates(device_name())
        bound = rates and train_speed(config, [(length, length - prompt)], rates[1])
        theirs = speeds(length, other) if other.get("seconds") else None
        figures = [
            Figure.of_rounds(
                f"forward + backward, {said}", "tokens/s", speeds(length, mine), named, theirs, aim=1.0, roofline=bound
            )
        ]  # fmt: skip
    elif mine.get("outgrown") and other.get("seconds"):
        title = f"forward + backward, {said}{outgrown}"
        figures = [Figure.of_rounds(title, "tokens/s", [0.0], named, speeds(length, other), aim=1.0)]
    elif mine.get("outgrown"):
        figures = [Figure(name=f"forward + backward, {said}{outgrown}", unit="tokens/s", value=0.0, peer=named)]
    if mine.get("peak"):
        gib, theirs = 1 << 30, other.get("peak")
        figures += [
            Figure(
                name=f"peak memory, {said}", unit="GiB", value=mine["peak"] / gib, peer=named,
                peer_value=theirs and theirs / gib, lower_is_better=True,
            ),
            Figure(
                name=f"peak memory that rlloop doctor predicts, {said}", unit="GiB",
                value=predicted(config, length, settings) / gib, peer="measured", peer_value=mine["peak"] / gib,
            ),
        ]  # fmt: skip
    return figures


def rl_figures(steps: list[dict[str, Any]], alone: list[float], sizes: dict[str, int], words: str) -> list[Figure]:
    said = f"prompt of {sizes['prompt']:,} tokens, {sizes['count']} x {sizes['new']} new, {words} bf16"
    figures = []
    if steps:
        differ, total = (sum(each[name] for each in steps) for name in ("differ", "tokens"))
        parts = {"seconds": "RL step", "sample": "sampling in an RL step", "learn": "learning in an RL step"}
        figures = [
            Figure.of_rounds(f"{what}, {said}", "s", [each[part] for each in steps], lower_is_better=True)
            for part, what in parts.items()
        ]
        figures.append(Figure(name=f"tokens that differ, of {total}, RL step, {said}", unit="tokens", value=differ))
        if steps[0]["peak"]:
            peaks = [each["peak"] / (1 << 30) for each in steps]
            figures.append(Figure.of_rounds(f"peak memory, RL step, {said}", "GiB", peaks, lower_is_better=True))
    if alone:
        title = f"prefill in chunks, one prompt of {sizes['alone']:,} tokens, {words} bf16"
        figures.append(Figure.of_rounds(title, "tokens/s", [sizes["alone"] / each for each in alone]))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LENGTHS, nargs="+", help="of the lengths")
    parser.add_argument("--rl", action="store_true", help="steps of RL instead of training alone")
    parser.add_argument("--without", choices=SIDES, action="append", default=[], help="of the sides")
    parser.add_argument("--offload", choices=("none", "moments", "masters"), default="none")
    parser.add_argument("--keep-attention", action="store_true", help="trainer.checkpoint_keep_attention=true")
    parser.add_argument("--offload-activations", action="store_true", help="trainer.checkpoint_offload=true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=540, help="of all; what is measured by then is recorded")
    parser.add_argument("--quick", action="store_true", help="nothing recorded")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU, nothing recorded")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "FOLDER", "SETTINGS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, folder, settings = args.child
        child(side, Path(folder), json.loads(settings))
        return 0
    end = time.monotonic() + args.seconds
    config, words = config_of(args.tiny), (TINY if args.tiny else SHAPES["0.6B"])[0]
    settings = {**(SMALL if args.tiny else LARGE), "offload": args.offload, "rounds": args.rounds}
    settings |= {"keep_attention": args.keep_attention, "offload_activations": args.offload_activations}
    names = args.only or [name for name in settings["lengths"] if args.tiny or name in DEFAULT]
    settings["lengths"] = {name: settings["lengths"][name] for name in names}

    def record(figures: list[Figure]) -> None:
        if args.quick or args.tiny:
            print(table(figures), flush=True)
        elif figures:
            report("long-context", figures, packages=("triton", "transformers"), part=True)

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        save_random(config, folder)
        # Ours last: it has what is left where the peer runs out of memory.
        sides = ["rl"] if args.rl else [side for side in reversed(SIDES) if side not in args.without]
        found: Found = {side: {} for side in SIDES}
        steps: list[dict[str, Any]] = []
        alone: list[float] = []
        for at, side in enumerate(sides):
            seconds = (end - time.monotonic()) / (len(sides) - at)
            settings["deadline"] = time.monotonic() + seconds
            try:
                for made in told([sys.executable, __file__, "--child", side, folder, json.dumps(settings)], seconds):
                    print(f"{side}: {made}", file=sys.stderr, flush=True)
                    if side == "rl":
                        (steps if "sample" in made else alone).append(made.get("alone", made))
                        record(rl_figures(steps, alone, settings["rl"], words))
                        continue
                    of = found[side].setdefault(made["length"], {"seconds": []})
                    if made.get("outgrown"):
                        of["outgrown"] = not of["seconds"]
                    else:
                        of["seconds"].append(made["seconds"])
                        of["peak"] = max(made["peak"], of.get("peak", 0)) if made["peak"] else None
                    record(figures_of(found, made["length"], config, words, settings))
            except subprocess.CalledProcessError as error:
                print(f"{side} ended with code {error.returncode}", file=sys.stderr, flush=True)
                failed = True
    for side, lengths in found.items():
        for length, made in lengths.items():
            if made["seconds"]:
                print(f"{side}, {length:,} tokens: {statistics.median(speeds(length, made)):,.0f} tokens/s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
