"""Adapters and packed weights on CUDA: a row's bits are its own, and engine and trainer have the same."""

import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams, load_adapter, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import save_model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.numerics.layout import AdapterSlots, Factors, LogitsProcessing
from rlloop.numerics.ops import ops_for
from rlloop.numerics.packed import FP8, INT4, MXFP4, NVFP4, PackedWeight, is_packed
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import Trainer
from tests.support.adapters import adapter_folder
from tests.support.gpu_mixtures import FAMILIES, LATENT, model_of, traffic
from tests.support.packed_models import make_packed, packed_matrix
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

OPS, EXACT = ops_for(NumericsProfile()), ops_for(NumericsProfile.preset("reference"))
TYPES = [torch.bfloat16, torch.float16, torch.float32]
RANKS = [8, 24, 64, 0]
ALL = ("all-linear", "lm_head")
KIMI = {**LATENT, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}


def randn(*shape, seed, dtype, scale=1.0):
    drawn = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (drawn * scale).to(dtype)


def factors(outputs, width, *groups, dtype, own=False):
    slots, most = len(RANKS), max(RANKS)
    down = randn(*(groups if own else ()), slots, most, width, seed=1, dtype=dtype, scale=width**-0.5)
    up = randn(*groups, slots, outputs, most, seed=2, dtype=dtype)
    for slot, rank in enumerate(RANKS):
        down[..., slot, rank:, :], up[..., slot, :, rank:] = 0, 0
    return Factors(down, up, torch.tensor(RANKS, device="cuda"))


def slots(rows, seed=0):
    return torch.randint(0, len(RANKS), (rows,), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "width"), [(256, 512), (1000, 1024), (2048, 2048), (130, 200)])
def test_rows_of_a_product(outputs, width, dtype):
    weight, bias = randn(outputs, width, seed=3, dtype=dtype), randn(outputs, seed=4, dtype=dtype)
    of = factors(outputs, width, dtype=dtype)
    x, which = randn(600, width, seed=5, dtype=dtype), slots(600)

    def computed(rows):
        return OPS.with_adapters(AdapterSlots({id(weight): of}, which[rows])).linear(x[rows], weight, bias)

    whole = computed(slice(None))
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    z = torch.einsum("tk,trk->tr", x.double(), of.down[which].double())
    exact += torch.einsum("tr,tnr->tn", z, of.up[which].double())
    size = float(exact.abs().max())
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=size * (1e-5 if dtype == torch.float32 else 2e-2))
    for rows in (slice(0, 1), slice(7, 24), slice(100, 165), slice(300, 600)):
        assert same_bits(computed(rows), whole[rows])
    order = torch.randperm(600, device="cuda")
    assert same_bits(computed(order), whole[order])
    base = OPS.linear(x, weight, bias)
    assert same_bits(whole[which == 3], base[which == 3])
    zero = Factors(of.down, torch.zeros_like(of.up), of.ranks)
    assert same_bits(OPS.with_adapters(AdapterSlots({id(weight): zero}, which)).linear(x, weight, bias), base)
    # a uniform step, as training computes it, has the bits of the mixed one
    first = Factors(of.down[1:2], of.up[1:2], of.ranks[1:2])
    uniform = OPS.with_adapters(AdapterSlots({id(weight): first})).linear(x, weight, bias)
    assert same_bits(uniform[which == 1], whole[which == 1])


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 130, 256, 700])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_one_launch_for_a_single_adapter_has_the_bits_of_three(rows, rank):
    """Queries, keys and values, a gate with what it scales, a product with a bias: rows with one adapter, or none."""
    width, dtype, slots = 1024, torch.bfloat16, 3
    sizes, inner = (2048, 1024, 1024), (3072, 3072)
    weights = [randn(n, width, seed=i, dtype=dtype, scale=width**-0.5) for i, n in enumerate((*sizes, *inner, 1008))]
    of = [
        Factors(
            randn(slots, rank, width, seed=20 + i, dtype=dtype, scale=width**-0.5),
            randn(slots, len(weight), rank, seed=30 + i, dtype=dtype),
            torch.tensor([rank, rank, 0], device="cuda"),
        )
        for i, weight in enumerate(weights)
    ]
    for each in of:
        each.down[2], each.up[2] = 0, 0
    x, bias = randn(rows, width, seed=40, dtype=dtype), randn(1008, seed=41, dtype=dtype)
    table = {id(weight): each for weight, each in zip(weights, of, strict=True)}
    first = {id(weight): Factors(e.down[:1], e.up[:1], e.ranks[:1]) for weight, e in zip(weights, of, strict=True)}
    mixed = torch.where(torch.arange(rows, device="cuda") % 3 == 1, 2, 1)

    def made(which):
        ops = OPS.with_adapters(which)
        return *ops.qkv_linear(x, *weights[:3]), ops.gated_linear(x, *weights[3:5]), ops.linear(x, weights[5], bias)

    def separately(which):
        ops = OPS.with_adapters(which)
        q, k, v, gate, up = (ops.linear(x, weight) for weight in weights[:5])
        return q, k, v, ops.silu_mul(gate, up), ops.linear(x, weights[5], bias)

    several = AdapterSlots(table, mixed)
    with torch.no_grad():
        wanted = separately(several)
        for single in [True] * 20 + [False]:
            for one, other in zip(made(AdapterSlots(table, mixed, single)), wanted, strict=True):
                assert same_bits(one, other), (one != other).sum()
        uniform = made(AdapterSlots(first))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = made(AdapterSlots(table, mixed, True))
        for seed in range(3):  # each replay has to wait for its own z
            x.copy_(randn(rows, width, seed=50 + seed, dtype=dtype))
            graph.replay()
            for one, other in zip(replayed, separately(AdapterSlots(table, mixed)), strict=True):
                assert same_bits(one, other), (seed, (one != other).sum())
        x.copy_(randn(rows, width, seed=40, dtype=dtype))
    with torch.enable_grad():  # as training has it
        for one, other in zip(uniform, separately(AdapterSlots(first)), strict=True):
            assert same_bits(one, other.detach())


