"""Folders in and out: bytes, types, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlloop.errors import ConfigError, ModelError
from rlloop.models import load_model, new_model, read_state, save_model, token_logprobs, weights
from rlloop.models.safetensors_io import StoredWeights
from rlloop.numerics.kernels import RECURRENT, SINKS, Backend
from rlloop.numerics.profile import NumericsProfile
from tests.support.checkpoints import EVERY, by_our_names, make_checkpoint

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite model.safetensors with other tensors (dots as two underscores); None takes one away."""
    state = load_file(folder / "model.safetensors")
    for name, tensor in ((name.replace("__", "."), tensor) for name, tensor in tensors.items()):
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shards", [None, "30KB"])
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_loaded_is_saved_byte_equal(tmp_path: Path, family: str, shards: str | None, dtype: str):
    make_checkpoint(tmp_path / "a", family, dtype=getattr(torch, dtype), max_shard_size=shards)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "optimizer.safetensors").write_text("not the model's")
    save_model(load_model(tmp_path / "a", dtype=dtype), tmp_path / "b")
    wanted = files(tmp_path / "a")
    del wanted["optimizer.safetensors"]
    assert (len(wanted) > 6) == (shards is not None)
    assert files(tmp_path / "b") == wanted


def test_a_layout_that_safetensors_itself_would_not_choose_is_kept(tmp_path: Path):
    model = make_checkpoint(tmp_path / "a", tie_word_embeddings=False)
    entries, data = {}, b""
    for name, tensor in sorted(model.state_dict().items(), reverse=True):
        raw = tensor.numpy().tobytes()
        entries[name] = {"shape": list(tensor.shape), "dtype": "F32", "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps({**entries, "__metadata__": {"format": "pt", "by": "hand", "a": "b"}}, indent=1).encode()
    header += b" " * (-len(header) % 8)
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_a_model_saved_over_its_own_source_and_another_model_from_it(tmp_path: Path):
    """Weights are no window into the file."""
    make_checkpoint(tmp_path / "a", max_shard_size="30KB")
    first, second = load_model(tmp_path / "a"), load_model(tmp_path / "a")
    before = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(2)
    save_model(first, tmp_path / "a")
    assert all(torch.equal(tensor, before[name]) for name, tensor in second.state_dict().items())
    again = load_model(tmp_path / "a").state_dict()
    assert all(torch.equal(again[name], 2 * tensor) for name, tensor in before.items())
    assert not list((tmp_path / "a").glob("*.partial"))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_each_type_is_rounded_once_to_nearest(tmp_path: Path, stored: torch.dtype, dtype: str):
    make_checkpoint(tmp_path, dtype=stored)
    profile = NumericsProfile.preset("reference") if dtype == "float64" else None
    model, wanted = load_model(tmp_path, dtype=dtype, profile=profile), load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        assert parameter.requires_grad
        assert torch.equal(parameter, wanted[name].double().to(getattr(torch, dtype)))
    assert model.rope.table.dtype == torch.float32


@pytest.mark.parametrize("shards", [None, "20KB"])
def test_float32_weights_of_a_bfloat16_source(tmp_path: Path, shards: str | None):
    """As a trainer saves its masters: the layout is kept, and config.json says the type that the weights have."""
    make_checkpoint(tmp_path / "a", dtype=torch.bfloat16, max_shard_size=shards)
    model = load_model(tmp_path / "a")
    state = {name: parameter + 1e-4 for name, parameter in model.state_dict().items()}
    save_model(state, tmp_path / "b", model.source_path)
    assert files(tmp_path / "b").keys() == files(tmp_path / "a").keys()
    again = read_state(tmp_path / "b")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert theirs.dtype == torch.float32
    assert torch.equal(theirs.state_dict()[EMBEDDING], state[EMBEDDING])


def test_an_older_config_names_its_type_in_its_own_way(tmp_path: Path):
    make_checkpoint(tmp_path / "a", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    older = {("torch_dtype" if name == "dtype" else name): value for name, value in config.items()}
    (tmp_path / "a" / "config.json").write_text(json.dumps(older))
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {**older, "torch_dtype": "float32"}
    save_model(load_model(tmp_path / "a", dtype="bfloat16"), tmp_path / "c")
    assert files(tmp_path / "c") == files(tmp_path / "a")


def test_a_stored_alias_of_tied_embeddings_is_kept_and_checked(tmp_path: Path):
    make_checkpoint(tmp_path / "a", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "a" / "model.safetensors")[EMBEDDING]
    change(tmp_path / "a", lm_head__weight=embedding.clone())
    model = load_model(tmp_path / "a")
    assert HEAD not in dict(model.named_parameters())
    assert HEAD not in read_state(tmp_path / "a")
    save_model(model, tmp_path / "b")
    assert files(tmp_path / "b") == files(tmp_path / "a")
    with torch.no_grad():
        model.head.mul_(3)
    save_model(model, tmp_path / "c")
    saved = load_file(tmp_path / "c" / "model.safetensors")
    assert torch.equal(saved[HEAD], saved[EMBEDDING])
    assert torch.equal(saved[HEAD], 3 * embedding)

    change(tmp_path / "a", lm_head__weight=embedding + 1)
    with pytest.raises(ModelError, match=r"ties lm_head\.weight.*differ"):
        load_model(tmp_path / "a")


NORM = "model__norm__weight"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"model__layers__0__self_attn__rotary": torch.ones(1)}, r"does not know: model\.layers\.0\.self_attn\.rotary"),
        ({"model__layers__2__mlp__up_proj__weight": torch.ones(80, 48)}, r"does not know: model\.layers\.2\.mlp"),
        ({NORM: None}, r"lacks .*: model\.norm\.weight"),
        ({"model__layers__1__self_attn__q_norm__weight": None}, r"lacks .*q_norm\.weight"),
        ({NORM: torch.ones(47)}, r"model\.norm\.weight has shape \[47\].*\[48\]"),
        (
            {NORM: torch.ones(48, dtype=torch.int8)},
            r"model\.norm\.weight has type I8; supported are F64, F32, F16, BF16",
        ),
        ({NORM: torch.ones(48).to(torch.float8_e4m3fn)}, r"model\.norm\.weight is torch\.float8_e4m3fn, and neither"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, tensors: dict, named: str):
    make_checkpoint(tmp_path)
    change(tmp_path, **tensors)
    with pytest.raises(ModelError, match=named):
        load_model(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path, number: float, dtype: torch.dtype):
    """In a tensor of its own, in one expert's part of a larger one, and read as masters."""
    make_checkpoint(tmp_path / "dense", dtype=dtype)
    norm = torch.ones(48, dtype=dtype)
    norm[47] = number
    change(tmp_path / "dense", **{NORM: norm})
    for read in (load_model, read_state):
        with pytest.raises(ModelError, match=r"model\.norm\.weight holds NaN or infinity"):
            read(tmp_path / "dense")
    make_checkpoint(tmp_path / "experts", "qwen3_moe", dtype=dtype)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    up = load_file(tmp_path / "experts" / "model.safetensors")[name]
    up[5, 7] = number
    change(tmp_path / "experts", **{name.replace(".", "__"): up})
    with pytest.raises(ModelError, match=rf"{name} holds NaN or infinity"):
        load_model(tmp_path / "experts")


