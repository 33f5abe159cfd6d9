"""Recurrent layers, attention sinks and windows on CUDA: a token has the same bits decoded, prefilled and trained."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import token_logprobs
from rlloop.numerics import reference
from rlloop.numerics.layout import AttentionLayout, AttentionMask, RecurrentState
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout.engine.engine import Engine
from rlloop.trainer import Trainer
from rlloop.types import SamplingParams
from tests.support.gpu_mixtures import RECURRENT, model_of, traffic
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

OURS = ops_for(NumericsProfile())
CUDA = torch.device("cuda")
LENGTHS = [1, 40, 2, 100, 16, 3]
SIZES = ([1], [3, 1, 1, 30], [16, 48])
SHAPES = {  # G, H, K, V; of "many", a batch has more programs than multiprocessors, and a sequence fewer
    "35B-A3B": (2, 4, 128, 128), "Nano": (1, 8, 128, 64), "odd": (2, 4, 12, 20), "many": (2, 12, 128, 128)
}  # fmt: skip
ATTENTION = {  # H, G, D
    "gpt-oss": (16, 2, 64, torch.bfloat16), "wide": (8, 4, 128, torch.bfloat16), "odd": (6, 2, 40, torch.float32)
}  # fmt: skip
MASKS = [(0, True), (128, True), (70, False)]  # (window, sinks)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scan_inputs(shape: str) -> tuple[torch.Tensor, ...]:
    (groups, heads, key, width), tokens = SHAPES[shape], sum(LENGTHS)
    q, k = (drawn(tokens, groups, key, seed=seed) for seed in (1, 2))
    k = k / k.norm(dim=-1, keepdim=True)
    gates = (torch.sigmoid(drawn(tokens, heads, seed=4) + 2), torch.sigmoid(drawn(tokens, heads, seed=5)))
    return q, k, drawn(tokens, heads, width, seed=3), *gates


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def cut_up(work, inputs, shape, whole, sizes) -> int:
    """Numbers of `whole` that differ where sequences come in parts of these sizes, as an engine's steps do."""
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    store, done, step, wrong = drawn(9, *shape).to(CUDA), [0] * len(LENGTHS), 0, 0
    while any(count < length for count, length in zip(done, LENGTHS, strict=True)):
        running = [s for s, length in enumerate(LENGTHS) if done[s] < length]
        counts = [min(sizes[(step + s) % len(sizes)], LENGTHS[s] - done[s]) for s in running]
        layout = dataclasses.replace(
            AttentionLayout.of_sequences(counts, CUDA), context=torch.tensor([done[s] for s in running], device=CUDA)
        )
        at = torch.cat([torch.arange(n) + starts[s] + done[s] for s, n in zip(running, counts, strict=True)]).to(CUDA)
        # Whatever wrote to these is not the last launch before `work`, which takes what is of this step out of inputs.
        state = RecurrentState(store, torch.tensor(running, device=CUDA) + 2, settled=step % 2 == 1)
        wrong += differing(work(*(x[at] for x in inputs), layout, state), whole[at])
        for s, n in zip(running, counts, strict=True):
            done[s] += n
        step += 1
    return wrong


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scan_has_the_bits_of_its_cuts_and_the_values_of_the_reference(shape, corrects):
    inputs = scan_inputs(shape)
    layout, on_gpu = AttentionLayout.of_sequences(LENGTHS, CUDA), [x.to(CUDA) for x in inputs]
    whole = OURS.scan(*on_gpu, corrects, layout, None)
    cpu = AttentionLayout.of_sequences(LENGTHS)
    exact = reference.scan(*(x.double() for x in inputs), corrects, cpu, None)
    error = float((whole.cpu() - exact).norm() / exact.norm())
    (groups, heads, key, width) = SHAPES[shape]
    state = OURS.scan_state(groups, heads, key, width, CUDA)
    wrong = {
        str(sizes): cut_up(lambda *a: OURS.scan(*a[:5], corrects, *a[5:]), on_gpu, state, whole, sizes)
        for sizes in SIZES
    }
    alone = [x[1:41].contiguous() for x in on_gpu]
    wrong["alone"] = differing(OURS.scan(*alone, corrects, AttentionLayout.of_sequences([40], CUDA), None), whole[1:41])
    print(f"scan {shape} {corrects}: error {error:.1e}, numbers that differ {wrong}")
    assert not any(wrong.values()), wrong
    assert error < 5e-6


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_a_scan_are_the_references_and_repeat_themselves(shape, corrects):
    inputs, layout = scan_inputs(shape), AttentionLayout.of_sequences(LENGTHS)
    exact = [x.double().requires_grad_() for x in inputs]
    out = reference.scan(*exact, corrects, layout, None)
    grad = drawn(*out.shape, seed=9)
    wanted = torch.autograd.grad(out, exact, grad.double())

    def gradients():
        leaves = [x.to(CUDA).requires_grad_() for x in inputs]
        made = OURS.scan(*leaves, corrects, AttentionLayout.of_sequences(LENGTHS, CUDA), None)
        return torch.autograd.grad(made, leaves, grad.to(CUDA))

    made, again = gradients(), gradients()
    errors = [float((a.cpu() - b).norm() / b.norm()) for a, b in zip(made, wanted, strict=True)]
    print(f"scan backward {shape} {corrects}: errors {errors}")
    assert all(same_bits(a, b) for a, b in zip(made, again, strict=True))
    assert max(errors) < 3e-5  # products of parts of 16 bits


