"""Everything here needs a CUDA device, and says so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop.models import new_model, save_model
from tests.support.gpu_runs import KINDS, SHARED
from tests.support.tiny_run import LEARNABLE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def working_folder(tmp_path, monkeypatch) -> None:
    """With the models of `tests.support.gpu_runs` and the reward that its runs name."""
    for kind, more in KINDS.items():
        save_model(new_model({**SHARED, **more}, seed=0, dtype="bfloat16"), tmp_path / kind)
    (tmp_path / "learnable.py").write_text(LEARNABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family that reads images."""
    from tests.support.image_models import FAMILIES, make_wide_image_checkpoint

    made = {family: tmp_path_factory.mktemp("models") / family for family in FAMILIES}
    for family, folder in made.items():
        make_wide_image_checkpoint(folder, family, torch.bfloat16)
    return made
