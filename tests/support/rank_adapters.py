"""Results, as bits, of a model with adapters on one rank or on several. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlloop import Engine, load_model
from rlloop.models import Model
from rlloop.models.adapter_weights import Adapter
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.adapters import random_adapter
from tests.support.rank_cases import CPU, PROMPTS, SAMPLING, trained

ALL = ("all-linear", "lm_head")
OF_ROWS = ("a", "b", None, "c")


def by_request(model: Model) -> dict[str, bytes]:
    """Completions of requests with several adapters, more of them than slots."""
    engine = Engine(model, max_batch_tokens=32, page_size=8, adapter_slots=2, prefix_caching=not model.recurrent)
    for seed, (name, rank) in enumerate({"a": 3, "b": 20, "c": 5}.items()):
        engine.add_adapter(name, random_adapter(model, seed, rank=rank, targets=ALL))
    made = engine.generate(PROMPTS, SAMPLING, adapters=list(OF_ROWS))
    engine.drop_adapter("a")
    engine.add_adapter("b", random_adapter(model, 7, rank=6, targets=ALL))
    made += engine.generate(PROMPTS[:2], SAMPLING[:2], adapters=["b", "c"])
    return {
        "tokens": np.concatenate([each.token_ids for each in made]).tobytes(),
        "sampled": b"".join(each.logprobs.tobytes() for each in made),
        "raw": b"".join(each.raw_logprobs.tobytes() for each in made),
    }


def results(
    folders: Mapping[tuple[str, str], Path], context: ParallelContext | None, *, trains: bool = True
) -> dict[str, bytes]:
    """Of each model: logprobs and gradients of one adapter, and what requests with several get."""
    found = {}
    for (family, dtype), folder in folders.items():
        model = load_model(folder, dtype=dtype, context=context).requires_grad_(False)
        own = model.with_adapter(Adapter(random_adapter(model, 11, targets=ALL), model.adapter_targets()))
        for name, value in {**(trained(own) if trains else {}), **by_request(model)}.items():
            found[f"{family} {dtype} {name}"] = value
    return found


def over_ranks(folders: Mapping[tuple[str, str], Path], *layouts: dict[str, int]) -> list[dict[str, bytes]]:
    """`results` in each layout; in a pipeline without gradients."""
    return [results(folders, join(CPU, Layout(**degrees)), trains="pp" not in degrees) for degrees in layouts]
