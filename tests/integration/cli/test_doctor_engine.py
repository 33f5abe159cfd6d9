"""`rlloop doctor --model --gpus --rollout-layout`: weights that an engine has beside the trainer's."""

import pytest
import torch

from rlloop.cli.main import main
from rlloop.models.config import read_config
from rlloop.parallel.layout import Layout
from rlloop.training.memory import predict
from tests.support.rank_models import beside
from tests.support.ranks import run_ranks
from tests.support.tiny_run import make_model

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
PAIRS = [  # of trainer and engine
    (Layout(pp=2), Layout()),
    (Layout(pp=2), Layout(tp=2)),
    (Layout(pp=2), Layout(pp=2)),
    (Layout(dp_shard=2), Layout(tp=2)),
    (Layout(dp_shard=2), Layout(pp=2)),
    (Layout(tp=2), Layout()),
    (Layout(dp_shard=2, ep=2), Layout(tp=2)),
]


def own(folder):
    """Bytes of the engine's weights that are not the trainer's, for each of `PAIRS`; engines are as in `Colocated`."""
    found = []
    for trainer, engine in PAIRS:
        model, sampled = beside(folder, trainer, engine)
        theirs = {each.untyped_storage().data_ptr() for each in model.parameters()}
        weights = (each for each in sampled.parameters() if each.untyped_storage().data_ptr() not in theirs)
        found.append(sum(each.nbytes for each in weights))
    return found


def test_the_weights_of_an_engines_own_are_those_of_ranks(tmp_path):
    make_model(tmp_path, **EXPERTS)
    config = read_config(tmp_path / "model")
    found = [max(ranks) for ranks in zip(*run_ranks(2, own, tmp_path / "model"), strict=True)]
    predicted = [predict(config, each, torch.bfloat16, 64, engine=engine).parts["engine"] for each, engine in PAIRS]
    assert predicted == found
    whole = predict(config, Layout(), torch.bfloat16, 64).parts
    assert "engine" not in whole
    assert predicted[0] == whole["compute copy"] > predicted[1] > 0
    assert predicted[2] == predicted[4] == 0


def test_they_are_listed_and_the_layout_is_in_the_command(tmp_path, capsys):
    make_model(tmp_path, **EXPERTS)
    doctor = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "2", "--memory", "8"]
    assert main([*doctor, "--rollout-layout", "tp=2"]) == 0
    printed = capsys.readouterr().out
    assert "trainer.layout.dp_shard=2 rollout.layout.tp=2" in printed
    assert printed.count("compute copy 0.0, engine 0.0, masters") >= 3
    assert main([*doctor, "--rollout-layout"]) == 0
    assert "trainer.layout.dp_shard=2\n" in capsys.readouterr().out
    assert main(doctor) == 0
    assert ", engine " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tp=3", "--rollout-layout has 3 ranks, which must divide --gpus (2); give it one of 1, 2"),
        ("heads=2", "--rollout-layout is 'heads=2'; it must be degrees of rollout.layout, such as tp=2"),
        ("tp=two", "--rollout-layout is 'tp=two'"),
        ("cp=2", "an engine does not split sequences"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(given, said, tmp_path, capsys):
    make_model(tmp_path, **EXPERTS)
    doctor = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "2", "--memory", "8"]
    assert main([*doctor, "--rollout-layout", given]) == 2
    assert said in capsys.readouterr().err
