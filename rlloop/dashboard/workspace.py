"""The dashboard's panels as a workspace of Weights & Biases, for runs that log there (`sinks.wandb`).

Uses the wandb-workspaces library. Guides, symmetric logarithms and histograms are left out, since it has none.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any

from rlloop.dashboard.panels import SECTIONS, Kind, Panel, Scale
from rlloop.errors import ConfigError

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "rlloop"
OPEN = ("Learning", "Parity")  # sections that are open at first


def workspace(entity: str, project: str) -> Workspace:
    """The workspace, not yet saved. Raises `ConfigError` if the library is not installed."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError("--wandb needs the package wandb-workspaces: pip install 'rlloop[wandb]'")
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2

    sections = [
        workspaces.Section(
            name=section.title,
            panels=[v2.LinePlot(**line_plot(panel)) for panel in section.panels if panel.kind is not Kind.histogram],
            is_open=section.title in OPEN,
        )
        for section in SECTIONS
    ]
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def line_plot(panel: Panel) -> dict[str, Any]:
    """A panel as the arguments of a line plot. Patterns become a regular expression."""
    title = f"{panel.title}, {panel.unit}" if panel.unit else panel.title
    plot: dict[str, Any] = {"title": title, "x": "Step", "smoothing_type": "none"}
    if any("*" in metric for metric in panel.metrics):
        plot["metric_regex"] = "|".join(
            f"^{re.escape(metric).replace(re.escape('*'), '.*')}$" for metric in panel.metrics
        )
    else:
        plot["y"] = [*panel.metrics, *panel.beneath]
    if panel.kind is Kind.stack:
        plot["plot_type"] = "stacked-area"
    if panel.scale is Scale.log:
        plot["log_y"] = True
    if panel.scale in (Scale.zero, Scale.fraction):
        plot["range_y"] = (0.0, None)
    return plot


def save(where: str) -> str:
    """Create the workspace in `ENTITY/PROJECT`. Returns its address. Needs a key, as stored by `wandb login`."""
    entity, _, project = where.partition("/")
    if not entity or not project or "/" in project:
        raise ConfigError(f"--wandb is {where!r}; it must be ENTITY/PROJECT, as in the address of the project's page")
    created = workspace(entity, project)
    created.save()
    return created.url
