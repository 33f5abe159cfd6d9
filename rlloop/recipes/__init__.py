"""The recipes that ship with rlloop, importable as `rlloop.recipes.<name>`, and where recipes are looked for.

In a checkout they lie in its top folder recipes/, in an installed wheel inside this package. A working folder's own
recipes/ comes first in both ways of naming one.
"""

from __future__ import annotations

from pathlib import Path

_here = Path(__file__).resolve().parent
_checkout = _here.parents[1]

SHIPPED = _checkout / "recipes" if (_checkout / "pyproject.toml").is_file() else _here

__path__ = [str(Path.cwd() / "recipes"), str(SHIPPED), str(_here)]


def folders() -> list[Path]:
    """The folders that recipes are looked for in, first match first."""
    own = Path.cwd() / "recipes"
    return [SHIPPED] if own.resolve() == SHIPPED else [own, SHIPPED]


def find(name: str) -> tuple[Path, str] | None:
    """`NAME` or `NAME/VARIANT` -> (the recipe's folder, its file's stem); None where no folder has it."""
    recipe, _, variant = name.partition("/")
    stem = variant or "config"
    for folder in folders():
        if recipe and (folder / recipe / f"{stem}.yaml").is_file():
            return folder / recipe, stem
    return None


def available() -> dict[str, Path]:
    """Every name that `find` knows, with its file. Variants of a recipe stand as NAME/VARIANT."""
    files: dict[str, Path] = {}
    for folder in reversed(folders()):
        for file in folder.glob("*/*.yaml"):
            name = file.parent.name if file.stem == "config" else f"{file.parent.name}/{file.stem}"
            files[name] = file
    return dict(sorted(files.items()))
