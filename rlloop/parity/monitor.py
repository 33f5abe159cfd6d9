"""The live check: what the engine sampled with against what the trainer recomputes, bit by bit, each step.

Notation of docs/metrics.md, for a token: mu = the engine's logprob, pi = the trainer's before the update, d = pi − mu,
r = exp(d). Sums are float64, and k3 is expm1(d) − d, so that a drift of 1e-9 is not lost in a rounding.
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

RUNGS = ("bitwise", "replay", "correction")  # of parity.mode=fallback; under the last one is to stop


@dataclass(frozen=True)
class TokenDifference:
    """One trained token whose two logprobs, or two raw logprobs, have different bits."""

    uid: str  # of the sequence
    index: int  # of the token among those that the policy wrote
    position: int  # of the token in prompt + completion
    token_id: int
    engine: float
    engine_bits: str  # the float32, as hexadecimal
    trainer: float
    trainer_bits: str
    raw: bool = False  # which of the two

    def __str__(self) -> str:
        return (
            f"sequence {self.uid}, token {self.index} of the completion (id {self.token_id}): "
            f"{'raw, ' if self.raw else ''}engine {self.engine:.9g} ({self.engine_bits}), "
            f"trainer {self.trainer:.9g} ({self.trainer_bits})"
        )


@dataclass(frozen=True)
class Comparison:
    """One step's tokens, compared."""

    tokens: int
    tokens_different: int
    sequences_different: int
    first: TokenDifference | None
    worst: TokenDifference | None  # of the largest absolute difference
    engine_digest: str
    trainer_digest: str
    raw_digests: tuple[str, str] | None  # engine's and trainer's; None: the trainer has none
    metrics: dict[str, Any]  # parity/* and is/*
    certain: int = 0  # tokens of probability 1: nothing but their raw logprobs says who computed them
    raw_different: int = 0  # tokens whose raw logprobs have different bits
    draws: Draws = field(default_factory=Draws)
    faults: tuple[str, ...] = ()  # for people: completions that are not what was asked for, and in what
    step_down: str | None = None  # for people: from which rung of the ladder to which, and why; None: it stays

    @property
    def equal(self) -> bool:
        """Whether the numbers are, raw ones too. What was drawn from them is another question."""
        return self.tokens_different == 0 and self.raw_different == 0


def compare(
    samples: Sequence[Sample],
    trainer_logprobs: Sequence[np.ndarray],
    trainer_raw_logprobs: Sequence[np.ndarray] | None = None,
) -> Comparison:
    """Compare each sample's sampled logprobs [T] float32 with the trainer's of the same tokens, and the raw ones."""
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
        places = (int(where.argmax()), int(np.nan_to_num(gap, nan=np.inf).argmax()))
        first, worst = (_token(samples, sequence, starts, ours, theirs, at, raw) for at in places)
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
    place = sample.completion.written[index]
    return TokenDifference(
        uid=sample.uid,
        index=index,
        position=len(sample.completion.prompt_ids) + place,
        token_id=int(sample.completion.token_ids[place]),
        engine=float(mu[at]),
        engine_bits=f"0x{mu.view(np.uint32)[at]:08x}",
        trainer=float(pi[at]),
        trainer_bits=f"0x{pi.view(np.uint32)[at]:08x}",
        raw=raw,
    )


def _metrics(
    mu: np.ndarray, pi: np.ndarray, different: np.ndarray, sequence: np.ndarray, counts: Sequence[int]
) -> dict[str, Any]:
    with np.errstate(
        all="ignore"
    ):  # a collapsed or broken pair may hold infinities; they are to be seen, not warned of
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
    """Of each bin of `LOG_RATIO_EDGES`; what is not a number belongs to none."""
    bins = np.searchsorted(LOG_RATIO_EDGES, d[~np.isnan(d)], side="right")
    return np.bincount(bins, minlength=len(LOG_RATIO_EDGES) + 1).tolist()


