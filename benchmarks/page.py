"""Recorded figures in docs/benchmarks.md: the text between `<!-- figures: NAME ... -->` and `<!-- end of figures -->`.

    python benchmarks/page.py            # rewrites docs/benchmarks.md from benchmarks/results/NAME.json
    python benchmarks/page.py --check    # exit code 1 where docs/benchmarks.md says anything else

`NAME:text&other` takes only the records whose name contains both. A row's last cell is the number of the run below the
table that measured it; "in the spread" says that the rounds of both sides overlap.

`earlier.json` has records of other machines and of former commits: a run puts there what it replaces.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from results_schema import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def records(name: str) -> list[dict[str, Any]]:
    file, _, texts = name.partition(":")
    found = json.loads((RESULTS / f"{file}.json").read_text())
    return [each for each in found if all(text in each["name"] for text in texts.split("&"))]


def table(names: list[str]) -> str:
    """A Markdown table of the named results, and under it where, with what and at which commit they were measured."""
    found = [record for name in names for record in records(name)]
    bounded = any(each.get("roofline") for each in found)
    heads = ["measure", "rlloop", "compared with", "ratio", "aim", *(["the device allows"] if bounded else []), "run"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    sources: dict[str, int] = {}  # its number
    for each in found:
        peer = ": ".join(filter(None, [each["peer"], rounds(each, "peer_value", "peer_spread")]))
        value = f"{rounds(each, 'value', 'spread')} {each['unit']}"
        packages = ", ".join(f"{package} {version}" for package, version in each["versions"].items())
        place = f"{each['gpu']}, {each['host']}" if each.get("host") else each["gpu"]
        source = f"`{each['command']}` at {each['commit'][:7]}, {each['date']}: {place}; {packages}."
        ratio = number(each["ratio"]) + ", in the spread" * overlap(each)
        cells = [each["name"], value, peer, ratio, number(each.get("aim"))]
        cells += [number(each.get("roofline"))] if bounded else []
        cells.append(str(sources.setdefault(source, len(sources) + 1)))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *(f"{number}. {source}" for source, number in sources.items())])


def overlap(record: dict[str, Any]) -> bool:
    """True if the rounds of both sides overlap."""
    if not (record.get("spread") and record.get("peer_spread")):
        return False
    (least, most), (peer_least, peer_most) = record["spread"], record["peer_spread"]
    return least <= peer_most and peer_least <= most


def rounds(record: dict[str, Any], value: str, spread: str) -> str:
    """The median of rounds with their least and most."""
    shown = number(record[value])
    return f"{shown} ({' to '.join(map(number, record[spread]))})" if record.get(spread) else shown


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rewritten(text: str) -> str:
    return BLOCK.sub(lambda block: f"{block[1]}{table(block[2].split())}\n{block[3]}", text)


def main() -> int:
    before = PAGE.read_text()
    after = rewritten(before)
    if "--check" in sys.argv[1:]:
        if after != before:
            print("docs/benchmarks.md's figures are not those of benchmarks/results; run python benchmarks/page.py")
        return int(after != before)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
