"""quantize=fp8: engine and trainer have the same bits, through updates, publications and checkpoints."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError, ModelError
from rlloop.models import new_model, read_state, save_model
from rlloop.models.fp8 import quantised_names
from rlloop.models.fp8_files import save_fp8
from rlloop.numerics import operators
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.packed import PackedWeight
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout
from rlloop.sync.bundle import BundlePublisher, BundleReplica
from rlloop.sync.live import LiveTarget, named_weights, tensors_of
from rlloop.trainer import Trainer
from tests.support.image_models import FAMILIES, make_image_checkpoint
from tests.support.packed_models import make_packed
from tests.support.rank_updates import DENSE, INDEXED, MIXTURE
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

WIDE = {**DENSE, "hidden_size": 136, "attention_bias": True}
QWEN_MOE = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
MODELS = {"dense": WIDE, "experts": QWEN_MOE, "latent": {**MIXTURE, "n_shared_experts": 1}, "sparse": INDEXED}
PROMPTS = [[5], list(range(3, 20)), [9, 8, 7]]
SAMPLING = [SamplingParams(max_tokens=6, seed=seed, ignore_eos=True) for seed in range(3)]


def folder_of(path, config, seed=0):
    save_model(new_model(config, seed), path)
    return path


def stored_bits(model):
    return {name: tensor.contiguous().view(torch.uint8) for name, tensor in named_weights(model).items()}


def same_weights(left, right):
    left, right = stored_bits(left), stored_bits(right)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, "bfloat16") for kind in MODELS] + [("dense", "float32"), ("experts", "float32")]
)
def test_engine_trainer_and_replica_have_the_same_bits(tmp_path, kind, dtype):
    folder = folder_of(tmp_path / "base", MODELS[kind])
    model, follower = (load_model(folder, dtype=dtype, quantize="fp8") for _ in range(2))
    kept = {name for name, each in model.named_parameters() if isinstance(each, Fp8Weight)}
    assert kept == set(quantised_names(model))
    assert len(kept) >= 10
    trainer, engine, replica = (
        Trainer(model, TrainerConfig(lr=1e-2)),
        Engine(model, max_batch_tokens=16),
        Engine(follower),
    )
    publisher = BundlePublisher("node", 1)
    target = BundleReplica(LiveTarget(named_weights(follower).items(), replica.set_version), 1)
    rng = np.random.default_rng(0)
    for version in range(2):
        tensors, aliases = tensors_of(named_weights(model).items())
        codes = {name for name, each in tensors.items() if each.dtype == "F8_E4M3"}
        assert {f"{name}_scale_inv" for name in codes} <= tensors.keys()
        assert len(codes) >= len(kept)
        engine.set_version(version)
        target.apply(publisher.publish(tensors, version, aliases))
        assert same_weights(model, follower)
        made, theirs = (each.generate(PROMPTS, SAMPLING) for each in (engine, replica))
        assert list(map(bits, made)) == list(map(bits, theirs))
        samples = [as_sample(index, each, float(rng.normal())) for index, each in enumerate(made)]
        assert different(samples, list(trainer.forward_backward(samples, get_loss("grpo")).logprobs)) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0


def test_layers_made_again_have_the_same_gradient(tmp_path, monkeypatch):
    model = load_model(folder_of(tmp_path / "base", WIDE), dtype="bfloat16", quantize="fp8")
    found, products, multiply = [], [], operators.fp8._product
    monkeypatch.setattr(operators.fp8, "_product", lambda *inputs: products.append(inputs) or multiply(*inputs))
    for every in (0, 1):
        model.checkpoint_layers = every
        model.zero_grad()
        torch.cat(token_logprobs(model, [([5, 6, 7], [8, 9])])).sum().backward()
        found.append([each.grad.clone() for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(products) == (7 + 7 + 6) * model.config.num_layers, "the last one is not made again"


def test_masters_move_by_less_than_8_bits_hold_and_resume_exactly(tmp_path):
    folder = folder_of(tmp_path / "base", QWEN_MOE)
    whole, other = (Trainer(load_model(folder, quantize="fp8"), TrainerConfig(lr=1e-5)) for _ in range(2))
    start = {name: each.clone() for name, each in whole.masters.items()}
    for name, each in read_state(folder).items():
        assert torch.equal(start[name], each)  # the stored weights, not the rounded ones
    before = stored_bits(whole.model)
    batch = [as_sample(0, Engine(whole.model).generate(PROMPTS[1:2], SAMPLING[:1])[0], 1.0)]
    for trainer in (whole, other):
        trainer.forward_backward(batch, get_loss("grpo"))
        trainer.optim_step()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (whole.masters[name] != start[name]).float().mean() > 0.9
    assert (stored_bits(whole.model)[name] != before[name]).float().mean() < 0.1
    whole.save(tmp_path / "saved")
    resumed = Trainer(load_model(folder, quantize="fp8"), TrainerConfig(lr=1e-5))
    resumed.restore(tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", quantize="fp8")
    for each in (resumed.model, loaded, Trainer(loaded, TrainerConfig()).model):
        assert same_weights(each, whole.model)
    for trainer in (resumed, other):
        trainer.forward_backward(batch, get_loss("grpo"))
        trainer.optim_step()
        assert trainer.updates == 2
    assert same_weights(resumed.model, other.model)
    assert all(torch.equal(resumed.masters[name], each) for name, each in other.masters.items())


def test_offloaded_masters_give_the_same_bytes(tmp_path):
    folder, digests = folder_of(tmp_path / "base", DENSE), []
    for offload in ("none", "masters"):
        trainer = Trainer(load_model(folder, dtype="bfloat16", quantize="fp8"), TrainerConfig(lr=1e-2, offload=offload))
        batch = [as_sample(0, Engine(trainer.model).generate(PROMPTS[1:2], SAMPLING[:1])[0], 1.0)]
        trainer.forward_backward(batch, get_loss("grpo"))
        trainer.optim_step()
        digests.append(stored_bits(trainer.model))
    assert all(torch.equal(digests[0][name], each) for name, each in digests[1].items())


def test_a_saved_model_has_the_weights_that_it_computes_with(tmp_path):
    model = load_model(folder_of(tmp_path / "base", QWEN_MOE), dtype="bfloat16", quantize="fp8")
    save_model(model, tmp_path / "saved")
    assert same_weights(load_model(tmp_path / "saved", dtype="bfloat16", quantize="fp8"), model)
    pairs = [(PROMPTS[1], [4, 5, 6])]
    (ours,) = token_logprobs(model, pairs)
    (plain,) = token_logprobs(load_model(tmp_path / "saved", dtype="bfloat16"), pairs)
    assert 0 < (ours - plain).abs().max() < 0.5  # inputs are rounded in one of them
    assert model.fingerprint() == {**load_model(tmp_path / "saved", dtype="bfloat16").fingerprint(), "quantize": "fp8"}


@pytest.mark.parametrize("kind", ["experts", "latent"])
def test_a_folder_for_other_engines_has_the_very_bytes(tmp_path, kind):
    model = load_model(folder_of(tmp_path / "base", MODELS[kind]), dtype="bfloat16", quantize="fp8")
    save_fp8(model, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    live = {name: each for name, each in named_weights(model).items() if name in stored}
    assert sum(each.dtype == torch.float8_e4m3fn for each in stored.values()) > 10
    assert all(torch.equal(stored[name].view(torch.uint8), each.view(torch.uint8)) for name, each in live.items())
    packed = dict(load_model(tmp_path / "saved", dtype="bfloat16").named_parameters())
    for name, each in model.named_parameters():
        if isinstance(each, Fp8Weight):
            assert torch.equal(packed[name].dequantised(), each.dequantised()), name
    with pytest.raises(ModelError, match="no weights in 8 bits"):
        save_fp8(load_model(tmp_path / "base"), tmp_path / "other")


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path):
    folder = folder_of(tmp_path / "base", DENSE)
    for options, message in (
        ({"quantize": "fp4"}, "quantize is 'fp4'; it must be one of none, fp8"),
        ({"quantize": "fp8", "dtype": "float16"}, "dtype float16: use bfloat16 or float32"),
        ({"quantize": "fp8", "profile": NumericsProfile(linear="stock")}, "leave out the profile's linear=stock"),
        ({"quantize": "fp8", "profile": NumericsProfile(tp_segments="2")}, "tp_segments=2"),
        (
            {"quantize": "fp8", "context": ParallelContext(torch.device("cpu"), layout=Layout(tp=2))},
            "whole weights on each rank; the layout has tp=2",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model(folder, **options)
    packed, _ = make_packed(tmp_path / "packed", "fp8")
    with pytest.raises(ConfigError, match=r"quantize=fp8 trains weights, and those of .* are packed"):
        load_model(packed, quantize="fp8")
    model = load_model(folder, quantize="fp8")
    with pytest.raises(ConfigError, match="adapters cannot be added"):
        Engine(model, adapter_slots=2).load_adapter("a", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_in_8_bits_of_a_model_that_reads_images(tmp_path, family):
    """It names its plain modules as transformers does, and is read as packed weights, experts stacked or not."""
    text = {} if family == "qwen3_vl" else {"moe_intermediate_size": 128}
    make_image_checkpoint(tmp_path / "base", family, dtype=torch.bfloat16, text=text)
    model = load_model(tmp_path / "base", dtype="bfloat16", quantize="fp8")
    save_fp8(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "model.visual.blocks.0.attn.qkv" in config["quantization_config"]["modules_to_not_convert"]
    packed = dict(load_model(tmp_path / "saved").named_parameters())
    for name, each in model.named_parameters():
        assert isinstance(packed[name], PackedWeight) == isinstance(each, Fp8Weight), name
        own, wanted = (x.dequantised() if isinstance(x, PackedWeight | Fp8Weight) else x for x in (packed[name], each))
        assert torch.equal(own, wanted), name
