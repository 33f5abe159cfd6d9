"""The recipe's own model: a random Qwen3-VL that demonstrations teach how an answer looks, and some of the answers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from rlloop.algorithms import get_loss
from rlloop.cache import made_once
from rlloop.config.trainer import TrainerConfig
from rlloop.models import load_model, new_model, save_model
from rlloop.models.config import parse_config
from rlloop.models.vision_processor import FILE, ImageProcessor
from rlloop.trainer import Trainer, TrainSequence

from .pictures import ACROSS, CELL, WORDS
from .task import Prompts, questions

VERSION, BATCH, LR = 1, 32, 2e-3
UNKNOWN, END = "<|unknown|>", "<|end|>"
START, IMAGE, STOP = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SPECIAL = (UNKNOWN, END, "<|user|>", "<|assistant|>", START, IMAGE, STOP, "<|video_pad|>")
VOCABULARY = [*SPECIAL, *WORDS]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    f"{START}{IMAGE}{STOP}"
    "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def model_config() -> dict[str, Any]:
    """config.json of the recipe's model."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "image_token_id": VOCABULARY.index(IMAGE), "video_token_id": VOCABULARY.index("<|video_pad|>"),
        "vision_start_token_id": VOCABULARY.index(START), "vision_end_token_id": VOCABULARY.index(STOP),
        "eos_token_id": VOCABULARY.index(END),
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "attention_bias": False,
            "initializer_range": 0.1, "dtype": "float32", "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision", "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 3,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 4, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    }  # fmt: skip


def write_model(folder: Path, seed: int = 0, config: dict[str, Any] | None = None) -> None:
    """A random model for pictures of the recipe, with tokenizer, chat template and image processor. `config`: None:
    the recipe's."""
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(SPECIAL))
    config = config or model_config()
    save_model(new_model(config, seed), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    vision, area = parse_config(config).vision, (CELL * ACROSS) ** 2
    assert vision is not None
    processor = ImageProcessor(vision, least=area, most=4 * area)
    (folder / FILE).write_text(json.dumps(processor.to_config(), indent=1) + "\n")


def warm_started(demonstrations: int, steps: int) -> Path:
    """The folder of the model after `steps` updates on `demonstrations` pictures; made at first use."""

    def make(folder: Path) -> None:
        new = folder.with_name("new")
        write_model(new)
        prompts, rng = Prompts(new), np.random.default_rng(0)
        rows = []
        for question in islice(questions(np.random.default_rng(1)), demonstrations):
            _, prompt = prompts.prompt(question)
            rows.append(TrainSequence.supervised(prompt, prompts.chat.ids(f"{question.answer} {END}")))
        trainer = Trainer(load_model(new), TrainerConfig(num_steps=steps, lr=LR))
        loss = get_loss("sft")
        for _ in range(steps):
            trainer.forward_backward([rows[i] for i in rng.integers(0, len(rows), BATCH)], loss)
            trainer.optim_step()
        trainer.save(folder)

    says = f"warm start, once: {steps} supervised steps on generated demonstrations, half a minute or so"
    return made_once(f"images-{demonstrations}-{steps}-v{VERSION}", make, says)