@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_has_the_bits_of_its_cuts_and_the_references_gradients(biased):
    x, weight, bias = drawn(sum(LENGTHS), 600), drawn(600, 1, 4), drawn(600) if biased else None
    layout, on_gpu = AttentionLayout.of_sequences(LENGTHS, CUDA), [x.to(CUDA)]
    taps, offset = weight.to(CUDA), None if bias is None else bias.to(CUDA)
    whole = OURS.causal_conv(on_gpu[0], taps, offset, layout, None)
    wrong = {
        str(sizes): cut_up(lambda x, *rest: OURS.causal_conv(x, taps, offset, *rest), on_gpu, (3, 600), whole, sizes)
        for sizes in SIZES
    }
    given = [x, weight] if bias is None else [x, weight, bias]
    exact = [each.double().requires_grad_() for each in given]
    out = reference.causal_conv(*exact, *[None] * (bias is None), AttentionLayout.of_sequences(LENGTHS), None)
    grad = drawn(*out.shape, seed=9)
    leaves = [each.to(CUDA).requires_grad_() for each in given]
    made = torch.autograd.grad(OURS.causal_conv(*leaves, *[None] * (bias is None), layout, None), leaves, grad.to(CUDA))
    wanted = torch.autograd.grad(out, exact, grad.double())
    errors = [float((a.cpu() - b).norm() / b.norm()) for a, b in zip(made, wanted, strict=True)]
    print(f"convolution: numbers that differ {wrong}, errors {errors}")
    assert not any(wrong.values()), wrong
    torch.testing.assert_close(whole.cpu().double(), out.detach(), rtol=1e-5, atol=1e-5)
    assert max(errors) < 2e-6


def test_gates_and_sigmoids_have_the_references_values():
    a, rate, bias = 3 * drawn(50, 8), drawn(8), drawn(8, seed=2)
    for floor in (0.0, 0.4):
        made = OURS.recurrent_gates(*(x.to(CUDA) for x in (a, rate, bias)), floor)
        wanted = reference.recurrent_gates(a.double(), rate.double(), bias.double(), floor)
        for ours, exact in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-5, atol=1e-6)
    gate, up = drawn(30, 21).bfloat16(), drawn(30, 21, seed=3).bfloat16()
    made = OURS.sigmoid_mul(gate.to(CUDA), up.to(CUDA))
    torch.testing.assert_close(made.cpu(), reference.sigmoid_mul(gate, up), rtol=1e-2, atol=1e-3)
    assert same_bits(OURS.sigmoid_mul(gate[7:8].to(CUDA), up[7:8].to(CUDA)), made[7:8])


