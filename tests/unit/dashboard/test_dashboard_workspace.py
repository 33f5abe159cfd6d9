import json

import pytest

from rlloop.dashboard.panels import SECTIONS, Kind
from rlloop.dashboard.workspace import line_plot, workspace

# The library's models still use an older style of the one they are built with.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def test_the_workspace_has_the_dashboards_panels():
    made = workspace("entity", "project")
    assert [section.name for section in made.sections] == [section.title for section in SECTIONS]
    for section, theirs in zip(SECTIONS, made.sections, strict=True):
        titles = [panel.title for panel in section.panels if panel.kind is not Kind.histogram]
        assert len(theirs.panels) == len(titles)
        assert all(plot.title.startswith(title) for plot, title in zip(theirs.panels, titles, strict=True))


def test_it_can_be_put_into_the_form_that_is_sent():
    spec = json.loads(workspace("entity", "project")._to_model().model_dump_json())["spec"]
    sections = spec["section"]["panel_bank_config"]["sections"]
    named = {section["name"]: section for section in sections}
    first = named["Parity"]["panels"][0]["config"]
    assert first["metrics"] == ["parity/k3"]


def test_patterns_become_regular_expressions():
    [panel] = [panel for section in SECTIONS for panel in section.panels if panel.title == "Bytes on the wire"]
    assert line_plot(panel)["metric_regex"] == (r"^sync/wire_bytes$|^sync/.*wire_bytes.*$|^fleet/.*/sync_.*bytes$")
