"""Compares the engine's logprobs with the trainer's, bit by bit, at each step.

Notation of docs/metrics.md, for a token: mu = the engine's logprob, pi = the trainer's before the update, d = pi − mu,
r = exp(d). k1 and k3 are estimates of the train-inference KL: the means of −d, and of expm1(d) − d, which is never
negative. Sums are float64, and expm1 keeps differences of 1e-9 from being lost in a rounding. ESS is the effective
sample size, (sum r)^2 / sum r^2, here by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rlloop.config.run import ParityConfig, ParityMode
from rlloop.errors import ConfigError
from rlloop.metrics import LOG_RATIO_EDGES, Histogram
from rlloop.parity.certificate import Certificate, bits_digest, content_digest
from rlloop.parity.draws import Draws, check_draws
from rlloop.types import Recomputed, Sample

RUNGS = ("bitwise", "replay", "correction")  # of parity.mode=fallback, downwards; below the last the run stops


@dataclass(frozen=True)
class TokenDifference:
    """One trained token whose logprobs, or raw logprobs, differ between engine and trainer."""

    uid: str  # of the sequence
    index: int  # of the token among the policy's own
    position: int  # of the token in prompt + completion
    token_id: int
    engine: float
    engine_bits: str  # the float32, as hexadecimal
    trainer: float
    trainer_bits: str
    raw: bool = False  # the raw logprobs differ (temperature 1, nothing truncated)

    def __str__(self) -> str:
        return (
            f"sequence {self.uid}, token {self.index} of the completion (id {self.token_id}): "
            f"{'raw, ' if self.raw else ''}engine {self.engine:.9g} ({self.engine_bits}), "
            f"trainer {self.trainer:.9g} ({self.trainer_bits})"
        )


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one step's trained tokens, or those of its held-out completions."""

    tokens: int
    tokens_different: int
    sequences_different: int
    first: TokenDifference | None
    worst: TokenDifference | None  # with the largest absolute difference
    engine_digest: str
    trainer_digest: str
    raw_digests: tuple[str, str] | None  # engine's and trainer's; None: the trainer has none
    metrics: dict[str, Any]  # parity/* and is/*
    certain: int = 0  # tokens of probability 1, whose logprob is 0 on both sides: only raw logprobs can differ
    raw_different: int = 0  # tokens whose raw logprobs have different bits
    draws: Draws = field(default_factory=Draws)
    faults: tuple[str, ...] = ()  # text: each completion that differs from its request, and how
    step_down: str | None = None  # text: from which rung of the ladder to which, and why; None: no step down
    held_out: bool = False  # of held-out completions, which are not trained

    @property
    def equal(self) -> bool:
        """True if all logprobs are equal, raw ones too. Says nothing about the tokens drawn."""
        return self.tokens_different == 0 and self.raw_different == 0


