"""The installed wheel: the package with its recipes, and a command that starts at once."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import rlloop
from rlloop import __version__

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "ray", "vllm", "transformers", "numba", "matplotlib", "datasets", "wandb")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The wheel's content, as pip would lay it out."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(code: str, site: Path, cwd: Path) -> str:
    """Output of `code` where only the wheel's rlloop can be imported."""
    program = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of(folder: Path) -> set[str]:
    return {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_carries_package_and_recipes_and_nothing_else(unpacked):
    expected = files_of(ROOT / "rlloop") | {f"recipes/{file}" for file in files_of(ROOT / "recipes")}
    assert files_of(unpacked / "rlloop") == expected
    assert {
        "cli/main.py",
        "recipes/countdown/config.yaml",
        "recipes/custom/task.py",
        "recipes/guess/task.py",
    } <= expected
    assert [folder.name for folder in unpacked.iterdir() if folder.name != "rlloop"] == [
        f"rlloop-{__version__}.dist-info"
    ]


def test_recipes_are_found_from_an_empty_folder(unpacked, tmp_path):
    code = (
        "import json, rlloop.recipes as r, rlloop.recipes.custom.task as t; "
        "print(json.dumps([t.__file__, {name: str(file) for name, file in r.available().items()}]))"
    )
    module, recipes = json.loads(python(code, unpacked, tmp_path))
    assert module == str(unpacked / "rlloop/recipes/custom/task.py")
    for name in ("countdown", "custom", "guess"):
        assert recipes[name] == str(unpacked / f"rlloop/recipes/{name}/config.yaml")


def test_the_working_folders_own_recipe_comes_first(unpacked, tmp_path):
    own = tmp_path / "recipes" / "countdown"
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("defaults: [rlloop, {algorithm: grpo}, _self_]\nseed: 7\n")
    code = "from rlloop.launch.compose import compose_recipe; print(compose_recipe('countdown', []).seed)"
    assert python(code, unpacked, tmp_path) == "7\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(unpacked, tmp_path, arguments):
    code = f"""
import contextlib, io, json
from rlloop.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({arguments!r})
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"""
    assert json.loads(python(code.strip(), unpacked, tmp_path)) == []


def test_documented_modules_are_found_by_their_former_names():
    for former, name in rlloop._FORMER.items():
        if ".vllm." in name:
            continue  # imports vLLM
        assert importlib.import_module(former) is importlib.import_module(name)
        assert importlib.import_module(name).__spec__.name == name
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rlloop.never")
