"""Finds the first operation in which engine and trainer differ, by running the offending sequence again both ways.

The trainer runs one forward over the whole sequence; the engine prefills the prompt and then decodes token by token
against a cache. Both are traced, and results are compared in the order of computation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from rlloop.models import Model
from rlloop.models.logits_processing import warp_for
from rlloop.models.parameters import ParameterStore
from rlloop.models.vision import PlacedFeatures, place_features
from rlloop.numerics.layout import AdapterSlots, AttentionLayout, RecurrentState
from rlloop.numerics.ops import Ops
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.cut import shares
from rlloop.parity.monitor import Finding, TokenDifference
from rlloop.parity.own_rows import own_rows
from rlloop.types import ModelInput, Sample, SamplingParams

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # views that compare bits, by item size
KNOBS = {  # operation -> field of `NumericsProfile` that chooses its implementation, if that has another name
    "silu_mul": "activation",
    "logits": "token_logprob",
    "residual sum": "rms_norm",
    "head_linear": "linear",
    "router_logits": "router",
    "route": "router",
    "expert choice": "router",
    "sparse_attention": "attention",
    "select": "indexer",
    "layer_norm": "indexer",
    "add_layer_norm": "indexer",
    "index_weights": "indexer",
    "sigmoid_mul": "activation",
    "gelu": "activation",
    "full_attention": "attention",
    "relu_squared": "activation",
    "causal_conv": "recurrent",
    "recurrent_gates": "recurrent",
    "scan": "recurrent",
}
FOLLOWED = {  # field -> further settings that its operations depend on
    "linear": ("tp_segments", "all_reduce", "latent"),  # `latent` changes the input of o_proj
    "rms_norm": ("residual_norm",),
    "attention": ("attention_splits",),
    "router": ("router_logits",),
    "combine": ("expert_combine",),
}


def knob_of(op: str, mine: NumericsProfile, other: NumericsProfile) -> str:
    """The profile's field to look at when `op` differs: a setting that the two profiles do not share, if there is one,
    else the operation's implementation."""
    knob = KNOBS.get(op, op)
    return next((name for name in (knob, *FOLLOWED.get(knob, ())) if getattr(mine, name) != getattr(other, name)), knob)


@dataclass
class Call:
    """One operation's result over the whole sequence so far."""

    where: str  # the module whose weight it used, else the layer
    op: str
    rows: Tensor  # [T, ...]
    unit: str = "token"  # a row's; in a vision tower a patch, or a feature of merged ones


class Trace:
    """Stands in for a model's `Ops` and records the result of each call of one forward."""

    fuses = False  # a fused kernel would hide the operations in it

    def __init__(self, model: Model) -> None:
        self._ops, self.profile = model.ops, model.profile
        entries = ParameterStore(model.with_adapter(None)).entries.items()
        self._names = {id(entry.live): name.removesuffix(".weight") for name, entry in entries}
        self._layer = ""
        self.calls: list[Call] = []

    def with_adapters(self, adapters: AdapterSlots | None) -> Trace:
        self._ops = self._ops.with_adapters(adapters)
        return self

    def __getattr__(self, op: str) -> Any:
        function = getattr(self._ops, op)
        if not callable(function):  # such as `adapters`
            return function

        def call(*args: Any, **options: Any) -> Any:
            result: Any = function(*args, **options)
            where = next((name for arg in args if (name := self._name_of(arg)) is not None), self._layer)
            self._layer = _layer_of(where)
            if op == "rms_norm":
                self.calls += [Call(where, "residual sum", result[1]), Call(where, op, result[0])]
            elif op == "route":
                self.calls += [Call(where, "expert choice", result[1]), Call(where, op, result[0])]
            else:
                outputs = result if isinstance(result, tuple) else (result,)
                self.calls += [Call(where, op, output) for output in outputs if isinstance(output, Tensor)]
            return result

        return call

    def _name_of(self, arg: Any) -> str | None:
        """The name of a weight, or of the weight that a tensor is a view of, as that of the patches is."""
        base = arg._base if isinstance(arg, Tensor) else None
        return self._names.get(id(arg)) or self._names.get(id(base))


class FlatCache:
    """An engine's cache for one sequence: slots are positions, and recurrent layers have one row of state."""

    def __init__(self, model: Model, length: int) -> None:
        like = model.head
        self._stores = [
            {name: like.new_zeros(length, *shape) for name, shape in layer.items()} for layer in model.cache_spec()
        ]
        self._states = [
            {name: torch.zeros(1, *shape, device=like.device) for name, shape in layer.items()}
            for layer in model.state_spec()
        ]
        self._row = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.start = 0

    def places(self, layer: int, *names: str) -> tuple[Tensor, ...]:
        raise AssertionError("a trace fuses nothing")

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        for name, rows in tensors.items():
            self._stores[layer][name][self.start : self.start + len(rows)] = rows
        return tuple(self._stores[layer][name] for name in tensors)

    def carried(self, layer: int, name: str) -> RecurrentState:
        return RecurrentState(self._states[layer][name], self._row)