def compare(
    samples: Sequence[Sample],
    trainer_logprobs: Sequence[np.ndarray],
    trainer_raw_logprobs: Sequence[np.ndarray] | None = None,
) -> Comparison:
    """Compare each sample's logprobs [T] float32 with the trainer's of the same tokens; and the raw ones, if given."""
    engine_logprobs = [sample.completion.logprobs for sample in samples]
    counts = [len(array) for array in engine_logprobs]
    assert counts == [len(array) for array in trainer_logprobs], "the trainer scored other tokens than were sampled"
    mu, pi = _flat(engine_logprobs), _flat(trainer_logprobs)
    different = mu.view(np.int32) != pi.view(np.int32)
    raw_mu = _flat([sample.completion.raw_logprobs for sample in samples])
    raw_pi = raw_mu if trainer_raw_logprobs is None else _flat(trainer_raw_logprobs)
    raw_different = raw_mu.view(np.int32) != raw_pi.view(np.int32)
    sequence = np.repeat(np.arange(len(counts)), counts)
    first = worst = None
    if different.any() or raw_different.any():
        raw = not different.any()
        ours, theirs, where = (raw_mu, raw_pi, raw_different) if raw else (mu, pi, different)
        starts = np.cumsum([0, *counts])
        with np.errstate(invalid="ignore"):  # of two infinities
            gap = np.where(where, np.abs(theirs.astype(np.float64) - ours), -1.0)
        indices = (int(where.argmax()), int(np.nan_to_num(gap, nan=np.inf).argmax()))
        first, worst = (_token(samples, sequence, starts, ours, theirs, at, raw) for at in indices)
    metrics = _metrics(mu.astype(np.float64), pi.astype(np.float64), different, sequence, counts) if len(mu) else {}
    if len(mu) and trainer_raw_logprobs is not None:
        metrics["parity/raw_different"] = float(raw_different.mean())
    return Comparison(
        tokens=len(mu),
        tokens_different=int(different.sum()),
        sequences_different=len(np.unique(sequence[different | raw_different])),
        first=first,
        worst=worst,
        engine_digest=bits_digest([mu]),
        trainer_digest=bits_digest([pi]),
        raw_digests=None if trainer_raw_logprobs is None else (bits_digest([raw_mu]), bits_digest([raw_pi])),
        metrics=metrics,
        certain=int((pi == 0).sum()),
        raw_different=int(raw_different.sum()),
    )


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *arrays]).astype(np.float32, copy=False)


def _token(
    samples: Sequence[Sample],
    sequence: np.ndarray,
    starts: np.ndarray,
    mu: np.ndarray,
    pi: np.ndarray,
    at: int,
    raw: bool,
) -> TokenDifference:
    sample = samples[sequence[at]]
    index = int(at - starts[sequence[at]])
    offset = sample.completion.written[index]
    return TokenDifference(
        uid=sample.uid,
        index=index,
        position=len(sample.completion.prompt_ids) + offset,
        token_id=int(sample.completion.token_ids[offset]),
        engine=float(mu[at]),
        engine_bits=f"0x{mu.view(np.uint32)[at]:08x}",
        trainer=float(pi[at]),
        trainer_bits=f"0x{pi.view(np.uint32)[at]:08x}",
        raw=raw,
    )


def _metrics(
    mu: np.ndarray, pi: np.ndarray, different: np.ndarray, sequence: np.ndarray, counts: Sequence[int]
) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # a broken pair may hold infinities, which belong in the metrics
        d = pi - mu
        r = np.exp(d)
        gap = np.abs(d)
        sizes = np.asarray(counts)
        means = (np.bincount(sequence, -d, len(sizes)) / sizes)[sizes > 0]  # mean mu − mean pi of each sequence
        return {
            "parity/tokens": len(mu),
            "parity/tokens_different": float(different.mean()),
            "parity/tokens_certain": float((pi == 0).mean()),
            "parity/logprob_diff_max": float(gap.max()),
            "parity/logprob_diff_mean": float(gap.mean()),
            "parity/logprob_diff_p999": float(np.quantile(gap, 0.999)),
            "parity/k1": 0.0 - float(d.mean()),
            "parity/k3": float((np.expm1(d) - d).mean()),
            "parity/chi2": float((r * r).mean() - 1.0),
            "parity/ppl_ratio": float(np.exp(means).mean()),
            "is/ratio_mean": float(r.mean()),
            "is/ratio_max": float(r.max()),
            "is/ratio_min": float(r.min()),
            "is/ess": float(r.sum() ** 2 / (len(r) * (r * r).sum())),
            "is/log_ratio_histogram": Histogram(LOG_RATIO_EDGES, tuple(_counts(d))).value,
        }


def _counts(d: np.ndarray) -> list[int]:
    """Tokens in each bin of `LOG_RATIO_EDGES`; NaN is in none."""
    bins = np.searchsorted(LOG_RATIO_EDGES, d[~np.isnan(d)], side="right")
    return np.bincount(bins, minlength=len(LOG_RATIO_EDGES) + 1).tolist()


