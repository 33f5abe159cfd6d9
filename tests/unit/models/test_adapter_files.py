"""PEFT folders: what is read, written and refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlloop import load_model, token_logprobs
from rlloop.models import save_model
from rlloop.models.adapter_files import CONFIG, WEIGHTS, load_adapter, read_adapter, save_adapter, save_merged
from rlloop.models.adapter_weights import AdapterWeights
from tests.support.adapters import random_adapter
from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.image_models import make_image_checkpoint
from tests.support.kimi_models import make_kimi_checkpoint
from tests.support.tiny_models import tiny_qwen3

PROMPT, COMPLETION = list(range(3, 30)), list(range(40, 60))
ALL = ("all-linear", "lm_head")


@pytest.fixture
def model(tmp_path):
    save_model(tiny_qwen3(), tmp_path / "base")
    return load_model(tmp_path / "base")


@pytest.fixture
def folder(tmp_path, model):
    save_adapter(model, random_adapter(model, 0), tmp_path / "adapter")
    return tmp_path / "adapter"


def change(folder, **entries):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **entries}))


def rewrite(folder, edit, metadata=None):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file(edit(tensors), folder / WEIGHTS, metadata=metadata or {"format": "pt"})


@pytest.mark.parametrize("family", EVERY)
def test_what_is_written_is_read_again(tmp_path, family):
    make_checkpoint(tmp_path / "base", family)
    model = load_model(tmp_path / "base")
    weights = random_adapter(model, 0, targets=ALL)
    save_adapter(model, weights, tmp_path / "adapter")
    again = read_adapter(model, tmp_path / "adapter")
    assert again.factors.keys() == weights.factors.keys()
    assert (again.rank, again.alpha, again.scales) == (weights.rank, weights.alpha, weights.scales)
    for name, pair in weights.factors.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, again.factors[name], strict=True)), name


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"lora_dropout": 0.1}, "asks for dropout"),
        ({"use_dora": True}, "asks for DoRA"),
        ({"bias": "all"}, "asks for trained biases"),
        ({"modules_to_save": ["lm_head"]}, "asks for modules_to_save"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"r": 5}, "has rank 4; adapter_config.json says 5"),
        ({"r": 2}, "has rank 4; adapter_config.json says 2"),
        ({"r": 4.0}, "r is 4.0; it must be a whole number above 0"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"rank_pattern": [4]}, r"rank_pattern is \[4\]; it must be an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern of 'q_proj' is '8'"),
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern names '\\(', no regular expression"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"init_lora_weights": "pissa_niter_4"}, "with which PEFT changes the base"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(model, folder, entries, message):
    change(folder, **entries)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder, "a")
    assert "a" not in model.adapters


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: {**t, f"{Q}A.weight": t[f"{Q}A.weight"][:, :-1].contiguous()}, r"A of .*q_proj has shape \[4, 47\]"),
        (lambda t: {**t, f"{Q}B.weight": t[f"{Q}B.weight"][:-1].contiguous()}, r"B of .*q_proj has shape \[63, 4\]"),
        (lambda t: {**t, f"{Q}B.weight": t[f"{Q}B.weight"] * math.nan}, "B of .*q_proj holds NaN"),
        (lambda t: {**t, f"{Q}A.weight": t[f"{Q}A.weight"] * math.inf}, "A of .*q_proj holds NaN or infinity"),
        (lambda t: {name: x for name, x in t.items() if name != f"{Q}A.weight"}, "B without A, of .*q_proj"),
        (lambda t: {**t, "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 48),
                    "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.ones(80, 4)}, "layers.9"),
        (lambda t: {**t, "base_model.model.model.norm.weight": torch.ones(48)}, "neither A nor B"),
        (lambda t: {**t, f"{Q}A.weight": torch.ones(4, 48, dtype=torch.int8)}, "has type torch.int8"),
        (lambda t: {**t, f"{Q}B.weight": torch.tensor(1.0)}, r"has shape \[\]; A and B are matrices"),
        (lambda t: {**t, f"{Q}A.default.weight": t[f"{Q}A.weight"].clone()}, "holds A of .*q_proj twice"),
        (lambda t: {**t, "base_model.model.model.embed_tokens.weight": torch.ones(300, 48)}, "trained or resized"),
        (lambda t: {}, "has no factors"),
    ],
)  # fmt: skip
def test_factors_that_do_not_fit(model, folder, edit, message):
    rewrite(folder, edit)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder, "a")
    assert "a" not in model.adapters


def test_an_adapter_of_another_base_and_files_that_are_not_there(tmp_path, model, folder):
    other = tiny_qwen3()
    with torch.no_grad():
        other.model.norm.weight.add_(0.01)
    with pytest.raises(ValueError, match="is an adapter of another base"):
        load_adapter(other, folder, "a")
    rewrite(folder, dict)  # without a digest, as others write it
    load_adapter(other, folder, "a")
    (folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        load_adapter(model, folder, "a")
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        load_adapter(model, tmp_path, "a")


def logprobs(model, adapter):
    return token_logprobs(model, [(PROMPT, COMPLETION)], adapter=adapter)[0]


def test_three_layouts_of_experts_are_one_adapter(tmp_path):
    make_checkpoint(tmp_path / "base", "qwen3_moe")
    model = load_model(tmp_path / "base")
    weights = random_adapter(model, 0, targets=("experts",))
    save_adapter(model, weights, tmp_path / "flat")
    single, cubes = {}, {}
    for name, (down, up) in weights.factors.items():
        experts = f"base_model.model.{name.rsplit('.', 1)[0]}"
        parts = {"gate_proj": up[:, :24], "up_proj": up[:, 24:]} if "gate_up" in name else {"down_proj": up}
        for part, rows in parts.items():
            tinker = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
            cubes |= {f"{experts}.{tinker}.lora_A.weight": down, f"{experts}.{tinker}.lora_B.weight": rows}
            for expert in range(len(down)):
                single[f"{experts}.{expert}.{part}.lora_A.weight"] = down[expert]
                single[f"{experts}.{expert}.{part}.lora_B.weight"] = rows[expert]
    for layout, tensors in (("single", single), ("cubes", cubes)):
        (tmp_path / layout).mkdir()
        (tmp_path / layout / CONFIG).write_bytes((tmp_path / "flat" / CONFIG).read_bytes())
        save_file({key: x.contiguous().clone() for key, x in tensors.items()}, tmp_path / layout / WEIGHTS)
    for layout in ("flat", "single", "cubes"):
        load_adapter(model, tmp_path / layout, layout)
    flat = logprobs(model, "flat")
    assert not torch.equal(flat, logprobs(model, None))
    assert torch.equal(flat, logprobs(model, "single"))
    assert torch.equal(flat, logprobs(model, "cubes"))
    # a gate and an up of different A, and one A that all experts share
    key = next(key for key in cubes if key.endswith("w1.lora_A.weight"))
    changed = {**cubes, key: cubes[key] * 0.5, key.replace("_A", "_B"): cubes[key.replace("_A", "_B")] * 2}
    other = next(key for key in cubes if key.endswith("layers.1.mlp.experts.w2.lora_A.weight"))
    (tmp_path / CONFIG).write_bytes((tmp_path / "flat" / CONFIG).read_bytes())
    save_file({name: x.contiguous().clone() for name, x in changed.items()}, tmp_path / WEIGHTS)
    load_adapter(model, tmp_path, "apart")
    assert torch.equal(flat, logprobs(model, "apart"))  # halves and doubles are exact
    save_file(
        {name: x.contiguous().clone() for name, x in {**cubes, other: cubes[other][:1]}.items()}, tmp_path / WEIGHTS
    )
    load_adapter(model, tmp_path, "shared")
    assert not torch.equal(flat, logprobs(model, "shared"))


def test_a_gate_and_an_up_of_different_a_keep_their_scale_when_written(tmp_path):
    make_checkpoint(tmp_path / "base", "qwen3_moe")
    model = load_model(tmp_path / "base")
    tensors = {
        f"base_model.model.model.layers.0.mlp.experts.0.{part}.lora_{letter}.weight": torch.randn(shape)
        for part in ("gate_proj", "up_proj") for letter, shape in (("A", (3, 48)), ("B", (24, 3)))
    }  # fmt: skip
    (tmp_path / CONFIG).write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    save_file(tensors, tmp_path / WEIGHTS)
    weights = read_adapter(model, tmp_path)
    save_adapter(model, weights, tmp_path / "written")
    (name,) = weights.factors
    assert weights.rank_of(name) == 6
    assert read_adapter(model, tmp_path / "written").scales == weights.scales == {name: 2.0}
    change(tmp_path, alpha_pattern={"gate_proj": 3})
    with pytest.raises(ValueError, match=r"several scales \(alpha / rank, 1, 2\)"):
        read_adapter(model, tmp_path)


def test_factors_of_some_experts_only_are_refused_in_three_dimensions(tmp_path):
    make_checkpoint(tmp_path / "base", "qwen3_moe")
    (tmp_path / CONFIG).write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    experts = "base_model.model.model.layers.0.mlp.experts.w2"
    save_file(
        {f"{experts}.lora_A.weight": torch.ones(5, 3, 24), f"{experts}.lora_B.weight": torch.ones(8, 48, 3)},
        tmp_path / WEIGHTS,
    )
    with pytest.raises(ValueError, match="the first of them 8, or 1 for all"):
        read_adapter(load_model(tmp_path / "base"), tmp_path)


def test_experts_as_wide_as_they_are_long(tmp_path):
    """Without gates, ups and downs have one shape then."""
    make_checkpoint(tmp_path / "base", "nemotron_h", moe_latent_size=24)
    model = load_model(tmp_path / "base")
    weights = random_adapter(model, 0, targets=("experts",))
    for kinds in (("up_proj", "down_proj"), ("up_proj",), ("down_proj",)):
        some = {name: pair for name, pair in weights.factors.items() if name.endswith(kinds)}
        written = AdapterWeights(some, weights.scales, weights.rank, weights.alpha)
        save_adapter(model, written, tmp_path / "-".join(kinds))
        again = read_adapter(model, tmp_path / "-".join(kinds)).factors
        assert again.keys() == some.keys()
        assert all(torch.equal(a, b) for name in some for a, b in zip(some[name], again[name], strict=True))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_merged_model_agrees_to_rounding_and_says_that_it_is_another(tmp_path, family):
    make_checkpoint(tmp_path / "base", family)
    model = load_model(tmp_path / "base")
    weights = random_adapter(model, 0)
    save_adapter(model, weights, tmp_path / "adapter")
    load_adapter(model, tmp_path / "adapter", "a")
    save_merged(model, weights, tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    assert "merged_adapter" in json.loads((tmp_path / "merged" / "config.json").read_text())
    torch.testing.assert_close(logprobs(model, "a"), logprobs(merged, None), rtol=1e-4, atol=1e-4)
    assert (logprobs(model, "a") - logprobs(model, None)).abs().max() > 0.05


def varied(weights):
    """Other ranks and scales for some modules."""
    factors = {
        name: (down[..., :2, :], up[..., :2]) if index % 3 == 0 else (down, up)
        for index, (name, (down, up)) in enumerate(weights.factors.items())
    }
    scales = {name: scale * (1 + index % 2) for index, (name, scale) in enumerate(weights.scales.items())}
    return AdapterWeights(factors, scales, weights.rank, weights.alpha)


PEFT = ("qwen3", "qwen3_moe", "deepseek_v3", "minimax_m2", "nemotron_h")


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("family", [*PEFT, "qwen3_vl_moe", "kimi_k25"])
def test_peft_loads_what_is_written_and_agrees_to_rounding(tmp_path, family):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    if family == "kimi_k25":
        make_kimi_checkpoint(tmp_path / "base")
    else:
        (make_image_checkpoint if family == "qwen3_vl_moe" else make_checkpoint)(tmp_path / "base", family)
    model = load_model(tmp_path / "base")
    targets = [name for name in model.adapter_targets() if not name.endswith("out_proj")]  # PEFT refuses Mamba's
    save_adapter(model, varied(random_adapter(model, 0, targets=tuple(targets))), tmp_path / "adapter")
    load_adapter(model, tmp_path / "adapter", "a")
    auto = transformers.AutoModelForImageTextToText if family not in PEFT else transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "base", experts_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = theirs(torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(COMPLETION)[:, None])[:, 0]
    torch.testing.assert_close(logprobs(model, "a"), expected, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    assert load_adapter(model, tmp_path / "theirs", "b") == 1
    assert torch.equal(logprobs(model, "a"), logprobs(model, "b"))
