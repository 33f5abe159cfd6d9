"""The documentation names what exists, and all that is public."""

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import rlloop
from rlloop import algorithms, protocols, rewards

ROOT = Path(__file__).parents[3]
# The log tells of modules by the names that they had.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"),
    *sorted((ROOT / "examples").glob("*.py")),
]
PATH = re.compile(r"(?<![\w/.])((?:rlloop|tests|recipes|benchmarks|scripts|examples)/[\w/.*-]*[\w*])")
ENTRY_POINTS = {"rlloop.kernels"}  # groups of them
DOTTED = re.compile(r"\brlloop(?:\.(?!md\b)\w+)+")


def test_generated_pages_are_current():
    script = ROOT / "scripts" / "reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_paths_that_pages_name_exist():
    named = {(page.name, path) for page in PAGES for path in PATH.findall(page.read_text()) if "NAME" not in path}
    written = set(re.findall(r'title="(.+?)"', (ROOT / "docs" / "tutorial.md").read_text()))  # by the reader
    assert len(named) > 50
    assert [(page, path) for page, path in sorted(named) if path not in written and not any(ROOT.glob(path))] == []


def test_the_architecture_names_files_that_exist():
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert len(named) > 20
    assert [path for path in sorted(named) if not ((ROOT / "rlloop" / path).exists() or (ROOT / path).exists())] == []


def test_modules_and_names_that_pages_name_exist():
    named = {(page.name, name) for page in PAGES for name in DOTTED.findall(page.read_text())}
    assert len(named) > 50
    missing = [(page, name) for page, name in sorted(named) if not exists(name)]
    assert [(page, name) for page, name in missing if name not in ENTRY_POINTS] == []


def test_every_public_name_has_a_section():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    sections = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    # `losses.grpo` is a module and its function, so the page says which.
    sections |= {f"rlloop.algorithms.{name.rpartition('.')[2]}" for name in sections if ".algorithms.losses." in name}
    public = {f"rlloop.{name}" for name in rlloop.__all__ if not name.endswith("Error")}
    public |= {f"rlloop.algorithms.{name}" for name in algorithms.__all__}
    public |= {f"rlloop.rewards.{name}" for name in rewards.__all__}
    public |= {"rlloop.errors", protocols.__name__, "rlloop.types"}  # pages of whole modules
    assert public - sections == set()


def exists(name: str) -> bool:
    """True if a dotted name is a module, or an attribute of a module that can be imported here."""
    parts = name.split(".")
    depth = next(count for count in range(len(parts), 0, -1) if is_module(".".join(parts[:count])))
    try:
        found = import_module(".".join(parts[:depth]))
    except ImportError:  # a module around vLLM or a GPU, where there is none
        return True
    for part in parts[depth:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
