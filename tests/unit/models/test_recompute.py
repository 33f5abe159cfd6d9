"""Layers made again in the backward pass: the same bits, with and without attention's results kept."""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlloop import NumericsProfile, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import Model, ScoreRow, recompute, score
from rlloop.models.adapter_weights import Adapter
from rlloop.trainer import Trainer
from tests.support.adapters import random_adapter
from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.train_sequences import gradients, make_groups

PAIRS = [([3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 3, 5, 8]), ([2, 7, 1, 8], [2, 8])]
SETTINGS = [  # every n-th layer, attention kept, offloaded
    (0, False, False), (1, False, False), (2, False, False), (1, True, False), (2, True, False), (1, False, True),
    (1, True, True), (2, True, True),
]  # fmt: skip


class Calls(TorchDispatchMode):
    """Counts rlloop's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rlloop":
            self.counts[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def update(model: Model, every: int, keeps: bool, offload: bool) -> tuple[dict[str, Tensor], Counter[str]]:
    model.checkpoint_layers, model.checkpoint_keep_attention, model.checkpoint_offload = every, keeps, offload
    model.zero_grad()
    logprobs = torch.cat(token_logprobs(model, PAIRS))
    with Calls() as calls:  # what the backward makes
        logprobs.sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"logprobs": logprobs.detach(), **found}, calls.counts


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_every_family_keeps_its_bits(tmp_path: Path, family: str, dtype: str) -> None:
    make_checkpoint(tmp_path, family)
    model = load_model(tmp_path, dtype=dtype)
    (plain, _), *others = [update(model, *setting) for setting in SETTINGS]
    assert len(plain) > 5
    for setting, (found, counts) in zip(SETTINGS[1:], others, strict=True):
        assert same(plain, found), setting
        assert counts["rms_norm"] > 0, "layers are made again"
        if setting[1]:
            assert counts["attention"] == counts["sparse_attention"] == 0
    assert others[0][1]["attention"] + others[0][1]["sparse_attention"] == len(model.config.attention_layers)


# By family, of a forward's products (linear) and sums of experts (combine): those that a backward makes again no more.
UNREAD = {
    "qwen3": (2, 0), "qwen2": (2, 0), "llama": (2, 0), "gpt_oss": (0, 2), "qwen3_moe": (0, 2), "minimax_m2": (0, 2),
    "deepseek_v3": (2, 1), "deepseek_v32": (2, 1), "glm_moe_dsa": (3, 2), "qwen3_5_moe": (0, 2),
    "nemotron_h": (5, 0),  # the ends of a recurrence, a shared expert, a latent, attention and an MLP
}  # fmt: skip


def not_again(model: Model, *operators: str) -> tuple[int, ...]:
    model.checkpoint_layers = 1
    with Calls() as forward:
        logprobs = torch.cat(token_logprobs(model, PAIRS))
    with Calls() as backward:
        logprobs.sum().backward()
    return tuple(forward.counts[name] - backward.counts[name] for name in operators)


@pytest.mark.parametrize("family", EVERY)
def test_results_that_nothing_reads_are_not_made_again(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    assert not_again(load_model(tmp_path), "linear", "combine") == UNREAD[family]


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_adapters_keep_their_bits(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    base = load_model(tmp_path, dtype="bfloat16")
    for each in base.parameters():
        each.requires_grad_(False)
    model = base.with_adapter(Adapter(random_adapter(base, 3), base.adapter_targets()))
    factors, found = list(model.adapter.named_parameters().values()), []
    for every in (0, 1):
        model.checkpoint_layers = every
        for each in factors:
            each.grad = None
        torch.cat(token_logprobs(model, PAIRS)).sum().backward()
        found.append([each.grad for each in factors])
    assert all(each.any() for each in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not_again(model, "adapted_linear", "linear") == (UNREAD[family][0], 0), "but for A x, which is saved"


def test_other_operations_keep_their_bits(tmp_path: Path) -> None:
    """Where the norm is another's, or does not read the sum as stored, both its terms are kept."""
    make_checkpoint(tmp_path)
    model = load_model(tmp_path)
    for settings in ({"rms_norm": "stock"}, {"residual_norm": "float32"}, {"attention": "stock"}):
        view = model.with_profile(NumericsProfile(**settings))
        (plain, _), *others = [update(view, *setting) for setting in SETTINGS]
        assert all(same(plain, found) for found, _ in others), settings


