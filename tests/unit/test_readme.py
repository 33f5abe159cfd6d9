"""The README states no figure but the recorded ones."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_figures_are_those_of_the_recorded_results():
    script = ROOT / "benchmarks" / "readme.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    local = [(page, target) for page, target in links if not target.startswith(("http://", "https://"))]
    assert len(local) > 10
    assert [f"{page.name}: {target}" for page, target in local if not (page.parent / target).exists()] == []
