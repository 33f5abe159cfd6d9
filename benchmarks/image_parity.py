"""Train-inference KL of image and of text tokens where engine and trainer add experts' products in another way.

    python benchmarks/image_parity.py                # three seeds, minutes on two cores
    python benchmarks/image_parity.py --quick        # one seed, 30 steps
    python benchmarks/image_parity.py --keep taught  # the last model, and pictures for `rlloop parity --prompts`

A small Qwen3-VL-MoE (8 of 16 experts a token) learns the text of the recipe `images`: questions about drawn pictures
and their answers. No loss is on placeholders, which no policy predicts. In bfloat16 one side rounds each expert's
product before adding it (`bf16_each`), the other their sum once (`fp32_once`).
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import json
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from results_schema import Figure, report

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import load_model
from rlloop.numerics.profile import NumericsProfile
from rlloop.parity_tool.measure import measure
from rlloop.parity_tool.sequences import Tokens, read_prompts
from rlloop.parity_tool.sides import Definition
from rlloop.recipes.images import warm_start
from rlloop.recipes.images.pictures import questions
from rlloop.recipes.images.task import Prompts
from rlloop.trainer import Trainer, TrainSequence
from rlloop.types import ModelInput

STEPS, BATCH, LR, SEEDS = (0, 10, 30, 100, 300, 1000), 15, 2e-3, (0, 1, 2)
DEMONSTRATIONS, HELD_OUT, PICTURES = 2000, 1 << 32, 64
SCALES = (0.1, 10.0)  # of the images' features, in the last model


def model_config() -> dict[str, Any]:
    """The recipe's model, with experts."""
    config = copy.deepcopy(warm_start.model_config())
    config |= {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    config["vision_config"]["model_type"] = "qwen3_vl_moe"
    config["text_config"] |= {
        "model_type": "qwen3_vl_moe_text", "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return config


def demonstrations(folder: Path) -> tuple[list[TrainSequence], TrainSequence]:
    """Texts after a picture, all of their tokens to be learned; and the text before each picture."""
    prompts, rows = Prompts(folder), []
    for question in islice(questions(np.random.default_rng(1)), DEMONSTRATIONS):
        _, asked = prompts.prompt(question)
        [span] = asked.contents
        assert span.image is not None
        picture = ModelInput.with_images(asked.token_ids[: span.end], range(span.start, span.end), [span.image])
        answer = prompts.chat.ids(f"{question.answer} {warm_start.END}")
        rows.append(TrainSequence.supervised(picture, asked.token_ids[span.end :] + answer))
    before = rows[0].token_ids[: rows[0].model_input.contents[0].start]
    return rows, TrainSequence.supervised(before[:1], before[1:])


def write_pictures(folder: Path, count: int) -> Path:
    """Held-out questions and answers, one a line, as `rlloop parity --prompts` reads them."""
    prompts, lines = Prompts(folder), []
    for question in islice(questions(np.random.default_rng(HELD_OUT)), count):
        _, ids = prompts.asked(question)
        file = io.BytesIO()
        Image.fromarray(question.picture()).save(file, "PNG")
        uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        answer = prompts.chat.ids(f"{question.answer} {warm_start.END}")
        lines.append(json.dumps({"prompt_ids": ids, "token_ids": answer, "images": [uri]}))
    file = folder / "pictures.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def compared(folder: Path, pictures: list[Tokens], scale: float = 1.0) -> dict[str, float]:
    """k3 by type of token, and of all tokens with one definition. `scale`: of the images' features."""
    model = load_model(folder, dtype="bfloat16")
    for name, weight in model.named_parameters():
        if "visual" in name and "merger" in name and "linear_fc2" in name:
            weight.data.mul_(scale)
    ours = Definition("fp32_once", model)
    other = ours.with_profile(NumericsProfile(expert_combine="bf16_each"))
    mine = ours.score(pictures)
    apart, same = measure(pictures, other.score(pictures), mine), measure(pictures, ours.score(pictures), mine)
    assert same.all.equal, "one definition has two results"
    return {name: apart.by_type[name].k3 for name in ("text", "image")}


def teach(folder: Path, steps: tuple[int, ...], seed: int, pictures: int) -> dict[str, dict[str, float]]:
    """k3 by type after each number of steps, and with the last model's features scaled; `folder` holds that model."""
    warm_start.write_model(folder, seed, model_config())
    rows, before = demonstrations(folder)
    sequences = read_prompts(write_pictures(folder, pictures), lambda: Prompts(folder).processor)
    trainer, loss = Trainer(load_model(folder), TrainerConfig(num_steps=steps[-1], lr=LR)), get_loss("sft")
    rng, found = np.random.default_rng(seed), {}
    for step in range(steps[-1] + 1):
        if step:
            trainer.forward_backward([*(rows[i] for i in rng.integers(0, len(rows), BATCH)), before], loss)
            trainer.optim_step()
        if step in steps:
            with tempfile.TemporaryDirectory() as scratch:
                trainer.save(Path(scratch) / "model")
                found[f"after {step} steps"] = compared(Path(scratch) / "model", sequences)
                if step == steps[-1]:
                    shutil.copytree(Path(scratch) / "model", folder, dirs_exist_ok=True)
    for scale in SCALES:
        found[f"after {steps[-1]} steps, images' features times {scale:g}"] = compared(folder, sequences, scale)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps; recorded nowhere")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the last seed's model and its pictures there")
    args = parser.parse_args()
    torch.set_num_threads(1)  # products are small
    rounds = []
    for seed in SEEDS[:1] if args.quick else SEEDS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            rounds.append(teach(folder, STEPS[:3] if args.quick else STEPS, seed, 8 if args.quick else PICTURES))
            if args.keep is not None:
                shutil.copytree(folder, args.keep, dirs_exist_ok=True)
    figures = [
        Figure.of_rounds(
            f"k3 of image tokens, {name}", "nats", [each[name]["image"] for each in rounds], "text tokens",
            [each[name]["text"] for each in rounds],
        )
        for name in rounds[0]
    ]  # fmt: skip
    report("image-parity", figures, write=not args.quick)


if __name__ == "__main__":
    main()