def pairs(mine: list[Call], theirs: list[Call]) -> Iterator[tuple[Call, Call]]:
    """Calls that both sides have, in order of computation.

    A result that one side lacks, has more often or has in another shape is left out: transformers' modules, and the
    other form of latent attention, compute some things differently.
    """
    return ((call, other) for call, other in _of_one_name(mine, theirs) if other.rows.numel() == call.rows.numel())


def _of_one_name(mine: list[Call], theirs: list[Call]) -> Iterator[tuple[Call, Call]]:
    by_name: dict[tuple[str, str], tuple[list[Call], list[Call]]] = {}
    for side, calls in enumerate((mine, theirs)):
        for call in calls:
            by_name.setdefault(_name(call), ([], []))[side].append(call)
    for call in mine:
        ours, others = by_name[_name(call)]
        if len(ours) == len(others):
            yield call, next(other for same, other in zip(ours, others, strict=True) if same is call)


def _name(call: Call) -> tuple[str, str]:
    """A layer's one convolution is named by the layer: a context-parallel rank's part of its weight has no name."""
    return _layer_of(call.where) if call.op == "causal_conv" else call.where, call.op


def _layer_of(where: str) -> str:
    """Example: model.layers.3.mlp.up_proj -> model.layers.3."""
    return re.sub(r"(\.\d+)\..*", r"\1", where)


def _aligned(trainer: Model, ours: list[Call], theirs: list[Call]) -> Iterator[tuple[Call, Tensor, int]]:
    """The engine's calls, each with the trainer's result for the same tokens and the first of these; beside a
    context-parallel rank of the trainer the engine's are cut to that rank's part."""
    if trainer.context.ranks("cp").size == 1:
        yield from ((mine, other.rows, 0) for mine, other in pairs(ours, theirs))
        return
    divided = trainer.context.ranks("ep").size > 1
    for mine, other in _of_one_name(ours, theirs):
        if mine.unit != "token":  # here the tower computes all of the pictures on every rank
            yield mine, other.rows, 0
        elif divided and mine.op == "experts":  # rows of all ranks' tokens, in another order
            continue
        elif (part := own_rows(mine.rows, other.rows, mine.where, trainer)) is not None:
            yield replace(mine, rows=part[0]), other.rows, part[1]


@torch.no_grad()
def diagnose(engine: Model, trainer: Model, sample: Sample, token: TokenDifference) -> Finding:
    """The first operation that differs in computing `token` of `sample`, whose sequence is run again alone.

    A token of the prompt is scored at temperature 1, as `Engine.prefill_logprobs` does.
    """
    completion = sample.completion
    prompt, begins = completion.model_input or ModelInput(completion.prompt_ids), len(completion.prompt_ids)
    if len(prompt.images) < len(prompt.contents):
        return Finding("the prompt has images that are not known here, so the doctor cannot run it again", {})
    ids = torch.tensor((completion.prompt_ids + completion.token_ids)[: token.position], device=trainer.context.device)
    theirs, their_hidden = trace_whole(trainer, ids, prompt)
    ours, our_hidden = _trace_decode(engine, ids, prompt, begins)

    if (cp := trainer.context.ranks("cp")).size > 1:  # the last token's state is that of the last rank
        their_hidden = cp.gather(their_hidden, 0, shares(len(ids), cp.size))
    # All copies between ranks come before any return: a rank that returned sooner would leave others waiting.
    our_logits, their_logits = (
        model.output.whole(model.logits(hidden[-1:]))
        for model, hidden in ((engine, our_hidden), (trainer, their_hidden))
    )
    offset = token.position - begins
    turn = max((start for start, _ in completion.turns or ((0, 0),) if start <= offset), default=offset)
    sampling = completion.sampling if offset >= 0 else SamplingParams(max_tokens=1, seed=completion.sampling.seed)
    warp = warp_for([sampling], [offset - turn], engine.eos_token_ids, device=ids.device)
    seed, position = (
        torch.tensor([number], device=ids.device) for number in (completion.sampling.seed, token.position)
    )
    target = torch.tensor([token.token_id], device=ids.device)
    _, sampled, _ = engine.ops.sample(our_logits, warp, seed, position)
    scored, _ = trainer.output.token_logprob(their_hidden[-1:], target, warp)
    compared = chain(
        _aligned(trainer, ours, theirs),
        [(Call("lm_head", "logits", our_logits), their_logits, token.position)],
        # Of stages the last alone scores.
        [(Call("lm_head", "token_logprob", sampled), scored, token.position)] if trainer.stage.last else [],
    )
    stage = sum(model.context.coordinates["pp"] for model in (engine, trainer))  # above those of earlier layers
    for order, (mine, other, first) in enumerate(compared):
        if (row := first_row(mine.rows, other)) is not None:
            knob = knob_of(mine.op, engine.profile, trainer.profile)
            found = _finding(mine, knob, first + row, other, begins)
            if mine.where == "lm_head":  # logits are whole on every rank, however many operations it compared before
                return replace(found, order=(math.inf, 0 if mine.op == "logits" else 1))
            return replace(found, order=(stage, order))
    return Finding(
        "Run again alone, the engine's way and the trainer's, this sequence shows no operation that differs: the "
        "difference depends on what it was batched with, or on state (a stale cache, weights that changed in between)",
        {"op": None, "where": None, "knob": None},
    )


