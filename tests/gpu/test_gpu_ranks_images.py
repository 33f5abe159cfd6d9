"""Models that read images over 2 GPUs: one GPU's bits, of engines and trainers under `tp`, of forwards under `cp`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.models.scoring import ScoreRow
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import need_gpus
from tests.support.image_models import inputs, wide_prompts
from tests.support.rank_context import compared
from tests.support.ranks import in_shares, run_ranks
from tests.support.traffic import bits

DTYPES = ("float32", "bfloat16")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]


def here(device: str) -> torch.device:
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def seen(folder: Path, dtype: str, device: str, context: ParallelContext | None = None) -> dict[str, str | bytes]:
    """What an engine draws, and the trainer's logprobs of it."""
    asked = wide_prompts()
    sampling = [
        SamplingParams(12 + i % 5, seed=i, temperature=(1.0, 0.7, 0.0)[i % 3], ignore_eos=True)
        for i in range(len(asked))
    ]
    model = load_model(folder, dtype=dtype, context=context or ParallelContext(here(device)))
    made = Engine(model, max_batch_tokens=512).generate(asked, sampling)
    pairs = [(prompt, each.token_ids) for prompt, each in zip(asked, made, strict=True)]
    with torch.no_grad():
        scored = token_logprobs(model, pairs, sampling=sampling)
    return {
        "engine": str([bits(each) for each in made]),
        "engine's logprobs": b"".join(each.logprobs.tobytes() for each in made),
        "trainer's logprobs": b"".join(row.cpu().numpy().tobytes() for row in scored),
    }


def under_tp(folders: dict[str, Path], device: str = "cuda") -> list[str]:
    cases = {f"{family} {dtype}": (folders[family], dtype, device) for family in folders for dtype in DTYPES}
    alone = in_shares({name: partial(seen, *case) for name, case in cases.items()})
    context, wrong = join(here(device), Layout(tp=2)), []
    for name, case in cases.items():
        if alone[name]["engine's logprobs"] != alone[name]["trainer's logprobs"]:
            wrong.append(f"{name}: trainer and engine of one GPU")
        made = seen(*case, context)
        wrong += [f"{name}: {part}" for part, wanted in alone[name].items() if made[part] != wanted]
    return wrong


def test_engines_and_trainers_under_tp_have_the_bits_of_one_gpu(folders: dict[str, Path]) -> None:
    need_gpus(2)
    for rank, wrong in enumerate(run_ranks(2, under_tp, folders, kind="cuda")):
        assert not wrong, f"rank {rank}"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 3e-2)])
def test_contexts_have_the_bits_of_one_gpu(folders: dict[str, Path], dtype: str, tolerance: float) -> None:
    """A rank's tokens begin and end within pictures; it sees those alone that its tokens have parts of."""
    need_gpus(2)
    drawn = SamplingParams(max_tokens=20, seed=3)
    pairs = [*inputs(), *((prompt, list(range(3, 40))) for prompt in wide_prompts()[:6])]
    rows = [
        ScoreRow(prompt.token_ids + ids, range(len(prompt), len(prompt) + len(ids)), drawn, model_input=prompt)
        for prompt, ids in pairs
    ]
    batches = [rows, rows[2:3]]
    where = (list(folders.values()), 2, dtype, (), tolerance, batches)
    for rank, different in enumerate(run_ranks(2, partial(compared, device="cuda"), *where, kind="cuda")):
        assert not different, f"rank {rank}"
