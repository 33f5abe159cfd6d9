"""Models over context-parallel ranks beside the same on one rank: run by `run_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlloop import load_model
from rlloop.models import Model
from rlloop.models.adapter_weights import Adapter
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.scoring import RedrawRecord, ScoreRow, score
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.cut import share
from rlloop.parallel.layout import Layout
from rlloop.types import SamplingParams
from tests.support.adapters import random_adapter
from tests.support.rank_cases import CPU

LENGTHS, FEW = (17, 5, 30), (3,)  # tokens of sequences; FEW: of two rows, so that further ranks have none


def rows_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[ScoreRow]:
    generator, drawn = torch.Generator().manual_seed(seed), SamplingParams(max_tokens=40, seed=3)
    ids = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    return [ScoreRow(row, range(len(row) // 2, len(row)), drawn) for row in ids]


def loaded(folder: Path, dtype: str, context: ParallelContext | None, targets: tuple[str, ...]) -> Model:
    """A model, of which either all weights train or a random adapter of `targets`."""
    model = load_model(folder, dtype=dtype, context=context)
    if not targets:
        return model
    adapter = Adapter(random_adapter(model.requires_grad_(False), 11, targets=targets), model.adapter_targets())
    return model.with_adapter(adapter)


def trained_weights(model: Model) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters() if model.adapter is None else model.adapter.named_parameters())


def compared(
    folders: list[Path], degree: int, dtype: str = "float32", targets: tuple[str, ...] = (), tolerance: float = 1e-4
) -> list[str]:
    """Differences between one rank and as many context-parallel ranks: of bits, or of gradients above the tolerance."""
    different, context, count = [], join(CPU, Layout(cp=degree)), sum(LENGTHS)
    for folder in folders:
        whole, model = (loaded(folder, dtype, each, targets) for each in (None, context))
        begin, end = share(count, degree, context.rank)
        tokens, place = torch.arange(count) % 90 + 3, AttentionLayout.of_sequences(list(LENGTHS))
        with torch.no_grad():
            made = model.hidden(tokens, place.positions, place)
            if not made.equal(whole.hidden(tokens, place.positions, place)[begin:end]):
                different.append(f"{folder.name} hidden")
        for rows in (rows_of(0), rows_of(2, FEW)):
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
                    different.append(f"{folder.name}, {len(rows)} rows: result {at}")
            parts = trained_weights(model)
            for name, weight in trained_weights(whole).items():
                if (one := weight.grad) is None:
                    continue
                own = torch.zeros_like(one) if (grad := parts[name].grad) is None else grad
                total = context.ranks("cp").gather(own.float()[None]).sum(0)
                if (total - one.float()).norm() > tolerance * one.float().norm() + 1e-7:
                    different.append(f"{folder.name}, {len(rows)} rows: gradient of {name}")
    return different
