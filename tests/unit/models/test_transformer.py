"""The definition itself: its gradient, its cache, recomputation, and views of one set of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlloop.models import Model, load_model, score, token_logprobs
from rlloop.models.adapter_weights import Adapter
from rlloop.models.scoring import ScoreRow
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout
from rlloop.types import SamplingParams
from tests.support.adapters import random_adapter
from tests.support.checkpoints import FAMILIES, make_checkpoint

REFERENCE = NumericsProfile.preset("reference")
PAIRS = [([5, 6, 7], [8, 9, 10, 11]), ([12], [13, 14])]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, request.param, attention_bias=True) if request.param != "qwen2" else make_checkpoint(
        tmp_path, request.param
    )
    return tmp_path


class ContiguousCache:
    """The simplest that can be: one row of slots a sequence, `room` slots each."""

    def __init__(self, model: Model, sequences: int, room: int) -> None:
        self.stores = [
            {name: torch.zeros(sequences * room, *shape, dtype=model.dtype) for name, shape in layer.items()}
            for layer in model.cache_spec()
        ]
        self.slots = torch.empty(0, dtype=torch.int64)

    def places(self, layer: int, *names: str) -> tuple[Tensor, ...]:
        return self.slots, *(self.stores[layer][name] for name in names)

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        for name, tensor in tensors.items():
            self.stores[layer][name][self.slots] = tensor
        return tuple(self.stores[layer][name] for name in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_in_chunks_over_a_cache_have_the_bits_of_one_pass(folder: Path, dtype: str) -> None:
    model, room = load_model(folder, dtype=dtype), 96
    generator = torch.Generator().manual_seed(0)
    lengths = [81, 70]
    tokens = [torch.randint(0, 97, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        positions = torch.cat([torch.arange(length) for length in lengths])
        whole = model.hidden(torch.cat(tokens), positions, AttentionLayout.of_sequences(lengths)).split(lengths)
        cache, done, parts = ContiguousCache(model, 2, room), [0, 0], ([], [])
        for counts in [(1, 5), (15, 1), (1, 1), (47, 60), (16, 1), (1, 1), (0, 1)]:
            at = [torch.arange(begin, begin + count) for begin, count in zip(done, counts, strict=True)]
            cache.slots = torch.cat([positions + s * room for s, positions in enumerate(at)])
            layout = AttentionLayout(
                query_start=torch.tensor([0, counts[0], sum(counts)]),
                context=torch.tensor(done),
                block_start=torch.tensor([[0], [room]]),
                block_size=room,
                contiguous=False,
            )
            hidden = model.hidden(torch.cat([tokens[s][at[s]] for s in (0, 1)]), torch.cat(at), layout, cache)
            for s, part in enumerate(hidden.split(counts)):
                parts[s].append(part)
            done = [begin + count for begin, count in zip(done, counts, strict=True)]
    assert done == lengths
    for one, many in zip(whole, parts, strict=True):
        assert torch.equal(one.view(torch.uint8), torch.cat(many).view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "dense"), [("qwen3", True), ("qwen3_moe", False), ("deepseek_v3", False), ("nemotron_h", False)]
)
def test_hidden_states_of_the_tokens_that_are_read(tmp_path: Path, family: str, dense: bool, dtype: str) -> None:
    make_checkpoint(tmp_path, family)
    base = load_model(tmp_path, dtype=dtype)
    adapted = base.with_adapter(Adapter(random_adapter(base, 3), base.adapter_targets()))
    tokens, layout = torch.arange(70) % 50 + 3, AttentionLayout.of_sequences([41, 29])
    positions = torch.cat((torch.arange(41), torch.arange(29)))
    for model in (base, adapted) if dense else (base,):
        rows: list[int] = []
        last = list(model.model.layers.values())[-1]
        hook = getattr(last, "mlp", last).register_forward_hook(
            lambda _, given, __, rows=rows: rows.append(len(given[0]))
        )
        with torch.no_grad():
            whole = model.hidden(tokens, positions, layout)
            for read in ([69], [40, 69], [0, 3, 40, 41], list(range(69))):
                some = model.hidden(tokens, positions, layout, read=torch.tensor(read))
                assert torch.equal(some, whole[read])
                assert rows[-1] == (len(read) if dense else 70)
        hook.remove()


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences(folder: Path) -> None:
    """In float64, by the reference operations: every parameter, along a random direction of its own."""
    model = load_model(folder, dtype="float64", profile=REFERENCE)
    rows = [
        ScoreRow(p + c, range(len(p), len(p) + len(c)), SamplingParams(max_tokens=4, temperature=0.9)) for p, c in PAIRS
    ]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def value() -> Tensor:
        logprobs, entropy = score(model, rows)
        assert logprobs.dtype == torch.float64
        return weight[0] @ logprobs + weight[1] @ entropy

    value().backward()
    step = 1e-5
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        along = (parameter.grad * direction).sum().item()
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = value()
            parameter.sub_(direction, alpha=2 * step)
            slope = (above - value()).item() / (2 * step)
            parameter.add_(direction, alpha=step)
        assert along == pytest.approx(slope, rel=1e-5, abs=1e-7), name
        assert abs(along) > 1e-4, f"{name} is not tested: it does not matter along that direction"


def test_recomputed_layers_give_the_same_bits(folder: Path) -> None:
    model = load_model(folder)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.cat(token_logprobs(model, PAIRS)).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    kept = gradients()
    assert len(kept) == len(list(model.parameters()))
    calls = []
    for index, layer in enumerate(model.model.layers.values()):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    for every, forwards in ((1, [0, 0, 1, 1]), (2, [0, 0, 1]), (0, [0, 1])):
        calls.clear()
        model.checkpoint_layers = every
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients(), strict=True))
        assert sorted(calls) == forwards


def test_another_profile_is_a_view_of_the_same_parameters(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path)
    other = model.with_profile(REFERENCE)
    assert other.profile == REFERENCE
    assert model.profile == NumericsProfile()
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert (other.source_path, other.context, other.rope) == (model.source_path, model.context, model.rope)
    with torch.no_grad():
        model.head.mul_(1.5)
    (mine,), (theirs,) = (token_logprobs(each, PAIRS[:1]) for each in (model, other))
    assert (mine - theirs).abs().max() < 1e-5
    assert model.fingerprint() != other.fingerprint()
    assert model.fingerprint() == load_model(tmp_path).fingerprint()
    assert model.fingerprint() != load_model(tmp_path, dtype="bfloat16").fingerprint()


def test_the_rope_table_stays_float32_and_out_of_checkpoints(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path)
    exact = model.rope.table.clone()
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.rope.table, exact)
    assert not any("rope" in name for name in model.state_dict())


def test_what_a_cache_has_to_hold(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert load_model(tmp_path).cache_spec() == [{"k": (2, 16), "v": (2, 16)}] * 2


def test_the_context_goes_where_the_parameters_go(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path)
    assert (model.context.device.type, model.context.layout.world_size, model.context.rank) == ("cpu", 1, 0)
    assert model.to("meta").context.device.type == "meta"
    assert model.device.type == model.head.device.type == "meta"


def test_parts_of_frozen_weights_leave_them_frozen(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path).requires_grad_(False)
    model.model.layers["0"].mlp.requires_grad_(True)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    ranks = Ranks(2, 0)
    context = ParallelContext(torch.device("cpu"), Layout(tp=2), groups={"tp": ranks, "ep": ranks})
    Model(model.config, None, context, weights_of=model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert 0 < sum(before.values()) < len(before)
