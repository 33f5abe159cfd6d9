"""Review of the development environment's packages, in CI: python scripts/review_dependencies.py

Fails where
- pyproject.toml asks for something that requirements/*.txt do not pin, or pin outside its range: run scripts/lock.sh;
- an installed package is not pinned, or has another version than the pin (torch and pip's own tools apart);
- a package's licence is none of `LICENCES`: read it, then add it or drop the package.

Known vulnerabilities are pip-audit's to find (`make audit`), which needs the network.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
UNPINNED = {"torch", "pip", "setuptools", "rlloop"}  # torch: the machine's own build
LICENCES = re.compile(
    r"apache|\bmit\b|bsd|\bisc\b|mpl|mozilla|psf|python software|zlib|unlicense|cc0|\bhpnd\b|public domain",
    re.IGNORECASE,
)
# Their metadata say nothing, or point to a file; read by hand. torch's own requirements come with torch's build.
READ = {"antlr4-python3-runtime", "matplotlib"}


def main() -> int:
    pins, torch_needs = read_pins(), requirements_of("torch")
    problems = [f"{name} is pinned without a hash" for name, (_, hashed) in pins.items() if not hashed]
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        if name not in pins and name not in UNPINNED:
            problems.append(f"pyproject.toml asks for {requirement}, and requirements/ pin no {name}")
        elif name in pins and not requirement.specifier.contains(pins[name][0]):
            problems.append(f"pyproject.toml asks for {requirement}, and requirements/ pin {pins[name][0]}")
    installed = {canonicalize_name(found.metadata["Name"]): found for found in importlib.metadata.distributions()}
    for name, found in sorted(installed.items()):
        if name in pins and found.version != pins[name][0]:
            problems.append(f"{name} {found.version} is installed, and {pins[name][0]} is pinned")
        elif name not in pins and name not in UNPINNED | torch_needs:
            problems.append(f"{name} {found.version} is installed, and not pinned")
        if name not in READ | {"rlloop"} and not LICENCES.search(licence := licence_of(found)):
            problems.append(f"{name}: the licence is {licence[:80] or 'not said'!r}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(pins)} packages pinned with hashes, {len(installed)} installed: {len(problems)} problems")
    return int(bool(problems))


def read_pins() -> dict[str, tuple[str, bool]]:
    """Package -> (version, whether a hash stands with it), of those that this machine needs."""
    pins = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for entry in re.split(r"\n(?=\S)", file.read_text()):
            line = entry.split("\\")[0].strip()
            if not line or line.startswith("#"):
                continue
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("=="), "--hash=sha256:" in entry
    return pins


def declared() -> list[Requirement]:
    """All that `rlloop[dev]` asks for itself, the extras it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, todo, seen = project["optional-dependencies"], ["dev"], set[str]()
    lines = list(project["dependencies"])
    while todo:
        if (extra := todo.pop()) not in seen:
            seen.add(extra)
            for line in extras[extra]:
                own = Requirement(line).name == "rlloop"
                todo += Requirement(line).extras if own else ()
                lines += [] if own else [line]
    return [Requirement(line) for line in lines]


def requirements_of(name: str) -> set[str]:
    """Names of what an installed package requires, whatever the marker."""
    return {canonicalize_name(Requirement(line).name) for line in importlib.metadata.requires(name) or []}


def licence_of(found: importlib.metadata.Distribution) -> str:
    said = found.metadata
    classifiers = [line for line in said.get_all("Classifier") or [] if line.startswith("License")]
    return "; ".join(filter(None, [said.get("License-Expression"), said.get("License"), *classifiers]))


if __name__ == "__main__":
    sys.exit(main())
