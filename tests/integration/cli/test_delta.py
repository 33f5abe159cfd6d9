import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlloop.cli.delta_size import Sizes, compare, describe, read_pair, version_bytes
from rlloop.cli.main import main
from rlloop.errors import ModelError
from rlloop.sync.folder import read_file, read_folder
from rlloop.sync.live import bits_of


def save(folder, state, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file(state, folder / name)
    return folder


@pytest.fixture
def pair(tmp_path):
    torch.manual_seed(0)
    masters = {f"layers.{i}.weight": 0.02 * torch.randn(200, 200) for i in range(3)}
    after = {name: weight + 1e-5 * torch.randn(200, 200).clamp(-1, 1) for name, weight in masters.items()}
    return [
        save(tmp_path / name, {key: weight.bfloat16() for key, weight in state.items()})
        for name, state in (("old", masters), ("new", after))
    ]


def test_the_command_prints_every_size(pair, capsys):
    assert main(["delta", *map(str, pair), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("layers.") for line in lines) == 3
    assert lines[3].startswith("120,000 weights, ")
    sizes = {line[:34].strip(): float(line[34:52].replace(",", "")) for line in lines[6:-2]}
    ours = ("rlloop's delta", "with its manifest")
    names = ("entropy, old exponent known", *ours, "XOR + zstd-1", "index + value", "full")
    assert [sizes[name] for name in names] == sorted(sizes[name] for name in names)
    assert sizes["full"] == 240_000
    assert sizes["entropy, old exponent known"] < sizes["entropy"]


def test_masters_are_compared_as_engines_hold_them(pair, tmp_path, capsys):
    torch.manual_seed(0)
    masters = [
        save(tmp_path / f"{folder.name}-masters", {
            name: torch.from_numpy(bits.array.astype(np.uint32) << 16).view(torch.float32) * (1 + 2**-12)
            for name, bits in read_folder(folder).items()
        })
        for folder in pair
    ]  # fmt: skip
    assert main(["delta", *map(str, pair)]) == 0
    expected = capsys.readouterr().out
    assert main(["delta", *map(str, masters), "--bfloat16"]) == 0
    assert capsys.readouterr().out == expected
    assert main(["delta", *map(str, masters)]) == 0
    assert "480,000" in capsys.readouterr().out


def test_nothing_changed(pair, capsys):
    assert main(["delta", str(pair[0]), str(pair[0])]) == 0
    assert "every bit is the same" in capsys.readouterr().out


def test_sums_are_of_the_tensors(pair):
    each = [sizes for _, sizes in compare(*read_pair(*pair))]
    total = sum(each, Sizes())
    assert total.delta == sum(sizes.delta for sizes in each)
    assert total.full == 240_000
    assert total.single / total.changed > 0.8
    stream, manifest = version_bytes(*read_pair(*pair))
    assert stream < total.delta  # small tensors share a header and tables
    assert 200 < manifest < 300
    assert any("% of them by one step" in line for line in describe(total, stream, manifest))


def test_wide_types_have_no_reference(tmp_path, capsys):
    for name, value in (("a", 1.0), ("b", 1.0001)):
        save(tmp_path / name, {"w": torch.full((100,), value)})
    assert main(["delta", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "entropy" not in capsys.readouterr().out


def test_folders_that_are_not_two_of_one_model_are_refused(pair, tmp_path, capsys):
    assert main(["delta", str(pair[0]), str(tmp_path / "absent")]) == 2
    assert "neither model.safetensors nor" in capsys.readouterr().err
    other = save(tmp_path / "other", {"layers.0.weight": torch.zeros(200, 200, dtype=torch.bfloat16)})
    with pytest.raises(ModelError, match=r"only one of them has layers\.1\.weight"):
        read_pair(pair[0], other)
    wide = save(tmp_path / "wide", {name: torch.zeros(200, 200) for name in read_folder(pair[0])})
    with pytest.raises(ModelError, match=r"is BF16 \[200, 200\] in one and F32"):
        read_pair(pair[0], wide)


def test_shards_and_every_alignment(tmp_path):
    state = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7), "c": torch.tensor(3, dtype=torch.int8)}
    folder = save(tmp_path / "sharded", {"a": state["a"]}, "one.safetensors")
    save(folder, {"b": state["b"], "c": state["c"]}, "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_folder(folder)
    assert all(found[name].same(bits_of(tensor)) for name, tensor in state.items())
    odd = tmp_path / "odd.safetensors"  # tensors behind one another, whatever their width
    header = {"byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "wide": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}  # fmt: skip
    text = json.dumps(header).encode()
    numbers = np.array([1.5, -2.0], np.float32)
    odd.write_bytes(len(text).to_bytes(8, "little") + text + b"\7" + numbers.tobytes())
    assert (read_file(odd)["wide"].array == numbers.view(np.uint32)).all()


def test_damaged_files_are_refused(pair, tmp_path):
    content = (pair[0] / "model.safetensors").read_bytes()
    for number, damaged in enumerate((content[:-10], content[:4], b"", b"\xff" * 100)):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(damaged)
        with pytest.raises(ModelError):
            read_file(file)
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        read_folder(folder)
