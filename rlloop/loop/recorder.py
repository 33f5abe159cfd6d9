"""Records of a step: the comparison of engine and trainer, rollouts, certificate, metrics, and seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rlloop.errors import ParityError
from rlloop.loop.step_data import Untrained
from rlloop.parity.monitor import Comparison, Finding, ParityMonitor, TokenDifference, report
from rlloop.parity.regions import by_region
from rlloop.parity.token_types import PromptComparison
from rlloop.protocols import Observer, SampleObserver
from rlloop.runs.folder import REPORT, RunFolder
from rlloop.runs.images import ImageStore
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Recomputed, Sample

HELD_OUT = ("tokens", "tokens_different", "raw_different", "redrawn", "redrawn_different", "k3")


class Recorder:
    """Compares and records. Records written before an error or power failure remain as evidence of the step."""

    def __init__(
        self,
        folder: RunFolder,
        monitor: ParityMonitor,
        observers: Sequence[Observer],
        *,
        routing: Callable[[], Mapping[str, float]],
        doctor: Callable[[Sample, TokenDifference], Finding | None] | None,
        machine: Callable[[], Mapping[str, float]] = dict,
        mark: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`routing`: how the trainer's last forward chose experts (`Trainer.routing`). `machine`: its use now, which
        every record has. `mark`: entered in each phase, by its name."""
        self.folder, self.monitor, self.observers = folder, monitor, observers
        self._routing, self._doctor, self._machine, self._mark = routing, doctor, machine, mark
        self._images = ImageStore(folder.path)
        self._seconds: dict[str, float] = {}  # by phase, since the last record

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the seconds of a phase as `time/PHASE`; nested phases count only for the innermost one."""
        began, nested = time.perf_counter(), sum(self._seconds.values())
        with self._mark(phase):
            yield
        inner = sum(self._seconds.values()) - nested
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began - inner

    def compare(
        self,
        step: int,
        version: int,
        trained: Sequence[Sample],
        recomputed: Recomputed,
        untrained: Sequence[Untrained],
        prompt: PromptComparison | None = None,
    ) -> dict[str, Any]:
        """Compare every trained token with what the trainer `recomputed` under `version`, and record the rollouts.

        Called right after the trainer's forward. `prompt`: of a prompt that engine and trainer read with other bits,
        which stops the step. Returns `parity/*`. Raises `ParityError`, with the report written, where `parity.mode`
        objects.
        """
        others = [sample for sample, _ in untrained]
        with self.timed("parity"):
            routing = self._routing() if trained else {}
            comparison = self.monitor.compare(step, version, trained, recomputed, routing, others)
        if comparison.step_down is not None:
            self.folder.log(f"step {step}: {comparison.step_down}")
        # The report comes before the completions: those that a resume samples anew are never without it.
        if prompt is not None:
            comparison = replace(comparison, first=prompt.first, metrics=comparison.metrics | prompt.metrics)
        objection = None if prompt is None else prompt.difference
        error = self._parity_error(step, comparison, [*trained, *others], objection)
        with self.timed("record"):
            outcomes = ["trained"] * len(trained) + [why for _, why in untrained]
            scored = [*recomputed.logprobs, *[None] * len(untrained)]
            entropies = recomputed.entropies or ()  # of those that are trained, which stand first
            digest = self.monitor.fingerprints["engine"]
            for sample in (*trained, *others):
                if (asked := sample.completion.model_input) is not None:
                    self._images.keep(asked.images)
            rows = rollout_rows([*trained, *others], outcomes, scored, digest, entropies)
            self.monitor.certificate.note(rollouts=self.folder.write_rollouts(step, rows))
            for observer in self.observers:
                if isinstance(observer, SampleObserver):
                    observer.samples(step, rows)
        if error is not None:
            self.monitor.certificate.seal()
            raise error
        return {**comparison.metrics, **by_region(trained, recomputed.logprobs)}

    def compare_held_out(
        self, version: int, samples: Sequence[Sample], recomputed: Recomputed, faulty: Sequence[Sample]
    ) -> dict[str, float]:
        """Compare held-out completions with what the trainer `recomputed` under `version`, the last step's.

        Returns the part of `parity/*` in `HELD_OUT`, as `eval/*`. Raises `ParityError` as `compare` does; the report
        then has the completions that it names, and those of step 0 are all in a rollout file.
        """
        comparison = self.monitor.compare_held_out(version, samples, recomputed, faulty)
        error = self._parity_error(version, comparison, [*samples, *faulty])
        if error is not None:
            if version == 0:  # later steps have a file, of their own completions
                rows = self._held_out_rows([*samples, *faulty])
                self.monitor.certificate.note(rollouts=self.folder.write_rollouts(0, rows))
            self.monitor.certificate.seal()
            raise error
        metrics = comparison.metrics
        return {f"eval/{name}": metrics[f"parity/{name}"] for name in HELD_OUT if f"parity/{name}" in metrics}

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the step's metrics, seal its line of the certificate, and tell the observers."""
        record = {
            **metrics,
            **self._machine(),
            **{f"time/{phase}": seconds for phase, seconds in self._seconds.items()},
        }
        self._seconds = {}
        self.monitor.certificate.cover(self.folder.metrics.append({"step": step, **dict(sorted(record.items()))}))
        if step > 0:
            self.folder.confirm()
            self.monitor.certificate.seal()
        for observer in self.observers:
            observer.log(step, record)

    def speed(self, sampled: Sequence[Sample], trained: Sequence[Sample]) -> dict[str, float]:
        """Tokens per second of sampling and of the update, in this step so far."""
        written = sum(len(sample.completion.logprobs) for sample in sampled)
        read = sum(len(sample.completion.prompt_ids) + len(sample.completion.token_ids) for sample in trained)
        return {
            "perf/rollout_tokens_per_s": written / self._seconds["rollout"],
            "perf/trainer_tokens_per_s": read / self._seconds["update"],
        }

    def _held_out_rows(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        count, digest = len(samples), self.monitor.fingerprints["engine"]
        return rollout_rows(samples, ["dropped: held out"] * count, [None] * count, digest)

    def _parity_error(
        self, step: int, comparison: Comparison, samples: Sequence[Sample], objection: str | None = None
    ) -> ParityError | None:
        """Write the report, with the diagnosis if available, and return the error; None where the mode allows it.

        `objection`: None: the monitor's.
        """
        objection = objection or self.monitor.objection(comparison)
        if objection is None:
            return None
        first, finding = comparison.first, None
        if first is not None and self._doctor is not None:
            finding = self._doctor(next(sample for sample in samples if sample.uid == first.uid), first)
        if finding is not None and "ranks" in finding.details:
            self.monitor.certificate.note(ranks=finding.details["ranks"])
        uids = {each.uid for each in (first, comparison.worst, comparison.draws.first) if each is not None}
        named = [sample for sample in samples if sample.fault or sample.uid in uids]
        engines = {each.uid: each.completion.origin for each in named if each.completion.origin is not None}
        content = {**report(step, objection, comparison, finding), "engines": engines}
        if comparison.held_out:
            content["completions"] = self._held_out_rows(named)
        file = self.folder.write_json(REPORT, content)
        lines = [f"step {step}: {objection}", *([finding.text] if finding else [])]
        if engines:
            lines.append(f"Sampled by {', '.join(sorted(set(engines.values())))}")
        return ParityError("\n".join([*lines, f"The report: {file}"]))