@pytest.mark.parametrize("share", [False, True])
def test_updates_of_groups_keep_their_bits(tmp_path: Path, share: bool) -> None:
    make_checkpoint(tmp_path)
    found = []
    again, keeps = {"checkpoint_layers": "all"}, {"checkpoint_keep_attention": True}
    for settings in ({}, again, {**again, **keeps}, {**again, **keeps, "checkpoint_offload": True}):
        trainer = Trainer(load_model(tmp_path), TrainerConfig(share_prompts=share, max_batch_tokens=200, **settings))
        result = trainer.forward_backward(make_groups(), get_loss("grpo"))
        found.append([*gradients(trainer).values(), *map(torch.from_numpy, result.logprobs)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_of_a_layer_one_sum_is_kept(tmp_path: Path) -> None:
    kept = []
    for layers in (2, 6):
        make_checkpoint(tmp_path / str(layers), num_hidden_layers=layers)
        model, storages = load_model(tmp_path / str(layers)), {}
        model.checkpoint_layers = 1

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = token_logprobs(model, PAIRS)
        kept.append(sum(storages.values()))
        del logprobs
    tokens = sum(len(prompt) + len(completion) - 1 for prompt, completion in PAIRS)
    assert kept[1] - kept[0] == 4 * tokens * model.config.hidden_size * model.dtype.itemsize


def test_what_waits_on_the_host_is_all_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    model, moved = load_model(tmp_path, dtype="bfloat16"), list[tuple[int, ...]]()
    tokens = sum(len(prompt) + len(completion) - 1 for prompt, completion in PAIRS)
    config, to_host = model.config, recompute._to_host

    def moves(x: Tensor) -> tuple[torch.device, Tensor]:
        moved.append(tuple(x.shape))
        device, held = to_host(x)
        assert held.data_ptr() != x.data_ptr()
        return device, held

    monkeypatch.setattr(recompute, "_to_host", moves)
    update(model, 1, False, True)
    assert moved == [(tokens, config.hidden_size)] * config.num_layers
    moved.clear()
    update(model, 1, True, True)
    attention = [(tokens, config.num_heads, config.head_dim), (tokens, config.num_heads)]
    assert moved == [(tokens, config.hidden_size), *attention] * config.num_layers


class Alive(Calls):
    """Counts results of rlloop's operators, and how many of an operator's were alive at a time at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "rlloop":
            name, first = func.name().partition("::")[2], results if isinstance(results, Tensor) else results[0]
            self.alive[name] += 1
            self.most[name] = max(self.most[name], self.alive[name])
            weakref.finalize(first.untyped_storage(), self.alive.subtract, [name])
        return results


def test_layers_made_again_are_dropped_one_after_the_other(tmp_path: Path) -> None:
    """Those with experts too, whose scores a forward records for losses."""
    make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=5)
    model = load_model(tmp_path)
    model.checkpoint_layers = 1
    logprobs, _ = score(
        model, [ScoreRow([*prompt, *made], range(len(prompt), len(prompt + made))) for prompt, made in PAIRS]
    )
    with Alive() as made:
        logprobs.sum().backward()
    assert made.counts["attention"] == made.counts["route"] == 5
    assert made.most["attention"] == made.most["route"] == 1


@pytest.mark.parametrize("setting", SETTINGS[1:])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "nemotron_h"])
def test_no_tensor_waits_for_pythons_collector(tmp_path: Path, family: str, setting: tuple[int, bool, bool]) -> None:
    """What the passes made is free once its last name is gone, as nothing of it is in a cycle of references."""
    make_checkpoint(tmp_path, family)
    model, threads = load_model(tmp_path), torch.get_num_threads()
    torch.set_num_threads(1)  # a kernel's helpers may begin late
    update(model, *setting)  # a kernel's first call loads it, which is not counted
    gc.collect()
    gc.disable()
    try:
        with Alive() as made:
            update(model, *setting)
            model.zero_grad()
        assert sum(made.counts.values()) > 20
        assert not +made.alive
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def test_attention_is_kept_only_of_layers_made_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint_keep_attention is True; it must be false while"):
        TrainerConfig(checkpoint_keep_attention=True)
    with pytest.raises(ConfigError, match="checkpoint_offload is True; it must be false while"):
        TrainerConfig(checkpoint_offload=True)
    settings = TrainerConfig(checkpoint_layers="2", checkpoint_keep_attention=True, checkpoint_offload=True)
    model = load_model(tmp_path)
    assert Trainer(model, settings).model.checkpoint_keep_attention
    assert model.with_adapter(None).checkpoint_keep_attention
    assert model.with_adapter(None).checkpoint_offload
    with pytest.raises(ConfigError, match=r"model\.profile\.attention is stock"):
        Trainer(model.with_profile(NumericsProfile(attention="stock")), settings)
