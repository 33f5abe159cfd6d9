"""Environments that reply with pictures: a run's tokens have the trainer's bits, its records hold the pictures, and a
bad picture ends its own conversation alone."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow
from starlette.testclient import TestClient

from rlloop.cli.main import main
from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.errors import ConfigError, ModelError
from rlloop.inputs import ModelInput
from rlloop.loop.pictures import ReplyReader, as_recorded, taken
from rlloop.models.vision_processor import ImageProcessor
from rlloop.recipes.images import warm_start
from rlloop.recipes.images.pictures import COLOURS
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.runs.images import ImageStore
from rlloop.testing import planted_fault
from rlloop.types import Example

SMALL = [
    "rollout.num_prompts=3", "rollout.group_size=3", "trainer.num_steps=2", "eval.num_draws=2", "task.demonstrations=4",
    "task.warm_steps=2", "checkpoint.every=1", "reward._target_=rlloop.rewards.episode.episode_reward", "seed=3",
]  # fmt: skip

Train = Callable[..., tuple[int, Path]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    """Trains in a folder of its own; (exit code, the run's folder)."""
    folder = tmp_path_factory.mktemp("talks")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr("rlloop.cache.cache_root", lambda: folder)

        def run(name: str, task: str, *overrides: str) -> tuple[int, Path]:
            named = [f"run.dir={name}", f"task._target_=tests.support.picture_talk.{task}"]
            return main(["train", "--config-name", "images", *named, *SMALL, *overrides]), folder / name

        yield run


@pytest.fixture(scope="module")
def trained(train: Train) -> Path:
    code, run = train("run", "Talks")
    assert code == 0
    return run


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for file in rollout_files(run) for row in read_rollouts(file)]


def equal(run: Path) -> None:
    steps = [record for record in read_records(run / "metrics.jsonl") if record["step"]]
    assert [record["parity/tokens_different"] for record in steps] == [0.0] * 2
    assert [record["parity/k3_image"] for record in steps] == [0.0] * 2
    assert [record["parity/redrawn_different"] for record in steps] == [0.0] * 2


def test_trainer_and_engine_have_the_same_bits_on_pictures_in_replies(trained: Path) -> None:
    equal(trained)
    for row in rows_of(trained):
        assert row["outcome"] == "trained"
        assert len(row["turns"]) == 3
        prompt, ids = len(row["prompt_ids"]), row["prompt_ids"] + row["token_ids"]
        for image, (_, end), (start, _) in zip(row["images"], row["turns"][:-1], row["turns"][1:], strict=True):
            assert prompt + end <= image["start"] < image["end"] <= prompt + start  # between two turns of the policy
            assert {*ids[image["start"] : image["end"]]} == {warm_start.VOCABULARY.index(warm_start.IMAGE)}
            assert ImageStore(trained).read(image["digest"]).height > 0


@pytest.mark.parametrize(
    ("name", "task", "overrides"),
    [
        ("first", "PicturedTalks", ()),
        ("pieces", "Talks", ("rollout.partial.prompts=2", "rollout.partial.slice_tokens=1",
                             "rollout.partial.max_version_lag=1", "algorithm.anchor=rollout")),
        ("narrow", "PicturedTalks", ("model.dtype=bfloat16", "rollout.max_batch_tokens=16", "rollout.page_size=4")),
        ("adapter", "Talks", ("model.lora.rank=4",)),
    ],
)  # fmt: skip
def test_so_they_have_beside_pictures_in_prompts_in_pieces_and_by_chunks(
    train: Train, name: str, task: str, overrides: tuple[str, ...]
) -> None:
    code, run = train(name, task, *overrides)
    assert code == 0
    equal(run)


def test_a_conversation_read_again_from_its_records_has_the_stored_bits(trained: Path, capsys) -> None:
    assert main(["verify", str(trained), "--run-code"]) == 0
    said = capsys.readouterr().out
    assert "re-scored: 9 completions" in said, said  # of the second step; the first one's weights are not kept


