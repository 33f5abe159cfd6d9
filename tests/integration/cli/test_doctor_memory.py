"""`rlloop doctor --model --gpus`: what it counts is what ranks hold."""

import pytest
import torch

from rlloop.cli.main import main
from rlloop.config.trainer import TrainerConfig
from rlloop.models import load_model
from rlloop.models.config import read_config
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer import Trainer
from rlloop.training.memory import layouts, predict
from tests.support.ranks import run_ranks
from tests.support.tiny_run import make_model

CPU = torch.device("cpu")
LAYOUTS = [Layout(dp_shard=2), Layout(tp=2)]


def held(folder):
    """Bytes of the compute copy and of the masters, under each layout."""
    found = []
    for layout in LAYOUTS:
        model = load_model(folder, dtype="bfloat16", context=join(CPU, layout))
        masters = Trainer(model, TrainerConfig()).masters.values()
        copy = sum(each.numel() * each.element_size() for each in model.parameters())
        found.append((copy, sum(each.numel() * each.element_size() for each in masters)))
    return found


def test_predicted_weights_and_masters_are_those_of_ranks(tmp_path):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    ranks = run_ranks(2, held, tmp_path / "model")
    for index, layout in enumerate(LAYOUTS):
        parts = predict(config, layout, torch.bfloat16, 64).parts
        most = [max(rank[index][part] for rank in ranks) for part in (0, 1)]
        assert parts["compute copy"] == most[0]
        assert most[1] <= parts["masters"] <= 1.05 * most[1]
        assert parts["optimizer"] == 2 * parts["masters"]


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


def test_every_layout_has_the_ranks_asked_for(tmp_path):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    assert {layout.world_size for layout in layouts(config, 4)} == {4}
    assert Layout(tp=4) not in layouts(config, 4), "the model has two heads"


@pytest.mark.parametrize("given", [["--gpus", "2"], ["--model", "."]])
def test_model_and_gpus_belong_together(given, capsys):
    assert main(["doctor", *given]) == 2
    assert "--model and --gpus belong together" in capsys.readouterr().err
