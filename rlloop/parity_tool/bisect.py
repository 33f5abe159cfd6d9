"""The first operation in which two definitions of a model differ, and the effect of each knob between them.

A *knob* is a field of the numerics profile. `knobs` swaps one at a time, and measures the divergence that it causes
alone and the divergence that is left without it. k3 is the estimate of the KL in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.profile import SETTINGS, NumericsProfile
from rlloop.parity.first_difference import Call, first_row, knob_of, pairs, tower_unit, trace_whole
from rlloop.parity_tool.measure import measure
from rlloop.parity_tool.sequences import Scored, Tokens
from rlloop.parity_tool.sides import Definition, Transformers


@dataclass(frozen=True)
class FirstDifference:
    """The first operation, in the order of computation, whose result has other bits."""

    op: str
    where: str  # the module's name in the checkpoint
    knob: str
    position: int  # of the first token that differs; in a vision tower of the first patch, or feature
    unit: str  # "token", "patch" or "feature"
    largest: float  # difference over the sequence


@dataclass(frozen=True)
class Knob:
    """A knob in which two profiles differ, with its value in each."""

    name: str
    a: str
    b: str
    alone: float  # k3 of A against A with this knob as B has it
    left: float  # k3 of A against B with this knob as A has it
    matters: bool  # False if it changes neither, such as a knob of an operation that the model does not use


Model = Definition | Transformers
TOWER = "visual."
TOWER_OPS = {torch.nn.Linear: "linear", torch.nn.Conv3d: "linear", torch.nn.LayerNorm: "layer_norm"}


@torch.no_grad()
def first_difference(a: Model, b: Model, sequence: Tokens) -> FirstDifference | None:
    """Run both sides over the sequence. None if every result that both show is equal."""
    for call, other in pairs(_calls(a, sequence), _calls(b, sequence)):
        where, op = call.where, call.op
        rows, other = call.rows.flatten(1), other.rows.flatten(1)
        if rows.dtype != other.dtype:
            rows, other = rows.double(), other.double()
        if (row := first_row(rows, other)) is not None:
            gap = float((rows.double() - other.double()).abs().max())
            return FirstDifference(op, where, knob_of(op, *map(_profile, (a, b))), row, call.unit, gap)
    return None


def _profile(side: Model) -> NumericsProfile:
    return side.model.profile if isinstance(side, Definition) else NumericsProfile.preset("huggingface")


def _calls(side: Model, sequence: Tokens) -> list[Call]:
    if isinstance(side, Definition):
        read = sequence.read
        calls, hidden = trace_whole(side.model, torch.tensor(read.token_ids), read)
        return [*calls, Call("lm_head", "logits", side.model.ops.logits(hidden, side.model.head))]
    return list(_hooked(side, sequence))


@torch.no_grad()
def _hooked(side: Transformers, sequence: Tokens) -> Iterator[Call]:
    """Results of transformers' modules, under the names that rlloop's trace gives to the same results."""
    results: dict[tuple[str, str], Tensor] = {}

    def keep(where: str, op: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:  # must return None, or its value would replace the result
            results.setdefault((where, op), (out[0] if isinstance(out, tuple) else out).detach())

        return hook

    def entering(where: str, op: str) -> Any:
        def hook(_: Any, args: Any) -> None:
            results.setdefault((where, op), args[0].detach())

        return hook

    hooks = []
    for name, module in side.model.named_modules():
        name = _ours(name)
        layer, _, leaf = name.rpartition(".")
        if name.startswith(TOWER):
            if op := TOWER_OPS.get(type(module)):
                hooks.append(module.register_forward_hook(keep(name, op)))
        elif name.endswith(".gate"):
            hooks.append(module.register_forward_hook(keep(name, "router_logits")))
        elif isinstance(module, torch.nn.Linear) and name != "lm_head":
            hooks.append(module.register_forward_hook(keep(name, "linear")))
            if leaf == "o_proj":
                hooks.append(module.register_forward_pre_hook(entering(layer.removesuffix(".self_attn"), "attention")))
            if leaf == "down_proj":
                hooks.append(module.register_forward_pre_hook(entering(layer.rpartition(".")[0], "silu_mul")))
        elif "norm" in leaf:
            hooks.append(module.register_forward_hook(keep(name, "rms_norm")))
        elif leaf == "mlp" and hasattr(module, "experts"):
            hooks.append(module.register_forward_hook(keep(layer, "combine")))
    logits = side.logits(sequence)
    for hook in hooks:
        hook.remove()
    count, patches = len(logits), sum(image.shape[0] for image in sequence.read.images)
    for (where, op), rows in results.items():
        if where.startswith(TOWER):  # a convolution's is [P, D, 1, 1, 1]
            rows = rows.flatten(1)
            yield Call(where, op, rows, tower_unit(len(rows), patches))
            continue
        rows = rows.float() if op == "router_logits" else rows
        if rows.ndim == 4 and rows.shape[1] != count:  # [1, H, T, D]
            rows = rows.transpose(1, 2)
        yield Call(where, op, rows.reshape(count, -1))
    yield Call("lm_head", "logits", logits)


def _ours(name: str) -> str:
    """transformers' name of a module of a model that reads images -> rlloop's."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", TOWER)


def knobs(a: Definition, b: NumericsProfile, sequences: Sequence[Tokens], reference: Sequence[Scored]) -> list[Knob]:
    """Every knob in which `a`'s profile and `b` differ, by its effect alone, largest first.

    `reference`: A's scores of the sequences.
    """
    mine = a.model.profile

    def k3(profile: NumericsProfile) -> float:
        return measure(sequences, reference, a.with_profile(profile).score(sequences)).all.k3

    whole = k3(b)
    differ = [name for name in (*NumericsProfile.operations(), *SETTINGS) if getattr(mine, name) != getattr(b, name)]
    effects = []
    for name in differ:
        alone = replace(mine, **{name: getattr(b, name)})
        matched = replace(b, **{name: getattr(mine, name)})
        alone_k3, left_k3 = k3(alone), k3(matched)
        effects.append(
            Knob(name, getattr(mine, name), getattr(b, name), alone_k3, left_k3, alone_k3 > 0 or left_k3 != whole)
        )
    return sorted(effects, key=lambda knob: -knob.alone)
