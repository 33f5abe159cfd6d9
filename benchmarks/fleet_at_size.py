"""One version of a model of 1T parameters to 64 regions, computed from measured parts: bytes, seconds, dollars.

    python benchmarks/fleet_at_size.py                       # benchmarks/results/fleet-at-size.json
    python benchmarks/fleet_at_size.py --parameters 8e9 --regions 3 --cores 16 --dollars-per-gb 0.08
    python benchmarks/fleet_at_size.py --ratio 290 --apply-gbs 3

Nothing of that size is run. *Measured*, from benchmarks/results unless given: the size of deltas (delta-sizes.json),
what one core encodes and applies of the weights (delta-speed.json), the bytes on the links by regions x deltas
(regions.json). *Assumed*, each an option or said here: cores and machines share the work evenly, since tensors are
independent; each region's link and round trip; relays fan out as a tree, each fed by one above it, and pass on a piece
when they have all of it; a price of traffic between regions. Beside it the whole weights, on the same links and tree.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.results_schema import RESULTS, Figure, report  # noqa: E402
from rlloop.sync.manifest import PIECE  # noqa: E402


@dataclass(frozen=True)
class Assumptions:
    parameters: float
    ratio: float  # bytes of all weights by those of a delta
    headers: float  # bytes on the links by those of deltas
    encode: float  # bytes of weights a second, of one core
    apply: float
    verify: float  # hashing, likewise
    cores: int  # of one machine
    trainers: int  # machines that encode, each its shard
    engine_machines: int  # that hold one engine's weights
    regions: int
    link: float  # bytes a second into a region, and out of a relay to another
    round_trip: float  # seconds
    fan_out: int  # regions that one relay, or the trainer, feeds
    inside: float  # bytes a second inside a region, to each engine machine
    price: float  # dollars a byte between regions

    @property
    def weights(self) -> float:
        return 2 * self.parameters  # bfloat16

    @property
    def levels(self) -> int:
        """Relays that the bytes pass, one after another, to the last region."""
        reached, level, width = 0, 0, 1
        while reached < self.regions:
            width *= self.fan_out
            reached += width
            level += 1
        return level


@dataclass(frozen=True)
class Way:
    """Cost of distributing one version to all engines."""

    bytes_in_region: float
    bytes_between: float
    publish: float  # seconds until the last byte leaves the trainer's encoder
    network: float  # seconds on the way, beyond what encoding hides
    stage: float  # to decode and verify, beyond what the network hides
    dollars: float

    @property
    def seconds(self) -> float:
        return self.publish + self.network + self.stage


def way(given: Assumptions, sent: float, encode: float, decode: float, *, tree: bool = True) -> Way:
    """`sent`: bytes into each region; `encode`, `decode`: bytes of weights a second, of one core (inf: no work).

    Pieces are encoded, sent on and decoded while others follow, so that the slowest of the three sets the time; the
    others add what one piece takes.
    """
    levels = given.levels if tree else 1
    from_one = given.fan_out if tree else given.regions  # receivers that share a sender's link
    encoding = given.weights / (encode * given.cores * given.trainers)
    sending = sent * from_one / given.link
    piece = PIECE / given.link
    passing = (levels - 1) * (from_one * piece + given.round_trip) + given.round_trip
    local = sent / given.engine_machines / given.inside
    decoding = given.weights / (decode * given.cores * given.engine_machines)
    verifying = given.weights / (given.verify * given.cores * given.engine_machines)
    slowest = max(encoding, sending)
    return Way(
        bytes_in_region=sent,
        bytes_between=sent * given.regions,
        publish=encoding,
        network=slowest - encoding + passing,
        stage=max(0.0, local + decoding - slowest) + min(local + decoding, piece) + verifying,
        dollars=sent * given.regions * given.price,
    )


def measured(file: str, start: str) -> float:
    """The value of the figure whose name begins like this."""
    found = [each["value"] for each in json.loads((RESULTS / file).read_text()) if each["name"].startswith(start)]
    if not found:
        raise SystemExit(f"{RESULTS / file} has no figure {start!r}; run its benchmark, or give the value as an option")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e12)
    parser.add_argument("--regions", type=int, default=64)
    parser.add_argument("--lr", default="1e-6", help="whose measured deltas are taken: 1e-6, 1e-5 or 3e-4")
    parser.add_argument("--ratio", type=float, help="all weights by a delta; default: measured, of the mixture")
    parser.add_argument("--encode-gbs", type=float, help="GB/s of weights, one core; default: measured")
    parser.add_argument("--apply-gbs", type=float, help="likewise")
    parser.add_argument("--verify-gbs", type=float, default=1.5, help="GB/s that one core hashes")
    parser.add_argument("--cores", type=int, default=96, help="of each machine")
    parser.add_argument("--trainers", type=int, default=32, help="machines that encode, each its shard")
    parser.add_argument("--engine-machines", type=int, default=2, help="that hold one engine's weights")
    parser.add_argument("--gbit", type=float, default=10.0, help="of a region's link to others, each way")
    parser.add_argument("--inside-gbit", type=float, default=100.0, help="inside a region, to each machine")
    parser.add_argument("--round-trip", type=float, default=0.15, help="seconds between regions")
    parser.add_argument("--fan-out", type=int, default=4, help="regions that one relay feeds")
    parser.add_argument("--dollars-per-gb", type=float, default=0.02, help="of traffic between regions")
    parser.add_argument("--versions", type=int, default=1000, help="for which dollars are told")
    options = parser.parse_args()
    of = f"mixture (15,223,552 weights), lr {options.lr}"
    speed = f"one core, mixture lr {options.lr}"
    given = Assumptions(
        parameters=options.parameters,
        ratio=options.ratio or measured("delta-sizes.json", f"delta of {of}"),
        headers=measured("regions.json", "weights over the wide network by regions x deltas"),
        encode=1e9 * (options.encode_gbs or measured("delta-speed.json", f"encode {speed}")),
        apply=1e9 * (options.apply_gbs or measured("delta-speed.json", f"apply {speed}")),
        verify=1e9 * options.verify_gbs,
        cores=options.cores,
        trainers=options.trainers,
        engine_machines=options.engine_machines,
        regions=options.regions,
        link=options.gbit * 1e9 / 8,
        round_trip=options.round_trip,
        fan_out=options.fan_out,
        inside=options.inside_gbit * 1e9 / 8,
        price=options.dollars_per_gb / 1e9,
    )
    for name, value in vars(given).items():
        print(f"{name:>16} {value:,.6g}")
    print(f"{'relay levels':>16} {given.levels}\n")
    report("fleet-at-size", figures(given, options.versions))


def figures(given: Assumptions, versions: int) -> list[Figure]:
    delta = way(given, given.weights / given.ratio * given.headers, given.encode, given.apply)
    whole = way(given, given.weights, math.inf, math.inf)
    direct = way(given, given.weights, math.inf, math.inf, tree=False)
    shape = f"{given.parameters:.3g} parameters, {given.regions} regions"
    made = [
        Figure(name=f"{shape}: bytes into each region", unit="GB", value=delta.bytes_in_region / 1e9,
               peer="whole weights", peer_value=whole.bytes_in_region / 1e9, lower_is_better=True),
        Figure(name=f"{shape}: bytes between regions, a version", unit="TB", value=delta.bytes_between / 1e12,
               peer="whole weights", peer_value=whole.bytes_between / 1e12, lower_is_better=True),
        Figure(name=f"{shape}: published to the last region live", unit="s", value=delta.seconds,
               peer="whole weights, the same relays", peer_value=whole.seconds, lower_is_better=True),
        Figure(name=f"{shape}: published to the last region live, beside no relays", unit="s", value=delta.seconds,
               peer="whole weights, from the trainer to each", peer_value=direct.seconds, lower_is_better=True),
        Figure(name=f"{shape}: {versions:,} versions between regions", unit="dollars", value=versions * delta.dollars,
               peer="whole weights", peer_value=versions * whole.dollars, lower_is_better=True),
    ]  # fmt: skip
    parts = {"encoding": delta.publish, "network": delta.network, "decoding and verifying": delta.stage}
    return [*made, *(Figure(name=f"{shape}: of that, {part}", unit="s", value=seconds, lower_is_better=True)
                     for part, seconds in parts.items())]  # fmt: skip


if __name__ == "__main__":
    main()
