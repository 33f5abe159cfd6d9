import re
from fnmatch import fnmatchcase
from pathlib import Path

from rlloop.dashboard.panels import SECTIONS, present

DOCUMENTED = Path(__file__).parents[3] / "docs" / "metrics.md"


def drawn(panel) -> tuple[str, ...]:
    return panel.metrics + panel.beneath


def shown(sections) -> list[str]:
    return [name for section in sections for panel in section["panels"] for name in panel["metrics"]]


def test_what_a_run_lacks_is_not_shown():
    sections = present({"parity/k3", "reward/mean"})
    assert [section["title"] for section in sections] == ["Learning", "Parity"]
    assert [section["parity"] for section in sections] == [False, True]
    assert shown(sections) == ["reward/mean", "parity/k3"]
    assert present(set()) == []


def test_kl_has_its_guides_and_its_zero():
    [panel] = present({"parity/k3"})[0]["panels"]
    assert panel["guides"] == (0.0, 7e-5, 1e-3)
    assert panel["scale"] == "symlog"


def test_what_matters_comes_first():
    titles = [panel.title for panel in SECTIONS[0].panels]
    assert titles[:4] == ["Held-out pass@1", "Reward", "Length", "Entropy"]
    [panel] = present({"eval/reward", "reward/mean"})[0]["panels"]
    assert panel["metrics"] == ["eval/reward", "reward/mean"]  # one panel: the training batch beneath the held-out one
    assert panel["beneath"] == ("reward/mean",)


def test_a_pattern_takes_what_no_panel_names():
    sections = present({"reward/mean", "reward/well_formed", "time/rollout", "time/step", "fleet/eu/sync_wire_bytes"})
    by_title = {panel["title"]: panel["metrics"] for section in sections for panel in section["panels"]}
    assert by_title["Reward's parts"] == ["reward/well_formed"]
    assert by_title["Step, by phase"] == ["time/rollout"]
    assert by_title["Bytes on the wire"] == ["fleet/eu/sync_wire_bytes"]


def test_nothing_is_hidden():
    sections = present({"mine/own", "parity/k3"})
    assert sections[-1]["title"] == "Everything else"
    assert sections[-1]["panels"][0]["metrics"] == ["mine/own"]


def test_every_documented_metric_has_a_panel():
    table = [line for line in DOCUMENTED.read_text().splitlines() if line.startswith("| `")]
    names = [name for line in table for name in re.findall(r"`([a-z]+/[a-z0-9_]+)`", line.split("|")[1])]
    patterns = [metric for section in SECTIONS for panel in section.panels for metric in drawn(panel)]
    assert len(names) > 35
    without = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert without == ["eval/draws"]  # under "Everything else"


def test_no_metric_is_named_twice_but_held_out_pairs():
    exact = [metric for section in SECTIONS for panel in section.panels for metric in drawn(panel) if "*" not in metric]
    assert len(exact) == len(set(exact))


def test_titles_are_the_panels_names_in_links():
    titles = [panel.title for section in SECTIONS for panel in section.panels]
    assert len(titles) == len(set(titles))