@pytest.mark.parametrize("shape", ATTENTION)
def test_masked_attention_is_the_same_in_every_phase(shape):
    (heads, groups, width, dtype), length, page = ATTENTION[shape], 2600, 16
    q, k, v = (drawn(length, n, width, seed=i).to(CUDA, dtype) for i, n in enumerate((heads, groups, groups)))
    every = drawn(heads, seed=5).to(CUDA, dtype)
    order = torch.randperm(-(-length // page), generator=torch.Generator().manual_seed(1)).to(CUDA) * page
    at = torch.arange(length, device=CUDA)
    slots = order[at // page] + at % page
    stores = [torch.zeros(len(order) * page, groups, width, dtype=dtype, device=CUDA) for _ in "kv"]
    for store, x in zip(stores, (k, v), strict=True):
        store[slots] = x
    last = torch.tensor([0, 15, 19, 20, 63, 64, 127, 128, 191, 192, 1023, 1024, 1499, 1500, 2047, 2599], device=CUDA)

    def paged(counts, contexts):
        return AttentionLayout(
            query_start=torch.tensor([0, *counts], device=CUDA).cumsum(0), context=torch.tensor(contexts, device=CUDA),
            block_start=order.repeat(len(counts), 1), block_size=page, contiguous=False,
        )  # fmt: skip

    found = {}
    for window, sunk in MASKS:
        sinks = every if sunk else None

        def attend(q, k, v, layout, sinks=sinks, window=window):
            return OURS.attention(q, k, v, layout, 0.1, sinks, window)

        whole = attend(q, k, v, AttentionLayout.of_sequences([length], CUDA))
        beside = attend(*(torch.cat((x[:77], x)) for x in (q, k, v)), AttentionLayout.of_sequences([77, length], CUDA))
        decoded = attend(q[last], *stores, paged([1] * len(last), last.tolist()))
        chunk = attend(q[900:1300], *stores, paged([400], [900]))
        mixed = torch.cat((at[40:90], last))
        both = attend(q[mixed], *stores, paged([50, *[1] * len(last)], [40, *last.tolist()]))
        pairs = {
            "beside": (beside[77:], whole), "decode": (decoded, whole[last]), "chunk": (chunk, whole[900:1300]),
            "mixed": (both, whole[mixed]),
        }  # fmt: skip
        found |= {(window, sunk, name): (a, b) for name, (a, b) in pairs.items() if not same_bits(a, b)}
        mask = AttentionMask(0, window, None if sinks is None else sinks.cpu().double())
        some = [3, 700, 1600]
        layout = AttentionLayout(
            torch.arange(4), torch.tensor(some), torch.zeros(3, 1, dtype=torch.int64), length, contiguous=False
        )
        exact = reference.attention(*(x.cpu().double() for x in (q[some], k, v)), layout, 0.1, mask)
        tight = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(whole[some].cpu().double(), exact, rtol=tight, atol=tight)
    print(shape, dtype, {key: float((a.float() - b.float()).abs().max()) for key, (a, b) in found.items()})
    assert not found


@pytest.mark.parametrize("window", [0, 20])
def test_gradients_of_masked_attention_are_the_references(window):
    lengths = [3, 190]
    q, k, v = (drawn(193, n, 16, seed=i) for i, n in enumerate((4, 2, 2)))
    given = [q, k, v, drawn(4, seed=5)]
    exact = [x.double().requires_grad_() for x in given]
    mask = AttentionMask(0, window, exact[3])
    out = reference.attention(*exact[:3], AttentionLayout.of_sequences(lengths), 0.3, mask)
    grad = drawn(*out.shape, seed=9)
    wanted = torch.autograd.grad(out, exact, grad.double())
    leaves = [x.to(CUDA).requires_grad_() for x in given]
    made = OURS.attention(*leaves[:3], AttentionLayout.of_sequences(lengths, CUDA), 0.3, leaves[3], window)
    errors = [
        float((a.cpu() - b).norm() / b.norm())
        for a, b in zip(torch.autograd.grad(made, leaves, grad.to(CUDA)), wanted, strict=True)
    ]
    print(f"attention backward, window {window}: errors {errors}")
    assert max(errors) < 1e-5


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*[(family, "bfloat16") for family in RECURRENT], ("qwen3_5_moe_text", "float32"), ("gpt_oss", "float32")],
)
def test_engine_and_trainer_have_the_same_bits(family, dtype):
    model = model_of(family, dtype, RECURRENT[family])
    prompts, sampling = traffic(32)
    made = Engine(model).generate(prompts, sampling)
    wrong = {}
    for name, settings in {
        "chunks": {"max_batch_tokens": 64, "page_size": 64, "prefix_caching": False}, "few": {"max_running": 3},
        "preempted": {"max_cache_tokens": 128, "max_batch_tokens": 96},
    }.items():  # fmt: skip
        engine, count = Engine(model, **settings), 32 if name == "preempted" else 12
        again = engine.generate(prompts[:count], sampling[:count])
        wrong[name] = sum(bits(a) != bits(b) for a, b in zip(again, made, strict=False))
        stats = engine.stats()
        assert name != "preempted" or min(stats.preemptions, stats.cached_tokens) > 0, stats
    pairs = [(c.prompt_ids, c.token_ids) for c in made]
    for tokens in (None, 300):
        scored = token_logprobs(model, pairs, sampling=sampling, max_tokens=tokens)
        samples = [as_sample(i, each, 0.0) for i, each in enumerate(made)]
        wrong[f"trainer, {tokens}"] = different(samples, [s.detach().cpu().numpy() for s in scored])
    print(f"{family} {dtype}: differ {wrong}")
    assert not any(wrong.values()), wrong
    if dtype == "float32":
        on_cpu = token_logprobs(model.to("cpu"), pairs[:4], sampling=sampling[:4])
        away = max(float(np.abs(a.detach().numpy() - b.logprobs).max()) for a, b in zip(on_cpu, made, strict=False))
        print(f"{family}: largest difference from the CPU's logprobs {away:.1e}")
        assert away < 1e-4


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "nemotron_h"])
def test_groups_and_prompts_that_begin_alike_start_from_saved_states(family, dtype):
    model, rng = model_of(family, dtype, RECURRENT[family]), np.random.default_rng(5)
    start, page = rng.integers(3, 900, 203).tolist(), 16
    saved = len(start) // page * page  # tokens before the state that the first request of the group leaves
    longer = [start[:saved] + rng.integers(3, 900, n).tolist() for n in (1, 15, 40, 70)]
    prompts = [*[start] * 6, *longer, *[longer[-1]] * 2]
    sampling = [SamplingParams(8 + i % 5, seed=i, ignore_eos=True) for i in range(len(prompts))]
    alone = Engine(model, prefix_caching=False).generate(prompts, sampling)
    last = len(longer[-1]) // page * page  # of the last two's
    found, wrong = {}, {}
    for name, settings in {"whole": {}, "chunks": {"max_batch_tokens": 64}, "few": {"max_running": 3}}.items():
        engine, found[name] = Engine(model, page_size=page, **settings), []
        for turn in range(3):  # the second time from states of the first, the third from none of before
            if turn == 2:
                engine.set_version(1)
            before = engine.stats().cached_tokens
            again = engine.generate(prompts, sampling)
            found[name].append(engine.stats().cached_tokens - before)
            wrong[name, len(found[name])] = sum(bits(a) != bits(b) for a, b in zip(again, alone, strict=True))
    print(f"{family} {dtype}: tokens from saved states {found}, differ {wrong}")
    assert not any(wrong.values()), wrong
    for first, second, third in found.values():
        assert first == third == (5 + 4) * saved + 2 * last
        assert second > first


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("family", RECURRENT)
def test_trainer_equals_engine_before_and_after_every_update(family):
    model = model_of(family, "bfloat16", RECURRENT[family])
    engine, trainer = Engine(model), Trainer(model, TrainerConfig(lr=3e-3, max_batch_tokens=1500))
    rng = np.random.default_rng(0)
    for step in range(2):
        made = engine.generate(*traffic(16))
        samples = [as_sample(i, c, float(rng.normal())) for i, c in enumerate(made)]
        result = trainer.forward_backward(samples, get_loss("grpo"))
        wrong = different(samples, result.logprobs)
        norm = trainer.optim_step()["loss/grad_norm"]
        print(f"{family}, step {step}: {wrong} tokens differ, gradient norm {norm}")
        assert wrong == 0
        assert norm > 0
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)
