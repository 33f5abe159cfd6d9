"""`rlloop doctor --model --gpus`: what it counts is what ranks hold."""

import pytest
import torch

from rlloop.cli.main import main
from rlloop.config.model import LoraSection
from rlloop.config.run import RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.make import with_lora
from rlloop.models import load_model, new_model, save_model
from rlloop.models.config import read_config
from rlloop.models.parameters import ParameterStore
from rlloop.models.row_blocks import ROWS
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer import Trainer
from rlloop.training.memory import GIB, UPDATES, layouts, predict
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import make_image_checkpoint
from tests.support.ranks import run_ranks
from tests.support.tiny_run import make_model

CPU = torch.device("cpu")
LAYOUTS = [Layout(dp_shard=2), Layout(tp=2)]
UNEVEN = [Layout(dp_shard=3), Layout(dp_shard=3, ep=3), Layout(tp=3)]  # of 5 experts and 5 heads
ADAPTED = [Layout(dp_shard=2), Layout(tp=2), Layout(dp_shard=2, ep=2)]
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 160, "hidden_size": 32,
    "intermediate_size": 64, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip


def held(folder, layouts):
    """Bytes of the compute copy and of the masters, under each layout."""
    found = []
    for layout in layouts:
        model = load_model(folder, dtype="bfloat16", context=join(CPU, layout))
        masters = Trainer(model, TrainerConfig()).masters.values()
        copy = sum(each.numel() * each.element_size() for each in model.parameters())
        found.append((copy, sum(each.numel() * each.element_size() for each in masters)))
    return found


def test_predicted_weights_and_masters_are_those_of_ranks(tmp_path):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    ranks = run_ranks(2, held, tmp_path / "model", LAYOUTS)
    for index, layout in enumerate(LAYOUTS):
        parts = predict(config, layout, torch.bfloat16, 64).parts
        most = [max(rank[index][part] for rank in ranks) for part in (0, 1)]
        assert parts["compute copy"] == most[0]
        assert most[1] <= parts["masters"] <= 1.05 * most[1]
        assert parts["optimizer"] == 2 * parts["masters"]


def held_in_pieces(folder, layout):
    """Bytes of the compute copy between uses of its layers, of its largest layer whole, and of an engine's weights."""
    model = load_model(folder, dtype="bfloat16", context=join(CPU, layout))
    layers = [sum(each.numel() for each in layer.parameters()) for layer in model.model.layers.children()]
    engine = sum(each.numel() for each in model.parameters())
    sharded = Trainer(model, TrainerConfig(shard="parameters")).sharded
    assert sharded is not None
    assert sharded.layers is not None
    rows = [sharded.layers.rows(name) for name in sharded.tensors]
    pieces = sum(each.numel() for each in rows if each is not None)
    whole = sum(each.numel() for name, each in model.named_parameters() if not name.startswith("model.layers."))
    return 2 * (pieces + whole), 2 * max(layers), 2 * engine


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_shard=2, ep=2)], ids=["dp_shard", "ep"])
def test_layers_of_which_ranks_keep_rows_are_predicted(layout, tmp_path):
    save_model(new_model({**EXPERTS, "num_hidden_layers": 3}, seed=0), tmp_path / "model")
    config = read_config(tmp_path / "model")
    parts = predict(config, layout, torch.bfloat16, 64, pieces=True).parts
    copy, layer, engine = map(max, zip(*run_ranks(2, held_in_pieces, tmp_path / "model", layout), strict=True))
    assert copy <= parts["compute copy"] <= 1.01 * copy
    assert parts["layers"] == 2 * layer
    assert parts["engine"] == engine
    whole = predict(config, layout, torch.bfloat16, 64).parts
    assert parts["compute copy"] < whole["compute copy"] == engine
    assert {name: parts[name] for name in whole if name != "compute copy"} == {
        name: size for name, size in whole.items() if name != "compute copy"
    }


def test_ranks_with_the_larger_shares_are_predicted(tmp_path):
    config = {**EXPERTS, "num_experts": 5, "num_attention_heads": 5, "num_key_value_heads": 5, "num_hidden_layers": 1}
    save_model(new_model(config, seed=0), tmp_path / "model")
    ranks = run_ranks(3, held, tmp_path / "model", UNEVEN)
    for index, layout in enumerate(UNEVEN):
        parts = predict(read_config(tmp_path / "model"), layout, torch.bfloat16, 64).parts
        copy, masters = (max(rank[index][part] for rank in ranks) for part in (0, 1))
        assert parts["compute copy"] == copy, layout
        assert masters <= parts["masters"] <= 1.05 * masters, layout


def held_adapters(folder):
    """Bytes of the adapter's factors and of their masters, under each layout."""
    found = []
    for layout in ADAPTED:
        model = with_lora(load_model(folder, dtype="bfloat16", context=join(CPU, layout)), LoraSection(rank=4), 0)
        masters = Trainer(model, TrainerConfig()).masters.values()
        live = [entry.live for entry in ParameterStore(model).entries.values() if entry.live.requires_grad]
        found.append([sum(each.numel() * each.element_size() for each in some) for some in (live, masters)])
    return found


