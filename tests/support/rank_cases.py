"""Samples, scores and gradients, as bits, of a model on one rank or on several. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.models import Model, RedrawRecord, ScoreRow, score
from rlloop.models.parameters import ParameterStore
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout

CPU = torch.device("cpu")
PROMPTS = [[5], list(range(3, 20)), list(range(10, 60)), [9, 8, 7]]
SAMPLING = [
    SamplingParams(max_tokens=6, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=2, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=4, seed=3, temperature=1.2, top_k=30, min_tokens=3),
    SamplingParams(max_tokens=4, seed=4, temperature=0.0),
]
SEQUENCES = [
    ([(7 * i + length) % 90 + 3 for i in range(length)], [(11 * i + length) % 90 + 3 for i in range(completion)])
    for length, completion in ((1, 1), (3, 9), (17, 30), (40, 35), (5, 16))
]


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def trained(model: Model) -> dict[str, bytes]:
    """Logprobs, and the whole gradients, of sequences that no chunk or page boundary fits."""
    rows = token_logprobs(model, SEQUENCES)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(len(row), generator=generator) for row in rows]
    torch.stack([(row * weight).sum() for row, weight in zip(rows, weights, strict=True)]).sum().backward()
    entries = ParameterStore(model).entries.items()
    gradients = {name: bits(entry.whole(entry.live.grad)) for name, entry in entries if entry.live.grad is not None}
    return {"logprobs": bits(torch.cat(rows)), **gradients}


def sampled(model: Model) -> dict[str, bytes]:
    """Completions of mixed requests, and the same drawn again on the trainer's path."""
    engine = Engine(model, max_batch_tokens=32, page_size=8)
    made = engine.generate([*PROMPTS, *PROMPTS], [*SAMPLING, *([SamplingParams(max_tokens=5, min_tokens=3)] * 4)])
    made += [engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS[:2], SAMPLING[:2], strict=True)]
    rows = [
        ScoreRow(ids := [*each.prompt_ids, *each.token_ids], range(len(each.prompt_ids), len(ids)), each.sampling)
        for each in made
    ]
    record = RedrawRecord()
    with torch.no_grad():
        logprobs, entropies = score(model, rows, record=record)
    top = engine.score(PROMPTS[2], 3)
    assert top.alternatives is not None
    return {
        "tokens": np.concatenate([each.token_ids for each in made]).tobytes(),
        "sampled": b"".join(each.logprobs.tobytes() for each in made),
        "raw": b"".join(each.raw_logprobs.tobytes() for each in made),
        "scored": bits(logprobs),
        "entropies": bits(entropies),
        "drawn again": bits(record.token_ids),
        "raw again": bits(record.raw_logprobs),
        "likeliest": top.alternatives.token_ids.tobytes() + top.alternatives.logprobs.tobytes(),
    }


def results(folders: Mapping[tuple[str, str], Path], context: ParallelContext | None) -> dict[str, bytes]:
    found = {}
    for (family, dtype), folder in folders.items():
        model = load_model(folder, dtype=dtype, context=context)
        for name, value in {**trained(model), **sampled(model)}.items():
            found[f"{family} {dtype} {name}"] = value
    return found


def over_ranks(folders: Mapping[tuple[str, str], Path], *sizes: int) -> list[dict[str, bytes]]:
    """`results` in tensor parallelism of each size. Where a size fills the ranks several times over, each of its groups
    takes some of the folders."""
    found = []
    for size in sizes:
        context = join(CPU, Layout(tp=size))
        groups, group = dist.get_world_size() // size, context.first // size
        found.append(results(dict(list(folders.items())[group::groups]), context))
    return found
