"""MLPs of long sequences in blocks of rows: the forward's bits, and gradients that are sums in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlloop import load_model, token_logprobs
from rlloop.models import Model, new_model, row_blocks
from rlloop.models.adapter_weights import Adapter
from rlloop.models.layers import Mlp, Step
from rlloop.numerics.layout import AttentionLayout
from tests.support.adapters import random_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.packed_models import FORMATS, make_packed

PAIRS = [([3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 3, 5, 8]), ([2, 7, 1, 8], [2, 8])]
Update = Callable[[Model, int], tuple[Tensor, dict[str, Tensor]]]


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Update:
    """Logprobs and gradients, with blocks of so many rows in layers that are made again."""

    def run(model: Model, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        monkeypatch.setattr(row_blocks, "ROWS", rows)
        model.checkpoint_layers = 1
        own = {} if model.adapter is None else model.adapter.named_parameters()
        parameters = {**dict(model.named_parameters()), **own}
        for each in parameters.values():
            each.grad = None
        logprobs = torch.cat(token_logprobs(model, PAIRS))
        logprobs.sum().backward()
        return logprobs.detach(), {name: each.grad for name, each in parameters.items() if each.grad is not None}

    return run


def check(update: Update, model: Model, sums: set[str]) -> None:
    """`sums`: parts of the names whose gradients have other bits in blocks; inputs' gradients keep theirs."""
    (logprobs, whole), (again, blocks), (_, repeated) = (update(model, rows) for rows in (1000, 7, 7))
    assert torch.equal(logprobs, again)
    assert whole.keys() == blocks.keys()
    differ = {name for name in whole if not torch.equal(whole[name], blocks[name])}
    assert differ or model.dtype == torch.bfloat16  # where rounding hides most
    assert all(any(part in name for part in sums) for name in differ), differ
    assert all(torch.equal(blocks[name], repeated[name]) for name in blocks)
    for name, grad in whole.items():
        assert blocks[name].dtype == grad.dtype
        error = float((blocks[name].double() - grad.double()).norm() / grad.double().norm())
        assert error < (5e-3 if grad.dtype == torch.bfloat16 else 1e-6), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "nemotron_h"])
def test_a_long_sequence_keeps_its_forward(update: Update, tmp_path: Path, family: str, dtype: str) -> None:
    make_checkpoint(tmp_path, family)
    check(update, load_model(tmp_path, dtype=dtype), {".mlp.", ".mixer.up_proj", ".mixer.down_proj"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters(update: Update, tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    check(update, adapted(model), {".mlp."})  # the weights train as well
    for each in model.parameters():
        each.requires_grad_(False)
    check(update, adapted(model), {".mlp."})


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_weights(update: Update, tmp_path: Path, kind: str) -> None:
    packed, _ = make_packed(tmp_path, kind)
    check(update, adapted(load_model(packed, dtype="bfloat16")), {".mlp.", ".mixer.up_proj", ".mixer.down_proj"})


def adapted(model: Model) -> Model:
    return model.with_adapter(Adapter(random_adapter(model, 3), model.adapter_targets()))


def test_what_is_not_made_in_blocks(update: Update, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "mixture", "qwen3_moe")
    make_checkpoint(tmp_path / "dense")
    mixture, dense = (load_model(tmp_path / name) for name in ("mixture", "dense"))
    other = dense.with_profile(type(dense.profile)(linear="stock"))
    for model in (mixture, other):
        (one, whole), (two, blocks) = update(model, 1000), update(model, 7)
        assert torch.equal(one, two)
        assert all(torch.equal(whole[name], blocks[name]) for name in whole)
    _, blocks = update(dense, 7)
    dense.checkpoint_layers = 0  # layers that are kept hold all their rows anyway
    dense.zero_grad()
    torch.cat(token_logprobs(dense, PAIRS)).sum().backward()
    assert not all(
        torch.equal(blocks[name], each.grad) for name, each in dense.named_parameters() if each.grad is not None
    )


def test_of_inner_activations_one_block_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    model, longest = load_model(tmp_path), []
    model.checkpoint_layers = 1
    monkeypatch.setattr(row_blocks, "ROWS", 7)
    inner = model.ops.silu_mul
    monkeypatch.setattr(model.ops, "silu_mul", lambda gate, up: longest.append(len(gate)) or inner(gate, up))
    torch.cat(token_logprobs(model, PAIRS)).sum().backward()
    assert longest
    assert max(longest) == 7


def test_a_block_is_made_again_once_and_without_its_last_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    model, rows = load_model(tmp_path), Counter[str]()
    model.checkpoint_layers = 1
    monkeypatch.setattr(row_blocks, "ROWS", 7)
    downs = {id(layer.mlp.down_proj.weight) for layer in model.model.layers.values()}
    forward, linear = Mlp.forward, model.ops._as.linear

    def made(mlp: Mlp, x: Tensor, step: Step) -> Tensor:
        rows["mlp"] += len(x)
        return forward(mlp, x, step)

    def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows["down_proj"] += len(x) * (id(weight) in downs)
        return linear(x, weight, bias)

    monkeypatch.setattr(Mlp, "forward", made)
    monkeypatch.setattr(model.ops._as, "linear", multiplied)
    logprobs = torch.cat(token_logprobs(model, PAIRS))
    every = sum(len(prompt) + len(completion) - 1 for prompt, completion in PAIRS) * model.config.num_layers
    assert rows == {"mlp": every, "down_proj": every}
    logprobs.sum().backward()
    assert rows == {"mlp": 2 * every, "down_proj": every}


def test_bfloat16_sums_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 16 blocks whose products nearly cancel: as near the exact gradient as one product is."""
    torch.manual_seed(0)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    model = new_model(config, seed=0, dtype="bfloat16")
    mlp, ops = model.model.layers["0"].mlp, model.ops
    assert isinstance(mlp, Mlp)
    x, grad = (torch.randn(512, 64).bfloat16() for _ in range(2))
    x[256:], grad[256:] = x[:256], -grad[:256] + torch.randn(256, 64).bfloat16() / 16
    empty = torch.empty(0, dtype=torch.int64)
    layout = AttentionLayout.of_sequences([512], x.device)
    step = Step(empty, (x, x), layout, None, ops, None, model.context, recomputed=True)
    with torch.no_grad():
        inner = ops.silu_mul(mlp.gate_proj(x, ops), mlp.up_proj(x, ops))
    exact = grad.double().T @ inner.double()
    errors = {}
    for rows in (512, 32):
        monkeypatch.setattr(row_blocks, "ROWS", rows)
        (found,) = torch.autograd.grad(row_blocks.in_blocks(mlp, x, step), [mlp.down_proj.weight], grad)
        errors[rows] = float((found.double() - exact).norm() / exact.norm())
    parts = sum((grad[at : at + 32].double().T @ inner[at : at + 32].double()).bfloat16() for at in range(0, 512, 32))
    assert errors[32] < 1.01 * errors[512]
    assert errors[32] < 0.3 * float((parts.double() - exact).norm() / exact.norm())