class ParityMonitor:
    """Compares each step, writes the certificate, and decides by `parity.mode` if the run may go on."""

    def __init__(
        self,
        config: ParityConfig,
        certificate: Certificate,
        engine_fingerprint: Mapping[str, Any],
        trainer_fingerprint: Mapping[str, Any],
    ) -> None:
        """Raises `ConfigError` if the fingerprints differ under `parity.mode=require`."""
        self.config = config
        self.certificate = certificate
        self.fingerprints = {
            "engine": content_digest(engine_fingerprint),
            "trainer": content_digest(trainer_fingerprint),
        }
        if config.mode is ParityMode.require:
            refuse_different_fingerprints(engine_fingerprint, trainer_fingerprint)

    @property
    def rung(self) -> str:
        """The run's rung on the ladder: one of `RUNGS`."""
        return self.certificate.rung

    @property
    def replays(self) -> bool:
        """True if the trainer is to route tokens to the engine's experts: by configuration, or since rung `replay`."""
        return self.config.replay or self.certificate.replayed

    def compare(
        self,
        step: int,
        version: int,
        samples: Sequence[Sample],
        trainer: Recomputed,
        routing: Mapping[str, float] | None = None,
        rest: Sequence[Sample] = (),
    ) -> Comparison:
        """Compare, step down the ladder if need be, and begin the certificate's line. `objection` says if the run must
        stop.

        `routing`: metrics of expert choices, engine's against trainer's. `rest`: samples that are not trained, whose
        faults count as well.
        """
        comparison = self._compared(samples, trainer, routing or {}, rest)
        down = self._step_down(comparison)
        if down is not None:
            rung, reason = down
            comparison = replace(comparison, step_down=f"stepped down from {self.rung} to {rung}: {reason}")
            self.certificate.step_down(rung)
        self.certificate.begin(
            {**self._line(step, version, comparison), **({} if down is None else {"reason": down[1]})}
        )
        return comparison

    def compare_held_out(
        self, version: int, samples: Sequence[Sample], trainer: Recomputed, rest: Sequence[Sample]
    ) -> Comparison:
        """Compare held-out completions, as `compare` does, after step `version`. The ladder stays as it is; the
        certificate gets a line, in place of the step's, only where `objection` stops the run."""
        comparison = replace(self._compared(samples, trainer, {}, rest), held_out=True)
        if self.objection(comparison) is not None:
            self.certificate.begin({**self._line(version, version, comparison), "held_out": True})
        return comparison

    def _compared(
        self, samples: Sequence[Sample], trainer: Recomputed, routing: Mapping[str, float], rest: Sequence[Sample]
    ) -> Comparison:
        raw = trainer.raw_logprobs
        engine_raw = _flat([sample.completion.raw_logprobs for sample in samples])
        if self.config.mode is not ParityMode.require and np.isnan(engine_raw).all():
            raw = None  # stock engines may report none
        comparison = compare(samples, trainer.logprobs, raw)
        draws = check_draws(samples, trainer.redrawn)
        faults = tuple(f"{each.uid}: {each.fault}" for each in (*samples, *rest) if each.fault is not None)
        metrics = {**comparison.metrics, **routing, **draws.metrics}
        return replace(comparison, metrics=metrics, draws=draws, faults=faults)

    def _line(self, step: int, version: int, comparison: Comparison) -> dict[str, Any]:
        """The certificate's line of a comparison."""
        return {
            "step": step,
            "version": version,
            "tokens": comparison.tokens,
            "tokens_different": comparison.tokens_different,
            "engine": comparison.engine_digest,
            "trainer": comparison.trainer_digest,
            "certain": comparison.certain,
            **_raw(comparison),
            "redrawn": comparison.draws.tokens,
            "redrawn_different": comparison.draws.different,
            "faults": len(comparison.faults),
            "fingerprints": self.fingerprints,
        }

    def _step_down(self, comparison: Comparison) -> tuple[str, str] | None:
        """The next rung and the reason, if the present one does not hold."""
        if self.config.mode is not ParityMode.fallback or comparison.equal or self.rung == RUNGS[-1]:
            return None
        flips, difference = comparison.metrics.get("parity/router_different"), describe(comparison)
        if self.rung == "bitwise" and flips is not None:  # even if it is 0 in this step
            return "replay", f"{difference}; {flips:.2%} of expert choices differ: the trainer takes the engine's"
        return "correction", difference if flips is None else f"with the engine's experts too, {difference}"

    def objection(self, comparison: Comparison) -> str | None:
        """The reason why the run must stop; None if it may go on."""
        if self.config.mode is ParityMode.observe:
            return None
        if comparison.faults:
            count = f"{len(comparison.faults)} completions are not what the engine was asked for"
            return f"{count}. First, sequence {comparison.faults[0]}"
        if comparison.equal:  # with equal logprobs, rounding cannot explain another token
            return None if comparison.draws.first is None else comparison.draws.describe()
        if self.config.mode is ParityMode.require:
            return describe(comparison)
        k3 = comparison.metrics["parity/k3"]
        if k3 <= self.config.max_k3:
            return None
        return (
            f"train-inference KL (k3) is {k3:.3g}, above parity.max_k3={self.config.max_k3:g}, so the last rung of "
            f"parity.mode=fallback is to stop; {describe(comparison)}"
        )


