"""The recipe images: a run whose prompts have pictures, its records, what `verify` and the dashboard make of them; and
the same model behind a chat server."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image as pillow
from starlette.testclient import TestClient

from rlloop import Engine, SamplingParams, load_adapter, load_model, token_logprobs
from rlloop.cli.main import main
from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.errors import RunError
from rlloop.loop.loop import Loop
from rlloop.models.vision_processor import ImageProcessor
from rlloop.recipes.images.task import Pictures, answer_reward, questions
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.text import tokenizer_of
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.runs.images import ImageStore
from rlloop.testing import planted_fault
from rlloop.types import Example
from rlloop.web.server import BackgroundServer, Listen

TOKEN = "0123456789abcdef"


SMALL = [
    "rollout.num_prompts=2", "rollout.group_size=3", "trainer.num_steps=2", "eval.num_draws=2", "task.demonstrations=4",
    "task.warm_steps=2", "checkpoint.every=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr("rlloop.cache.cache_root", lambda: folder)
        assert main(["train", "--config-name", "images", "run.dir=run", *SMALL]) == 0
        yield folder / "run"


@pytest.fixture(scope="module")
def model_folder(trained: Path) -> Path:
    (folder,) = trained.parent.glob("images-*")
    return folder


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for file in rollout_files(run) for row in read_rollouts(file)]


def test_every_token_has_the_engines_bits_on_text_and_on_images(trained: Path) -> None:
    for record in list(read_records(trained / "metrics.jsonl"))[1:]:
        assert record["parity/tokens"] > 0
        assert record["parity/prompt_tokens"] > 16
        for name in ("tokens_different", "k3", "prompt_tokens_different", "k3_text", "k3_image"):
            assert record[f"parity/{name}"] == 0, name


def test_an_adapter_trains_on_pictures(trained: Path, model_folder: Path) -> None:
    run = trained.parent / "lora"
    Path("my_pictures.py").write_text(  # untrained answers are all wrong, and would move nothing
        "def score(prompt, completion, example):\n    return sum(map(ord, completion)) % 7\n"
    )
    lora = ["model.lora.rank=4", "trainer.lr=1e-2", "reward._target_=my_pictures.score", "parity.mode=require"]
    assert main(["train", "--config-name", "images", f"run.dir={run}", *SMALL, *lora]) == 0
    for record in list(read_records(run / "metrics.jsonl"))[1:]:
        assert record["parity/tokens"] > 0
        for name in ("tokens_different", "k3", "prompt_tokens_different", "k3_text", "k3_image"):
            assert record[f"parity/{name}"] == 0, name
    model, processor = load_model(model_folder), ImageProcessor.of_folder(model_folder)
    load_adapter(model, run / "checkpoints" / "step_2", "a")
    picture = processor.image(np.zeros((64, 64, 3), np.uint8))
    prompt = processor.prompt([processor.vision.image_token_id, 3], [picture])
    moved, base = (token_logprobs(model, [(prompt, [4])], adapter=name)[0] for name in ("a", None))
    assert not torch.equal(moved, base)


@pytest.mark.parametrize(("fault", "op", "where"), [
    ("indexer", "layer_norm", "visual.blocks.0."), ("rms_norm", "rms_norm", "model.layers.0."),
])  # fmt: skip
def test_a_prompt_that_is_read_otherwise_stops_the_run_and_the_operation_is_named(
    trained: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, op: str, where: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    monkeypatch.setattr(Loop, "evaluate", lambda _, version: {"eval/solved": 0.0})  # which finds it in completions
    with planted_fault(fault):
        settings = [f"run.dir={run}", f"model.path={model_folder}", *SMALL]
        assert main(["train", "--config-name", "images", *settings]) == 3
    printed = " ".join(capsys.readouterr().err.split())
    assert "of a prompt with images have other logprobs" in printed
    assert f"The first operation that differs: {op} at {where}" in printed
    report = json.loads((run / "parity_report.json").read_text())
    assert (report["step"], report["doctor"]["op"]) == (1, op)
    assert report["doctor"]["where"].startswith(where)
    assert report["doctor"]["unit"] == ("patch" if where.startswith("visual") else "token")
    rows, first = rows_of(run), report["first"]
    assert len(rows) == 6
    assert {row["outcome"] for row in rows} == {"rejected: its step is not trained"}
    [row] = [row for row in rows if row["uid"] == first["uid"]]
    assert first["position"] == first["index"] < len(row["prompt_ids"])
    assert row["prompt_ids"][first["position"]] == first["token_id"]
    assert report["metrics"]["parity/k3_image"] > 0
    assert len(list(read_records(run / "metrics.jsonl"))) == 1  # step 0
    assert not list((run / "checkpoints").glob("step_1*"))


def test_each_picture_is_kept_once_and_is_what_the_model_read(trained: Path, model_folder: Path) -> None:
    rows, store = rows_of(trained), ImageStore(trained)
    digests = {each["digest"] for row in rows for each in row["images"]}
    assert len(rows) == 12
    assert 1 < len(digests) <= 4
    assert {file.stem for file in store.folder.iterdir()} == digests
    processor = ImageProcessor.of_folder(model_folder)
    for digest in digests:
        shown = pillow.open(store.folder / f"{digest}.png")
        assert processor.image(np.asarray(shown)).digest == store.read(digest).digest == digest
    prompt = store.read_by(rows[0]["prompt_ids"], rows[0]["token_ids"], rows[0]["images"])
    tokens = rows[0]["token_ids"]
    first = token_logprobs(load_model(model_folder), [(prompt, tokens)])[0].detach().numpy()
    assert first.tobytes() == np.array(rows[0]["logprobs"], np.float32).tobytes()


def test_verify_draws_every_token_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(trained)]) == 0
    assert "12 completions" in capsys.readouterr().out


def test_an_image_that_was_changed_is_found(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sorted(ImageStore(trained).folder.glob("*.npz"))[:2]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    try:
        with pytest.raises(RunError, match="holds another image"):
            ImageStore(trained).read(first.stem)
        assert main(["verify", str(trained)]) != 0
        assert "holds another image" in capsys.readouterr().out
    finally:
        first.write_bytes(kept)


def test_the_dashboard_serves_the_picture(trained: Path, tmp_path: Path) -> None:
    with contextlib.closing(Dashboard(trained.parent, cache=tmp_path)) as dashboard:
        client = TestClient(make_app(dashboard))
        full = client.get("/api/rollout", params={"run": "run", "step": 1, "line": 0}).json()
        (span,) = full["images"]
        assert full["trace"][0]["text"].count("<|image_pad|>") == 1
        picture = client.get("/api/image", params={"run": "run", "digest": span["digest"]})
        assert picture.headers["content-type"] == "image/png"
        assert picture.content == (trained / "images" / f"{span['digest']}.png").read_bytes()
        assert client.get("/api/image", params={"run": "run", "digest": "../../config"}).status_code == 400
        assert client.get("/api/image", params={"run": "run", "digest": "0" * 64}).status_code == 404


def test_answers_can_be_seen() -> None:
    for question in islice(questions(np.random.default_rng(0)), 40):
        assert question.picture().shape == (32, 32, 3)
        example = Example("", [], "", {"answer": question.answer})
        assert answer_reward("", f" {question.answer} ", example).solved
        assert not answer_reward("", "four hundred", example).solved
        assert len({*question.cells}) == len(question.cells)


def test_the_task_gives_the_same_pictures_again(model_folder: Path) -> None:
    one, other = (Pictures(3, str(model_folder)).train_examples(2, 3) for _ in range(2))
    assert [x.model_input.contents for x in one] == [x.model_input.contents for x in other]  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------- a chat server


@pytest.fixture(scope="module")
def http(model_folder: Path) -> Iterator[httpx.Client]:
    service = EngineService(Engine(load_model(model_folder)))
    images = ImageProcessor.if_any(model_folder)
    server = EngineServer(service, name="one", tokenizer=tokenizer_of(model_folder), images=images)
    background = BackgroundServer(server.app, Listen(token=TOKEN))
    with httpx.Client(base_url=background.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        yield client
    background.close()
    service.close()


def uri(picture: np.ndarray | bytes, kind: str = "png") -> str:
    if isinstance(picture, np.ndarray):
        file = io.BytesIO()
        pillow.fromarray(picture).save(file, kind.upper())
        picture = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def ask(http: httpx.Client, *parts: Any, **more: Any) -> httpx.Response:
    message = {"role": "user", "content": list(parts)}
    return http.post("/v1/chat/completions", json={
        "model": "rlloop", "messages": [message], "max_tokens": 4, "seed": 7, "ignore_eos": True,
        "return_token_ids": True, **more,
    })  # fmt: skip


def shown(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "how many ?"}


def test_a_chat_about_a_picture_has_the_trainers_bits(http: httpx.Client, model_folder: Path) -> None:
    model, processor = load_model(model_folder), ImageProcessor.of_folder(model_folder)
    first, second = (next(questions(np.random.default_rng(seed))).picture() for seed in (1, 2))
    answers = []
    for picture in (first, second):
        answer = ask(http, shown(uri(picture)), TEXT)
        assert answer.status_code == 200, answer.text
        (choice,), read = answer.json()["choices"], answer.json()["prompt_token_ids"]
        marked = [token for token in read if token != processor.vision.image_token_id]
        at = read.index(processor.vision.image_token_id)
        ids = [*marked[:at], processor.vision.image_token_id, *marked[at:]]
        prompt = processor.prompt(ids, [processor.image(picture)])
        assert prompt.token_ids == read
        scored = token_logprobs(model, [(prompt, choice["token_ids"])])[0].detach().numpy()
        assert scored.tobytes() == np.array(choice["raw_logprobs"], np.float32).tobytes()
        answers.append(choice)
    assert answers[0]["raw_logprobs"] != answers[1]["raw_logprobs"]
    two = ask(http, shown(uri(first)), shown(uri(second)), TEXT, n=2).json()
    assert two["prompt_token_ids"].count(processor.vision.image_token_id) == 32
    assert [each["seed"] for each in two["choices"]] == [7, 8]


def bomb(side: int) -> bytes:
    file = io.BytesIO()
    pillow.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([shown("https://example.com/cat.png")], "is no data URI of an image"),
        ([shown("data:image/svg+xml;base64,PHN2Zz4=")], "is no data URI of an image"),
        ([shown("data:image/png;base64,%%%")], "is no base64"),
        ([shown(uri(b"not a picture"))], "a picture of 13 bytes is not one of PNG, JPEG"),
        ([lambda: shown(uri(bomb(9000)))], "9000 x 9000 pixels; at most 67108864 are decoded"),
        ([lambda: shown(uri(bomb(20_000)))], "too large to decode: at most 67108864 pixels are"),
        ([shown(uri(np.zeros((1, 900, 3), np.uint8)))], "900 x 1 pixels; the longer side may be at most 200 times"),
        ([{"type": "text", "text": "<|image_pad|> how many ?"}], "has 1 placeholders .token 5. and 0 images"),
        ([shown(uri(np.zeros((8, 8, 3), np.uint8))), {"type": "text", "text": "<|image_pad|>"}], "2 placeholders"),
        ([TEXT, {"type": "input_audio"}], r"content {'type': 'input_audio'}; .* a list of .*image_url"),
    ],
    ids=range(10),
)
def test_bad_pictures_are_refused_before_sampling(http: httpx.Client, parts: list[Any], message: str) -> None:
    answer = ask(http, *(part() if callable(part) else part for part in parts))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert re.search(message, answer.json()["error"]["message"]), answer.text


def test_a_broken_picture_is_refused(http: httpx.Client) -> None:
    picture = base64.b64decode(uri(next(questions(np.random.default_rng(0))).picture()).partition(",")[2])
    answer = ask(http, shown(uri(picture[: len(picture) // 2])))
    assert answer.status_code == 400
    assert "is broken" in answer.json()["error"]["message"]


# ---------------------------------------------------------------------------------------------- the image processor


@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 70), (133, 61), (8, 8), (400, 300)])
def test_patches_are_transformers(model_folder: Path, height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    content = json.loads((model_folder / "preprocessor_config.json").read_text())
    picture = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    keys = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    wanted = Qwen2VLImageProcessorPil(**{key: content[key] for key in keys})(pillow.fromarray(picture))
    made = ImageProcessor.of_folder(model_folder).image(picture)
    assert [[1, made.height, made.width]] == np.asarray(wanted["image_grid_thw"]).tolist()
    assert made.patches.tobytes() == np.asarray(wanted["pixel_values"], np.float32).tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"shortest_edge": "small"}}, "size.shortest_edge is .small.; supported is a positive"),
        ({"patch_size": 14}, "patch_size is 14, and the model's tower has 4; it is another model's"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is 'CLIPImageProcessor'"),
        ({"do_resize": False}, "do_resize is False"),
        ({"resample": 2}, "resample is 2"),
        ({"image_std": [1, 1, 0]}, "image_std is"),
        ({"crop": 3}, "does not know what crop would change"),
        ({"size": {"shortest_edge": 4096, "longest_edge": 1024}}, "size is"),
    ],
)
def test_another_models_processor_is_refused(tmp_path: Path, model_folder: Path, changes: dict, message: str) -> None:
    content = json.loads((model_folder / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(RunError.__mro__[1], match=f"preprocessor_config.json: .*{message}"):
        ImageProcessor.of_folder(tmp_path)


def test_a_frozen_tower_keeps_its_sampled_distribution(model_folder: Path) -> None:
    """Engines share the model, so a frozen tower is the same for both."""
    model = load_model(model_folder)
    model.visual.requires_grad_(False)  # type: ignore[union-attr]
    (example,) = Pictures(0, str(model_folder)).train_examples(1, 1)
    assert example.model_input is not None
    (made,) = Engine(model).generate([example.model_input], SamplingParams(max_tokens=3, seed=1))
    (scored,) = token_logprobs(model, [(replace(example.model_input), made.token_ids)])
    assert scored.detach().numpy().tobytes() == made.raw_logprobs.tobytes()