def test_predicted_adapters_are_those_of_ranks(tmp_path):
    save_model(new_model(EXPERTS, seed=0), tmp_path / "model")
    ranks = run_ranks(2, held_adapters, tmp_path / "model")
    for index, layout in enumerate(ADAPTED):
        parts = predict(read_config(tmp_path / "model"), layout, torch.bfloat16, 64, lora=4).parts
        live, masters = (max(rank[index][part] for rank in ranks) for part in (0, 1))
        assert parts["adapter"] == live
        assert masters <= parts["masters"] <= 1.05 * masters


def test_layouts_that_fit_are_named(tmp_path, capsys):
    make_model(tmp_path)
    folder = str(tmp_path / "model")
    assert main(["doctor", "--model", folder, "--gpus", "2", "--memory", "8"]) == 0
    printed = capsys.readouterr().out
    assert "ok  dp_shard=2: " in printed
    assert "ok  tp=2: " in printed
    assert "compute copy" in printed
    assert "trainer.encode_on_device=false" in printed
    assert main(["doctor", "--model", folder, "--gpus", "2", "--memory", "1"]) == 1
    assert "--  fits: no layout does" in capsys.readouterr().out


def test_the_command_has_the_settings_that_the_prediction_assumes(tmp_path, capsys):
    make_model(tmp_path)
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--memory", "8", "--tokens", "512"]

    def command(*more: str) -> tuple[str, RunConfig]:
        assert main([*arguments, *more]) == 0
        [line] = [each for each in capsys.readouterr().out.splitlines() if "start: " in each]
        start, _, keys = line.strip().removeprefix("start: ").partition(" ... ")
        return start, build(compose_recipe("random", keys.split()))

    start, config = command("--gpus", "2", "--rollout-layout")
    assert (start, config.layouts) == (
        "torchrun --nproc-per-node 2 -m rlloop train", (Layout(dp_shard=2), Layout()),
    )  # fmt: skip
    assert (config.device, config.model.dtype, config.model.lora.rank) == ("cuda", "bfloat16", 0)
    trainer = config.trainer
    assert (trainer.max_batch_tokens, trainer.checkpoint_layers, trainer.offload) == (512, "all", "none")
    kept = ["--keep-attention", "--offload-activations"]
    _, config = command("--gpus", "2", "--shard", "parameters")
    assert (config.trainer.shard, config.layouts[0]) == ("parameters", Layout(dp_shard=2))
    start, config = command("--gpus", "1", "--offload", "moments", "--lora", "4", *kept)
    trainer = config.trainer
    assert (start, config.model.lora.rank, trainer.offload) == ("rlloop train", 4, "moments")
    assert trainer.checkpoint_keep_attention
    assert trainer.checkpoint_offload
    assert main([*arguments, "--gpus", "2", "--shard", "parameters", "--lora", "4"]) == 2
    assert "--shard parameters: weights that are frozen under an adapter stay whole" in capsys.readouterr().err


def test_tokens_that_no_rank_can_hold_alone_are_split(tmp_path, capsys):
    make_model(tmp_path)
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "2", "--memory", "6"]
    assert main([*arguments, "--tokens", str(1 << 22)]) == 0
    printed = capsys.readouterr().out
    assert "ok  cp=2: " in printed
    assert "dp_shard=2: " not in printed
    [alone, split] = [
        predict(read_config(tmp_path / "model"), each, torch.bfloat16, 1 << 22)
        for each in (Layout(dp_shard=2), Layout(cp=2))
    ]
    assert split.parts["kept"] == alone.parts["kept"] // 2
    assert split.parts["activations"] < 0.6 * alone.parts["activations"]  # a block of rows stays as it is


def test_offloaded_parts_are_counted_in_host_memory(tmp_path, capsys):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    here = predict(config, Layout(), torch.bfloat16, 64).parts
    moments, masters = (predict(config, Layout(), torch.bfloat16, 64, offload) for offload in ("moments", "masters"))
    assert moments.host == here["optimizer"]
    assert masters.host == here["optimizer"] + here["masters"]
    assert "masters" in moments.parts
    assert "masters" not in masters.parts
    trainer = Trainer(load_model(tmp_path / "model", dtype="bfloat16"), TrainerConfig(offload="masters"))
    held = trainer._optimizer.measured()["memory/host_bytes"]
    assert masters.host <= held <= 1.05 * masters.host
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "1", "--memory", "8", "--offload", "masters"]
    assert main(arguments) == 0
    assert "in host memory" in capsys.readouterr().out
    assert main([*arguments, "--dtype", "float32"]) == 2
    assert "set trainer.offload=moments" in capsys.readouterr().err


