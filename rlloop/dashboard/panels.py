"""Panels of the dashboard: groups of metrics, their order and scales. docs/metrics.md has names and formulas.

A panel is shown for runs that have one of its metrics; a metric without a panel is shown under "Everything else".
Patterns are fnmatch's: `sync/wire_bytes*` matches a metric and those of its regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any


class Kind(StrEnum):
    lines = "lines"  # one line for each run and metric
    stack = "stack"  # the metrics of one run, stacked
    histogram = "histogram"  # one step's counts between fixed edges


class Scale(StrEnum):
    linear = "linear"
    zero = "zero"  # linear, from 0
    fraction = "fraction"  # from 0, shown as per cent
    log = "log"
    symlog = "symlog"  # logarithmic, but linear below a threshold, so that it includes 0


@dataclass(frozen=True)
class Panel:
    title: str
    metrics: tuple[str, ...]  # names or patterns
    about: str  # one sentence of explanation
    kind: Kind = Kind.lines
    scale: Scale = Scale.linear
    unit: str = ""
    guides: tuple[float, ...] = ()  # values at which horizontal lines are drawn
    threshold: float = 1e-9  # below it, a symlog axis is linear
    beneath: tuple[str, ...] = ()  # metrics of every step that are drawn smoothed and pale beneath `metrics`
    labels: Mapping[str, str] = field(default_factory=dict)  # of metrics, where their names say too little


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]
    parity: bool = False  # one line, green while every token has equal bits, that unfolds otherwise


# A step's phases in their order; others follow.
PHASES = tuple(
    f"time/{name}" for name in ("sync", "rollout", "reward", "advantage", "parity", "update", "record", "eval")
)

# 0 is the contract; separate engines and trainers are usually called good at 7e-5, and bad at 1e-3.
KL_GUIDES = (0.0, 7e-5, 1e-3)


def _kl(title: str, metric: str, about: str, threshold: float = 1e-9) -> Panel:
    return Panel(title, (metric,), about, scale=Scale.symlog, unit="nats", guides=KL_GUIDES, threshold=threshold)


HELD_OUT = {
    "eval/solved": "held out", "eval/reward": "held out", "eval/engine_solved": "engine",
    "eval/engine_reward": "engine", "reward/solved": "training", "reward/mean": "training",
}  # fmt: skip

PASSES = {"eval/solved", "eval/engine_solved", "reward/solved"}  # not shown where nothing passes or fails
# Constant in runs on given completions, so not shown.
CONSTANT = {"reward/mean", "reward/std", "reward/solved", "reward/groups_without_signal"}

SECTIONS: tuple[Section, ...] = (
    Section(
        "Learning",
        (
            Panel("Held-out pass@1", ("eval/solved", "eval/engine_solved"), "Problems that are never trained on, also "
                  "through the engine if it differs on purpose; beneath, the training batch, smoothed.",
                  scale=Scale.fraction, beneath=("reward/solved",), labels=HELD_OUT),
            Panel("Reward", ("eval/reward", "eval/engine_reward"), "Mean of held-out completions; beneath, of the "
                  "training batch, smoothed.", beneath=("reward/mean",), labels=HELD_OUT),
            Panel("Length", ("rollout/length_mean",), "Mean tokens of a completion.", scale=Scale.zero, unit="tokens"),
            Panel("Entropy", ("loss/entropy",), "Of the policy, a token.", scale=Scale.zero, unit="nats"),
            Panel("Truncated", ("rollout/truncated",), "Fraction cut off by max_tokens.", scale=Scale.fraction),
            Panel("Gradient norm", ("loss/grad_norm",), "Before clipping.", scale=Scale.zero),
        ),
    ),
    Section(
        "Parity",
        (
            _kl("KL, k3", "parity/k3", "Train-inference KL, mean of r − 1 − d. 0 means equal bits."),
            _kl("KL of image tokens", "parity/k3_image", "k3 of a prompt's tokens that are, or follow, an image's."),
            _kl("KL of the prompt's text", "parity/k3_text", "k3 of the other tokens of a prompt with images."),
            Panel("Prompt tokens different", ("parity/prompt_tokens_different",), "Fraction of the compared prompt's "
                  "tokens whose logprobs differ in a bit.", scale=Scale.fraction, guides=(0.0,)),
            _kl("KL, k1", "parity/k1", "The same KL as mean of mu − pi: noisier, and it may be negative.", 1e-4),
            Panel("Tokens different", ("parity/tokens_different", "parity/raw_different", "parity/redrawn_different"),
                  "Fraction of trained tokens whose logprobs, or raw logprobs, differ in a bit between engine and "
                  "trainer; and of those that their seeds do not draw from the trainer's distribution.",
                  scale=Scale.fraction, guides=(0.0,)),
            Panel("Held-out tokens different",
                  ("eval/tokens_different", "eval/raw_different", "eval/redrawn_different"),
                  "The same of held-out completions.", scale=Scale.fraction, guides=(0.0,)),
            _kl("KL, k3, held out", "eval/k3", "The same KL over the tokens of held-out completions."),
            Panel("Largest difference", ("parity/logprob_diff_max",), "Largest |d| of a step.", scale=Scale.symlog,
                  unit="nats", guides=(0.0,)),
            Panel("Difference, p99.9", ("parity/logprob_diff_p999",), "One token in a thousand differs by more.",
                  scale=Scale.symlog, unit="nats", guides=(0.0,)),
            Panel("Difference, mean", ("parity/logprob_diff_mean",), "Mean |d|.", scale=Scale.symlog, unit="nats",
                  guides=(0.0,)),
            Panel("Log-ratio histogram", ("is/log_ratio_histogram",), "Tokens by d, trainer's logprob minus engine's.",
                  kind=Kind.histogram),
            Panel("Effective sample size", ("is/ess",), "(sum r)² / (n sum r²); 1 when all weights are equal.",
                  scale=Scale.fraction, guides=(1.0,)),
            Panel("Ratio", ("is/ratio_max", "is/ratio_mean", "is/ratio_min"), "r = exp(d): largest, mean, smallest.",
                  scale=Scale.log, guides=(1.0,)),
            Panel("Perplexity ratio", ("parity/ppl_ratio",), "Mean over sequences of exp(mean mu − mean pi)."),
            Panel("Chi-squared", ("parity/chi2",), "Mean of r² − 1: the weights' variance.", scale=Scale.symlog,
                  guides=(0.0,), threshold=1e-4),
            Panel("KL, k3, by region", ("fleet/*/k3",), "The same KL, over the tokens that a region's engines sampled.",
                  scale=Scale.symlog, unit="nats", guides=KL_GUIDES),
            Panel("Tokens different, by region", ("fleet/*/tokens_different",), "Of those that a region sampled.",
                  scale=Scale.fraction, guides=(0.0,)),
        ),
        parity=True,
    ),
    Section(
        "Rewards and groups",
        (
            Panel("Groups without signal", ("reward/groups_without_signal",), "Fraction of groups whose rewards are "
                  "all equal.", scale=Scale.fraction),
            Panel("Reward, spread", ("reward/std",), "Standard deviation over accepted completions.", scale=Scale.zero),
            Panel("Reward's parts", ("reward/*",), "Components that the reward function names."),
            Panel("Turns", ("rollout/turns_mean",), "Mean turns of the policy.", scale=Scale.zero),
            Panel("Partial rollouts", ("rollout/groups_carried", "rollout/groups_dropped"), "Groups of conversations "
                  "that go on into the next step, and those that took too long.", scale=Scale.zero),
            Panel("Not as asked for", ("rollout/faults",), "Completions with another prompt, other parameters or an "
                  "ending that contradicts them.", scale=Scale.zero),
        ),
    ),
    Section(
        "Optimisation",
        (
            Panel("Loss", ("loss/policy", "loss/total"), "The part that follows the reward, and the whole that "
                  "is differentiated."),
            Panel("Learning rate", ("trainer/lr",), "", scale=Scale.zero),
            Panel("KL to reference", ("loss/kl_ref", "reward/kl_ref"), "To the reference model.", scale=Scale.symlog,
                  unit="nats"),
            Panel("Clipped", ("loss/clip_high", "loss/clip_low", "loss/clip_dual"), "Fraction of unmasked tokens "
                  "whose policy ratio is clipped.", scale=Scale.fraction),
            Panel("Tokens discarded", ("loss/tokens_discarded",), "Fraction whose gradient is 0 by clipping or "
                  "masking: the cost of a mismatch.", scale=Scale.fraction),
            Panel("Correction", ("is/truncated_high", "is/truncated_low", "is/masked"), "Fraction of tokens that the "
                  "importance correction changed.", scale=Scale.fraction),
            Panel("Critic, loss", ("critic/loss",), "Half the mean squared error of its values.", scale=Scale.zero),
            Panel("Critic, explained variance", ("critic/explained_variance",), "1 − Var(returns − values) / "
                  "Var(returns): 1 is perfect, 0 a constant.", guides=(1.0,)),
            Panel("Critic, values", ("critic/value_mean", "critic/return_mean"), "Values that made the advantages, and "
                  "returns."),
            Panel("Critic", ("critic/*",), "Further metrics of the critic."),
            Panel("Preference accuracy", ("loss/reward_accuracy",), "Fraction of pairs whose chosen one has the larger "
                  "reward.", scale=Scale.fraction),
            Panel("Rewards of pairs", ("loss/reward_chosen", "loss/reward_rejected", "loss/reward_good",
                  "loss/reward_bad", "loss/reward_margin"), "Implied by the policy: of chosen and rejected, or of good "
                  "and bad, completions."),
            Panel("Updates refused", ("trainer/refused",), "1 where a gradient was not finite.", scale=Scale.zero),
        ),
    ),
    Section(
        "Time",
        (
            Panel("Step, by phase", (*PHASES, "time/*"), "Seconds, each counted in its innermost phase; time in no "
                  "phase is waiting.", kind=Kind.stack, scale=Scale.zero, unit="s"),
            Panel("Step", ("time/step",), "Seconds of a whole step.", scale=Scale.zero, unit="s"),
            Panel("Throughput, rollout", ("perf/rollout_tokens_per_s",), "Completion tokens over rollout time.",
                  scale=Scale.zero, unit="tokens/s"),
            Panel("Throughput, trainer", ("perf/trainer_tokens_per_s",), "All tokens of trained sequences over update "
                  "time.", scale=Scale.zero, unit="tokens/s"),
            Panel("Shared prompt tokens", ("trainer/shared_tokens",), "Fraction of the trained sequences' tokens that "
                  "another sequence of their group had.", scale=Scale.fraction),
            Panel("MFU", ("perf/mfu", "perf/mfu*"), "Model FLOPs utilisation.", scale=Scale.fraction),
            Panel("Optimizer streamed", ("memory/stream_seconds",), "Time of an update in which what trainer.offload "
                  "keeps in host memory came, was worked on and went back.", scale=Scale.zero, unit="s"),
            Panel("Bytes streamed", ("memory/streamed_bytes",), "Of an update, there and back.", scale=Scale.zero,
                  unit="B"),
            Panel("Memory, trainer", ("memory/device_peak_bytes", "memory/host_bytes"), "The most that the trainer's "
                  "GPU held since the last update; optimizer state in host memory.", scale=Scale.zero, unit="B"),
            Panel("Waiting", ("wait/*", "perf/wait*", "perf/idle*"), "Time in which a part had nothing to do.",
                  scale=Scale.zero, unit="s"),
        ),
    ),
    Section(
        "Machine",
        (
            Panel("CPU", ("system/cpu",), "Fraction of the machine's cores that were busy.", scale=Scale.fraction,
                  guides=(1.0,)),
            Panel("Memory", ("system/memory",), "Fraction of the machine's memory that is in use.",
                  scale=Scale.fraction, guides=(1.0,)),
            Panel("Memory, this process", ("system/process_bytes",), "Resident memory of the process that takes the "
                  "steps.", scale=Scale.zero, unit="B"),
            Panel("Disk, free", ("system/disk_free_bytes",), "Where the run's folder lies.", scale=Scale.zero,
                  unit="B"),
            Panel("GPU, busy", ("system/gpu*_busy",), "Fraction of the last second in which a kernel ran.",
                  scale=Scale.fraction, guides=(1.0,)),
            Panel("GPU, memory", ("system/gpu*_memory",), "Fraction of a GPU's memory that is in use.",
                  scale=Scale.fraction, guides=(1.0,)),
        ),
    ),
    Section(
        "Weight sync",
        (
            Panel("Bytes on the wire", ("sync/wire_bytes", "sync/*wire_bytes*", "fleet/*/sync_*bytes"),
                  "Of one version; also by region.", scale=Scale.zero, unit="B"),
            Panel("Compression", ("sync/ratio", "sync/*ratio*", "fleet/*/sync_ratio"), "Full size over bytes sent.",
                  scale=Scale.log),
            Panel("Weights changed", ("sync/changed", "sync/*changed*", "fleet/*/sync_changed"),
                  "Fraction of weights that a version changes.", scale=Scale.fraction),
            Panel("Pause", ("sync/pause_seconds", "sync/*pause_seconds*", "fleet/*/sync_pause_seconds"),
                  "Time in which an engine served nothing.", scale=Scale.zero, unit="s"),
            Panel("Sync, by part", ("sync/seconds", "sync/*seconds*"), "Where the time of a sync goes.",
                  scale=Scale.zero, unit="s"),
            Panel("Sync, by region", ("fleet/*/sync_seconds",), "The slowest engine's last change of weights.",
                  scale=Scale.zero, unit="s"),
            Panel("Sync, by region and part", ("fleet/*/sync_*seconds",), "Where a region's time goes.",
                  scale=Scale.zero, unit="s"),
            Panel("Weight error", ("sync/weight_error",), "Norm of a drifting engine's weights less the trainer's.",
                  scale=Scale.zero),
        ),
    ),
    Section(
        "Versions and fleet",
        (
            Panel("Staleness", ("rollout/version_lag", "rollout/version_lag*"), "Weight versions behind the trainer's.",
                  scale=Scale.zero, unit="versions"),
            Panel("Engines", ("fleet/engines", "fleet/*/engines"), "Engines that serve; by region.", scale=Scale.zero),
            Panel("Completions, by region", ("fleet/*/completions",), "Sampled in a step.", scale=Scale.zero),
            Panel("Tokens, by region", ("fleet/*/tokens",), "Trained tokens that the region's engines sampled.",
                  scale=Scale.zero),
            Panel("Done again", ("fleet/reissued", "fleet/hedged"), "Completions sampled again after a failure, or "
                  "twice to save time.", scale=Scale.zero),
            Panel("Engines that fell out", ("fleet/lost", "fleet/quarantined"), "Since the step before.",
                  scale=Scale.zero),
            Panel("Fleet", ("fleet/*",), "Further metrics of the fleet.", scale=Scale.zero),
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
            Panel("Experts", ("experts/*", "router/*", "moe/*"), "Further metrics of the routers."),
        ),
    ),
    Section(
        "Ledger",
        (
            Panel("Where completions went", ("ledger/trained", "ledger/dropped", "ledger/rejected"), "They add up to "
                  "those sampled.", kind=Kind.stack, scale=Scale.zero),
            Panel("Sampled and accepted", ("ledger/sampled", "ledger/accepted"), "Counts by step.", scale=Scale.zero),
            Panel("Held-out without a reward", ("eval/rejected",), "Held-out completions whose reward failed.",
                  scale=Scale.zero),
            Panel("Tokens compared", ("parity/tokens", "parity/redrawn", "parity/prompt_tokens"), "Every trained token "
                  "of a step; of these, those drawn again; and those of one prompt with images.", scale=Scale.zero),
            Panel("Held-out tokens compared", ("eval/tokens", "eval/redrawn"), "Of an evaluation; of these, those "
                  "drawn again.", scale=Scale.zero),
            Panel("Tokens certain", ("parity/tokens_certain",), "Fraction sampled with probability 1: their logprobs "
                  "are 0 on both sides, so only raw ones can differ.", scale=Scale.fraction),
        ),
    ),
)  # fmt: skip


def present(names: Iterable[str], held_out: tuple[str, str] = ("reward", "pass@1")) -> list[dict[str, Any]]:
    """Sections and panels that have any of the metrics `names`, as JSON values, with `metrics` resolved to names.
    `held_out`: what `eval/reward` and `eval/solved` are called (`rlloop.metrics.held_out_names`).

    A pattern matches only metrics that no panel names and no earlier pattern matched.
    """
    have = sorted(names)
    reward, solves = held_out
    exact = {name for section in SECTIONS for panel in section.panels for name in (*panel.metrics, *panel.beneath)}
    shown: set[str] = set()
    sections = []
    for section in SECTIONS:
        panels = []
        for panel in section.panels:
            patterns = (*panel.metrics, *panel.beneath)
            matched = [name for pattern in patterns for name in _match(pattern, have, exact | shown)]
            if matched:
                shown.update(matched)
                named = any(name not in patterns for name in matched)  # the title does not name those matched
                title = reward.capitalize() if "eval/reward" in panel.metrics else panel.title.replace("pass@1", solves)
                resolved = {"title": title, "metrics": list(dict.fromkeys(matched)), "named": named}
                panels.append({**asdict(panel), **resolved})
        if panels:
            sections.append({"title": section.title, "panels": panels, "parity": section.parity})
    rest = [name for name in have if name not in shown]
    if rest:
        other = [{**asdict(Panel(name, (name,), "")), "metrics": [name], "named": False} for name in rest]
        sections.append({"title": "Everything else", "panels": other, "parity": False})
    return sections


def _match(pattern: str, have: list[str], taken: set[str]) -> list[str]:
    if "*" not in pattern:
        return [pattern] if pattern in have else []
    return [name for name in have if fnmatchcase(name, pattern) and name not in taken]
