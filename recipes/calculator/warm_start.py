"""The recipe's own model: a random Qwen3 that a few demonstrations teach how a call looks, and little else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlloop.algorithms import get_loss
from rlloop.cache import made_once
from rlloop.chat import ChatTokenizer
from rlloop.config.trainer import TrainerConfig
from rlloop.models import load_model
from rlloop.models.config import read_config
from rlloop.trainer import Trainer, TrainSequence

from ..custom.tiny import END, write_tiny
from .task import TOOLS, WORDS, Problem, problems

VERSION, BATCH, LR, LAYERS = 2, 32, 2e-3, 3


def warm_started(demonstrations: int, steps: int) -> Path:
    """The folder of the model after `steps` updates on `demonstrations` of the training problems; made at first use."""

    def make(folder: Path) -> None:
        new = folder.with_name("new")
        write_tiny(new, WORDS, num_layers=LAYERS)
        chat = ChatTokenizer(new, eos_token_ids=read_config(new).eos_token_ids)
        rng = np.random.default_rng(0)
        training = [each for each in problems() if not each.held_out]
        rows = [_sequence(chat, training[i]) for i in rng.choice(len(training), demonstrations, replace=False)]
        trainer = Trainer(load_model(new), TrainerConfig(num_steps=steps, lr=LR))
        loss = get_loss("sft")
        for _ in range(steps):
            trainer.forward_backward([rows[i] for i in rng.integers(0, len(rows), BATCH)], loss)
            trainer.optim_step()
        trainer.save(folder)

    says = f"warm start, once: {steps} supervised steps on generated demonstrations, half a minute or so"
    return made_once(f"calculator-{demonstrations}-{steps}-v{VERSION}", make, says)


def _sequence(chat: ChatTokenizer, problem: Problem) -> TrainSequence:
    """A demonstration: the assistant's turns are trained, what the tools say is only read."""
    ids, predict = list(chat.prompt(problem.text)[1]), list[int]()
    end = chat.tokenizer.convert_tokens_to_ids(END)

    def write(text: str) -> None:
        written = [*chat.ids(text), end]
        predict.extend(range(len(ids), len(ids) + len(written)))
        ids.extend(written)

    for name, a, b in problem.calls:
        write(f'<tool_call> {{"name": "{name}", "arguments": {{"a": {a} , "b": {b} }}}} </tool_call>')
        ids.extend(chat.between([{"role": "tool", "content": str(TOOLS[name](a, b))}], end))
    write(f"answer {problem.answer}")
    return TrainSequence(ids, predict, np.ones(len(predict), np.float32))
