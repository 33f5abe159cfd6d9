"""Context parallelism: forwards have one rank's bits; updates repeat their bits, and are close to one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlloop import load_model
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.scoring import RedrawRecord, ScoreRow, score
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.context import join
from rlloop.parallel.cut import share
from rlloop.parallel.layout import Layout
from rlloop.types import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_updates import CASES, go, ranked, save
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
FAMILIES = ("qwen3", "deepseek_v3", "gpt_oss")  # shared key-value heads; latents; sinks, windows
LENGTHS = (17, 5, 30)
UPDATES = (("dense bfloat16", {"cp": 2, "dp_shard": 2}), ("experts bfloat16", {"cp": 2, "dp_shard": 2, "ep": 4}))


def rows_of(seed: int) -> list[ScoreRow]:
    generator, drawn = torch.Generator().manual_seed(seed), SamplingParams(max_tokens=40, seed=3)
    ids = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    return [ScoreRow(row, range(len(row) // 2, len(row)), drawn) for row in ids]


def compared(folders: list[Path]) -> list[str]:
    """Differences between one rank and four context-parallel ranks, which are more than the key-value heads."""
    different, context, rows = [], join(CPU, Layout(cp=4)), rows_of(0)
    count = sum(LENGTHS)
    for folder in folders:
        whole, model = load_model(folder), load_model(folder, context=context)
        begin, end = share(count, 4, context.rank)
        tokens, place = torch.arange(count) % 90 + 3, AttentionLayout.of_sequences(list(LENGTHS))
        with torch.no_grad():
            made = model.hidden(tokens, place.positions, place)
            if not made.equal(whole.hidden(tokens, place.positions, place)[begin:end]):
                different.append(f"{folder.name} hidden")
        results: list[Any] = []
        for each in (whole, model):
            each.zero_grad()
            record, choices = RedrawRecord(), []

            def watch(routes: RoutingRecord, _: list[ScoreRow], choices: list[Any] = choices) -> None:
                choices.append(routes.chosen())

            logprobs, entropy = score(each, rows, record=record, watch=watch)
            (logprobs.square().sum() + entropy.sum()).backward()
            results.append([logprobs.detach(), entropy.detach(), record.raw_logprobs, record.token_ids, *choices])
        for at, (one, other) in enumerate(zip(*results, strict=True)):
            if one is not None and not one.equal(other):
                different.append(f"{folder.name} result {at}")
        for (name, one), part in zip(whole.named_parameters(), model.parameters(), strict=True):
            if one.grad is None:
                continue
            parts = context.ranks("cp").gather(torch.zeros_like(one)[None] if part.grad is None else part.grad[None])
            if (parts.sum(0) - one.grad).norm() > 1e-4 * one.grad.norm() + 1e-7:
                different.append(f"{folder.name} gradient of {name}")
    return different


def test_forwards_over_ranks_have_one_ranks_bits(tmp_path: Path) -> None:
    folders = [tmp_path / family for family in FAMILIES]
    for folder in folders:
        make_checkpoint(folder, folder.name)
    for different in run_ranks(4, compared, folders):
        assert not different


def reported_by(folder: Path, case: str, layout: dict[str, int]) -> list[Any]:
    trainer = ranked(CASES[case], layout)
    return [*go(trainer, CASES[case], range(2)), save(trainer, folder / f"{case} {layout}")]


def updated(folder: Path) -> list[Any]:
    found = []
    for case, layout in UPDATES:
        runs = [reported_by(folder, case, layout) for _ in range(2)]
        assert list(map(repr, runs[0])) == list(map(repr, runs[1])), f"{case}: two runs of one layout differ"
        found.append((repr(runs[0][0][0]), runs[0][2]["loss/grad_norm"]))
    return found


def test_updates_repeat_and_are_close_to_one_ranks(tmp_path: Path) -> None:
    wanted = []
    for case, _ in UPDATES:
        reported = list(go(ranked(CASES[case], {}), CASES[case], range(2)))
        wanted.append((repr(reported[0][0]), reported[2]["loss/grad_norm"]))
    for found in run_ranks(4, updated, tmp_path):
        for (logprobs, norm), (one, its_norm) in zip(found, wanted, strict=True):
            assert logprobs == one
            assert abs(norm - its_norm) < 1e-2 * its_norm