@pytest.mark.parametrize("dtype", TYPES[::2])
def test_rows_of_experts_and_of_the_head(dtype):
    experts, width, size, tokens = 8, 256, 128, 200
    x, which = randn(tokens, width, seed=0, dtype=dtype), slots(tokens)
    up = randn(experts, 2 * size, width, seed=1, dtype=dtype, scale=0.1)
    down = randn(experts, width, size, seed=2, dtype=dtype, scale=0.1)
    of = {
        id(up): factors(2 * size, width, experts, dtype=dtype, own=True),
        id(down): factors(width, size, experts, dtype=dtype, own=True),
    }
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).cuda()

    def computed(rows):
        return OPS.with_adapters(AdapterSlots(of, which[rows])).experts(x[rows], up, down, chosen[rows])

    whole = computed(slice(None))
    for rows in (slice(0, 1), slice(5, 40), slice(60, 200)):
        assert same_bits(computed(rows), whole[rows])
    base = OPS.experts(x, up, down, chosen)
    assert same_bits(whole[which == 3], base[which == 3])
    assert not same_bits(whole[which == 0], base[which == 0])
    head, targets = randn(1000, width, seed=3, dtype=dtype), torch.arange(tokens, device="cuda") % 1000
    ops = OPS.with_adapters(AdapterSlots({id(head): factors(1000, width, dtype=dtype)}, which))
    logits = ops.logits(x, head)
    scored = OPS.score_logits(logits, targets, LogitsProcessing())[0]
    assert same_bits(ops.token_logprob(x, head, targets, LogitsProcessing())[0], scored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_have_the_same_bits(tmp_path, family, dtype):
    save_model(model_of(family, dtype), tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=dtype, device="cuda")
    engine = Engine(model, adapter_slots=2)
    prompts, sampling = traffic(24)
    base = engine.generate(prompts, sampling)
    for seed, name in enumerate("abc"):
        engine.load_adapter(name, adapter_folder(tmp_path / name, model, seed, rank=4 + 12 * seed, targets=ALL))
    names = [(None, "a", "b", "c")[index % 4] for index in range(len(prompts))]
    made = engine.generate(prompts, sampling, adapters=names)
    for index, (completion, name) in enumerate(zip(made, names, strict=True)):
        (scored,) = token_logprobs(model, [(completion.prompt_ids, completion.token_ids)], adapter=name)
        assert completion.raw_logprobs.tobytes() == scored.detach().cpu().numpy().tobytes()
        if name is None:
            assert bits(completion) == bits(base[index])
    assert engine.stats().adapter_swaps >= 3


def test_an_adapter_trains_under_an_engine_that_shares_it(tmp_path):
    save_model(model_of("qwen3_moe", "bfloat16"), tmp_path / "base")
    model = load_model(tmp_path / "base", dtype="bfloat16", device="cuda").requires_grad_(False)
    chosen = choose_targets(model.adapter_targets(), ALL)
    view = model.with_adapter(Adapter(fresh_weights(chosen, 16, 32.0, 0), chosen))
    engine, trainer = Engine(view), Trainer(view, TrainerConfig(lr=1e-2, max_batch_tokens=1500))
    rng = np.random.default_rng(0)
    for step in range(3):
        samples = [as_sample(i, c, float(rng.normal())) for i, c in enumerate(engine.generate(*traffic(16)))]
        result = trainer.forward_backward(samples, get_loss("grpo"))
        assert different(samples, result.logprobs) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)


def packed_weight(kind, rows, width):
    parts, values = packed_matrix(kind, (rows, width), torch.Generator().manual_seed(0))
    packing = {"int4": INT4, "nvfp4": NVFP4, "fp8": FP8}[kind]
    codes, scales = list(parts.values())[:2]
    scale = parts[".weight_scale_2"].expand(rows, 1).contiguous() if kind == "nvfp4" else None
    if kind == "fp8":
        scales = scales.repeat_interleave(128, 0)[:rows].contiguous()
    return PackedWeight(codes, scales, packing, tensor_scale=scale).like(lambda x: x.cuda()), values.cuda()


