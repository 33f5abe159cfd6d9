"""`rlloop parity` of models that read images: compared by type of token, on random pictures."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rlloop import Engine, load_model
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.inputs import ModelInput
from rlloop.models.vision_processor import FILE, ImageProcessor
from rlloop.parity.token_types import compare_prompt
from rlloop.parity_tool.sequences import random_image_sequences
from rlloop.parity_tool.sides import Definition
from rlloop.runs.folder import RunFolder
from rlloop.runs.images import ImageStore
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import FAMILIES, PAD, START, TEXT, add_processor, make_image_checkpoint

SMALL = ("--sequences", "2", "--length", "24", "--images", "2")
TYPES = ["all", "prompt", "completion", "text", "image"]


def parity(tmp_path: Path, *arguments: object) -> tuple[int, dict]:
    code = main(["parity", *map(str, arguments), "-o", str(tmp_path / "report")])
    return code, json.loads((tmp_path / "report" / "parity.json").read_text())


def test_the_combine_moves_both_types_and_one_definition_neither(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ours, other = str(mixture), f"{mixture}@rlloop,expert_combine=bf16_each"
    code, report = parity(tmp_path, f"engine:{other}", ours, "--dtype", "bfloat16", "--require", *SMALL)
    assert code == 3
    code, report = parity(tmp_path, ours, other, "--dtype", "bfloat16", "--require", *SMALL)
    assert (code, list(report["by_type"])) == (3, TYPES)
    for name in ("text", "image"):
        found = report["by_type"][name]
        assert found["k3"] > 1e-5, name
        assert found["largest"] > found["mean"] > 1e-3, name
        assert found["different"] > 0.9 * found["tokens"], name
    assert report["first_difference"]["op"] == "combine"
    (knob,) = report["knobs"]
    assert (knob["name"], knob["left"]) == ("expert_combine", 0)
    capsys.readouterr()
    for sides in ((ours, ours), (f"engine:{other}", other)):
        code, report = parity(tmp_path, *sides, "--dtype", "bfloat16", "--require", *SMALL)
        assert code == 0
        for name in ("text", "image"):
            found = report["by_type"][name]
            assert (found["different"], found["k3"], found["mean"]) == (0, 0, 0)
            assert found["tokens"] > 20
    printed = capsys.readouterr().out
    assert "mean |d|" in printed
    assert "\nimage " in printed
    assert "completion " in printed  # not cut at 80 characters


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gets_the_same_pictures(tmp_path: Path, family: str) -> None:
    make_image_checkpoint(tmp_path / "model", family)
    add_processor(tmp_path / "model")
    model = tmp_path / "model"
    _, report = parity(tmp_path, f"engine:{model}", f"transformers:{model}", *SMALL)
    assert report["by_type"]["image"]["tokens"] > 20
    assert all(0 < each["k3"] < 1e-9 for each in report["by_type"].values())
    code, report = parity(tmp_path, f"engine:{model}", model, "--require", *SMALL)
    assert (code, list(report["by_type"]), report["text_only"]) == (0, ["all", "completion", "text", "image"], "")


def test_a_difference_in_the_tower_alone_is_named(mixture: Path, tmp_path: Path) -> None:
    """Layer norms with biases are the tower's: texts have the same bits."""
    _, report = parity(tmp_path, mixture, f"{mixture}@rlloop,indexer=stock", *SMALL)
    found, first = report["by_type"], report["first_difference"]
    assert found["prompt"]["different"] == found["completion"]["different"] == 0
    assert min(found["image"]["different"], found["text"]["different"]) > 0
    assert (first["op"], first["where"], first["unit"]) == ("layer_norm", "visual.blocks.0.norm1", "patch")
    _, report = parity(tmp_path, f"transformers:{mixture}", f"{mixture}@huggingface", "--dtype", "bfloat16", *SMALL)
    assert report["by_type"]["prompt"]["different"] == 0
    assert report["first_difference"]["where"].startswith("visual.")  # a convolution there


def test_types_are_those_of_a_runs_metrics(mixture: Path) -> None:
    processor, model = ImageProcessor.of_folder(mixture), load_model(mixture)
    [sequence] = random_image_sequences(processor, range(3, 90), 1, 12, 256, marks=[START, 92])
    [scored] = Definition("", model).score([sequence])
    prompt = sequence.model_input
    assert prompt is not None
    metrics = compare_prompt(
        prompt, scored.logprobs[1 : len(prompt)] - np.float32(0.25), scored.logprobs[1:][: len(prompt) - 1]
    ).metrics
    span = prompt.contents[0]
    assert [i for i, each in enumerate(sequence.labels) if each == "image"] == list(range(span.start, span.end + 1))
    assert sequence.ids[span.start - 1] == START
    assert metrics["parity/k3_image"] == pytest.approx(np.expm1(0.25) - 0.25, rel=1e-5)


def test_pictures_are_random_by_seed_and_fit(mixture: Path) -> None:
    processor = ImageProcessor.of_folder(mixture)

    def drawn(seed: int, most: int = 256, least: int = 256) -> list[ModelInput]:
        small = ImageProcessor(processor.vision, least)
        sequences = random_image_sequences(small, range(90), 3, 40, most, seed)
        assert all(len(each.ids) <= most for each in sequences)
        return [each.model_input for each in sequences if each.model_input is not None]

    first, same, other = (
        [(each.token_ids, each.contents[0].digest) for each in drawn(seed)] for seed in (0, 0, 1)
    )  # fmt: skip
    assert first == same
    assert not {digest for _, digest in first} & {digest for _, digest in other}
    assert [len(each.contents) for each in drawn(0, most=10)] == [1, 1, 1]  # smaller ones, where there is less room
    with pytest.raises(ConfigError, match="leaves no room for text"):
        drawn(0, most=10, least=64 * 9)