class ParityMonitor:
    """Compares each step, writes the certificate, and judges by `parity.mode`."""

    def __init__(
        self,
        config: ParityConfig,
        certificate: Certificate,
        engine_fingerprint: Mapping[str, Any],
        trainer_fingerprint: Mapping[str, Any],
    ) -> None:
        """Raises `ConfigError` where the two fingerprints differ and the mode is `require`."""
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
        """Where the run stands on the ladder: one of `RUNGS`."""
        return self.certificate.rung

    @property
    def replays(self) -> bool:
        """Whether the trainer is to take the engine's experts. Below the rung of that name it still helps."""
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
        """Compare, step down the ladder where that is due, and begin the certificate's line. Whether to go on is
        `objection`'s to say.

        `routing`: the trainer's comparison of choices, beside that of logprobs. `rest`: samples that are not trained,
        which are held against what was asked for, too.
        """
        raw = trainer.raw_logprobs
        told = _flat([sample.completion.raw_logprobs for sample in samples])
        if self.config.mode is not ParityMode.require and np.isnan(told).all():
            raw = None  # stock engines may tell none
        comparison = compare(samples, trainer.logprobs, raw)
        draws = check_draws(samples, trainer.redrawn)
        faults = tuple(f"{each.uid}: {each.fault}" for each in (*samples, *rest) if each.fault is not None)
        metrics = {**comparison.metrics, **(routing or {}), **draws.metrics}
        comparison = replace(comparison, metrics=metrics, draws=draws, faults=faults)
        down = self._step_down(comparison)
        if down is not None:
            rung, reason = down
            comparison = replace(comparison, step_down=f"stepped down from {self.rung} to {rung}: {reason}")
            self.certificate.step_down(rung)
        self.certificate.begin(
            {
                "step": step,
                "version": version,
                "tokens": comparison.tokens,
                "tokens_different": comparison.tokens_different,
                "engine": comparison.engine_digest,
                "trainer": comparison.trainer_digest,
                "certain": comparison.certain,
                **_raw(comparison),
                "redrawn": draws.tokens,
                "redrawn_different": draws.different,
                "faults": len(faults),
                "fingerprints": self.fingerprints,
                **({} if down is None else {"reason": down[1]}),
            }
        )
        return comparison

    def _step_down(self, comparison: Comparison) -> tuple[str, str] | None:
        """The next rung and the reason for it, where the present one does not hold."""
        if self.config.mode is not ParityMode.fallback or comparison.equal or self.rung == RUNGS[-1]:
            return None
        flips, found = comparison.metrics.get("parity/router_different"), describe(comparison)
        if self.rung == "bitwise" and flips is not None:  # also where none differs yet: the next step's may
            return "replay", f"{found}; {flips:.2%} of expert choices differ: the trainer takes the engine's"
        return "correction", found if flips is None else f"with the engine's experts too, {found}"

    def objection(self, comparison: Comparison) -> str | None:
        """Why the run must not go on; None where it may."""
        if self.config.mode is ParityMode.observe:
            return None
        if comparison.faults:
            found = f"{len(comparison.faults)} completions are not what the engine was asked for"
            return f"{found}. First, sequence {comparison.faults[0]}"
        if comparison.equal:  # the same numbers: no arithmetic explains another draw
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
    count, what = comparison.tokens_different, "other bits"
    if not count:
        count, what = comparison.raw_different, "other raw bits (at temperature 1, nothing truncated)"
    return (
        f"{count} of {comparison.tokens} trained tokens, in {comparison.sequences_different} sequences, have {what} in "
        f"the trainer than in the engine. First: {comparison.first}"
    )


def _raw(comparison: Comparison) -> dict[str, Any]:
    """Of a line of the certificate."""
    if comparison.raw_digests is None:
        return {}
    engine, trainer = comparison.raw_digests
    return {"raw_different": comparison.raw_different, "raw": {"engine": engine, "trainer": trainer}}


@dataclass(frozen=True)
class Finding:
    """What the doctor found: the first place where engine and trainer part."""

    text: str  # one line for people
    details: dict[str, Any]  # JSON values for the report


def report(step: int, objection: str, comparison: Comparison, finding: Finding | None) -> dict[str, Any]:
    """What `parity_report.json` holds."""
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
    differ = fingerprint_differences(engine, trainer)
    if differ:
        listed = "\n".join(f"  {key}: engine {mine!r}, trainer {theirs!r}" for key, (mine, theirs) in differ.items())
        raise ConfigError(
            f"engine and trainer would not compute the same numbers:\n{listed}\n"
            "parity.mode=require refuses that; make them equal, or set parity.mode=observe to measure the difference"
        )


def fingerprint_differences(
    engine: Mapping[str, Any], trainer: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (engine's, trainer's), where they are not equal; None stands for absent."""
    differ: dict[str, tuple[Any, Any]] = {}
    for key in sorted(engine.keys() | trainer.keys()):
        mine, theirs = engine.get(key), trainer.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            differ |= fingerprint_differences(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            differ[f"{prefix}{key}"] = (mine, theirs)
    return differ
