from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def module(monkeypatch):
    """A function that imports a script or module of benchmarks/."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load
