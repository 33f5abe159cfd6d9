"""benchmarks/gpu_images.py without a GPU: a toy run, and the folder that vLLM reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from rlloop.models.config import parse_config
from rlloop.models.vision_processor import ImageProcessor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def images(module):
    return module("gpu_images")


def test_the_shape_is_the_released_one_and_its_folder_is_read_by_transformers(images, tmp_path):
    released = json.loads((ROOT / "tests" / "support" / "released.json").read_text())["Qwen3-VL-8B-Instruct"]["config"]
    made = images.config_of(36, tiny=False)
    ours, theirs = parse_config(made), parse_config(released)
    for name in ("vision", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope.theta == theirs.rope.theta
    (tmp_path / "config.json").write_text(json.dumps(images.config_of(3, tiny=False)))
    images.add_processor(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(marks) == [151652, 151655, 151653, 151656, 151645]
    assert tokenizer.encode("".join(marks[:3]), add_special_tokens=False) == [151652, 151655, 151653]
    assert AutoConfig.from_pretrained(tmp_path).text_config.num_hidden_layers == 3
    processor = ImageProcessor.of_folder(tmp_path)
    assert processor.size(512, 512) == (512, 512)  # 1,024 patches, as they come
    [(ids, picture), other] = images.requests_of(2, 0, images.SIZES)
    prompt = processor.prompt(ids, [processor.image(picture)])
    assert (len(ids), len(prompt.token_ids)) == (64 + 3, 64 + 2 + 256)
    assert other[0] != ids


@pytest.mark.slow
def test_a_toy_reads_pictures_with_the_bits_of_its_trainer():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_images.py", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    assert "logprobs that differ in the trainer, of 3, after pictures, toy Qwen3-VL bf16" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" 0 tokens")
    assert "pictures to first token, 3 x (16 patches, 12 tokens of text)" in done.stdout


@pytest.mark.slow
def test_a_toy_says_where_its_time_goes():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_images.py", "--tiny", "--parts"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    for part in ("processor", "patches to the device", "tower", "answer, patches given", "answer, features known"):
        assert f"3 x {part}: " in done.stdout
    assert "by self_cpu_time_total" in done.stderr