def test_a_picture_that_was_changed_is_found(trained: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    first, second = sorted((tmp_path / "copy/images").glob("*.npz"))[:2]
    shutil.copyfile(first, second)
    assert main(["verify", str(tmp_path / "copy"), "--run-code"]) != 0
    assert "holds another image" in capsys.readouterr().out


def test_a_bad_picture_ends_its_own_conversation_with_the_environments_name(train: Train) -> None:
    code, run = train("bad", "BadTalks", "eval.num_draws=8", "rollout.num_prompts=6")
    assert code == 0
    equal(run)
    outcomes = {row["outcome"] for row in rows_of(run)}
    bad = "a picture of 10 bytes is not one of PNG, JPEG, WEBP, GIF, BMP"
    assert outcomes == {"trained", f"rejected: environment error: a picture in the reply of Shows: {bad}"}


def test_a_fault_in_the_tower_is_found_in_a_picture_of_a_reply(train: Train, capsys) -> None:
    with planted_fault("activation"):
        code, _ = train("faulty", "Talks")
    assert code == 3
    assert "(profile knob activation)" in capsys.readouterr().err


def test_the_dashboard_shows_a_replys_pictures_in_it(trained: Path) -> None:
    client = TestClient(make_app(Dashboard(trained.parent)), base_url="http://127.0.0.1")
    full = client.get("/api/rollout", params={"run": "run", "step": 1, "line": 0}).json()
    shown = [entry["images"] for entry in full["trace"] if entry.get("images")]
    assert [digest for [digest] in shown] == [image["digest"] for image in full["images"]]
    assert client.get("/api/image", params={"run": "run", "digest": shown[0][0]}).headers["content-type"] == "image/png"


# ------------------------------------------------------------------------------------------------------------ the parts


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("model")
    warm_start.write_model(folder)
    return ImageProcessor.of_folder(folder)


def test_an_input_followed_by_pictures_is_the_input_of_all_of_it(processor: ImageProcessor) -> None:
    """Its positions too, whichever of the parts have pictures."""
    token, rng = processor.vision.image_token_id, np.random.default_rng(0)
    images = [processor.image(rng.integers(0, 256, size, np.uint8)) for size in ((32, 32, 3), (32, 64, 3))]
    parts = [[8, 9, 10], [8, token, 9], [10, 8], [token, 11, 12]]
    made = ModelInput(parts[0]).followed_by(processor.prompt(parts[1], images[:1]))
    made = made.followed_by(parts[2]).followed_by(processor.prompt(parts[3], images[1:])).followed_by([13])
    whole = processor.prompt([*chain(*parts), 13], images)
    assert made.token_ids == whole.token_ids
    assert made.contents == whole.contents
    assert made.positions is not None
    assert (made.positions == whole.positions).all()
    assert made.given == 3  # the policy may have sampled what stands after
    begin = made.first(made.contents[0].end + 1)
    assert begin.contents == whole.contents[:1]
    assert begin.positions is not None
    assert (begin.positions == made.positions[:, : len(begin)]).all()


def test_messages_are_rendered_without_pixels_and_recorded_by_digest() -> None:
    picture = np.zeros((4, 4, 3), np.uint8)
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "look"}]
    messages = [{"role": "tool", "content": "plain"}, {"role": "user", "content": parts}]
    bare, pictures = taken(messages)
    assert bare == [messages[0], {"role": "user", "content": [{"type": "image"}, parts[1]]}]
    assert pictures[0] is picture
    recorded = as_recorded(messages, ["digest"])
    assert recorded == [messages[0], {"role": "user", "content": "look", "images": ["digest"]}]
    with pytest.raises(ConfigError, match="a picture is"):
        taken([{"role": "user", "content": [{"type": "image"}]}])


def test_what_a_model_cannot_read_is_refused(processor: ImageProcessor, tmp_path: Path) -> None:
    from tests.support.tiny_run import make_model

    make_model(tmp_path)
    picture = pillow.fromarray(np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(ModelError, match="which reads text only"):
        ReplyReader(lambda: tmp_path / "model").read([5], [picture])
    warm_start.write_model(tmp_path / "images")
    reader = ReplyReader(lambda: tmp_path / "images")
    with pytest.raises(ConfigError, match="has 0 placeholders"):  # the template leaves pictures out
        reader.read([8], [picture])
    token = processor.vision.image_token_id
    assert len(reader.read([token], [picture]).contents) == 1


def test_a_tool_may_return_a_picture() -> None:
    from rlloop.tasks.tools import class_environment

    example = Example("0", [1], "", {})
    environment = class_environment(example, environment=f"{__name__}.Camera")
    reply: Any = environment.step('<tool_call>{"name": "shot", "arguments": {"colour": "red"}}</tool_call>')
    [part] = reply.messages[0]["content"]
    assert part["image"].getpixel((0, 0)) == COLOURS["red"]
    assert taken(replace(reply).messages)[1] == [part["image"]]


class Camera:
    def reset(self) -> None: ...

    def shot(self, colour: str) -> pillow.Image:
        return pillow.new("RGB", (32, 32), COLOURS[colour])
