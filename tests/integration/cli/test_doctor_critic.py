"""`rlloop doctor --critic`: what PPO's critic adds is what it holds."""

import torch

from rlloop.cli.main import main
from rlloop.config.algorithm import CriticConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.models import load_model
from rlloop.models.config import read_config
from rlloop.parallel.layout import Layout
from rlloop.trainer.critic import Critic
from rlloop.training.memory import predict
from tests.support.memory_use import Peak
from tests.support.tiny_run import make_model


def test_a_critic_has_weights_masters_and_moments_of_its_own(tmp_path):
    make_model(tmp_path)
    config = read_config(tmp_path / "model")
    critic = Critic(load_model(tmp_path / "model", dtype="bfloat16"), CriticConfig(lr=1e-5), TrainerConfig())
    copy, masters = (
        sum(each.nbytes for each in some) for some in (critic.model.parameters(), critic._masters.tensors.values())
    )
    moments = sum(moment.nbytes for each in critic._optimizer._moments.values() for moment in each.values())
    alone, both = (predict(config, Layout(), torch.bfloat16, 64, critic=has) for has in (False, True))
    assert both.parts["critic"] == copy + masters
    added = both.parts["optimizer"] - alone.parts["optimizer"]
    assert moments - 4 * 8 * len(critic._masters.shards) * 4 <= added <= moments  # ends are filled up to vectors
    assert both.parts["gradients"] == alone.parts["gradients"], "each in its turn"
    adapted, with_critic = (predict(config, Layout(), torch.bfloat16, 64, lora=4, critic=has) for has in (False, True))
    assert alone.parts["gradients"] > with_critic.parts["gradients"] > adapted.parts["gradients"]
    offloaded = predict(config, Layout(), torch.bfloat16, 64, "masters", critic=True)
    assert offloaded.host == both.parts["optimizer"] + both.parts["masters"]
    assert offloaded.parts["critic"] == both.parts["critic"], "its masters stay"


def test_values_take_the_hidden_states_in_float32(tmp_path):
    make_model(tmp_path)
    model, tokens = load_model(tmp_path / "model", dtype="bfloat16"), 512
    hidden = torch.randn(tokens, model.config.hidden_size).bfloat16().requires_grad_()
    head = torch.zeros(model.config.hidden_size + 1, requires_grad=True)
    with Peak() as peak:
        model.ops.linear(hidden.float(), head[None, :-1], head[-1:])[:, 0].sum().backward()
    values = predict(model.config, Layout(), torch.bfloat16, tokens, critic=True).parts["values"]
    assert 0.9 * values <= peak.bytes <= 1.2 * values


def test_layouts_with_a_critic_have_no_pipeline(tmp_path, capsys):
    make_model(tmp_path)
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--gpus", "2", "--memory", "8"]
    assert main([*arguments, "--critic"]) == 0
    printed = capsys.readouterr().out
    assert "a critic, micro-batches" in printed
    assert "critic 0." in printed
    assert "pp=2" not in printed
    assert main([*arguments, "--image-tokens", "3"]) == 2
    assert "--image-tokens: " in capsys.readouterr().err