def test_a_weight_that_the_compute_type_does_not_hold_is_refused_by_name(tmp_path: Path):
    make_checkpoint(tmp_path)
    change(tmp_path, **{NORM: torch.full((48,), 1e5)})
    load_model(tmp_path, dtype="bfloat16")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds NaN or infinity \(as torch\.float16\)"):
        load_model(tmp_path, dtype="float16")


# family -> (its config of multi-token-prediction heads, names of their tensors)
FURTHER = {
    "deepseek_v3": (
        "num_nextn_predict_layers",
        ["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"],
    ),
    "glm_moe_dsa": ("num_nextn_predict_layers", ["model.layers.3.embed_tokens.weight"]),
    "qwen3_5_moe": ("mtp_num_hidden_layers", ["mtp.layers.0.mlp.gate.weight", "mtp.norm.weight"]),
    "nemotron_h": ("num_nextn_predict_layers", ["mtp.layers.0.mixer.gate.weight"]),
}


@pytest.mark.parametrize("family", FURTHER)
@pytest.mark.parametrize("shards", [None, "30KB"])
def test_heads_that_predict_further_tokens_are_left_out_and_kept_in_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, shards: str | None
):
    key, names = FURTHER[family]
    make_checkpoint(tmp_path / "a", family, dtype=torch.bfloat16, max_shard_size=shards)
    wanted, config = load_model(tmp_path / "a").state_dict(), tmp_path / "a" / "config.json"
    assert not caplog.records
    config.write_text(json.dumps({**json.loads(config.read_text()), key: 0}))
    add(tmp_path / "a", {name: torch.randn(3, 2).bfloat16() for name in names})
    with pytest.raises(ModelError, match=f"does not know: {names[0]}"):
        load_model(tmp_path / "a")
    config.write_text(json.dumps({**json.loads(config.read_text()), key: 1}))
    model = load_model(tmp_path / "a")
    assert f"multi-token-prediction heads are left out: {', '.join(sorted(names))}" in caplog.text
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())
    save_model(load_model(tmp_path / "a", dtype="bfloat16"), tmp_path / "b")
    assert files(tmp_path / "b") == files(tmp_path / "a")
    save_model(
        {name: tensor.float() + 1 for name, tensor in read_state(tmp_path / "a").items()},
        tmp_path / "a",
        tmp_path / "a",
    )
    again = load_model(tmp_path / "a").state_dict()
    assert all(torch.equal(again[name], tensor + 1) for name, tensor in wanted.items())
    for name in names:  # as they were, beside weights of another type
        before, after = (StoredWeights.open(tmp_path / folder).read([name]) for folder in "ba")
        assert [tensor.tolist() for _, tensor in before] == [tensor.tolist() for _, tensor in after]


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """To the only file, or as one more shard."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        change(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
        return
    save_file(tensors, folder / "model-further.safetensors", metadata={"format": "pt"})
    placed = json.loads(index.read_text())
    placed["weight_map"].update(dict.fromkeys(tensors, "model-further.safetensors"))
    placed["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps(placed))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_shared_experts(tmp_path: Path):
    """transformers stores tensors without numbers for them; rlloop has none, and writes what was there."""
    theirs = make_checkpoint(tmp_path / "a", "deepseek_v3", n_shared_experts=0)
    model = load_model(tmp_path / "a")
    assert not [name for name, _ in model.named_parameters() if "shared" in name]
    ids = list(range(3, 60))
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (token_logprobs(model, [(ids[:1], ids[1:])])[0] - wanted).abs().max() < 3e-5
    save_model(model, tmp_path / "b")
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_weights_that_are_missing_damaged_or_misplaced(tmp_path: Path):
    make_checkpoint(tmp_path / "whole", max_shard_size="30KB")
    shards = sorted((tmp_path / "whole").glob("*.safetensors"))

    def copy(name: str) -> Path:
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        return tmp_path / name

    missing = copy("missing")
    (missing / shards[1].name).unlink()
    with pytest.raises(ModelError, match=f"{shards[1].name} cannot be read"):
        load_model(missing)
    cut = copy("cut")
    (cut / shards[0].name).write_bytes(shards[0].read_bytes()[:-4])
    with pytest.raises(ModelError, match=f"{shards[0].name} cannot be read"):
        load_model(cut)
    twice = copy("twice")
    save_file({**load_file(shards[0]), **load_file(shards[1])}, twice / shards[1].name)
    with pytest.raises(ModelError, match=r"index\.json and the shards disagree about"):
        load_model(twice)
    for index in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'):
        (twice / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelError, match=r"index\.json has no weight_map"):
            load_model(twice)
    bare = copy("bare")
    (bare / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_model(bare)


def test_what_cannot_be_saved(tmp_path: Path):
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "shards", max_shard_size="30KB")
    model = load_model(tmp_path / "a")
    with pytest.raises(ModelError, match="already holds other weights"):
        save_model(model, tmp_path / "shards")
    state = model.state_dict()
    with pytest.raises(ModelError, match="give source_path or config"):
        save_model(state, tmp_path / "b")
    with pytest.raises(ModelError, match=r"the state to save lacks .*model\.norm\.weight"):
        save_model({k: v for k, v in state.items() if k != "model.norm.weight"}, tmp_path / "b", tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_types_and_devices_that_cannot_be_used(tmp_path: Path):
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be one of float32, bfloat16"):
        load_model(tmp_path, dtype="int8")
    for profile in (None, NumericsProfile(linear="reference")):
        with pytest.raises(ConfigError, match=r"dtype is float64, and the profile's kernels of .*rms_norm.*reference"):
            load_model(tmp_path, dtype="float64", profile=profile)
    for device in ("gpu", "mps", "meta"):
        with pytest.raises(ConfigError, match=f"device is '{device}'; it must be cpu or cuda"):
            load_model(tmp_path, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is 'cuda'"):
            load_model(tmp_path, device="cuda")


def test_a_gpu_other_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name in ("cuda", "cuda:1", torch.device("cuda", 1)):
        assert weights.usable_device(name) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"device is 'cuda:0', and kernels run on the current one, cuda:1; .*VISIBLE"):
        weights.usable_device("cuda:0")


@pytest.mark.parametrize(("family", "named"), [("nemotron_h", "recurrent layers"), ("gpt_oss", "attention sinks")])
def test_what_a_device_has_no_kernels_for_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, named: str
):
    make_checkpoint(tmp_path, family)
    monkeypatch.setattr(weights, "backend_of", lambda device_type: Backend("", (), frozenset({RECURRENT, SINKS})))
    with pytest.raises(ConfigError, match=f"ForCausalLM has {named}, which the kernels of cpu lack"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", EVERY)
def test_a_new_model_is_its_seeds_and_what_transformers_reads(tmp_path: Path, family: str):
    make_checkpoint(tmp_path / "config", family, initializer_range=0.05)
    config = json.loads((tmp_path / "config" / "config.json").read_text())
    model, same, other = (new_model(config, seed) for seed in (7, 7, 8))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        if name.endswith("bias") and not name.endswith("dt_bias"):
            assert (parameter == 0).all()
        elif parameter.ndim >= 2 or name.endswith("sinks"):
            assert not torch.equal(parameter, other.get_parameter(name))
            assert parameter.numel() < 300 or parameter.std().item() == pytest.approx(0.05, rel=0.15)
        elif name.endswith("A_log"):
            assert torch.equal(parameter.exp().round(), torch.arange(1.0, len(parameter) + 1))
        else:
            centred = family == "qwen3_5_moe" and "norm" in name and "linear_attn" not in name
            assert (parameter == (0 if centred else 1)).all()
    assert model.source_path is None
    save_model(model, tmp_path / "new")
    theirs = by_our_names(AutoModelForCausalLM.from_pretrained(tmp_path / "new").state_dict())
    assert len(theirs) == len(model.state_dict()) + (model.lm_head is None)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())
    again = load_model(tmp_path / "new")
    assert again.config.rope == model.config.rope
    assert again.eos_token_ids == (2,)
