"""Models over context-parallel ranks beside the same on one rank: run by `run_ranks`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlloop import load_model
from rlloop.models import Model, new_model
from rlloop.models.adapter_weights import Adapter
from rlloop.models.prompt_scores import score_prompt
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.scoring import RedrawRecord, ScoreRow, score
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.cut import share
from rlloop.parallel.layout import Layout
from rlloop.types import SamplingParams
from tests.support.adapters import random_adapter

LENGTHS, FEW = (17, 5, 30), (3,)  # tokens of sequences; FEW: of two rows, so that further ranks have none


def rows_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[ScoreRow]:
    generator, drawn = torch.Generator().manual_seed(seed), SamplingParams(max_tokens=40, seed=3)
    ids = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    return [ScoreRow(row, range(len(row) // 2, len(row)), drawn) for row in ids]


def loaded(
    source: Path | Mapping[str, Any], dtype: str, context: ParallelContext, targets: tuple[str, ...],
    profile: NumericsProfile | None,
) -> Model:  # fmt: skip
    """A folder's model or a new one of this configuration, of which either all weights train or a random adapter of
    `targets`."""
    if isinstance(source, Path):
        model = load_model(source, dtype=dtype, context=context, profile=profile)
    else:
        model = new_model(source, 0, dtype=dtype, context=context, profile=profile)
    if not targets:
        return model
    adapter = Adapter(random_adapter(model.requires_grad_(False), 11, targets=targets), model.adapter_targets())
    return model.with_adapter(adapter)


def trained_weights(model: Model) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters() if model.adapter is None else model.adapter.named_parameters())


def compared(
    sources: list[Path] | Mapping[str, Mapping[str, Any]], degree: int, dtype: str = "float32",
    targets: tuple[str, ...] = (), tolerance: float = 1e-4, batches: list[list[ScoreRow]] | None = None,
    profile: NumericsProfile | None = None, device: str = "cpu",
) -> list[str]:  # fmt: skip
    """Differences between one rank and as many context-parallel ranks: of bits, or of gradients above the tolerance.

    `sources`: folders, or configurations by name. `batches`: rows that are scored; None: ragged texts, and fewer tokens
    than ranks."""
    here = torch.device(device if device == "cpu" else f"{device}:{torch.cuda.current_device()}")
    different, context, batches = [], join(here, Layout(cp=degree)), batches or [rows_of(0), rows_of(2, FEW)]
    named = sources if isinstance(sources, Mapping) else {folder.name: folder for folder in sources}
    lengths = [len(row.token_ids) for row in batches[0]]
    count = sum(lengths)
    for family, source in named.items():
        whole, model = (loaded(source, dtype, each, targets, profile) for each in (ParallelContext(here), context))
        begin, end = share(count, degree, context.rank)
        tokens, place = torch.arange(count, device=here) % 90 + 3, AttentionLayout.of_sequences(lengths, here)
        with torch.no_grad():
            made = model.hidden(tokens, place.positions, place)
            if not made.equal(whole.hidden(tokens, place.positions, place)[begin:end]):
                different.append(f"{family} hidden")
        for rows in batches:
            results: list[Any] = []
            for each in (whole, model):
                for weight in trained_weights(each).values():
                    weight.grad = None
                record, choices = RedrawRecord(), []

                def watch(routes: RoutingRecord, _: list[ScoreRow], choices: list[Any] = choices) -> None:
                    choices += [routes.chosen(), routes.selected()]

                logprobs, entropy = score(each, rows, record=record, watch=watch)
                (logprobs.square().sum() + entropy.sum()).backward()
                results.append([logprobs.detach(), entropy.detach(), record.raw_logprobs, record.token_ids, *choices])
            for at, (one, other) in enumerate(zip(*results, strict=True)):
                if one is not None and not one.equal(other):
                    different.append(f"{family}, {len(rows)} rows: result {at}")
            prompt = next((row.model_input for row in rows if row.model_input is not None), rows[0].token_ids)
            one, other = (score_prompt(each, prompt, 2).logprobs for each in (whole, model))
            if one.tobytes() != other.tobytes():
                different.append(f"{family}, {len(rows)} rows: logprobs of a prompt")
            parts = trained_weights(model)
            for name, weight in trained_weights(whole).items():
                if (one := weight.grad) is None:
                    continue
                own = torch.zeros_like(one) if (grad := parts[name].grad) is None else grad
                total = context.ranks("cp").gather(own.float()[None]).sum(0)
                if (total - one.float()).norm() > tolerance * one.float().norm() + 1e-7:
                    different.append(f"{family}, {len(rows)} rows: gradient of {name}")
    return different
