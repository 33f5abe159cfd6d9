"""Finds models by a user's name for them: a Hugging Face folder, a run, or one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rlloop.config.run import RunConfig
from rlloop.errors import ModelError
from rlloop.launch.compose import build
from rlloop.loop.own import Run
from rlloop.models import Model, load_model
from rlloop.models.adapter_files import CONFIG as ADAPTER_CONFIG
from rlloop.models.adapter_files import base_of, is_adapter, with_stored_adapter
from rlloop.models.config import how_to_fetch


@dataclass(frozen=True)
class Stored:
    """A model's folder, or an adapter's, and the run that it is of."""

    folder: Path
    run: Run | None = None

    @classmethod
    def find(cls, name: str) -> Stored:
        """`name`: a model's folder, a run's (its best checkpoint by `eval/reward`), or a checkpoint's. Raises
        `ModelError` or `RunError`."""
        path = Path(name)
        if (path / "config.yaml").is_file():
            run = Run(path)
            return cls(run.best_checkpoint(), run)
        of_run = path.absolute().parents[1] if path.absolute().parent.name == "checkpoints" else None
        run = Run(of_run) if of_run is not None and (of_run / "config.yaml").is_file() else None
        if not (path / "config.json").is_file() and not is_adapter(path):
            if run is not None and not path.exists():
                kept = ", ".join(folder.name for folder in run.checkpoints.values()) or "none"
                raise ModelError(f"{name} is not kept; {of_run} has the checkpoints: {kept}")
            raise ModelError(f"{name} is neither a model's folder nor a run; {how_to_fetch(name)}")
        return cls(path, run)

    def config(self) -> RunConfig | None:
        """The run's configuration; None of a model without one."""
        return None if self.run is None else build_recorded(self.run)

    def base(self) -> Path:
        """The model's folder; of an adapter, that of the model which it changes, by its own configuration. Raises
        `ModelError` if that is not here."""
        if not is_adapter(self.folder):
            return self.folder
        base = base_of(self.folder)
        if not base or not (Path(base) / "config.json").is_file():
            raise ModelError(
                f"{self.folder} is an adapter of the model {base!r}, which is not here; start this command where "
                f"that path leads to it, or correct base_model_name_or_path in {self.folder / ADAPTER_CONFIG}"
            )
        return Path(base)

    def load(self, base: Path, dtype: str, device: str) -> Model:
        """The model. `base`: the one that an adapter's folder changes."""
        if not is_adapter(self.folder):
            config = self.config()
            quantize = "none" if config is None else config.model.quantize
            return load_model(self.folder, dtype=dtype, device=device, quantize=quantize)
        return with_stored_adapter(load_model(base, dtype=dtype, device=device), self.folder)


def build_recorded(run: Run) -> RunConfig:
    """The configuration in a run's config.yaml, checked."""
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig), run.config)
    assert isinstance(merged, DictConfig)
    return build(merged)
