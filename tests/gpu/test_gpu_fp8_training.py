"""Weights that train in 8 bits on CUDA: the definition's bits, rows on their own, engine and trainer alike."""

import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import new_model, save_model
from rlloop.numerics import fp8
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import Trainer
from tests.support.gpu_mixtures import FAMILIES, SIZES, model_of, traffic
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

OPS = ops_for(NumericsProfile())
TYPES = [torch.bfloat16, torch.float32]
DENSE = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 64}
FAMILIES = {"qwen3": DENSE, **FAMILIES}
ROWS = (slice(0, 1), slice(3, 10), slice(7, 23), slice(20, 37), slice(64, 128), slice(100, 229), slice(300, 600))


def randn(*shape, seed, dtype=torch.bfloat16, scale=1.0):
    drawn = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (drawn * scale).to(dtype)


def values(x):
    """Activations as they are multiplied, float64."""
    return fp8.dequantised(*fp8.quantised_rows(x), 1, torch.float32).double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [128, 200, 1024])
def test_rows_are_quantised_as_defined(width, dtype):
    x = randn(300, width, seed=0, dtype=dtype) * torch.logspace(-8, 4, 300, device="cuda")[:, None].to(dtype)
    x[7] = 0
    kernels = kernels_for(x.device)
    for rows in (slice(None), slice(0, 1), slice(5, 40)):
        for ours, theirs in zip(kernels.fp8_rows(x[rows]), fp8.quantised_rows(x[rows]), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    x[1, 5], x[2, 100] = torch.inf, torch.nan
    codes, _ = kernels.fp8_rows(x)
    assert codes.float().isnan().nonzero().tolist() == [[1, 5], [2, 100]]


@pytest.mark.parametrize(("shape", "span"), [((300, 200), 300), ((256, 512), 256), ((5, 2 * 96, 136), 96)])
def test_weights_are_dequantised_as_defined(shape, span):
    matrix = randn(*shape, seed=0, scale=0.02)
    weight, on_cpu = (Fp8Weight.of(each, span, torch.bfloat16) for each in (matrix, matrix.cpu()))
    assert torch.equal(weight.codes.cpu().view(torch.uint8), on_cpu.codes.view(torch.uint8))
    assert torch.equal(weight.scales.cpu(), on_cpu.scales)
    for dtype in TYPES:
        assert same_bits(weight.dequantised(dtype), fp8.dequantised(weight.codes, weight.scales, span, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "width"), [(256, 512), (1000, 1024), (4096, 4096), (130, 200), (64, 128)])
def test_a_product_and_its_rows(outputs, width, dtype):
    x, bias = randn(600, width, seed=1, dtype=dtype), randn(outputs, seed=2, dtype=dtype)
    weight = Fp8Weight.of(randn(outputs, width, seed=3, scale=0.02), outputs, dtype)
    whole, plain = OPS.linear(x, weight, bias), OPS.linear(x, weight)
    left, right = values(x), weight.dequantised(torch.float32).double()
    exact, size = left @ right.T + bias.double(), left.abs() @ right.abs().T
    # A tensor core adds products of 8-bit floats with fewer bits than float32 has, then blocks are added in float32.
    room = size * 2.0**-11 + exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 0)
    assert ((whole.double() - exact).abs() <= room).all()
    for rows in ROWS:
        assert same_bits(OPS.linear(x[rows], weight, bias), whole[rows]), rows
        assert same_bits(OPS.linear(x[rows], weight), plain[rows]), rows
    order = torch.randperm(600, device="cuda")
    assert same_bits(OPS.linear(x[order], weight), plain[order])
    with torch.no_grad():
        for rows in ROWS:
            for each in OPS.qkv_linear(x[rows], weight, weight, weight):
                assert same_bits(each, plain[rows])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("experts", "width", "size"), [(8, 256, 128), (5, 200, 72), (128, 512, 256)])
