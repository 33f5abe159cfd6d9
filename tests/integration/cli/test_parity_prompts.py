"""`rlloop parity --prompts` with images: from files beside the prompts and from data URIs, and what is refused."""

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

from rlloop.cli.main import main
from rlloop.models.vision_processor import ImageProcessor
from rlloop.parity_tool.sequences import read_prompts
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import END, PAD, START

ASKED = [5, START, PAD, END, 6, 7]


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pillow.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def claiming(side: int) -> bytes:
    """A small file that says it is a huge picture."""
    whole = png(8, 8)
    header = side.to_bytes(4, "big") * 2 + whole[24:29]
    return whole[:16] + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big") + whole[33:]


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "one.png").write_bytes(png(16, 24))
    file = path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def parity(tmp_path: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["parity", *map(str, arguments), "-o", str(tmp_path / "report")])
    return code, json.loads((tmp_path / "report" / "parity.json").read_text())


def test_a_files_pictures_are_compared_by_type(mixture: Path, tmp_path: Path) -> None:
    file = written(
        tmp_path / "prompts", {"prompt_ids": ASKED, "token_ids": [8, 9, 10], "images": ["one.png"]},
        {"prompt_ids": [*ASKED, START, PAD, 4], "images": [str(tmp_path / "prompts" / "one.png"), uri(png(16, 16, 1))]},
        {"prompt_ids": [5, 6, 7], "token_ids": [8], "token_types": ["a", "a", "a", "b"]},
    )  # fmt: skip
    first, second, text = read_prompts(file, lambda: ImageProcessor.of_folder(mixture))
    assert first.model_input is not None
    assert second.model_input is not None
    assert text.model_input is None
    assert second.model_input.contents[0].digest == first.model_input.contents[0].digest
    assert len(second.model_input.images) == 2
    assert first.ids == [5, START, *[PAD] * 6, END, 6, 7, 8, 9, 10]

    other = f"{mixture}@rlloop,expert_combine=bf16_each"
    code, report = parity(tmp_path, mixture, other, "--dtype", "bfloat16", "--prompts", file, "--require")
    assert (code, list(report["by_type"]), report["text_only"]) == (3, ["all", "text", "image", "a", "b"], "")
    assert report["by_type"]["image"]["tokens"] == 7 + 7 + 5
    assert report["by_type"]["image"]["k3"] > 1e-5
    assert report["first_difference"]["op"] == "combine"
    for side in (f"engine:{mixture}", mixture):
        code, report = parity(tmp_path, side, mixture, "--dtype", "bfloat16", "--prompts", file, "--require")
        assert (code, report["by_type"]["image"]["different"]) == (0, 0)
    _, report = parity(tmp_path, f"transformers:{mixture}", mixture, "--prompts", file)
    assert 0 < report["by_type"]["image"]["k3"] < 1e-9


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["two.png"]}, "the picture 'two.png' cannot be read: No such file"),
        ({"images": ["https://example.com/cat.png"]}, "is no data URI of an image"),
        ({"images": ["data:image/png;base64,%%%"]}, "is no base64"),
        ({"images": ["data:image/png;base64,é"]}, "is no base64"),
        ({"images": ["data:image/png;base64," + "A" * (45 << 20)]}, "at most 33554432 are read"),
        ({"images": [uri(png(16, 16)[:60])]}, "is broken"),
        ({"images": [uri(b"not a picture")]}, "is not one of PNG"),
        ({"images": [uri(claiming(9000))]}, "9000 x 9000 pixels; at most 67108864 are decoded"),
        ({"images": [uri(claiming(60_000))]}, "too large to decode"),
        ({"images": [uri(png(1, 900))]}, "1 x 900 pixels; the longer side"),
        ({"images": ["one.png", "one.png"]}, "1 placeholders (token 91) and 2 images"),
        ({"images": [], "prompt_ids": ASKED}, "the images are not known"),
        ({"images": "one.png"}, "give a list of paths and data URIs"),
        ({"images": [["one.png"]]}, "give a list of paths and data URIs"),
        ({"images": ["one.png"], "token_types": ["a"] * 6}, "leave token_types out"),
        ({"images": ["one.png"], "prompt_ids": ["five", PAD]}, "are lists of token ids"),
        ({"images": ["one.png"], "prompt_ids": [5, 7]}, "0 placeholders (token 91) and 1 images"),
        ({"images": ["one.png"], "prompt_ids": [93, PAD, 5]}, "placeholder video_token_id"),
        ({"images": ["one.png"], "prompt_ids": [5, PAD, 6, 1000]}, "1000"),
        ({"images": ["one.png"], "prompt_ids": [PAD, *[5] * 300]}, "256"),
        ({"images": ["one.png"], "prompt_ids": [5, PAD]}, "it ends with an image"),
    ],
    ids=range(21),
)  # fmt: skip
@pytest.mark.parametrize("side", ["", "engine:"])
def test_wrong_prompts_are_refused_by_name(
    mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    message: str,
    side: str,
) -> None:
    file = written(tmp_path / "prompts", {"prompt_ids": ASKED, **row})
    assert main(["parity", f"{side}{mixture}", str(mixture), "--prompts", str(file)]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert len(printed) < 1000


def test_sides_without_images_are_refused_by_name(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, logprobs = written(tmp_path / "prompts", {"prompt_ids": ASKED, "images": ["one.png"]}), tmp_path / "l.jsonl"
    logprobs.write_text(json.dumps({"prompt_ids": [5], "token_ids": [8], "logprobs": [-4.0]}))
    make_checkpoint(tmp_path / "text")
    text = tmp_path / "text"
    for sides, message in (
        ((text, mixture), "reads no images"),
        ((text, text), "reads no images"),
        ((logprobs, mixture), "has token ids and no images"),
        ((mixture, mixture, "--images", 2), "the pictures of --prompts are its own"),
    ):
        assert main(["parity", *map(str, sides), "--prompts", str(file)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    (mixture / "preprocessor_config.json").rename(mixture / "aside")
    try:
        assert main(["parity", str(mixture), str(mixture), "--prompts", str(file)]) == 2
        assert "has no preprocessor_config.json" in " ".join(capsys.readouterr().err.split())
        file.write_text(json.dumps({"prompt_ids": [5, 6, 7]}))
        assert main(["parity", str(mixture), str(mixture), "--prompts", str(file)]) == 0
        assert "Text alone is compared" in capsys.readouterr().out
    finally:
        (mixture / "aside").rename(mixture / "preprocessor_config.json")