def trace_whole(model: Model, ids: Tensor, prompt: ModelInput) -> tuple[list[Call], Tensor]:
    """The calls of one forward over `ids` [T], which begin with the prompt's, and its hidden states [T, width]."""
    tower, images = _trace_tower(model, ids, prompt)
    trace = Trace(model)
    positions = torch.from_numpy(prompt.positions_at(0, len(ids))).to(ids.device)
    layout = AttentionLayout.of_sequences([len(ids)], ids.device)
    hidden = _under(model, trace).hidden(ids, positions, layout, images=images)
    return tower + trace.calls, hidden


def _trace_tower(model: Model, ids: Tensor, prompt: ModelInput) -> tuple[list[Call], PlacedFeatures | None]:
    """The vision tower's calls, and the features of the prompt's images; none for a text."""
    trace = Trace(model)
    images = place_features([(prompt, 0, len(ids), 0)], _under(model, trace).see)
    read = {image.digest: image.shape[0] for span in prompt.contents if (image := span.image) and span.start < len(ids)}
    patches = sum(read.values())
    return [replace(call, unit=tower_unit(len(call.rows), patches)) for call in trace.calls], images


def tower_unit(rows: int, patches: int) -> str:
    """ "patch" or "feature": which of them has a row each in a tower's result, for images of `patches` patches."""
    return "patch" if rows == patches else "feature"


def _trace_decode(model: Model, ids: Tensor, prompt: ModelInput, begins: int) -> tuple[list[Call], Tensor]:
    """The same by a prefill of `begins` tokens and then token by token, with each operation's results of all forwards
    joined."""
    tower, images = _trace_tower(model, ids, prompt)
    cache = FlatCache(model, len(ids))
    cuts = [0, *range(min(begins, len(ids)), len(ids) + 1)]
    traces, hidden = [], []
    for start, end in pairwise(cuts):
        trace, cache.start = Trace(model), start
        layout = AttentionLayout(
            query_start=torch.tensor([0, end - start], device=ids.device),
            context=torch.tensor([start], device=ids.device),
            block_start=torch.zeros(1, 1, dtype=torch.int64, device=ids.device),
            block_size=len(ids),
            contiguous=False,
        )
        positions = torch.from_numpy(prompt.positions_at(start, end)).to(ids.device)
        seen = None if images is None else images.part(start, end)
        hidden.append(_under(model, trace).hidden(ids[start:end], positions, layout, cache, images=seen))
        traces.append(trace.calls)
    calls = zip(*traces, strict=True)
    joined = [Call(same[0].where, same[0].op, torch.cat([call.rows for call in same])) for same in calls]
    return tower + joined, torch.cat(hidden)


def _under(model: Model, trace: Trace) -> Model:
    view = model.with_profile(model.profile)
    view.ops = cast(Ops, trace)
    return view


def first_row(mine: Tensor, other: Tensor) -> int | None:
    """Index of the first row whose bits differ, if any."""
    integers = INTEGERS[mine.element_size()]
    different = mine.contiguous().view(integers) != other.contiguous().view(integers)
    rows = different.flatten(1).any(1) if different.ndim > 1 else different
    return int(rows.nonzero()[0]) if rows.any() else None


def _finding(call: Call, knob: str, position: int, other: Tensor, prompt: int) -> Finding:
    gap = float((call.rows.double() - other.double()).abs().max())
    if call.unit != "token":
        place = f"{call.unit} {position} of the prompt's images"
    elif position < prompt:
        place = f"token {position} of the prompt"
    else:
        place = f"token {position - prompt} of the completion"
    return Finding(
        f"The first operation that differs: {call.op} at {call.where} (profile knob {knob}), at {place}; at most "
        f"{gap:.2g} apart over the sequence",
        {
            "op": call.op, "where": call.where, "knob": knob, "position": position, "unit": call.unit,
            "largest_difference": gap,
        },
    )  # fmt: skip
