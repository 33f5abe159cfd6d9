"""Supervised learning on a few demonstrations: the warm start that RL begins from, and the arm that RL has to beat.

Both are one trajectory. The warm start is where it first reaches `stop_at` pass@1, on purpose early. The arm goes on
from there on the same demonstrations, and its best held-out score of all is what counts: to stop it there, by the
held-out problems themselves, favours it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from rich.console import Console

from rlloop.algorithms import get_loss
from rlloop.cache import cache_root
from rlloop.config.trainer import TrainerConfig
from rlloop.loop.step_data import completion_seed
from rlloop.models import load_model, new_model, save_model
from rlloop.rewards.countdown import countdown_reward
from rlloop.rollout import Engine
from rlloop.runs.console import clock
from rlloop.trainer import Trainer, TrainSequence
from rlloop.types import SamplingParams

from .data import Demonstration, demonstrations, shuffled
from .task import Countdown
from .tokenizer import EOS, PAD, save_tokenizer

FORMAT = 1  # of the cache: another number makes everything anew
RECORD, ARM = "warm_start.json", "supervised_only.json"
RESPONSE_TOKENS = 12  # a worked trace and its end-of-sequence token
POSITIONS = 32  # of the model: prompt and response, with room

Say = Callable[[str], None]


@dataclass(frozen=True)
class Curve:
    """Held-out pass@1 along a supervised trajectory."""

    points: list[tuple[int, float]]  # (step, pass@1 at temperature 1)

    @property
    def last(self) -> tuple[int, float]:
        return self.points[-1]

    @property
    def best(self) -> tuple[int, float]:
        return max(self.points, key=lambda point: point[1])


class Supervised:
    """The trajectory: a trainer on the demonstrations of `task`, and an engine over the same weights that scores it."""

    def __init__(self, task: Countdown, folder: Path) -> None:
        """Starts from the model, and the trainer's state where there is one, in `folder`."""
        settings = task.warm_start
        self.task, self.settings = task, settings
        model = load_model(folder, dtype=settings.dtype, device=settings.device)
        config = TrainerConfig(num_steps=settings.supervised_steps, lr=settings.lr, weight_decay=settings.weight_decay)
        self.trainer = Trainer(model, config)
        if (folder / RECORD).exists():
            self.trainer.restore(folder)
        self._engine = Engine(model)
        self._loss = get_loss("sft")
        encode = task.tokenizer.encode
        self._pairs = [
            (encode(each.prompt).ids, encode(f"{each.response} {EOS}").ids) for each in _demonstrations(task)
        ]

    @property
    def steps(self) -> int:
        return self.trainer.updates

    def step(self) -> None:
        """One update on the next batch: epochs are permutations by seed, and an incomplete last batch is left out.

        The order of a prompt's numbers is drawn anew each time, as in RL; it does not change the solution.
        """
        size, seed = self.settings.batch_size, self.settings.seed
        epoch, batch_index = divmod(self.steps, len(self._pairs) // size)
        order = np.random.default_rng((seed, 2, epoch)).permutation(len(self._pairs))
        rng = np.random.default_rng((seed, 3, self.steps))
        batch = []
        for index in order[batch_index * size : (batch_index + 1) * size]:
            prompt, response = self._pairs[index]
            batch.append(TrainSequence.supervised(shuffled(prompt[:3], rng) + prompt[3:], response))
        self.trainer.forward_backward(batch, self._loss)
        self.trainer.optim_step()

    def pass_at_1(self, draws: int) -> float:
        """The share of `draws` held-out completions that solve their problem; drawn as the loop's `eval/solved` is."""
        self._engine.set_version(self._engine.policy_version + 1)
        examples = self.task.eval_examples(draws)
        sampling = [
            SamplingParams(RESPONSE_TOKENS, seed=completion_seed(0, "eval", 0, index, 0)) for index in range(draws)
        ]
        completions = self._engine.generate([example.prompt_ids for example in examples], sampling)
        texts = [self.task.decode(completion.token_ids) for completion in completions]
        results = [countdown_reward(each.prompt, text, each) for each, text in zip(examples, texts, strict=True)]
        return float(np.mean([result.solved for result in results]))

    def learn(self, max_steps: int, stop_at: float | None, say: Say) -> Curve:
        """Go on to `max_steps` in all, or to the first evaluation that reaches `stop_at`."""
        points, first, began = [], self.steps, time.monotonic()
        most = "" if stop_at is None else "at most "
        while self.steps < max_steps:
            self.step()
            if self.steps % self.settings.eval_every == 0 or self.steps == max_steps:
                points.append((self.steps, self.pass_at_1(self.settings.eval_draws)))
                left = (time.monotonic() - began) / (self.steps - first) * (max_steps - self.steps)
                goal = "" if stop_at is None else f" (ends at {stop_at:g})"
                say(f"step {self.steps}/{max_steps}  pass@1 {points[-1][1]:.3f}{goal}  {most}{clock(left)} left")
                if stop_at is not None and points[-1][1] >= stop_at:
                    break
        return Curve(points)


def warm_start_folder(task: Countdown) -> Path:
    """The warm-started model of `task` as a Hugging Face folder, trained at first use."""
    folder = cache_root() / f"countdown-{digest(task)}"
    if not (folder / RECORD).exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            new, trained = Path(scratch) / "new", Path(scratch) / "trained"
            save_model(new_model(model_config(task), task.warm_start.seed), new)
            save_tokenizer(task.tokenizer, new)
            supervised = Supervised(task, new)
            with _progress("warm start") as say:
                curve = supervised.learn(task.warm_start.max_steps, task.warm_start.stop_at, say)
            supervised.trainer.save(trained)
            _write_json(trained / RECORD, {"steps": supervised.steps, "curve": curve.points})
            _publish(trained, folder)
    return folder


def supervised_only(task: Countdown) -> Curve:
    """The arm without RL: the same demonstrations, the warm start's part of the curve included. Cached beside it."""
    folder = warm_start_folder(task)
    settings = task.warm_start
    file = folder / ARM.replace(".", f"-{settings.supervised_steps}.")
    if not file.exists():
        supervised = Supervised(task, folder)
        with _progress("supervised only") as say:
            rest = supervised.learn(settings.supervised_steps, None, say)
        _write_json(file, {"curve": [*warm_start_curve(folder).points, *rest.points]})
    return _read_curve(file)


def warm_start_curve(folder: Path) -> Curve:
    return _read_curve(folder / RECORD)


def digest(task: Countdown) -> str:
    """Of everything that decides the warm start: settings, data, tokenizer, numerics, versions."""
    settings = asdict(task.warm_start)
    del settings["supervised_steps"]
    if settings.pop("device") != "cpu":
        settings["device"] = torch.cuda.get_device_name(task.warm_start.device)
    if settings["dtype"] == "float32":
        del settings["dtype"]
    inputs = {
        "format": FORMAT,
        "model": model_config(task),
        "settings": settings,
        "demonstrations": [asdict(each) for each in _demonstrations(task)],
        "held_out": [example.prompt for example in task.eval_examples(task.warm_start.eval_draws)],
        "tokenizer": task.tokenizer.to_str(),
        "numerics": new_model(model_config(task), task.warm_start.seed).fingerprint(),
        "torch": torch.__version__,
    }
    return blake3(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest(length=10)


def _demonstrations(task: Countdown) -> list[Demonstration]:
    settings = task.warm_start
    return demonstrations(settings.demonstrations, settings.seed, task.largest_number, task.largest_target)


def model_config(task: Countdown) -> dict[str, Any]:
    """config.json of the recipe's model."""
    shape, tokenizer = task.model, task.tokenizer
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.num_experts:
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.intermediate_size,
            "norm_topk_prob": True,
        }
    return {
        **kind,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "initializer_range": 0.02,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "dtype": "float32",
    }


def _publish(trained: Path, folder: Path) -> None:
    """Moves it into place by one rename; where another process was faster, its equal work stays."""
    try:
        trained.rename(folder)
    except OSError:
        if not (folder / RECORD).exists():
            raise
        shutil.rmtree(trained)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(file)


def _read_curve(file: Path) -> Curve:
    return Curve([(step, score) for step, score in json.loads(file.read_text())["curve"]])


class _progress:
    """Shows the last line on a terminal, every line elsewhere; on standard error."""

    def __init__(self, title: str) -> None:
        self._title, self._console = title, Console(stderr=True, highlight=False)
        self._status = self._console.status(f"{title} (supervised, on generated demonstrations)")

    def __enter__(self) -> Say:
        self._status.start()
        return self._say

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(f"{self._title}: {text}")
        else:
            self._console.print(f"{self._title}: {text}")