def test_activations_that_wait_on_the_host(tmp_path, capsys):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    here = predict(config, Layout(), torch.bfloat16, 64, keep_attention=True)
    moved = predict(config, Layout(), torch.bfloat16, 64, keep_attention=True, offload_activations=True)
    assert moved.host == here.parts["kept"] + here.parts["attention"]
    for part in ("kept", "attention"):  # of the layer that is made again
        assert moved.parts[part] * config.num_layers == here.parts[part]
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "1", "--memory", "8", "--offload-activations"]
    assert main(arguments) == 0
    assert "trainer.checkpoint_offload=true: what is kept of a micro-batch's layers" in capsys.readouterr().out


def test_of_a_cache_that_sleeps_and_of_an_update_the_larger_counts(tmp_path, capsys):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    for tokens in (64, 1 << 22):
        both, turns = (predict(config, Layout(), torch.bfloat16, tokens, sleeps=sleeps) for sleeps in (False, True))
        assert both.parts == turns.parts
        update = sum(both.parts.get(name, 0) for name in UPDATES)
        engine = both.parts["cache"]
        assert (update > engine) == (tokens > 64)
        assert turns.total == both.total - min(update, engine) < both.total
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "1", "--memory"]
    assert main([*arguments, "8"]) == 0
    assert f"one rank: {predict(config, Layout(), torch.bfloat16, 16384, sleeps=True).total / GIB:.1f}" in (
        printed := capsys.readouterr().out
    )
    assert "rollout.sleep: the engine gives its cache back while the trainer works" in printed


def test_inner_activations_of_a_long_sequence_are_those_of_a_block_of_rows(tmp_path):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    one, two, three, four = (
        predict(config, Layout(), torch.bfloat16, blocks * ROWS).parts["activations"] for blocks in (1, 2, 3, 4)
    )
    assert four - three == three - two
    assert four - three < one - ROWS * 2 * 4 * config.intermediate_size


def test_every_layout_has_the_ranks_asked_for(tmp_path):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    assert {layout.world_size for layout in layouts(config, 4)} == {4}
    assert Layout(tp=4) not in layouts(config, 4), "the model has two heads"


@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h", "glm_moe_dsa", "qwen3_vl"])
def test_every_family_has_layouts_of_each_axis(family, tmp_path):
    """Recurrent layers, an indexer, a vision tower: and each is predicted."""
    (make_image_checkpoint if family == "qwen3_vl" else make_checkpoint)(tmp_path, family)
    config = read_config(tmp_path)
    found = list(layouts(config, 2, splits_sequences=True))
    for layout in (Layout(dp_shard=2), Layout(cp=2), Layout(tp=2)):
        assert layout in found
        whole, split = (predict(config, each, torch.bfloat16, 64).parts for each in (Layout(), layout))
        assert split["compute copy"] <= whole["compute copy"]
        assert split["optimizer"] < whole["optimizer"] or layout.cp == 2


def test_a_frozen_tower_has_no_masters(tmp_path, capsys):
    make_image_checkpoint(tmp_path)
    trainer = Trainer(load_model(tmp_path, dtype="bfloat16"), TrainerConfig(freeze_vision_tower=True))
    masters = sum(each.nbytes for each in trainer.masters.values())
    trained, frozen = (
        predict(read_config(tmp_path), Layout(), torch.bfloat16, 64, freeze_tower=freezes).parts
        for freezes in (False, True)
    )
    assert frozen["masters"] == masters < trained["masters"]
    assert frozen["optimizer"] == 2 * masters
    assert frozen["compute copy"] == trained["compute copy"]
    make_model(tmp_path)
    arguments = ["doctor", "--gpus", "1", "--memory", "8", "--freeze-vision-tower", "--model"]
    assert main([*arguments, str(tmp_path)]) == 0
    assert main([*arguments, str(tmp_path / "model")]) == 2
    assert "has no vision tower; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--gpus", "2"], ["--model", "."]])
def test_model_and_gpus_belong_together(given, capsys):
    assert main(["doctor", *given]) == 2
    assert "--model and --gpus belong together" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["0", "-80", "nan"])
def test_memory_is_a_positive_number(memory, tmp_path, capsys):
    assert main(["doctor", "--model", str(tmp_path), "--gpus", "2", f"--memory={memory}"]) == 2
    assert f"--memory is {memory}; it must be a positive number of GiB" in capsys.readouterr().err


def test_fewer_micro_batches_have_fewer_sums(tmp_path, capsys):
    make_model(tmp_path)
    folder, config = str(tmp_path / "model"), read_config(tmp_path / "model")
    arguments = ["doctor", "--model", folder, "--gpus", "1", "--memory", "30", "--tokens", str(1 << 20)]
    one, eight = (
        predict(config, Layout(), torch.bfloat16, 1 << 20, sleeps=True, micro_batches=count) for count in (1, 8)
    )
    assert one.parts["gradients"] < eight.parts["gradients"]
    assert main([*arguments, "--micro-batches", "1"]) == 0
    assert "up to 1 an update" in (printed := capsys.readouterr().out)
    assert f"ok  one rank: {one.total / GIB:.1f}: {one.describe()}" in printed
    assert main([*arguments, "--micro-batches", "0"]) == 2
    assert "--micro-batches is 0; it must be from 1 to 4096" in capsys.readouterr().err