def describe(comparison: Comparison) -> str:
    """The number of tokens that differ and the first of them, for messages."""
    count, what = comparison.tokens_different, "other bits"
    if not count:
        count, what = comparison.raw_different, "other raw bits (at temperature 1, nothing truncated)"
    kind = "held-out" if comparison.held_out else "trained"
    return (
        f"{count} of {comparison.tokens} {kind} tokens, in {comparison.sequences_different} sequences, have {what} in "
        f"the trainer than in the engine. First: {comparison.first}"
    )


def _raw(comparison: Comparison) -> dict[str, Any]:
    """Keys of the certificate's line about raw logprobs."""
    if comparison.raw_digests is None:
        return {}
    engine, trainer = comparison.raw_digests
    return {"raw_different": comparison.raw_different, "raw": {"engine": engine, "trainer": trainer}}


@dataclass(frozen=True)
class Finding:
    """The first operation in which engine and trainer differ: `rlloop.parity.first_difference.diagnose`."""

    text: str  # one line
    details: dict[str, Any]  # JSON values for the report
    order: tuple[float, int] = (0, 0)  # of ranks' findings the lowest is computed first: by stages, then operations


def report(step: int, objection: str, comparison: Comparison, finding: Finding | None) -> dict[str, Any]:
    """Content of `parity_report.json`, to which `rlloop.loop.recorder` adds who made the completions."""
    return {
        "step": step,
        "objection": objection,
        "tokens": comparison.tokens,
        "tokens_different": comparison.tokens_different,
        "sequences_different": comparison.sequences_different,
        "raw_different": comparison.raw_different,
        "first": comparison.first and asdict(comparison.first),
        "worst": comparison.worst and asdict(comparison.worst),
        "redrawn": asdict(comparison.draws),
        "faults": comparison.faults,
        "metrics": comparison.metrics,
        "doctor": finding and {"text": finding.text, **finding.details},
    }


def refuse_different_fingerprints(engine: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """Raises `ConfigError` that lists every key in which the two differ."""
    differ = fingerprint_differences(engine, trainer)
    if differ:
        listed = "\n".join(f"  {key}: engine {mine!r}, trainer {theirs!r}" for key, (mine, theirs) in differ.items())
        raise ConfigError(
            f"engine and trainer would not compute the same numbers:\n{listed}\n"
            "parity.mode=require refuses this; make them equal, or set parity.mode=observe to measure the difference"
        )


def fingerprint_differences(
    engine: Mapping[str, Any], trainer: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (engine's, trainer's) of every key that differs; None for an absent one."""
    differ: dict[str, tuple[Any, Any]] = {}
    for key in sorted(engine.keys() | trainer.keys()):
        mine, theirs = engine.get(key), trainer.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            differ |= fingerprint_differences(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            differ[f"{prefix}{key}"] = (mine, theirs)
    return differ
