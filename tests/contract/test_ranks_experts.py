"""Experts over ranks: bits of forwards and of each micro-batch's gradients are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rlloop.models import Model, load_model
from rlloop.models.experts import Experts
from rlloop.models.parameters import ParameterStore
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.scoring import ScoreRow, score
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from tests.support.checkpoints import make_checkpoint
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "nemotron_h", "gpt_oss")  # plain; in latents, with a shared expert; clamped, with biases
LEAVES = ([5, 17, 9], [31], [])  # lengths of the sequences of each rank's micro-batch: full, ragged, idle


def rows_of(lengths: list[int], seed: int) -> list[ScoreRow]:
    generator = torch.Generator().manual_seed(seed)
    return [ScoreRow(torch.randint(3, 97, (n,), generator=generator).tolist(), range(n // 2, n)) for n in lengths]


def gradients(model: Model) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def trained(folder: Path, every: int, dtype: str) -> list[str]:
    """Names of what differs from one rank in a round of leaves."""
    context = join(CPU, Layout(dp_shard=3, ep=3))
    whole = load_model(folder, dtype=dtype)
    whole.checkpoint_layers = every
    leaves, wanted = [rows_of(lengths, seed) for seed, lengths in enumerate(LEAVES)], []
    for rows in leaves:
        whole.zero_grad()
        if rows:
            logprobs, entropy = score(whole, rows)
            (logprobs.square().sum() + entropy.sum()).backward()
            wanted.append((logprobs.detach(), gradients(whole)))
    model, here, different = load_model(folder, dtype=dtype, context=context), context.rank, []
    model.checkpoint_layers = every
    by_leaf = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            module.taker = lambda own, found, name=name: by_leaf.update({f"{name}.{own}": found})
    if leaves[here]:
        routes = []
        logprobs, entropy = score(model, leaves[here], watch=lambda record, _: routes.append(record.chosen()))
        (logprobs.square().sum() + entropy.sum()).backward()
        if not logprobs.equal(wanted[here][0]):
            different.append("logprobs")
        parts = torch.as_tensor(routes[0]).split([int(row.predict[-1]) for row in leaves[here]])
        again = [replace(row, routed_experts=part.numpy()) for row, part in zip(leaves[here], parts, strict=True)]
        with torch.no_grad():
            replayed, _ = score(model, again, replay=True)
        if not replayed.equal(logprobs):
            different.append("replay")
        own = gradients(model)
        different += [name for name in own if not own[name].equal(wanted[here][1][name])]
        assert own
    else:
        model.without_tokens().backward()
        with torch.no_grad():
            model.without_tokens()
    for name, entry in ParameterStore(model).entries.items():
        if ".experts." in name:
            found = by_leaf.pop(name)
            different += [
                f"{name} of leaf {leaf}"
                for leaf, (_, one) in enumerate(wanted)
                if not found[leaf].equal(entry.part(one[name]))
            ]
    assert not by_leaf
    return different


def read(folder: Path, layout: Layout, dtype: str) -> list[str]:
    """Names of what differs from one rank in forwards whose sizes no host knows, and in ordinary ones."""
    context, different = join(CPU, layout), []
    whole = load_model(folder, dtype=dtype)
    model, apart = load_model(folder, dtype=dtype, context=context), layout.tp == 1
    for count in (1, 7):
        generator = torch.Generator().manual_seed(context.rank if apart else 0)
        tokens = torch.randint(3, 97, (count,), generator=generator)
        place = AttentionLayout.of_sequences([count])
        for even in (True, False):
            with torch.no_grad():
                routes = [RoutingRecord(), RoutingRecord()]
                wanted = whole.hidden(tokens, torch.arange(count), place, routes=routes[0])
                made = model.hidden(tokens, torch.arange(count), place, routes=routes[1], even=even)
            chosen = [torch.as_tensor(each.chosen()) for each in routes]
            if not made.equal(wanted) or not chosen[0].equal(chosen[1]):
                different.append(f"{count} tokens, even={even}")
    return different


def cases(folders: list[Path]) -> dict[str, list[str]]:
    found = {}
    for folder in folders:
        for every, dtype in ((0, "float32"), (1, "bfloat16")):
            found[f"{folder.name} trained {every} {dtype}"] = trained(folder, every, dtype)
        for layout in (Layout(dp_shard=3, ep=3), Layout(tp=3, ep=3)):
            found[f"{folder.name} read {layout}"] = read(folder, layout, "float32")
    return found


def test_experts_over_three_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    for family in FAMILIES:
        make_checkpoint(tmp_path / family, family)
    for found in run_ranks(3, cases, [tmp_path / family for family in FAMILIES]):
        assert not {case: different for case, different in found.items() if different}
