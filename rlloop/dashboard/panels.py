"""Which metrics stand together, in which order and on which scale. Names and formulas: docs/metrics.md.

A panel whose metrics a run does not have is not shown for it; a metric that no panel names is shown under "Everything
else". Patterns are those of fnmatch: `sync/wire_bytes*` takes a metric and its regions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any


class Kind(StrEnum):
    lines = "lines"  # one line a run and metric
    stack = "stack"  # the metrics of one run, stacked
    histogram = "histogram"  # counts between fixed edges, of one step


class Scale(StrEnum):
    linear = "linear"
    zero = "zero"  # linear, from 0
    fraction = "fraction"  # from 0, shown as per cent
    log = "log"
    symlog = "symlog"  # linear below a threshold, so that 0 has a place of its own


@dataclass(frozen=True)
class Panel:
    title: str
    metrics: tuple[str, ...]  # names or patterns
    about: str  # one sentence: what is seen here
    kind: Kind = Kind.lines
    scale: Scale = Scale.linear
    unit: str = ""
    guides: tuple[float, ...] = ()  # values at which a line is drawn across
    threshold: float = 1e-9  # below it, a symlog axis is linear


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


# A step's phases in their order; others come after them.
PHASES = tuple(
    f"time/{name}" for name in ("sync", "rollout", "reward", "advantage", "parity", "update", "record", "eval")
)

# 0 is the contract; 7e-5 and 1e-3 are where a stack of separate engine and trainer is usually called good, and bad.
KL_GUIDES = (0.0, 7e-5, 1e-3)


def _kl(title: str, metric: str, about: str, threshold: float = 1e-9) -> Panel:
    return Panel(title, (metric,), about, scale=Scale.symlog, unit="nats", guides=KL_GUIDES, threshold=threshold)


SECTIONS: tuple[Section, ...] = (
    Section(
        "Parity",
        (
            _kl("KL, k3", "parity/k3", "Train-inference KL, mean of r − 1 − d. 0 means equal bits."),
            _kl("KL, k1", "parity/k1", "The same KL as mean of mu − pi: noisier, and it may be negative.", 1e-4),
            Panel("Tokens different", ("parity/tokens_different", "parity/raw_different", "parity/redrawn_different"),
                  "Fraction of trained tokens whose two logprobs, or raw logprobs, differ in a bit; and that are not "
                  "what their seeds draw from the trainer's distribution.", scale=Scale.fraction, guides=(0.0,)),
            Panel("Largest difference", ("parity/logprob_diff_max",), "Largest |d| of a step.", scale=Scale.symlog,
                  unit="nats", guides=(0.0,)),
            Panel("Difference, p99.9", ("parity/logprob_diff_p999",), "One token in a thousand differs by more.",
                  scale=Scale.symlog, unit="nats", guides=(0.0,)),
            Panel("Difference, mean", ("parity/logprob_diff_mean",), "Mean |d|.", scale=Scale.symlog, unit="nats",
                  guides=(0.0,)),
            Panel("KL, k3, by region", ("fleet/*/k3",), "The same KL, over what a region's engines sampled.",
                  scale=Scale.symlog, unit="nats", guides=KL_GUIDES),
            Panel("Tokens different, by region", ("fleet/*/tokens_different",), "Over what a region's engines sampled.",
                  scale=Scale.fraction, guides=(0.0,)),
        ),
    ),
    Section(
        "Ratios and clipping",
        (
            Panel("Log-ratio histogram", ("is/log_ratio_histogram",), "Tokens by d, trainer's logprob minus engine's.",
                  kind=Kind.histogram),
            Panel("Effective sample size", ("is/ess",), "(sum r)² / (n sum r²); 1 when all weights are equal.",
                  scale=Scale.fraction, guides=(1.0,)),
            Panel("Clipped", ("loss/clip_high", "loss/clip_low", "loss/clip_dual"), "Fraction of unmasked tokens "
                  "whose policy ratio is clipped.", scale=Scale.fraction),
            Panel("Tokens discarded", ("loss/tokens_discarded",), "Fraction whose gradient is 0 by clipping or "
                  "masking: what a mismatch costs.", scale=Scale.fraction),
            Panel("Correction", ("is/truncated_high", "is/truncated_low", "is/masked"), "Fraction of tokens that the "
                  "importance correction touched.", scale=Scale.fraction),
            Panel("Ratio", ("is/ratio_max", "is/ratio_mean", "is/ratio_min"), "r = exp(d): largest, mean, smallest.",
                  scale=Scale.log, guides=(1.0,)),
            Panel("Perplexity ratio", ("parity/ppl_ratio",), "Mean over sequences of exp(mean mu − mean pi)."),
            Panel("Chi-squared", ("parity/chi2",), "Mean of r² − 1: what the weights' variance is.", scale=Scale.symlog,
                  guides=(0.0,), threshold=1e-4),
        ),
    ),
    Section(
        "Reward",
        (
            Panel("pass@1, held-out", ("eval/solved", "eval/engine_solved"), "Problems that are never trained on; the "
                  "engine's own where it differs on purpose.", scale=Scale.fraction),
            Panel("Reward", ("reward/mean",), "Mean over accepted completions."),
            Panel("Solved, training batch", ("reward/solved",), "Fraction of accepted completions.",
                  scale=Scale.fraction),
            Panel("Groups without signal", ("reward/groups_without_signal",), "Fraction of groups whose rewards are "
                  "all equal.", scale=Scale.fraction),
            Panel("Reward, spread", ("reward/std",), "Standard deviation over accepted completions.", scale=Scale.zero),
            Panel("Held-out reward", ("eval/reward", "eval/engine_reward"), "Of the same held-out problems."),
            Panel("Reward's parts", ("reward/*",), "Components that the reward function names."),
        ),
    ),
    Section(
        "Completions",
        (
            Panel("Length", ("rollout/length_mean",), "Mean tokens of a completion.", scale=Scale.zero, unit="tokens"),
            Panel("Truncated", ("rollout/truncated",), "Fraction cut off by max_tokens.", scale=Scale.fraction),
            Panel("Not as asked for", ("rollout/faults",), "Completions with another prompt, other parameters or an "
                  "ending that contradicts them.", scale=Scale.zero),
            Panel("Turns", ("rollout/turns_mean",), "Mean turns of the policy.", scale=Scale.zero),
        ),
    ),
    Section(
        "Optimisation",
        (
            Panel("Entropy", ("loss/entropy",), "Of the policy, a token.", scale=Scale.zero, unit="nats"),
            Panel("Gradient norm", ("loss/grad_norm",), "Before clipping.", scale=Scale.zero),
            Panel("KL to reference", ("loss/kl_ref", "reward/kl_ref"), "To the reference model.", scale=Scale.symlog,
                  unit="nats"),
            Panel("Loss", ("loss/policy", "loss/total"), "The part that follows the reward, and what was "
                  "differentiated."),
            Panel("Learning rate", ("trainer/lr",), "", scale=Scale.zero),
            Panel("Updates refused", ("trainer/refused",), "1 where a gradient was not finite.", scale=Scale.zero),
        ),
    ),
    Section(
        "Time",
        (
            Panel("Step, by phase", (*PHASES, "time/*"), "Seconds, each counted in its innermost phase; what no phase "
                  "claims is waiting.", kind=Kind.stack, scale=Scale.zero, unit="s"),
            Panel("Step", ("time/step",), "Seconds of a whole step.", scale=Scale.zero, unit="s"),
            Panel("Throughput, rollout", ("perf/rollout_tokens_per_s",), "Completion tokens over rollout time.",
                  scale=Scale.zero, unit="tokens/s"),
            Panel("Throughput, trainer", ("perf/trainer_tokens_per_s",), "All tokens of trained sequences over update "
                  "time.", scale=Scale.zero, unit="tokens/s"),
            Panel("MFU", ("perf/mfu", "perf/mfu*"), "Model FLOPs utilisation.", scale=Scale.fraction),
            Panel("Waiting", ("wait/*", "perf/wait*", "perf/idle*"), "Time in which a part had nothing to do.",
                  scale=Scale.zero, unit="s"),
        ),
    ),
    Section(
        "Weight sync",
        (
            Panel("Bytes on the wire", ("sync/wire_bytes", "sync/*wire_bytes*", "fleet/*/sync_*bytes"),
                  "Of one version; by region where there are some.", scale=Scale.zero, unit="B"),
            Panel("Compression", ("sync/ratio", "sync/*ratio*", "fleet/*/sync_ratio"), "Full size over bytes sent.",
                  scale=Scale.log),
            Panel("Weights changed", ("sync/changed", "sync/*changed*", "fleet/*/sync_changed"),
                  "Fraction that this version changes.", scale=Scale.fraction),
            Panel("Pause", ("sync/pause_seconds", "sync/*pause_seconds*", "fleet/*/sync_pause_seconds"),
                  "Time in which an engine served nothing.", scale=Scale.zero, unit="s"),
            Panel("Sync, by part", ("sync/seconds", "sync/*seconds*"), "Where the time of a sync goes.",
                  scale=Scale.zero, unit="s"),
            Panel("Sync, by region", ("fleet/*/sync_seconds",), "The slowest engine's last change of weights.",
                  scale=Scale.zero, unit="s"),
            Panel("Sync, by region and part", ("fleet/*/sync_*seconds",), "Where a region's time goes.",
                  scale=Scale.zero, unit="s"),
            Panel("Weight error", ("sync/weight_error",), "Norm of what a drifting engine's weights are off by.",
                  scale=Scale.zero),
        ),
    ),
    Section(
        "Versions and fleet",
        (
            Panel("Staleness", ("rollout/version_lag", "rollout/version_lag*"), "Weight versions behind the trainer's.",
                  scale=Scale.zero, unit="versions"),
            Panel("Engines", ("fleet/engines", "fleet/*/engines"), "That serve; by region.", scale=Scale.zero),
            Panel("Completions, by region", ("fleet/*/completions",), "Made in a step.", scale=Scale.zero),
            Panel("Tokens, by region", ("fleet/*/tokens",), "Trained tokens that the region's engines sampled.",
                  scale=Scale.zero),
            Panel("Done again", ("fleet/reissued", "fleet/hedged"), "Completions made again, or twice.",
                  scale=Scale.zero),
            Panel("Engines that fell out", ("fleet/lost", "fleet/quarantined"), "Since the step before.",
                  scale=Scale.zero),
            Panel("Fleet", ("fleet/*",), "What else the fleet tells.", scale=Scale.zero),
        ),
    ),
    Section(
        "Experts",
        (
            Panel("Routes, different", ("parity/router_different", "parity/indexer_different"), "Fraction of (token, "
                  "layer) whose set of experts, or of indexed keys, differs.", scale=Scale.fraction, guides=(0.0,)),
            Panel("Busiest expert", ("experts/load_max",), "Its load by the mean of its layer.", scale=Scale.zero),
            Panel("Experts unused", ("experts/unused",), "Fraction of experts that no token went to.",
                  scale=Scale.fraction),
            Panel("Experts", ("experts/*", "router/*", "moe/*"), "What else the routers tell."),
        ),
    ),
    Section(
        "Ledger",
        (
            Panel("Where completions went", ("ledger/trained", "ledger/dropped", "ledger/rejected"), "They add up to "
                  "what was sampled.", kind=Kind.stack, scale=Scale.zero),
            Panel("Sampled and accepted", ("ledger/sampled", "ledger/accepted"), "Counts a step.", scale=Scale.zero),
            Panel("Held-out without a reward", ("eval/rejected",), "Held-out completions whose reward failed.",
                  scale=Scale.zero),
            Panel("Tokens compared", ("parity/tokens", "parity/redrawn"), "Every trained token of a step; and of "
                  "these, those drawn again.", scale=Scale.zero),
            Panel("Tokens certain", ("parity/tokens_certain",), "Fraction sampled with probability 1: their logprobs "
                  "say nothing of who computed them, only raw ones do.", scale=Scale.fraction),
        ),
    ),
)  # fmt: skip


def present(names: Iterable[str]) -> list[dict[str, Any]]:
    """The sections and panels for which there are metrics, as JSON, with `metrics` resolved to names.

    A pattern takes what no panel names and no pattern before it took.
    """
    have = sorted(names)
    exact = {name for section in SECTIONS for panel in section.panels for name in panel.metrics}
    shown: set[str] = set()
    sections = []
    for section in SECTIONS:
        panels = []
        for panel in section.panels:
            found = [name for pattern in panel.metrics for name in _match(pattern, have, exact | shown)]
            if found:
                shown.update(found)
                named = any(name not in panel.metrics for name in found)  # the title does not say which are shown
                panels.append({**asdict(panel), "metrics": list(dict.fromkeys(found)), "named": named})
        if panels:
            sections.append({"title": section.title, "panels": panels})
    rest = [name for name in have if name not in shown]
    if rest:
        other = [{**asdict(Panel(name, (name,), "")), "metrics": [name], "named": False} for name in rest]
        sections.append({"title": "Everything else", "panels": other})
    return sections


def _match(pattern: str, have: list[str], taken: set[str]) -> list[str]:
    if "*" not in pattern:
        return [pattern] if pattern in have else []
    return [name for name in have if fnmatchcase(name, pattern) and name not in taken]
