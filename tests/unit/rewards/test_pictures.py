"""Rewards of examples with images: Python sees the picture, and a served reward model refuses what it would not see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch import prepare as launch
from rlloop.models.vision_processor import ImageProcessor
from rlloop.recipes.offline.toy import write_toy
from rlloop.rewards import RewardModel, Weighted
from rlloop.rewards.runner import RewardFailure, RewardRunner
from rlloop.types import Example

VISION: Any = SimpleNamespace(patch_size=4, merge_size=2, temporal_patch_size=2, image_token_id=9)
GRPO = AlgorithmConfig(loss="grpo", advantage="group_norm")
PROCESSOR = ImageProcessor(VISION, least=64, most=1 << 12)


def shown(red: int) -> Example:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[..., 0] = red
    prompt = PROCESSOR.prompt([4, 9, 6], [PROCESSOR.image(pixels)])
    return Example(f"red {red}", prompt.token_ids, "a red?", {}, prompt)


def redness(prompt: str, completion: str, example: Example) -> float:
    """How near the answer is to the picture's red."""
    assert example.model_input is not None
    [image] = example.model_input.images
    assert image.picture is not None
    return 1 - abs(int(completion) - float(image.picture[..., 0].mean())) / 255


def test_a_python_reward_sees_the_picture() -> None:
    runner = RewardRunner(redness, timeout=240.0)
    results = runner.score([("", "255", shown(255)), ("", "255", shown(0))])
    runner.close()
    assert [result.reward for result in results] == [1.0, 0.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reward_model")
    write_toy(path)
    return str(path / "model")


def test_a_reward_model_refuses_examples_with_images(folder: str) -> None:
    runner = RewardRunner(RewardModel("http://127.0.0.1:9", folder, retries=0), timeout=240.0)
    [failed] = runner.score([("", "7", shown(3))])
    runner.close()
    assert isinstance(failed, RewardFailure)
    assert "example 'red 3' has images, and RewardModel sends token ids" in failed.message


class Task:
    """Held-out examples with a picture or without."""

    def __init__(self, *, pictures: bool, **_: Any) -> None:
        self._example = shown(3) if pictures else Example("text", [4], "", {})

    def eval_examples(self, count: int) -> list[Example]:
        return [self._example] * count

    def train_examples(self, step: int, count: int) -> list[Example]:
        return [self._example] * count

    def model_folder(self) -> Path:
        raise AssertionError("it was to be refused before a model is made")

    def decode(self, token_ids: list[int]) -> str:
        return ""


def test_a_run_with_it_is_refused_before_it_begins(folder: str) -> None:
    alone = {"_target_": "rlloop.rewards.RewardModel", "url": "http://127.0.0.1:9", "model_path": folder}
    summed = {
        "_target_": "rlloop.rewards.Weighted",
        "parts": {"right": {"_target_": f"{__name__}.redness"}, "b": alone},
    }
    for reward in (alone, summed):
        for pictures in (True, False):
            task = {"_target_": f"{__name__}.Task", "pictures": pictures}
            config = RunConfig(algorithm=GRPO, task=task, reward=reward)
            if pictures:
                with pytest.raises(ConfigError, match="'red 3' has images, and RewardModel"):
                    launch.prepare(config)
            else:
                launch.prepare(config).scorer.close()
    parts = Weighted({"right": {"_target_": f"{__name__}.redness"}})
    parts.check_example(shown(3))


@pytest.mark.parametrize("picture", [None, "cat.png", Path("cat.png"), [[0, 0, 0]]])
def test_what_is_no_picture_is_refused_by_name(picture: object) -> None:
    with pytest.raises(ConfigError, match=r"a picture is .*; give a file's bytes .*, a PIL.Image.Image, or pixels"):
        PROCESSOR.image(picture)