@pytest.mark.parametrize("kind", ["int4", "nvfp4", "fp8"])
@pytest.mark.parametrize(("rows", "width"), [(128, 256), (300, 1024), (96, 192)])
def test_packed_weights_have_the_bits_of_plain_ones(kind, rows, width):
    weight, plain = packed_weight(kind, rows, width)
    assert torch.equal(weight.dequantised(), plain)
    for tokens in (1, 5, 16, 17, 64, 200):
        x = randn(tokens, width, seed=tokens, dtype=torch.bfloat16)
        assert same_bits(OPS.linear(x, weight), OPS.linear(x, plain)), tokens
        assert same_bits(OPS.logits(x, weight), OPS.logits(x, plain)), tokens
    x = randn(40, width, seed=0, dtype=torch.bfloat16).requires_grad_()
    grads = [torch.autograd.grad(OPS.linear(x, each).float().square().sum(), x)[0] for each in (weight, plain)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", ["int4", "nvfp4", "fp8"])
def test_packed_experts_have_the_bits_of_plain_ones(kind):
    weights = [packed_weight(kind, 8 * rows, width) for rows, width in ((384, 512), (512, 192))]
    packed = [weight.like(lambda x: x.unflatten(0, (8, -1))) for weight, _ in weights]
    plain = [values.unflatten(0, (8, -1)) for _, values in weights]
    for tokens in (1, 2, 16, 60, 200, 400):  # up to 100 rows an expert
        x = randn(tokens, 512, seed=tokens, dtype=torch.bfloat16)
        chosen = randn(tokens, 8, seed=tokens + 1, dtype=torch.float32).topk(2).indices
        with torch.no_grad():
            expected = OPS.experts(x, *plain, chosen)
            assert same_bits(OPS.experts(x, *packed, chosen), expected), tokens
        assert same_bits(OPS.experts(x.requires_grad_(), *packed, chosen).detach(), expected), tokens


def test_packed_experts_and_powers_of_two():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (4, 96, 64), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, (4, 96, 4), generator=generator, dtype=torch.uint8)
    up = PackedWeight(codes, scales, MXFP4).like(lambda x: x.cuda())
    assert torch.equal(up.dequantised().cpu(), PackedWeight(codes, scales, MXFP4).dequantised())
    rows = torch.tensor([0, 3, 3, 20, 40]).cuda()
    x = randn(40, 128, seed=0, dtype=torch.bfloat16)
    grouped = torch.ops.rlloop.grouped_linear
    assert same_bits(grouped(x, up, True, rows), grouped(x, up.dequantised(), True, rows))


def check_kimi(place, device="cuda"):
    """Over int4 experts, and over the same weights written plainly; every other row has an adapter."""
    prompts, sampling = traffic(6)
    prompts = [[token % 97 for token in each] for each in prompts]
    names, found = [(None, "a")[index % 2] for index in range(len(prompts))], []
    for folder in make_packed(place, "int4_kimi", **KIMI):
        model = load_model(folder, dtype="bfloat16", device=device).requires_grad_(False)
        load_adapter(model, adapter_folder(place / f"adapter of {folder.name}", model, 0, targets=ALL), "a")
        made = Engine(model).generate(prompts, sampling, adapters=names)
        for each, name in zip(made, names, strict=True):
            (scored,) = token_logprobs(model, [(each.prompt_ids, each.token_ids)], adapter=name)
            assert each.raw_logprobs.tobytes() == scored.detach().cpu().numpy().tobytes()
        found.append((sum(is_packed(weight) for weight in model.parameters()), [bits(each) for each in made]))
    (packed, mine), (none, plain) = found
    assert (packed, none) == (4, 0)  # up and down of two layers
    assert mine == plain


def test_a_kimi_k25_of_int4_experts_has_the_bits_of_plain_ones(tmp_path):
    check_kimi(tmp_path)


def test_graphs_follow_adapters_that_come_and_go(tmp_path):
    save_model(model_of(next(iter(FAMILIES)), "bfloat16"), tmp_path / "base")
    model = load_model(tmp_path / "base", dtype="bfloat16", device="cuda")
    engine = Engine(model, adapter_slots=1)
    params = SamplingParams(max_tokens=8, seed=0, ignore_eos=True)
    alone = {}
    for seed, rank in enumerate((4, 40)):  # the second one widens the store: other addresses
        load_adapter(model, adapter_folder(tmp_path / str(seed), model, seed, rank=rank, targets=ALL), f"a{seed}")
        (alone[f"a{seed}"],) = engine.generate([[3, 4, 5]], params, adapters=f"a{seed}")
    made = engine.generate([[3, 4, 5]] * 6, params, adapters=["a0", "a1", None, "a1", "a0", None])
    for completion, name in zip(made, ["a0", "a1", None, "a1", "a0", None], strict=True):
        if name is not None:
            assert bits(completion) == bits(alone[name])