def test_a_side_without_images_is_named_and_texts_are_compared(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file, text = tmp_path / "theirs.jsonl", tmp_path / "text"
    rows = [{"prompt_ids": ids, "token_ids": [8, 9], "logprobs": [-4.0, -4.0]} for ids in ([5, 6], [5, START, PAD, 92])]
    file.write_text("\n".join(map(json.dumps, rows)))
    _, report = parity(tmp_path, file, mixture)
    assert f"{file} has token ids and no images" in report["text_only"]
    assert "Left out: 1" in report["text_only"]
    assert list(report["by_type"]) == ["all", "completion"]
    assert report["by_type"]["all"]["tokens"] == 2
    assert "Text alone is compared" in capsys.readouterr().out
    make_checkpoint(text)
    _, report = parity(tmp_path, text, mixture, *SMALL[:4])
    assert f"{text} is a Qwen3ForCausalLM, which reads no images" in report["text_only"]
    assert list(report["by_type"]) == ["all", "prompt", "completion"]
    _, report = parity(tmp_path, mixture, mixture, *SMALL[:4], "--images", "0")
    assert (list(report["by_type"]), report["text_only"]) == (["all", "prompt", "completion"], "")
    capsys.readouterr()
    for sides, why in (((file, mixture), "no images"), ((text, text), "neither side reads images")):
        assert main(["parity", *map(str, sides), "--images", "2"]) == 2
        assert why in capsys.readouterr().err
    file.write_text(json.dumps(rows[1]))
    assert main(["parity", str(file), str(mixture)]) == 2
    assert "the images are not known" in capsys.readouterr().err


def test_a_folder_without_a_processor_is_named(mixture: Path, tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path / "model", "qwen3_vl")
    assert not (tmp_path / "model" / FILE).exists()
    _, report = parity(tmp_path, tmp_path / "model", tmp_path / "model", *SMALL[:4])
    assert f"has no {FILE}" in report["text_only"]


def test_a_runs_images_are_read_again(mixture: Path, tmp_path: Path) -> None:
    sequences = random_image_sequences(
        ImageProcessor.of_folder(mixture), range(3, 90), 2, 20, TEXT["max_position_embeddings"]
    )
    prompts = [each.model_input for each in sequences if each.model_input is not None]
    made = Engine(load_model(mixture)).generate(prompts, SamplingParams(max_tokens=6, seed=3, ignore_eos=True))
    samples = [
        Sample(f"1/0/{index}", Example("e", each.prompt_ids, "", {}), each, "", RewardResult(0.0), 0)
        for index, each in enumerate(made)
    ]
    with RunFolder(tmp_path / "run") as run:
        run.write_rollouts(1, rollout_rows(samples, ["trained"] * 2, [None] * 2, "e"))
        ImageStore(run.path).keep(image for prompt in prompts for image in prompt.images)
    code, report = parity(tmp_path, tmp_path / "run", mixture, "--require")
    assert (code, report["by_type"]["text"]["tokens"]) == (0, 12)


def test_the_doctor_measures_it(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def asked(folder: Path, *arguments: str) -> tuple[int, dict[str, tuple[str, float, int, int]]]:
        code, found = main(["doctor", "--model", str(folder), *arguments]), {}
        for line in capsys.readouterr().out.splitlines():
            if match := re.match(r"(ok|--)  zero KLD of (.*) tokens, bfloat16: k3 (\S+), (\d+) of (\d+) ", line):
                found[match[2]] = (match[1], float(match[3]), int(match[4]), int(match[5]))
        return code, found

    code, found = asked(mixture, "--parity")
    assert (code, list(found)) == (0, ["completion", "text", "image"])
    for name, (mark, k3, different, tokens) in found.items():
        assert (mark, k3, different) == ("ok", 0, 0), name
        assert tokens > 20, name
    code, found = asked(mixture, "--parity", "rlloop,expert_combine=bf16_each")
    assert (code, list(found)) == (1, ["completion", "text", "image"])
    for name, (mark, k3, different, tokens) in found.items():
        assert mark == "--"
        assert k3 > 0, name
        assert tokens >= different > 0, name
    assert asked(mixture, "--gpus", "1", "--memory", "8") == (0, {})


def test_the_doctor_says_what_it_did_not_measure(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--model", str(mixture), "--gpus", "1", "--memory", "8"]) == 0
    assert "text and image tokens: --parity compares engine and trainer on them" in capsys.readouterr().out
    make_image_checkpoint(tmp_path / "model", "qwen3_vl")
    assert main(["doctor", "--model", str(tmp_path / "model"), "--parity", "--dtype", "float32"]) == 1
    printed = capsys.readouterr().out
    assert "ok  zero KLD of completion tokens, float32: k3 0, 0 of " in printed
    assert f"--  zero KLD of image tokens, float32: not measured. Text alone is compared: {tmp_path}" in printed
    for arguments, why in (
        (["--parity"], "belong together, as in --model M --gpus 8, or --model and --parity"),
        (["--model", str(mixture), "--parity", "rloop"], "profile 'rloop' is not known"),
        (
            ["--model", str(mixture), "--parity", "--lora", "8"],
            "--lora: of the memory of layouts; give --model",
        ),
        (["--memory", "80"], "--memory: of the memory of layouts"),
    ):
        assert main(["doctor", *arguments]) == 2
        assert why in " ".join(capsys.readouterr().err.split())
