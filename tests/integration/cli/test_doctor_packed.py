"""`rlloop doctor --model --gpus` for folders of packed weights: bytes are those that ranks hold."""

from pathlib import Path

import pytest
import torch

from rlloop.cli.main import main
from rlloop.models import Model, load_model
from rlloop.models.config import read_config
from rlloop.models.weight_reader import packed_parameters
from rlloop.numerics.packed import PackedWeight
from rlloop.parallel.layout import Layout
from rlloop.training.memory import predict
from tests.support.packed_models import FORMATS, make_packed, make_packed_images
from tests.support.rank_models import beside
from tests.support.ranks import run_ranks

# Of trainer and engine; without experts, that which divides them is left out.
PAIRS = [(Layout(tp=2), Layout()), (Layout(dp_shard=2, ep=2), Layout(tp=2)), (Layout(pp=2), Layout(tp=2))]
DENSE = ("nvfp4", "fp8_tensor_dense", "fp8_rows")


def held(*models: Model) -> int:
    """Bytes of the last model's weights that the others do not hold."""
    *others, last = ({x.untyped_storage().data_ptr(): x.nbytes for x in stored(model)} for model in models)
    return sum(size for at, size in last.items() if not any(at in other for other in others))


def stored(model: Model) -> list[torch.Tensor]:
    packed = [each for each in model.parameters() if isinstance(each, PackedWeight)]
    plain = [each for each in model.parameters() if not isinstance(each, PackedWeight)]
    return plain + [x for each in packed for x in (each.codes, each.scales, each.tensor_scale) if x is not None]


def pairs(kind: str) -> list[tuple[Layout, Layout]]:
    return [each for each in PAIRS if kind not in DENSE or each[0].ep == 1]


def of_rank(folders: dict[str, Path]) -> dict[str, list[tuple[int, int]]]:
    """Bytes of the trainer's weights, and of those that its engine has beside them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for kind, folder in folders.items():
        for trainer, engine in pairs(kind):
            model, sampled = beside(folder, trainer, engine)
            found.setdefault(kind, []).append((held(model), held(model, sampled)))
    return found


def predicted(folder: Path, layout: Layout, engine: Layout | None = None) -> dict[str, int]:
    config = read_config(folder)
    packed = packed_parameters(config, folder)
    return predict(config, layout, torch.bfloat16, 64, engine=engine, packed=packed).parts


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {kind: make_packed(tmp_path_factory.mktemp(kind), kind)[0] for kind in FORMATS}
    return {**made, "images": make_packed_images(tmp_path_factory.mktemp("images"), "qwen3_5_moe", "fp8")[0]}


def test_a_whole_models_weights_are_counted_as_they_are_held(folders):
    for kind, folder in folders.items():
        model = load_model(folder, dtype="bfloat16")
        parts = predicted(folder, Layout())
        assert parts["compute copy"] == held(model), kind
        plain = predict(read_config(folder), Layout(), torch.bfloat16, 64).parts
        assert parts["compute copy"] < plain["compute copy"]
        assert "unpacked" not in plain
        assert parts["unpacked"] == 2 * max(x.numel() for x in model.parameters() if isinstance(x, PackedWeight))
        trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
        assert 4 * trained <= parts["masters"] <= 1.01 * 4 * trained  # packed ones do not train, nor routers' biases


def test_parts_of_ranks_and_of_engines_beside_them_are_counted_as_they_are_held(folders):
    ranks = run_ranks(2, of_rank, folders)
    for kind, folder in folders.items():
        for index, (trainer, engine) in enumerate(pairs(kind)):
            parts = predicted(folder, trainer, engine)
            assert (parts["compute copy"], parts["engine"]) in [rank[kind][index] for rank in ranks], (kind, trainer)


def test_the_doctor_counts_them_and_says_where_it_cannot(folders, tmp_path, capsys):
    folder = folders["int4"]
    doctor = ["doctor", "--gpus", "1", "--memory", "8", "--model"]
    assert main([*doctor, str(folder)]) == 2
    assert "has packed weights, which are frozen; add --lora RANK" in capsys.readouterr().err
    assert main([*doctor, str(folder), "--lora", "4"]) == 0
    assert "unpacked 0.0" in (printed := capsys.readouterr().out)
    assert "as if they were plain" not in printed
    assert main(["doctor", "--gpus", "1", "--memory", "1", "--model", str(folder), "--lora", "4"]) == 1
    assert "no layout does; --offload, more GPUs, or a smaller --tokens\n" in capsys.readouterr().out
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert main([*doctor, str(tmp_path), "--lora", "4"]) == 0
    assert "counted as if they were plain, since it is unknown which are" in (printed := capsys.readouterr().out)
    assert "unpacked" not in printed