def test_an_experts_row_is_a_dense_layers(experts, width, size, dtype):
    tokens = 400
    x = randn(tokens, width, seed=0, dtype=dtype)
    up = Fp8Weight.of(randn(experts, 2 * size, width, seed=1, scale=0.05), size, dtype)
    down = Fp8Weight.of(randn(experts, width, size, seed=2, scale=0.05), width, dtype)
    chosen = torch.rand(tokens, experts, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).topk(2)[1]
    whole = OPS.experts(x, up, down, chosen)
    for rows in (slice(0, 1), slice(5, 40), slice(60, 200)):
        assert same_bits(OPS.experts(x[rows], up, down, chosen[rows]), whole[rows])
    for expert in range(min(experts, 8)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, raised = OPS.linear(x[token], up[expert]).chunk(2, -1)
        made = OPS.linear(OPS.silu_mul(gate.contiguous(), raised.contiguous()), down[expert])
        assert same_bits(whole[token, place], made)


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_are_straight_through(dtype):
    x, weight = randn(90, 200, seed=0, dtype=dtype), Fp8Weight.of(randn(96, 200, seed=1, scale=0.1), 96, dtype)
    grad = randn(90, 96, seed=2, dtype=dtype)
    found = []
    for each in (weight, weight.dequantised()):
        pair = x.clone().requires_grad_(), torch.nn.Parameter(each)
        OPS.linear(*pair).backward(grad)
        found.append([tensor.grad for tensor in pair])
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours, plain)
        assert ours.any()
    chosen = torch.rand(90, 4, device="cuda").topk(2)[1]
    up, down = randn(4, 2 * 72, 200, seed=3, scale=0.1), randn(4, 200, 72, seed=4, scale=0.1)
    quantised = [torch.nn.Parameter(Fp8Weight.of(each, span, dtype)) for each, span in ((up, 72), (down, 200))]
    found = []
    for weights in (quantised, [torch.nn.Parameter(each.dequantised()) for each in quantised]):
        each = x.clone().requires_grad_()
        OPS.experts(each, *weights, chosen).float().square().sum().backward()
        found.append([each.grad, *(weight.grad for weight in weights)])
    for ours, plain in zip(*found, strict=True):  # at activations that differ by the rounding of inputs
        assert (ours - plain).float().norm() < 0.1 * plain.float().norm()


@pytest.mark.parametrize("dtype", TYPES)
def test_experts_that_no_token_goes_to_take_part_in_the_backward(dtype):
    up, down = Fp8Weight.of(randn(4, 144, 200, seed=0), 72, dtype), Fp8Weight.of(randn(4, 200, 72, seed=1), 200, dtype)
    x = torch.zeros(0, 200, dtype=dtype, device="cuda", requires_grad=True)
    out = OPS.experts(x, up, down, torch.zeros(0, 2, dtype=torch.int64, device="cuda"))
    assert out.shape == (0, 2, 200)
    assert torch.autograd.grad(out, x, torch.ones_like(out))[0].shape == x.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_have_the_same_bits_through_updates(tmp_path, family, dtype):
    """Decoding runs in graphs, which read weights where updates write them."""
    save_model(model_of(family, "float32", FAMILIES[family]), tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=dtype, device="cuda", quantize="fp8")
    engine, trainer = Engine(model), Trainer(model, TrainerConfig(lr=1e-2, max_batch_tokens=1500))
    prompts, sampling = traffic(24)
    rng = np.random.default_rng(0)
    for step in range(3):
        made = engine.generate(prompts, sampling)
        for index in (0, 5, 11):
            assert bits(engine.generate([prompts[index]], sampling[index])[0]) == bits(made[index])
            (scored,) = token_logprobs(model, [(made[index].prompt_ids, made[index].token_ids)])
            assert made[index].raw_logprobs.tobytes() == scored.detach().cpu().numpy().tobytes()
        samples = [as_sample(i, each, float(rng.normal())) for i, each in enumerate(made)]
        assert different(samples, trainer.forward_backward(samples, get_loss("grpo")).logprobs) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)


def test_a_model_moves_to_the_device():
    config = {**SIZES, "model_type": "qwen3", **DENSE}
    moved = new_model(config, seed=0, dtype="bfloat16", quantize="fp8").to("cuda")
    weight = moved.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, Fp8Weight)
    assert weight.codes.is_cuda
    assert weight.requires_grad
    assert Engine(moved).generate([[3, 4]], SamplingParams(max_tokens=4, seed=0))
