"""trainer.offload on CUDA: the bits of state on the device, less memory there, copies beside computation."""

import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import new_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer import Trainer, optimizer
from rlloop.trainer.offload import BlockStream, HostMemory
from tests.support.rank_updates import DENSE, digests, live
from tests.support.train_sequences import make_batch

CUDA = torch.device("cuda", 0)
WIDE = {**DENSE, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 64}


def make(where: str) -> Trainer:
    model = new_model(WIDE, seed=0, dtype="bfloat16", context=join(CUDA, Layout()))
    return Trainer(model, TrainerConfig(lr=1e-2, weight_decay=0.01, max_batch_tokens=60, offload=where))


@pytest.mark.parametrize("block", [1 << 16, 48 << 20])
def test_twenty_steps_have_the_bits_of_state_on_the_device(tmp_path, monkeypatch, block):
    monkeypatch.setattr(optimizer, "BlockStream", lambda device: BlockStream(device, block))
    trainers = {where: make(where) for where in ("none", "moments", "masters")}
    for step in range(20):
        found = set()
        for trainer in trainers.values():
            trainer.forward_backward(make_batch(count=3, seed=step), get_loss("grpo"))
            trainer.optim_step()
            found.add(live(trainer))
        assert len(found) == 1, step
    saved = []
    for where, trainer in trainers.items():
        (tmp_path / where).mkdir()
        trainer.save(tmp_path / where)
        saved.append(digests(tmp_path / where))
    assert saved[0] == saved[1] == saved[2]
    trainers["masters"].restore(tmp_path / "none")
    for where in ("none", "masters"):
        trainers[where].forward_backward(make_batch(count=3, seed=99), get_loss("grpo"))
        trainers[where].optim_step()
    assert live(trainers["none"]) == live(trainers["masters"])


def test_state_leaves_the_device():
    def held(where: str) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(CUDA)
        trainer = make(where)
        after = torch.cuda.memory_allocated(CUDA)
        assert trainer.updates == 0
        return after - before

    numbers = sum(parameter.numel() for parameter in make("none").model.parameters())
    none, moments, masters = (held(where) for where in ("none", "moments", "masters"))
    assert none - moments >= 8 * numbers
    assert moments - masters >= 4 * numbers


def test_host_memory_is_pinned_and_blocks_keep_their_order():
    home = HostMemory(64 << 20, CUDA)
    blocks = [[home.zeros_like(torch.zeros(1 << 20))] for _ in range(16)]
    assert all(tensor.is_pinned() for (tensor,) in blocks)
    for index, (tensor,) in enumerate(blocks):
        tensor.fill_(index)
    stream = BlockStream(CUDA, 4 << 20)
    for _ in range(3):
        for (here,) in stream.each(blocks):
            for _ in range(20):  # work that a copy would overtake if nothing made it wait
                here.mul_(1.0)
            here.add_(100)
    for index, (tensor,) in enumerate(blocks):
        assert (tensor == 300 + index).all(), index
