"""Steps of RL after one long prompt, which `long_context.py --rl` measures in a process of their own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from children import tell
from long_context_sides import sequence
from results_schema import Figure

CHUNK = {"cuda": 8192, "cpu": 64}  # tokens of a prompt that the engine reads in one step


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
