"""The loop: sync -> rollout -> reward -> advantage -> update -> record.

Step k (from 1) samples with the weights of version k − 1 and makes version k. Everything random is a function of
(run seed, what for, step, prompt, place in the group), so a resumed run, another launch mode or another number of
engines repeats it. The loop knows protocols only: neither torch, ray, vllm nor a concrete engine.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.config.run import Anchor, ParityMode, RunConfig
from rlloop.errors import ParityError, RlloopError, RunError
from rlloop.loop.environments import player_for
from rlloop.loop.step_data import (
    completion_seed,
    minibatches,
    new_sample,
    reward_metrics,
    rollout_metrics,
    training_sampling,
)
from rlloop.metrics import Mean, Reduction, merge, values
from rlloop.parity.asked import AskedEngine, Vocabulary
from rlloop.parity.monitor import Comparison, Finding, ParityMonitor, TokenDifference, report
from rlloop.parity.regions import by_region
from rlloop.protocols import Checkpoints, Engine, Observer, Scorer, Stateful, Task, Trainer, WeightSync
from rlloop.runs.folder import REPORT, RunFolder
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Recomputed, RewardResult, Sample, SamplingParams

# (rewards, groups, lengths of the longest turns, KL to the reference or None) -> (advantages, keep), [n] each
Advantages = Callable[..., tuple[Sequence[float], Sequence[bool]]]
Failed = tuple[Sample, str]  # a sample that is not trained, and why


@dataclass(frozen=True)
class Parts:
    """What the loop drives. `launch` builds it; tests use the fakes of `rlloop.testing`."""

    task: Task
    engine: Engine
    eval_engine: Engine  # the policy that is reported; `engine` itself, unless that one's numerics differ on purpose
    trainer: Trainer
    sync: WeightSync
    scorer: Scorer
    advantages: Advantages
    loss: Callable[..., Any]
    checkpoints: Checkpoints
    vocabulary: Vocabulary
    source: Path | None = None  # the folder that the first weights come from
    doctor: Callable[[Sample, TokenDifference], Finding | None] | None = None
    stateful: tuple[Stateful, ...] = ()  # parts beside the trainer whose state a checkpoint must hold
    history: Any = None  # with fleet.max_version_lag: logprobs under past versions (rlloop.loop.schedule.History)
    measured: Callable[[], Mapping[str, float]] = dict  # what the parts measured by themselves since the last step


class Loop:
    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        folder: RunFolder,
        monitor: ParityMonitor,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config, self.parts, self.folder, self.monitor, self.observers = config, parts, folder, monitor, observers
        scoring = config.scoring
        self.player = player_for(parts.task, timeout=scoring.timeout, concurrency=scoring.concurrency)
        self._published: tuple[int, dict[str, Any]] | None = None  # version, metrics
        self._clock: dict[str, float] = {}
        self._batches = 0  # of prompts, taken from the task: one a step, or more under dynamic sampling

    def run(self, start: int, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Take the steps after `start` (0: a new run). Returns the last step taken, with a checkpoint behind it."""
        last, every = self.config.trainer.num_steps, self.config.checkpoint.every
        if start == 0:
            self._record(0, self.evaluate(version=0))
        for step in range(start + 1, last + 1):
            began = time.perf_counter()
            metrics = self.step(step)
            if step == last or _due(step, self.config.eval.every):
                metrics |= self.evaluate(version=step)
            self._record(step, {**metrics, "time/step": time.perf_counter() - began})
            stopping = should_stop()
            if step == last or stopping or _due(step, every):
                self.save(step)
            if stopping:
                return step
        return max(start, last)

    def step(self, step: int) -> dict[str, Any]:
        """One update of the policy; returns its metrics."""
        version = step - 1
        with self._timed("sync"):
            metrics = dict(self._sync(version))
        accepted, trained = list[Sample](), list[Sample]()
        rejected, dropped = list[Failed](), list[Failed]()
        for first in range(0, self.config.max_prompts, self.config.rollout.num_prompts):
            with self._timed("rollout"):
                samples = self.rollout(step, version, first)
            self.check_asked(step, version, samples)
            with self._timed("reward"):
                good, bad = self.judge(samples)
            accepted, rejected = accepted + good, rejected + bad
            with self._timed("advantage"):
                trained, dropped, divergence = self.weigh(accepted)
                metrics |= divergence
            if len({sample.group for sample in trained}) >= self.config.rollout.num_prompts:
                break
        samples = accepted + [sample for sample, _ in rejected]
        with self._timed("update"):
            metrics |= self.update(step, version, trained, rejected + dropped)
        return {
            **metrics,
            **rollout_metrics(samples, version),
            **reward_metrics(accepted),
            **self._speed(samples, trained),
            **self.parts.measured(),
            "ledger/sampled": len(samples),
            "ledger/accepted": len(accepted),
            "ledger/rejected": len(rejected),
            "ledger/dropped": len(dropped),
            "ledger/trained": len(trained),
        }

    def rollout(self, step: int, version: int, first: int = 0) -> list[Sample]:
        """`num_prompts` x `group_size` completions, the prompts numbered from `first`; rewards are still to come."""
        config, seed = self.config.rollout, self.config.seed
        self._batches += 1
        examples = self.parts.task.train_examples(self._batches, config.num_prompts)
        assert len(examples) == config.num_prompts, f"the task gave {len(examples)} of {config.num_prompts} prompts"
        places = [(first + p, g) for p in range(config.num_prompts) for g in range(config.group_size)]
        engine = AskedEngine(self.parts.engine, self.parts.vocabulary)
        played = self.player.play(
            engine,
            [examples[p - first] for p, _ in places],
            [training_sampling(self.config, step, p, g) for p, g in places],
        )
        samples = []
        for (p, g), made in zip(places, played, strict=True):
            sampled, oldest = made.completion.policy_version, max(0, version - config.drift.stale_steps)
            fault = engine.faults.get(completion_seed(seed, "train", step, p, g))
            if not oldest <= sampled <= version:
                fault = f"its weights are of version {sampled}, and it was asked for of version {version}"
            samples.append(dataclasses.replace(new_sample(f"{step}/{p}/{g}", made, group=p), fault=fault))
        return samples

    def check_asked(self, step: int, version: int, samples: Sequence[Sample]) -> None:
        """Stops at completions that are not what was asked for; under `observe` they are rejected and counted."""
        if self.config.parity.mode is not ParityMode.observe and any(sample.fault for sample in samples):
            rest = [(sample, f"rejected: {sample.fault or 'nothing of this step is trained'}") for sample in samples]
            self._compare(step, version, [], Recomputed([]), rest)  # raises

    def judge(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Failed]]:
        """Score every sample. One whose reward failed is rejected with the reason, never a silent 0."""
        accepted: list[Sample] = []
        rejected: list[Failed] = []
        for sample, outcome in zip(samples, self._score(samples), strict=True):
            if isinstance(outcome, RewardResult):
                accepted.append(dataclasses.replace(sample, result=outcome))
            else:
                rejected.append((sample, f"rejected: {outcome}"))
        if rejected:
            self.folder.log(
                f"{len(rejected)} of {len(samples)} samples failed, first {rejected[0][0].uid}: {rejected[0][1]}"
            )
        if not accepted:
            raise RewardsFailed(f"every one of {len(samples)} samples failed; first {rejected[0][1]}")
        return accepted, rejected

    def _score(self, samples: Sequence[Sample]) -> list[RewardResult | str]:
        """The result of each, or why it has none."""
        whole = [sample for sample in samples if not (sample.fault or sample.broken)]
        outcomes = iter(self.parts.scorer.score([(made.example.prompt, made.text, made.example) for made in whole]))
        scored: list[RewardResult | str] = []
        for sample in samples:
            outcome = sample.fault or sample.broken or next(outcomes)
            known = isinstance(outcome, RewardResult | str)
            scored.append(outcome if known else f"reward {outcome.kind}: {outcome.message}")
        return scored

    def weigh(self, accepted: Sequence[Sample]) -> tuple[list[Sample], list[Failed], dict[str, float]]:
        """Advantages over all accepted samples, then without those that cannot teach anything or are too many."""
        algorithm = self.config.algorithm
        kl = self.parts.trainer.reference_kl(accepted, algorithm.reward_kl) if algorithm.reward_kl_coef else None
        advantages, keep = self.parts.advantages(
            [sample.result.reward for sample in accepted],
            [sample.group for sample in accepted],
            [sample.completion.longest_turn for sample in accepted],
            kl,
        )
        weighed = [
            dataclasses.replace(sample, advantage=float(advantage))
            for sample, advantage in zip(accepted, advantages, strict=True)
        ]
        groups = list(dict.fromkeys(sample.group for sample, kept in zip(weighed, keep, strict=True) if kept))
        full = set(groups[: self.config.rollout.num_prompts])
        trained = [sample for sample, kept in zip(weighed, keep, strict=True) if kept and sample.group in full]
        dropped = [
            (sample, "dropped: the batch is full" if kept else "dropped: no signal in its group")
            for sample, kept in zip(weighed, keep, strict=True)
            if not (kept and sample.group in full)
        ]
        return trained, dropped, {} if kl is None else {"reward/kl_ref": float(np.mean(kl))}

    def update(self, step: int, version: int, trained: Sequence[Sample], rest: Sequence[Failed]) -> dict[str, Any]:
        """Compare every trained token, record, and only then move the weights.

        One minibatch: the comparison is with the logprobs that the loss itself was computed from. Several: with a
        separate forward before the first of them, which then anchors their ratios.
        """
        if not trained:
            return self._compare(step, version, [], Recomputed([]), rest)
        trainer, count = self.parts.trainer, self.config.trainer.num_minibatches
        trainer.replay_experts(self.monitor.replays)
        merged: dict[str, Reduction] = {}
        metrics: dict[str, Any] = {}
        before = self.recompute(trained)
        if before is not None:
            metrics = self._compare(step, version, trained, before, rest)
        anchors = self.anchors(trained, before)
        for chosen in minibatches(trained, count):
            batch = [trained[i] for i in chosen]
            old = None if anchors is None else [anchors[i] for i in chosen]
            result = trainer.forward_backward(batch, self.parts.loss, old_logprobs=old)
            if before is None:
                metrics = self._compare(step, version, trained, result.recomputed, rest)
            stepped = {name: Mean(value, 1) for name, value in trainer.optim_step().items()}
            merged = merge([merged, result.metrics, stepped])
        return {**metrics, **values(merged)}

    def recompute(self, trained: Sequence[Sample]) -> Recomputed | None:
        """The trainer's side, to compare before anything moves. None: the update's own forward will have it."""
        return None if self.config.trainer.num_minibatches == 1 else self.parts.trainer.recompute(trained)

    def anchors(self, trained: Sequence[Sample], before: Recomputed | None) -> Sequence[np.ndarray] | None:
        """What the policy ratios divide by. None: the update's own forward, so that they start at 1."""
        at_rollout = self.config.algorithm.anchor is Anchor.rollout
        if at_rollout:
            return [sample.completion.logprobs for sample in trained]
        return None if before is None else before.logprobs

    def evaluate(self, version: int) -> dict[str, Any]:
        """`eval/*` of held-out problems under the weights of `version`. The same problems and seeds at every step.

        Where the engine that samples differs on purpose from the policy that is reported, it is evaluated too.
        """
        self._sync(version)
        with self._timed("eval"):
            results, failed = self._attempt_held_out(self.parts.eval_engine)
            metrics = {
                "eval/solved": float(np.mean([result.solved for result in results])),
                "eval/reward": float(np.mean([result.reward for result in results])),
                "eval/draws": len(results),
            }
            if failed:
                metrics["eval/rejected"] = len(failed)
            if self.parts.engine is not self.parts.eval_engine:
                results, _ = self._attempt_held_out(self.parts.engine)
                metrics["eval/engine_solved"] = float(np.mean([result.solved for result in results]))
                metrics["eval/engine_reward"] = float(np.mean([result.reward for result in results]))
        return metrics

    def _attempt_held_out(self, engine: Engine) -> tuple[list[RewardResult], list[str]]:
        """Results of `eval.num_draws` held-out completions of `engine`, and why others have none."""
        config = self.config.eval
        examples = self.parts.task.eval_examples(config.num_draws)
        sampling = [
            SamplingParams(
                max_tokens=self.config.rollout.max_tokens,
                min_tokens=self.config.rollout.min_tokens,
                temperature=config.temperature,
                seed=completion_seed(self.config.seed, "eval", 0, i, 0),
            )
            for i in range(len(examples))
        ]
        played = self.player.play(engine, examples, sampling)
        outcomes = self._score([new_sample(f"eval/{i}", made, group=i) for i, made in enumerate(played)])
        results = [outcome for outcome in outcomes if isinstance(outcome, RewardResult)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if not results:
            raise RewardsFailed(f"every one of {len(failed)} held-out samples failed; first: {failed[0]}")
        return results, failed

    def save(self, step: int) -> None:
        """A checkpoint, with the records before it safely on the disk."""
        self.folder.metrics.sync()
        self.folder.parity.sync()
        state = {"step": step, "batches": self._batches, "certificate": self.monitor.certificate.previous}

        def write_state(folder: Path) -> None:
            (folder / "loop.json").write_text(json.dumps(state) + "\n")

        writers = [self.parts.trainer.save, *(part.save for part in self.parts.stateful), write_state]
        self.parts.checkpoints.save(step, writers)
        self.monitor.certificate.attest(step, self.parts.checkpoints.digests(step))

    def restore(self) -> int:
        """Load the newest whole checkpoint and set later records aside. Returns its step; 0: start anew."""
        checkpoint = self.parts.checkpoints.latest()
        if checkpoint is None:
            self.folder.rewind(None)
            self.monitor.certificate.reload()
            return 0
        for damage in checkpoint.skipped:
            self.folder.log(f"skipped a damaged checkpoint: {damage}")
        self.folder.rewind(checkpoint.step)
        state = json.loads((checkpoint.path / "loop.json").read_text())
        self.monitor.certificate.reload()
        if self.monitor.certificate.previous != state["certificate"]:
            raise RunError(
                f"{self.folder.parity.path} is not the certificate that {checkpoint.path} continues; restore the file "
                "from a copy, or start a new run in another run.dir"
            )
        for part in (self.parts.trainer, *self.parts.stateful):
            part.restore(checkpoint.path)
        self._batches = state["batches"]
        self.monitor.certificate.note(checkpoints=self.parts.checkpoints.digests(checkpoint.step))
        return checkpoint.step

    def _sync(self, version: int) -> dict[str, Any]:
        """Each version once; its metrics belong to the step that it samples, though an evaluation may come first."""
        if self._published is None or self._published[0] != version:
            self._published = version, dict(self.parts.sync.publish(version))
        return self._published[1]

    def _compare(
        self, step: int, version: int, trained: Sequence[Sample], recomputed: Recomputed, rest: Sequence[Failed]
    ) -> dict[str, Any]:
        with self._timed("parity"):
            routing = self.parts.trainer.routing() if trained else {}
            others = [sample for sample, _ in rest]
            comparison = self.monitor.compare(step, version, trained, recomputed, routing, others)
        if comparison.step_down is not None:
            self.folder.log(f"step {step}: {comparison.step_down}")
        with self._timed("record"):
            samples = [*trained, *others]
            outcomes = ["trained"] * len(trained) + [why for _, why in rest]
            scored = [*recomputed.logprobs, *[None] * len(rest)]
            rows = rollout_rows(samples, outcomes, scored, self.monitor.fingerprints["engine"])
            self.monitor.certificate.note(rollouts=self.folder.write_rollouts(step, rows))
        objection = self.monitor.objection(comparison)
        if objection is not None:
            self.monitor.certificate.seal()
            raise self._parity_error(step, comparison, objection, trained)
        return {**comparison.metrics, **by_region(trained, recomputed.logprobs)}

    def _parity_error(
        self, step: int, comparison: Comparison, objection: str, trained: Sequence[Sample]
    ) -> ParityError:
        """Writes the report, with the doctor's finding where there is a doctor."""
        first, finding = comparison.first, None
        if first is not None and self.parts.doctor is not None:
            finding = self.parts.doctor(next(sample for sample in trained if sample.uid == first.uid), first)
        file = self.folder.write_json(REPORT, report(step, objection, comparison, finding))
        lines = [f"step {step}: {objection}", *([finding.text] if finding else []), f"The report: {file}"]
        return ParityError("\n".join(lines))

    def _record(self, step: int, metrics: Mapping[str, Any]) -> None:
        whole = {**metrics, **{f"time/{phase}": seconds for phase, seconds in self._clock.items()}}
        self._clock = {}
        self.monitor.certificate.cover(self.folder.metrics.append({"step": step, **dict(sorted(whole.items()))}))
        if step > 0:
            self.folder.confirm()
            self.monitor.certificate.seal()
        for observer in self.observers:
            observer.log(step, whole)

    def _speed(self, samples: Sequence[Sample], trained: Sequence[Sample]) -> dict[str, float]:
        made = sum(len(sample.completion.logprobs) for sample in samples)
        forward = sum(len(sample.completion.prompt_ids) + len(sample.completion.token_ids) for sample in trained)
        return {
            "perf/rollout_tokens_per_s": made / self._clock["rollout"],
            "perf/trainer_tokens_per_s": forward / self._clock["update"],
        }

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """A second counts for the innermost phase that it is spent in."""
        began, inside = time.perf_counter(), sum(self._clock.values())
        yield
        inner = sum(self._clock.values()) - inside
        self._clock[phase] = self._clock.get(phase, 0.0) + time.perf_counter() - began - inner


class RewardsFailed(RlloopError):
    """No sample of a batch could be judged: there is nothing to learn from."""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
